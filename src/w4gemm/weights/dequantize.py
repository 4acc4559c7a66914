"""The numbers that a weight's codes, scales and zero points stand for, which every kernel is tested against."""

from __future__ import annotations

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.packing.layouts import WeightComponents


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
