"""Modules in floats of 4 and 6 bits as ModelOpt and Quark store them.

One of NVFP4 is ``weight`` uint8 (n, k / 2), the even column in the low nibble, ``weight_scale`` e4m3 (n, k / 16), or
(n, k / 32) where ModelOpt's config says so, and ``weight_scale_2`` float32 (), which multiplies. One of MXFP4 has
``weight_scale`` e8m0, as uint8 (n, k / 32), and no second scale. One of MXFP6 is the same, but ``weight`` uint8
(n, k * 3 / 4), four codes of e2m3 or e3m2 in three bytes, the first in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.checkpoints.packed_numbers import PackedMatrix, PackedNumbers
from w4gemm.checkpoints.stored import check_tensor, whole_groups
from w4gemm.core.formats import WeightFormat

NVFP4, MXFP4, MXFP6 = map(WeightFormat.parse, ("nvfp4", "mxfp4", "mxfp6"))
MXFP6_E3M2 = WeightFormat.parse("e3m2_g32_e8m0")


class Shape(NamedTuple):
    n: int
    k: int
    format: WeightFormat


def shape_of(stored: Mapping[str, TensorInfo], format: WeightFormat) -> Shape:
    """Return what headers say of a module in one of the formats, NVFP4 in groups of any size; raise ValueError if it is
    none of it."""
    n, columns = check_tensor(stored, "weight", ("U8",))
    k = codes_in(columns, format)
    scales = ("U8", "F8_E8M0") if format.scale == "e8m0" else ("F8_E4M3",)
    check_tensor(stored, "weight_scale", scales, (n, whole_groups(format, k)))
    if format.has_channels:
        check_second_scale(stored)
    elif "weight_scale_2" in stored:
        kind = f"MXFP{format.bits}"
        raise ValueError(f"it has two scales, as NVFP4 has, but its config says {kind}; wanted weight_scale alone")
    return Shape(n, k, format)


def codes_in(columns: int, format: WeightFormat) -> int:
    """Return how many codes so many bytes hold; raise ValueError if those of 6 bits do not fill them."""
    if format.bits == 6 and columns % 3:
        raise ValueError(f"a row has {columns} bytes, wanted a multiple of 3, of four codes of 6 bits")
    return columns * 8 // format.bits


def check_second_scale(stored: Mapping[str, TensorInfo]) -> None:
    """Raise ValueError unless ``weight_scale_2`` is one number."""
    one = "weight_scale_2" in stored and stored["weight_scale_2"].shape == (1,)
    check_tensor(stored, "weight_scale_2", ("F32",), (1,) if one else ())


def numbers_of(module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
    """Return the numbers of a module whose shape :func:`shape_of` gave."""
    return numbers(tensors["weight"], tensors["weight_scale"], module.format, tensors.get("weight_scale_2"))


def numbers(
    codes: torch.Tensor, scales: torch.Tensor, format: WeightFormat, factors: torch.Tensor | None = None
) -> PackedNumbers:
    """Return the numbers of floats of 4 or 6 bits, which may have a dimension of experts in front.

    Args:
        codes: bytes (n, k * bits / 8), the first code in the lowest bits.
        scales: (n, groups) of bytes: e4m3 or e8m0, as ``format`` says.
        factors: float32 (), (parts) or (experts, parts), of NVFP4: what multiplies each of so many equal parts of the
            rows.
    """
    if codes.element_size() != 1 or scales.element_size() != 1:
        name, came = ("weight", codes) if codes.element_size() != 1 else ("weight_scale", scales)
        raise TypeError(f"{name}: wanted bytes, got {came.dtype}")
    if factors is not None:
        factors = factors.float().reshape(*codes.shape[:-2], -1)
    stored = PackedMatrix(scales.view(format.scale_dtype))
    names = ("weight", "weight_scale", "")
    return PackedNumbers(format, PackedMatrix(codes, along="k", bits=format.bits), stored, factors=factors, names=names)
