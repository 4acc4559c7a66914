"""A module of a model takes the place of another, by all of its names and with its hooks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from w4gemm.api.experts import W4Experts
from w4gemm.api.packed_module import PackedModule
from w4gemm.core.errors import require_module

_WEIGHT_HOOKS = (BasePruningMethod, WeightNorm, SpectralNorm)
"""PyTorch's hooks that compute a layer's weight from other tensors before each call."""


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return every name of each module inside a model: some have several.

    Raises:
        TypeError: for what is no module, and for a layer alone, which has no place that another could take.
    """
    require_module(model)
    if isinstance(model, (nn.Linear, PackedModule, W4Experts)):
        raise TypeError(
            f"model: wanted a module with layers inside, got a {type(model).__name__} itself; W4Linear.from_linear "
            "makes a quantized one of a layer"
        )
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def compute_weight(layer: nn.Module) -> None:
    """Run the hooks that compute a layer's weight: since the last call the tensors may have changed."""
    with torch.no_grad():
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, _WEIGHT_HOOKS):
                hook(layer, ())


def replace(model: nn.Module, names: list[str], layer: nn.Module, made: nn.Module) -> None:
    """Put a module in the place of another, which has these names, and give it the other's hooks and training mode."""
    hand_over(layer, made)
    for name in names:
        model.set_submodule(name, made)


def hand_over(layer: nn.Module, made: nn.Module) -> None:
    """Give a layer's hooks, but those that compute its weight, and its training mode to what takes its place."""
    for key, pre_hook in layer._forward_pre_hooks.items():
        if isinstance(pre_hook, _WEIGHT_HOOKS):
            continue
        made.register_forward_pre_hook(pre_hook, with_kwargs=key in layer._forward_pre_hooks_with_kwargs)
    for key, hook in layer._forward_hooks.items():
        made.register_forward_hook(
            hook,
            with_kwargs=key in layer._forward_hooks_with_kwargs,
            always_call=key in layer._forward_hooks_always_called,
        )
    for backward_pre_hook in layer._backward_pre_hooks.values():
        made.register_full_backward_pre_hook(backward_pre_hook)
    for backward_hook in layer._backward_hooks.values():
        is_full = layer._is_full_backward_hook
        (made.register_full_backward_hook if is_full else made.register_backward_hook)(backward_hook)
    if hasattr(layer, "_hf_hook"):  # moves x to the layer's GPU, of a model with a device_map
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(made, layer._hf_hook)
    made.train(layer.training)
