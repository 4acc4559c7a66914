"""Host side of the choice of experts by a router's logits; ``w4gemm.api.routing`` launches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from w4gemm.core.problem import Device
from w4gemm.core.router import Router
from w4gemm.jit import Program
from w4gemm.kernels.helpers.base import HALF_KINDS, Sm90Helper
from w4gemm.kernels.variant import MOST_EXPERTS

_KINDS = HALF_KINDS | {torch.float32: "f32"}


@dataclass(frozen=True)
class ExpertChoice(Sm90Helper):
    """The choice of experts, on SM90; alone, or at the start of a layer of experts in one launch.

    Args:
        router: the rule.
        experts: number of logits of a token.
        dtype: of the logits: float32, float16 or bfloat16.
        biased: True if there is a bias.
    """

    router: Router
    experts: int
    dtype: torch.dtype
    biased: bool

    name: ClassVar[str] = "expert_choice"

    @classmethod
    def of(cls, device: Device, *parameters: Any) -> ExpertChoice | None:
        """Return the kernel; None where it does not run. parameters: the fields."""
        choice = cls(*parameters)
        return choice if not choice.refusal() and cls.runs(device) else None

    def refusal(self) -> str:
        """Return why no kernel takes such logits; the empty string if one does."""
        if self.dtype not in _KINDS or not 0 < self.experts <= MOST_EXPERTS:
            return f"takes logits of 16 or 32 bits for {MOST_EXPERTS} experts, got {self.dtype} for {self.experts}"
        return self.router.refusal(self.experts, self.biased)

    def math(self) -> Any:
        """Return the device code."""
        from w4gemm.kernels.device.router import RouterMath

        return RouterMath(self.router, self.experts, _KINDS[self.dtype])

    def logits_and_bias(self, tokens: Any) -> tuple[Any, Any]:
        """Return stand-ins for logits (tokens, experts) and the bias or None."""
        import cutlass
        from cutlass.cute.runtime import make_fake_compact_tensor

        dtype = {"f32": cutlass.Float32, "f16": cutlass.Float16, "bf16": cutlass.BFloat16}[_KINDS[self.dtype]]
        shape = tokens, self.experts
        logits = make_fake_compact_tensor(dtype, shape, stride_order=(1, 0), assumed_align=dtype.width // 8)
        bias = make_fake_compact_tensor(cutlass.Float32, (self.experts,), assumed_align=4) if self.biased else None
        return logits, bias

    def program(self) -> Program:
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

        from w4gemm.kernels.helpers.device.expert_choice import ExpertChoiceKernel

        tokens = cute.sym_int()
        ids, weights = (
            make_fake_compact_tensor(dtype, (tokens, self.router.top_k), stride_order=(1, 0), assumed_align=4)
            for dtype in (cutlass.Int32, cutlass.Float32)
        )
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return Program(ExpertChoiceKernel(self.math()), (*self.logits_and_bias(tokens), ids, weights, stream))
