"""Host sides of the kernels around experts: a router's choice of them, choices in their order, sums of their results,
and rows that adapters add to. ``w4gemm.api`` and ``w4gemm.integrations.engines`` launch them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from w4gemm.core.activation import is_gated, parse
from w4gemm.core.problem import Device
from w4gemm.core.router import Router
from w4gemm.jit import Program
from w4gemm.kernels.helpers.base import HALF_KINDS, Helper, LayerFacts
from w4gemm.kernels.stand_ins import contiguous
from w4gemm.kernels.variant import MOST_EXPERTS

_KINDS = HALF_KINDS | {torch.float32: "f32"}


@dataclass(frozen=True)
class ExpertChoice(Helper):
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
        bias = contiguous(torch.float32, self.experts) if self.biased else None
        return contiguous(self.dtype, tokens, self.experts), bias

    def program(self) -> Program:
        import cutlass.cute as cute

        from w4gemm.kernels.helpers.device.expert_choice import ExpertChoiceKernel

        tokens = cute.sym_int()
        ids, weights = (contiguous(dtype, tokens, self.router.top_k) for dtype in (torch.int32, torch.float32))
        return Program(ExpertChoiceKernel(self.math()), (*self.logits_and_bias(tokens), ids, weights))


MOST_CHOICES = 2**18
"""Choices up to which it is faster than PyTorch's sort, which takes more than a dozen launches."""
_CTAS = 8
"""CTAs of a cluster."""
_MOST_ALONE = 2048
"""Choices up to which one CTA alone is faster than a cluster."""
IDS = (torch.int32, torch.int64)
"""Dtypes of choices."""


@dataclass(frozen=True)
class ExpertRoute(Helper):
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
        fits = dtype in IDS and 0 < experts <= MOST_EXPERTS and 0 < choices <= MOST_CHOICES
        if not fits or not cls.runs(device):
            return None
        return cls(dtype, experts, mapped, 1 if choices <= _MOST_ALONE else _CTAS)

    @classmethod
    def forms(cls, layer: LayerFacts) -> Iterable[tuple[Any, ...]]:
        every = itertools.product(IDS, (False, True), (_MOST_ALONE, MOST_CHOICES))
        return [(dtype, layer.experts, mapped, choices) for dtype, mapped, choices in every if layer.top_k]

    def program(self) -> Program:
        import cutlass.cute as cute

        from w4gemm.kernels.helpers.device.expert_route import ExpertRouteKernel

        choices = cute.sym_int()
        ids, tokens, row_of_choice = (contiguous(dtype, choices) for dtype in (self.dtype, torch.int32, torch.int32))
        expert_map = contiguous(torch.int32, cute.sym_int()) if self.mapped else None
        m_offsets = contiguous(torch.int32, self.experts + 1)
        kernel = ExpertRouteKernel(self.experts, self.mapped, self.ctas)
        return Program(kernel, (ids, expert_map, m_offsets, tokens, row_of_choice, 1))


MOST_TERMS = 16
"""Terms whose rows fit the registers of a thread."""


@dataclass(frozen=True)
class RowCombine(Helper):
    """Weighted sums of ``terms`` 16-bit rows for each token, on SM90.

    Args:
        added: True if each term has another row, that is added as it is.
    """

    dtype: torch.dtype
    terms: int
    added: bool = False

    name: ClassVar[str] = "row_combine"

    @classmethod
    def of(cls, device: Device, dtype: torch.dtype, terms: int, added: bool = False) -> RowCombine | None:
        """Return the kernel for ``terms`` rows per token; None where it does not run."""
        if dtype not in HALF_KINDS or not 0 < terms <= MOST_TERMS or not cls.runs(device):
            return None
        return cls(dtype, terms, added)

    @classmethod
    def forms(cls, layer: LayerFacts) -> Iterable[tuple[Any, ...]]:
        return [(layer.dtype, layer.top_k)]

    @staticmethod
    def takes(d: torch.Tensor) -> bool:
        """True if eight columns of d can be loaded at a time."""
        return d.shape[1] % 8 == 0 and d.data_ptr() % 16 == 0 and d.is_contiguous()

    def program(self) -> Program:
        import cutlass.cute as cute

        from w4gemm.kernels.helpers.device.row_combine import RowCombineKernel

        n, tokens = cute.sym_int(divisibility=8), cute.sym_int()
        d, out = (contiguous(self.dtype, m, n, align=16) for m in (cute.sym_int(), tokens))
        added = contiguous(self.dtype, cute.sym_int(), n, align=16) if self.added else None
        rows, weights = (contiguous(dtype, tokens, self.terms) for dtype in (torch.int32, torch.float32))
        kernel = RowCombineKernel(HALF_KINDS[self.dtype], self.terms)
        return Program(kernel, (d, rows, weights, added, out, 1))


@dataclass(frozen=True)
class AdaptedRows(Helper):
    """The activation of 16-bit rows of choices and of what adapters add to them, on SM90.

    Args:
        halves: True if all gates of what is added come first; else they and the ups are pairs, as those of rows.
    """

    dtype: torch.dtype
    activation: str
    halves: bool

    name: ClassVar[str] = "adapted_rows"

    @classmethod
    def of(cls, device: Device, dtype: torch.dtype, activation: str, halves: bool) -> AdaptedRows | None:
        """Return the kernel; None where it does not run."""
        if dtype not in HALF_KINDS or not cls.runs(device):
            return None
        return cls(dtype, activation, halves and is_gated(activation))

    @staticmethod
    def takes(rows: torch.Tensor, added: torch.Tensor, columns: int) -> bool:
        """True if eight of the activation's columns can be loaded at a time."""
        return columns % 8 == 0 and all(t.data_ptr() % 16 == 0 and t.is_contiguous() for t in (rows, added))

    def program(self) -> Program:
        import cutlass.cute as cute

        from w4gemm.kernels.helpers.device.adapted_rows import AdaptedRowsKernel

        choices, n = cute.sym_int(), cute.sym_int(divisibility=8)
        both = cute.sym_int(divisibility=16) if is_gated(self.activation) else n
        rows, added = (contiguous(self.dtype, m, both, align=16) for m in (cute.sym_int(), choices))
        hidden, moved = (contiguous(self.dtype, choices, n, align=16) for _ in range(2))
        row_of_choice = contiguous(torch.int32, choices)
        kernel = AdaptedRowsKernel(HALF_KINDS[self.dtype], parse(self.activation), self.halves)
        return Program(kernel, (rows, added, row_of_choice, hidden, moved))
