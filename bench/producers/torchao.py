"""Weights that torchao quantizes, flattened for safetensors by its own code, and as that dequantizes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench.producers.common import GROUP, Pairs, Weights, folder_pairs

Made = tuple[Any, torch.Tensor]
"""A tensor subclass, and its numbers in float32."""


def folder_of(make: Callable[[torch.Tensor], Made]) -> Callable[[Path, Weights], Pairs]:
    def pairs(folder: Path, weights: Weights) -> Pairs:
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

        made = {name: make(w) for name, w in weights.items()}
        stored, metadata = flatten_tensor_state_dict({f"{name}.weight": t for name, (t, _) in made.items()})
        expected = {name: numbers for name, (_, numbers) in made.items()}
        return folder_pairs(folder, {"quant_method": "torchao"}, stored, expected, metadata)

    return pairs


def mxfp4(swizzled: bool) -> Callable[[torch.Tensor], Made]:
    """``swizzled``: scales in cuBLAS's blocks."""

    def make(w: torch.Tensor) -> Made:
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        t = MXTensor.to_mx(w, torch.float4_e2m1fn_x2, GROUP, is_swizzled_scales=swizzled)
        return t, t.dequantize(torch.float32)

    return make


def nvfp4(swizzled: bool) -> Callable[[torch.Tensor], Made]:
    def make(w: torch.Tensor) -> Made:
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

        factor = per_tensor_amax_to_scale(w.abs().max())
        t = NVFP4Tensor.to_nvfp4(w, per_tensor_scale=factor, is_swizzled_scales=swizzled)
        return t, t.dequantize(torch.float32)

    return make


def in_bytes(w: torch.Tensor, dtype: torch.dtype = torch.int4) -> Made:
    """IntxUnpackedToInt8Tensor, with zero points."""
    from torchao.quantization import IntxUnpackedToInt8Tensor, MappingType

    t = IntxUnpackedToInt8Tensor.from_hp(w, (1, GROUP), dtype, mapping_type=MappingType.ASYMMETRIC)
    return t, t.dequantize()


def mx(w: torch.Tensor, elements: Any) -> Made:
    """elements: torchao's name of floats of 8 or 6 bits. Scales in cuBLAS's blocks."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    t = MXTensor.to_mx(w, elements, GROUP, is_swizzled_scales=True)
    return t, t.dequantize(torch.float32)


def int8(w: torch.Tensor) -> Made:
    """Int8Tensor with one scale of the matrix."""
    from torchao.quantization import Int8Tensor, PerTensor

    t = Int8Tensor.from_hp(w, PerTensor())
    return t, t.dequantize(torch.float32)


def fp8(w: torch.Tensor) -> Made:
    from torchao.quantization import Float8Tensor, PerRow

    t = Float8Tensor.from_hp(w, granularity=PerRow())
    return t, t.dequantize(torch.float32)


def in_pairs(w: torch.Tensor) -> Made:
    """Int4Tensor of the numbers of tinygemm; packed by the definition, since torchao packs by mslk's kernels."""
    from torchao.quantization import Int4Tensor

    codes, scales, zeros, numbers = _tinygemm(w)
    q = codes - 8
    packed = ((q[:, ::2] & 15) | (q[:, 1::2] << 4)).to(torch.int8)
    return Int4Tensor(packed, scales.T.contiguous(), zeros.T.contiguous(), [1, GROUP], w.shape), numbers


def in_tiles(w: torch.Tensor) -> Made:
    """Int4TilePackedTo4dTensor; its words by the definition, since PyTorch packs them on GPUs only."""
    from torchao.quantization import Int4TilePackedTo4dTensor
    from torchao.quantization.utils import pack_tinygemm_scales_and_zeros

    codes, scales, zeros, numbers = _tinygemm(w)
    n, k = w.shape
    rows, columns = -n % 8, -k % 1024
    tiles = torch.nn.functional.pad(codes, (0, columns, 0, rows)).view((n + rows) // 8, 8, -1, 4, 2, 2, 4, 2)
    numbers_of_words = tiles.permute(0, 2, 1, 6, 3, 7, 4, 5).flatten(
        -3
    )  # the odd columns' nibbles above the even ones'
    words = (numbers_of_words.long() << torch.arange(0, 32, 4)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).int().flatten(2, 3)
    padded = (torch.nn.functional.pad(t, (0, columns // GROUP, 0, rows)) for t in (scales, zeros))
    both = pack_tinygemm_scales_and_zeros(*padded)
    return Int4TilePackedTo4dTensor(words, both, [1, GROUP], w.shape), numbers


def _tinygemm(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (n, k), scales and zero points (n, groups) in bf16, and the numbers that torchao makes of them."""
    from torchao.quantization import quant_primitives as q

    block, limits = (1, GROUP), (0, 15)
    scales, zeros = q._choose_qparams_affine_tinygemm(
        w, q.MappingType.ASYMMETRIC, block, torch.int32, *limits, None, torch.bfloat16, torch.bfloat16
    )
    codes = q._quantize_affine_tinygemm(w, block, scales.float(), zeros.float(), torch.int32, *limits)
    numbers = q._dequantize_affine_tinygemm(codes, block, scales, zeros, torch.int32, *limits)
    shape = len(w), -1
    return codes, scales.view(shape), zeros.view(shape), numbers
