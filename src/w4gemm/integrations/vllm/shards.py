"""Merged linear layers whose shards have different formats: :class:`ShardsMethod` makes a layer of vLLM's of each.

vLLM merges q, k and v, or gate and up, into one layer with one format. A model of GPTQ's ``dynamic``, of several config
groups, or in part dense, may have another one for each of them, for which vLLM has no layer: it ends the start. Here
each shard gets the method and the kernel that its own name has in the quantization config.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, LinearMethodBase

from w4gemm.integrations.vllm import takeover
from w4gemm.integrations.vllm.linear_kernel import capability

_OF_QKV = {"q": 0, "k": 1, "v": 2}


def method_of(own: Callable[[torch.nn.Module, str], Any], config: Any, layer: torch.nn.Module, prefix: str) -> Any:
    """Return the method that vLLM makes for a layer, or ours for a merged one of shards that differ.

    Args:
        own: makes vLLM's method.
        config: vLLM's quantization config.
        prefix: name of the layer.
    """
    names = _shards(config, prefix) if isinstance(layer, LinearBase) else []
    if not names or takeover.why_not_here(capability()):
        return own(layer, prefix)
    if not _differ(config, layer, [prefix, *names]):
        try:
            return own(layer, prefix)
        except ValueError as e:  # by which vLLM refuses shards that differ, too
            takeover.log().debug("%s: %s", prefix, e)
    return ShardsMethod(config, names)


def _shards(config: Any, prefix: str) -> list[str]:
    """Return the names of the layers that were merged into one of this name; none if it is no such layer."""
    last = prefix.rpartition(".")[2]
    merged = (getattr(config, "packed_modules_mapping", None) or {}).get(last) or ()
    return [prefix.removesuffix(last) + name for name in merged] if len(merged) > 1 else []


def _differ(config: Any, layer: torch.nn.Module, names: list[str]) -> bool:
    """Return whether a config has different settings for a merged layer and its shards, where vLLM takes those of one
    of the names for all."""
    if getattr(config, "dynamic", None):
        from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override

        settings = [get_dynamic_override(config, name) for name in names]
    elif hasattr(config, "get_scheme_dict"):
        settings = [config.get_scheme_dict(layer, name) for name in names[1:]]
    else:
        return False
    return any(each != settings[0] for each in settings)


class ShardsMethod(LinearMethodBase):
    """The method of a merged layer of vLLM's whose shards are layers of their own.

    The layer keeps an empty parameter of each name that a shard has, whose loader gives a tensor to its shard.

    Args:
        config: vLLM's quantization config.
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
        tp = {"disable_tp": True} if getattr(layer, "disable_tp", False) else {}
        gpus = sum(layer.output_sizes) // sum(output_partition_sizes)
        shards = [
            ColumnParallelLinear(
                input_size, n * gpus, False, params_dtype=params_dtype, quant_config=self.config, prefix=name, **tp
            )
            for name, n in zip(self.names, output_partition_sizes, strict=True)
        ]
        layer.w4gemm_shards = torch.nn.ModuleList(shards)
        for name in dict.fromkeys(name for shard in shards for name in shard._parameters if name != "bias"):
            place: Any = torch.nn.Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
            place.weight_loader = _loader(layer, name)
            layer.register_parameter(name, place)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Do nothing: vLLM asks the shards' own methods."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        shards = layer.w4gemm_shards
        sizes = [shard.output_size_per_partition for shard in shards]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        parts = zip(shards, biases, strict=True)
        return torch.cat([shard.quant_method.apply(shard, x, of_shard) for shard, of_shard in parts], -1)


def _loader(layer: Any, name: str) -> Callable[..., Any]:
    """Return a loader that gives tensors of one name to the shards of a layer.

    vLLM's reloading would put a loader of its own around it, and take the empty parameter for loaded after the first
    tensor. It lets those alone that have its own loader's name. The shards are layers that it reloads themselves.
    """

    def load_shard(parameter: torch.Tensor, loaded_weight: torch.Tensor, shard_id: int | str | None = None) -> Any:
        if not isinstance(shard_id, (int, str)):
            raise ValueError(f"{layer.prefix}.{name}: wanted a tensor of each shard, got one of {shard_id}")
        shard = _OF_QKV[shard_id] if isinstance(shard_id, str) else shard_id
        own = getattr(layer.w4gemm_shards[shard], name)
        return own.weight_loader(own, loaded_weight)

    def online_process_loader(*args: Any, **kwargs: Any) -> Any:
        return load_shard(*args, **kwargs)

    online_process_loader.__wrapped__ = load_shard  # type: ignore[attr-defined]
    return online_process_loader
