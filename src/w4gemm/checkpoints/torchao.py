"""Folders quantized by torchao and saved as safetensors: integers, fp8, MXFP4 and NVFP4.

A weight is a tensor subclass, whose parts lie in the files as ``_weight_qdata`` and so on; the files' metadata has its
class and attributes under its name, as JSON:

- ``Int4Tensor``: ``qdata`` int8 (n, k / 2), two's complements, the even column in the low nibble; ``scale`` and
  ``zero_point`` (groups, n). w = q * scale + zero_point. With ``activation_dtype`` float8_e4m3fn, whose zero points are
  0, x is quantized to e4m3.
- ``Int4TilePackedTo4dTensor``: ``qdata`` int32 (n / 8, k / 128, 32, 4) in the order of tensor cores, n filled up to a
  multiple of 8 and k to one of 1024; ``scale_and_zero`` (groups, n, 2). w = (u - 8) * scale + zero.
- ``IntxUnpackedToInt8Tensor``: ``qdata`` int8 (n, k), of int4 -8 to 7, or of int1 to int8; ``scale`` and int8
  ``zero_point`` (n, groups), 0 if the config maps weights symmetrically. w = (q - zero_point) * scale. x that is
  quantized to 8-bit integers there is multiplied as it comes. int1 becomes int2, and int7 int8.
- ``Int8Tensor``: the same of int8, maybe without ``zero_point``, or with one of both for the whole matrix.
- ``Float8Tensor``: ``qdata`` e4m3 or e5m2 (n, k), ``scale`` float32 for each block of ``block_size``: a row, the whole
  matrix, or 128 x 128 of it. w = qdata * scale in float32. x that is quantized to fp8 there is multiplied as it comes.
- ``MXTensor`` of 4-bit floats and ``NVFP4Tensor``: ``qdata`` uint8 (n, k / 2), the even column in the low nibble,
  ``scale`` e8m0 (n, k / 32) or e4m3 (n, k / 16), maybe in the blocks that cuBLAS takes, and ``per_tensor_scale``
  float32 (), which multiplies. x that is quantized to 4-bit floats there is multiplied as it comes.
- ``MXTensor`` of floats of 8 and 6 bits: ``qdata`` e4m3 or e5m2 (n, k), or uint8 with a code of e2m3 or e3m2 in each,
  ``scale`` as of 4-bit floats.

``act_pre_scale`` (k), of a model that was smoothed by AWQ, multiplies x.

Experts of a layer may be one tensor, ``experts.gate_up_proj`` (experts, n, k), gates before ups. Its parts,
``experts._gate_up_proj_qdata`` and so on, have the experts in front. A scale of the whole tensor serves all of them.

The first two are s * u + z with z = zero_point - 8 * s: s as it is, z rounded to float32. Sources: torchao 0.18,
quantization/quantize_/workflows and prototype/safetensors; matrix_to_m16n8k16_Bint4_layout of PyTorch's int4mm.cu.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from w4gemm.checkpoints.awq import ORDER
from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.experts import fused_in
from w4gemm.checkpoints.fp8_folder import ScaleBlock, format_of
from w4gemm.checkpoints.fp8_folder import numbers as fp8_numbers
from w4gemm.checkpoints.hugging_face import TensorInfo, metadata
from w4gemm.checkpoints.numbers import ExpertsNumbers, Numbers
from w4gemm.checkpoints.packed_floats import MXFP4, MXFP6, MXFP6_E3M2, NVFP4, numbers
from w4gemm.checkpoints.packed_numbers import PackedMatrix, PackedNumbers
from w4gemm.checkpoints.quantized_folder import Packing
from w4gemm.checkpoints.stored import (
    FP8,
    SCALES,
    SYMMETRIC,
    WIDE_SCALES,
    check_symmetric,
    check_tensor,
    whole_groups,
)
from w4gemm.core.elements import INTEGERS
from w4gemm.core.format_names import SMALLEST_GROUP
from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.packing.bits import unpack

QDATA, SCALE, ZERO, SCALE_AND_ZERO = (f"_weight_{part}" for part in ("qdata", "scale", "zero_point", "scale_and_zero"))
TENSOR_SCALE = "_weight_per_tensor_scale"
_EXPERTS = re.compile(r"(.*\bexperts)\._(gate_up_proj|up_proj|down_proj)(_\w+)")
_INT8 = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Int8StaticActivationInt8WeightConfig")
"""Configs that make Int8Tensor, whose zero points of weights are all 0."""
_WIDENED = {"int1": "int2", "int7": "int8"}
"""Elements that hold the integers of dtypes without an element of their own."""
_MX = {
    "float4_e2m1fn_x2": MXFP4,
    "float8_e4m3fn": WeightFormat.parse("mxfp8"),
    "float8_e5m2": WeightFormat.parse("e5m2_g32_e8m0"),
    "fp6_e2m3": MXFP6,
    "fp6_e3m2": MXFP6_E3M2,
}
"""Formats of MXTensor by its elements."""
_CODES = {"e4m3": "F8_E4M3", "e5m2": "F8_E5M2"}
"""safetensors' name of the dtype of codes, by element; of others U8."""
_TILE_N, _TILE_K = 8, 128
"""Rows and columns of a tile of Int4TilePackedTo4dTensor."""


