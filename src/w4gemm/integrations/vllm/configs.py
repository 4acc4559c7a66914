"""vLLM's quantization configs, whose methods for layers pass through hooks of ours, :func:`add_hook`; and merged linear
layers whose shards have different formats, :class:`VllmShards`.

vLLM asks a model's quantization config for the method of each layer. Subclasses of vLLM's own configs, registered under
vLLM's names, let vLLM make its method, give each hook the method and its layer, and watch what a linear layer loads.
For a merged layer of several formats, at which vLLM ends the start, they make a layer of vLLM's of each shard.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config

from w4gemm.integrations.engines.shards import Shards, settings_differ, shard_names
from w4gemm.integrations.vllm import takeover
from w4gemm.integrations.vllm.linear_kernel import kernels_made, watch

Hook = Callable[[Any, torch.nn.Module], Any]
"""Called with what vLLM made for a layer, which may be None, and the layer; returns the method that the layer gets."""

_hooks: list[Hook] = []


def add_hook(hook: Hook, configs: Iterable[str]) -> None:
    """Have a hook asked for the layers of models whose quantization config has one of these names of vLLM's. It may be
    asked for layers of other configs too."""
    take_configs(configs)
    if hook not in _hooks:
        _hooks.append(hook)


def take_configs(names: Iterable[str]) -> None:
    """Have the layers of models whose quantization config has one of these names of vLLM's watched while they load."""
    for name in names:
        try:
            base = get_quantization_config(name)
        except ValueError:  # this version has no such config
            continue
        if not issubclass(base, _Config):
            register_quantization_config(name)(_config_class(base))


class _Config:
    """Our side of a class of both, before one of vLLM's quantization configs."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        method, kernels = kernels_made(lambda: self._hooked_method(layer, prefix))
        if isinstance(method, LinearMethodBase):
            watch(method, kernels, prefix)
        return method

    def _hooked_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        own = super().get_quant_method  # type: ignore[misc]
        method = _method_of(own, self, layer, prefix)
        if method is not None and (reason := _why_replaced(self, method, layer)):
            return _left_alone(lambda: _hooked(own(layer, prefix), layer), reason)
        return _hooked(method, layer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle finds no class that is made at run time
        return _blank_config, (type(self).__mro__[2],), vars(self)


def _hooked(method: Any, layer: torch.nn.Module) -> Any:
    """Return the method that a layer gets by our hooks."""
    if type(method).__name__ == "CompressedTensorsKVCacheMethod":
        _process_once(method)
    for hook in _hooks:
        method = hook(method, layer)
    return method


def _process_once(method: Any) -> None:
    """Have a method for the scales of an attention layer's cache pass over a layer that has none to process, as vLLM's
    others do. It looks for those that it has deleted, if who has loaded dense numbers has vLLM process all layers once
    more, as verl does."""
    process = method.process_weights_after_loading

    def process_weights_after_loading(layer: torch.nn.Module) -> None:
        if hasattr(layer, "k_scale"):
            process(layer)

    method.process_weights_after_loading = process_weights_after_loading


def _blank_config(base: type) -> Any:
    cls: Any = _config_class(base)
    return cls.__new__(cls)


@functools.cache
def _config_class(base: type) -> type:
    return type(base.__name__, (_Config, base), {"__module__": __name__})


def _why_replaced(config: Any, method: Any, layer: torch.nn.Module) -> str:
    """Return why a layer is left to another program, or the empty string.

    Of a model in fp8 one that has replaced vLLM's method for linear layers brings new weights to all, also to experts
    in 4 bits.
    """
    classes = [type(method), type(getattr(layer, "scheme", None))]
    with contextlib.suppress(ImportError):
        from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod

        classes += [Fp8LinearMethod] if isinstance(config, Fp8Config) else []
    return next(filter(None, map(takeover.why_replaced, classes)), "")


def _left_alone(make: Callable[[], Any], reason: str) -> Any:
    """Return a method that ``make`` makes while nothing is taken over, also when it makes parameters."""
    with takeover.leaving(reason):
        method = make()
    create = method.create_weights

    def create_weights(*args: Any, **kwargs: Any) -> None:
        with takeover.leaving(reason):
            create(*args, **kwargs)

    method.create_weights = create_weights
    return method


# --- merged layers of several formats --------------------------------------------------------------------------------


def _method_of(own: Callable[[torch.nn.Module, str], Any], config: Any, layer: torch.nn.Module, prefix: str) -> Any:
    """Return the method that vLLM makes for a layer, or ours for a merged one of shards that differ.

    Args:
        own: makes vLLM's method.
        config: vLLM's quantization config.
        prefix: name of the layer.
    """
    merged = getattr(config, "packed_modules_mapping", None) or {}
    names = shard_names(merged, prefix) if isinstance(layer, LinearBase) else []
    if not names or takeover.why_not_here():
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
