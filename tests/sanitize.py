"""Launches for compute-sanitizer: a few configs of every GPU kernel, without and with an epilogue, on small shapes that
walk over tiles, wrap their rings, and end raggedly.

    for tool in memcheck racecheck synccheck; do
        compute-sanitizer --tool $tool --kernel-name-exclude kernel_substring=at:: python tests/sanitize.py
    done
"""

from __future__ import annotations

import torch

import w4gemm
from w4gemm import WeightFormat
from w4gemm.reference import grouped_reference, linear_reference

CASES = {
    "sm80_mixed_gemm/8x64x256_1x1x1_coop": (5, 200, 4224),
    "sm80_mixed_gemm/16x128x128_1x1x1_pingpong": (13, 130, 2112),
    "sm80_mixed_gemm/16x64x256_1x1x1_stream": (13, 1000, 4096),
    "sm80_mixed_gemm/64x64x256_1x1x1_coop": (100, 300, 1100),
    "sm80_mixed_gemm/64x256x128_1x1x1_coop": (70, 700, 2048),
    "sm80_mixed_gemm/64x128x64_1x1x1_stream": (200, 9000, 576),
    "sm80_mixed_gemm/128x128x64_1x1x1_pingpong": (260, 1000, 1152),
    "sm90_decode/8x64x128_1x1x1_coop": (5, 200, 4096),
    "sm90_decode/8x64x128_1x1x1_pingpong": (8, 20000, 256),
    "sm90_decode/16x32x128_1x1x1_coop_k2": (13, 130, 2112),
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
COUNTS = (5, 0, 70, 300, 1, 0, 40)
"""Rows of the experts of GROUPED."""


def grouped(format: WeightFormat) -> None:
    ends = torch.tensor(COUNTS).cumsum(0)
    offsets = torch.cat((torch.zeros(1), ends)).to("cuda", torch.int32)
    for i, (config, (n, k)) in enumerate(GROUPED.items()):
        each = [w4gemm.quantize(torch.randn(n, k), format).to("cuda") for _ in COUNTS]
        w = w4gemm.QuantizedWeight.stack(each)
        x = torch.randn(sum(COUNTS), k, device="cuda", dtype=torch.bfloat16)
        for given in ({}, fused(i, len(x), n)):
            got = w4gemm.grouped_linear(x, w, offsets, config=config, **given).double()
            given.pop("out_dtype", None)
            wanted = grouped_reference(x, w, offsets, **given)
            error = ((got - wanted).norm() / wanted.norm()).item()
            assert error < 4e-3, f"{config} {format} {given}: {error}"


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
            for rows, given in ((x[:, :k], {}), (x[:, :k], {"norm_weight": weight}), (x, {"silu_mul": True})):
                x8, scale = w4gemm.quantize_activations(rows, **given)
                assert x8.shape == (5, k) and (x8.float().abs().amax(1) == 448).all() and scale.isfinite().all()


def main() -> None:
    torch.manual_seed(0)
    for format in (WeightFormat(128), WeightFormat(32, "float", "fp16")):
        for i, (config, (m, n, k)) in enumerate(CASES.items()):
            w = w4gemm.quantize(torch.randn(n, k), format).to("cuda").repack()
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            for given in ({}, fused(i, m, n)):
                got = w4gemm.linear(x, w, config=config, **given).double()
                given.pop("out_dtype", None)
                wanted = linear_reference(x, w, **given)
                error = ((got - wanted).norm() / wanted.norm()).item()
                assert error < 4e-3, f"{config} {format} {given}: {error}"
        grouped(format)
    activations()
    torch.cuda.synchronize()
    print(f"{4 * len(CASES) + 4 * len(GROUPED)} products and 18 quantizations, all right")


if __name__ == "__main__":
    main()
