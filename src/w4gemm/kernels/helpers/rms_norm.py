"""Host side of the norm; ``w4gemm.api.step`` is its only caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from w4gemm.core.problem import Device
from w4gemm.jit import Program
from w4gemm.kernels.helpers.base import HALF_KINDS, Sm90Helper, half_dtype, half_rows

_VECTOR = 8
_MOST_THREADS = 512
_MOST_CHUNKS = 4


@dataclass(frozen=True)
class RmsNorm(Sm90Helper):
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
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

        from w4gemm.kernels.helpers.device.rms_norm import RmsNormKernel

        kind = HALF_KINDS[self.dtype]
        m, k = cute.sym_int(), cute.sym_int(divisibility=_VECTOR)
        x, out = half_rows(kind, m, k), half_rows(kind, m, k)
        residual, total = (half_rows(kind, m, k) if self.add else None for _ in range(2))
        weight = make_fake_compact_tensor(half_dtype(kind), (k,), assumed_align=16)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        kernel = RmsNormKernel(kind, self.threads, self.chunks, self.add)
        return Program(kernel, (x, residual, weight, out, total, 0.0, stream))
