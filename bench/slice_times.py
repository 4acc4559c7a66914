"""Fit the times of one config to its timings, for bench.fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from w4gemm.choice.cost import waves
from w4gemm.choice.cost.constants import SliceTimes, moved_us
from w4gemm.choice.cost.experts import even_rows
from w4gemm.choice.cost.waves import LaunchTimer
from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels.hopper import HopperKernel

_TOO_FAST = 0.9
"""Predicted time over the fastest of a point below which a sample weighs no more."""
_LEAST_TILE_US, _LARGE_TOKENS = 0.3, 64
"""Least time to store 8192 results, of adjusted constants of tiles with so many tokens. A fit to layers of many slices
can make it zero, which no factor changes again; then layers of few slices are predicted too fast."""
_CHANGE_WEIGHT, _PART_CHANGE_WEIGHT = 0.3, 0.09
"""How much the squared logarithm of a known constant's change weighs, beside those of samples; and that of a change of
what a CTA alone takes / what others add, which the samples of a full GPU, most of them, leave open."""
_SPLIT_PART = 0.5
"""Least time of a CTA alone for a k-slice if k is split, over that if not: 0.65 to 0.85 with 16-bit x."""
_LEAST_PART = 0.02
"""Least part of a k-slice's time, either of a CTA alone or of what others add, that an adjustment begins from: none
would stay none."""


class Launch(NamedTuple):
    """One launch that was timed, with experts that have equally many rows."""

    kernel: HopperKernel
    problem: GemmProblem
    config: GemmConfig
    of_times: Callable[[SliceTimes], LaunchTimer]

    @classmethod
    def of(cls, kernel: HopperKernel, problem: GemmProblem, config: GemmConfig) -> Launch:
        facts = waves.LaunchFacts.of(kernel, problem)
        return cls(kernel, problem, config, waves.launch_timer(facts, problem, config, moved_us(problem), even_rows))

    def us(self, times: SliceTimes) -> float:
        """Predicted microseconds."""
        p = self.problem
        return self.of_times(times)(p.m, 2 * p.m * p.n * p.k)


def weight_of(slower: float) -> float:
    """How much a sample weighs whose time is ``slower`` times the fastest of its point."""
    return slower**-6


class Weighted(NamedTuple):
    """A time to fit to."""

    launch: Launch
    us: float
    weight: float
    fastest_us: float
    """Time of the fastest config of the point."""

    def squared_error(self, times: SliceTimes) -> float:
        """Squared error of the logarithm, times ``weight``. It weighs less the slower the config is, as timed and as
        predicted, because the fit must rank the fast configs of a point; errors on slow ones matter if they make them
        look fast."""
        predicted = self.launch.us(times)
        slower = max(min(predicted, self.us) / self.fastest_us, _TOO_FAST)
        return self.weight * weight_of(slower) * math.log(predicted / self.us) ** 2


def plausible(times: dict[str, SliceTimes]) -> dict[str, SliceTimes]:
    """The times by name, those of a CTA alone at least as long as for k-slices of half as many columns, and half as
    long as without split_k; what others add is less then. Timings leave the one open where no CTA ran alone."""
    checked: dict[str, SliceTimes] = {}
    parsed = {name: GemmConfig.parse(name.partition("/")[2]) for name in times}
    for name, config in sorted(parsed.items(), key=lambda item: (item[1].split_k, item[1].tile_k)):
        measured, kernel = times[name], name.partition("/")[0]
        least = [(1.0, replace(config, tile_k=config.tile_k // 2)), (_SPLIT_PART, replace(config, split_k=1))]
        floors = [part * checked[f"{kernel}/{other}"].alone for part, other in least if f"{kernel}/{other}" in checked]
        alone = min(max(measured.alone, *floors, 0.0), measured.alone + measured.shared)
        checked[name] = measured._replace(alone=alone, shared=measured.alone + measured.shared - alone)
    return checked


def fit(samples: list[Weighted], known: SliceTimes | None) -> SliceTimes:
    """The (alone, shared, tile) with the least weighted squared error of the logarithm, near those that are known."""
    from scipy.optimize import minimize  # all else here goes without it

    config = samples[0].launch.config
    if known is not None and config.tile_m >= _LARGE_TOKENS:
        least = _LEAST_TILE_US * config.tile_m * config.tile_n / config.split_k / 8192
        known = known._replace(tile=max(known.tile, least))

    def values(p: np.ndarray) -> SliceTimes:
        if known is None:
            alone, shared, tile = np.exp(np.clip(p, -12, 4))
        else:  # p: logarithms of factors of alone + shared, of tile, and of alone / shared
            full = known.alone + known.shared
            part = min(max(known.alone / full, _LEAST_PART), 1 - _LEAST_PART)
            part = 1 / (1 + (1 - part) / part * math.exp(-p[2]))
            alone, shared = full * math.exp(p[0]) * np.array([part, 1 - part])
            tile = known.tile * math.exp(p[1])
        return SliceTimes(float(alone), float(shared), float(tile))

    def loss(p: np.ndarray) -> float:
        times = values(p)
        error = sum(sample.squared_error(times) for sample in samples)
        change = (_CHANGE_WEIGHT, 0.3 * _CHANGE_WEIGHT, _PART_CHANGE_WEIGHT)
        return error if known is None else error + float(np.square(p) @ change)

    k_slice = math.log(np.median([us / max(1, launch.problem.k // launch.config.tile_k) for launch, us, *_ in samples]))
    starts = [
        (k_slice - a, k_slice - b, c) for a, b, c in ((0.3, 1, 0), (0.7, 0.7, -1), (1, 3, 0.7), (0.2, 4, -3), (2, 2, 0))
    ]
    options = {"maxiter": 4000, "xatol": 1e-4, "fatol": 1e-7}
    starts = starts if known is None else [(-0.1, 0, 0)]  # not where Nelder and Mead's first steps would be none
    best = min((minimize(loss, s, method="Nelder-Mead", options=options) for s in starts), key=lambda r: r.fun)
    return values(best.x)
