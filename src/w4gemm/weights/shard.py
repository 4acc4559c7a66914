"""Equal parts of a weight, for tensor parallelism."""

from __future__ import annotations

import numbers
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from w4gemm.packing.layouts import WeightComponents, layout_named

if TYPE_CHECKING:
    from w4gemm.weights.weight import QuantizedWeight


def shard(w: QuantizedWeight, dim: int, index: int, count: int) -> QuantizedWeight:
    """See :meth:`w4gemm.QuantizedWeight.shard`."""
    if dim not in (0, 1):
        raise ValueError(f"dim: wanted 0 (n, output features) or 1 (k, input features), got {dim!r}")
    if w.experts:
        return type(w).stack((shard(w.expert(e), dim, index, count) for e in range(w.experts)), w.experts, w.layout)
    unit = _unit(w, dim, index, count)
    size = (w.n, w.k)[dim]
    elements = slice(index * size // count, (index + 1) * size // count)
    groups = slice(None) if unit == 1 else slice(elements.start // unit, -(-elements.stop // unit))
    codes, scales, zeros, channels = w.parts()

    def cut(t: torch.Tensor, columns: slice) -> torch.Tensor:
        view = t[elements] if dim == 0 else t[:, columns]
        return view.clone(memory_format=torch.contiguous_format)  # the view would keep the whole weight's memory

    part = WeightComponents(cut(codes, elements), cut(scales, groups), None if zeros is None else cut(zeros, groups))
    if channels is not None:
        part = part._replace(channels=channels[elements].clone() if dim == 0 else channels)
    n, k = part.codes.shape
    return replace(w, n=n, k=k, tensors=layout_named(w.layout).pack(part, w.format))


def _unit(w: QuantizedWeight, dim: int, index: int, count: int) -> int:
    """Return how many neighbouring rows or columns stay together, having checked that the parts are equal."""
    whole = isinstance(index, numbers.Integral) and isinstance(count, numbers.Integral)
    if not whole or count < 1 or not 0 <= index < count:
        raise ValueError(f"index, count: wanted 0 <= index < count, got index {index!r}, count {count!r}")
    if dim == 1 and count > 1 and w.perm is not None:
        raise ValueError(
            "dim: this weight is in act-order (perm is not None), so its groups have columns in every part of k; "
            "split dim 0, or let the layer before give its features in the order of w.perm and split "
            "dataclasses.replace(w, perm=None)"
        )
    size = (w.n, w.k)[dim]
    unit = 1 if dim == 0 or w.format.groups(w.k) == 1 else w.format.group_size
    if count > 1 and size % (count * unit):
        fits = [1] + [c for c in range(2, min(size // unit, 256) + 1) if size % (c * unit) == 0]
        what = "equal parts" if unit == 1 else f"equal parts of whole groups of {unit}"
        raise ValueError(f"count: {'nk'[dim]} {size} does not split into {count} {what}; counts that fit: {fits}")
    return unit
