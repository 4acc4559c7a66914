"""New numbers in a weight that is in use."""

from __future__ import annotations

import pytest
import torch

import w4gemm
from w4gemm import QuantizedWeight, WeightFormat, quantize, update_
from w4gemm.kernels.helpers.weight_quantize import WeightQuantize
from w4gemm.weights.quantize import channel_scales_of_rows, group_ends

FORMATS = (
    *("int4_g128", "int4_g32_fp16", "int4_g64_zint", "int4_g16_zint_fp16", "mxfp4", "nvfp4", "int4_col"),
    *("int8_g96", "int8_col_zint", "int8_g512_fp32", "e4m3_col_fp32", "e4m3_g32_fp32", "e4m3_g128_b128", "mxfp8"),
    *("e5m2_col_fp32", "e5m2_g64_fp32", "e5m2_g128_b128", "e5m2_g32_e8m0", "mxfp6", "e3m2_g32_e8m0"),
)
E = 2


def numbers(n: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """(E, n, k) of several magnitudes, with rows of zeros, of one sign, and of numbers that a scale rounds to 0."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(E, n, k, generator=g) * torch.exp(2 * torch.randn(E, n, 1, generator=g))
    w[0, 0], w[1, 1], w[0, 1] = 0, w[1, 1].abs(), -w[0, 1].abs()
    w[1, 0] = (w[1, 0] > 0).float() * 6e-8
    return w.to(dtype)


def packed(w: torch.Tensor, format: str, layout: str | None = None) -> QuantizedWeight:
    return QuantizedWeight.stack([quantize(one, format) for one in w], layout=layout)


@pytest.mark.parametrize("format", [*FORMATS, "q4_k", "nf4_g64"])
@pytest.mark.parametrize("pairs", [False, True])
def test_the_bits_of_a_new_weight(format: str, pairs: bool, device: str) -> None:
    old, new = (numbers(70, 512, torch.bfloat16, seed) for seed in (1, 2))
    w = packed(old.to(device), format)
    addresses = [t.data_ptr() for t in w.tensors]
    new = new.to(device)
    update_(w, (new[:, 0::2].contiguous(), new[:, 1::2].contiguous()) if pairs else new)
    made = packed(new, format)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(w.tensors, made.tensors, strict=True)
    )
    assert addresses == [t.data_ptr() for t in w.tensors]
    one = quantize(old[1].to(device), format).repack()
    update_(one, new[0])
    assert torch.equal(one.dequantize(), made.expert(0).dequantize())


def test_act_order() -> None:
    g_idx = torch.tensor([0, 1] * 64)
    dense = torch.randn(8, 128)
    made = quantize(dense[:, torch.argsort(g_idx, stable=True)], "int4_g64")
    w = QuantizedWeight.from_codes("int4_g64", torch.zeros(8, 128, dtype=torch.uint8), made.parts().scales, g_idx=g_idx)
    update_(w, dense)
    assert w.perm is not None and torch.equal(w.dequantize()[:, w.perm], made.dequantize())


def test_what_is_refused() -> None:
    w = quantize(torch.ones(6, 64), "int4_g32")
    for weight, error, message in (
        (torch.ones(6, 32), ValueError, r"weight: wanted shape \(6, 64\), got \(6, 32\)"),
        (torch.ones(6, 64).int(), TypeError, "weight: wanted floating point, got torch.int32"),
        (
            (torch.ones(3, 64), torch.ones(3, 64).half()),
            ValueError,
            "weight: wanted both of torch.float32, got torch.float16",
        ),
        (torch.full((6, 64), torch.nan), ValueError, "weight: wanted finite values"),
        ((), ValueError, "weight: wanted a tensor, or a pair"),
        (None, TypeError, r"weight: wanted a tensor \(6, 64\) of floating point, got NoneType"),
    ):
        with pytest.raises(error, match=message):
            update_(w, weight)
    with pytest.raises(TypeError, match="w: wanted a QuantizedWeight, got"):
        update_(torch.ones(6, 64), torch.ones(6, 64))


def test_without_a_compiled_kernel_pytorch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def none_there(*parameters: object) -> None:
        asked.append(parameters)
        raise w4gemm.UnsupportedError("W4GEMM_COMPILE=off forbids compiling")

    monkeypatch.setattr("w4gemm.api.update.launcher", none_there)
    new = numbers(70, 512, torch.bfloat16)[0]
    w = quantize(torch.zeros(70, 512), "int4_g128").repack("mma16")
    update_(w, new)
    assert asked and torch.equal(w.dequantize(), quantize(new, "int4_g128").dequantize())


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize(
    "format, dtype, pairs, n, k, refused_number",
    [
        ("int4_g128", torch.bfloat16, False, 66, 150, torch.nan),
        ("int4_g16_fp16", torch.float16, True, 34, 130, -torch.inf),
        ("int4_g64_zint", torch.bfloat16, True, 2, 2, 1100.0),
        ("mxfp4", torch.float16, False, 20, 200, -1100.0),
        ("nvfp4", torch.bfloat16, True, 20, 150, torch.nan),
        ("int3_g96", torch.bfloat16, False, 18, 200, torch.nan),
        ("int8_g32_zint", torch.bfloat16, False, 20, 150, torch.inf),
        ("int8_col_zint_fp16", torch.float16, True, 20, 150, torch.nan),
        ("int8_g256_fp32", torch.bfloat16, False, 10, 260, 1100.0),
        ("e4m3_col_fp32", torch.bfloat16, True, 20, 150, torch.nan),
        ("e4m3_g64_fp32", torch.float16, False, 20, 150, -1100.0),
        ("e4m3_g128_b128", torch.bfloat16, True, 130, 130, torch.nan),
        ("mxfp8", torch.float16, False, 20, 150, torch.inf),
        ("e5m2_col_fp32", torch.float16, False, 20, 150, torch.nan),
        ("e5m2_g128_b128", torch.bfloat16, True, 130, 130, -1100.0),
        ("e5m2_g32_e8m0", torch.bfloat16, True, 20, 150, torch.nan),
        ("mxfp6", torch.bfloat16, True, 36, 330, torch.nan),
        ("e3m2_g32_e8m0", torch.float16, False, 36, 200, torch.inf),
    ],
)
def test_the_kernel_on_an_emulated_gpu(
    format: str, dtype: torch.dtype, pairs: bool, n: int, k: int, refused_number: float
) -> None:
    """The bits that PyTorch's operators make on the CPU."""
    pytest.importorskip("cutlass")
    from emulator.kernel import Emulator
    from emulator.ptx import parse, ptx_of

    w, limit = numbers(n, k, dtype).clamp(-900, 900), 1000.0
    made, parsed = packed(w, format, "mma16"), WeightFormat.of(format)
    program = parse(ptx_of(WeightQuantize(dtype, str(parsed), pairs, limit).unit()))

    def run(w: torch.Tensor) -> tuple[list[torch.Tensor], int]:
        dense = [w[:, 0::2].contiguous(), w[:, 1::2].contiguous()] if pairs else [w]
        blocks, refused = torch.full_like(made.tensors[0][: len(w)], 0x55555555), torch.zeros(1, dtype=torch.int32)
        scales = [
            torch.stack([channel_scales_of_rows(rows, parsed) for rows in dense], -1).flatten(1)
            for _ in made.tensors[1:]
        ]
        ends = [group_ends(dense, parsed)] if WeightQuantize.needs_ends(parsed) else []
        count = len(w) * blocks.shape[1] * blocks.shape[2]
        Emulator(program, count).run(*dense, *scales, *ends, blocks, refused, n)
        return [blocks, *scales], int(refused)

    tensors, refused = run(w)
    assert all(torch.equal(a, b) for a, b in zip(tensors, made.tensors, strict=True)) and not refused
    w[1, n - 1, k - 1] = refused_number
    assert run(w[1:])[1] == 1


@pytest.mark.gpu
def test_a_graph_multiplies_by_the_new_numbers() -> None:
    x = torch.randn(5, 256, dtype=torch.bfloat16, device="cuda")
    old, new = (torch.randn(192, 256, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    w = quantize(old, "int4_g32").repack()
    expected = w4gemm.linear(x, quantize(new, "int4_g32").repack())
    w4gemm.linear(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        d = w4gemm.linear(x, w)
    update_(w, new)
    graph.replay()
    assert torch.equal(d, expected)
    with pytest.raises(ValueError, match="weight: wanted finite values of at most"):
        update_(w, torch.full_like(new, torch.inf))
