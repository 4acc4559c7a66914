"""The components of a weight: the numbers that they stand for, :func:`dequantize_parts`, which every kernel is tested
against; those of a shard for tensor parallelism, :func:`cut`; those of two weights' rows in turn, :func:`in_pairs`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from w4gemm.core.errors import is_int
from w4gemm.core.format_names import SMALLEST_GROUP
from w4gemm.core.formats import SCALE_OF, SCALES, WeightFormat
from w4gemm.packing.layouts import PackLayout, WeightComponents
from w4gemm.packing.repack import Matrix

# --- numbers ---------------------------------------------------------------------------------------------------------


def dequantize_parts(parts: WeightComponents, format: WeightFormat, dtype: torch.dtype) -> torch.Tensor:
    """Return w (n, k) in ``dtype``, as :mod:`w4gemm.core.formats` defines it.

    - float32: the product of scale and number, which is exact except with float32 scales and factors, plus a float zero
      point, rounded. With scales of channels: the product, rounded to e4m3 if the scale rule says so, times the
      channel's scale, rounded.
    - 16-bit dtypes: the exact value rounded once, as a fused multiply-add in that dtype rounds it. With scales of
      channels, float32 scales or factors: the float32 value rounded. A codebook's numbers are first rounded to the
      dtype.
    - float64: the float32 value.
    """
    codes, scales, zeros, channels, _ = parts = with_plain_scales(parts, format)
    k = codes.shape[1]

    def spread(t: torch.Tensor) -> torch.Tensor:
        return format.spread(t.float(), k)

    if zeros is None:
        products = rounded_products(format.element_rule.numbers(codes, dtype) * spread(scales), format)
        return (products if channels is None else products * channels[:, None]).to(dtype)
    u = codes.float()
    if format.zero == "int":
        return ((u - spread(zeros)) * spread(scales)).to(dtype)
    if scales.dtype == torch.float32:
        return (u * spread(scales) + spread(zeros)).to(dtype)
    return rounded_sum(u * spread(scales), spread(zeros), dtype)


def dequantize_rows(
    layout: PackLayout, tensors: tuple[torch.Tensor, ...], matrix: Matrix, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the rows ``ids``, int64 (rows,), of a weight, as :func:`dequantize_parts` gives them, with columns in
    packed order."""
    format = matrix.format
    parts = layout.unpack_rows(tensors, format, matrix.k, ids)
    if format.scale_rule.block_rows:  # each row has its own now
        format = replace(format, scale=SCALE_OF[format.scale_dtype])
    return dequantize_parts(parts, format, dtype)


def with_plain_scales(parts: WeightComponents, format: WeightFormat) -> WeightComponents:
    """Return the same weight with scales and zero points (n, groups) that need no others: float32 instead of levels
    with factors, because these products are exact, and repeated for the rows of a block."""
    scales = format.scales_of_rows(parts.scales, len(parts.codes))
    scales, zeros = times_factors(scales, parts.zeros, parts.factors, format)
    return parts._replace(scales=scales, zeros=zeros, factors=None)


