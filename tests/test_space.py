"""Legality: rules with reasons, which leave the configs that they left, and of which none overruns a device."""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import astuple, replace

import pytest
import torch

import legality
from w4gemm import choice
from w4gemm.choice.model import WAVES_FROM
from w4gemm.cli.__main__ import main
from w4gemm.core.config import GemmConfig
from w4gemm.core.elements import ELEMENTS
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.formats import SCALES, WeightFormat
from w4gemm.core.problem import GPUS, H200, Device, GemmProblem
from w4gemm.kernels import KERNELS, kernel_named
from w4gemm.kernels.gpu import GpuKernel
from w4gemm.kernels.space import KINDS, NOT_COMPILED, Finding, Pressure

GPU_KERNELS = [kernel for kernel in KERNELS if isinstance(kernel, GpuKernel)]
PROBLEM = GemmProblem(64, 4096, 4096, torch.bfloat16, WeightFormat(), "mma16", device=H200)
EPILOGUES = (
    Epilogue(),
    Epilogue("silu_mul", residual=True),
    Epilogue("gelu", "device", True, True, torch.float32),
    Epilogue(token_scale=True),
)

# (dense, of experts, gathered rows of experts) on an H200, by format
COUNTS = {
    "sm90_decode": {"int4_g128": (42, 42, 42), "int4_g32": (40, 40, 40)},
    "sm90_mixed_gemm": {"int4_g128": (419, 160, 118), "int4_g32": (419, 156, 116), "int4_g32_zfloat": (419, 156, 116)},
    "sm90_fp8_gemm": {"int4_g128": (357, 106, 76), "int4_g32_zint": (153, 78, 59), "int4_g128_e4m3": (429, 150, 108)},
    "sm89_fp8_gemm": {"int4_g128": (21, 16, 16), "int4_g32": (15, 12, 12), "int4_g128_e4m3": (21, 16, 16)},
    "sm80_mixed_gemm": {"int4_g128": (31, 22, 22), "int4_g32": (31, 22, 19)},
}


def problem_of(kernel: GpuKernel, format: str, **changes) -> GemmProblem:
    made = replace(PROBLEM, dtype=kernel.dtypes[-1], layout=kernel.layout, format=WeightFormat.parse(format))
    return replace(made, **changes)


def random_problems(count: int) -> list[tuple[GpuKernel, GemmProblem]]:
    """Problems that the GPU kernels support, over devices, formats, dtypes, epilogues, dense and grouped."""
    draw, drawn = random.Random(3), []
    while len(drawn) < count:
        kernel = draw.choice(GPU_KERNELS)
        format = draw.choice(("int4_g32", "int4_g64", "int4_g96", "int4_g128", "int4_g4064", "int4_col"))
        format += draw.choice(("", "_zint", "_zfloat", "_fp16", "_e4m3"))
        experts = draw.choice((0, 0, 8))
        problem = replace(
            problem_of(kernel, format, dtype=draw.choice(kernel.dtypes), experts=experts),
            m=draw.choice((1, 7, 64, 300, 5000)),
            n=draw.choice((64, 1004, 4096, 28672)),
            epilogue=draw.choice(EPILOGUES),
            device=draw.choice([*GPUS.values(), Device("cuda", "NVIDIA L4", (8, 9), 58, 101376)]),
            gathered=bool(experts) and draw.random() < 0.5,
        )
        if kernel.supports(problem):
            drawn.append((kernel, problem))
    return drawn


@pytest.mark.parametrize("name", COUNTS)
def test_as_many_configs_as_were_measured(name):
    """Raise these numbers with the rules; a kernel's revision stays if its old configs keep their times."""
    kernel = kernel_named(name)
    for format, expected in COUNTS[name].items():
        forms = ({}, {"experts": 8}, {"experts": 8, "gathered": True})
        actual = tuple(len(kernel.configs(problem_of(kernel, format, **form))) for form in forms)
        assert actual == expected, (name, format)


