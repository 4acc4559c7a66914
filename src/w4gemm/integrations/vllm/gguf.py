"""Linear layers and heads of GGUF files: the blocks that vLLM's GGUF plugin loads, packed by w4gemm's own codecs.

That plugin, the package ``vllm_gguf_plugin``, reads the file. A layer's ``qweight`` holds rows of raw blocks, those of
a merged layer apart, and ``qweight_type`` their types. Neighbours of one type become one product, others several.

The plugin's loader cuts rows of blocks for several GPUs without a look at the blocks, so each row is measured here. A
table of token embeddings stays as it is, because its rows are looked up, also where the model has no other head.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import UninitializedParameter
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm_gguf_plugin.quantization import GGUFConfig, GGUFLinearMethod

from w4gemm.checkpoints.gguf_blocks import TYPES, pack_blocks
from w4gemm.checkpoints.gguf_header import type_sizes
from w4gemm.integrations.engines.engine import layer_product, why_no_kernel
from w4gemm.integrations.engines.formats import SCALES
from w4gemm.integrations.engines.loading import NOTHING_LOADED
from w4gemm.integrations.vllm import takeover
from w4gemm.integrations.vllm.linear_kernel import LinearKernel, capability
from w4gemm.weights.weight import QuantizedWeight

_SHARDS = {"q": 0, "k": 1, "v": 2}
_LEGAL = [name for name, type in TYPES.items() if not type.format.has_channels]
"""Types of all but NVFP4, whose factor lies in another tensor, which vLLM does not load."""


def install() -> None:
    """Have the config of vLLM's GGUF plugin give each linear layer and head its method with our kernel."""
    own = GGUFConfig.get_quant_method
    if own.__module__ == __name__:
        return

    def get_quant_method(self: Any, layer: torch.nn.Module, prefix: str) -> Any:
        method = own(self, layer, prefix)
        embedding = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
        if isinstance(method, GGUFLinearMethod) and not embedding:
            reason = takeover.VLLM.asked(GGUFKernel.kind, lambda: takeover.why_not_here(capability()))
            if not reason:
                GGUFKernel(method, prefix)
        return method

    GGUFConfig.get_quant_method = get_quant_method


class GGUFKernel(LinearKernel):
    """x @ w.T + bias of a layer, in the place of the methods of vLLM's that load and multiply."""

    kind = "linear layers of GGUF"

    def __init__(self, method: Any, prefix: str) -> None:
        self.method, self.prefix = method, prefix
        self.own = SimpleNamespace(
            process_weights_after_loading=method.process_weights_after_loading, apply_weights=method.apply
        )
        method.process_weights_after_loading, method.apply = self.process_weights_after_loading, self.apply_weights
        self.expect()

    def model_dtype(self, layer: torch.nn.Module) -> torch.dtype:
        dtype: torch.dtype = self.method.params_dtype
        return dtype

    def weight_names(self, layer: torch.nn.Module) -> list[str]:
        return ["qweight", "qweight_type"]

    def next_kernel(self) -> Any:
        return self.own

    def weights(self, layer: Any) -> list[QuantizedWeight]:
        if (dtype := self.model_dtype(layer)) not in SCALES:
            raise ValueError(f"their activations are {dtype}, wanted float16 or bfloat16")
        n, k = layer.qweight.tensor_shape
        tensors = _loaded(layer)
        if (rows := sum(len(blocks) for _, blocks in tensors)) != n:
            raise RuntimeError(f"{self.prefix}: {rows} of its {n} output features were loaded, wanted all")
        for type, blocks in tensors:
            if type.name not in _LEGAL:
                raise ValueError(f"they are in {type.name}, wanted one of {', '.join(_LEGAL)}")
            if blocks.shape[1] * type.elements != k * type.bytes:
                raise ValueError(f"their {k} input features on this GPU are not whole blocks of {type.name}")
            format = TYPES[type.name].format
            if reason := why_no_kernel(layer_product(blocks.device, format, len(blocks), k, dtype)):
                raise ValueError(reason)
        runs = itertools.groupby(tensors, lambda each: each[0])
        return [_packed(type, [blocks for _, blocks in run]) for type, run in runs]


class _Type(NamedTuple):
    """One of GGUF's types, whose blocks have so many elements and bytes."""

    name: str
    elements: int
    bytes: int


def _loaded(layer: Any) -> list[tuple[_Type, torch.Tensor]]:
    """Return type and rows of blocks, (n, bytes), of what a layer has loaded, in the order of its outputs.

    Raises:
        ValueError: if that is nothing.
    """
    stored, types = layer.qweight, layer.qweight_type
    shards = sorted(stored.shard_id, key=lambda shard: _SHARDS.get(shard, shard))
    if not shards and isinstance(stored, UninitializedParameter):
        raise ValueError(NOTHING_LOADED)
    blocks = [stored.data_container[stored.shard_id_map[shard]] for shard in shards] or [stored.data]
    numbers = [types.shard_weight_type[shard] for shard in shards] or [types.weight_type]
    known = type_sizes()
    kinds = [_Type(*known[number]) if number in known else _Type(f"type {number}", 0, 0) for number in numbers]
    return list(zip(kinds, blocks, strict=True))


def _packed(type: _Type, parts: list[torch.Tensor]) -> QuantizedWeight:
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    return pack_blocks(type.name, rows.view(len(rows), -1, type.bytes))
