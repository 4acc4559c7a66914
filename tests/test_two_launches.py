"""Configs of two launches: the features that fill whole waves, and the rest in smaller tiles."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch

from sass import check, facts_of, functions
from w4gemm import GemmConfig, QuantizedWeight, WeightFormat, choice, grouped_linear, linear, quantize, route
from w4gemm.choice.cost import predicted_us
from w4gemm.choice.cost.experts import Width
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.problem import H200, GemmProblem
from w4gemm.jit import object_code
from w4gemm.kernels import kernel_named
from w4gemm.kernels.hopper import most_narrow_rows, split
from w4gemm.kernels.sm90_mixed_gemm.variant import Sm90MixedVariant
from w4gemm.kernels.workspace import capturing

W4A16 = GemmProblem(256, 28672, 4096, torch.bfloat16, WeightFormat(), "mma16", device=H200)
W4A8 = replace(W4A16, dtype=torch.float8_e4m3fn, format=WeightFormat.parse("int4_g128_e4m3"), layout="mma8")
EXACT = replace(W4A8, format=WeightFormat())
PAIRS = [
    pytest.param(name, problem, str(config), id=f"{name}/{config}/{problem.format}")
    for name, problem in (("sm90_mixed_gemm", W4A16), ("sm90_fp8_gemm", W4A8), ("sm90_fp8_gemm", EXACT))
    for config in kernel_named(name).configs(problem)
    if config.tail
]


def accumulators(pair):
    """Sums in both tiles, negated."""
    return -sum(c.tile_m * c.tile_n for c in map(GemmConfig.parse, pair.values[2].split("+")))


def test_every_pair_is_a_config_of_some_format():
    assert {text for name, _, text in (p.values for p in PAIRS)} == {
        text for name in ("sm90_mixed_gemm", "sm90_fp8_gemm") for text in kernel_named(name).launch_pairs
    }


def test_features_of_whole_waves():
    config = GemmConfig.parse("128x128x128_1x1x1_coop")
    waves, rest = split(W4A16, config)
    assert (waves.n, rest.n) == (198 * 128, 28672 - 198 * 128), "three waves of 132 tiles, two of m"
    assert [p.n for p in split(replace(W4A16, n=8192), config)] == [8192, 0], "no wave is full"
    assert [p.n for p in split(replace(W4A16, n=66 * 128), config)] == [66 * 128, 0], "the wave is full"
    assert [p.n for p in split(replace(W4A16, n=66 * 128 - 5), config)] == [66 * 128 - 5, 0]


@pytest.mark.parametrize("name, problem, text", PAIRS)
def test_predicted_as_the_sum_where_there_are_two(name, problem, text):
    """For a product too small to bring the GPU to its power limit; and ranked last if one launch is enough."""
    kernel, config = kernel_named(name), GemmConfig.parse(text)
    problem = replace(problem, k=128)
    assert config in kernel.configs(problem) and str(config) == text
    assert config not in kernel.configs(replace(problem, experts=8))
    single, two = replace(config, tail=None), 0
    for n in range(1024, 32768, 1024):
        p = replace(problem, n=n)
        waves, rest = split(p, config)
        actual = predicted_us(kernel, p, config)
        if rest.n:
            two += 1
            us = predicted_us(kernel, waves, single) + predicted_us(kernel, rest, config.tail)
            assert actual == pytest.approx(us, rel=0.02)
        else:
            assert actual == math.inf
    assert two


def test_a_needless_pair_is_ranked_last_and_has_no_time():
    problem = replace(W4A16, n=2048)
    pair = "sm90_mixed_gemm/128x192x128_1x1x1_coop+128x128x128_1x1x1_coop"
    explanation = choice.explain(problem)
    times = {str(each): each.us for each in explanation.candidates}
    assert times[pair] == math.inf > times[pair.split("+")[0]]
    assert all("+" in each for each in list(times)[-sum(map(math.isinf, times.values())) :])
    rows = [line for line in explanation.table().splitlines() if pair in line]
    assert len(rows) == 1 and rows[0].split()[1:3] == ["needless", "-"]
    (verdict,) = choice.why(problem, pair)
    assert str(verdict) == f"{pair}: legal, but needless: its first launch computes all features"


def test_a_part_of_a_large_product_is_as_hot_as_the_whole():
    """2 * 256 * 57344 * 8192 operations bring the GPU to its power limit, those of a part do not."""
    kernel, config = kernel_named("sm90_fp8_gemm"), GemmConfig.parse("256x128x128_1x1x1_coop+128x64x256_1x1x1_coop")
    problem = replace(W4A8, n=57344, k=8192)
    waves, rest = split(problem, config)
    apart = predicted_us(kernel, waves, replace(config, tail=None)) + predicted_us(kernel, rest, config.tail)
    assert 1.01 * apart < predicted_us(kernel, problem, config) < 1.16 * apart


def test_one_order_of_additions_where_both_have_it():
    kernel = kernel_named("sm90_mixed_gemm")
    one = GemmConfig.parse("128x128x128_1x1x1_coop")
    both = replace(one, tail=GemmConfig.parse("128x64x128_1x1x1_coop"))
    assert kernel.reduction_order(W4A16, both) == kernel.reduction_order(W4A16, one)
    other = replace(one, tail=GemmConfig.parse("64x64x256_1x1x1_coop"))
    assert kernel.reduction_order(W4A16, other) is None


def test_what_is_shown_of_two_launches():
    kernel, problem, both = kernel_named("sm90_fp8_gemm"), replace(W4A8, m=512), "256x128x128_1x1x1_coop"
    one = kernel.resources(problem, GemmConfig.parse(both))
    two = kernel.resources(problem, GemmConfig.parse(f"{both}+256x64x128_1x1x1_coop"))
    assert (one.ctas, one.waves) == (448, 3.39)
    assert two == one._replace(ctas=396 + 104, waves=3.79)


@pytest.mark.parametrize("text", ["128x128x128_1x1x1_coop+", "128x128x128_1x1x1_coop+coop", "+128x128x128_1x1x1_coop"])
def test_half_a_config_is_refused_with_all_that_came(text):
    with pytest.raises(ValueError, match=f"got '{re.escape(text)}'"):
        GemmConfig.parse(text)


def test_a_tail_has_no_tail():
    with pytest.raises(ValueError, match="config of the tail launch"):
        GemmConfig.parse("+".join(["128x128x128_1x1x1_coop"] * 3))


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("epilogue", [Epilogue(), Epilogue("silu_mul", "device", True, True)], ids=str)
@pytest.mark.parametrize("name, problem, text", {p.values[:2]: p for p in sorted(PAIRS, key=accumulators)}.values())
def test_machine_code_is_that_of_the_two(name, problem, text, epilogue):
    """For the pair with the fewest accumulators of each kernel and way to scale, test_sass.py's findings in single
    kernels hold too."""
    kernel, problem = kernel_named(name), replace(problem, epilogue=epilogue)
    both = functions(object_code(kernel.unit(problem, GemmConfig.parse(text))))
    alone = [functions(object_code(kernel.unit(problem, GemmConfig.parse(t))))[0] for t in text.split("+")]
    assert sorted(both) == sorted(alone)


SHAPES = ((256, 17600, 384), (300, 9000, 1000), (1000, 4106, 256), (40, 600, 256))
EPILOGUES = ("plain", "bias, residual", "bias, silu_mul, alpha")
ON_A_GPU = [
    pytest.param(*pair.values, *case, id=f"{pair.id}-{'x'.join(map(str, case[0]))}-{case[1]}")
    for pair, case in zip(PAIRS, itertools.cycle(itertools.product(SHAPES, EPILOGUES)))
]
"""Each pair in one shape and with one epilogue: three kernels to compile, not eighteen."""


@pytest.mark.gpu
@pytest.mark.parametrize("name, problem, text, shape, epilogue", ON_A_GPU)
def test_bits_are_those_of_the_two_on_a_gpu(name, problem, text, shape, epilogue):
    """(40, 600, 256) fills no wave: one launch."""
    m, n, k = shape
    torch.manual_seed(0)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    weight = (
        QuantizedWeight.from_codes(
            problem.format,
            torch.randint(0, 16, (n, k), dtype=torch.uint8),
            (torch.rand(n, problem.format.groups(k)) + 0.5).to(problem.format.scale_dtype),
            channels=torch.rand(n) + 0.5 if problem.format.has_channels else None,
        )
        .to("cuda")
        .repack(problem.layout)
    )
    x = torch.randn(m, k, device="cuda").to(problem.dtype)
    config, scale = (
        GemmConfig.parse(text),
        {"token_scale": torch.rand(m, device="cuda") + 0.5} if name == "sm90_fp8_gemm" else {},
    )
    tiles = -(-m // config.tile_m)
    first = min(-(-n // config.tile_n) * tiles // sms * sms // tiles * config.tile_n, n) or n
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    options = {
        "plain": {},
        "bias, residual": {"bias": bias, "residual": torch.randn(m, n, device="cuda", dtype=torch.bfloat16)},
        "bias, silu_mul, alpha": {"bias": bias, "activation": "silu_mul", "alpha": torch.tensor(0.5, device="cuda")},
    }[epilogue]
    whole = [linear(x, weight, config=f"{name}/{t}", **options, **scale) for t in text.split("+")]
    split_at = first // 2 if options.get("activation") == "silu_mul" else first
    expected = torch.cat((whole[0][:, :split_at], whole[1][:, split_at:]), 1)
    for _ in range(3):
        assert torch.equal(linear(x, weight, config=f"{name}/{text}", **options, **scale), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        d = linear(x, weight, config=f"{name}/{text}", **options, **scale)
    x.view(torch.uint8).copy_(x.view(torch.uint8).flip(0))
    graph.replay()
    assert torch.equal(d, linear(x, weight, config=f"{name}/{text}", **options, **scale))


# --- experts, by their rows

LARGE = replace(W4A16, m=8 * 256, n=4096, k=7168, experts=256)  # DeepSeek-V3's gate_up with eight rows an expert
TWO_LAUNCHES = "16x256x128_1x1x1_coop+128x128x128_1x1x1_coop"
IN_ONE = "16x256x128_1x1x1_coop+64x128x256_1x1x1_coop"


def in_one_launch(text: str) -> bool:
    return Sm90MixedVariant.of(LARGE, GemmConfig.parse(text)).in_one_launch


def test_two_widths_run_in_one_launch_if_their_warps_are_alike():
    assert in_one_launch(IN_ONE) and not in_one_launch(TWO_LAUNCHES)
    assert not in_one_launch("128x128x128_1x1x1_coop+256x128x128_1x2x1_coop"), "no clusters"
    assert not Sm90MixedVariant.of(W4A16, GemmConfig.parse(IN_ONE)).in_one_launch, "no experts"


def test_experts_with_many_rows_have_wide_tiles_of_their_own():
    """As timed on an H200 (docs/measured.md)."""
    medium, small = (replace(LARGE, m=8 * 128, n=n, k=k, experts=128) for n, k in ((2816, 4096), (1536, 2048)))
    assert [str(choice.choose(problem).config) for problem in (LARGE, medium)] == [TWO_LAUNCHES, IN_ONE]
    assert choice.choose(replace(LARGE, m=128 * 256)).config.tail is None, "not where all experts have many rows"
    assert choice.choose(small).config.tail is None, "nor where a second width shows"
    second = [str(c) for c in choice.explain(small).candidates]
    single, pair = (second.index(f"sm90_mixed_gemm/{text}") for text in (TWO_LAUNCHES.split("+")[0], TWO_LAUNCHES))
    assert single < pair, "a second launch shows in a small product"


def test_experts_are_divided_at_64_rows_or_a_tile():
    texts = TWO_LAUNCHES, IN_ONE, TWO_LAUNCHES.replace("16x", "96x", 1)
    assert [most_narrow_rows(GemmConfig.parse(text)) for text in texts] == [64, 64, 96]


def test_both_widths_take_all_rows_once():
    """In tiles as the cost model counts them."""
    most = most_narrow_rows(GemmConfig.parse(TWO_LAUNCHES))
    narrow, wide = Width(16, 1, most), Width(128, most + 1)
    for rows in range(1, 400):
        tiles = narrow.m_tiles(rows), wide.m_tiles(rows)
        assert sum(map(bool, tiles)) == 1 and max(16 * tiles[0], 128 * tiles[1]) >= rows


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("format", ["int4_g128", "int4_g32_zint", "mxfp4", "nvfp4", "q4_k", "iq4_g32_fp16"])
@pytest.mark.parametrize("text", [c for c in kernel_named("sm90_mixed_gemm").width_pairs if in_one_launch(c)])
def test_machine_code_of_both_widths(text, format):
    problem = replace(LARGE, format=WeightFormat.of(format), gathered="8x" in text)
    config, kernel = GemmConfig.parse(text), kernel_named("sm90_mixed_gemm")
    if config in kernel.configs(problem):
        check(facts_of(object_code(kernel.unit(problem, config))), "HGMMA")


@pytest.mark.gpu
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("text", [TWO_LAUNCHES, IN_ONE])
def test_two_widths_give_the_bits_of_each_alone_whatever_the_routing(text, gathered):
    """In a graph that is replayed: each product reads what all launches in front of it wrote."""
    experts, rows, size = 8, 512, 640
    weights = [quantize(torch.randn(size, size, device="cuda"), WeightFormat()) for _ in range(experts)]
    w = QuantizedWeight.stack(weights, layout="mma16")
    x = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)
    ids = torch.zeros(rows, 1, dtype=torch.int32, device="cuda")
    most = most_narrow_rows(GemmConfig.parse(text))

    def product(x, routing, config, **options):
        return grouped_linear(x, w, routing.m_offsets, config=config, **options)

    def layer(product) -> torch.Tensor:
        routing = route(ids, experts)
        d = product(x, routing, text, indices=routing.tokens if gathered else None)
        return product(d, routing, text, settled=True)

    def apart(x, routing, text, **options):
        """Each expert by the width that is for it."""
        few, many = (product(x, routing, config, **options) for config in text.split("+"))
        counts = routing.m_offsets.diff()
        wide = torch.repeat_interleave(counts > most, counts.long())
        return torch.where(wide[:, None], many, few)

    layer(product)
    with capturing() as graph:
        d = layer(product)
    for seed in range(30):
        g = torch.Generator().manual_seed(seed)
        likely = torch.rand(experts, generator=g) ** (seed % 10)
        ids.copy_(torch.multinomial(likely + 1e-9, rows, replacement=True, generator=g)[:, None])
        graph.replay()
        assert torch.equal(d, layer(apart)), f"routing {seed}"
