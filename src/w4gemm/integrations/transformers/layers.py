"""The linear layers of a model: counted, and quantized."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from w4gemm.api.nn import W4Linear
from w4gemm.api.packed_module import PackedModule
from w4gemm.checkpoints.dense import SKIP, checked_skip, default_format, layers_to_quantize
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations.transformers.dequantize import names_of

Progress = Callable[[int, int, str], None]
"""Called as ``progress(done, total, what)``."""


@dataclass(frozen=True)
class Summary:
    """Which linear layers of a model are quantized."""

    formats: dict[str, int]
    """Number of quantized layers by format."""
    nbytes: int
    """Bytes of all packed weights."""
    dense: tuple[str, ...]
    """Names of the linear layers that stayed dense."""

    @property
    def quantized(self) -> int:
        return sum(self.formats.values())

    def __str__(self) -> str:
        formats = ", ".join(f"{count} x {name}" for name, count in self.formats.items()) or "none"
        dense = f"; dense: {', '.join(self.dense[:3])}{', ...' if len(self.dense) > 3 else ''}" if self.dense else ""
        total = self.quantized + len(self.dense)
        return f"{self.quantized} of {total} linear layers quantized ({formats}, {self.nbytes / 2**20:.1f} MiB){dense}"


def summarize(model: nn.Module) -> Summary:
    """Count the linear layers of a model, by format and dense ones."""
    packed = [m for m in model.modules() if isinstance(m, PackedModule)]
    formats = Counter(str(m.format) for m in packed)
    dense = tuple(name for name, m in model.named_modules() if isinstance(m, nn.Linear))
    return Summary(dict(formats), sum(m.weight.nbytes for m in packed), dense)


def quantize_layers(
    model: nn.Module,
    format: WeightFormat | str | None = None,
    *,
    search: bool = False,
    skip: tuple[str, ...] = SKIP,
    progress: Progress | None = None,
) -> nn.Module:
    """Replace the dense linear layers of a model by 4-bit ones, in place, one at a time. Subclasses of torch.nn.Linear
    with a forward of their own stay dense, because a 4-bit layer would not compute what that does. Forward hooks of
    a layer and its training mode are its successor's. A weight that PyTorch prunes or normalizes before each call is
    quantized as the next call would have it.

    Of a model that reads images or sounds too, the layers of the language model are meant.

    Args:
        format: see :func:`load`.
        search: as for :func:`w4gemm.quantize`.
        skip: last parts of the names of layers that stay dense. Each has to be one of some layer, except "lm_head".
        progress: called as ``progress(layers done, layers, "quantizing")``.

    Returns:
        The model itself.

    Raises:
        TypeError, ValueError: for a model, format or ``skip`` that is none, for a name in ``skip`` that no layer has,
            for a model without a layer to quantize or with PEFT's adapters, and for a weight that is not finite or too
            large, naming its layer; layers before it are in 4 bits then.
    """
    names, skip = names_of(model), checked_skip(skip)
    _refuse_adapters(model)
    one_format = None if format is None else WeightFormat.of(format)
    layers = layers_to_quantize(model, skip)
    if not layers:
        raise ValueError(f"model: wanted one with dense linear layers to quantize, got {summarize(model)}")
    for done, (name, layer) in enumerate(layers.items(), 1):
        _compute_weight(layer)
        try:
            made = W4Linear.from_linear(layer, one_format or default_format(layer.in_features), search)
        except ValueError as e:
            raise ValueError(f"{name}: {e}") from e
        _hand_over(layer, made)
        for place in names[layer]:
            model.set_submodule(place, made)
        if progress is not None:
            progress(done, len(layers), "quantizing")
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # else PyTorch's fused operator reads the weights of its layers
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        from w4gemm.integrations.transformers.quantizer import refuse_to_save_undescribed

        refuse_to_save_undescribed(model)
    return model


def _refuse_adapters(model: nn.Module) -> None:
    """Raise ValueError for a model that PEFT has wrapped: its adapters are linear layers too, and would be frozen."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, tuners.BaseTunerLayer):
            raise ValueError(
                f"model: wanted one without adapters, got PEFT's at {name!r}; quantize first and add adapters then, "
                "or merge them into their layers before (merge_and_unload)"
            )


_WEIGHT_HOOKS = (BasePruningMethod, WeightNorm, SpectralNorm)
"""PyTorch's hooks that compute a layer's weight from other tensors before each call."""


def _compute_weight(layer: nn.Module) -> None:
    """Run these hooks: since the last call the tensors may have changed."""
    with torch.no_grad():
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, _WEIGHT_HOOKS):
                hook(layer, ())


def _hand_over(layer: nn.Module, made: nn.Module) -> None:
    """Give a layer's forward hooks, but those that compute its weight, and its training mode to what takes its
    place."""
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
    made.train(layer.training)
