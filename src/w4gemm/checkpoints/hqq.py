"""Folders quantized by HQQ with groups along k (axis 1), as transformers and ``HQQLinear.state_dict`` save them.

With the matrix as rows of one group each, a module is ``W_q`` uint8 (rows * bits / 8, group_size), of 4 bits the codes
of the first half of the rows in high nibbles, of the second half in low ones, of 2 bits of quarters alike, and of 1 bit
of eighths; codes of 8, 6 and 5 bits are bytes. HQQ has no 7 bits. Three numbers (1.58 bits) lie as 2 bits; these and 1
bit become int2. Of 3 bits it is int32 (ceil(rows / 10), group_size) with tenths of the rows, the first one in
bits 27 to 29. ``scale`` and ``zero`` (rows, 1); and its settings as small
tensors: ``shape``, ``nbits``, ``group_size``, ``axis``, ``packing``, ... w = (u - zero) * scale.

That is scale * u + z with z = -zero * scale, which float32 holds exactly for scales and zeros of 16 bits. Of float32
ones the scale is rounded to 24 - bits significant bits, and z to float32, which changes a weight of 4 bits by at most
2**-19 of its group's range.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.checkpoints.packed_numbers import PackedMatrix, PackedNumbers
from w4gemm.checkpoints.quantized_folder import Packing
from w4gemm.checkpoints.stored import DTYPES, WIDE_SCALES, check_bits, check_tensor
from w4gemm.core.elements import INTEGERS
from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.packing.bits import fields

_SETTINGS = ("shape", "nbits", "group_size", "axis", "packing", "channel_wise", "quant_scale", "quant_zero")
_NOTES = (
    *("view_as_float", "unpack_view_dtype", "compute_dtype", "optimize", "round_zero", "offload_meta"),
    *("encoded_state_dict", "stores_quant_config"),
)
"""Small tensors of a module that say nothing of its numbers."""
_WORDS = ("U8", "I32", *WIDE_SCALES)
"""safetensors' names of the dtypes of ``W_q``, which may be stored as floats."""

_PACKINGS = {8: "8bit_u8", 6: "8bit_u8", 5: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}
"""HQQ's name of how codes of so many bits lie."""


class HQQPacking(Packing):
    """Every module says its own settings."""

    method = "hqq"
    contents = "a folder with a model quantized by HQQ (axis 1)"
    marks = ("W_q", "zero", *_SETTINGS)
    others = ("scale", *_NOTES)

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        settings: dict[str, Any] = {leaf: stored[leaf].read().tolist() for leaf in _SETTINGS if leaf in stored}
        bits: Any = settings.get("nbits")
        bits = 2 if isinstance(bits, float) and round(bits, 2) == 1.58 else bits
        check_bits(bits, tuple(_PACKINGS))
        if (axis := settings.get("axis")) != 1:
            raise ValueError(
                f"axis is {axis!r}: its groups run along the output features, so that sums along k share no scale; "
                "wanted 1: quantize the dense model again with axis=1"
            )
        if (packing := "".join(map(chr, settings.get("packing", [])))) != _PACKINGS[bits]:
            raise ValueError(f"packing is {packing!r}, wanted {_PACKINGS[bits]!r}")
        if settings.get("quant_scale") or settings.get("quant_zero") or not settings.get("channel_wise", 1):
            raise ValueError("its scales are quantized, or one for the whole matrix; quantize without these options")
        n, k = settings.get("shape", [0, 0])
        group = settings.get("group_size") or k
        if not all(isinstance(size, int) and size > 0 for size in (n, k, group)) or k % group:
            raise ValueError(f"shape is {(n, k)}, wanted rows of whole groups of {group}")
        rows, words = n * (k // group), check_tensor(stored, "W_q", _WORDS)
        lines = -(-rows // 10) if bits == 3 else rows * (bits if 8 % bits == 0 else 8) / 8
        line = 4 * group if bits == 3 else group
        if (words[0], words[1] * DTYPES[stored["W_q"].dtype].itemsize) != (lines, line):
            raise ValueError(f"W_q has shape {words}, wanted {lines:g} rows of {line} bytes for {(n, k)}")
        format = WeightFormat(PER_COLUMN if group == k else group, "float", "fp32", INTEGERS[max(bits, 2)].name)
        for leaf in ("scale", "zero"):
            check_tensor(stored, leaf, WIDE_SCALES, (rows, 1))
        return Module(n, k, format, "bias" in stored)

    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        format, groups = module.format, (module.n, module.format.groups(module.k))
        packed, count = tensors["W_q"], module.n * module.k
        if format.bits == 3:
            words = packed.view(torch.int32).flatten()
            parts = [(words >> shift & 7).to(torch.uint8) for shift in range(27, -3, -3)]
        else:
            parts = fields(packed.view(torch.uint8).flatten(), packed.nbytes * 8 // count)[::-1]
        codes = torch.cat(parts)[:count].view(module.n, module.k)
        scales = format.stored_scales(tensors["scale"].float()).view(groups)
        zeros = -tensors["zero"].float().view(groups) * scales
        return PackedNumbers(format, *map(PackedMatrix, (codes, scales, zeros)))