def times_factors(
    scales: torch.Tensor, zeros: torch.Tensor | None, factors: torch.Tensor | None, format: WeightFormat
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scales and zero points times their factors, which is exact in float32; as they are without factors."""
    if factors is None:
        return scales, zeros
    return (
        _by_factor(scales, factors[..., 0], format),
        None if zeros is None else _by_factor(zeros, factors[..., 1], format),
    )


def _by_factor(levels: torch.Tensor, factors: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    """Return scales or zero points (n, groups) times their factors (n, superblocks): float32 (n, groups)."""
    first = torch.arange(levels.shape[1], device=levels.device) * format.group_size
    return levels.float() * factors[:, first // format.scale_rule.factor_columns].float()


def rounded_products(products: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    """Return products of scales and numbers, float32, rounded as the format's scale rule says, saturating."""
    dtype = format.scale_rule.rounded_to
    if dtype is None:
        return products
    largest = torch.finfo(dtype).max
    return products.clamp(-largest, largest).to(dtype).float()


def rounded_sum(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a + b, of float32 tensors of one shape, rounded once to ``dtype``.

    Rounding to float32 and then to 16 bits can differ from rounding once: a sum just beside the middle of two
    16-bit numbers may round to that middle first. So for 16 bits the float32 sum is rounded to odd: an inexact sum
    keeps its last bit set, which no 16-bit middle has.
    """
    total = a + b
    if dtype.itemsize > 2:
        return total.to(dtype)
    b_part = total - a
    lost = (a - (total - b_part)) + (b - b_part)  # exact: a + b == total + lost (Knuth's TwoSum)
    bits = total.view(torch.int32)
    away = (lost > 0) == (total > 0)  # the exact sum is larger in magnitude than ``total``
    odd = torch.where(away, bits + 1, bits - 1)
    return torch.where((lost != 0) & (bits & 1 == 0), odd, bits).view(torch.float32).to(dtype)


# --- shards ----------------------------------------------------------------------------------------------------------


class Shard(NamedTuple):
    """One of equal parts of a weight: its rows, its columns, and its format."""

    rows: slice
    columns: slice
    format: WeightFormat

    @property
    def n(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def k(self) -> int:
        return self.columns.stop - self.columns.start


def shard_of(format: WeightFormat, n: int, k: int, dim: int, index: int, count: int) -> Shard:
    """Return shard ``index`` of ``count`` of a weight (n, k) along dim 0 (n) or 1 (k).

    Its format is the weight's, with smaller groups where the shard divides a group of columns. Where it divides columns
    that share factors, the scale rule is that of fewer columns or, if there is none, float32 scales, which hold the
    products with factors exactly. Where it divides rows that share scales, it has float32 scales of its own for each
    row.

    Raises:
        ValueError: if there is no such shard, or it is not one of equal parts of whole groups.
    """
    if not is_int(dim) or dim not in (0, 1):
        raise ValueError(f"dim: wanted 0 (n, output features) or 1 (k, input features), got {dim!r}")
    if not is_int(index) or not is_int(count) or count < 1 or not 0 <= index < count:
        raise ValueError(f"index, count: wanted 0 <= index < count, got index {index!r}, count {count!r}")
    size = (n, k)[dim]
    unit = 1 if dim == 0 or format.groups(k) == 1 else SMALLEST_GROUP
    if count > 1 and size % (count * unit):
        what = "equal parts" if unit == 1 else f"equal parts of whole groups of {unit}, the smallest"
        raise ValueError(f"count: {'nk'[dim]} {size} does not split into {count} {what}; {_fitting(size, unit, count)}")
    own, every = slice(index * (size // count), (index + 1) * (size // count)), slice(0, (k, n)[dim])
    rows, columns = (own, every) if dim == 0 else (every, own)
    return Shard(rows, columns, _shard_format(format, n, k, rows, columns))


def check_in_order(perm: torch.Tensor | None) -> None:
    """Raise ValueError for a weight in act-order that is to be split along k."""
    if perm is not None:
        raise ValueError(
            "dim: this weight is in act-order (perm is not None), so its groups have columns in every part of k; "
            "split dim 0, or let the layer before give its features in the order of w.perm and split "
            "dataclasses.replace(w, perm=None)"
        )


def _shard_format(format: WeightFormat, n: int, k: int, rows: slice, columns: slice) -> WeightFormat:
    height, width = rows.stop - rows.start, columns.stop - columns.start
    rule, group_size = format.scale_rule, format.group_size
    if width < k and format.groups(k) > 1:
        group_size = math.gcd(group_size, width)
    scale = rule.name
    if rule.block_rows and height < n and height % rule.block_rows:
        scale = "fp32"
    if rule.factor_columns and width < k:
        shared = math.gcd(rule.factor_columns, width)
        alike = (r for r in SCALES.values() if replace(r, name=scale, factor_columns=rule.factor_columns) == rule)
        scale = next((r.name for r in alike if r.factor_columns == shared), "fp32")
        if scale != "fp32" and group_size > shared:  # a row's only group, which a factor's columns have to hold
            group_size = shared
    return replace(format, group_size=group_size, scale=scale)


def cut(
    parts: WeightComponents, format: WeightFormat, target: WeightFormat, rows: slice, columns: slice | None = None
) -> WeightComponents:
    """Return copies of the components of some rows and columns.

    Args:
        parts, format: components and format of the whole weight.
        target: format of the result, that of a :class:`Shard`.
        columns: None for all.
    """
    k = parts.codes.shape[1]
    columns = slice(0, k) if columns is None else columns
    if target.scale != format.scale and target.scale == "fp32":
        parts = with_plain_scales(parts, format)
    device, width = parts.codes.device, columns.stop - columns.start

    def first_columns(count: int, length: int) -> torch.Tensor:
        return columns.start + torch.arange(count, device=device) * length

    groups = first_columns(target.groups(width), target.group_length(width)) // format.group_length(k)
    scale_rows = slice(target.scale_rows(rows.start), target.scale_rows(rows.stop))

    def copied(t: torch.Tensor, rows: slice, columns: slice | torch.Tensor) -> torch.Tensor:
        bits = t.view(torch.uint8) if t.itemsize == 1 else t  # PyTorch 2.8 gathers no fp8 on the CPU
        # a copy: the view would keep the whole weight's memory
        return bits[rows][:, columns].clone(memory_format=torch.contiguous_format).view(t.dtype)

    codes, scales, zeros, channels, factors = parts
    if factors is not None:
        superblocks = first_columns(target.superblocks(width), target.scale_rule.factor_columns)
        factors = copied(factors, rows, superblocks // format.scale_rule.factor_columns)
    return WeightComponents(
        copied(codes, rows, columns),
        copied(scales, scale_rows, groups),
        None if zeros is None else copied(zeros, rows, groups),
        None if channels is None else channels[rows].clone(),
        factors,
    )


_MOST_LISTED = 32
"""The most counts that a message lists."""


def _fitting(size: int, unit: int, count: int) -> str:
    """Return in words the counts that split ``size`` into equal parts of whole units."""
    units = size // unit if size % unit == 0 else 1
    small = [c for c in range(1, math.isqrt(units) + 1) if units % c == 0]
    fits = sorted({*small, *(units // c for c in small)})
    if len(fits) <= _MOST_LISTED:
        return f"counts that fit: {fits}"
    nearest = sorted(sorted(fits, key=lambda c: abs(c - count))[:_MOST_LISTED])
    return f"the nearest of {len(fits)} counts that fit: {nearest}"


# --- rows in turn ----------------------------------------------------------------------------------------------------


def in_pairs(gate: WeightComponents, up: WeightComponents, format: WeightFormat) -> WeightComponents:
    """Return the components of a weight whose rows are those of two in turn.

    Raises:
        ValueError: if blocks of rows share scales, and even and odd rows of either have scales of their own.
    """
    both = zip(gate, up, strict=True)
    pairs = WeightComponents.of(
        None if a is None or b is None else torch.stack((a, b), dim=1).flatten(0, 1) for a, b in both
    )
    if not format.scale_rule.block_rows:
        return pairs
    return pairs._replace(scales=_alternating_scales(gate.scales, up.scales, format, len(gate.codes)))


def _alternating_scales(gate: torch.Tensor, up: torch.Tensor, format: WeightFormat, n: int) -> torch.Tensor:
    """Return the scales of a weight whose rows are those of two weights (n, k) in turn, where blocks of rows share
    scales. A block of the result has half the rows of a block of either."""
    pairs = torch.stack((gate, up), dim=1).unflatten(0, (-1, 2))  # block, even or odd, gate or up, group
    if not torch.equal(pairs[:, 0], pairs[:, 1]):
        raise ValueError(f"gate, up: wanted the same {format.scale} scales for even and odd rows")
    return pairs[:, 0].repeat_interleave(2, 0).flatten(0, 1)[: format.scale_rows(2 * n)].contiguous()
