"""Host side of the attention of a step; ``w4gemm.integrations.decoder.attention`` launches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from w4gemm.core.problem import Device
from w4gemm.jit import Program
from w4gemm.kernels.helpers.base import HALF_KINDS, Helper
from w4gemm.kernels.stand_ins import contiguous, rows

DIMS = (64, 128, 256)
_MOST_HEADS = {64: 8, 128: 8, 256: 4}
"""Heads of q of one kv head, by their dim, whose sums fit the registers."""
_MOST_SPLITS = 8
_SLOTS_PER_SPLIT = 64
"""Slots below which a CTA is not split further."""


@dataclass(frozen=True)
class StepAttention(Helper):
    """Attention of one new token of each sequence on SM90; see the kernel."""

    dtype: torch.dtype
    dim: int
    group: int
    splits: int
    sinks: bool = False

    name: ClassVar[str] = "step_attention"

    @classmethod
    def of(
        cls, device: Device, dtype: torch.dtype, dim: int, group: int, splits: int, sinks: bool = False
    ) -> StepAttention | None:
        """Return the kernel; None where it does not run."""
        fits = dim in DIMS and group <= _MOST_HEADS[dim] and dtype in HALF_KINDS
        return cls(dtype, dim, group, splits, sinks) if fits and cls.runs(device) else None

    @staticmethod
    def splits_for(units: int, length: int, sms: int) -> int:
        """CTAs of a sequence and kv head, of which there are ``units``, for caches of ``length`` slots."""
        splits = 1
        while splits < _MOST_SPLITS and units * splits < sms and length >= 2 * splits * _SLOTS_PER_SPLIT:
            splits *= 2
        return splits

    def program(self) -> Program:
        import cutlass.cute as cute

        from w4gemm.kernels.helpers.device.step_attention import StepAttentionKernel

        batch, heads, kv_heads, length = (cute.sym_int() for _ in range(4))
        q, k, v = (rows(self.dtype, batch, count, self.dim) for count in (heads, kv_heads, kv_heads))
        angles = [rows(self.dtype, batch, self.dim) for _ in range(2)]
        caches = [contiguous(self.dtype, batch, kv_heads, length, self.dim, align=16) for _ in range(2)]
        slot, first = contiguous(torch.int64, 1), contiguous(torch.int32, batch)
        sinks = contiguous(self.dtype, heads) if self.sinks else None
        out = contiguous(self.dtype, batch, heads, self.dim, align=16)
        kernel = StepAttentionKernel(HALF_KINDS[self.dtype], self.dim, self.group, self.splits, self.sinks)
        return Program(kernel, (q, k, v, *angles, *caches, slot, first, sinks, out, 1.0, 1))
