"""The host side that the Hopper kernels share: how a product is divided into two launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.kernels.base import Resources
from w4gemm.kernels.gpu import GpuKernel
from w4gemm.kernels.requirements import hopper_refusal


def full_wave_n_tiles(m_tiles: Any, n_tiles: Any, ctas: Any) -> Any:
    """Number of n tiles that fill whole waves of CTAs; host and device compute it alike."""
    return m_tiles * n_tiles // ctas * ctas // m_tiles


def split(problem: GemmProblem, config: GemmConfig) -> tuple[GemmProblem, GemmProblem]:
    """Return two problems: the features that fill whole waves of a config's tiles, one CTA per SM (all features if no
    wave is full), and the other features, perhaps n 0."""
    n = first_features(problem, problem.m, config)
    return replace(problem, n=n), replace(problem, n=problem.n - n)


def first_features(problem: GemmProblem, m: int, config: GemmConfig) -> int:
    """Return the features of the first of the two problems of :func:`split` with m tokens."""
    m_tiles, n_tiles = -(-m // config.tile_m), -(-problem.n // config.tile_n)
    whole = full_wave_n_tiles(m_tiles, n_tiles, problem.device.sms)
    return min(whole * config.tile_n, problem.n) or problem.n


def launches(problem: GemmProblem, config: GemmConfig) -> list[tuple[GemmProblem, GemmConfig]]:
    """Return (problem, config) of each launch: one, or two if the config has a tail and, for one weight, features are
    left."""
    if config.tail is None:
        return [(problem, config)]
    if problem.experts:
        return [(problem, replace(config, tail=None)), (problem, config.tail)]
    parts = zip(split(problem, config), (replace(config, tail=None), config.tail), strict=True)
    return [(part, c) for part, c in parts if part.n]


_NARROW_ROWS = 64
"""Most rows of an expert in the narrower tiles of two widths, if one tile does not take more."""


def most_narrow_rows(config: GemmConfig) -> int:
    """Return the most rows of an expert in the narrower tiles of two widths. With fewer, wide tiles of 64 tokens would
    be half empty, and the one or two of an expert, behind all narrow ones, would show (a layer of 256 experts with one
    Zipf row each took 1.09 of the time, H200, 2026-11-30)."""
    assert config.tail is not None and config.tile_m < config.tail.tile_m
    return max(config.tile_m, _NARROW_ROWS)


class HopperKernel(GpuKernel):
    """A Kernel on SM90. A subclass adds configs and its device code."""

    def refusal(self, device: Device) -> str:
        return hopper_refusal(device)

    def arch(self, device: Device) -> str:
        return "sm_90a"

    def resources(self, problem: GemmProblem, config: GemmConfig) -> Resources:
        """Return the resources of a launch; of two launches the first one's, but the CTAs and waves of both."""
        each = [super(HopperKernel, self).resources(*launch) for launch in launches(problem, config)]
        ctas, waves = sum(r.ctas or 0 for r in each), sum(r.waves or 0.0 for r in each)
        return each[0]._replace(ctas=ctas, waves=round(waves, 2))
