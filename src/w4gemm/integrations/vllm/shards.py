"""Merged linear layers whose shards have different formats: :class:`VllmShards` makes a layer of vLLM's of each.

vLLM has no such layer: it ends the start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, LinearMethodBase

from w4gemm.integrations.engines.shards import Shards, settings_differ, shard_names
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
    from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override

    if not settings_differ(config, layer, [prefix, *names], get_dynamic_override):
        try:
            return own(layer, prefix)
        except ValueError as e:  # by which vLLM refuses shards that differ, too
            takeover.log().debug("%s: %s", prefix, e)
    return VllmShards(config, names)


class VllmShards(Shards, LinearMethodBase):
    """:class:`Shards` with layers of vLLM's."""

    column_parallel = ColumnParallelLinear

    def division(self, layer: Any) -> dict[str, Any]:
        return {"disable_tp": True} if getattr(layer, "disable_tp", False) else {}

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
