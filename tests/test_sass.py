"""Machine code of the GPU kernels, compiled for their targets without a GPU: what each of them was written to be.

A case is one variant of a kernel. It must use the matrix instruction that the kernel was written for, keep all values
of its main loop in registers and, on Hopper, run its WGMMAs asynchronously. The cases are a sample of all variants:
every kernel x format; of every stratum (dense, grouped or gathered; kernel, schedule, tile_k, cluster) the config with
the most accumulators, with an epilogue that takes many registers; and some more at random, drawn anew whenever the
kernels' sources change. A run of everything takes a sample of the cases (tests/sample.py); ``--every-variant`` takes
all configs, which takes half an hour on two cores.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from conformance.cases import WIDTHS as OTHER_WIDTHS
from legality import INSTRUCTIONS
from sass import (
    SPILLED_ONCE,
    Sass,
    check,
    disassemble,
    facts_of,
    loads_into_flight,
    local_memory,
    main_loops,
    scan,
    spilled_in_flight,
    spills_in_main_loops,
)
from tiny_kernel import tiny
from w4gemm import GemmConfig, WeightFormat
from w4gemm.choice.model import ranked
from w4gemm.core.epilogue import PLAIN, Epilogue
from w4gemm.core.problem import GPUS, H200, Device, GemmProblem
from w4gemm.jit import object_code
from w4gemm.jit.disk import source_hash
from w4gemm.kernels import KERNELS, Kernel, kernel_named
from w4gemm.kernels.variant import EXPERT_MAPS

pytest.importorskip("cutlass")

INSTRUCTION = {name: i for name, i in INSTRUCTIONS.items() if name != "sm90_fp8_block_gemm"}
INSTRUCTION["dequantize_gemm"] = "STG.E.128"
"""Matrix instruction of each compiled kernel on an H200; for one that leaves the product to cuBLAS, the store
instruction. sm90_fp8_block_gemm takes none of these formats, and has a test of its own."""
FP8_KERNELS = ("sm89_fp8_gemm", "sm90_fp8_gemm")
FP8 = torch.float8_e4m3fn

# a scale group of 32, 64 and 128 inside a block, larger ones and per column
FORMATS = [f"int4_{group}{zero}" for group in ("g32", "g64", "g128", "col") for zero in ("", "_zint", "_zfloat")]
FP8_FORMATS = [*FORMATS, "int4_g128_e4m3", "int4_g32_e4m3", "mxfp4", "int3_g64_zfloat", "int2_g32_zfloat_fp16"]
FP8_FORMATS += ["int4_g64_zfloat_fp32", "int3_g64_zfloat_fp32", "int2_g32_zfloat_fp32"]
FP8_FORMATS += ["int4_g32_fp16", "e4m3_col_fp32", "e4m3_g128_b128", "int3_g32", "int2_g128_fp16", "e4m3_g128_fp32"]
FP8_FORMATS += ["int5_g32", "int5_g128_fp16", "int3_g64_zint", "int2_g32_zint"]
FP8_FORMATS += ["e5m2_col_fp32", "e5m2_g128_b128", "e5m2_g128_fp32"]
FOLDED_FLOATS = ("e2m1_g16_e4m3", FP8)
"""Of sm90_fp8_gemm alone."""
OTHER_DTYPES = [("int4_g128_fp16", torch.float16), ("int4_g32_zfloat_fp16", torch.bfloat16)]
WIDE = [(name, torch.bfloat16) for name in ("q4_k", "int4_g64_zfloat_fp32")] + [("q4_k", torch.float16)]
CODEBOOKS = [("iq4_g32_fp16", torch.float16), ("iq4_g32_fp16", torch.bfloat16), ("iq4_g128", torch.bfloat16)]
CODEBOOKS += [("nf4", torch.bfloat16), ("nf4", torch.float16), ("iq4_g32_fp32", torch.bfloat16)]
CODEBOOKS += [("e2m1_g64", torch.bfloat16), ("iq4_g32_s8x256", torch.bfloat16), ("nf4_g16_s8x128", torch.float16)]
CODEBOOKS += [("e2m1_g64_s8x256", torch.bfloat16)]
WIDTHS = [(name, (torch.bfloat16, torch.bfloat16, torch.float16)[i % 3]) for i, name in enumerate(OTHER_WIDTHS)]
NEEDY = {
    "sm90_fp8_gemm": ("int4_g32_zint", "int4_g128", "int4_g128_e4m3"),
    "sm89_fp8_gemm": ("int4_g32_zint", "int4_g128_e4m3"),
}
"""By kernel, the formats that need the most registers, or that alone have some configs; else those of _NEEDY."""
_NEEDY = ("int4_g32_zfloat", "int4_g128")
MODES: dict[str, dict[str, Any]] = {
    "dense": {},
    "grouped": {"experts": 8},
    "gathered": {"experts": 8, "gathered": True},
}
EPILOGUES = {
    "plain": (PLAIN, 8192),
    "all": (Epilogue("gelu", "device", True, True), 8190),
    "gated": (Epilogue("silu_mul", "host", True, True, torch.float32), 8192),
    "bias": (Epilogue("gelu", "device", True), 8192),
    "experts": (Epilogue("silu_mul"), 8192),
    "gpt-oss": (Epilogue("swiglu_oai", bias=True), 8192),
    "kimi": (Epilogue("situ_mul"), 8192),
}
"""Epilogues, and n: rows of d that are no multiple of 16 bytes take more registers."""
HEAVY = ("all", "gated", "bias", "gpt-oss", "kimi")
"""Epilogues of the largest tiles."""
DRAWN = 24
"""Random cases besides those of the strata."""
FLOATS_DRAWN = 6
"""Cases of the largest tiles of e2m1 and codebooks, drawn at random."""


class Case(NamedTuple):
    """A variant of a kernel: a config, and a problem for an H200 that it is compiled for."""

    kernel: str
    config: GemmConfig
    format: str
    mode: str = "dense"
    epilogue: str = "plain"

    @property
    def problem(self) -> GemmProblem:
        epilogue, n = EPILOGUES[self.epilogue]
        fp8 = self.kernel in FP8_KERNELS
        epilogue = epilogue._replace(token_scale=fp8)
        p = problem(self.format, FP8 if fp8 else torch.bfloat16, 512, epilogue=epilogue, **MODES[self.mode])
        return replace(p, n=n)

    @property
    def facts(self) -> dict[str, Any]:
        """Parameters whose every value is in a sample."""
        c = self.config
        alone = {"mode": self.mode, "tile_k": c.tile_k, "format": self.format, "epilogue": self.epilogue}
        return alone | {"schedule": (self.kernel, c.schedule)}

    def __str__(self) -> str:
        return "-".join(map(str, self))


def gpu_kernels() -> list[Kernel]:
    return [k for k in KERNELS if k.name in INSTRUCTION]


def problem(
    name: str, dtype: torch.dtype = torch.bfloat16, m: int = 16, device: Device = H200, **kwargs: Any
) -> GemmProblem:
    layout = "mma8" if dtype == FP8 else "mma16"
    return GemmProblem(m, 8192, 8192, dtype, WeightFormat.parse(name), layout, device=device, **kwargs)


def check_variant(kernel: Kernel, p: GemmProblem, config: GemmConfig, instruction: str = "") -> None:
    """Assert that a variant is what its kernel was written to be. instruction: the matrix instruction, if it is not the
    one on an H200."""
    code = object_code(kernel.unit(p, config))
    # a WGMMA along k is as long as a group of 32, whose sums are waited for
    asynchronous = not (p.dtype == FP8 and p.format.group_size == 32)
    check(facts_of(code), instruction or INSTRUCTION[kernel.name], asynchronous=asynchronous)
    assert not (registers := loads_into_flight(code)), f"loaded while an MMA in flight may read them: {registers}"
    assert not (places := spilled_in_flight(code)), f"stored to local memory while on their way, at {places}"
    if p.gathered:
        check_gathered(disassemble(code), by_wgmma=INSTRUCTION[kernel.name].endswith("GMMA"))


def check_gathered(sass: Sass, by_wgmma: bool) -> None:
    """Assert that cp.async brings x and, if WGMMA reads it, that a proxy fence follows each wait for a stage."""
    assert sass.count("LDGSTS") > 0 and sass.count("UTMALDG") == 0
    if by_wgmma:
        assert sass.count("ARRIVES") == 1 and sass.count("USETMAXREG") in (0, 2)
        # one fence after the barriers' start, one for each wait but the producer's, one before each store by TMA
        waits = count_waits(sass)
        assert waits >= 3 and sass.count("FENCE.VIEW") == waits + sass.count("UTMASTG")


def count_waits(sass: Sass) -> int:
    """Waits for an mbarrier: loops that try again. Before some of them ptxas puts a first try, which branches forward,
    to a loop at the kernel's end."""
    tries = re.findall(r"/\*(\w+)\*/\s+SYNCS\.PHASECHK\.TRANS64\.TRYWAIT.*?\bBRA 0x(\w+)", sass.text, re.DOTALL)
    return sum(int(target, 16) <= int(address, 16) for address, target in tries)


