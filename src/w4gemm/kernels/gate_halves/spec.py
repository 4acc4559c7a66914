"""Host side of the gated activation of halves; ``w4gemm.integrations.transformers.fused_step`` is its only caller."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from w4gemm.core.activation import parse
from w4gemm.core.problem import Device
from w4gemm.jit import Program, Unit
from w4gemm.kernels.helper import HALF_KINDS, LayerFacts, half_dtype, runs_on
from w4gemm.kernels.sm90_mixed_gemm.spec import Sm90MixedGemm


@dataclass(frozen=True)
class GatedHalves:
    """act(gate, up) of 16-bit rows, on SM90. activation: a gated one."""

    dtype: torch.dtype
    activation: str

    name: ClassVar[str] = "gate_halves"

    @classmethod
    def of(cls, device: Device, dtype: torch.dtype, activation: str) -> GatedHalves | None:
        """Return the kernel; None where it does not run."""
        return cls(dtype, activation) if dtype in HALF_KINDS and runs_on(Sm90MixedGemm(), device) else None

    @classmethod
    def needed(cls, device: Device, layer: LayerFacts) -> Iterable[GatedHalves]:
        return ()  # no layer of one product has halves

    @staticmethod
    def takes(x: torch.Tensor) -> bool:
        """True if eight columns of each half of x (m, 2 n) can be loaded at a time."""
        return x.shape[1] % 16 == 0 and x.data_ptr() % 16 == 0 and x.is_contiguous()

    def unit(self) -> Unit:
        return Unit(self.name, (str(self.dtype), self.activation), "sm_90a", self._program)

    def _program(self) -> Program:
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

        from w4gemm.kernels.gate_halves.kernel import GateHalves

        kind = HALF_KINDS[self.dtype]
        m, n, both = cute.sym_int(), cute.sym_int(divisibility=8), cute.sym_int(divisibility=16)
        x, out = (
            make_fake_compact_tensor(half_dtype(kind), (m, columns), stride_order=(1, 0), assumed_align=16)
            for columns in (both, n)
        )
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return Program(GateHalves(kind, parse(self.activation)), (x, out, stream))