@pytest.mark.parametrize("kernel", [k for k in GPU_KERNELS if k.name.startswith("sm90_")], ids=lambda k: k.name)
def test_an_interval_ends_where_a_tile_is_full(kernel):
    """Otherwise a new tile_m is only compared for more tokens than it has, and is never the fastest. Plans for more
    tokens than WAVES_FROM go by m itself."""
    tiles = {config.tile_m for config in kernel.space.configs}
    broken = sorted(tile_m for tile_m in tiles if tile_m % 8)
    assert not broken, f"tile_m {broken}: WGMMA and mma.sync take tokens in multiples of 8"
    without = sorted({tile_m for tile_m in tiles if tile_m <= WAVES_FROM} - {*choice.BOUNDS})
    assert not without, f"add tile_m {without} to _TILES of choice/model.py"


def test_no_legal_variant_overruns_its_device():
    """Stages, staging buffers, sums that are handed over, whatever the epilogue: a sample of a sweep over all."""
    seen = 0
    for kernel, problem in random_problems(120):
        for config in kernel.configs(problem):
            for c in (replace(config, tail=None), config.tail) if config.tail else (config,):
                v = kernel.variant.of(problem, c)
                held = kernel.ctas_per_sm(c)
                assert v.shared_bytes <= problem.device.shared_memory, (problem, c)
                if problem.device == H200:
                    assert held * (v.shared_bytes + 1024) <= 233472, (problem, c)
                assert v.num_stages >= 2 and v.threads * held <= 2048, (problem, c)
                seen += 1
    assert seen > 3000


def test_a_config_is_legal_if_no_rule_excludes_it():
    for kernel, problem in random_problems(25):
        legal = set(kernel.configs(problem))
        others = GemmConfig(7, 64, 128), GemmConfig(64, 64, 128, 4)
        near = {*legal, *kernel.space.configs, *others, *pairs_of(legal)}
        for config in random.Random(5).sample(sorted(near, key=str), min(300, len(near))):
            exclusions = kernel.exclusions(problem, config)
            assert (not exclusions) == (config in legal), (problem, config)
            assert all(e.kind in KINDS and e.reason and e.name for e in exclusions)


def pairs_of(legal: set[GemmConfig]) -> list[GemmConfig]:
    single = sorted((c for c in legal if c.tail is None), key=str)[:5]
    return [replace(a, tail=b) for a in single for b in single]


@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
def test_rules_have_names_of_their_own_and_exclude_something(kernel):
    """A rule that excludes nothing of any format, dense or of experts, is dead; rules may concern sizes that are listed
    in other combinations only."""
    rules = kernel.space.impossible + kernel.space.held_back
    assert len({rule.name for rule in rules}) == len(rules)
    formats = (
        "int4_g128",
        "int4_g32",
        "int4_g32_zint",
        "int4_g64_zfloat",
        "int4_g128_e4m3",
        "e2m1_g16_e4m3",
        "nvfp4",
        "q4_k",
        "nf4",
        "int4_g16",
        "e4m3_g128_b128",
    )
    forms = ({}, {"experts": 8}, {"experts": 8, "gathered": True})
    problems = [problem_of(kernel, format, **form) for format in formats for form in forms]
    problems += [replace(p, device=GPUS["sm_89"]) for p in problems]
    problems += [replace(p, n=4092, epilogue=Epilogue("gelu", residual=True)) for p in problems]
    problems += [replace(p, epilogue=Epilogue(block_scale=True)) for p in problems]
    variants = [kernel.any_variant(problem) for problem in problems if kernel.supports(problem)]
    listed = [astuple(replace(c, tail=None))[:-1] for c in kernel.space.configs]
    others = [GemmConfig(*sizes) for sizes in itertools.product(*map(dict.fromkeys, zip(*listed, strict=True)))]
    for rule in rules:
        pairs = itertools.chain(itertools.product(kernel.space.configs, variants), itertools.product(others, variants))
        assert any(rule.excludes(replace(v, config=c)) for c, v in pairs), rule.name


