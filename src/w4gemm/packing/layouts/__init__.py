"""Pack layouts by name: the order in which the bits of a weight lie."""

from __future__ import annotations

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device
from w4gemm.core.words import nearest
from w4gemm.packing.codecs import MMA8, MMA16
from w4gemm.packing.layouts.base import CanonicalLayout, PackLayout, WeightComponents
from w4gemm.packing.layouts.cpu import CpuLayout
from w4gemm.packing.layouts.mma import MmaLayout

BIT_ORDER = 2
"""Number of the order that layouts but the canonical one have bits in: one more whenever it changes for any format, so
that weights which were pickled in another order are refused."""
FP8_LAYOUT = "mma8"
"""Layout of weights for fp8 activations on a GPU."""
_FP8_CAPABILITY = (8, 9)
"""From here on GPUs have e4m3."""

RENAMED = {"sm90": "mma16", "sm90_fp8": "mma8"}
"""Former names of layouts, which tuned records may still hold, and today's."""

LAYOUTS: dict[str, PackLayout] = {
    layout.name: layout for layout in (CanonicalLayout(), CpuLayout(), MmaLayout(MMA16), MmaLayout(MMA8))
}


def layout_named(name: str) -> PackLayout:
    """The layout called ``name``.

    Raises:
        ValueError: if there is none.
    """
    if not isinstance(name, str) or name not in LAYOUTS:
        renamed = isinstance(name, str) and name in RENAMED
        hint = f", which is called {RENAMED[name]} now" if renamed else nearest(name, LAYOUTS)
        raise ValueError(f"layout: wanted one of {', '.join(LAYOUTS)}, got {name!r}{hint}")
    return LAYOUTS[name]


def native_layout(device: Device) -> str:
    """The layout that the fastest kernel for ``device`` reads."""
    if device.kind == "cpu":
        return "cpu"
    return "mma16" if device.kind == "cuda" and not device.rocm and device.capability >= (8, 0) else "canonical"


def layout_for(device: Device, format: WeightFormat, dtype: torch.dtype | None = None) -> str:
    """The layout of ``format`` that the fastest kernel for ``device`` and x of ``dtype`` reads."""
    native = native_layout(device)
    choices = [native, FP8_LAYOUT] if native == "mma16" and device.capability >= _FP8_CAPABILITY else [native]
    if dtype == torch.float8_e4m3fn:
        choices.reverse()
    return next((name for name in choices if not LAYOUTS[name].supports(format)), "canonical")


def layout_on(device: torch.device, format: WeightFormat, activations: str | None) -> str:
    """The layout of ``format`` that the fastest kernel on a PyTorch device reads, for a weight's ``activations``."""
    return layout_for(Device.of(device), format, torch.float8_e4m3fn if activations == "fp8" else None)


__all__ = [
    "FP8_LAYOUT",
    "LAYOUTS",
    "RENAMED",
    "CanonicalLayout",
    "PackLayout",
    "WeightComponents",
    "layout_for",
    "layout_named",
    "layout_on",
    "native_layout",
]
