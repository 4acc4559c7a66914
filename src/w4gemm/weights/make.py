"""A weight made from codes, scales and zero points, and the limits of scales and zero points."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from w4gemm.core.errors import kind_of, require_dense
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.layouts import WeightComponents, layout_named
from w4gemm.weights.act_order import sorting_perm
from w4gemm.weights.dequantize import by_factor

if TYPE_CHECKING:
    from w4gemm.weights.weight import QuantizedWeight

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_WIDE = (torch.uint16, torch.uint32, torch.uint64)
"""Integers that PyTorch only converts, as NumPy arrays of packed words become."""


def from_codes(
    cls: type[QuantizedWeight],
    format: WeightFormat,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    g_idx: torch.Tensor | None,
    channels: torch.Tensor | None,
    factors: torch.Tensor | None = None,
) -> QuantizedWeight:
    """See :meth:`w4gemm.QuantizedWeight.from_codes`."""
    if not isinstance(codes, torch.Tensor) or codes.dtype not in _INTEGERS + _WIDE or codes.dim() != 2:
        raise TypeError(f"codes: wanted integers (n, k), got {kind_of(codes)}")
    require_dense("codes", codes)
    if codes.is_meta:
        raise ValueError("codes: wanted numbers, got a tensor on the meta device")
    if codes.dtype in _WIDE:
        codes = codes.long()
    n, k = codes.shape
    if n < 1 or k < 1:
        raise ValueError(f"codes: wanted n >= 1 and k >= 1, got shape {(n, k)}")
    largest_code = format.element_rule.largest_code
    if int(codes.min()) < 0 or int(codes.max()) > largest_code:
        raise ValueError(f"codes: wanted 0..{largest_code}, got {int(codes.min())}..{int(codes.max())}")
    _check_part("scales", scales, format.scale_dtype, (n, format.groups(k)), codes.device)
    if format.zero_dtype is None:
        if zeros is not None:
            raise ValueError(f"zeros: {format} has none, got {kind_of(zeros)}")
    elif zeros is None:
        raise ValueError(f"zeros: {format} wants {format.zero_dtype} {(n, format.groups(k))}, got None")
    else:
        _check_part("zeros", zeros, format.zero_dtype, (n, format.groups(k)), codes.device)
    if channels is not None and format.has_channels:
        _check_part("channels", channels, torch.float32, (n,), codes.device)
    elif format.has_channels or channels is not None:
        wanted = f"wants torch.float32 {(n,)}" if format.has_channels else "has none"
        raise ValueError(f"channels: {format} {wanted}, got {kind_of(channels)}")
    if factors is not None and format.has_factors:
        _check_part("factors", factors, torch.float16, (n, format.superblocks(k), 2), codes.device)
    elif format.has_factors or factors is not None:
        wanted = f"wants torch.float16 {(n, format.superblocks(k), 2)}" if format.has_factors else "has none"
        raise ValueError(f"factors: {format} {wanted}, got {kind_of(factors)}")
    parts = WeightComponents(codes, scales, zeros, channels, factors)
    check_range(format, *parts[1:])
    perm = None if g_idx is None else sorting_perm(g_idx, format, k, codes.device)
    if perm is not None:
        codes = codes[:, perm]
    tensors = layout_named("canonical").pack(parts._replace(codes=codes.to(torch.uint8)), format)
    return cls(format, n, k, "canonical", tensors, perm)


def _check_part(name: str, t: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(t, torch.Tensor) or t.dtype != dtype:
        raise TypeError(f"{name}: wanted {dtype}, got {t.dtype if isinstance(t, torch.Tensor) else type(t).__name__}")
    require_dense(name, t)
    if tuple(t.shape) != shape:
        raise ValueError(f"{name}: wanted shape {shape}, got {tuple(t.shape)}")
    if t.device != device:
        raise ValueError(f"{name}: wanted device {device} like codes, got {t.device}")


def check_range(
    format: WeightFormat,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    channels: torch.Tensor | None,
    factors: torch.Tensor | None = None,
) -> None:
    """Raise ValueError for scales and zero points whose weights would be NaN, infinite in some kernel, or saturated
    when they are rounded."""
    if factors is not None and zeros is not None:
        scales, zeros = (
            by_factor(t, factor, format) for t, factor in zip((scales, zeros), factors.unbind(-1), strict=True)
        )
    element, largest_scale = format.element_rule, torch.finfo(format.scale_rule.range_dtype).max
    if channels is not None:
        largest_product = largest_scale * (1 if format.scales_in_weights else element.largest_factor)
        limit = torch.finfo(torch.float32).max / largest_product
        if not (channels.abs() <= limit).all():
            raise ValueError(f"channels: wanted at most {limit:.3g} in magnitude, for finite weights, and no NaN")
        most = largest_scale / element.largest_value if format.scales_in_weights else largest_scale
        if not (scales.float().abs() <= most).all():
            why = f", so that {element.largest_value:g} * scale is an e4m3," if format.scales_in_weights else ""
            raise ValueError(f"scales: wanted at most {most:g} in magnitude{why} and no NaN")
        return
    if format.scale_dtype == torch.float32 and factors is None:
        rounded = format.stored_scales(scales)
        if (other := (rounded != scales) & scales.isfinite()).any():
            row, group = (int(i) for i in other.nonzero()[0])
            raise ValueError(
                f"scales: wanted at most {format.scale_bits} significant bits, so that products with codes are exact "
                f"in float32, got {scales[row, group].item()!r} in row {row}, group {group}; nearest is "
                f"{rounded[row, group].item()!r}"
            )
    offsets, limit = zeros if format.zero == "float" else None, format.largest_weight
    most = _largest(scales) * element.largest_factor + (0.0 if offsets is None else _largest(offsets))
    if not most <= limit:  # also for NaN; else each group is within it
        largest = scales.float().abs() * element.largest_factor
        if offsets is not None:
            largest = largest + offsets.float().abs()
        _refuse_groups(format, ~(largest <= limit), scales, zeros)
    if format.zero == "int" and zeros is not None and int(zeros.max()) > element.largest_code:
        raise ValueError(f"zeros: wanted 0..{element.largest_code}, got up to {int(zeros.max())}")


def _largest(t: torch.Tensor) -> float:
    """Return the largest magnitude; NaN if t has a NaN."""
    return float((t if t.dtype.itemsize > 1 else t.float()).detach().abs().max())


def _refuse_groups(format: WeightFormat, bad: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
    """Raise ValueError if a group is marked in ``bad`` (n, groups)."""
    if bad.any():
        row, group = (int(i) for i in bad.nonzero()[0])
        zero = "" if zeros is None else f", zero point {zeros[row, group].item()}"
        element, limit = format.element_rule, format.largest_weight
        raise ValueError(
            f"scales: the weights of {int(bad.sum())} groups would not be finite ({element.largest_factor:g} * |scale| "
            f"and |zero point| together must be at most {limit:g}); "
            f"first in row {row}, group {group}: scale {scales[row, group].item()}{zero}"
        )
