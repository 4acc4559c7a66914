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
_OF_QKV = {"q": 0, "k": 1, "v": 2}
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
    names = _shards(self, prefix) if isinstance(layer, LinearBase) else []
    if not names or SGLANG.asked("merged layers of several formats", lambda: why_not_here(capability())):
        return own(self, layer, prefix)
    if not _differ(self, layer, [prefix, *names]):
        return own(self, layer, prefix)
    return ShardsMethod(self, names)


def _shards(config: Any, prefix: str) -> list[str]:
    """Return the names of the layers that were merged into one of this name; none if it is no such layer."""
    last = prefix.rpartition(".")[2]
    merged = {**_MERGED, **(getattr(config, "packed_modules_mapping", None) or {})}.get(last) or ()
    return [prefix.removesuffix(last) + name for name in merged] if len(merged) > 1 else []


def _differ(config: Any, layer: torch.nn.Module, names: list[str]) -> bool:
    """Return whether a config has different settings for a merged layer and its shards, or for its shards."""
    if hasattr(config, "dynamic"):
        from sglang.srt.layers.quantization.utils import get_dynamic_override

        settings = [get_dynamic_override(config, name) for name in names]
    else:
        settings = [config.get_scheme_dict(layer, name) for name in names[1:]]
    return any(each != settings[0] for each in settings)


class ShardsMethod(LinearMethodBase):
    """The method of a merged layer of SGLang's whose shards are layers of their own.

    The layer keeps an empty parameter of each name that a shard has, whose loader gives a tensor to its shard.

    Args:
        config: SGLang's quantization config.
        names: of the shards.
    """

    def __init__(self, config: Any, names: list[str]) -> None:
        self.config, self.names = config, names

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
        replicas = getattr(layer, "num_kv_head_replicas", 1)
        if len(output_partition_sizes) != len(self.names) or replicas > 1:
            raise ValueError(
                f"{' and '.join(self.names)} have different formats, and {len(output_partition_sizes)} parts of which "
                f"{replicas} GPUs have the same; wanted {len(self.names)} that each GPU has alone"
            )
        gpus = sum(layer.output_sizes) // sum(output_partition_sizes)
        shards = [
            ColumnParallelLinear(
                input_size,
                n * gpus,
                False,
                params_dtype=params_dtype,
                quant_config=self.config,
                prefix=name,
                parallel_group=layer.parallel_group,
            )
            for name, n in zip(self.names, output_partition_sizes, strict=True)
        ]
        layer.w4gemm_shards = torch.nn.ModuleList(shards)
        setattr(layer, REFUSES_UPDATES, f"{' and '.join(self.names)} have different formats (W4GEMM_SGLANG)")
        for name in dict.fromkeys(name for shard in shards for name in shard._parameters if name != "bias"):
            place: Any = torch.nn.Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
            place.weight_loader = _loader(layer, self.names, name)
            layer.register_parameter(name, place)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Do nothing: SGLang asks the shards' own methods."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        shards = layer.w4gemm_shards
        sizes = [shard.output_size_per_partition for shard in shards]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        parts = zip(shards, biases, strict=True)
        return torch.cat([shard.quant_method.apply(shard, x, of_shard) for shard, of_shard in parts], -1)


def _loader(layer: Any, names: list[str], name: str) -> Callable[..., Any]:
    """Return a loader that gives tensors of one name to the shards of a layer."""

    def load(parameter: torch.Tensor, loaded_weight: torch.Tensor, shard_id: int | str | None = None) -> Any:
        if not isinstance(shard_id, (int, str)):
            raise ValueError(f"{' and '.join(names)}: wanted a {name} of each, got one of {shard_id}")
        index = _OF_QKV[shard_id] if isinstance(shard_id, str) else shard_id
        own = getattr(layer.w4gemm_shards[index], name, None)
        if own is None:
            raise ValueError(f"{names[index]}.{name}: its format has no such tensor")
        return own.weight_loader(own, loaded_weight)

    return load
