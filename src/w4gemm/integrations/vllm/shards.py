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

from w4gemm.integrations.engines.shards import Shards, shard_names
from w4gemm.integrations.vllm import takeover
from w4gemm.integrations.vllm.linear_kernel import capability


def method_of(own: Callable[[torch.nn.Module, str], Any], config: Any, layer: torch.nn.Module, prefix: str) -> Any:
    """Return the method that vLLM makes for a layer, or ours for a merged one of shards that differ.

    Args:
        own: makes vLLM's method.
        config: vLLM's quantization config.
        prefix: name of the layer.
    """
    merged = getattr(config, "packed_modules_mapping", None) or {}
    names = shard_names(merged, prefix) if isinstance(layer, LinearBase) else []
    if not names or takeover.why_not_here(capability()):
        return own(layer, prefix)
    if not _differ(config, layer, [prefix, *names]):
        try:
            return own(layer, prefix)
        except ValueError as e:  # by which vLLM refuses shards that differ, too
            takeover.log().debug("%s: %s", prefix, e)
    return ShardsMethod(config, names)


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


class ShardsMethod(Shards, LinearMethodBase):
    """:class:`Shards` with layers of vLLM's."""

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
        tp = {"disable_tp": True} if getattr(layer, "disable_tp", False) else {}
        shards = [
            ColumnParallelLinear(
                input_size, n, False, params_dtype=params_dtype, quant_config=self.config, prefix=name, **tp
            )
            for name, n in zip(self.names, self.output_sizes(layer, output_partition_sizes), strict=True)
        ]
        self.add_shards(layer, shards, params_dtype)

    def loader(self, layer: Any, name: str) -> Callable[..., Any]:
        """Return a loader as :class:`Shards` does, which vLLM's reloading lets alone.

        Reloading would put a loader of its own around it, and take the empty parameter for loaded after the first
        tensor. It lets those alone that have its own loader's name. The shards are layers that it reloads themselves.
        """
        load_shard = super().loader(layer, name)

        def online_process_loader(*args: Any, **kwargs: Any) -> Any:
            return load_shard(*args, **kwargs)

        online_process_loader.__wrapped__ = load_shard  # type: ignore[attr-defined]
        return online_process_loader
