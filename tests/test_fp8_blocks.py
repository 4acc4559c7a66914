"""fp8 activations with a scale for each 128 columns of a row: on the CPU, what is compiled, and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from reference import grouped_reference, linear_reference
from w4gemm import GemmConfig, QuantizedWeight, WeightFormat, grouped_linear, linear, masked_linear
from w4gemm.choice import choose
from w4gemm.choice.model import ranked
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.problem import GPUS, H200, GemmProblem
from w4gemm.jit import object_code
from w4gemm.kernels import kernel_named
from w4gemm.kernels.gpu import _by_columns
from w4gemm.tuning.random_weight import random_weight

FP8 = torch.float8_e4m3fn
FORMATS = ("int4_g128", "int4_g32_zint", "int4_col", "int4_g128_e4m3", "mxfp4", "e4m3_g128_b128")
TOLERANCE = {"cpu": 4e-3, "cuda": 5e-3}
"""Relative errors: roundings to bf16, on a GPU also of sums of fp8 products."""


def made(format: str, n: int, k: int, device: str, experts: int = 0) -> QuantizedWeight:
    """A random weight in the layout for fp8 activations."""
    each = [random_weight(WeightFormat.parse(format), n, k, seed) for seed in range(experts or 1)]
    w = QuantizedWeight.stack(each, layout="canonical") if experts else each[0]
    return w.to(device).repack("mma8" if device == "cuda" else None)


def activations(*shape: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x in fp8, and scales of its blocks over three binades, some 0, by columns as DeepEP gives them."""
    g = torch.Generator().manual_seed(sum(shape))
    *rows, k = shape
    scales = torch.exp2(4 * torch.rand(*rows[:-1], -(-k // 128), rows[-1], generator=g) - 2)
    scales[torch.rand(scales.shape, generator=g) < 0.05] = 0
    return torch.randn(shape, generator=g).to(device, FP8), scales.to(device).transpose(-1, -2)


def close(d: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.isfinite(d).all()
    assert (d.double() - expected).norm() <= TOLERANCE[d.device.type] * expected.norm()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("m, n, k", [(1, 200, 512), (7, 130, 333), (40, 192, 2752), (300, 200, 1100)])
def test_products_with_block_scales(device, format, m, n, k):
    w, (x, scales) = made(format, n, k, device), activations(m, k, device=device)
    bias = torch.randn(n, device=device).bfloat16()
    d = linear(x, w, bias, token_scale=scales, activation="silu")
    close(d, linear_reference(x, w, bias, token_scale=scales, activation="silu"))
    for same in (scales.contiguous(), scales.repeat(1, 2)[:, : scales.shape[1]]):
        assert torch.equal(linear(x, w, bias, token_scale=same, activation="silu"), d)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["int4_g128", "mxfp4", "e4m3_g128_b128"])
def test_configs_of_experts_on_a_gpu(format):
    """One-hot x: the weights of an expert's rows, which begin anywhere, times the scale of each block."""
    experts, n, k = 4, 328, 1024
    w, ends = made(format, n, k, "cuda", experts), [0, 37, 38, 103, 210]
    m, g = ends[-1], torch.Generator().manual_seed(0)
    columns = torch.randint(0, k, (m,), generator=g).cuda()
    x = torch.zeros(m, k, device="cuda").scatter_(1, columns[:, None], 2)
    scales = torch.exp2(torch.randint(-8, 8, (m, k // 128), generator=g).float()).cuda()
    owner = torch.repeat_interleave(torch.arange(experts), torch.tensor(ends).diff()).cuda()
    exact = w.dequantize()[owner, :, columns] * 2 * scales.gather(1, columns[:, None] // 128)
    epilogue = Epilogue(out_dtype=torch.float32, block_scale=True)
    problem = GemmProblem(m, n, k, FP8, w.format, "mma8", epilogue, experts=experts)
    configs, offsets = kernel_named("sm90_fp8_gemm").configs(problem), torch.tensor(ends).int().cuda()
    for config in configs[:: max(1, len(configs) // 12)]:
        options = {"token_scale": scales, "out_dtype": torch.float32, "config": f"sm90_fp8_gemm/{config}"}
        assert torch.equal(grouped_linear(x.to(FP8), w, offsets, **options), exact), str(config)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["int4_g128", "mxfp4", "e4m3_g128_b128"])
def test_every_config_on_a_gpu(format):
    """One-hot x times a power of two: the weights, bit for bit, and another scale for each block."""
    m, n, k = 140, 328, 2048
    w = made(format, n, k, "cuda")
    x, columns = torch.zeros(m, k, device="cuda"), torch.randperm(k, generator=torch.Generator().manual_seed(0))[:m]
    x[torch.arange(m), columns.cuda()] = 2
    scales = torch.exp2(torch.randint(-8, 8, (m, k // 128), device="cuda").float())
    exact = (w.dequantize()[:, columns.cuda()] * 2 * scales[torch.arange(m), columns.cuda() // 128]).T
    epilogue = Epilogue(out_dtype=torch.float32, block_scale=True)
    problem = GemmProblem(m, n, k, FP8, w.format, "mma8", epilogue)
    configs = kernel_named("sm90_fp8_gemm").configs(problem)
    for config in configs[:: max(1, len(configs) // 24)]:
        d = linear(x.to(FP8), w, token_scale=scales, out_dtype=torch.float32, config=f"sm90_fp8_gemm/{config}")
        assert torch.equal(d, exact), str(config)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [328, 708])
def test_both_operands_in_shared_memory_on_a_gpu(n):
    """One-hot x times a power of two: the weights, rounded once, dense and of experts, by every config for many
    tokens. Rows of d are a multiple of 16 bytes, stored by TMA, or none."""
    kernel, k, ends = kernel_named("sm90_fp8_block_gemm"), 640, [0, 37, 38, 400]
    w, m = made("e4m3_g128_b128", n, k, "cuda", experts=3), ends[-1]
    columns = torch.randint(0, k, (m,), generator=torch.Generator().manual_seed(0)).cuda()
    x = torch.zeros(m, k, device="cuda").scatter_(1, columns[:, None], 2).to(FP8)
    scales = torch.exp2(torch.randint(-8, 8, (m, k // 128), device="cuda").float())
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(ends).diff()).cuda()
    exact = w.dequantize()[owner, :, columns] * 2 * scales.gather(1, columns[:, None] // 128)
    problem = GemmProblem(m, n, k, FP8, w.format, "mma8", Epilogue(block_scale=True), experts=3)
    for config in kernel.configs(problem):
        options = {"token_scale": scales, "config": f"{kernel.name}/{config}"}
        assert torch.equal(grouped_linear(x, w, torch.tensor(ends).int().cuda(), **options), exact.bfloat16()), config
    for config in kernel.configs(replace(problem, experts=0)):
        options = {"token_scale": scales[38:], "config": f"{kernel.name}/{config}"}
        d = linear(x[38:], w.expert(2), **options)
        assert torch.equal(d, exact[38:].bfloat16()), config
        assert torch.equal(linear(x[38:], w.expert(2), out_dtype=torch.float32, **options), exact[38:]), config


@pytest.mark.gpu
@pytest.mark.parametrize("n", [328, 708])
@pytest.mark.parametrize("format", ["e4m3_col_fp32", "e5m2_col_fp32"])
def test_rows_with_one_scale_in_shared_memory_on_a_gpu(format, n):
    """One-hot x: the weights times the scales of rows, by every config; x without scales, too."""
    kernel, w, m, k = kernel_named("sm90_fp8_block_gemm"), made(format, n, 640, "cuda"), 400, 640
    columns = torch.randint(0, k, (m,), generator=torch.Generator().manual_seed(0)).cuda()
    x = torch.zeros(m, k, device="cuda").scatter_(1, columns[:, None], 2).to(FP8)
    scales = torch.exp2(torch.randint(-8, 8, (m,), device="cuda").float())
    exact = w.dequantize()[:, columns].T * 2
    problem = GemmProblem(m, n, k, FP8, w.format, "mma8", Epilogue(token_scale=True))
    for config in kernel.configs(problem):
        options = {"config": f"{kernel.name}/{config}"}
        scaled = linear(x, w, token_scale=scales, **options)
        assert torch.equal(scaled, (exact * scales[:, None]).bfloat16()), config
        assert torch.equal(linear(x, w, out_dtype=torch.float32, **options), exact), config


@pytest.mark.parametrize("format", ["int4_g128", "mxfp4", "e4m3_g128_b128"])
def test_products_of_experts_with_block_scales(device, format):
    """Contiguous, gathered and padded rows."""
    w = made(format, 136, 512, device, experts=3)
    x, scales = activations(41, 512, device=device)
    for rows in ([0, 5, 5, 41], [0, 3, 10, 41]):  # at all places among four scales
        offsets = torch.tensor(rows, dtype=torch.int32, device=device)
        expected = grouped_reference(x, w, offsets, token_scale=scales)
        close(grouped_linear(x, w, offsets, token_scale=scales), expected)
    order = torch.randperm(41, generator=torch.Generator().manual_seed(0)).to(device)
    mixed = x.view(torch.uint8)[order].view(FP8)
    gathered = grouped_linear(mixed, w, offsets, indices=torch.argsort(order), token_scale=scales[order])
    close(gathered, expected)
    x, scales = activations(3, 20, 512, device=device)
    counts = torch.tensor([20, 0, 7], dtype=torch.int32, device=device)
    d = masked_linear(x, w, counts, token_scale=scales)
    for e, count in enumerate(counts.tolist()):
        close(d[e, :count], linear_reference(x[e, :count], w.expert(e), token_scale=scales[e, :count]))


def test_through_the_operator():
    w, (x, scales) = made("mxfp4", 72, 300, "cpu"), activations(2, 3, 300, device="cpu")
    torch.compiler.reset()
    compiled = torch.compile(lambda x, s: linear(x, w, token_scale=s), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, scales), linear(x, w, token_scale=scales))


def test_one_block_is_a_row():
    w, (x, scales) = made("int4_g32", 8, 100, "cpu"), activations(5, 100, device="cpu")
    assert torch.equal(linear(x, w, token_scale=scales), linear(x, w, token_scale=scales[:, 0]))


def test_scales_by_columns_stay_where_they_are():
    """By columns, as TMA reads them, they stay where they are."""
    aligned = torch.rand(4, 12).T
    assert _by_columns(aligned) is aligned
    for other in (aligned.contiguous(), torch.rand(4, 13).T, aligned[1:], torch.rand(4, 1).T.expand(12, 4)):
        copy = _by_columns(other)
        assert torch.equal(copy, other) and copy.stride(0) == 1 and copy.stride(1) % 4 == 0


def test_block_scales_of_other_shapes_are_refused():
    w, (x, scales) = made("int4_g128", 8, 512, "cpu"), activations(5, 512, device="cpu")
    with pytest.raises(ValueError, match=r"each row of x, or \(5, 4\), one for each 128 columns of it.*got \(5, 3\)"):
        linear(x, w, token_scale=scales[:, :3])
    perm = torch.randperm(512).int()
    with pytest.raises(ValueError, match="token_scale: wanted one number for each row of x with a weight in act-order"):
        linear(x, replace(w.repack("canonical"), perm=perm), token_scale=scales)
    problem = GemmProblem(5, 64, 512, FP8, w.format, "mma8", Epilogue(block_scale=True), GPUS["sm_89"])
    reason = kernel_named("sm89_fp8_gemm").supports(problem).reason
    assert reason == "takes one scale for each row of x, not one for each 128 columns"
    gathered = replace(problem, device=H200, experts=2, gathered=True)
    reason = kernel_named("sm90_fp8_gemm").supports(gathered).reason
    assert reason == "takes one scale for each row of x that is gathered, not one for each 128 columns"


def test_many_tokens_take_both_operands_from_shared_memory():
    """Few do not; both kernels read one layout."""
    kernel, format = kernel_named("sm90_fp8_block_gemm"), WeightFormat.parse("e4m3_g128_b128")
    many = GemmProblem(1024, 8192, 8192, FP8, format, "mma8", Epilogue(block_scale=True), H200)
    few, gated = replace(many, m=16), replace(many, epilogue=Epilogue("silu_mul", block_scale=True))
    rows = replace(many, format=WeightFormat.parse("e4m3_col_fp32"), epilogue=Epilogue(token_scale=True))
    names = [choose(p).kernel.name for p in (many, few, gated, rows, replace(rows, m=16))]
    assert names == [kernel.name, "sm90_fp8_gemm", kernel.name, kernel.name, "sm90_fp8_gemm"]
    for other in (replace(many, format=rows.format), replace(rows, format=format), replace(rows, experts=8)):
        assert not kernel.supports(other)
    sass = pytest.importorskip("sass")
    pytest.importorskip("cutlass")
    code = object_code(kernel.unit(many, choose(many).config))
    sass.check(sass.facts_of(code), "QGMMA", asynchronous=True)


def test_what_can_be_chosen_depends_on_it():
    """Sums are promoted, for which fewer tokens have room; other measurements hold."""
    kernel = kernel_named("sm90_fp8_gemm")
    plain = GemmProblem(512, 8192, 8192, FP8, WeightFormat.parse("mxfp4"), "mma8")
    blocks = replace(plain, epilogue=Epilogue(block_scale=True))
    assert max(c.tile_m for c in kernel.configs(plain)) == 256
    assert max(c.tile_m * c.tile_n for c in kernel.configs(blocks)) < 256 * 128
    experts = replace(blocks, experts=8, epilogue=Epilogue("swiglu_oai", bias=True, block_scale=True))
    stored = replace(experts, format=WeightFormat.parse("e4m3_col_fp32"))  # spills 40 bytes
    legal = [GemmConfig(64, 192, 256) in kernel.configs(p) for p in (experts, stored)]
    assert legal == [True, False]


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("experts", [0, 8])
@pytest.mark.parametrize("format, m", [("int4_g128", 16), ("e4m3_g128_b128", 512), ("int4_g32_zint", 64)])
def test_machine_code(format, m, experts):
    """The config that is ranked first: nothing spills, WGMMAs are in flight, and TMA brings the scales besides x."""
    sass, kernel = pytest.importorskip("sass"), kernel_named("sm90_fp8_gemm")
    pytest.importorskip("cutlass")
    plain = GemmProblem(m, 8192, 8192, FP8, WeightFormat.parse(format), "mma8", Epilogue(bias=True), experts=experts)
    blocks = replace(plain, epilogue=Epilogue(bias=True, block_scale=True))
    config = ranked([kernel], blocks)[0][2]
    codes = [sass.disassemble(object_code(kernel.unit(p, config))) for p in (plain, blocks)]
    sass.check(codes[1], "QGMMA", asynchronous="g32_zint" not in format)
    assert codes[1].count("UTMALDG") == codes[0].count("UTMALDG") + 1


@pytest.mark.parametrize("k", [128, 384, 640])
def test_scales_in_ue8m0(device, k):
    """DeepEP sends four powers of two in an int32, with contiguous tokens."""
    w, blocks = made("int4_g128", 64, k, device, experts=3), -(-k // 128)
    x, _ = activations(3, 8, k, device=device)
    exponents = torch.randint(120, 134, (3, 8, -(-blocks // 4) * 4), dtype=torch.uint8, device=device)
    words = exponents.view(torch.int32)
    packed = words.new_empty(3, words.shape[-1], 8).mT.copy_(words)  # also of one word: strides (8, 1, 8)
    powers = exponents[..., :blocks].contiguous().view(torch.float8_e8m0fnu)
    assert torch.equal(powers.float(), torch.exp2(exponents[..., :blocks].float() - 127))
    counts = torch.tensor([8, 0, 5], dtype=torch.int32, device=device)
    results = [masked_linear(x, w, counts, token_scale=s)[2, :5] for s in (powers.float(), powers, packed)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    with pytest.raises(ValueError, match=r"token_scale: wanted shape \(3, 8, .\) of torch.int32, four blocks"):
        masked_linear(x, w, counts, token_scale=packed[:, :7])