def configs_of(kernel: Kernel, p: GemmProblem) -> list[GemmConfig]:
    """Configs of one launch; those of two are tested in test_two_launches.py."""
    return [c for c in kernel.configs(p) if c.tail is None]


def variants() -> Iterator[Case]:
    """Every config with every needy format, in every mode, without epilogue."""
    for mode, kernel in itertools.product(MODES, gpu_kernels()):
        for name in NEEDY.get(kernel.name, _NEEDY):
            case = Case(kernel.name, GemmConfig(8, 64, 128), name, mode)
            yield from (case._replace(config=c) for c in configs_of(kernel, case.problem))


def stratum(case: Case) -> Hashable:
    c = case.config
    return case.mode, case.kernel, c.schedule, c.tile_k, c.split_k > 1, c.cluster_m * c.cluster_n > 1


def legal(case: Case) -> bool:
    return case.config in kernel_named(case.kernel).configs(case.problem)


def largest() -> list[Case]:
    """The cases of each stratum with the most accumulators; the needier format, if both have them. The epilogues are
    the heavy ones in turn; if the largest config is not legal with one, it has that of experts, and the largest that is
    legal comes besides."""
    strata: dict[Hashable, list[Case]] = {}
    for case in variants():
        strata.setdefault(stratum(case), []).append(case)
    turns = {mode: itertools.cycle(HEAVY) for mode in MODES}
    actual = []
    for cases in strata.values():
        cases.sort(key=lambda case: -case.config.tile_m * case.config.tile_n)
        if cases[0].kernel == "dequantize_gemm":
            actual.append(cases[0])
            continue
        epilogue = next(turns[cases[0].mode])
        heavy = next(filter(legal, (case._replace(epilogue=epilogue) for case in cases)))
        if heavy.config != cases[0].config:
            actual.append(cases[0]._replace(epilogue="experts"))
        actual.append(heavy)
    return actual


