"""Folders quantized by AMD's Quark: MXFP4, MXFP6, NVFP4 and integers.

A module of MXFP4, MXFP6 or NVFP4 is as in :mod:`w4gemm.checkpoints.packed_floats`. One of integers with scales per
group is ``weight`` int32 (k, n / 8), ``weight_scale`` (groups, n) and ``weight_zero_point`` int32 (groups, n / 8); per
channel it is ``weight`` (n, k / 8), ``weight_scale`` (n) and ``weight_zero_point`` (n / 8).
Words of a last part of n are filled up. The numbers of a word lie in AWQ's order if ``pack_method`` is "reorder",
lowest first if it is "order", and are two's complements if dtype is int4. In 8 bits ``weight`` and
``weight_zero_point`` have a number in each element, int8 or uint8, and one ``weight_scale`` () may serve the whole
matrix. w = (u - zero_point) * weight_scale.

x that the config wants in 4 bits or in int8 is multiplied as it comes. x in e4m3 with MXFP4 gets a scale for each
token instead of ``input_scale`` for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from typing import Any

import torch

from w4gemm.checkpoints import awq
from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.checkpoints.packed_floats import MXFP4, MXFP6, MXFP6_E3M2, NVFP4, Shape, numbers_of, shape_of
from w4gemm.checkpoints.packed_numbers import PackedMatrix, PackedNumbers
from w4gemm.checkpoints.quantization_configs import Excluded, Named, Patterns, wildcards
from w4gemm.checkpoints.quantized_folder import Packing
from w4gemm.checkpoints.stored import WIDE_SCALES, check_symmetric, check_tensor, whole_groups
from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.packing.bits import unpack

_INTEGERS = {"int4": "I32", "uint4": "I32", "int8": "I8", "uint8": "U8"}
"""safetensors' name of the dtype of ``weight`` and ``weight_zero_point``, by Quark's name of the numbers."""
_FOUR_BITS = ("fp4", "int4", "uint4")
_PARTS = ("weight", "weight_scale", "weight_zero_point")
_ROTATIONS = ("r4", "online_r1_rotation")
"""Settings of Quark's rotations that have x rotated while the model runs. r1 and r2 are part of the weights, and r3
turns queries and keys alike, which changes no product of them. Quark up to 0.11 called the algorithm quarot."""
_MX = {"fp4": MXFP4, "fp6_e2m3": MXFP6, "fp6_e3m2": MXFP6_E3M2}
"""Formats with e8m0 scales by Quark's name of the numbers."""
_READ = (
    "fp4 or fp6 with e8m0 scales in groups of 32 (MXFP4, MXFP6), fp4 with two scales (NVFP4), int4, uint4, int8 or "
    "uint8"
)


class QuarkPacking(Packing):
    method = "quark"
    contents = "a folder with a model quantized by Quark (MXFP4, MXFP6, NVFP4, int4, uint4, int8, uint8)"
    marks = ("weight_scale", "weight_scale_2", "weight_zero_point")
    others = ("weight", "input_scale", "input_scale_2", "input_zero_point")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        algorithms = config.get("algo_config") or ()
        for algorithm in [algorithms] if isinstance(algorithms, Mapping) else algorithms:  # old files have one
            name, rotated = algorithm.get("name"), [key for key in _ROTATIONS if algorithm.get(key)]
            if rotated:
                raise ValueError(
                    f"algo_config rotates activations while the model runs ({', '.join(rotated)}), which cannot be "
                    "done; quantize the dense model again without it"
                )
            if name == "svdquant":
                raise ValueError(
                    "algo_config is svdquant, whose product of low rank beside the weight is not added here; quantize "
                    "the dense model again without it"
                )
        self._order = awq.order_of((config["export"] or {}).get("pack_method"))

    def named(self) -> Iterable[Named]:
        layers = self.config.get("layer_quant_config") or {}
        named = {name for name, its in layers.items() if _stages(its.get("weight"))[0].get("dtype") in _FOUR_BITS}
        patterns = self._layers
        return [
            Named("layer_quant_config", name, partial(patterns.match, name) if name in patterns else None)
            for name in layers
            if name in named
        ]

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        if name in self._excluded:
            raise ValueError("exclude of its config names it, but it has quantized tensors")
        settings = self._settings(name)
        weight = settings["weight"]
        if (floats := _float_format(weight)) is not None:
            n, k, format = shape_of(stored, floats)
        elif isinstance(weight, Mapping) and weight.get("dtype") in _INTEGERS:
            n, k, format = _integers(stored, weight)
        else:
            raise ValueError(f"its weight is {_described(weight)}; wanted {_READ}")
        x = settings.get("input_tensors")
        fp8 = format == MXFP4 and isinstance(x, Mapping) and x.get("dtype") == "fp8_e4m3"
        return Module(n, k, format, "bias" in stored, activations="fp8" if fp8 else None)

    def _settings(self, name: str) -> Mapping[str, Any]:
        """Settings of a module: those of its name, of the first pattern, of all linear layers, or of the model."""
        layers = self.config.get("layer_quant_config") or {}
        if name in layers:
            return layers[name]
        if text := next((text for text in self._layers if self._layers.match(text, name)), None):
            return layers[text]
        return (self.config.get("layer_type_quant_config") or {}).get("Linear") or self.config["global_quant_config"]

    @cached_property
    def _excluded(self) -> Excluded:
        return Excluded("exclude", self.config.get("exclude") or ())

    @cached_property
    def _layers(self) -> Patterns:
        return wildcards("layer_quant_config", self.config.get("layer_quant_config") or ())

    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        if module.format in (NVFP4, *_MX.values()):
            return numbers_of(module, tensors)
        rows = {leaf: self._rows(module, tensors[leaf]) for leaf in _PARTS if leaf in tensors}
        codes, scales, zeros = rows["weight"], rows["weight_scale"], rows.get("weight_zero_point")
        bits = module.format.bits
        middle = 1 << bits - 1
        if (
            tensors["weight"].dtype == torch.int8 or not module.format.has_zero
        ):  # two's complements of codes less middle
            codes, zeros = codes ^ middle, None if zeros is None else zeros ^ middle
        if zeros is not None and not module.format.has_zero:
            check_symmetric(zeros, bits)
            zeros = None
        z = None if zeros is None else PackedMatrix(zeros)
        return PackedNumbers(module.format, PackedMatrix(codes), PackedMatrix(scales), z)

    def _rows(self, module: Module, t: torch.Tensor) -> torch.Tensor:
        """Return one of a module's tensors, unpacked, as n rows."""
        if t.dtype == torch.int32:
            t = unpack(t, module.format.bits, self._order)
        elif t.dtype == torch.int8:
            t = t.view(torch.uint8)
        if module.format.group_size != PER_COLUMN:
            t = t.T
        rows = t.expand(module.n) if t.dim() < 2 and t.numel() == 1 else t[: module.n]
        return rows.contiguous().view(module.n, -1)