@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
def test_every_listed_config_can_run(kernel):
    """Dense, or without token scales, or with other scales: a config that no rule lets pass is listed in vain."""
    formats = ("int4_g128", "int4_g128_e4m3", "int4_g32_zint", "e4m3_col_fp32", "q4_k")
    problems = [problem_of(kernel, f, epilogue=Epilogue(token_scale=kernel.layout == "mma8")) for f in formats]
    problems.append(problem_of(kernel, "e4m3_g128_b128", epilogue=Epilogue(block_scale=kernel.layout == "mma8")))
    legal = {config for p in problems if kernel.supports(p) for config in kernel.configs(p)}
    assert set(kernel.space.configs) <= legal


@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
def test_every_decoder_and_tile_has_its_rows(kernel):
    """`python tests/legality.py` compiles what is new."""
    compiled = kernel.space.compiled
    assert compiled.tiles == kernel.space.tiles
    assert compiled.decoders == legality.sizes_of(kernel)
    assert compiled.text() == kernel.space.table.read_text()
    for finding in compiled.findings:
        tiles = set(map(int, kernel.space.tiles[finding.tiles].split()))
        assert finding.tile_m and tiles.issuperset(finding.tile_m), finding
        assert finding.pressure.decoder in compiled.decoders, finding


@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
def test_every_format_has_a_decoder_of_the_file(kernel):
    compiled = kernel.space.compiled
    for element, scale, zero, group_size in itertools.product(
        ELEMENTS, SCALES, ("none", "int", "float"), (-1, 16, 32, 96)
    ):
        with contextlib.suppress(ValueError):  # elements without zero points, scales that take other groups
            problem = replace(problem_of(kernel, "int4"), format=WeightFormat(group_size, zero, scale, element))
            if kernel.supports(problem):
                assert compiled.badly(Pressure.of(kernel.any_variant(problem))) is not None
    unknown = Pressure("another", "dense", 128, 0)
    with pytest.raises(AssertionError, match="another, .* was not compiled; python tests/legality.py does that"):
        compiled.badly(unknown)


def test_what_the_file_says_of_a_config_is_so():
    pytest.importorskip("cutlass")
    finding = next(f for f in kernel_named("sm90_fp8_gemm").space.compiled.findings if f.seen)
    cell = legality.Cell("sm90_fp8_gemm", finding.tiles, finding.pressure.rows, finding.pressure.decoder)
    assert cell.variants(finding.tile_m[0], finding.pressure)[0].flaw() == finding.seen


def test_why_a_config_that_compiles_badly_is_not_legal(tmp_path):
    """A finding excludes its configs under its pressure and under each that covers it, with what ptxas did."""
    kernel, tiles = kernel_named("sm90_fp8_gemm"), "128x128_1x1x1_coop"
    asked = problem_of(kernel, "int4_g128", epilogue=Epilogue("gelu", token_scale=True))
    pressure = Pressure.of(kernel.any_variant(asked))
    findings = (
        Finding(tiles, (144, 160), pressure._replace(epilogue=0), "24 bytes of local memory"),
        Finding(tiles, (168,), pressure, NOT_COMPILED),
        Finding(tiles, (128,), pressure._replace(epilogue=3), "8 bytes of local memory"),
    )
    table = tmp_path / "legality.jsonl"
    table.write_text(kernel.space.compiled._replace(findings=findings).text())
    space = replace(kernel.space, table=table)
    variant = kernel.any_variant(asked)
    configs = {m: GemmConfig.parse(f"{m}x{tiles}") for m in (128, 144, 160, 168)}
    assert [m for m in configs if configs[m] in space.legal(variant)] == [128]
    assert str(space.exclusions(variant, configs[160])[0]) == (
        f"compiles badly: 144x128x128_1x1x1_coop: 24 bytes of local memory, with {kernel.space.compiled.compiler} "
        "(dense, plain, up to 4 bits, 0 registers, scales on sums, 128 bytes of scales)"
    )
    assert str(space.exclusions(variant, configs[168])[0]).startswith(
        "not compiled: python tests/legality.py does that (dense, activation, up to 4 bits"
    )
    assert not space.exclusions(variant, configs[128])