def largest_of_floats() -> list[Case]:
    """Some of the largest tiles of e2m1 and codebooks, whose decoders need more registers than int4's beside as many
    scales."""
    cases = {}
    for mode, name, epilogue in itertools.product(
        MODES, ("mxfp4", "nvfp4", "nf4", "iq4_g32_fp32", "iq4_g32_s8x256"), HEAVY
    ):
        case = Case("sm90_mixed_gemm", GemmConfig(8, 64, 128), name, mode, epilogue)
        for config in configs_of(kernel_named(case.kernel), case.problem):
            actual = case._replace(config=config)
            key = stratum(actual), name, epilogue
            tile = config.tile_m * config.tile_n
            if key not in cases or tile > cases[key].config.tile_m * cases[key].config.tile_n:
                cases[key] = actual
    return random.Random(source_hash("kernels")).sample(list(cases.values()), FLOATS_DRAWN)


def drawn() -> list[Case]:
    return random.Random(source_hash("kernels")).sample(list(variants()), DRAWN)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        more = variants() if metafunc.config.getoption("every_variant") else [*largest_of_floats(), *drawn()]
        metafunc.parametrize("case", dict.fromkeys([*largest(), *more]), ids=str)


@pytest.mark.sampled(0.1)
def test_config(case):
    check_variant(kernel_named(case.kernel), case.problem, case.config)


def formats_of(kernel: str) -> list[tuple[str, torch.dtype]]:
    if kernel in FP8_KERNELS:
        return [(name, FP8) for name in FP8_FORMATS] + [FOLDED_FLOATS] * (kernel == "sm90_fp8_gemm")
    extra = [("int4_g128_e4m3", FP8)] if kernel == "dequantize_gemm" else []
    floats = [(name, dtype) for name in ("mxfp4", "nvfp4") for dtype in (torch.bfloat16, torch.float16)]
    if kernel == "dequantize_gemm":
        floats = [(name, dtype) for name, dtype in floats if name == "mxfp4"]
    widths = WIDTHS[[name for name in INSTRUCTION if name not in FP8_KERNELS].index(kernel) % 2 :: 2]
    return [(name, torch.bfloat16) for name in FORMATS] + OTHER_DTYPES + WIDE + CODEBOOKS + floats + extra + widths


class FormatCase(NamedTuple):
    """A kernel with a format, for m tokens."""

    kernel: str
    name: str
    dtype: torch.dtype
    m: int

    @property
    def facts(self) -> dict[str, Any]:
        """What a sample covers: each part of a format, and the dtypes of x and m of each kernel."""
        w = WeightFormat.parse(self.name)
        parts = {"element": w.element, "zero": w.zero, "scale": w.scale, "group": w.group_size}
        return parts | {"dtype": (self.kernel, self.dtype), "m": (self.kernel, self.m)}

    def __str__(self) -> str:
        return f"{self.kernel}-{self.name}-{str(self.dtype).removeprefix('torch.')}-{self.m}"