def _stages(weight: Any) -> list[Mapping[str, Any]]:
    """Return the settings of a weight, or of its numbers and of their scales, one after the other."""
    return [{**stage} for stage in (weight if isinstance(weight, list) else [weight or {}])]


def _float_format(weight: Any) -> WeightFormat | None:
    """Return NVFP4, MXFP4 or MXFP6 if the settings of a weight say so, else None."""
    first, *more = _stages(weight)
    format = _MX.get(str(first.get("dtype")))
    if format is None or first.get("qscheme") != "per_group":
        return None
    if not more and (first.get("group_size"), first.get("scale_format")) == (32, "e8m0"):
        return format
    scales = [(stage.get("dtype"), stage.get("qscheme"), stage.get("is_scale_quant")) for stage in more]
    two = format == MXFP4 and first.get("group_size") == 16 and scales == [("fp8_e4m3", "per_tensor", True)]
    return NVFP4 if two else None


def _integers(stored: Mapping[str, TensorInfo], weight: Mapping[str, Any]) -> Shape:
    scheme, axis, symmetric = (weight.get(key) for key in ("qscheme", "ch_axis", "symmetric"))
    name = str(weight["dtype"])
    dtype, signed = _INTEGERS[name], name.startswith("int")
    if name == "int4" and not symmetric:
        raise ValueError(f"symmetric is {symmetric!r} beside {name}, wanted True; u{name} has zero points")
    if weight.get("zero_point_type", "int32") != "int32":
        raise ValueError(f"zero_point_type is {weight['zero_point_type']!r}, wanted 'int32'")
    rows, columns = check_tensor(stored, "weight", (dtype,))
    each = 8 if dtype == "I32" else 1  # numbers of an element
    whole = scheme == "per_tensor" and each == 1
    per_group = scheme == "per_group" and axis in (-1, 1)
    if per_group:
        _, n = check_tensor(stored, "weight_scale", WIDE_SCALES)
        k, group = rows, weight["group_size"]
    elif whole or (scheme == "per_channel" and axis == 0):
        one = "weight_scale" in stored and stored["weight_scale"].shape == (1,)
        check_tensor(stored, "weight_scale", WIDE_SCALES, () if whole and not one else (1,) if whole else (rows,))
        n, k, group = rows, each * columns, PER_COLUMN
    else:
        raise ValueError(
            f"its qscheme is {scheme!r} along axis {axis!r}, wanted 'per_group' along -1 or 'per_channel' along 0, "
            "or in 8 bits 'per_tensor'"
        )
    words = -(-n // each)
    scale = WIDE_SCALES[stored["weight_scale"].dtype]
    format = WeightFormat(group, "none" if signed and symmetric else "int", scale, "int4" if each > 1 else "int8")
    groups = whole_groups(format, k)
    if per_group:
        check_tensor(stored, "weight", (dtype,), (k, words))
        check_tensor(stored, "weight_scale", WIDE_SCALES, (groups, n))
    if "weight_zero_point" in stored or format.has_zero:
        zeros = (groups, words) if per_group else stored["weight_scale"].shape if whole else (words,)
        check_tensor(stored, "weight_zero_point", (dtype,), zeros)
    return Shape(n, k, format)


def _described(weight: Any) -> str:
    """Return what the settings of a weight say of its numbers."""
    keys = ("dtype", "qscheme", "group_size", "scale_format")
    return " of ".join(" ".join(str(stage[key]) for key in keys if stage.get(key)) for stage in _stages(weight))
