"""GemmConfig: one string form, over the whole space of every kernel."""

from __future__ import annotations

import itertools

import pytest

from w4gemm import GemmConfig


def test_string_form_round_trips():
    sizes = itertools.product((8, 64, 256), (64, 128), (64, 128), (1, 2), (1, 2))
    rest = list(itertools.product(("coop", "pingpong", "stream"), (1, 4), (None, GemmConfig(64, 64, 64, split_k=2))))
    configs = [GemmConfig(*s, *r) for s in sizes for r in rest]
    assert [GemmConfig.parse(str(c)) for c in configs] == configs
    assert len({str(c) for c in configs}) == len(configs)


@pytest.mark.parametrize(
    "text, config",
    [
        ("64x128x128_1x1x1_coop", GemmConfig(64, 128, 128)),
        ("16x128x256_1x2x1_coop_k4", GemmConfig(16, 128, 256, cluster_n=2, split_k=4)),
        ("128x128x64_2x1x1_pingpong_k2", GemmConfig(128, 128, 64, 2, 1, "pingpong", 2)),
        ("128x64x64_1x1x1_coop+8x64x64_1x1x1_coop", GemmConfig(128, 64, 64, tail=GemmConfig(8, 64, 64))),
    ],
)
def test_parse(text, config):
    assert GemmConfig.parse(text) == config and str(config) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "64x128", "64x128x128_1x1_coop", "64x128x128_1x1x1_fast", "64x128x128_1x1x1_coop_s4", " 64", None, 5),
        "٣x64x64_1x1x1_coop",
    ],
)
def test_parse_refuses(text):
    with pytest.raises(ValueError, match="config: wanted <tile_m>x.*for example 64x128x128_1x1x1_coop_k2, got"):
        GemmConfig.parse(text)


@pytest.mark.parametrize("name", ["tile_m", "tile_n", "tile_k", "cluster_m", "cluster_n", "split_k"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "64", None])
def test_sizes_are_positive(name, value):
    sizes = {"tile_m": 64, "tile_n": 64, "tile_k": 64, name: value}
    with pytest.raises(ValueError, match=f"config: {name} wanted a positive int, got {value!r}"):
        GemmConfig(**sizes)


def test_other_refusals():
    with pytest.raises(ValueError, match="config: tail wanted a config without a tail, got '64x64x64_1x1x1_coop[+]64x"):
        GemmConfig(64, 64, 64, tail=GemmConfig(64, 64, 64, tail=GemmConfig(64, 64, 64)))
    with pytest.raises(ValueError, match="config: schedule wanted one of coop, pingpong, stream, chain, got 'x'"):
        GemmConfig(64, 64, 64, schedule="x")
    with pytest.raises(ValueError, match="config: tile_m wanted a positive int, got 0"):
        GemmConfig.parse("0x64x64_1x1x1_coop")


def test_every_kernels_configs_round_trip():
    import torch

    from w4gemm import WeightFormat
    from w4gemm.core.problem import GemmProblem
    from w4gemm.kernels import KERNELS

    for kernel, name, m in itertools.product(KERNELS, ("int4_g128", "int4_g32_zfloat", "int4_col"), (1, 64, 4096)):
        problem = GemmProblem(m, 4096, 4096, torch.bfloat16, WeightFormat.parse(name), "mma16")
        configs = kernel.configs(problem) if kernel.supports(problem) else []
        assert [GemmConfig.parse(str(c)) for c in configs] == configs
        assert len(set(configs)) == len(configs), f"{kernel.name}: a config twice"


def test_many_tails_are_refused_like_two():
    """Without a recursion for each."""
    with pytest.raises(ValueError, match="config: wanted"):
        GemmConfig.parse("+".join(["64x64x64_1x1x1_coop"] * 5000))
