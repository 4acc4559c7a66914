"""Shards of a weight for tensor parallelism: equal, and without rounding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from w4gemm.core.errors import is_int
from w4gemm.core.formats import SCALES, SMALLEST_GROUP, WeightFormat
from w4gemm.packing.layouts import WeightComponents, layout_named
from w4gemm.weights.dequantize import with_factors

if TYPE_CHECKING:
    from w4gemm.weights.weight import QuantizedWeight


def shard(w: QuantizedWeight, dim: int, index: int, count: int) -> QuantizedWeight:
    """See :meth:`w4gemm.QuantizedWeight.shard`."""
    if not isinstance(dim, int) or isinstance(dim, bool) or dim not in (0, 1):
        raise ValueError(f"dim: wanted 0 (n, output features) or 1 (k, input features), got {dim!r}")
    if w.experts:
        return type(w).stack((shard(w.expert(e), dim, index, count) for e in range(w.experts)), w.experts, w.layout)
    group_size = _group_size(w, dim, index, count)
    size = (w.n, w.k)[dim] // count
    elements = slice(index * size, (index + 1) * size)
    columns = slice(0, w.k) if dim == 0 else elements
    width = columns.stop - columns.start
    parts, format = w.parts(), replace(w.format, group_size=group_size, scale=_scale(w.format, width))
    if w.format.has_factors and not format.has_factors:
        parts = with_factors(parts, w.format)
    codes, scales, zeros, channels, factors = parts
    starts = columns.start + torch.arange(format.groups(width), device=w.device) * format.group_length(width)
    groups = starts // w.format.group_length(w.k)  # of w, for each group of the shard

    def cut(t: torch.Tensor, columns: slice | torch.Tensor) -> torch.Tensor:
        bits = t.view(torch.uint8) if t.itemsize == 1 else t  # PyTorch 2.8 gathers no fp8 on the CPU
        view = (bits[elements] if dim == 0 else bits)[:, columns]
        # a copy: the view would keep the whole weight's memory
        return view.clone(memory_format=torch.contiguous_format).view(t.dtype)

    part = WeightComponents(cut(codes, columns), cut(scales, groups), None if zeros is None else cut(zeros, groups))
    if factors is not None:
        length = format.scale_rule.factor_columns
        starts = columns.start + torch.arange(format.superblocks(width), device=w.device) * length
        part = part._replace(factors=cut(factors, starts // w.format.scale_rule.factor_columns))
    if channels is not None:
        part = part._replace(channels=channels[elements].clone() if dim == 0 else channels)
    n, k = part.codes.shape
    layout = "canonical" if layout_named(w.layout).supports(format) else w.layout
    return replace(w, format=format, n=n, k=k, layout=layout, tensors=layout_named(layout).pack(part, format))


def _scale(format: WeightFormat, width: int) -> str:
    """Return the name of the scale rule of shards with ``width`` columns.

    It is the format's own. Scales with factors, whose superblocks a shard may divide, take the rule of smaller
    superblocks or, if there is none, float32 scales, which hold the products exactly.
    """
    columns = math.gcd(format.scale_rule.factor_columns, width)
    if not format.has_factors or columns == format.scale_rule.factor_columns:
        return format.scale
    return next((rule.name for rule in SCALES.values() if rule.factor_columns == columns), "fp32")


def _group_size(w: QuantizedWeight, dim: int, index: int, count: int) -> int:
    """Check that shards are equal; return their group size: w's own, or a smaller one that divides it and their k."""
    if not is_int(index) or not is_int(count) or count < 1 or not 0 <= index < count:
        raise ValueError(f"index, count: wanted 0 <= index < count, got index {index!r}, count {count!r}")
    if dim == 1 and count > 1 and w.perm is not None:
        raise ValueError(
            "dim: this weight is in act-order (perm is not None), so its groups have columns in every part of k; "
            "split dim 0, or let the layer before give its features in the order of w.perm and split "
            "dataclasses.replace(w, perm=None)"
        )
    size = (w.n, w.k)[dim]
    unit = 1 if dim == 0 or w.format.groups(w.k) == 1 else SMALLEST_GROUP
    if count > 1 and size % (count * unit):
        what = "equal parts" if unit == 1 else f"equal parts of whole groups of {unit}, the smallest"
        raise ValueError(f"count: {'nk'[dim]} {size} does not split into {count} {what}; {_fitting(size, unit, count)}")
    return w.format.group_size if unit == 1 or count == 1 else math.gcd(w.format.group_size, size // count)


_MOST_LISTED = 32
"""The most counts that a message lists."""


def _fitting(size: int, unit: int, count: int) -> str:
    """Return what a message says of the counts that split ``size`` into equal parts of whole units."""
    units = size // unit if size % unit == 0 else 1
    small = [c for c in range(1, math.isqrt(units) + 1) if units % c == 0]
    fits = sorted({*small, *(units // c for c in small)})
    if len(fits) <= _MOST_LISTED:
        return f"counts that fit: {fits}"
    nearest = sorted(sorted(fits, key=lambda c: abs(c - count))[:_MOST_LISTED])
    return f"the nearest of {len(fits)} counts that fit: {nearest}"
