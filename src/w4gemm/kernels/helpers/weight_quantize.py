"""Host side of the quantization of dense weights into blocks; ``w4gemm.api.update`` is its only caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device
from w4gemm.jit import Program
from w4gemm.kernels.helpers.base import HALF_KINDS, Helper
from w4gemm.kernels.stand_ins import contiguous
from w4gemm.packing.block import BLOCK_K
from w4gemm.packing.codecs import MMA16, codec_for
from w4gemm.packing.codecs.floats import FLOATS

_SCALES = {"none": ("bf16", "fp16", "fp32", "b128", "e8m0", "e4m3_row"), "int": ("bf16", "fp16")}
_FLOATS = ("e2m1", *FLOATS)


@dataclass(frozen=True)
class WeightQuantize(Helper):
    """Blocks of the layout ``mma16`` from 16-bit numbers, on SM90.

    Args:
        dtype: of the dense numbers.
        format: name of the format.
        pairs: True if rows come from two tensors by turns.
        limit: largest magnitude of a number.
    """

    dtype: torch.dtype
    format: str
    pairs: bool
    limit: float

    name: ClassVar[str] = "weight_quantize"

    @classmethod
    def of(
        cls, device: Device, dtype: torch.dtype, format: WeightFormat, pairs: bool, limit: float
    ) -> WeightQuantize | None:
        """Return the kernel; None where it does not run."""
        known = format.element_rule.counts or format.element in _FLOATS
        known &= format.scale in _SCALES.get(format.zero, ()) and codec_for(format, MMA16) is not None
        if dtype not in HALF_KINDS or not known or not cls.runs(device):
            return None
        return cls(dtype, str(format), pairs, limit)

    @classmethod
    def needs_ends(cls, format: WeightFormat) -> bool:
        """True if groups reach beyond a block, whose ends the kernel then takes."""
        inside = format.group_size > 0 and BLOCK_K % format.group_size == 0 and not format.scale_rule.block_rows
        return not inside and not cls.needs_row_scales(format)

    @staticmethod
    def needs_row_scales(format: WeightFormat) -> bool:
        """True if the one scale of a row lies beside the blocks, and the kernel takes it."""
        codec = codec_for(format, MMA16)
        return codec is not None and codec.has_channels(format) and not format.has_channels

    @staticmethod
    def takes(weight: torch.Tensor) -> bool:
        """True if two columns of weight (..., n, k) can be loaded at a time."""
        return weight.is_contiguous() and weight.shape[-1] % 2 == 0 and weight.data_ptr() % 4 == 0

    def program(self) -> Program:
        import cutlass.cute as cute

        from w4gemm.kernels.helpers.device.weight_quantize import WeightQuantizeKernel

        format = WeightFormat.parse(self.format)
        codec = codec_for(format, MMA16)
        assert codec is not None, f"{format} has blocks"
        kernel = WeightQuantizeKernel(HALF_KINDS[self.dtype], format, codec, self.limit)
        experts, rows, k, n, n_blocks, k_blocks = (cute.sym_int() for _ in range(6))
        dense = contiguous(self.dtype, experts, rows, k, align=4)
        odd = contiguous(self.dtype, experts, rows, k, align=4) if self.pairs else None
        channels = contiguous(torch.float32, experts, n) if kernel.channels else None
        ends = contiguous(torch.float32, experts, n, cute.sym_int(), 2, align=8) if self.needs_ends(format) else None
        blocks = contiguous(torch.int32, experts, n_blocks, k_blocks, kernel.block.words, align=16)
        refused = contiguous(torch.int32, 1)
        return Program(kernel, (dense, odd, channels, ends, blocks, refused, 0))
