"""The model: intervals of m, every config that may run a problem by its predicted time, and the shortlist of those that
serve many m.

**Intervals.** One plan serves every m, the number of tokens, of an interval, chosen for the interval's last m. For a
single weight, a plan for more than :data:`WAVES_FROM` tokens is chosen for m itself, rounded up to a multiple of 16,
above 2048 by at most 1/64: which config is the fastest depends on how many waves of tiles m fills, and the end of a
wide interval says little about that. Tuning goes by intervals for every m.

**Batch invariance.** A problem that asks for it is served by configs of one order of additions alone, the same for
every m: the one of least predicted time, in the geometric mean over the intervals of m.

**The shortlist.** Plans for more tokens differ from m to m, but each config is a kernel to compile. So all m above
:data:`WAVES_FROM` share a shortlist of at most :data:`MOST` configs, of which for every m one is predicted to be nearly
as fast as the best of all. What a model can need is therefore known beforehand, and a new m costs the predictions of a
few configs.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from w4gemm.choice import cost
from w4gemm.choice.cost.constants import Timer
from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels import KERNELS, Kernel, Status

# --- intervals of m --------------------------------------------------------------------------------------------------

FEW = (1, 2, 4)
"""Last m of each interval with a compiled variant of sm90_decode of its own."""
_TILES = (8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 120, 128, 144, 160, 168, 192, 200, 224, 240, 256)
_FINE_TILES = (88, 104, 136, 152, 176, 184)
"""Those that only some decoders have, for a single weight."""
BOUNDS = (*FEW, *sorted(_TILES + _FINE_TILES), 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 4096, 8192)
"""Last m of each interval, in ascending order, except for the last interval, which has no end: ``FEW``, then every
tile_m of the Hopper kernels, then sizes between which the fastest config was seen to change (H200, 2026-11-21)."""
LARGEST = 16384
"""The m that stands for the last interval, which has no end."""
WAVES_FROM = 256
"""Largest m for which the plan of a single weight is chosen by interval."""
_PLAN_OF_FEW = tuple(BOUNDS[bisect.bisect_left(BOUNDS, m)] for m in range(WAVES_FROM + 1))
"""The last m of m's interval, which every warm call asks for."""
_STEP = 16
"""Smallest difference between two m above :data:`WAVES_FROM` that plans are chosen for."""


def interval(m: int) -> int:
    """Return the index of m's interval: 0 for m = 1, 1 for m = 2, 2 for m <= 4, ..."""
    return bisect.bisect_left(BOUNDS, m)


def interval_of(m: int) -> tuple[int, int | None]:
    """Return the first and the last m of m's interval; the last is None if the interval has no end."""
    i = interval(m)
    return (BOUNDS[i - 1] + 1 if i else 1), (BOUNDS[i] if i < len(BOUNDS) else None)


def span(first: int, last: int | None) -> str:
    """Return the interval from ``first`` to ``last`` in words; ``last`` is None if it has no end."""
    return f"m {first}" if first == last else f"m {first} to {last}" if last else f"m from {first}"


def interval_end(m: int) -> int:
    """Return the last m of m's interval, which stands for it; ``LARGEST`` if it has no end."""
    index = interval(m)
    return BOUNDS[index] if index < len(BOUNDS) else LARGEST


def ragged(m: int) -> int:
    """Return an odd number near the middle of m's interval; m itself if the interval has one m only."""
    first, last = interval_of(m)
    return m if first == last else (first + (last or m)) // 2 // 2 * 2 + 1


def plan_m(m: int) -> int:
    """Return the m that the plan of a single weight is chosen for when it is called with m tokens."""
    if m <= WAVES_FROM:
        return _PLAN_OF_FEW[m]
    step = max(_STEP, 1 << ((m - 1).bit_length() - 7))
    return min(-(-m // step) * step, LARGEST)


def plan_ms(first: int, last: int) -> list[int]:
    """Return every m that :func:`plan_m` gives for ``first`` to ``last``, in ascending order."""
    ms = [plan_m(first)]
    while ms[-1] < plan_m(last):
        ms.append(plan_m(ms[-1] + 1))
    return ms


@functools.lru_cache(maxsize=4096)
def plan_rows(m: int, experts: int) -> int:
    """Return the m that a plan is chosen for when it is called with m rows of all experts together.

    If m >= experts, the plan is chosen for the interval of the average rows of an expert. If m < experts, it is chosen
    for the interval of m, because most experts then have no rows. For a single weight, experts 0, this is
    :func:`plan_m`.
    """
    if not experts:
        return plan_m(m)
    if m < experts:
        return min(interval_end(m), experts)
    return interval_end(-(-m // experts)) * experts


def first_rows(most: int, experts: int = 0) -> list[int]:
    """Return the first m, within 1 .. most, of each range of m that has one :func:`plan_rows`."""
    if not experts:
        return [1, *(m + 1 for m in plan_ms(1, most) if m < min(most, LARGEST))]
    starts = [bound + 1 for bound in (0, *BOUNDS)]
    few = [start for start in starts if start < experts]
    many = [(start - 1) * experts + 1 if start > 1 else experts for start in starts]
    return [start for start in (*few, *many) if start <= most]


# --- predicted times -------------------------------------------------------------------------------------------------


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
    order = invariant_order(problem)
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


def invariant_order(problem: GemmProblem) -> Hashable | None:
    """Return the reduction order of all batch-invariant plans of a problem's weight; None if there is none."""
    return _invariant_order(replace(problem, m=0, gathered=False))


@functools.cache
def _invariant_order(problem: GemmProblem) -> Hashable | None:
    """Return the reduction order with the least geometric mean of predicted times over the intervals of m, among those
    that do not depend on other rows; None if there is none. Intervals of up to 8 tokens count as one, because they
    share tiles, and those of fine steps not at all. Rows of experts have one order, whether or not the kernel gathers
    them."""
    times: dict[Hashable | None, list[float]] = {}
    legal = _legal(KERNELS, replace(problem, m=LARGEST))
    bounds = (*(m for m in BOUNDS[len(FEW) :] if m not in _FINE_TILES), LARGEST)
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
"""Largest number of configs of a shortlist. Over 25 drawn layers and 13 m from 272 on, the best of those chosen, 23.3
in the mean, is predicted to take 0.3 % longer than the best of all, and over 1.5 % longer at 7 % of the m (2026-12-01).
Of 30 it would be 0.2 %, and 4 % of the m."""
_SAMPLES = 80
"""Number of m that a shortlist is chosen for. Half as many are too far apart for the waves of a large layer."""
_LOOKS = 32
"""Number of m that are looked at. A config is considered if it is near the best at one of them. With 16 none is below
292, so that configs whose tiles m then overfills are missed: up to 336 tokens 0.6 % would be lost instead of 0.5 %."""
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
