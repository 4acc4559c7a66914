"""Host side of the sort of choices by expert; ``w4gemm.api.routing`` is its only caller."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from w4gemm.core.problem import Device
from w4gemm.jit import Program
from w4gemm.kernels.helpers.base import LayerFacts, Sm90Helper
from w4gemm.kernels.variant import MOST_EXPERTS

MOST_CHOICES = 2**18
"""Choices up to which it is faster than PyTorch's sort, which takes more than a dozen launches."""
_CTAS = 8
"""CTAs of a cluster."""
_MOST_ALONE = 2048
"""Choices up to which one CTA alone is faster than a cluster."""
_IDS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class ExpertRoute(Sm90Helper):
    """The order of tokens' choices by expert, on SM90.

    Args:
        dtype: that of the ids.
        mapped: True if ids name global experts, of which a map says which are here.
        ctas: of the cluster; 1 for one CTA alone.
    """

    dtype: torch.dtype
    experts: int
    mapped: bool
    ctas: int

    name: ClassVar[str] = "expert_route"

    @classmethod
    def of(cls, device: Device, dtype: torch.dtype, experts: int, mapped: bool, choices: int) -> ExpertRoute | None:
        """Return the kernel for a number of choices; None where it does not run, or is slower than PyTorch."""
        fits = dtype in _IDS and 0 < experts <= MOST_EXPERTS and 0 < choices <= MOST_CHOICES
        if not fits or not cls.runs(device):
            return None
        return cls(dtype, experts, mapped, 1 if choices <= _MOST_ALONE else _CTAS)

    @classmethod
    def needed(cls, device: Device, layer: LayerFacts) -> Iterable[ExpertRoute]:
        if not layer.top_k:
            return ()
        every = itertools.product(_IDS, (False, True), (_MOST_ALONE, MOST_CHOICES))
        helpers = (cls.of(device, dtype, layer.experts, mapped, choices) for dtype, mapped, choices in every)
        return tuple(each for each in helpers if each is not None)

    def program(self) -> Program:
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

        from w4gemm.kernels.helpers.device.expert_route import ExpertRouteKernel

        choices = cute.sym_int()

        def vector(dtype: type, size: object) -> cute.Tensor:
            return make_fake_compact_tensor(dtype, (size,), assumed_align=dtype.width // 8)  # type: ignore[attr-defined]

        ids = vector(cutlass.Int32 if self.dtype == torch.int32 else cutlass.Int64, choices)
        expert_map = vector(cutlass.Int32, cute.sym_int()) if self.mapped else None
        m_offsets = vector(cutlass.Int32, self.experts + 1)
        tokens, row_of_choice = vector(cutlass.Int32, choices), vector(cutlass.Int32, choices)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        arguments = (ids, expert_map, m_offsets, tokens, row_of_choice, 1, stream)
        return Program(ExpertRouteKernel(self.experts, self.mapped, self.ctas), arguments)