class _Settings(NamedTuple):
    """Class and attributes of a weight, by a file's metadata."""

    kind: str
    attributes: Mapping[str, Any]

    def attribute(self, key: str) -> Any:
        if key not in self.attributes:
            raise ValueError(f"the metadata of its file have no {key} of its weight")
        return self.attributes[key]

    def group_size(self) -> int:
        block = self.attribute("block_size")
        *rows, columns = block if isinstance(block, list) else [1, block]
        if rows != [1] or type(columns) is not int:
            raise ValueError(f"its block_size is {block}, wanted [1, columns]: scales of groups of columns")
        return columns

    def of_an_expert(self, experts: int) -> _Settings:
        """Return the settings of one of so many experts in one tensor."""
        own = {key: self.attributes[key] for key in ("block_size", "shape") if key in self.attributes}
        for key, sizes in own.items():
            if isinstance(sizes, list):
                if len(sizes) != 3 or sizes[0] not in (1, experts):
                    raise ValueError(f"its {key} is {sizes}, wanted three numbers, the first 1 or {experts}")
                own[key] = sizes[1:]
        return self._replace(attributes={**self.attributes, **own})

    def name(self, key: str) -> Any:
        """Return an attribute that is a dtype or of an enumeration, by its name."""
        value = self.attributes.get(key)
        return value["_data"] if isinstance(value, Mapping) else value


