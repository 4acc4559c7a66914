"""The model: every config that may run a problem by its predicted time, and the shortlist of those that serve many m.

**Batch invariance.** A problem that asks for it is served by configs of one order of additions alone, the same for
every m: the one of least predicted time, in the geometric mean over the intervals of m.

**The shortlist.** With more than 256 tokens the fastest config depends on the waves of tiles that m fills, so it
differs from m to m. But each config is a kernel to compile. So all m above :data:`WAVES_FROM` share a shortlist of at
most :data:`MOST` configs, of which for every m one is predicted to be nearly as fast as the best of all. What a model
can need is therefore known beforehand, and a new m costs the predictions of a few configs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from w4gemm.choice import cost
from w4gemm.choice.cost.traffic import Timer
from w4gemm.choice.intervals import BOUNDS, FEW, LARGEST, WAVES_FROM, plan_m, ragged
from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels import KERNELS, Kernel, Status


class Candidate(NamedTuple):
    """A config that may run a problem, and its predicted time."""

    us: Timer
    kernel: Kernel
    config: GemmConfig


class Ranked(NamedTuple):
    """A config that may run a problem, with its prediction for one m."""

    us: float
    """Predicted microseconds per launch; inf if the config is needless, see :data:`Timer`."""
    kernel: Kernel
    config: GemmConfig

    def __str__(self) -> str:
        return f"{self.kernel.name}/{self.config}"


def candidates(kernels: Iterable[Kernel], problem: GemmProblem) -> list[Candidate]:
    """Return the configs that may run ``problem``, whatever its m: every legal one. If the problem is batch invariant,
    all have one reduction order."""
    legal = _legal(kernels, problem)
    if not problem.batch_invariant:
        return legal
    order = _invariant_order(replace(problem, m=0, gathered=False))
    return [c for c in legal if order is not None and c.kernel.reduction_order(problem, c.config) == order]


def ranked(kernels: Iterable[Kernel], problem: GemmProblem) -> list[Ranked]:
    """Return the configs that may run ``problem``, least predicted time first."""
    return _in_order(candidates(kernels, problem), problem)


def status_of(kernel: Kernel, problem: GemmProblem) -> Status:
    """Return a kernel's answer to ``problem``. It is no, too, if the problem must be batch invariant and no config of
    the kernel is."""
    status = kernel.supports(problem)
    if not status or not problem.batch_invariant:
        return status
    orders = (kernel.reduction_order(problem, config) for config in kernel.configs(problem))
    if any(order is not None for order in orders):
        return status
    return Status.no("the bits of a row depend on the other rows here, whatever the config")


def _legal(kernels: Iterable[Kernel], problem: GemmProblem) -> list[Candidate]:
    """Return every config of every kernel that supports ``problem``, whatever its m."""
    of_all_m = replace(problem, m=LARGEST)
    supporting: list[Any] = [kernel for kernel in kernels if kernel.supports(problem)]  # mypy knows no hash of a Kernel
    return [candidate for kernel in supporting for candidate in _of_kernel(kernel, of_all_m)]


@functools.lru_cache(maxsize=16)
def _of_kernel(kernel: Any, problem: GemmProblem) -> tuple[Candidate, ...]:
    """:func:`_legal` of one kernel that supports the problem. A layer's intervals of m are chosen one after another, so
    the results of the last layers are cached."""
    timer_of = cost.timers(kernel, problem)
    return tuple(Candidate(timer_of(config), kernel, config) for config in kernel.configs(problem))


def _in_order(unordered: Iterable[Candidate], problem: GemmProblem) -> list[Ranked]:
    """Return candidates with their predictions for the m of ``problem``, least predicted time first.

    If m stands for an interval of few tokens, us is the geometric mean for this m and one inside the interval, because
    some configs are slow where a tile reaches far past m.
    """
    m, inside = problem.m, problem.m
    if m <= WAVES_FROM and not problem.experts and m == plan_m(m):
        inside = ragged(m)
    timed = []
    for us, kernel, config in unordered:
        at = us(m)
        timed.append(Ranked(at if inside == m else math.sqrt(at * us(inside)), kernel, config))
    return sorted(timed, key=lambda entry: (entry.us, entry.kernel.name, str(entry.config)))


@functools.cache
def _invariant_order(problem: GemmProblem) -> Hashable | None:
    """Return the reduction order with the least geometric mean of predicted times over the intervals of m, among those
    that do not depend on other rows; None if there is none. Intervals of up to 8 tokens count as one, because they
    share tiles. Rows of experts have one order, whether or not the kernel gathers them."""
    times: dict[Hashable | None, list[float]] = {}
    legal = _legal(KERNELS, replace(problem, m=LARGEST))
    bounds = (*BOUNDS[len(FEW) :], LARGEST)
    few = (m for m in bounds if m < problem.experts)  # rows that most experts have none of
    for m in (*few, *(m * max(1, problem.experts) for m in bounds)):
        best: dict[Hashable | None, float] = {}
        for us, kernel, config in _in_order(legal, replace(problem, m=m)):
            best.setdefault(kernel.reduction_order(problem, config), us)
        for order, us in best.items():
            times.setdefault(order, []).append(us)
    times.pop(None, None)
    return min(times, key=lambda order: (math.fsum(map(math.log, times[order])), str(order)), default=None)


# --- the shortlist ---------------------------------------------------------------------------------------------------

MOST = 24
"""Largest number of configs of a shortlist. Over 24 layers drawn at random, the best of those chosen (21.7 in the mean)
is predicted to take 0.1 % longer than the best of all, and over 1.5 % longer at 1 % of the m (2026-11-27). Of 20 it
would be 0.18 %, and 2.8 % of the m."""
_SAMPLES = 80
"""Number of m that a shortlist is chosen for. Half as many are too far apart for the waves of a large layer."""
_LOOKS = 16
"""Number of m that are looked at. A config is considered if it is near the best at one of them."""
_NEAR = 1.15
"""Largest predicted time / best predicted time of a config that is near the best."""
_LEAST_GAIN = 1e-4
"""Least gain in the mean logarithm of the time that is worth another config."""


def is_by_waves(problem: GemmProblem) -> bool:
    """True if the plan of a problem is chosen for its own m, from a shortlist."""
    return problem.m > WAVES_FROM and not problem.experts


def shortlist(problem: GemmProblem) -> tuple[Candidate, ...]:
    """Return the configs that serve the problem with any m above :data:`WAVES_FROM`; none if no kernel supports it."""
    return _shortlist(replace(problem, m=LARGEST))


@functools.lru_cache(maxsize=1024)
def _shortlist(problem: GemmProblem) -> tuple[Candidate, ...]:
    legal = sorted(candidates(KERNELS, problem), key=lambda c: (c.kernel.name, str(c.config)))
    considered: dict[Candidate, None] = {}
    for m in _spread(_LOOKS) if legal else ():
        times = [candidate.us(m) for candidate in legal]
        most = _NEAR * min(times)
        near = sorted((us, i) for i, us in enumerate(times) if us <= most)
        considered |= dict.fromkeys(legal[i] for _, i in near)
    samples = _spread(_SAMPLES)
    return tuple(_cover({candidate: [math.log(candidate.us(m)) for m in samples] for candidate in considered}))


def _spread(count: int) -> list[int]:
    """Return so many m above :data:`WAVES_FROM`, evenly spaced in the logarithm."""
    ratio = LARGEST / WAVES_FROM
    return [math.ceil(WAVES_FROM * ratio ** ((i + 0.5) / count)) for i in range(count)]


def _cover(logs: dict[Candidate, list[float]]) -> list[Candidate]:
    """Return at most ``MOST`` candidates. Each is the one that most lowers the mean, over the samples, of the least
    logarithm of a time.

    Args:
        logs: for each candidate, the logarithm of its time at each sample.
    """
    if not logs:
        return []
    cover = [min(logs, key=lambda candidate: math.fsum(logs[candidate]))]
    least = logs[cover[0]]
    # Gains only shrink as candidates are added, so an old gain is an upper bound: the first candidate whose bound is
    # below the best gain ends the search.
    gains = dict.fromkeys(logs, math.inf)
    while len(cover) < min(MOST, len(logs)):
        before, best, most = math.fsum(least), cover[0], -math.inf
        for candidate in sorted(logs, key=lambda candidate: -gains[candidate]):
            if gains[candidate] < most:
                break
            gains[candidate] = before - math.fsum(map(min, least, logs[candidate]))
            if gains[candidate] > most:
                best, most = candidate, gains[candidate]
        if most < _LEAST_GAIN * _SAMPLES:
            break
        cover.append(best)
        least = list(map(min, least, logs[best]))
    return cover
