"""A weight in another layout, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from w4gemm.core.errors import kind_of
from w4gemm.core.problem import Device
from w4gemm.packing.layouts import layout_for, layout_named
from w4gemm.packing.packed_shape import packed_shape
from w4gemm.packing.repack import Matrix, repack_rows

if TYPE_CHECKING:
    from w4gemm.weights.weight import QuantizedWeight


def target_layout(w: QuantizedWeight, layout: str | None, activations: str | None) -> str:
    """Return the name of the layout to repack ``w`` to, see :meth:`w4gemm.QuantizedWeight.repack`."""
    if layout is not None:
        return layout_named(layout).name
    dtype = torch.float8_e4m3fn if activations == "fp8" else None
    return layout_for(Device.of(w.device), w.format, dtype)


def repacked(w: QuantizedWeight, layout: str | None, activations: str | None) -> QuantizedWeight:
    """Return ``w`` in another layout and for other activations; see :meth:`w4gemm.QuantizedWeight.repack`."""
    if activations is not None and not isinstance(activations, str):
        raise TypeError(f"activations: wanted 'fp8' or None, got {kind_of(activations)}")
    target = target_layout(w, layout, activations)
    if target == w.layout:
        return w if activations == w.activations else replace(w, activations=activations)
    tensors = packed_shape(w.format, target, w.n, w.k, w.experts).empty(w.device)
    if not w.experts:
        repack_into(w, target, tensors)
    for e in range(w.experts):
        repack_into(w.expert(e), target, tuple(t[e] for t in tensors))
    return replace(w, layout=target, tensors=tensors, activations=activations)


def repack_into(w: QuantizedWeight, layout: str, tensors: tuple[torch.Tensor, ...]) -> None:
    """Write a weight without experts to ``tensors`` of another layout."""
    if layout == w.layout:
        for t, own in zip(tensors, w.tensors, strict=True):
            t.copy_(own)
        return
    repack_rows(layout_named(layout), tensors, layout_named(w.layout), w.tensors, Matrix(w.format, w.n, w.k))