FORMAT_CASES = [
    FormatCase(kernel, name, dtype, m)
    for kernel in INSTRUCTION
    for (name, dtype), m in zip(formats_of(kernel), itertools.cycle((1, 4096)), strict=False)
    if kernel_named(kernel).supports(problem(name, dtype, m))
]


@pytest.mark.sampled(0.07)
@pytest.mark.parametrize("format_case", FORMAT_CASES, ids=str)
def test_format(format_case):
    """Every kernel x format: the config that is ranked first, for one token and for many in turn."""
    kernel, name, dtype, m = format_case
    p = problem(name, dtype, m, epilogue=Epilogue(bias=m > 1))
    check_variant(kernel_named(kernel), p, ranked([kernel_named(kernel)], p)[0][2])


def test_every_kernel_that_compiles_is_checked():
    compiling = set()
    for k in KERNELS:
        p = problem("int4_g128", FP8 if k.name in FP8_KERNELS else torch.bfloat16)
        if k.supports(p) and (c := k.configs(p)) and k.unit(p, c[0]) is not None:
            compiling.add(k.name)
    assert compiling == set(INSTRUCTION)


class Decoding(NamedTuple):
    """Instructions that decode eight weights, a code word; the main loop decodes ``words`` of them in a round."""

    kernel: str
    config: str
    format: str
    dtype: torch.dtype
    words: int
    counts: dict[str, float]

    @property
    def facts(self) -> dict[str, Any]:
        """Parameters whose every value is in a sample."""
        return {"kernel": self.kernel}

    def __str__(self) -> str:
        return f"{self.kernel}-{self.config}-{self.format}-{str(self.dtype).removeprefix('torch.')}"


DECODING = [
    Decoding("sm90_mixed_gemm", "32x64x512_1x1x1_coop", "int4_g128", torch.bfloat16, 8, {"HFMA2": 4, "HADD2": 0}),
    Decoding("sm90_mixed_gemm", "32x64x512_1x1x1_coop", "int4_g128_fp16", torch.float16, 8, {"HFMA2": 2, "HADD2": 2}),
    Decoding(
        "sm90_fp8_gemm", "128x64x256_1x1x1_coop", "int4_g128_e4m3", torch.float8_e4m3fn, 16, {"PRMT": 4, "IDP": 2}
    ),
    Decoding("sm90_fp8_gemm", "128x64x256_1x1x1_coop", "mxfp4", torch.float8_e4m3fn, 16, {"IDP": 2}),
    Decoding(
        "sm90_mixed_gemm", "32x64x512_1x1x1_coop", "mxfp4", torch.bfloat16, 8, {"HMUL2": 4, "SHF.R.W": 2, "PRMT": 0}
    ),
    Decoding("sm90_mixed_gemm", "128x64x256_1x1x1_coop", "nf4", torch.bfloat16, 8, {"PRMT": 12, "IDP": 2, "HMUL2": 4}),
    Decoding(
        "sm90_mixed_gemm", "128x64x256_1x1x1_coop", "iq4_g128", torch.bfloat16, 8, {"PRMT": 8, "IDP": 2, "HFMA2": 4}
    ),
    Decoding("sm90_mixed_gemm", "32x64x512_1x1x1_coop", "nf4", torch.bfloat16, 8, {"IDP": 4, "LDS": 4.5, "HMUL2": 4}),
    Decoding("sm90_mixed_gemm", "64x128x256_1x1x1_coop", "iq4_g32_fp16", torch.bfloat16, 8, {"LDS": 4.75, "FMUL": 8}),
    Decoding(
        "sm90_mixed_gemm",
        "32x64x512_1x1x1_coop",
        "iq4_g32_fp16",
        torch.bfloat16,
        8,
        {"LDS": 4.75, "FMUL": 0, "FFMA": 8},
    ),
    Decoding(
        "sm90_mixed_gemm",
        "64x128x128_1x1x1_coop",
        "nf4_g64_fp32",
        torch.bfloat16,
        8,
        {"LDS": 4.5, "FMUL": 0, "FFMA": 8},
    ),
    Decoding("sm90_decode", "8x64x128_1x1x1_pingpong", "nf4", torch.bfloat16, 32, {"IDP": 4, "LDS": 4.5, "PRMT": 0}),
    Decoding(
        "sm90_mixed_gemm", "32x64x512_1x1x1_coop", "nvfp4", torch.bfloat16, 8, {"HMUL2": 4, "SHF.R.W": 2, "PRMT": 0}
    ),
    Decoding(
        "sm90_mixed_gemm", "32x64x512_1x1x1_coop", "nvfp4", torch.float16, 8, {"HMUL2": 4, "SHF.R.W": 2, "PRMT": 0}
    ),
    Decoding(
        "sm90_mixed_gemm",
        "32x64x512_1x1x1_coop",
        "int4_g64_zfloat_u8x128",
        torch.bfloat16,
        8,
        {"IDP": 4, "FFMA": 9, "PRMT": 1},
    ),
    Decoding(
        "sm90_mixed_gemm", "32x64x512_1x1x1_coop", "q4_k", torch.bfloat16, 8, {"IDP": 8, "FFMA": 8.5, "PRMT": 0.5}
    ),
]


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("decoding", DECODING, ids=str)
def test_instructions_that_decode(decoding):
    p, config = problem(decoding.format, decoding.dtype, 128), GemmConfig.parse(decoding.config)
    sass = disassemble(object_code(kernel_named(decoding.kernel).unit(p, config)))
    (loop,) = main_loops(sass, INSTRUCTION[decoding.kernel])
    actual = {
        opcode: sum(bool(re.match(rf"{re.escape(opcode)}\b", line)) for line in loop) for opcode in decoding.counts
    }
    assert {opcode: count / decoding.words for opcode, count in actual.items()} == decoding.counts


