"""Layers of GGUF files as engines load them: raw blocks in ``qweight``, those of a merged linear layer apart, and their
types beside it. Neighbours of one type become one weight, others several.

An engine's loader cuts rows of blocks for several GPUs without a look at the blocks, so each row is measured here.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import UninitializedParameter

from w4gemm.checkpoints.gguf.blocks import TYPES, BlockNumbers
from w4gemm.checkpoints.gguf.header import type_sizes
from w4gemm.integrations.engines.engine import Engine, layer_product, why_no_kernel
from w4gemm.integrations.engines.formats import PRODUCTS, SCALES, ExpertsFormat, ExpertsSettings, Packers
from w4gemm.integrations.engines.loading import NOTHING_LOADED
from w4gemm.integrations.engines.shards import OF_QKV
from w4gemm.weights.weight import QuantizedWeight

PARAMETERS = ("qweight", "qweight_type")
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
    n, k = layer.qweight.tensor_shape
    tensors = _loaded(layer)
    if (rows := sum(len(blocks) for _, blocks in tensors)) != n:
        raise RuntimeError(f"{name}: {rows} of its {n} output features were loaded, wanted all")
    for type, blocks in tensors:
        _check(type, blocks, k, dtype)
    runs = itertools.groupby(tensors, lambda each: each[0])
    return [_packed(type, [blocks for _, blocks in run], layer.qweight.device) for type, run in runs]


def _loaded(layer: Any) -> list[tuple[_Type, torch.Tensor]]:
    """Return type and rows of blocks, (n, bytes), of what a layer has loaded, in the order of its outputs.

    Raises:
        ValueError: if that is nothing.
    """
    stored, types = layer.qweight, layer.qweight_type
    shards = sorted(stored.shard_id, key=lambda shard: OF_QKV.get(shard, shard))
    if not shards and isinstance(stored, UninitializedParameter):
        raise ValueError(NOTHING_LOADED)
    blocks = [stored.data_container[stored.shard_id_map[shard]] for shard in shards] or [stored.data]
    numbers = [types.shard_weight_type[shard] for shard in shards] or [types.weight_type]
    return list(zip(map(_type, numbers), blocks, strict=True))


def _type(number: int) -> _Type:
    known = type_sizes()
    return _Type(*known[number]) if number in known else _Type(f"type {number}", 0, 0)


def _check(type: _Type, blocks: torch.Tensor, k: int, dtype: torch.dtype) -> None:
    """Raise ValueError if no kernel multiplies x (m, k) of a dtype by rows of blocks, (n, bytes) or (experts, n,
    bytes)."""
    if dtype not in SCALES:
        raise ValueError(f"their activations are {dtype}, wanted float16 or bfloat16")
    if type.name not in _LEGAL:
        raise ValueError(f"they are in {type.name}, wanted one of {', '.join(_LEGAL)}")
    *experts, n, size = blocks.shape
    if k % type.elements or size * type.elements != k * type.bytes:
        raise ValueError(f"their {k} input features on this GPU are not whole blocks of {type.name}")
    product = layer_product(blocks.device, TYPES[type.name].format, n, k, dtype, experts=sum(experts))
    if reason := why_no_kernel(product):
        raise ValueError(reason)


def _packed(type: _Type, parts: list[torch.Tensor], device: torch.device) -> QuantizedWeight:
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    return BlockNumbers(type.name, rows.to(device).view(len(rows), -1, type.bytes)).packed()


@dataclass(frozen=True)
class GGUFExperts(ExpertsFormat):
    """Experts of GGUF: blocks of gates before those of ups in ``w13_qweight``, and ``w2_qweight``, of one type each."""

    def known(self, settings: ExpertsSettings) -> set[str]:
        return {f"{product}_{leaf}" for product in PRODUCTS for leaf in PARAMETERS}

    def parameters(self, settings: ExpertsSettings, with_bias: bool) -> list[str]:
        return [f"{product}_{self.codes}" for product in PRODUCTS]

    def packers(self, layer: Any, settings: ExpertsSettings, engine: Engine) -> Packers:
        moe = layer.moe_config
        columns = {"w13": moe.hidden_dim, "w2": moe.intermediate_size_per_partition}
        types = {product: _type_of_experts(layer, product) for product in PRODUCTS}
        blocks = {product: getattr(layer, f"{product}_{self.codes}").data for product in PRODUCTS}
        for product, type in types.items():
            _check(type, blocks[product], columns[product], moe.in_dtype)
        return {
            product: functools.partial(
                engine.packed, BlockNumbers(type.name, blocks[product].unflatten(-1, (-1, type.bytes))), None
            )
            for product, type in types.items()
        }


def _type_of_experts(layer: Any, product: str) -> _Type:
    """Return the type of a product's blocks.

    Raises:
        RuntimeError: if the engine has loaded a part of them, or gates and ups of two types, which it takes for one.
    """
    types = getattr(layer, f"{product}_qweight_type").shard_weight_type
    shards = ("w1", "w3") if product == "w13" else ("w2",)
    if missing := [shard for shard in shards if shard not in types]:
        raise RuntimeError(f"{layer.layer_name}: {product}_qweight: {missing[0]} was not loaded, wanted all of it")
    first, *others = (_type(types[shard]) for shard in shards)
    if any(other != first for other in others):
        raise RuntimeError(
            f"{layer.layer_name}: gates are in {first.name} and ups in {others[0].name}, wanted one type for both, "
            "as their engine holds them"
        )
    return first
