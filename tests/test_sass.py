"""Every GPU kernel compiles for its target without a GPU, and its machine code is what it was written to be."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from sass import Sass, check, disassemble, local_memory
from tiny_kernel import tiny
from w4gemm import GemmConfig, WeightFormat
from w4gemm.epilogue import Epilogue
from w4gemm.jit import object_code
from w4gemm.kernels import KERNELS, Kernel, kernel_named, ranked
from w4gemm.problem import GPUS, H200, GemmProblem

pytest.importorskip("cutlass")

INSTRUCTION = {
    "sm80_mixed_gemm": "HMMA.16816",
    "sm89_fp8_gemm": "HMMA.16816",
    "sm90_decode": "HMMA",
    "sm90_mixed_gemm": "HGMMA",
    "sm90_fp8_gemm": "QGMMA",
    "dequantize_gemm": "STG.E.128",
}
"""The matrix instruction that each compiled kernel was written for, on an H200, or of one that leaves the product to
cuBLAS what it stores with; a new kernel adds its line."""
FP8_KERNELS = ("sm89_fp8_gemm", "sm90_fp8_gemm")

# a scale group of 32, 64 and 128 inside a block, larger ones and per column
FORMATS = [f"int4_{group}{zero}" for group in ("g32", "g64", "g128", "col") for zero in ("", "_zint", "_zfloat")]
OTHER_DTYPES = [("int4_g128_fp16", torch.float16), ("int4_g32_zfloat_fp16", torch.bfloat16)]
FP8 = torch.float8_e4m3fn
FP8_FORMATS = [name for name in FORMATS if "zfloat" not in name] + ["int4_g128_e4m3", "int4_g32_e4m3", "int4_g32_fp16"]
CASES = [
    pytest.param(kernel_named(kernel), name, dtype, id=f"{kernel}-{name}-{str(dtype).removeprefix('torch.')}")
    for kernel in INSTRUCTION
    for name, dtype in (
        [(name, FP8) for name in FP8_FORMATS]
        if kernel in FP8_KERNELS
        else [(name, torch.bfloat16) for name in FORMATS] + OTHER_DTYPES
    )
]
CASES.append(pytest.param(kernel_named("dequantize_gemm"), "int4_g128_e4m3", FP8, id="dequantize_gemm-e4m3"))
NEEDY = {
    "sm90_fp8_gemm": ("int4_g32_zint", "int4_g128", "int4_g128_e4m3"),
    "sm89_fp8_gemm": ("int4_g32_zint", "int4_g128_e4m3"),
}
"""By kernel, the formats that need the most registers, or that alone have some configs; else those of _NEEDY."""
_NEEDY = ("int4_g32_zfloat", "int4_g128")


def gpu_kernels() -> list[Kernel]:
    return [k for k in KERNELS if k.name in INSTRUCTION]


def problem(name: str, dtype: torch.dtype = torch.bfloat16, m: int = 16, **kwargs) -> GemmProblem:
    layout = "mma8" if dtype == FP8 else "mma16"
    return GemmProblem(m, 8192, 8192, dtype, WeightFormat.parse(name), layout, device=H200, **kwargs)


def problem_of(kernel: Kernel, name: str, m: int = 16, **kwargs) -> GemmProblem:
    return problem(name, FP8 if kernel.name in FP8_KERNELS else torch.bfloat16, m, **kwargs)


def check_kernel(kernel: Kernel, p: GemmProblem, config: GemmConfig, *, whole: bool = True) -> None:
    """whole: read the machine code; else only what it takes of local memory, which is known much sooner."""
    if not whole:
        assert local_memory(object_code(kernel.unit(p, config))) == 0
        return
    sass = disassemble(object_code(kernel.unit(p, config)))
    # a WGMMA along k is as long as a group of 32, whose sums are waited for
    check(sass, INSTRUCTION[kernel.name], asynchronous=not (p.dtype == FP8 and p.format.group_size == 32))


def test_every_kernel_that_compiles_is_checked():
    compiling = set()
    for k in KERNELS:
        p = problem_of(k, "int4_g128")
        if (c := k.configs(p)) and k.unit(p, c[0]) is not None:
            compiling.add(k.name)
    assert compiling == set(INSTRUCTION)


@pytest.mark.parametrize("m", [1, 4096])
@pytest.mark.parametrize("kernel, name, dtype", CASES)
def test_best_config(kernel, name, dtype, m):
    p = problem(name, dtype, m, epilogue=Epilogue(bias=m > 1))
    _, _, config = ranked([kernel], p)[0]
    check_kernel(kernel, p, config)


def all_configs() -> list:
    """Every config, each for the format that it is legal for and that needs the most registers; and whether it has the
    most tokens of those that differ in nothing else."""
    found: dict[tuple[str, GemmConfig], str] = {}
    for kernel in gpu_kernels():
        for name in NEEDY.get(kernel.name, _NEEDY):
            for config in kernel.configs(problem_of(kernel, name)):
                if config.tail is None:  # else two kernels, see test_parts.py
                    found.setdefault((kernel.name, config), name)
    most = {}
    for kernel, c in sorted(found, key=lambda key: key[1].tile_m):
        most[kernel, replace(c, tile_m=1)] = c
    return [
        pytest.param(kernel, str(c), name, most[kernel, replace(c, tile_m=1)] == c, id=f"{kernel}-{c}-{name}")
        for (kernel, c), name in found.items()
    ]


@pytest.mark.parametrize("kernel, config, name, whole", all_configs())
def test_every_config(kernel, config, name, whole):
    found = kernel_named(kernel)
    check_kernel(found, problem_of(found, name), GemmConfig.parse(config), whole=whole)


@pytest.mark.parametrize(
    "kernel, config, name, dtype, words, counts",
    [
        ("sm90_mixed_gemm", "32x64x512_1x1x1_coop", "int4_g128", torch.bfloat16, 8, {"HFMA2": 4, "HADD2": 0}),
        ("sm90_mixed_gemm", "32x64x512_1x1x1_coop", "int4_g128_fp16", torch.float16, 8, {"HFMA2": 2, "HADD2": 2}),
        ("sm90_fp8_gemm", "128x64x256_1x1x1_coop", "int4_g128_e4m3", torch.float8_e4m3fn, 16, {"PRMT": 4, "IDP": 2}),
    ],
)
def test_instructions_that_decode(kernel, config, name, dtype, words, counts):
    """Of eight weights, a code word, ``words`` of which the main loop decodes in a round."""
    sass = disassemble(object_code(kernel_named(kernel).unit(problem(name, dtype, 128), GemmConfig.parse(config))))
    assert {opcode: sass.count(opcode) / words for opcode in counts} == counts


OTHER_GPUS = {arch: device for arch, device in GPUS.items() if device != H200}


@pytest.mark.parametrize(
    "config, name, dtype",
    [
        ("8x64x256_1x1x1_coop", "int4_g128", torch.bfloat16),
        ("128x128x64_1x1x1_coop", "int4_g32_zfloat", torch.bfloat16),
        ("64x128x128_1x1x1_stream", "int4_g64_zint_fp16", torch.float16),
    ],
)
@pytest.mark.parametrize("arch", OTHER_GPUS)
def test_other_gpus(arch, config, name, dtype):
    """Of what all GPUs share, a few configs for each target: the compiler differs, the source does not."""
    kernel = kernel_named("sm80_mixed_gemm")
    p = replace(problem(name, dtype), device=OTHER_GPUS[arch])
    assert kernel.unit(p, GemmConfig.parse(config)).arch == arch
    check(disassemble(object_code(kernel.unit(p, GemmConfig.parse(config)))), INSTRUCTION[kernel.name])


@pytest.mark.parametrize("arch", OTHER_GPUS)
def test_dequantize_on_other_gpus(arch):
    kernel, p = kernel_named("dequantize_gemm"), replace(problem("int4_g32_zfloat_fp16"), device=OTHER_GPUS[arch])
    assert kernel.unit(p, kernel.configs(p)[0]).arch == arch
    check_kernel(kernel, p, kernel.configs(p)[0])


@pytest.mark.parametrize(
    "arch, instruction",
    [("sm_89", "QMMA.16832"), ("sm_100a", "HMMA.16816"), ("sm_120a", "QMMA.16832")],
)
@pytest.mark.parametrize("name", ["int4_g32_zint", "int4_g128", "int4_g128_e4m3"])
def test_fp8_on_other_gpus(arch, instruction, name):
    """The machine code of a config; on sm_89, which has the least shared memory, that all others compile too."""
    kernel, p = kernel_named("sm89_fp8_gemm"), replace(problem(name, FP8), device=OTHER_GPUS[arch])
    configs = kernel.configs(p)[: None if arch == "sm_89" else 1]
    for config in configs:
        assert kernel.unit(p, config).arch == arch
        assert local_memory(object_code(kernel.unit(p, config))) == 0, config
    check(disassemble(object_code(kernel.unit(p, configs[0]))), instruction)


def configs_with_epilogues() -> list:
    """Of the configs with as many threads, that with the most tokens, each for the neediest format that has it, in turn
    with one of the epilogues that need the most registers."""
    epilogues = [
        (Epilogue("gelu", "device", True, True), 8190),
        (Epilogue("silu_mul", "host", True, True, torch.float32), 8192),
        (Epilogue("gelu", "device", True), 8192),
    ]
    found = {}
    for kernel in gpu_kernels():
        for name in reversed(NEEDY.get(kernel.name, _NEEDY)):
            alone = [c for c in kernel.configs(problem_of(kernel, name)) if c.tail is None]
            for c in sorted(alone, key=lambda c: c.tile_m):
                large = c.tile_m * c.tile_n >= 2**15
                found[kernel.name, c.schedule, c.tile_n, c.tile_k, c.split_k, large] = str(c), name
    cases = zip(found.items(), itertools.cycle(epilogues), strict=False)
    return [pytest.param(key[0], *c, *e, id=f"{key[0]}-{'-'.join(c)}-{e[0]}") for (key, c), e in cases]


@pytest.mark.parametrize("kernel, config, name, epilogue, n", configs_with_epilogues())
def test_epilogues(kernel, config, name, epilogue, n):
    found = kernel_named(kernel)
    scaled = epilogue._replace(token_scale=kernel in FP8_KERNELS)
    p = replace(problem_of(found, name, epilogue=scaled), n=n)
    check_kernel(found, p, GemmConfig.parse(config))


def grouped_configs(gathered: bool = False) -> list:
    """Of the configs for experts with as many threads, that with the most tokens."""
    found = {}
    for kernel in gpu_kernels():
        for name in NEEDY.get(kernel.name, _NEEDY):
            problem = problem_of(kernel, name, experts=8, gathered=gathered)
            for c in sorted(kernel.configs(problem), key=lambda c: c.tile_m):
                found[kernel.name, c.schedule, c.tile_n, c.tile_k, c.cluster_n, c.split_k, name] = str(c)
    return [pytest.param(key[0], config, key[-1], id=f"{key[0]}-{config}-{key[-1]}") for key, config in found.items()]


@pytest.mark.parametrize("kernel, config, name", grouped_configs())
def test_grouped(kernel, config, name):
    found = kernel_named(kernel)
    whole = name == NEEDY.get(kernel, _NEEDY)[0]
    check_kernel(found, problem_of(found, name, m=512, experts=8), GemmConfig.parse(config), whole=whole)


@pytest.mark.parametrize("kernel, config, name", grouped_configs(gathered=True))
def test_gathered(kernel, config, name):
    """cp.async brings x, and where WGMMA reads it a fence of the proxies follows each wait for a slot; nothing spills,
    beside what W4Experts stores either."""
    found = kernel_named(kernel)
    many_groups = name == NEEDY.get(kernel, _NEEDY)[0]
    epilogue = Epilogue(None if many_groups else "silu_mul", token_scale=kernel in FP8_KERNELS)
    p = problem_of(found, name, m=512, experts=8, gathered=True, epilogue=epilogue)
    if not many_groups:
        check_kernel(found, p, GemmConfig.parse(config), whole=False)
        return
    sass = disassemble(object_code(found.unit(p, GemmConfig.parse(config))))
    check(sass, INSTRUCTION[kernel], asynchronous=not (p.dtype == FP8 and p.format.group_size == 32))
    assert sass.count("LDGSTS") > 0 and sass.count("UTMALDG") == 0
    if INSTRUCTION[kernel].endswith("GMMA"):
        assert sass.count("ARRIVES") == 1 and sass.count("USETMAXREG") in (0, 2)
        # one behind the barriers' start, and one for each wait but the producer's; and before each store by TMA
        waits = sass.text.count("PHASECHK.TRANS64.TRYWAIT")
        assert waits >= 3 and sass.count("FENCE.VIEW") == waits + sass.count("UTMASTG")


def test_the_checks_find_what_they_look_for():
    sass = disassemble(object_code(tiny()))
    assert local_memory(object_code(tiny())) == 0
    assert sass.count("EXIT") >= 1 and 0 < sass.registers < 32 and sass.stack == 0
    assert sass.count("FADD") + sass.count("FMUL") == 1 and sass.count("STG") == 1
    with pytest.raises(AssertionError, match="no HGMMA"):
        check(sass, "HGMMA")


def line(instruction: str) -> str:
    return f"        /*0a10*/                   {instruction} ;      /* 0x0000 */\n"


@pytest.mark.parametrize(
    "lines, stack, message",
    [
        (["HGMMA.64x16x16.F32 R24, R4, gdesc[UR8], R24", "WARPGROUP.DEPBAR.LE gsb0, 0x0"], 0, "serialized: 1 waits"),
        (["HGMMA.64x16x16.F32 R24, R4, gdesc[UR8], R24", "@!P0 LDL.64 R2, [R1+0x8]"], 0, "1 LDL, 0 STL"),
        (["HGMMA.64x16x16.F32 R24, R4, gdesc[UR8], R24", "@UP1 STL [R1], R2"], 0, "0 LDL, 1 STL"),
        (["HGMMA.64x16x16.F32 R24, R4, gdesc[UR8], R24"], 16, "16 bytes of local memory"),
        (["HGMMAX R1"], 0, "no HGMMA"),
    ],
)
def test_the_checks_refuse(lines, stack, message):
    with pytest.raises(AssertionError, match=message):
        check(Sass("".join(map(line, lines)), 96, stack), "HGMMA")