class EightWeights(NamedTuple):
    """Instructions that decode eight weights, by the decoder's sequence; beside e4m3 x scales multiply sums."""

    kernel: str
    name: str
    instructions: float

    @property
    def facts(self) -> dict[str, Any]:
        """Parameters whose every value is in a sample."""
        return {"kernel": self.kernel}

    def __str__(self) -> str:
        return f"{self.kernel}-{self.name}"


BF16_SEQUENCES = {"int8_g128": 8, "int6_g128": 11.5, "int5_g128": 11.75, "int4_g128": 9, "int3_g128": 11.25}
BF16_SEQUENCES |= {"int2_g128": 9.5, "e4m3_col_fp32": 11, "e4m3_g128_b128": 27}
BF16_SEQUENCES |= {"e5m2_col_fp32": 12, "e5m2_g128_b128": 28, "mxfp6": 15.5, "e3m2_g32_e8m0": 14.5}
BF16_SEQUENCES |= {"q6_k": 25.5, "q5_k": 25.5, "q4_k": 23.5, "q3_k": 16, "q2_k": 26}
FP8_SEQUENCES = {
    "e4m3_g128_b128": 2,
    "e5m2_g128_b128": 2,
    "int4_g128": 7,
    "int4_g128_zfloat": 3,
    "int5_g128": 8.5,
    "int3_g128": 6.5,
    "int3_g128_zint": 6.5,
}
FP8_SEQUENCES |= {"int2_g128": 4.75, "int2_g128_zint": 4.75}
SEQUENCES = [EightWeights("sm90_mixed_gemm", *pair) for pair in BF16_SEQUENCES.items()]
SEQUENCES += [EightWeights("sm90_fp8_gemm", *pair) for pair in FP8_SEQUENCES.items()]
_DECODING = r"PRMT|IDP|LOP3|SHF|HFMA2|HMUL2|HADD2|IMAD R|IMAD\.(SHL|U32)"


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("sequence", SEQUENCES, ids=str)
def test_decoding_takes_the_instructions_of_its_sequence(sequence):
    """A group's scales and the loop itself take at most 1.5 more for eight weights. Nothing is spilled."""
    kernel, name, instructions = sequence
    fp8 = kernel in FP8_KERNELS
    p = problem(name, FP8 if fp8 else torch.bfloat16, 128)
    unit = kernel_named(kernel).unit(p, GemmConfig.parse("128x64x256_1x1x1_coop" if fp8 else "32x64x256_1x1x1_coop"))
    sass = disassemble(object_code(unit))
    check(sass, INSTRUCTION[kernel])
    (loop,) = main_loops(sass, INSTRUCTION[kernel])
    opcodes = _DECODING if fp8 else f"{_DECODING}|FFMA|FMUL|F2FP"
    count = sum(bool(re.match(opcodes, line)) for line in loop) / (16 if fp8 else 8)
    assert instructions <= count <= instructions + 1.5


def test_with_one_set_of_sums_a_chunk_is_decoded_before_the_wait_for_the_one_before():
    """Behind the wait the tensor cores would have nothing to do meanwhile: ptxas moves it there without a branch."""
    p = problem("int4_g128", FP8, 512, epilogue=Epilogue(token_scale=True))
    unit = kernel_named("sm90_fp8_gemm").unit(p, GemmConfig.parse("160x128x128_1x1x1_coop"))
    (loop,) = main_loops(disassemble(object_code(unit)), "QGMMA")
    waits = [i for i, line in enumerate(loop) if line.startswith("WARPGROUP.DEPBAR")]
    assert [loop[i] for i in waits] == ["WARPGROUP.DEPBAR.LE gsb0, 0x0"] * 2
    for first, last in zip((0, waits[0]), waits, strict=True):
        issued = max(i for i in range(first, last) if loop[i].startswith("QGMMA"))
        assert sum(line.startswith("LOP3") for line in loop[issued:last]) >= 4 * 8  # a thread's eight code words
    assert sum(line.startswith("FFMA") for line in loop) == 2 * 160 // 2


