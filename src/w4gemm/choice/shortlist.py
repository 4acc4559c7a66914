"""The shortlist: the few configs that serve a weight with more than 256 tokens.

Which config is the fastest depends on the waves of tiles that m fills, so it differs from m to m. But each config is a
kernel to compile. So all m above :data:`WAVES_FROM` share a shortlist of at most :data:`MOST` configs, chosen so that
for every m one of them is predicted to be nearly as fast as the best of all. What a model can need is therefore known
beforehand, and a new m costs no more than the predictions of a few configs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from w4gemm.choice.cost import Candidate
from w4gemm.choice.intervals import LARGEST, WAVES_FROM
from w4gemm.choice.invariance import legal_candidates
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels import KERNELS

MOST = 24
"""Largest number of configs of a shortlist. Over 24 layers drawn at random, the best of those chosen (21.7 in the mean)
is predicted to take 0.1 % longer than the best of all, and over 1.5 % longer at 1 % of the m (2026-11-27). Of 20 it
would be 0.18 %, and 2.8 % of the m."""
_SAMPLES = 80
"""Number of m that a shortlist is chosen for. Half as many are too far apart for the waves of a large layer."""
_LOOKS = 16
"""Number of m at one of which a config has to be near the best to be considered."""
_NEAR = 1.15
"""Largest predicted time / best predicted time, there, of a config that is considered."""
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
    legal = sorted(legal_candidates(KERNELS, problem), key=lambda c: (c.kernel.name, str(c.config)))
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
    chosen = [min(logs, key=lambda candidate: math.fsum(logs[candidate]))]
    least = logs[chosen[0]]
    # Gains only shrink as candidates are chosen, so an old gain is an upper bound: the first candidate whose bound is
    # below the best gain ends the search.
    gains = dict.fromkeys(logs, math.inf)
    while len(chosen) < min(MOST, len(logs)):
        before, best, most = math.fsum(least), chosen[0], -math.inf
        for candidate in sorted(logs, key=lambda candidate: -gains[candidate]):
            if gains[candidate] < most:
                break
            gains[candidate] = before - math.fsum(map(min, least, logs[candidate]))
            if gains[candidate] > most:
                best, most = candidate, gains[candidate]
        if most < _LEAST_GAIN * _SAMPLES:
            break
        chosen.append(best)
        least = list(map(min, least, logs[best]))
    return chosen
