"""Folders quantized by bitsandbytes to NF4, FP4 or int8, as transformers saves them.

A module's ``weight`` is uint8 (n * k / 2, 1), or the same bytes as floats: codes row after row, the even element in the
high nibble. ``weight.quant_map`` float32 (16) are the numbers of the codes. ``weight.absmax`` has the scale of each
block of 64 elements, or as many as ``weight.quant_state.bitsandbytes__nf4`` (or ``__fp4``) says, JSON as bytes: float32
or, doubly quantized, uint8 indices into ``weight.nested_quant_map``, whose numbers times ``weight.nested_absmax``, one
for each 256, and plus an offset are the scales.

Blocks run on over the ends of rows. Where k is no multiple of them, groups are their common divisor with k.

A module in 8 bits (LLM.int8) is ``weight`` int8 (n, k), ``SCB`` float32 (n), the largest magnitude of each row, and
``weight_format`` uint8 (), 0 for rows in order. w = weight * SCB / 127. x stays in 16 bits, while LLM.int8 quantizes
all of it but outliers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.checkpoints.packed_numbers import PackedMatrix, PackedNumbers
from w4gemm.checkpoints.quantized_folder import Packing
from w4gemm.checkpoints.stored import DTYPES, WIDE_SCALES, check_tensor
from w4gemm.core.elements import codebook
from w4gemm.core.format_names import SMALLEST_GROUP
from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.packing.bits import unpack

_STATES = ("weight_bitsandbytes__nf4", "weight_bitsandbytes__fp4")
_NESTED = ("weight_nested_absmax", "weight_nested_quant_map")
_WORDS = ("U8", "I8", *WIDE_SCALES)
"""safetensors' names of the dtypes of ``weight``, which may be stored as floats."""
_OF_127 = 7.874015718698502e-3
"""float32 of 1 / 127, which bitsandbytes multiplies by."""
_PART = re.compile(
    r"(.+\.weight)\.(?:quant_state\.)?(absmax|quant_map|nested_absmax|nested_quant_map|bitsandbytes__\w+)"
)


class BitsAndBytesPacking(Packing):
    """Every module says its own settings."""

    method = "bitsandbytes"
    contents = "a folder with a model quantized by bitsandbytes (NF4, FP4, int8)"
    marks: ClassVar[tuple[str, ...]] = ("weight_absmax", *_STATES)
    others: ClassVar[tuple[str, ...]] = ("weight", "weight_quant_map", *_NESTED)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Packing:
        bits = [bits for bits in (4, 8) if config.get(f"load_in_{bits}bit", config.get(f"_load_in_{bits}bit"))]
        if len(bits) != 1:
            raise ValueError(f"load_in_4bit and load_in_8bit are {'both' if bits else 'not'} true, wanted one of them")
        return cls(config) if bits == [4] else Int8Packing(config)

    @staticmethod
    def renamed(name: str) -> str:
        """The parts of a weight become parts of its module."""
        match = _PART.fullmatch(name)
        return f"{match[1]}_{match[2]}" if match else name

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        state = _state({leaf: stored[leaf].read() for leaf in _STATES if leaf in stored})
        n, k = state["shape"]
        blocks = -(-n * k // state["blocksize"])
        nested = "nested_offset" in state
        expected = {"weight_absmax": ("U8" if nested else "F32", blocks), "weight_quant_map": ("F32", 16)}
        if nested:
            groups = -(-blocks // state["nested_blocksize"])
            expected |= dict(zip(_NESTED, (("F32", groups), ("F32", 256)), strict=True))
        for leaf, (dtype, count) in expected.items():
            _check(stored, leaf, (dtype,), count)
        stored_bytes = -(-n * k // 2)
        word = DTYPES.get(stored["weight"].dtype, torch.uint8)
        _check(stored, "weight", _WORDS, stored_bytes // word.itemsize)
        group = math.gcd(k, state["blocksize"])
        if group % SMALLEST_GROUP:
            raise ValueError(
                f"blocks of {state['blocksize']} run on over the ends of rows of {k}, so that groups have {group} "
                f"columns; wanted a multiple of {SMALLEST_GROUP}: dequantize this model, and quantize it again"
            )
        element = codebook(stored["weight_quant_map"].read().tolist())
        return Module(n, k, WeightFormat(group, scale="fp32", element=element), "bias" in stored)

    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        state, n, k = _state(tensors), module.n, module.k
        packed = tensors["weight"].contiguous().flatten().view(torch.uint8)
        codes = unpack(packed, module.format.bits, (1, 0))[: n * k].view(n, k)
        scales = tensors["weight_absmax"].flatten()
        if "nested_offset" in state:
            factors, numbers = (tensors[leaf].flatten() for leaf in _NESTED)
            factors = factors.repeat_interleave(state["nested_blocksize"])[: len(scales)]
            scales = numbers[scales.int()] * factors + torch.tensor(
                state["nested_offset"], dtype=torch.float32, device=packed.device
            )
        group = module.format.group_size
        starts = torch.arange(0, n * k, group, device=packed.device)
        of_groups = scales[starts // state["blocksize"]].view(n, k // group)
        return PackedNumbers(module.format, PackedMatrix(codes), PackedMatrix(of_groups))


class Int8Packing(BitsAndBytesPacking):
    """The packing of 8 bits."""

    marks = ("SCB", "weight_format")
    others = ("weight",)

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        n, k = check_tensor(stored, "weight", ("I8",))
        check_tensor(stored, "SCB", ("F32",), (n,))
        order = stored["weight_format"].read().flatten().tolist() if "weight_format" in stored else [0]
        if order != [0]:
            raise ValueError(
                f"weight_format is {order}, an order of a GPU's matrix instructions, wanted 0, rows in order: save the "
                "model again by bitsandbytes 0.45 or newer"
            )
        return Module(n, k, WeightFormat(PER_COLUMN, scale="fp32", element="int8"), "bias" in stored)

    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        codes = PackedMatrix.of_integers("weight", tensors["weight"], module.format.bits)
        return PackedNumbers(module.format, codes, PackedMatrix(tensors["SCB"][:, None] * _OF_127))


def _state(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The settings of a module."""
    states = [tensors[leaf] for leaf in _STATES if leaf in tensors]
    if len(states) != 1:
        raise ValueError(
            f"wanted one weight.quant_state.bitsandbytes__nf4 or __fp4 beside its absmax, got {len(states)}"
        )
    try:
        state = json.loads(bytes(states[0].flatten().tolist()))
        n, k = state["shape"]
        numbers = n, k, state["blocksize"], state.get("nested_blocksize", 1)
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            raise ValueError(f"sizes {numbers}, wanted positive integers")
        if "nested_blocksize" in state:
            state["nested_offset"] = float(state["nested_offset"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise ValueError(f"weight.quant_state: no settings that can be read: {type(e).__name__}: {e}") from e
    return state


def _check(stored: Mapping[str, TensorInfo], leaf: str, dtypes: tuple[str, ...], count: int) -> None:
    """Raise ValueError unless a tensor is there, of one of these dtypes and so many elements."""
    name = leaf.replace("_", ".", 1) if leaf != "weight" else leaf
    if leaf not in stored:
        raise ValueError(f"there is no {name} beside its {', '.join(sorted(stored))}")
    info = stored[leaf]
    if info.dtype not in dtypes or math.prod(info.shape) != count:
        raise ValueError(
            f"{name} is {info.dtype} of shape {info.shape}, wanted {count} elements of {' or '.join(dtypes)}"
        )