def test_scales_of_blocks_take_an_fma_for_each_sum():
    """A thread's rows share a scale, so that there is one product for each of its tokens."""
    p = problem("e4m3_g128_b128", FP8, 512, epilogue=Epilogue(block_scale=True))
    unit = kernel_named("sm90_fp8_gemm").unit(p, GemmConfig.parse("128x128x128_1x1x1_coop"))
    (loop,) = main_loops(disassemble(object_code(unit)), "QGMMA")
    assert [sum(line.startswith(name) for line in loop) for name in ("FFMA", "FMUL")] == [2 * 128 // 2, 2 * 128 // 4]


@pytest.mark.parametrize(
    "format, stages", [("int4_g128", 2), ("mxfp4", 2), ("nf4_g64", 2), ("int4_g64_zfloat_u8x128", 1)]
)
def test_weights_of_a_second_stage_are_not_requested_beside_a_table_of_float32(format, stages):
    kernel, p = kernel_named("sm90_mixed_gemm"), problem(format, torch.bfloat16, 32)
    config = GemmConfig.parse("32x256x128_1x1x1_coop")
    assert replace(kernel.any_variant(p), config=config).early_stages == stages


def test_loads_from_a_table_are_spread_over_the_main_loop():
    """A second early stage made ptxas gather them, and the product took 13 % longer. Since two blocks share factors, it
    gathers 12 among 16 instructions where it gathered 7, and the product takes 6 % longer."""
    kernel, p = kernel_named("sm90_mixed_gemm"), problem("int4_g64_zfloat_u8x128", torch.bfloat16, 32)
    unit = kernel.unit(p, GemmConfig.parse("32x256x128_1x1x1_coop"))
    (loop,) = main_loops(disassemble(object_code(unit)), "HGMMA")
    loads = [line.startswith("LDS.64") for line in loop]
    assert sum(loads) >= 4 * 8, "a thread's eight code words, four pairs each"
    assert max(sum(loads[i : i + 16]) for i in range(len(loads))) <= 12


@pytest.mark.parametrize(
    "format, config",
    [
        ("e4m3_g128_b128", "128x128x128_1x1x1_coop"),
        ("e4m3_g128_b128", "256x128x128_1x2x1_coop"),
        ("e4m3_col_fp32", "256x128x128_1x2x1_coop"),
    ],
)
def test_fp8_weights_are_multiplied_from_shared_memory(format, config):
    """So is x: no fragment of either is loaded into registers."""
    kernel, in_blocks = kernel_named("sm90_fp8_block_gemm"), "b128" in format
    p = problem(format, FP8, 512, epilogue=Epilogue(token_scale=not in_blocks, block_scale=in_blocks))
    code = object_code(kernel.unit(p, GemmConfig.parse(config)))
    check(facts_of(code), "QGMMA")
    assert disassemble(code).count("LDSM") == 0


def test_ctas_of_a_split_wait_once_for_each_other():
    """In front of the sums that they hand over: for the mbarrier alone, or until the memory of stages is free."""
    kernel, p = kernel_named("sm90_mixed_gemm"), problem("int4_g128", torch.bfloat16, 128)
    for name, apart in (("64x64x128_1x1x1_coop_k2", True), ("128x64x256_1x1x1_coop_k2", False)):
        unit = kernel.unit(p, config := GemmConfig.parse(name))
        assert (replace(kernel.any_variant(p), config=config).handover_bytes > 0) == apart
        text = disassemble(object_code(unit)).text
        arrives, waits, sums, products = (
            [m.start() for m in re.finditer(name, text)] for name in ("UCGABAR_ARV", "UCGABAR_WAIT", "STAS", "HGMMA")
        )
        assert len(arrives) == (1 if apart else 2) and len(waits) == 2, "of consumers and of the producer"
        assert max(waits) < min(sums)
        assert max(arrives) < min(products) if apart else max(products) < max(arrives)


@pytest.mark.parametrize("name, first", [("64x64x128_1x1x1_coop_k2", True), ("64x64x128_1x1x1_coop", False)])
def test_ctas_of_a_split_request_weights_before_their_warps_meet(name, first):
    """All warps meet in one place, for synccheck. Another CTA's producer requests weights behind it."""
    kernel, p = kernel_named("sm90_mixed_gemm"), problem("int4_g128", torch.bfloat16, 64)
    text = disassemble(object_code(kernel.unit(p, GemmConfig.parse(name)))).text
    start, producer = re.split("UCGABAR_WAIT|ACQBULK", text)[0], "UBLKCP.S.G"
    (barrier,) = re.finditer(r"BAR.SYNC\S* 0x0", start)
    assert (start.index(producer) < barrier.start()) == first


@pytest.mark.parametrize(
    "name, format, tile_k", [("sm90_mixed_gemm", "int4_g128", 128), ("sm90_fp8_gemm", "int4_g128_e4m3", 256)]
)
def test_in_streams_no_consumer_waits_for_memory_to_raise_or_see_a_flag(name, format, tile_k):
    """A fence waits until all partials are in L2, and a flag's way from there takes as long: about a microsecond each.
    Behind the consumers' allocation of registers there is neither, and the flag's fence is one."""
    kernel = kernel_named(name)
    p = problem(format, kernel.dtypes[-1], 512, epilogue=Epilogue(token_scale=name in FP8_KERNELS))
    text = disassemble(object_code(kernel.unit(p, GemmConfig(120, 128, tile_k, schedule="stream")))).text
    others, consumers = text.split("USETMAXREG.TRY_ALLOC")
    fence, flag = "MEMBAR.ALL.GPU", r"LDG\.E\.STRONG\.GPU|STG\.E\.STRONG\.GPU"
    assert (others.count(fence), consumers.count(fence)) == (1, 0)
    assert len(re.findall(flag, others)) >= 3 and not re.findall(flag, consumers)
    assert consumers.count("STG.E.128.STRONG.GPU") == consumers.count("LDG.E.128.STRONG.GPU") == 120 // 8


@pytest.mark.parametrize("kernel", ["sm90_mixed_gemm", "sm90_decode", "sm80_mixed_gemm", "sm90_fp8_gemm"])
def test_more_experts_than_the_smaller_map(kernel):
    dtype, epilogue = (FP8, Epilogue(token_scale=True)) if kernel in FP8_KERNELS else (torch.bfloat16, PLAIN)
    p = problem("int4_g128", dtype, 2000, epilogue=epilogue, experts=EXPERT_MAPS[0] + 1)
    actual = kernel_named(kernel)
    assert actual.unit(p, actual.configs(p)[0]).key != actual.unit(replace(p, experts=8), actual.configs(p)[0]).key
    check_variant(actual, p, ranked([actual], p)[0][2])
    assert not actual.supports(replace(p, experts=EXPERT_MAPS[1] + 1)).ok


OTHER_GPUS = {arch: device for arch, device in GPUS.items() if device != H200}


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("arch", OTHER_GPUS)
@pytest.mark.parametrize(
    "kernel, config, name, dtype",
    [
        ("sm80_mixed_gemm", "8x64x256_1x1x1_coop", "int4_g128", torch.bfloat16),
        ("sm80_mixed_gemm", "128x128x64_1x1x1_coop", "int4_g32_zfloat", torch.bfloat16),
        ("sm80_mixed_gemm", "64x128x128_1x1x1_stream", "int4_g64_zint_fp16", torch.float16),
        ("sm80_mixed_gemm", "64x128x128_1x1x1_stream", "iq4_g32_fp16", torch.bfloat16),
        ("sm80_mixed_gemm", "64x128x128_1x1x1_coop", "nvfp4", torch.bfloat16),
        ("dequantize_gemm", None, "int4_g32_zfloat_fp16", torch.bfloat16),
    ],
)
def test_other_gpus(arch, kernel, config, name, dtype):
    """Kernels that run on every GPU, for each target: the source is the same, the code generation is not."""
    actual, p = kernel_named(kernel), problem(name, dtype, device=OTHER_GPUS[arch])
    chosen = GemmConfig.parse(config) if config else actual.configs(p)[0]
    assert actual.unit(p, chosen).arch == arch
    check_variant(actual, p, chosen)


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize(
    "arch, instruction", [("sm_89", "QMMA.16832"), ("sm_100a", "HMMA.16816"), ("sm_120a", "QMMA.16832")]
)
@pytest.mark.parametrize("name", ["int4_g32_zint", "int4_g128", "int4_g128_e4m3", "mxfp4", "e4m3_g128_b128"])
def test_fp8_on_other_gpus(arch, instruction, name):
    """One config; on sm_89, which has the least shared memory, the largest of each schedule."""
    kernel, p = kernel_named("sm89_fp8_gemm"), problem(name, FP8, device=OTHER_GPUS[arch])
    by_size = sorted(kernel.configs(p), key=lambda c: c.tile_m * c.tile_n)
    largest = list({c.schedule: c for c in by_size}.values())
    for config in largest if arch == "sm_89" else largest[:1]:
        assert kernel.unit(p, config).arch == arch
        check_variant(kernel, p, config, instruction=instruction)


def test_the_checks_find_what_they_look_for():
    sass = disassemble(object_code(tiny()))
    assert local_memory(object_code(tiny())) == 0
    assert sass.count("EXIT") >= 1 and 0 < sass.registers < 32 and sass.stack == 0
    assert sass.count("FADD") + sass.count("FMUL") == 1 and sass.count("STG") == 1
    with pytest.raises(AssertionError, match="no HGMMA"):
        check(sass, "HGMMA")


def test_a_spill_of_what_is_on_its_way_is_seen():
    """The addition, the first to need what is loaded, made a store to local memory."""
    code = object_code(tiny())
    assert disassemble(code).count("FADD") == 1 and spilled_in_flight(code) == []
    assert len(spilled_in_flight(code.replace(b"\x21\x72", b"\x87\x73"))) == 1


@pytest.mark.parametrize(
    "kernel, arch, instruction",
    [
        *((kernel, "sm_90a", instruction) for kernel, instruction in INSTRUCTION.items()),
        *(("sm80_mixed_gemm", arch, "HMMA.16816") for arch in OTHER_GPUS),
        *(("sm89_fp8_gemm", arch, "QMMA.16832") for arch in ("sm_89", "sm_120a")),
    ],
)
def test_what_is_scanned_is_in_the_text(kernel, arch, instruction):
    p = problem("int4_g128", FP8 if kernel in FP8_KERNELS else torch.bfloat16, device=GPUS[arch])
    actual = kernel_named(kernel)
    code = object_code(actual.unit(p, actual.configs(p)[0]))
    scanned, sass = scan(code), disassemble(code)
    assert {opcode: sass.count(opcode) for opcode in scanned.counts} == scanned.counts
    assert scanned.count(instruction) == sass.count(instruction) > 0 and scanned.stack == sass.stack


def line(instruction: str) -> str:
    return f"        /*0a10*/                   {instruction} ;      /* 0x0000 */\n"


LOOP = {
    0x10: "STL [R1], R2",
    0x20: "@P0 HGMMA.64x16x16.F32 R24, R4, gdesc[UR8], R24",
    0x30: "LDL R2, [R1]",
    0x40: "@!P0 BRA 0x20",
    0x50: "@P1 STL.64 [R1], R4",
    0x60: "@P1 BRA 0x10",
}


def test_spills_are_told_by_the_loop_that_they_are_in():
    text = "".join(f"        /*{at:04x}*/   {instruction} ;   /* 0x0000 */\n" for at, instruction in LOOP.items())
    assert spills_in_main_loops(Sass(f"Function : f\n{text}", 32, 16), "HGMMA") == ["LDL R2, [R1]"]
    outside = text.replace("LDL R2, [R1]", "FADD R2, R3, R4")
    check(Sass(f"Function : f\n{outside}", 32, 16), "HGMMA")


@pytest.mark.parametrize(
    "lines, stack, message",
    [
        (["HGMMA.64x16x16.F32 R24, R4, gdesc[UR8], R24", "WARPGROUP.DEPBAR.LE gsb0, 0x0"], 0, "serialized, 1 waits"),
        (
            ["HGMMA.64x16x16.F32 R24, R4, gdesc[UR8], R24", "@!P0 LDL.64 R2, [R1+0x8]"],
            8,
            "8 bytes of local memory, used in the main loop",
        ),
        (["HGMMA.64x16x16.F32 R24, R4, gdesc[UR8], R24", "@UP1 STL [R1], R2"], 8, "8 bytes of .*main loop"),
        (["HGMMA.64x16x16.F32 R24, R4, gdesc[UR8], R24"], SPILLED_ONCE + 8, "40 bytes of local memory"),
        (["HGMMAX R1"], 0, "no HGMMA"),
    ],
)
def test_the_checks_refuse(lines, stack, message):
    with pytest.raises(AssertionError, match=message):
        check(Sass("".join(map(line, lines)), 96, stack), "HGMMA")


@pytest.mark.parametrize("name", ["sm90_mixed_gemm", "sm90_fp8_gemm", "sm90_decode", "sm80_mixed_gemm"])
def test_kernels_compile_with_a_scale_for_each_expert(name):
    kernel = kernel_named(name)
    epilogue = Epilogue("gelu", alpha="device", bias=True, expert_scale=True)
    format = WeightFormat.parse("int4_g128")
    problem = GemmProblem(16, 512, 512, kernel.dtypes[-1], format, kernel.layout, epilogue, H200, experts=4)
    config = kernel.configs(problem)[0]
    code = object_code(kernel.unit(problem, config))
    assert disassemble(code).stack == 0
