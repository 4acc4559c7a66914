"""Folders quantized by NVIDIA's ModelOpt: NVFP4, MXFP4 and INT4 (W4A16_AWQ, W4A8_AWQ).

A module of NVFP4 or MXFP4 is as in :mod:`w4gemm.checkpoints.packed_floats`. One of INT4 is ``weight`` uint8 (n / 2, k),
two's complements of two rows a byte, the even row in the low nibble, and ``weight_scale`` (n, groups).
``pre_quant_scale`` (k), of a model that was smoothed by AWQ, multiplies x; experts of a layer share it. Scales of a
quantized KV cache are not used.

W4A8_MXFP4_FP8, W4A8_NVFP4_FP8 and W4A8_AWQ quantize x to e4m3, here with a scale for each token instead of
``input_scale`` for all. No 8-bit float holds NVFP4's scales times its codes, so W4A8_NVFP4_FP8 becomes
e2m1_g32_e4m3 or e2m1_g16_e4m3, as :func:`w4gemm.fold_scales` rounds it. x that the config wants in 4 bits is multiplied
as it comes.

Llama 4's experts of a layer in NVFP4 are one tensor, ``experts.gate_up_proj`` uint8 (experts, k / 2, n), gates before
ups, with ``experts.gate_up_proj_weight_scale`` (experts, k / 16, n) and ``experts.gate_up_proj_weight_scale_2``, one
number or one for each expert; and so is ``experts.down_proj``.

``weight_scale_2`` of W4A8_AWQ, by which ModelOpt's own kernels round q * weight_scale to e4m3, is not needed: the
weight is q * weight_scale. Kernels for fp8 x take scales in 16 bits, so float32 ones are rounded to fp16, by at most
2**-11 of themselves from 2**-14 on, as TensorRT-LLM rounds them. Beside 16-bit x float32 scales stay float32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.experts import fused_in
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.numbers import FoldedNumbers, Numbers
from w4gemm.checkpoints.packed_floats import MXFP4, NVFP4, Shape, check_second_scale, numbers, numbers_of, shape_of
from w4gemm.checkpoints.packed_numbers import PackedMatrix, PackedNumbers
from w4gemm.checkpoints.quantization_configs import Excluded, Named
from w4gemm.checkpoints.quantized_folder import Packing
from w4gemm.checkpoints.stored import SCALES, check_tensor, whole_groups
from w4gemm.core.formats import WeightFormat

_FLOATS = {
    **dict.fromkeys(("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "W4A8_NVFP4_FP8"), NVFP4),
    **dict.fromkeys(("MXFP4", "mxfp4", "W4A8_MXFP4_FP8"), MXFP4),  # ModelOpt itself writes "mxfp4"
}
_W4A8 = "W4A8_AWQ"
_FOLDED = "W4A8_NVFP4_FP8"
_FOLDED_SCALE = "e4m3"
_OF_EXPERTS = re.compile(r"(.*\bexperts\.(?:gate_up_proj|down_proj))_(weight_scale(?:_2)?)")
"""Names of the scales of experts in one tensor."""
_FP8_ACTIVATIONS = (_W4A8, "W4A8_MXFP4_FP8", _FOLDED)
ALGORITHMS = (*_FLOATS, "W4A16_AWQ", "INT4_AWQ", _W4A8)
"""Values of ``quant_algo`` that are read."""


class ModelOptPacking(Packing):
    """``config`` may also be the contents of hf_quant_config.json."""

    method = "modelopt"
    contents = "a folder with a model quantized by ModelOpt (NVFP4, MXFP4, INT4 AWQ, W4A8 AWQ)"
    marks = ("weight_scale", "weight_scale_2")
    others = ("weight", "input_scale")
    named_as_module = True

    @staticmethod
    def renamed(name: str) -> str:
        return f"{match[1]}.{match[2]}" if (match := _OF_EXPERTS.fullmatch(name)) else name

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        settings = {**self.config, **self._of_layer(name)}
        algorithm = settings.get("quant_algo")
        if algorithm == "NVFP4_SVD":
            raise ValueError(
                "it was quantized by NVFP4_SVD, whose product of low rank beside the weight is not added here; export "
                "the model as NVFP4 or NVFP4_AWQ"
            )
        if algorithm not in ALGORITHMS:
            raise ValueError(
                f"it was quantized by {algorithm!r}; wanted one of {', '.join(ALGORITHMS)}: export the model again, or "
                "convert the dense one"
            )
        if name in self._excluded:
            raise ValueError("the config excludes it, but it has quantized tensors")
        if algorithm in _FLOATS:
            floats = _FLOATS[algorithm]
            if floats == NVFP4:  # W4A8_NVFP4_FP8 has groups of 32
                floats = replace(NVFP4, group_size=settings.get("group_size") or NVFP4.group_size)
            if "weight" in stored and len(stored["weight"].shape) == 3:
                return _experts(name, stored, floats, algorithm)
            n, k, format = shape_of(stored, floats)
            if algorithm == _FOLDED:
                format = replace(format, scale=_FOLDED_SCALE)
        else:
            n, k, format = _integers(stored, settings.get("group_size") or 128, algorithm == _W4A8)
        activations = "fp8" if algorithm in _FP8_ACTIVATIONS else None
        scaled = "pre_quant_scale" in stored
        return Module(n, k, format, "bias" in stored, activations=activations, pre_quant_scale=scaled)

    @cached_property
    def _excluded(self) -> Excluded:
        return Excluded("exclude_modules", self.config.get("exclude_modules", self.config.get("ignore")) or ())

    def named(self) -> Iterable[Named]:
        layers = (self.config.get("quantized_layers") or {}).items()
        named = (name for name, settings in layers if settings.get("quant_algo") in ALGORITHMS)
        return [Named("quantized_layers", name) for name in named]

    def _of_layer(self, name: str) -> Mapping[str, Any]:
        """Settings in ``quantized_layers`` of a module, or of what it is in: experts may stand there as one."""
        layers = self.config.get("quantized_layers") or {}
        while name and name not in layers:
            name = name.rpartition(".")[0]
        return layers.get(name, {})

    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        if module.format.scale == _FOLDED_SCALE:
            exact = replace(module, format=replace(module.format, scale=NVFP4.scale))
            return FoldedNumbers(numbers_of(exact, tensors), module.format)
        if module.experts:
            weight, scales = (tensors[leaf].mT for leaf in ("weight", "weight_scale"))
            return numbers(weight, scales, module.format, tensors["weight_scale_2"].flatten().expand(module.experts))
        if module.format.element == NVFP4.element:
            return numbers_of(module, tensors)
        codes = PackedMatrix(tensors["weight"], along="n", signed=True, bits=module.format.bits)
        return PackedNumbers(module.format, codes, PackedMatrix(tensors["weight_scale"]))


def _experts(name: str, stored: Mapping[str, TensorInfo], format: WeightFormat, algorithm: str) -> Module:
    """Return what headers say of a layer's experts in one tensor."""
    if format.scale != NVFP4.scale or algorithm == _FOLDED:
        raise ValueError(f"it has all experts in one tensor in {algorithm}; wanted NVFP4")
    experts = stored["weight"].shape[0]
    one = dict(stored)
    for leaf in ("weight", "weight_scale"):
        if leaf in stored:
            if len(stored[leaf].shape) != 3 or stored[leaf].shape[0] != experts:
                raise ValueError(f"{leaf} has shape {stored[leaf].shape}, wanted that of {experts} experts")
            one[leaf] = stored[leaf]._replace(shape=stored[leaf].shape[:0:-1])  # stored as (k, n)
    if "weight_scale_2" in stored and stored["weight_scale_2"].shape in ((experts,), (experts, 1), (experts, 1, 1)):
        one["weight_scale_2"] = stored["weight_scale_2"]._replace(shape=(1,))
    n, k, format = shape_of(one, format)
    return Module(n, k, format, "bias" in stored, experts, fused_in(name), shared=True)


def _integers(stored: Mapping[str, TensorInfo], group_size: int, fp8: bool) -> Shape:
    """``fp8``: True if x is quantized, as W4A8_AWQ says."""
    half, k = check_tensor(stored, "weight", ("U8",))
    if fp8:
        check_second_scale(stored)
    elif "weight_scale_2" in stored:
        raise ValueError("it has two scales, as W4A8_AWQ has, but its config says W4A16; wanted weight_scale alone")
    known = SCALES | {"F32": "fp16" if fp8 else "fp32"}
    check_tensor(stored, "weight_scale", known)
    format = WeightFormat(group_size, "none", known[stored["weight_scale"].dtype])
    check_tensor(stored, "weight_scale", known, (2 * half, whole_groups(format, k)))
    return Shape(2 * half, k, format)
