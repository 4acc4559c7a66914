"""Host side of the attention of a step; ``w4gemm.integrations.decoder.attention`` launches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from w4gemm.core.problem import Device
from w4gemm.jit import Program
from w4gemm.kernels.helpers.base import HALF_KINDS, Sm90Helper, half_dtype

DIMS = (64, 128, 256)
_MOST_HEADS = {64: 8, 128: 8, 256: 4}
"""Heads of q of one kv head, by their dim, whose sums fit the registers."""
_MOST_SPLITS = 8
_SLOTS_PER_SPLIT = 64
"""Slots below which a CTA is not split further."""


@dataclass(frozen=True)
class StepAttention(Sm90Helper):
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
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

        from w4gemm.kernels.helpers.device.step_attention import StepAttentionKernel

        kind = HALF_KINDS[self.dtype]
        dtype = half_dtype(kind)
        batch, heads, kv_heads, length = (cute.sym_int() for _ in range(4))

        def rows(count: cute.SymInt) -> cute.Tensor:
            return make_fake_tensor(dtype, (batch, count, self.dim), (cute.sym_int64(), cute.sym_int64(), 1))

        angles = [make_fake_tensor(dtype, (batch, self.dim), (cute.sym_int64(), 1)) for _ in range(2)]
        order = (3, 2, 1, 0)
        cache = [
            make_fake_compact_tensor(dtype, (batch, kv_heads, length, self.dim), stride_order=order, assumed_align=16)
            for _ in range(2)
        ]
        slot = make_fake_compact_tensor(cutlass.Int64, (1,), assumed_align=8)
        first = make_fake_compact_tensor(cutlass.Int32, (batch,), assumed_align=4)
        out = make_fake_compact_tensor(dtype, (batch, heads, self.dim), stride_order=(2, 1, 0), assumed_align=16)
        sinks = make_fake_compact_tensor(dtype, (heads,), assumed_align=2) if self.sinks else None
        values = (rows(heads), rows(kv_heads), rows(kv_heads), *angles, *cache, slot, first, sinks, out, 1.0, 1)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return Program(StepAttentionKernel(kind, self.dim, self.group, self.splits, self.sinks), (*values, stream))