class TorchAoPacking(Packing):
    """Every module says its own settings."""

    method = "torchao"
    contents = "a folder with a model quantized by torchao (integers, fp8, MXFP4, NVFP4)"
    marks = (QDATA, SCALE, ZERO, SCALE_AND_ZERO, TENSOR_SCALE)
    others = tuple(f"_weight_act_{part}" for part in ("per_tensor_scale", "quant_scale", "quant_zero_point"))

    @staticmethod
    def renamed(name: str) -> str:
        """Parts of experts in one tensor are those of a module."""
        if match := _EXPERTS.fullmatch(name):
            name = f"{match[1]}.{match[2]}._weight{match[3]}"
        return name.replace("._weight_act_pre_scale", ".pre_quant_scale")

    @cached_property
    def _zeros_are_0(self) -> bool:
        """True if the config says so of integers in bytes."""
        mappings = {str(mapping) for mapping in _mappings(self.config.get("quant_type"))}
        return bool(mappings) and all(mapping.startswith("SYMMETRIC") for mapping in mappings)

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        settings, scaled, experts = _settings(name, stored), "pre_quant_scale" in stored, 0
        if settings.kind not in _KINDS:
            raise ValueError(f"its weight is of {settings.kind}, wanted {', '.join(_KINDS)}")
        if QDATA in stored and len(stored[QDATA].shape) == 3:
            experts = stored[QDATA].shape[0]
            settings, stored = settings.of_an_expert(experts), _of_an_expert(stored, experts)
        module = _KINDS[settings.kind](stored, settings)
        if self._zeros_are_0 and module.format.zero == "int":
            module = replace(module, format=replace(module.format, zero="none"))
        module = replace(module, bias="bias" in stored, pre_quant_scale=scaled)
        if not experts:
            return module
        return replace(module, experts=experts, fused=fused_in(name), shared=True)

    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        if not module.experts:
            return self._numbers(module, tensors)
        one = replace(module, experts=0)
        sizes = module.format, module.n, module.k, tensors[QDATA].device, module.experts
        return ExpertsNumbers(
            *sizes, lambda e: self._numbers(one, {leaf: _expert(t, e) for leaf, t in tensors.items()})
        )

    def _numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        n, k, format, qdata = module.n, module.k, module.format, tensors[QDATA]
        if format.scale == "e8m0" and format.bits > 4:
            scales = _unswizzled(tensors[SCALE], n, format.groups(k))
            if format.bits == 8:
                return fp8_numbers(format, qdata, scales, ScaleBlock())
            if (most := int(qdata.max())) >= 64:
                raise ValueError(f"qdata: wanted codes of 6 bits, up to 63, got {most}")
            return PackedNumbers(format, PackedMatrix(qdata), PackedMatrix(scales))
        if qdata.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            block = ScaleBlock() if format.scale == "b128" else ScaleBlock(n // len(tensors[SCALE]), format.group_size)
            return fp8_numbers(format, qdata, tensors[SCALE], block)
        if format in (MXFP4, NVFP4):
            scales = _unswizzled(tensors[SCALE], n, format.groups(k))
            factor = tensors.get(TENSOR_SCALE, torch.ones((), device=qdata.device)) if format == NVFP4 else None
            return numbers(qdata, scales, format, factor)
        if SCALE_AND_ZERO in tensors:
            scales, zeros = tensors[SCALE_AND_ZERO][: format.groups(k), :n].permute(2, 1, 0)
            return _offset(module, PackedMatrix(_untiled(qdata)[:n, :k]), scales, zeros)
        if qdata.shape[1] == k:
            bits, groups = format.bits, (n, format.groups(k))
            zeros = tensors[ZERO].expand(groups) if ZERO in tensors else None
            if zeros is not None and not format.has_zero:
                check_symmetric(zeros.int() + (1 << bits - 1), bits)
                zeros = None
            codes = PackedMatrix.of_integers("qdata", qdata, bits)
            z = None if zeros is None else PackedMatrix.of_integers("zero_point", zeros, bits)
            return PackedNumbers(format, codes, PackedMatrix(tensors[SCALE].expand(groups)), z)
        codes = PackedMatrix(qdata, along="k", signed=True, bits=module.format.bits)
        return _offset(module, codes, tensors[SCALE].T, tensors[ZERO].T)


def _mappings(config: Any) -> Iterator[Any]:
    """Yield every mapping of weights to integers in a config and in the configs that it holds."""
    for key, value in config.items() if isinstance(config, Mapping) else ():
        if key in ("mapping_type", "weight_mapping_type"):
            yield value["_data"]
        elif key == "_type" and value in _INT8:
            yield "SYMMETRIC"
        else:
            yield from _mappings(value)


def _settings(name: str, stored: Mapping[str, TensorInfo]) -> _Settings:
    files = {info.file: None for info in stored.values()}
    texts = (metadata(file).get(key) for file in files for key in (f"{name}.weight", name))
    if (text := next(filter(None, texts), None)) is None:
        raise ValueError("the metadata of its file say nothing of its weight")
    try:
        parsed = json.loads(text)
        return _Settings(str(parsed["_type"]), {**parsed["_data"]})
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise ValueError(f"the metadata of its file are no weight of torchao: {type(e).__name__}: {e}") from e


def _of_an_expert(stored: Mapping[str, TensorInfo], experts: int) -> dict[str, TensorInfo]:
    """Return what headers say of the parts of one of so many experts."""
    own = {}
    for leaf, info in stored.items():
        if info.shape and leaf != "pre_quant_scale":
            if len(info.shape) != 3 or info.shape[0] not in (1, experts):
                raise ValueError(f"{leaf} has shape {info.shape}, wanted that of {experts} experts")
            info = info._replace(shape=info.shape[1:])
        own[leaf] = info
    return own


def _expert(t: torch.Tensor, index: int) -> torch.Tensor:
    """Return the part of one expert, or the one that all experts share."""
    return t[index if len(t) > 1 else 0] if t.dim() == 3 else t


def _pairs(stored: Mapping[str, TensorInfo], settings: _Settings) -> Module:
    n, half = check_tensor(stored, QDATA, ("I8",))
    check_tensor(stored, SCALE, SCALES)
    fp8 = settings.name("activation_dtype") == "float8_e4m3fn"
    zero, scale = ("none", SCALES[stored[SCALE].dtype]) if fp8 else ("float", "fp32")
    format = WeightFormat(settings.group_size(), zero, scale)
    for leaf in (SCALE, ZERO):
        check_tensor(stored, leaf, SCALES, (whole_groups(format, 2 * half), n))
    return Module(n, 2 * half, format, activations="fp8" if fp8 else None)


def _tiles(stored: Mapping[str, TensorInfo], settings: _Settings) -> Module:
    n, k = settings.attribute("shape")
    format = WeightFormat(settings.group_size(), "float", "fp32")
    columns = -(-k // 1024) * 1024
    rows, groups = -(-n // _TILE_N) * _TILE_N, columns // format.group_size
    check_tensor(stored, QDATA, ("I32",), (rows // _TILE_N, columns // _TILE_K, 32, 4))
    check_tensor(stored, SCALE_AND_ZERO, SCALES, (groups, rows, 2))
    whole_groups(format, k)
    return Module(n, k, format)


def _bytes(stored: Mapping[str, TensorInfo], settings: _Settings) -> Module:
    legal = [*(element.name for element in INTEGERS.values()), *_WIDENED]
    element = "int8" if settings.kind == "Int8Tensor" else settings.name("target_dtype")
    if element not in legal:
        raise ValueError(f"its weight has the numbers of {element}, wanted {' or '.join(legal)}")
    n, k = check_tensor(stored, QDATA, ("I8",))
    check_tensor(stored, SCALE, WIDE_SCALES)
    whole = settings.attributes.get("block_size") == [n, k]
    group = k if whole else settings.group_size()
    zero, scale = "int" if ZERO in stored or settings.kind != "Int8Tensor" else "none", stored[SCALE].dtype
    element = _WIDENED.get(element, element)
    format = WeightFormat(PER_COLUMN if group == k else group, zero, WIDE_SCALES[scale], element)
    groups = 1 if whole else n, whole_groups(format, k)
    check_tensor(stored, SCALE, WIDE_SCALES, groups)
    if zero == "int":
        check_tensor(stored, ZERO, ("I8",), groups)
    return Module(n, k, format)


def _fp8(stored: Mapping[str, TensorInfo], settings: _Settings) -> Module:
    n, k = check_tensor(stored, QDATA, FP8)
    block = settings.attribute("block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ValueError(f"its block_size is {block!r}, wanted two positive integers")
    rows, columns = block
    if n % rows and ScaleBlock(*block) != ScaleBlock():
        raise ValueError(f"blocks of {rows} rows do not divide its {n} output features")
    check_tensor(stored, SCALE, WIDE_SCALES, (-(-n // rows), -(-k // columns)))
    format = format_of(stored[QDATA], stored[SCALE], ScaleBlock(rows, columns))
    if format is None or whole_groups(format, k) != stored[SCALE].shape[1]:
        raise ValueError(f"its block_size is {block}, wanted a multiple of {SMALLEST_GROUP} columns, or all {k}")
    return Module(n, k, format)


def _mx(stored: Mapping[str, TensorInfo], settings: _Settings) -> Module:
    element = settings.name("elem_dtype")
    if element not in _MX:
        raise ValueError(f"its weight has elements of {element}, wanted {' or '.join(_MX)}")
    return _floats(stored, settings, _MX[element], "F8_E8M0")


def _nvfp4(stored: Mapping[str, TensorInfo], settings: _Settings) -> Module:
    if TENSOR_SCALE in stored:
        check_tensor(stored, TENSOR_SCALE, ("F32",), ())
    return _floats(stored, settings, NVFP4, "F8_E4M3")


def _floats(stored: Mapping[str, TensorInfo], settings: _Settings, format: WeightFormat, scales: str) -> Module:
    if (group := settings.group_size()) != format.group_size:
        raise ValueError(f"its block_size is {group}, wanted {format.group_size}")
    n, k = check_tensor(stored, QDATA, (_CODES.get(format.element, "U8"),))
    k *= 2 if format.bits == 4 else 1
    groups = whole_groups(format, k)
    swizzled = -(-n // 128) * 32, -(-groups // 4) * 16
    check_tensor(stored, SCALE, (scales,), swizzled if settings.attributes.get("is_swizzled_scales") else (n, groups))
    return Module(n, k, format)


_KINDS: dict[str, Callable[[Mapping[str, TensorInfo], _Settings], Module]] = {
    "Int4Tensor": _pairs,
    "Int4TilePackedTo4dTensor": _tiles,
    "IntxUnpackedToInt8Tensor": _bytes,
    "Int8Tensor": _bytes,
    "Float8Tensor": _fp8,
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
}
"""Functions that make a module of the headers of a tensor subclass, by its name."""


def _offset(module: Module, codes: PackedMatrix, scales: torch.Tensor, zeros: torch.Tensor) -> Numbers:
    """Return the numbers of the weight (u - 8) * scale + zero."""
    if not module.format.has_zero:
        if zeros.any():
            raise ValueError(f"its zero points are up to {zeros.abs().max():g}, wanted 0 with x in e4m3")
        return PackedNumbers(module.format, codes, PackedMatrix(scales))
    scales, zeros = scales.float(), zeros.float()
    return PackedNumbers(module.format, codes, PackedMatrix(scales), PackedMatrix(zeros - SYMMETRIC * scales))


def _untiled(words: torch.Tensor) -> torch.Tensor:
    """Return the codes (n, k) of int32 (n / 8, k / 128, 32, 4).

    Of a tile of 8 rows and 128 columns, thread 4 * i + j of a warp holds row i, and of columns 32 * w to 32 * w + 31
    its word w holds those that are 2 * j or 2 * j + 1 modulo 8, ascending in AWQ's order.
    """
    numbers = unpack(words, 4, ORDER).unflatten(3, (4, 4, 2)).unflatten(2, (_TILE_N, 4))
    rows, columns = len(words) * _TILE_N, words.shape[1] * _TILE_K
    return numbers.permute(0, 2, 1, 4, 5, 3, 6).reshape(rows, columns)  # tile, i, tile, w, eight, j, pair


def _unswizzled(scales: torch.Tensor, n: int, groups: int) -> torch.Tensor:
    """Return scales (n, groups), which may lie in cuBLAS's blocks of 128 rows and 4 groups."""
    if scales.shape == (n, groups):
        return scales
    blocks = scales.contiguous().view(torch.uint8).view(-(-n // 128), -(-groups // 4), 32, 4, 4)
    rows = blocks.permute(0, 3, 2, 1, 4).reshape(-(-n // 128) * 128, -(-groups // 4) * 4)
    return rows[:n, :groups].contiguous().view(scales.dtype)
