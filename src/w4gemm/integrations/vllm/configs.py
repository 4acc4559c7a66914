"""vLLM's quantization configs, whose methods for layers pass through hooks of ours: :func:`add_hook`.

vLLM asks a model's quantization config for the method of each layer. Subclasses of vLLM's own configs, registered under
vLLM's names, let vLLM make its method, give each hook the method and its layer, and watch what a linear layer loads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config

from w4gemm.integrations.vllm.linear_kernel import kernels_made, watch
from w4gemm.integrations.vllm.shards import method_of

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
        method = method_of(super().get_quant_method, self, layer, prefix)  # type: ignore[misc]
        for hook in _hooks:
            method = hook(method, layer)
        return method

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle finds no class that is made at run time
        return _blank_config, (type(self).__mro__[2],), vars(self)


def _blank_config(base: type) -> Any:
    cls: Any = _config_class(base)
    return cls.__new__(cls)


@functools.cache
def _config_class(base: type) -> type:
    return type(base.__name__, (_Config, base), {"__module__": __name__})
