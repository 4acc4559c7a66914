"""Host sides of the kernels that give rows like those of x: normed, gated, or with columns in another order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from w4gemm.core.activation import parse
from w4gemm.core.problem import Device
from w4gemm.jit import Program
from w4gemm.kernels.helpers.base import HALF_KINDS, Helper, LayerFacts
from w4gemm.kernels.stand_ins import contiguous, rows
from w4gemm.kernels.variant import HOPPER_SHARED_MEMORY

_VECTOR = 8
_MOST_THREADS = 512
_MOST_CHUNKS = 4


@dataclass(frozen=True)
class RmsNorm(Helper):
    """y / sqrt(mean(y ** 2) + eps) * weight of 16-bit rows, on SM90; y is x, or with ``add`` x + residual."""

    dtype: torch.dtype
    threads: int
    chunks: int
    add: bool = False

    name: ClassVar[str] = "rms_norm"

    @classmethod
    def of(cls, device: Device, dtype: torch.dtype, k: int, add: bool = False) -> RmsNorm | None:
        """Return the kernel for rows of k columns; None where it does not run."""
        vectors = -(-k // _VECTOR)
        threads = min(_MOST_THREADS, 1 << max(5, (vectors - 1).bit_length()))
        chunks = -(-vectors // threads)
        if dtype not in HALF_KINDS or k % _VECTOR or chunks > _MOST_CHUNKS or not cls.runs(device):
            return None
        return cls(dtype, threads, chunks, add)

    @staticmethod
    def takes(weight: torch.Tensor, *rows: torch.Tensor) -> bool:
        """True if eight columns of all rows (x and a residual) and of the weight can be loaded at a time."""
        aligned = all(t.dtype == weight.dtype and t.is_contiguous() and t.data_ptr() % 16 == 0 for t in rows)
        return aligned and weight.data_ptr() % 16 == 0

    def program(self) -> Program:
        import cutlass.cute as cute

        from w4gemm.kernels.helpers.device.rms_norm import RmsNormKernel

        m, k = cute.sym_int(), cute.sym_int(divisibility=_VECTOR)
        x, out = (contiguous(self.dtype, m, k, align=16) for _ in range(2))
        residual, total = (contiguous(self.dtype, m, k, align=16) if self.add else None for _ in range(2))
        weight = contiguous(self.dtype, k, align=16)
        kernel = RmsNormKernel(HALF_KINDS[self.dtype], self.threads, self.chunks, self.add)
        return Program(kernel, (x, residual, weight, out, total, 0.0))


@dataclass(frozen=True)
class GateHalves(Helper):
    """act(gate, up) of 16-bit rows, on SM90. activation: a gated one."""

    dtype: torch.dtype
    activation: str

    name: ClassVar[str] = "gate_halves"

    @classmethod
    def of(cls, device: Device, dtype: torch.dtype, activation: str) -> GateHalves | None:
        """Return the kernel; None where it does not run."""
        return cls(dtype, activation) if dtype in HALF_KINDS and cls.runs(device) else None

    @staticmethod
    def takes(x: torch.Tensor) -> bool:
        """True if eight columns of each half of x (m, 2 n) can be loaded at a time."""
        return x.shape[1] % 16 == 0 and x.data_ptr() % 16 == 0 and x.is_contiguous()

    def program(self) -> Program:
        import cutlass.cute as cute

        from w4gemm.kernels.helpers.device.gate_halves import GateHalvesKernel

        m, n, both = cute.sym_int(), cute.sym_int(divisibility=8), cute.sym_int(divisibility=16)
        x, out = (contiguous(self.dtype, m, columns, align=16) for columns in (both, n))
        return Program(GateHalvesKernel(HALF_KINDS[self.dtype], parse(self.activation)), (x, out))


_BARRIER_BYTES = 64
_LARGEST = (HOPPER_SHARED_MEMORY - _BARRIER_BYTES) // 2 // 8 * 8
_SMALLEST = 4096
"""Capacity below which no more CTAs would run at once."""
_COLUMNS_PER_PASS = 2048
"""Columns that a CTA gathers in one pass."""
_CTAS_PER_SM = 2


@dataclass(frozen=True)
class ColumnGather(Helper):
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
    def forms(cls, layer: LayerFacts) -> Iterable[tuple[Any, ...]]:
        if not layer.act_order or layer.fp8:  # columns of fp8 x are gathered by PyTorch
            return ()
        ways = ((True, False), (True, True)) if layer.experts else ((False, False),)
        return [(layer.dtype, layer.k, *way) for way in ways]

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
        import cutlass.cute as cute

        from w4gemm.kernels.helpers.device.column_gather import ColumnGatherKernel

        m, k, experts = (cute.sym_int() for _ in range(3))
        x = rows(self.dtype, cute.sym_int() if self.indexed else m, k, step=8)
        perm = contiguous(torch.int32, *((experts, k) if self.experts else (k,)), align=16)
        starts = contiguous(torch.int32, experts) if self.experts else None
        indices = contiguous(torch.int32, m) if self.indexed else None
        out = rows(self.dtype, m, k, step=8)
        return Program(ColumnGatherKernel(self.capacity), (x, perm, starts, indices, out, 1))
