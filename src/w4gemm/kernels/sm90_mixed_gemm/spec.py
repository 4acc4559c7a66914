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
    width_pairs: tuple[str, ...] = (
        *(f"{m}x{n}x128_1x1x1_coop+128x128x128_1x1x1_coop" for m in (16, 24, 32, 40, 48) for n in (192, 256)),
        *(f"{m}x256x128_1x1x1_coop+64x128x256_1x1x1_coop" for m in (8, 16, 24)),
    )
    """Configs of two widths for experts, by their rows, in one launch or in two: see two_widths.py."""

    def entry(self) -> Callable[[Any], Callable[..., None]]:
        from w4gemm.kernels.sm90_mixed_gemm.kernel import Sm90MixedGemmKernel
        from w4gemm.kernels.sm90_mixed_gemm.two_launches import TwoLaunches, TwoLaunchesOfExperts
        from w4gemm.kernels.sm90_mixed_gemm.two_widths import TwoWidths

        def launches(variant: Any) -> Callable[..., None]:
            if variant.config.tail is None:
                return Sm90MixedGemmKernel(variant)
            if not variant.grouped:
                return TwoLaunches(variant)
            return TwoWidths(variant) if variant.in_one_launch else TwoLaunchesOfExperts(variant)

        return launches

    def configs(self, problem: GemmProblem) -> list[GemmConfig]:
        single = super().configs(problem)
        legal, pairs = set(single), self._pairs[problem.experts > 0]
        return single + [pair for pair, launches in pairs.items() if launches <= legal]

    @functools.cached_property
    def _pairs(self) -> list[dict[GemmConfig, set[GemmConfig | None]]]:
        """The configs of ``launch_pairs`` and of ``width_pairs``, each with those of its launches."""
        both = (map(GemmConfig.parse, texts) for texts in (self.launch_pairs, self.width_pairs))
        return [{pair: {replace(pair, tail=None), pair.tail} for pair in pairs} for pairs in both]

    def exclusions(self, problem: GemmProblem, config: GemmConfig) -> list[Exclusion]:
        if config.tail is None:
            return super().exclusions(problem, config)
        excluding = [
            *super().exclusions(problem, replace(config, tail=None)),
            *super().exclusions(problem, config.tail),
        ]
        pairs = self.width_pairs if problem.experts else self.launch_pairs
        if str(config) not in pairs:
            listed = "only pairs that were the fastest somewhere are kept: " + ", ".join(pairs)
            excluding.append(Exclusion("unlisted", "pairs", listed))
        return excluding

    @classmethod
    def in_order(cls) -> Hashable:
        """Return the order of additions of one set on all of k: steps of 16 columns, one after the other."""
        return cls.name, 1, 1, 0

    def reduction_order(self, problem: GemmProblem, config: GemmConfig) -> Hashable | None:
        """One set on all of k adds up steps of 16 in order: tiles, cluster, schedule and stages do not matter. Several
        sets or CTAs cut k at multiples of tile_k; a stream or a chain cuts it where the number of tiles says."""
        if config.schedule in ("stream", "chain"):
            return None
        if config.tail is not None:
            orders = {self.reduction_order(problem, c) for c in (replace(config, tail=None), config.tail)}
            return orders.pop() if len(orders) == 1 else None
        sets = Sm90MixedVariant.of(problem, config).k_sets
        alone = sets == 1 and config.split_k == 1
        return self.in_order() if alone else (self.name, sets, config.split_k, config.tile_k)
