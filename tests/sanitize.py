"""Launches for compute-sanitizer: a few configs of every GPU kernel, without and with an epilogue, on small shapes that
walk over tiles, wrap their rings, and end raggedly.

    for tool in memcheck racecheck synccheck; do
        compute-sanitizer --tool $tool --kernel-name kernel_substring=kernel_cutlass python tests/sanitize.py [PART]
    done

PART: fp8, gathered or dense, for these alone. Our kernels' names alone: what computes the references is not ours, and
takes minutes to instrument. Fill the cache of compiled kernels before: a run without the sanitizer does.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import torch

import w4gemm
from reference import grouped_reference, linear_reference
from w4gemm import WeightFormat
from w4gemm.core.epilogue import Epilogue, EpilogueOperands

CASES = {
    "sm80_mixed_gemm/8x64x256_1x1x1_coop": (5, 200, 4224),
    "sm80_mixed_gemm/16x128x128_1x1x1_pingpong": (13, 130, 2112),
    "sm80_mixed_gemm/16x64x256_1x1x1_stream": (13, 1000, 4096),
    "sm80_mixed_gemm/64x64x256_1x1x1_coop": (100, 300, 1100),
    "sm80_mixed_gemm/64x256x128_1x1x1_coop": (70, 700, 2048),
    "sm80_mixed_gemm/64x128x64_1x1x1_stream": (200, 9000, 576),
    "sm80_mixed_gemm/128x128x64_1x1x1_pingpong": (260, 1000, 1152),
    "sm90_decode/8x64x128_1x1x1_coop": (3, 200, 4096),
    "sm90_decode/8x64x128_1x1x1_pingpong": (8, 20000, 256),
    "sm90_decode/16x32x128_1x1x1_coop_k2": (13, 130, 2112),
    "sm90_decode/8x48x128_1x1x1_coop": (8, 1000, 1100),
    "sm90_decode/16x80x128_1x1x1_coop_k2": (13, 700, 2112),
    "sm90_decode/16x64x128_1x1x1_pingpong": (16, 300, 2048),
    "sm90_mixed_gemm/64x128x128_1x1x1_coop": (100, 20000, 384),
    "sm90_mixed_gemm/64x128x256_1x1x1_coop_k2": (64, 200, 4224),
    "sm90_mixed_gemm/32x64x512_1x1x1_coop": (20, 130, 4096),
    "sm90_mixed_gemm/128x128x128_1x2x1_coop": (260, 9000, 640),
    "sm90_mixed_gemm/64x64x128_1x1x1_pingpong_k2": (64, 200, 2048),
    "sm90_mixed_gemm/256x64x128_1x1x1_pingpong": (600, 6000, 512),
    "sm90_mixed_gemm/256x64x128_1x2x1_pingpong": (600, 9000, 512),
    "sm90_mixed_gemm/256x128x64_1x1x1_coop": (600, 9000, 576),
    "sm90_mixed_gemm/256x128x64_1x1x1_stream": (300, 1000, 1152),
    "sm90_mixed_gemm/128x128x128_1x1x1_stream": (300, 5000, 1024),
    "sm90_mixed_gemm/128x192x128_1x2x1_coop": (200, 7000, 640),
    "sm90_mixed_gemm/128x128x128_2x1x1_coop": (300, 9000, 640),
    "sm90_mixed_gemm/256x128x64_2x2x1_coop": (700, 6000, 576),
    "sm90_mixed_gemm/128x192x128_1x1x1_coop+64x64x256_1x1x1_coop": (200, 13000, 384),
}


GROUPED = {
    "sm80_mixed_gemm/16x64x256_1x1x1_coop": (130, 1100),
    "sm80_mixed_gemm/64x128x64_1x1x1_pingpong": (3000, 384),
    "sm80_mixed_gemm/128x128x128_1x1x1_coop": (700, 640),
    "sm90_decode/8x64x128_1x1x1_coop": (130, 640),
    "sm90_decode/16x32x128_1x1x1_pingpong_k2": (130, 2112),
    "sm90_mixed_gemm/64x128x128_1x1x1_coop": (3000, 384),
    "sm90_mixed_gemm/32x64x512_1x1x1_coop": (3000, 1100),
    "sm90_mixed_gemm/32x128x256_1x1x1_coop": (3000, 640),
    "sm90_mixed_gemm/128x128x128_1x2x1_coop": (3000, 640),
    "sm90_mixed_gemm/64x64x128_1x1x1_pingpong": (3000, 384),
    "sm90_mixed_gemm/256x64x128_1x1x1_pingpong": (3000, 384),
    "sm90_mixed_gemm/256x128x64_1x1x1_coop": (3000, 384),
}
FP8 = {
    "sm89_fp8_gemm/8x64x512_1x1x1_coop": (5, 200, 4096),
    "sm89_fp8_gemm/16x128x256_1x1x1_stream": (13, 1000, 4200),
    "sm89_fp8_gemm/64x64x256_1x1x1_coop": (100, 300, 1100),
    "sm89_fp8_gemm/64x128x128_1x1x1_pingpong": (260, 1000, 1152),
    "sm89_fp8_gemm/128x128x128_1x1x1_coop": (260, 1000, 640),
    "sm90_fp8_gemm/8x64x512_1x1x1_coop": (5, 200, 4096),
    "sm90_fp8_gemm/96x128x256_1x1x1_stream": (100, 5000, 2048),
    "sm90_fp8_gemm/16x64x512_1x1x1_pingpong_k2": (13, 130, 4200),
    "sm90_fp8_gemm/64x128x256_1x1x1_coop": (100, 20000, 384),
    "sm90_fp8_gemm/64x64x256_1x2x1_coop": (64, 9000, 640),
    "sm90_fp8_gemm/128x128x256_1x1x1_coop": (260, 9000, 640),
    "sm90_fp8_gemm/128x128x256_2x1x1_coop": (300, 9000, 640),
    "sm90_fp8_gemm/160x128x128_1x1x1_coop": (300, 9000, 640),
    "sm90_fp8_gemm/256x128x128_1x1x1_coop": (600, 9000, 640),
    "sm90_fp8_gemm/256x64x128_1x2x1_pingpong": (600, 9000, 512),
    "sm90_fp8_gemm/256x128x128_1x1x1_coop+128x64x256_1x1x1_coop": (300, 9000, 640),
}
"""(m, n, k) with fp8 activations; each also with experts, for as many formats as it is legal for."""
COUNTS = (5, 0, 70, 300, 1, 0, 40)
"""Rows of the experts of GROUPED."""


def grouped(format: WeightFormat) -> None:
    ends = torch.tensor(COUNTS).cumsum(0)
    offsets = torch.cat((torch.zeros(1), ends)).to("cuda", torch.int32)
    for i, (config, (n, k)) in enumerate(GROUPED.items()):
        each = [w4gemm.quantize(torch.randn(n, k), format).to("cuda") for _ in COUNTS]
        w = w4gemm.QuantizedWeight.stack(each)
        x = torch.randn(sum(COUNTS), k, device="cuda", dtype=torch.bfloat16)
        problem = w4gemm.GemmProblem(len(x), n, k, x.dtype, format, w.layout, experts=w.experts)
        for options in ({}, fused(i, len(x), n)):
            if not legal(config, problem, options):  # with many groups some have no room for several experts
                continue
            got = w4gemm.grouped_linear(x, w, offsets, config=config, **options).double()
            options.pop("out_dtype", None)
            expected = grouped_reference(x, w, offsets, **options)
            error = ((got - expected).norm() / expected.norm()).item()
            assert error < 4e-3, f"{config} {format} {options}: {error}"


def gathered(format: WeightFormat, fp8: bool) -> int:
    """The configs for experts with rows of x by their indices. How many products."""
    cases = {config: (n, k // 16 * 16) for config, (_, n, k) in FP8.items()} if fp8 else GROUPED
    count, m = 0, sum(COUNTS)
    offsets = torch.cat((torch.zeros(1), torch.tensor(COUNTS).cumsum(0))).to("cuda", torch.int32)
    for i, (config, (n, k)) in enumerate(cases.items()):
        layout = "mma8" if fp8 else "mma16"
        w = w4gemm.quantize(torch.randn(n, k), format).to("cuda").repack(layout)
        w = w4gemm.QuantizedWeight.stack([w] * len(COUNTS), layout=layout)
        x = torch.randn(100, k, device="cuda").to(torch.float8_e4m3fn if fp8 else torch.bfloat16)
        problem = w4gemm.GemmProblem(m, n, k, x.dtype, format, layout, experts=w.experts, gathered=True)
        indices, scale = torch.randint(100, (m,), device="cuda"), torch.rand(100, device="cuda") + 0.5
        options = fused(i, m, n) if i % 2 else {}  # in turn: most of the time goes into compiling
        if not legal(config, problem, options | ({"token_scale": scale} if fp8 else {})):
            continue
        scales = ({"token_scale": scale}, {"token_scale": scale[indices]}) if fp8 else ({}, {})
        got = w4gemm.grouped_linear(x, w, offsets, indices=indices, config=config, **options, **scales[0]).double()
        options.pop("out_dtype", None)
        expected = grouped_reference(x.float()[indices].to(x.dtype), w, offsets, **options, **scales[1])
        error = ((got - expected).norm() / expected.norm()).item()
        assert error < 4e-3, f"{config} {format} {options}: {error}"
        count += 1
    return count


def fp8(format: WeightFormat) -> int:
    """How many products."""
    count = 0
    for i, (config, (m, n, k)) in enumerate(FP8.items()):
        w = w4gemm.quantize(torch.randn(n, k), format).to("cuda").repack("mma8")
        x = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
        scale, several = torch.rand(m, device="cuda") + 0.5, w4gemm.QuantizedWeight.stack([w] * 3, layout="mma8")
        offsets = torch.tensor([0, m // 3, m // 3, m], dtype=torch.int32, device="cuda")
        problem = w4gemm.GemmProblem(m, n, k, x.dtype, format, w.layout)
        for options in ({}, fused(i, m, n)):
            options["token_scale"] = scale
            expected = linear_reference(x, w, **{name: t for name, t in options.items() if name != "out_dtype"})
            calls = {
                problem: partial(w4gemm.linear, x, w, config=config, **options),
                replace(problem, experts=3): partial(
                    w4gemm.grouped_linear, x, several, offsets, config=config, **options
                ),
            }
            for which, call in calls.items():
                if not legal(config, which, options):
                    continue
                error = ((call().double() - expected).norm() / expected.norm()).item()
                assert error < 4e-3, f"{config} {which} {options}: {error}"
                count += 1
    return count


def legal(config: str, problem: w4gemm.GemmProblem, arguments: dict) -> bool:
    """True if a config is legal for a problem with the epilogue of these operands: some have no registers for it."""
    operands = EpilogueOperands(**{name: arguments[name] for name in EpilogueOperands._fields if name in arguments})
    epilogue = Epilogue.of(operands, arguments.get("activation"), arguments.get("out_dtype"))
    return config in w4gemm.configs(replace(problem, epilogue=epilogue))


def fused(i: int, m: int, n: int) -> dict:
    """The i-th of the epilogues that are taken in turn."""

    def residual(columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(m, columns, device="cuda").to(dtype)

    return [
        {"alpha": torch.tensor(1.5, device="cuda"), "activation": "gelu", "residual": residual(n, torch.bfloat16)},
        {"activation": "silu_mul", "residual": residual(n // 2, torch.bfloat16)},
        {"alpha": 0.5, "residual": residual(n, torch.float32), "out_dtype": torch.float32},
    ][i % 3]


def activations() -> None:
    """The quantization of activations, in rows of one warp and of many, ragged and not aligned."""
    for dtype, k in ((torch.bfloat16, 136), (torch.float16, 577), (torch.bfloat16, 5120)):
        memory = torch.randn(5, 2 * k + 8, device="cuda").to(dtype)
        weight = torch.randn(k, device="cuda").to(dtype)
        for start in (0, 3):
            x = memory[:, start : start + 2 * k]
            for rows, options in ((x[:, :k], {}), (x[:, :k], {"norm_weight": weight}), (x, {"silu_mul": True})):
                x8, scale = w4gemm.quantize_activations(rows, **options)
                assert x8.shape == (5, k) and (x8.float().abs().amax(1) == 448).all() and scale.isfinite().all()


def main(only: str = "") -> None:
    torch.manual_seed(0)
    formats = [(WeightFormat(128), False), (WeightFormat.parse("int4_g128_e4m3"), True), (WeightFormat(64), True)]
    if only in ("", "gathered"):
        count = sum(gathered(format, of_fp8) for format, of_fp8 in formats)
        print(f"{count} products of gathered rows, all right", flush=True)
    if only in ("", "fp8"):
        count = sum(fp8(WeightFormat.parse(name)) for name in ("int4_g128", "int4_g32_zint", "int4_g128_e4m3"))
        print(f"{count} products of fp8 activations, all right", flush=True)
    if only in ("", "dense"):
        dense()


def dense() -> None:
    """16-bit activations, also of experts, and the quantization of activations."""
    formats = WeightFormat(128), WeightFormat(32, "float", "fp16"), WeightFormat.parse("nvfp4")
    for format in formats:
        for i, (config, (m, n, k)) in enumerate(CASES.items()):
            w = w4gemm.quantize(torch.randn(n, k), format).to("cuda").repack()
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            for options in ({}, fused(i, m, n)):
                got = w4gemm.linear(x, w, config=config, **options).double()
                options.pop("out_dtype", None)
                expected = linear_reference(x, w, **options)
                error = ((got - expected).norm() / expected.norm()).item()
                assert error < 4e-3, f"{config} {format} {options}: {error}"
        grouped(format)
    activations()
    torch.cuda.synchronize()
    print(f"{2 * len(formats) * len(CASES)} products, those of experts and 18 quantizations, all right")


if __name__ == "__main__":
    main(*sys.argv[1:])
