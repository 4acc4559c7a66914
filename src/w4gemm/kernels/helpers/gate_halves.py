"""Host side of the gated activation of halves; ``w4gemm.api.step`` is its only caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from w4gemm.core.activation import parse
from w4gemm.core.problem import Device
from w4gemm.jit import Program
from w4gemm.kernels.helpers.base import HALF_KINDS, Sm90Helper, half_rows


@dataclass(frozen=True)
class GateHalves(Sm90Helper):
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
        from cutlass.cute.runtime import make_fake_stream

        from w4gemm.kernels.helpers.device.gate_halves import GateHalvesKernel

        kind = HALF_KINDS[self.dtype]
        m, n, both = cute.sym_int(), cute.sym_int(divisibility=8), cute.sym_int(divisibility=16)
        x, out = half_rows(kind, m, both), half_rows(kind, m, n)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return Program(GateHalvesKernel(kind, parse(self.activation)), (x, out, stream))
