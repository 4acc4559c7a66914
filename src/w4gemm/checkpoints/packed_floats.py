"""Modules in 4-bit floats as ModelOpt and Quark store them.

One of NVFP4 is ``weight`` uint8 (n, k / 2), the even column in the low nibble, ``weight_scale`` e4m3 (n, k / 16), and
``weight_scale_2`` float32 (), which multiplies. One of MXFP4 has ``weight_scale`` e8m0, as uint8 (n, k / 32), and no
second scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.module_tensors import check_tensor, of_bytes, whole_groups
from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight

NVFP4, MXFP4 = WeightFormat.parse("nvfp4"), WeightFormat.parse("mxfp4")


class Shape(NamedTuple):
    n: int
    k: int
    format: WeightFormat


def shape_of(stored: Mapping[str, TensorInfo], format: WeightFormat) -> Shape:
    """Return what headers say of a module in one of the two formats; raise ValueError if it is none of it."""
    n, half = check_tensor(stored, "weight", ("U8",))
    scales = ("F8_E4M3",) if format == NVFP4 else ("U8", "F8_E8M0")
    check_tensor(stored, "weight_scale", scales, (n, whole_groups(format, 2 * half)))
    if format == NVFP4:
        check_second_scale(stored)
    elif "weight_scale_2" in stored:
        raise ValueError("it has two scales, as NVFP4 has, but its config says MXFP4; wanted weight_scale alone")
    return Shape(n, 2 * half, format)


def check_second_scale(stored: Mapping[str, TensorInfo]) -> None:
    """Raise ValueError unless ``weight_scale_2`` is one number."""
    one = "weight_scale_2" in stored and stored["weight_scale_2"].shape == (1,)
    check_tensor(stored, "weight_scale_2", ("F32",), (1,) if one else ())


def weight_of(module: Module, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    """Return the weight of a module whose shape :func:`shape_of` gave."""
    packed, scales = tensors["weight"], tensors["weight_scale"]
    if module.format == MXFP4:
        return of_bytes(module, packed, scales.view(torch.float8_e8m0fnu))
    return of_bytes(module, packed, scales, tensors["weight_scale_2"].reshape(1).expand(module.n).contiguous())
