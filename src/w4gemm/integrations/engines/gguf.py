"""Linear layers of GGUF files as engines load them: raw blocks in ``qweight``, those of a merged layer apart, and their
types beside it. Neighbours of one type become one weight, others several.

An engine's loader cuts rows of blocks for several GPUs without a look at the blocks, so each row is measured here.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import UninitializedParameter

from w4gemm.checkpoints.gguf_blocks import TYPES, pack_blocks
from w4gemm.checkpoints.gguf_header import type_sizes
from w4gemm.integrations.engines.engine import layer_product, why_no_kernel
from w4gemm.integrations.engines.formats import SCALES
from w4gemm.integrations.engines.loading import NOTHING_LOADED
from w4gemm.weights.weight import QuantizedWeight

PARAMETERS = ("qweight", "qweight_type")
_SHARDS = {"q": 0, "k": 1, "v": 2}
_LEGAL = [name for name, type in TYPES.items() if not type.format.has_channels]
"""Types of all but NVFP4, whose factor lies in another tensor, which engines do not load."""


class _Type(NamedTuple):
    """One of GGUF's types, whose blocks have so many elements and bytes."""

    name: str
    elements: int
    bytes: int


def gguf_weights(layer: Any, dtype: torch.dtype, name: str) -> list[QuantizedWeight]:
    """Return the packed weights of a layer, whose rows follow one another.

    Args:
        dtype: of the model's activations.
        name: of the layer, for the error.

    Raises:
        ValueError: if the layer stays the engine's.
        RuntimeError: if the engine has loaded a part of the layer.
    """
    if dtype not in SCALES:
        raise ValueError(f"their activations are {dtype}, wanted float16 or bfloat16")
    n, k = layer.qweight.tensor_shape
    tensors = _loaded(layer)
    if (rows := sum(len(blocks) for _, blocks in tensors)) != n:
        raise RuntimeError(f"{name}: {rows} of its {n} output features were loaded, wanted all")
    for type, blocks in tensors:
        if type.name not in _LEGAL:
            raise ValueError(f"they are in {type.name}, wanted one of {', '.join(_LEGAL)}")
        if blocks.shape[1] * type.elements != k * type.bytes:
            raise ValueError(f"their {k} input features on this GPU are not whole blocks of {type.name}")
        format = TYPES[type.name].format
        if reason := why_no_kernel(layer_product(layer.qweight.device, format, len(blocks), k, dtype)):
            raise ValueError(reason)
    runs = itertools.groupby(tensors, lambda each: each[0])
    return [_packed(type, [blocks for _, blocks in run], layer.qweight.device) for type, run in runs]


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


def _packed(type: _Type, parts: list[torch.Tensor], device: torch.device) -> QuantizedWeight:
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    return pack_blocks(type.name, rows.to(device).view(len(rows), -1, type.bytes))
