"""Host side of sm90_mixed_gemm: its configs, and the order in which each adds products."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels.hopper import HopperKernel
from w4gemm.kernels.sm90_mixed_gemm.space import SPACE
from w4gemm.kernels.sm90_mixed_gemm.variant import Sm90MixedVariant
from w4gemm.kernels.space import Exclusion


class Sm90MixedGemm(HopperKernel):
    """W4A16 on SM90 with TMA and register-sourced WGMMA: any m, n and k, fp16 and bf16, every format that
    the mma16 layout holds in groups that a kernel decodes."""

    name = "sm90_mixed_gemm"
    revision = 2
    variant = Sm90MixedVariant
    space = SPACE
    launch_pairs: tuple[str, ...] = (
        *(f"{m}x256x128_1x1x1_coop+{m}x192x128_1x1x1_coop" for m in (16, 24, 32, 40, 48, 56, 64)),
        *(f"{m}x256x128_1x1x1_coop+{m}x64x256_1x1x1_coop" for m in (24, 32, 40, 48, 56, 64)),
        "256x128x128_1x1x1_coop+128x128x128_1x1x1_coop",
        "256x128x128_1x1x1_coop+112x128x128_1x1x1_coop",
        "128x256x64_1x1x1_coop+128x192x128_1x1x1_coop",
        "128x192x128_1x1x1_coop+128x128x128_1x1x1_coop",
        "128x192x128_1x1x1_coop+64x64x256_1x1x1_coop",
        "96x128x128_1x1x1_coop+96x64x128_1x1x1_coop",
    )
    """Configs of two launches, for one weight: see two_launches.py."""

    def entry(self) -> Callable[[Any], Callable[..., None]]:
        from w4gemm.kernels.sm90_mixed_gemm.kernel import Sm90MixedGemmKernel
        from w4gemm.kernels.sm90_mixed_gemm.two_launches import TwoLaunches

        return lambda variant: TwoLaunches(variant) if variant.config.tail else Sm90MixedGemmKernel(variant)

    def configs(self, problem: GemmProblem) -> list[GemmConfig]:
        single = super().configs(problem)
        if problem.experts:
            return single
        legal = set(single)
        return single + [pair for pair, launches in self._pairs.items() if launches <= legal]

    @functools.cached_property
    def _pairs(self) -> dict[GemmConfig, set[GemmConfig | None]]:
        """The configs of ``launch_pairs``, with those of their launches."""
        return {pair: {replace(pair, tail=None), pair.tail} for pair in map(GemmConfig.parse, self.launch_pairs)}

    def exclusions(self, problem: GemmProblem, config: GemmConfig) -> list[Exclusion]:
        if config.tail is None:
            return super().exclusions(problem, config)
        excluding = [
            *super().exclusions(problem, replace(config, tail=None)),
            *super().exclusions(problem, config.tail),
        ]
        if problem.experts:
            reason = "the host does not know how many tiles experts have, nor so which fill whole waves"
            excluding.insert(0, Exclusion("impossible", "experts and a tail launch", reason))
        if str(config) not in self.launch_pairs:
            listed = "only pairs that were the fastest somewhere are kept: " + ", ".join(self.launch_pairs)
            excluding.append(Exclusion("unlisted", "pairs", listed))
        return excluding

    def reduction_order(self, problem: GemmProblem, config: GemmConfig) -> Hashable | None:
        """One set on all of k adds up steps of 16 in order: tiles, cluster, schedule and stages do not matter. Several
        sets or CTAs cut k at multiples of tile_k; a stream cuts it where the number of tiles says."""
        if config.schedule == "stream":
            return None
        if config.tail is not None:
            orders = {self.reduction_order(problem, c) for c in (replace(config, tail=None), config.tail)}
            return orders.pop() if len(orders) == 1 else None
        sets = Sm90MixedVariant.of(problem, config).k_sets
        alone = sets == 1 and config.split_k == 1
        return self.name, sets, config.split_k, 0 if alone else config.tile_k
