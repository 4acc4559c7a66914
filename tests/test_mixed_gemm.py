"""Properties of the Hopper kernel's configs before anything is compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from w4gemm import GemmConfig, choice
from w4gemm.choice.model import ranked
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import H200, GemmProblem
from w4gemm.kernels import KERNELS, kernel_named
from w4gemm.kernels.sm90_mixed_gemm.variant import Sm90MixedVariant
from w4gemm.kernels.variant import HOPPER_SHARED_MEMORY

KERNEL = kernel_named("sm90_mixed_gemm")
PROBLEM = GemmProblem(64, 8192, 8192, torch.bfloat16, WeightFormat(), "mma16", device=H200)
LAYERS = [(6144, 4096), (8192, 8192), (28672, 4096), (8192, 28672), (4096, 14336)]


@pytest.mark.parametrize("format", ["int4_g128", "int4_g32_zfloat"])
@pytest.mark.parametrize("experts, gathered", [(0, False), (8, False), (8, True)])
def test_sizes_that_follow_from_a_config(format, experts, gathered):
    problem = replace(PROBLEM, format=WeightFormat.parse(format), experts=experts, gathered=gathered)
    for config in KERNEL.configs(problem):
        v = Sm90MixedVariant.of(problem, config)
        most = 64 if config.tile_m <= 256 else config.tile_m // 2
        assert v.box_tokens % 8 == 0 and v.box_tokens <= most
        rest = config.tile_m - (v.boxes - 1) * v.box_tokens  # tokens of the last box that no other one has
        assert 0 < rest <= v.box_tokens and v.boxes * v.box_tokens <= 1.11 * config.tile_m
        assert v.stored_tokens % v.staging_tokens == 0 or (v.staging_tokens >= 16 and not v.boxed)
        shares = 1 if v.chained else config.split_k
        assert config.tile_m <= v.stored_tokens * shares < config.tile_m + 8 * shares, "all tokens are stored"
        assert v.shared_bytes <= HOPPER_SHARED_MEMORY
        assert 64 * v.m64_atoms * v.warpgroups_n == config.tile_n and v.warpgroups <= 4
        if v.consumer_registers:  # else a warpgroup would wait for registers that never come
            launched = 65536 // (v.threads * v.occupancy) // 8 * 8 * v.threads
            assert 128 * (v.warpgroups * v.consumer_registers + v.producer_registers) <= launched
        assert not (gathered and config.cluster_m * config.cluster_n > 1)


def test_the_ctas_of_experts():
    """One token each: a tile of tokens for every expert."""
    problem = replace(PROBLEM, m=8, n=1536, k=2048, experts=8)
    assert KERNEL.resources(problem, GemmConfig.parse("8x64x128_1x1x1_coop")).ctas == 8 * 1536 // 64
    assert KERNEL.resources(replace(problem, experts=0), GemmConfig.parse("8x64x128_1x1x1_coop")).ctas == 1536 // 64


def test_few_enough_to_compile_them_all():
    assert sum(len(kernel.configs(PROBLEM)) for kernel in KERNELS if kernel.supports(PROBLEM)) <= 500


@pytest.mark.parametrize("n, k, m", [(22016, 4096, 24), (24576, 4096, 40), (19456, 2560, 48), (43008, 5376, 32)])
def test_192_features_where_others_leave_a_wave_half_empty(n, k, m):
    """One or two waves of 132 tiles, where 128 features take half a wave more and 256 fill three quarters."""
    _, _, config = ranked([KERNEL], replace(PROBLEM, m=m, n=n, k=k))[0]
    assert config.tile_n == 192 and config.tail is None


@pytest.mark.parametrize("n, k, m", [(55296, 5120, 64), (57344, 8192, 48), (51200, 5120, 32)])
def test_a_wave_of_256_features_and_one_of_192(n, k, m):
    _, _, config = ranked([KERNEL], replace(PROBLEM, m=m, n=n, k=k))[0]
    assert config.tile_n == 256 and config.tail is not None and config.tail.tile_n == 192


@pytest.mark.parametrize("n, k", LAYERS)
def test_a_tile_has_about_as_many_tokens_as_there_are(n, k):
    """Rows past m in a tile's first box are slow, up to half as long again; a few cost nothing."""
    for m in (m for m in choice.BOUNDS if 16 < m <= 64):
        problem = replace(PROBLEM, m=m, n=n, k=k)
        _, _, config = ranked([KERNEL], problem)[0]
        assert config.tile_m - m <= 16, (m, config)


@pytest.mark.parametrize("m, experts, tile_m", [(128, 0, 128), (8 * 128, 8, 160)])
def test_folded_fp8_takes_256_features_where_they_are_the_fastest(m, experts, tile_m):
    """By measurements on an H200, docs/measured.md; where one wave would not be full of such tiles it does not. Of
    experts some have a few more rows than others, for which a tile of 128 tokens would be a second one."""
    folded = WeightFormat.parse("int4_g128_e4m3")
    for n, k in ((28672, 4096), (8192, 8192)):
        p = GemmProblem(m, n, k, torch.float8_e4m3fn, folded, "mma8", device=H200, experts=experts)
        _, _, config = ranked([kernel_named("sm90_fp8_gemm")], p)[0]
        if n == 28672:
            assert (config.tile_m, config.tile_n, config.cluster_n) == (tile_m, 256, 1)
        elif not experts:
            assert config.tile_n < 256
