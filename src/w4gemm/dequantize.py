"""The numbers that a weight's parts stand for, rounded once: the definition that every kernel is held to."""

from __future__ import annotations

import torch

from w4gemm.formats import SYMMETRIC_ZERO, WeightFormat
from w4gemm.packing.layouts import Parts


def dequantize_parts(parts: Parts, format: WeightFormat, dtype: torch.dtype) -> torch.Tensor:
    """w (n, k) in ``dtype``, as :mod:`w4gemm.formats` says.

    float32: the product, which is exact, then the sum with a float zero point, rounded; with e4m3 scales the product
    rounded to e4m3 times the channel's scale, rounded. 16-bit dtypes: the exact value, rounded once, as a fused
    multiply-add in that dtype gives; with e4m3 scales the float32 value rounded. float64: the float32 value.
    """
    codes, scales, zeros, channels = parts
    k = codes.shape[1]
    length = format.group_length(k)

    def spread(t: torch.Tensor) -> torch.Tensor:
        return t.float().repeat_interleave(length, dim=1)[:, :k]

    u = codes.float()
    if channels is not None:
        largest = torch.finfo(format.scale_dtype).max
        products = ((u - SYMMETRIC_ZERO) * spread(scales)).clamp(-largest, largest).to(format.scale_dtype)
        return (products.float() * channels[:, None]).to(dtype)
    if zeros is None:
        return ((u - SYMMETRIC_ZERO) * spread(scales)).to(dtype)
    if format.zero == "int":
        return ((u - spread(zeros)) * spread(scales)).to(dtype)
    return rounded_sum(u * spread(scales), spread(zeros), dtype)


def rounded_sum(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a + b of float32 tensors of one shape, rounded once to ``dtype``.

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
