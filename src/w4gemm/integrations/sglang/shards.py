"""Merged linear layers whose shards have different formats: :class:`SglangShards` makes a layer of SGLang's of each.

SGLang takes the format of the merged name, or of one shard, for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.linear import ColumnParallelLinear, LinearBase
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from w4gemm.integrations.engines.shards import Shards, settings_differ, shard_names
from w4gemm.integrations.sglang.takeover import (
    QUANTIZATION,
    REFUSES_UPDATES,
    SGLANG,
    Hook,
    hook,
    why_not_here,
)

_MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""Shards by the names of merged layers, where a config does not say them."""
_CONFIGS = ("gptq.GPTQConfig", "gptq.GPTQMarlinConfig", "compressed_tensors.compressed_tensors.CompressedTensorsConfig")


def install() -> None:
    """Put hooks around what makes the methods of layers.

    Raises:
        ImportError, AttributeError: if this SGLang has other configs.
    """
    hook(
        [
            Hook(f"{QUANTIZATION}.{config}.get_quant_method", ("self", "layer", "prefix"), method_of)
            for config in _CONFIGS
        ]
    )


def method_of(own: Callable[..., Any], self: Any, layer: torch.nn.Module, prefix: str) -> Any:
    """Return the method that SGLang makes for a layer, or ours for a merged one of shards that differ."""
    merged = {**_MERGED, **(getattr(self, "packed_modules_mapping", None) or {})}
    names = shard_names(merged, prefix) if isinstance(layer, LinearBase) else []
    if not names or SGLANG.asked("merged layers of several formats", why_not_here):
        return own(self, layer, prefix)
    from sglang.srt.layers.quantization.utils import get_dynamic_override

    if not settings_differ(self, layer, [prefix, *names], get_dynamic_override):
        return own(self, layer, prefix)
    return SglangShards(self, names)


class SglangShards(Shards, LinearMethodBase):
    """:class:`Shards` with layers of SGLang's."""

    column_parallel = ColumnParallelLinear

    def division(self, layer: Any) -> dict[str, Any]:
        return {"parallel_group": layer.parallel_group}

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        setattr(layer, REFUSES_UPDATES, f"{' and '.join(self.names)} have different formats (W4GEMM_SGLANG)")
