"""Host side of the gather of columns; ``w4gemm.api.gather`` is its only caller."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from w4gemm.core.problem import Device
from w4gemm.jit import Program
from w4gemm.kernels.helpers.base import HALF_KINDS, LayerFacts, Sm90Helper, half_dtype
from w4gemm.kernels.variant import HOPPER_SHARED_MEMORY

_BARRIER_BYTES = 64
_LARGEST = (HOPPER_SHARED_MEMORY - _BARRIER_BYTES) // 2 // 8 * 8
_SMALLEST = 4096
"""Capacity below which no more CTAs would run at once."""
_COLUMNS_PER_PASS = 2048
"""Columns that a CTA gathers in one pass."""
_CTAS_PER_SM = 2


@dataclass(frozen=True)
class ColumnGather(Sm90Helper):
    """The columns of 16-bit x in the order of a perm, on SM90.

    Args:
        capacity: elements of a row that shared memory holds: a power of two, so that many k share a compiled object.
        experts: True if each row has the perm of its expert.
        indexed: True if rows of x are read through indices.
    """

    dtype: torch.dtype
    capacity: int
    experts: bool = False
    indexed: bool = False

    name: ClassVar[str] = "column_gather"

    @classmethod
    def of(
        cls, device: Device, dtype: torch.dtype, k: int, experts: bool = False, indexed: bool = False
    ) -> ColumnGather | None:
        """Return the gather for rows of k elements; None where it does not run."""
        if dtype not in HALF_KINDS or k % 8 or k > _LARGEST or not cls.runs(device):
            return None
        return cls(dtype, min(max(_SMALLEST, 1 << (k - 1).bit_length()), _LARGEST), experts, indexed)

    @classmethod
    def needed(cls, device: Device, layer: LayerFacts) -> Iterable[ColumnGather]:
        # columns of fp8 x are gathered by PyTorch
        ways = ((True, False), (True, True)) if layer.experts else ((False, False),)
        helpers = (cls.of(device, layer.dtype, layer.k, *way) for way in ways if layer.act_order and not layer.fp8)
        return tuple(helper for helper in helpers if helper is not None)

    @staticmethod
    def takes(x: torch.Tensor, perm: torch.Tensor) -> bool:
        """True if 16 bytes of a row of x and of perm can be copied at a time."""
        row, column = x.stride()
        return column == 1 and row % 8 == 0 and (x.data_ptr() | perm.data_ptr()) % 16 == 0

    @staticmethod
    def ctas_per_row(m: int, k: int, sms: int) -> int:
        """CTAs that share the columns of a row, because one CTA per row would not fill the GPU if m is small."""
        return max(1, min(-(-k // _COLUMNS_PER_PASS), sms * _CTAS_PER_SM // m))

    def program(self) -> Program:
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

        from w4gemm.kernels.helpers.device.column_gather import ColumnGatherKernel

        dtype = half_dtype(HALF_KINDS[self.dtype])
        m, k, rows, experts = (cute.sym_int() for _ in range(4))
        shape = rows if self.indexed else m, k
        x = make_fake_tensor(dtype, shape, (cute.sym_int64(divisibility=8), 1), assumed_align=16)
        perms, order = ((experts, k), (1, 0)) if self.experts else ((k,), (0,))
        perm = make_fake_compact_tensor(cutlass.Int32, perms, stride_order=order, assumed_align=16)
        starts = make_fake_compact_tensor(cutlass.Int32, (experts,)) if self.experts else None
        indices = make_fake_compact_tensor(cutlass.Int32, (m,)) if self.indexed else None
        out = make_fake_tensor(dtype, (m, k), (cute.sym_int64(divisibility=8), 1), assumed_align=16)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return Program(ColumnGatherKernel(self.capacity), (x, perm, starts, indices, out, 1, stream))
