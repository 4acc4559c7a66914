"""Batch invariance: a problem that asks for it is served only by configs of one order of additions.

That reduction order is the same for every m. It is the one of least predicted time, in the geometric mean over the
intervals of m.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable
from dataclasses import replace

from w4gemm.choice.cost import Candidate, Ranked, candidates, in_order
from w4gemm.choice.intervals import BOUNDS, FEW, LARGEST
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels import KERNELS, Kernel, Status


def legal_ranked(kernels: Iterable[Kernel], problem: GemmProblem) -> list[Ranked]:
    """Return the configs that ``problem`` may be served by, least predicted time first."""
    return in_order(legal_candidates(kernels, problem), problem)


def legal_candidates(kernels: Iterable[Kernel], problem: GemmProblem) -> list[Candidate]:
    """Return the configs that ``problem`` may be served by, whatever its m: every legal one or, if the problem is batch
    invariant, those of the one reduction order."""
    found = candidates(kernels, problem)
    if not problem.batch_invariant:
        return found
    order = _invariant_order(replace(problem, m=0))
    return [c for c in found if order is not None and c.kernel.reduction_order(problem, c.config) == order]


@functools.cache
def _invariant_order(problem: GemmProblem) -> Hashable | None:
    """Return the reduction order with the least geometric mean of predicted times over the intervals of m, among those
    that do not depend on other rows; None if there is none. Intervals of up to 8 tokens count as one, because they
    share tiles."""
    times: dict[Hashable | None, list[float]] = {}
    found = candidates(KERNELS, replace(problem, m=LARGEST))
    for m in (*BOUNDS[len(FEW) :], LARGEST):
        best: dict[Hashable | None, float] = {}
        for us, kernel, config in in_order(found, replace(problem, m=m)):
            best.setdefault(kernel.reduction_order(problem, config), us)
        for order, us in best.items():
            times.setdefault(order, []).append(us)
    times.pop(None, None)
    return min(times, key=lambda order: (math.fsum(map(math.log, times[order])), str(order)), default=None)


def status_of(kernel: Kernel, problem: GemmProblem) -> Status:
    """Return a kernel's answer to ``problem``: no also if it must be batch invariant and none of its configs is."""
    status = kernel.supports(problem)
    if not status or not problem.batch_invariant:
        return status
    orders = (kernel.reduction_order(problem, config) for config in kernel.configs(problem))
    if any(order is not None for order in orders):
        return status
    return Status.no("the bits of a row depend on the other rows here, whatever the config")
