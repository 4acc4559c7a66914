"""Host side of the norm; ``w4gemm.integrations.transformers.fused_step`` is its only caller."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from w4gemm.core.problem import Device
from w4gemm.jit import Program, Unit
from w4gemm.kernels.helper import HALF_KINDS, LayerFacts, half_dtype, runs_on
from w4gemm.kernels.sm90_mixed_gemm.spec import Sm90MixedGemm

_VECTOR = 8
_MOST_THREADS = 512
_MOST_CHUNKS = 4


@dataclass(frozen=True)
class RowNorm:
    """x / sqrt(mean(x ** 2) + eps) * weight of 16-bit rows, on SM90."""

    dtype: torch.dtype
    threads: int
    chunks: int

    name: ClassVar[str] = "rms_norm"

    @classmethod
    def of(cls, device: Device, dtype: torch.dtype, k: int) -> RowNorm | None:
        """Return the kernel for rows of k columns; None where it does not run."""
        vectors = -(-k // _VECTOR)
        threads = min(_MOST_THREADS, 1 << max(5, (vectors - 1).bit_length()))
        chunks = -(-vectors // threads)
        if dtype not in HALF_KINDS or k % _VECTOR or chunks > _MOST_CHUNKS or not runs_on(Sm90MixedGemm(), device):
            return None
        return cls(dtype, threads, chunks)

    @classmethod
    def needed(cls, device: Device, layer: LayerFacts) -> Iterable[RowNorm]:
        return ()  # norms are no part of a layer of products

    @staticmethod
    def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
        """True if eight columns of x and of the weight can be loaded at a time."""
        return x.is_contiguous() and x.dtype == weight.dtype and (x.data_ptr() | weight.data_ptr()) % 16 == 0

    def unit(self) -> Unit:
        return Unit(self.name, (str(self.dtype), self.threads, self.chunks), "sm_90a", self._program)

    def _program(self) -> Program:
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

        from w4gemm.kernels.rms_norm.kernel import RmsNorm

        kind = HALF_KINDS[self.dtype]
        dtype = half_dtype(kind)
        m, k = cute.sym_int(), cute.sym_int(divisibility=_VECTOR)
        x, out = (make_fake_compact_tensor(dtype, (m, k), stride_order=(1, 0), assumed_align=16) for _ in range(2))
        weight = make_fake_compact_tensor(dtype, (k,), assumed_align=16)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return Program(RmsNorm(kind, self.threads, self.chunks), (x, weight, out, 0.0, stream))