@pytest.mark.parametrize(
    "config, kind, reason",
    [
        ("sm90_mixed_gemm/64x64x64_1x1x1_coop", "unlisted", "of 64x64_1x1x1_coop the kernel offers tile_m 192, 256"),
        ("sm90_mixed_gemm/128x64x128_2x1x1_coop", "unlisted", "beside tile_m the kernel offers 64x64_1x1x1_coop, "),
        ("sm90_mixed_gemm/64x64x128_1x1x1_coop+64x64x128_1x1x1_coop", "unlisted", "only pairs"),
        ("dequantize_gemm/256x3000x128_1x1x1_coop", "unlisted", "a power of two"),
    ],
)
def test_why_a_config_is_not_legal(config, kind, reason):
    (verdict,) = choice.why(PROBLEM, config)
    assert not verdict.legal and (verdict.exclusions[0].kind, verdict.rank) == (kind, 0)
    assert reason in str(verdict) and KINDS[kind] in str(verdict)


def test_where_a_legal_config_ranks():
    ranking = choice.configs(PROBLEM)
    for number in (1, 7, 100):  # the last ones are needless
        (verdict,) = choice.why(PROBLEM, ranking[number - 1])
        assert verdict.legal and (verdict.rank, verdict.of) == (number, len(ranking))
        assert f"number {number} of {len(ranking)}" in str(verdict)


def test_why_asks_every_kernel_that_supports_the_problem():
    config = choice.configs(PROBLEM)[0].partition("/")[2]
    verdicts = choice.why(PROBLEM, config)
    assert {v.kernel for v in verdicts} == {k.name for k in KERNELS if k.supports(PROBLEM)}
    assert verdicts[0].legal and sum(v.legal for v in verdicts) == 1


def test_why_a_kernel_cannot_run_it_at_all():
    (verdict,) = choice.why(PROBLEM, "cpu_mixed_gemm/1x128x32_1x1x1_coop")
    assert not verdict.legal and "runs on the cpu" in str(verdict)
    with pytest.raises(ValueError, match="config: wanted <tile_m>"):
        choice.why(PROBLEM, "fast")


def test_why_of_the_order_that_serves_every_m():
    invariant = replace(PROBLEM, batch_invariant=True)
    outside = next(c for c in choice.configs(PROBLEM) if c not in choice.configs(invariant))
    (verdict,) = choice.why(invariant, outside)
    assert verdict.legal and verdict.rank == 0 and "another order" in str(verdict)


def test_a_forced_config_that_is_not_legal_names_the_rule():
    with pytest.raises(ValueError, match="is not legal for .*offers tile_m 192, 256 .*; nearest are"):
        choice.choose(PROBLEM, "sm90_mixed_gemm/64x64x64_1x1x1_coop")


def test_a_forced_config_of_gathered_rows_alone_says_so():
    """Rows of experts are copied first where x's strides let no kernel gather them."""
    copied = replace(PROBLEM, dtype=torch.float8_e4m3fn, layout="mma8", format=WeightFormat.parse("int4_g96_e4m3"))
    copied = replace(copied, experts=8, epilogue=Epilogue(residual=True, token_scale=True))
    alone = set(choice.configs(replace(copied, gathered=True))) - set(choice.configs(copied))
    assert alone
    with pytest.raises(ValueError, match="8 experts, .*only where rows of x can be gathered in place; nearest are"):
        choice.choose(copied, min(alone))


def test_the_command_says_why(capsys):
    asked = ["explain", "--m", "64", "--n", "4096", "--k", "4096", "--device", "h200", "--why"]
    assert main([*asked, "sm90_mixed_gemm/64x64x64_1x1x1_coop"]) == 0
    assert "not legal" in capsys.readouterr().out
    assert main([*asked, choice.configs(PROBLEM)[2]]) == 0
    assert "legal, number 3 of" in capsys.readouterr().out
