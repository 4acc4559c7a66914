"""The linear layers of a model: counted, quantized, made dense again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from w4gemm.api.nn import W4Linear
from w4gemm.checkpoints.dense import SKIP, default_format, linear_layers
from w4gemm.core.formats import WeightFormat

Progress = Callable[[int, int, str], None]
"""Called as ``progress(done, total, what)``."""


@dataclass(frozen=True)
class Summary:
    """Which linear layers of a model are in 4 bits."""

    formats: dict[str, int]
    """Number of 4-bit layers by format."""
    nbytes: int
    """Bytes of all packed weights."""
    dense: tuple[str, ...]
    """Names of the linear layers that stayed dense."""

    @property
    def int4(self) -> int:
        return sum(self.formats.values())

    def __str__(self) -> str:
        formats = ", ".join(f"{count} x {name}" for name, count in self.formats.items()) or "none"
        dense = f"; dense: {', '.join(self.dense[:3])}{', ...' if len(self.dense) > 3 else ''}" if self.dense else ""
        total = self.int4 + len(self.dense)
        return f"{self.int4} of {total} linear layers in 4 bits ({formats}, {self.nbytes / 2**20:.1f} MiB){dense}"


def summarize(model: nn.Module) -> Summary:
    """Count the linear layers of a model, by format and dense ones."""
    int4 = [m for m in model.modules() if isinstance(m, W4Linear)]
    formats = Counter(str(m.format) for m in int4)
    dense = tuple(name for name, m in model.named_modules() if isinstance(m, nn.Linear))
    return Summary(dict(formats), sum(m.weight.nbytes for m in int4), dense)


def quantize_layers(
    model: nn.Module,
    format: WeightFormat | str | None = None,
    *,
    skip: tuple[str, ...] = SKIP,
    progress: Progress | None = None,
) -> nn.Module:
    """Replace the dense linear layers of a model by 4-bit ones, in place, one at a time.

    Args:
        format: see :func:`load`.
        skip: last parts of the names of layers that stay dense.
    """
    layers = linear_layers(model, skip)
    for done, (name, layer) in enumerate(layers.items(), 1):
        model.set_submodule(name, W4Linear.from_linear(layer, format or default_format(layer.in_features)))
        if progress is not None:
            progress(done, len(layers), "quantizing")
    return model


def dequantize_layers(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Replace the 4-bit linear layers of a model by dense ones with the same numbers, in place; for comparing."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, W4Linear):
            weight = layer.weight.dequantize(dtype)
            n, k = weight.shape
            dense = nn.Linear(k, n, bias=layer.bias is not None, device="meta")
            dense.weight = nn.Parameter(weight, requires_grad=False)
            if layer.bias is not None:
                dense.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
            model.set_submodule(name, dense)
    return model
