"""Merged linear layers whose shards have different formats: :class:`ShardsMethod` makes a layer of SGLang's of each.

SGLang merges q, k and v, or gate and up, into one layer, and takes the format of the merged name, or of one shard, for
all. A model of GPTQ's ``dynamic`` or of several config groups may have another one for each of them. Here each shard
gets the method and the kernel that its own name has in the quantization config.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.linear import ColumnParallelLinear, LinearBase
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from w4gemm.integrations.engines.shards import Shards, shard_names
from w4gemm.integrations.sglang.takeover import (
    QUANTIZATION,
    REFUSES_UPDATES,
    SGLANG,
    Hook,
    capability,
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
    if not names or SGLANG.asked("merged layers of several formats", lambda: why_not_here(capability())):
        return own(self, layer, prefix)
    if not _differ(self, layer, [prefix, *names]):
        return own(self, layer, prefix)
    return ShardsMethod(self, names)


def _differ(config: Any, layer: torch.nn.Module, names: list[str]) -> bool:
    """Return whether a config has different settings for a merged layer and its shards, or for its shards."""
    if hasattr(config, "dynamic"):
        from sglang.srt.layers.quantization.utils import get_dynamic_override

        settings = [get_dynamic_override(config, name) for name in names]
    else:
        settings = [config.get_scheme_dict(layer, name) for name in names[1:]]
    return any(each != settings[0] for each in settings)


class ShardsMethod(Shards, LinearMethodBase):
    """:class:`Shards` with layers of SGLang's."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        shards = [
            ColumnParallelLinear(
                input_size,
                n,
                False,
                params_dtype=params_dtype,
                quant_config=self.config,
                prefix=name,
                parallel_group=layer.parallel_group,
            )
            for name, n in zip(self.names, self.output_sizes(layer, output_partition_sizes), strict=True)
        ]
        self.add_shards(layer, shards, params_dtype)
        setattr(layer, REFUSES_UPDATES, f"{' and '.join(self.names)} have different formats (W4GEMM_SGLANG)")
