"""Host side of the rows that an embedding looks up in a packed weight; ``w4gemm.api.lookup`` is its only caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import FLOATS
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.jit import Program
from w4gemm.kernels.gpu import MOST_GROUP_WORDS, refused_groups
from w4gemm.kernels.helpers.base import HALF_KINDS, Helper
from w4gemm.kernels.stand_ins import contiguous
from w4gemm.kernels.variant import GpuVariant
from w4gemm.packing.block import BLOCK_K, BLOCK_N
from w4gemm.packing.codecs import MMA16, codec_for

_VECTOR = 8
_CTAS_PER_SM = 16


@dataclass(frozen=True)
class EmbeddingRows(Helper):
    """Rows of a weight in the layout ``mma16``, by ids, on SM90.

    Args:
        dtype: of the rows.
        format: name of the weight's format.
        wide: True for int64 ids, False for int32.
    """

    dtype: torch.dtype
    format: str
    wide: bool

    name: ClassVar[str] = "embedding_rows"

    @classmethod
    def of(
        cls, device: Device, dtype: torch.dtype, format: WeightFormat | str, k: int, wide: bool = True
    ) -> EmbeddingRows | None:
        """Return the kernel for rows of k columns; None where it does not run."""
        format = WeightFormat.of(format)
        codec = codec_for(format, MMA16)
        if dtype not in HALF_KINDS or codec is None or codec.has_channels(format) or k % _VECTOR:
            return None
        if refused_groups(_problem(dtype, format), MOST_GROUP_WORDS) or not cls.runs(device):
            return None
        return cls(dtype, str(format), wide)

    @staticmethod
    def most_ctas(device: Device) -> int:
        """CTAs of a launch at most, which then loop."""
        return _CTAS_PER_SM * device.sms

    def program(self) -> Program:
        import cutlass.cute as cute

        from w4gemm.kernels.helpers.device.embedding_rows import EmbeddingRowsKernel

        problem = _problem(self.dtype, WeightFormat.parse(self.format))
        variant: GpuVariant = GpuVariant.of(problem, GemmConfig(1, BLOCK_N, BLOCK_K))
        tokens, k = cute.sym_int(), cute.sym_int(divisibility=_VECTOR)
        weight = contiguous(torch.int32, cute.sym_int(), cute.sym_int(), variant.block.words, align=16)
        number = torch.int64 if self.wide else torch.int32
        ids = contiguous(number, tokens, align=number.itemsize)
        out = contiguous(self.dtype, tokens, k, align=16)
        return Program(EmbeddingRowsKernel(variant), (weight, ids, out, 1, 1))


def can_look_up(device: Device, dtype: torch.dtype, format: WeightFormat, k: int) -> bool:
    """True if a device decodes rows (k) of a format to a dtype about as fast as it would read dense ones: a CPU, and
    a GPU with the kernel."""
    if device.kind == "cpu":
        return dtype in FLOATS
    return EmbeddingRows.of(device, dtype, format, k) is not None


def _problem(dtype: torch.dtype, format: WeightFormat) -> GemmProblem:
    """A problem with the weight's format and the rows' dtype, which alone matter."""
    return GemmProblem(1, BLOCK_N, BLOCK_K, dtype, format, "mma16")
