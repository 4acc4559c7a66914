"""Host side of the weighted sum of rows; ``w4gemm.api.routing`` is its only caller."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from w4gemm.core.problem import Device
from w4gemm.jit import Program
from w4gemm.kernels.helpers.base import HALF_KINDS, LayerFacts, Sm90Helper, half_rows

MOST_TERMS = 16
"""Terms whose rows fit the registers of a thread."""


@dataclass(frozen=True)
class RowCombine(Sm90Helper):
    """Weighted sums of ``terms`` 16-bit rows for each token, on SM90."""

    dtype: torch.dtype
    terms: int

    name: ClassVar[str] = "row_combine"

    @classmethod
    def of(cls, device: Device, dtype: torch.dtype, terms: int) -> RowCombine | None:
        """Return the kernel for ``terms`` rows per token; None where it does not run."""
        if dtype not in HALF_KINDS or not 0 < terms <= MOST_TERMS or not cls.runs(device):
            return None
        return cls(dtype, terms)

    @classmethod
    def needed(cls, device: Device, layer: LayerFacts) -> Iterable[RowCombine]:
        helper = cls.of(device, layer.dtype, layer.top_k)
        return () if helper is None else (helper,)

    @staticmethod
    def takes(d: torch.Tensor) -> bool:
        """True if eight columns of d can be loaded at a time."""
        return d.shape[1] % 8 == 0 and d.data_ptr() % 16 == 0 and d.is_contiguous()

    def program(self) -> Program:
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

        from w4gemm.kernels.helpers.device.row_combine import RowCombineKernel

        kind = HALF_KINDS[self.dtype]
        n, tokens = cute.sym_int(divisibility=8), cute.sym_int()

        d, out = half_rows(kind, cute.sym_int(), n), half_rows(kind, tokens, n)
        rows, weights = (
            make_fake_compact_tensor(dtype, (tokens, self.terms), stride_order=(1, 0), assumed_align=4)
            for dtype in (cutlass.Int32, cutlass.Float32)
        )
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return Program(RowCombineKernel(kind, self.terms), (d, rows, weights, out, 1, stream))
