"""Properties of the CPU kernel alone; the conformance suite tests its results."""

from __future__ import annotations

import contextlib
import functools
import platform
import subprocess
import sys

import pytest
import torch

import w4gemm
from conformance.cases import FEW_FORMATS, assert_close, random_weight
from w4gemm import choice
from w4gemm.api import product
from w4gemm.choice.model import ranked
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.kernels.cpu import compiled, kernel, machine, matmul, tile_product
from w4gemm.kernels.cpu.spec import CpuMixedGemm
from w4gemm.packing.layouts import layout_named

CPU = Device("cpu")


@pytest.fixture
def without_code_sums(monkeypatch):
    """Simulate a build of PyTorch without FBGEMM, beside which llvmlite is missing."""
    monkeypatch.setattr(kernel, "has_code_sums", lambda bits: False)
    monkeypatch.setattr(machine, "is_available", lambda: False)
    with other_configs():
        yield


@pytest.fixture
def without_llvmlite(monkeypatch):
    monkeypatch.setattr(machine, "is_available", lambda: False)
    with other_configs():
        yield


@pytest.fixture(params=["llvmlite", "without_llvmlite"])
def both(request):
    """Run a test with and without the compiled method."""
    if request.param == "without_llvmlite":
        request.getfixturevalue("without_llvmlite")
    elif not machine.is_available():
        pytest.skip(f"needs {machine.NEEDS}")


@contextlib.contextmanager
def other_configs():
    """Choose anew, here and afterwards."""
    forget_choices()
    yield
    forget_choices()


def forget_choices() -> None:
    choice.model._of_kernel.cache_clear()
    choice.model._invariant_order.cache_clear()
    choice.plan_cache.forget()


def problem(m: int, layout: str = "cpu", k: int = 576, format: WeightFormat = FEW_FORMATS[0]) -> GemmProblem:
    return GemmProblem(m, 576, k, torch.float32, format, layout, device=CPU)


def in_order(p: GemmProblem) -> list[str]:
    return [str(config) for _, _, config in ranked([CpuMixedGemm()], p)]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="FBGEMM is certain on x86 only")
def test_few_tokens_read_the_codes_themselves(without_llvmlite):
    assert kernel.has_code_sums(4)
    assert in_order(problem(1))[0] == "1x128x32_1x1x1_coop"
    assert in_order(problem(4)) == in_order(problem(8))[::-1]
    assert all(not c.startswith("1x") for c in in_order(problem(1, "canonical")))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="FBGEMM is certain on x86 only")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_hide_fbgemm(dtype):
    """The first call's finding is kept, so it must not depend on torch's default dtype."""
    before = torch.get_default_dtype()
    kernel.has_code_sums.cache_clear()
    try:
        torch.set_default_dtype(dtype)
        assert kernel.has_code_sums(4)
    finally:
        torch.set_default_dtype(before)
        kernel.has_code_sums.cache_clear()


def products_by_every_function(w: w4gemm.QuantizedWeight, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """x @ w.T by ``linear``, a layer and ``masked_linear`` of two experts, of which one has no row."""
    layer, experts = w4gemm.W4Linear.from_weight(w, dtype=x.dtype), w4gemm.QuantizedWeight.stack([w, w])
    counts = torch.tensor([0, x.shape[0]], dtype=torch.int32)
    return {
        "linear": w4gemm.linear(x, w),
        "W4Linear": layer(x),
        "masked_linear": w4gemm.masked_linear(x.expand(2, *x.shape).contiguous(), experts, counts)[1],
    }


def test_groups_of_more_than_256_columns_that_32_does_not_divide(both):
    """Their parts have a multiple of 16 columns."""
    w = random_weight(WeightFormat(272), 64, 544).repack()
    x = torch.randn(1, 544, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(w4gemm.linear(x, w), x @ w.dequantize().T, atol=1e-5)


@pytest.mark.parametrize("zero", ["none", "int", "float"])
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("n", [129, 700])
def test_a_single_column(both, n, m, zero):
    """x repeated for each chunk of features is memory of its own, though one element with a stride of 0 would do."""
    w = random_weight(WeightFormat(32, zero), n, 1).repack()
    x = torch.randn(m, 1, generator=torch.Generator().manual_seed(n))
    for name, got in products_by_every_function(w, x).items():
        torch.testing.assert_close(got, x @ w.dequantize().T, msg=lambda text, name=name: f"{name}: {text}")


def test_a_zero_point_far_below_its_scale_is_not_lost():
    """8 * s + z would not fit float32."""
    format, codes = WeightFormat(32, "float"), torch.arange(128 * 64).view(128, 64) % 16
    scales, zeros = torch.full((128, 2), 7424.0).bfloat16(), torch.full((128, 2), 0.01).bfloat16()
    w = w4gemm.QuantizedWeight.from_codes(format, codes, scales, zeros).repack()
    for config in CpuMixedGemm().configs(problem(1, k=64, format=format)):
        d = w4gemm.linear(torch.eye(64), w, config=str(config))
        assert torch.equal(d.T, w.dequantize()), config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["int4_g32", "int4_g32_zint", "int4_g32_zfloat"])
def test_infinities_are_those_of_a_matmul(both, name, dtype):
    """In sums of codes they would meet infinities of the other sign: x times the zero points."""
    w = w4gemm.quantize(torch.randn(130, 64), name).repack()
    x = torch.randn(3, 64)
    x[0, 3], x[1, 40], x[2, 5] = torch.inf, -torch.inf, torch.nan
    product = (x.to(dtype).double() @ w.dequantize(dtype).double().T).to(dtype)
    for got in (w4gemm.linear(x.to(dtype), w), w4gemm.linear(x[:1].to(dtype), w)):
        for row, expected in zip(got, product, strict=False):
            assert torch.equal(row.isnan(), expected.isnan())
            assert torch.equal(row.nan_to_num(0, 1, -1), expected.nan_to_num(0, 1, -1))


def test_sums_that_overflow_before_the_scale(both):
    codes, zeros = torch.full((130, 64), 15, dtype=torch.uint8), torch.full((130, 2), 14, dtype=torch.uint8)
    w = w4gemm.QuantizedWeight.from_codes("int4_g32_zint", codes, torch.full((130, 2), 1e-3).bfloat16(), zeros)
    x = torch.full((1, 64), 3e37)
    torch.testing.assert_close(w4gemm.linear(x, w.repack()), x @ w.dequantize().T)


@pytest.mark.parametrize("m", [1, 3])
def test_sums_of_codes_that_overflow_before_the_scale(both, m):
    """They are infinite here. A row that is finite keeps its bits."""
    codes = torch.full((130, 64), 15, dtype=torch.uint8)
    w = w4gemm.QuantizedWeight.from_codes("int4_g32", codes, torch.full((130, 2), 1e-3).bfloat16()).repack()
    x = torch.randn(m, 64, generator=torch.Generator().manual_seed(m))
    alone = w4gemm.linear(x, w)
    x[0] = 3e37
    got = w4gemm.linear(x, w)
    torch.testing.assert_close(got[0], x[0] @ w.dequantize().T)
    assert torch.equal(got[1:], alone[1:]) or not machine.is_available()
    if machine.is_available():
        out = torch.zeros(1, 192)[:, :130]
        compiled.CompiledProduct(w.format, w.n, w.k).step(x[:1], w.tensors, out)()
        torch.testing.assert_close(out[0], x[0] @ w.dequantize().T)


def test_sums_of_padding_that_overflow_alone():
    """Codes of the features are equal to their zero points, those of padding are not."""
    codes, zeros = torch.full((130, 64), 8, dtype=torch.uint8), torch.full((130, 2), 8, dtype=torch.uint8)
    w = w4gemm.QuantizedWeight.from_codes("int4_g32_zint", codes, torch.ones(130, 2).bfloat16(), zeros).repack()
    for m in (1, 3):
        assert not w4gemm.linear(torch.full((m, 64), 1e37), w).any()


@pytest.mark.parametrize("zero", ["none", "int", "float"])
@pytest.mark.parametrize("threads", [1, 2])
def test_sums_that_overflow_in_the_last_thread_before_an_epilogue(both, zero, threads):
    """The result is written over the residual. Other rows keep their bits."""
    format, codes, before = WeightFormat(32, zero, "fp32"), torch.full((640, 512), 8), torch.get_num_threads()
    codes[-1] = 15
    scales, zeros = torch.full((640, 16), 2.0**-10), torch.full((640, 16), 8.0 if zero == "int" else -(2.0**-7))
    zeros = None if zero == "none" else zeros.to(format.zero_dtype)
    w = w4gemm.QuantizedWeight.from_codes(format, codes.to(torch.uint8), scales, zeros).repack()
    x = torch.randn(6, 512, generator=torch.Generator().manual_seed(0))
    residual = torch.randn(6, 640, generator=torch.Generator().manual_seed(1))
    try:
        torch.set_num_threads(threads)
        alone = w4gemm.linear(x, w, activation="silu", residual=residual)
        x[3], out = 3e36, residual.clone()
        w4gemm.linear(x, w, activation="silu", residual=out, out=out)
    finally:
        torch.set_num_threads(before)
    expected = torch.nn.functional.silu(x[3].double() @ w.dequantize().double().T) + residual[3]
    torch.testing.assert_close(out[3], expected.float(), rtol=1e-5, atol=1e-5)
    others = torch.arange(6) != 3
    assert torch.equal(out[others], alone[others]) or not machine.is_available()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_products_do_not_depend_on_the_default_dtype(both, monkeypatch, dtype):
    w = random_weight(FEW_FORMATS[0], 200, 96).repack()
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(0))
    expected, before = products_by_every_function(w, x), torch.get_default_dtype()
    invariant = w4gemm.linear(x, w, batch_invariant=True)
    kernel.has_code_sums.cache_clear()
    forget_choices()
    try:
        torch.set_default_dtype(dtype)
        got = products_by_every_function(w, x)
        again = w4gemm.linear(x, w, batch_invariant=True)
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert torch.equal(again, invariant)


@pytest.mark.parametrize("group_size, k, together", [(32, 576, 32), (96, 100, 96), (512, 1024, 256), (320, 640, 160)])
def test_long_groups_are_summed_in_parts(group_size, k, together):
    configs = CpuMixedGemm().configs(problem(1, k=k, format=WeightFormat(group_size)))
    assert [c.tile_k for c in configs if c.tile_m == 1] == [together]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["cpu", "canonical"])
@pytest.mark.parametrize("format", FEW_FORMATS, ids=str)
def test_without_fbgemm(without_code_sums, format, layout, dtype):
    if reason := layout_named(layout).supports(format):
        pytest.skip(reason)
    w = random_weight(format, 130, 333).repack(layout)
    assert len(CpuMixedGemm().configs(problem(1))) == 1
    assert torch.equal(w4gemm.linear(torch.eye(333, dtype=dtype), w).T, w.dequantize(dtype))
    x = torch.randn(5, 333).to(dtype)
    assert_close(w4gemm.linear(x, w), x, w)


def test_many_tokens_run_in_blocks(both):
    w, x = random_weight(FEW_FORMATS[0], 130, 64).repack(), torch.randn(5000, 64)
    assert_close(w4gemm.linear(x, w, torch.ones(130)), x, w, torch.ones(130))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_zero_points_far_below_the_scales_are_rounded_once(without_llvmlite, dtype):
    """Sums that float32 cannot hold, in the method that dequantizes."""
    n, k, format = 130, 64, WeightFormat(32, "float", "bf16")
    scales = torch.full((n, 2), 2.0**-3).bfloat16()
    scales[:, 1] = 1 + 2.0**-7
    zeros = torch.full((n, 2), 2.0**-40).bfloat16()
    zeros[::2] *= -1
    w = w4gemm.QuantizedWeight.from_codes(format, torch.randint(0, 16, (n, k)), scales, zeros).repack()
    got = w4gemm.linear(torch.eye(k, dtype=dtype), w)
    assert torch.equal(got.T, w.dequantize(dtype))
    assert dtype == torch.float16 or not torch.equal(got.T, w.dequantize(torch.float32).to(dtype))


# --- the compiled method ---------------------------------------------------------------------------------------------

needs_llvmlite = pytest.mark.skipif(not machine.is_available(), reason=f"needs {machine.NEEDS}")


def compiled_config(w: w4gemm.QuantizedWeight) -> str:
    return str(CpuMixedGemm().configs(problem(1, k=w.k, format=w.format))[-1])


@needs_llvmlite
def test_the_compiled_method_is_first(monkeypatch):
    monkeypatch.setattr(tile_product, "is_available", lambda: False)
    with other_configs():
        for m in (1, 4, 64, 3000):
            assert in_order(problem(m))[0] == "512x128x64_1x1x1_coop"
    assert all(not c.startswith("512x") for c in in_order(problem(1, "canonical")))


@needs_llvmlite
@pytest.mark.parametrize("n, k", [(300, 333), (64, 640), (129, 16)])
@pytest.mark.parametrize(
    "format",
    [
        "int8_g128",
        "int8_g32_zint",
        "int6_g16_s8x256",
        "int5_g32",
        "int3_g32_zint_fp32",
        "int2_g64",
        "q2_k",
        "q4_k",
        "int4_col",
        "int4_g320_zfloat_fp16",
        "int4_g32_zint_fp32",
        "int4_g32_zfloat_fp32",
    ],
)
def test_compiled_numbers_are_those_of_dequantize(format, n, k):
    w = random_weight(WeightFormat.parse(format), n, k).repack("cpu")
    config = compiled_config(w)
    for x in (torch.eye(k), *torch.eye(k)[k - 5 :, None], torch.eye(k)[:2]):  # several tiles; one token; two
        assert torch.equal(w4gemm.linear(x, w, config=config), x @ w.dequantize(torch.float32).T)
    x = torch.randn(20, k, generator=torch.Generator().manual_seed(0))
    assert_close(w4gemm.linear(x, w, config=config), x, w)


@needs_llvmlite
@pytest.mark.parametrize("format", ["int4_g32_zfloat", "int4_col", "int8_g64", "int2_g16"])
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(format):
    w = random_weight(WeightFormat.parse(format), 200, 600).repack("cpu")
    x, config = torch.randn(600, 600, generator=torch.Generator().manual_seed(1)), compiled_config(w)
    every = w4gemm.linear(x, w, config=config, batch_invariant=True)
    for m in (*range(1, 15), 31, 512, 513):
        assert torch.equal(w4gemm.linear(x[:m], w, config=config, batch_invariant=True), every[:m]), m


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_oai"])
def test_bits_behind_an_activation_do_not_depend_on_the_number_of_rows(both, activation):
    """PyTorch computes exp of whole vectors and of the numbers behind the last one with different bits."""
    w = random_weight(FEW_FORMATS[0], 130, 64).repack("cpu")
    x = torch.randn(13, 64, generator=torch.Generator().manual_seed(0))
    every = w4gemm.linear(x, w, activation=activation, batch_invariant=True)
    for i in range(13):
        assert torch.equal(w4gemm.linear(x[i : i + 1], w, activation=activation, batch_invariant=True)[0], every[i])


@needs_llvmlite
@pytest.mark.parametrize("n", [192, 200])
@pytest.mark.parametrize("format", ["int4_g32", "int4_g32_zint", "q4_k", "int3_g64_zfloat", "int2_g32", "int8_g128"])
@pytest.mark.parametrize("lanes", [8, 16])
def test_tiles_of_both_widths_of_vectors(monkeypatch, lanes, format, n):
    """Vectors of 16 numbers are two registers here, or one with AVX-512. The last chunk has 64 features or 128."""
    monkeypatch.setattr(compiled, "lanes", lambda: lanes)
    w = random_weight(WeightFormat.parse(format), n, 333).repack("cpu")
    x, numbers = torch.eye(333), w.dequantize(torch.float32).T
    for sums_codes in (True, False):
        method = compiled.CompiledProduct(w.format, n, 333, sums_codes=sums_codes)
        for m in (1, 2, 5, 12, 333):
            assert torch.equal(method(x[-m:], w.tensors, x.new_empty(m, n)), numbers[-m:]), m
            code, _ = method.codes[m, torch.float32]
            assert sums_codes or not code.sums_codes
        one = torch.randn(1, 333, generator=torch.Generator().manual_seed(n))
        assert_close(method(one, w.tensors, x.new_empty(1, n)), one, w)


@needs_llvmlite
@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("m", [13, 19])
def test_a_tile_of_fewer_tokens_keeps_to_its_rows(monkeypatch, lanes, m):
    """What lies behind x and behind the result is neither read nor written."""
    monkeypatch.setattr(compiled, "lanes", lambda: lanes)
    w = random_weight(FEW_FORMATS[0], 192, 320).repack("cpu")
    x, out = torch.full((m + 1, 320), torch.nan), torch.full((m + 1, 192), 7.0)
    x[:m] = torch.eye(320)[-m:]
    method = compiled.CompiledProduct(w.format, 192, 320)
    assert method(x[:m], w.tensors, out[:m]).data_ptr() == out.data_ptr()
    assert method.codes[m, torch.float32][0].is_partial
    assert torch.equal(out[:m], w.dequantize(torch.float32).T[-m:]) and out[m:].eq(7).all()


@needs_llvmlite
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("m", [1, 3, 5, 9, 24, 40])
def test_warm_calls_of_small_layers(dtype, m):
    """They skip what a launch has for all other products. Columns that are not contiguous take that way."""
    w, x = random_weight(WeightFormat.parse("int4_g32"), 192, 96).repack(), torch.randn(1, m, 96).to(dtype)
    strided = torch.stack((x, x), -1)[..., 0]
    expected = w4gemm.linear(strided[0], w)
    bound = product.bound_linear(x[0], w, None, None, False)
    assert bound is not None and bound.product.direct(m) is not None
    layer = w4gemm.W4Linear.from_weight(w)
    for call in (functools.partial(w4gemm.linear, w=w), layer, layer):
        for rows in (x[0], strided[0], x.view(1, 1, m, 96)):
            d = call(rows)
            assert d.shape == (*rows.shape[:-1], 192) and torch.equal(d.view(m, 192), expected)
    x[0, -1, 0] = torch.inf
    infinite = w4gemm.linear(x, w)[0]
    assert torch.equal(infinite[:-1], expected[:-1]) and not infinite[-1].isfinite().any()


@needs_llvmlite
def test_warm_calls_follow_the_plan():
    w, x = random_weight(WeightFormat.parse("int4_g32"), 192, 96).repack(), torch.randn(2, 96)
    w4gemm.linear(x, w)
    warm = product.bound_linear(x, w, None, None, False).product
    before = warm.direct(2)
    assert before is not None and warm.direct(2) is before
    choice.plan_cache.forget()
    assert warm.direct(2) is not before
    wide = random_weight(WeightFormat.parse("int4_g32"), 200, 96).repack()  # results of whole blocks are copied
    w4gemm.linear(x, wide)
    assert product.bound_linear(x, wide, None, None, False).product.direct(2) is None


@pytest.mark.parametrize("m", [2, 40])
@pytest.mark.parametrize("name", ["x", "w", "out"])
def test_freed_memory_is_refused(name, m):
    """Compiled code would crash the process. Freed results are those that a caller passes."""
    w, x, out = random_weight(WeightFormat.parse("int4_g32"), 192, 96).repack(), torch.randn(m, 96), torch.empty(m, 192)
    options = {"out": out} if name == "out" else {}
    w4gemm.linear(x, w, **options)
    {"x": x, "w": w.tensors[1], "out": out}[name].untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{name}: wanted a tensor with memory"):
            w4gemm.linear(x, w, **options)


@pytest.fixture
def medium(monkeypatch):
    """Have the user let products of float32 be computed in bf16, on a CPU where that is faster. What tests before this
    one made does not know of it."""
    monkeypatch.setattr(product, "multiplies_bf16", lambda format, k: True)
    monkeypatch.setattr(product, "_bound", {})
    product.product_of.cache_clear()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")
    product.product_of.cache_clear()


@pytest.mark.parametrize(("n", "k", "m"), [(130, 1088, 20), (192, 576, 8)])  # else a warm call of the second is direct
def test_float32_is_rounded_where_the_user_lets_it(medium, n, k, m):
    w, x, bias = random_weight(FEW_FORMATS[0], n, k).repack(), torch.randn(2, m, k), torch.randn(n)
    residual, layer = torch.randn(2, m, n), w4gemm.W4Linear.from_weight(w, bias)
    rounded = w4gemm.linear(x.bfloat16(), w, out_dtype=torch.float32)
    for _ in range(2):
        assert torch.equal(w4gemm.linear(x, w), rounded)
        assert torch.equal(layer(x), rounded + bias)
        assert torch.equal(w4gemm.linear(x, w, bias, residual=residual), rounded + bias + residual)
    one = torch.nn.functional.one_hot(torch.arange(k), k).float()
    assert torch.equal(w4gemm.linear(one, w), w4gemm.linear(one.bfloat16(), w, out_dtype=torch.float32))
    for own in (
        {"batch_invariant": True},
        {"config": choice.plan_for(choice.PlanKey.of(w.packed, 2 * m, torch.float32, w.device)).config},
    ):
        assert_close(w4gemm.linear(x, w, **own), x, w)
        assert not torch.equal(w4gemm.linear(x, w, **own), rounded)
    torch.set_float32_matmul_precision("high")
    assert_close(w4gemm.linear(x, w), x, w)
    assert_close(w4gemm.linear(x[0, :4], w), x[0, :4], w)


def test_small_products_stay_float32(medium):
    """Rounding would take longer. Bits do not depend on whether a call is the first, has a bias or needs gradients."""
    w, x = random_weight(FEW_FORMATS[0], 192, 576).repack(), torch.randn(8, 576)
    layer, expected = w4gemm.W4Linear.from_weight(w), w4gemm.linear(x, w)
    assert_close(expected, x, w)
    for _ in range(2):
        assert torch.equal(w4gemm.linear(x, w), expected) and torch.equal(layer(x), expected)
        assert torch.equal(w4gemm.linear(x, w, torch.zeros(192)), expected)
        assert torch.equal(layer(x.clone().requires_grad_()).detach(), expected)


def test_may_round_float32(medium):
    assert matmul.may_round_float32()
    torch.set_float32_matmul_precision("high")
    assert not matmul.may_round_float32()
    if hasattr(torch.backends.mkldnn, "matmul"):  # from PyTorch 2.9 on
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        assert matmul.may_round_float32()


@needs_llvmlite
@pytest.mark.parametrize("m", [1, 5, 40])
def test_sums_are_not_written_to_out_before_the_epilogue(m):
    """``out`` may be the residual, and has half of the columns after gates."""
    w = random_weight(FEW_FORMATS[0], 256, 96).repack("cpu")
    x, config = torch.randn(m, 96, generator=torch.Generator().manual_seed(m)), compiled_config(w)
    residual = torch.randn(m, 256, generator=torch.Generator().manual_seed(0))
    expected = w4gemm.linear(x, w, residual=residual, config=config)
    assert torch.equal(w4gemm.linear(x, w, residual=residual, out=residual, config=config), expected)
    memory = torch.full((3 * m, 128), 7.0)
    w4gemm.linear(x, w, activation="silu_mul", out=memory[m : 2 * m], config=config)
    assert torch.equal(memory[m : 2 * m], w4gemm.linear(x, w, activation="silu_mul", config=config))
    assert (memory[:m] == 7).all() and (memory[2 * m :] == 7).all()


@needs_llvmlite
def test_a_child_process_has_threads_of_its_own():
    """Those of the parent are gone after a fork."""
    script = """
import os, torch, w4gemm
torch.set_num_threads(2)
w, x = w4gemm.quantize(torch.randn(1024, 512)).repack(), torch.randn(8, 512)
d = w4gemm.linear(x, w)
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    os._exit(0 if torch.equal(w4gemm.linear(x, w), d) else 1)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=120)


def test_what_the_compiled_method_needs_is_said(without_llvmlite):
    with pytest.raises(ValueError, match="llvmlite"):
        choice.choose(problem(1), "cpu_mixed_gemm/512x128x192_1x1x1_coop")


def test_says_what_it_does_not_do():
    cpu = CpuMixedGemm()
    assert "not on cuda" in cpu.supports(GemmProblem(1, 1, 1, torch.float32, FEW_FORMATS[0], "cpu")).reason
    assert "float64" in cpu.supports(GemmProblem(1, 1, 1, torch.float64, FEW_FORMATS[0], "cpu", device=CPU)).reason
    assert "mma16" in cpu.supports(problem(1, "mma16")).reason


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_as_many_threads_as_torch_is_told_and_the_same_bits(both, m, threads):
    """The number of threads is torch's business: neither changed by a call nor seen in the result."""
    w, before = random_weight(FEW_FORMATS[0], 640, 768).repack(), torch.get_num_threads()
    x = torch.randn(m, 768, generator=torch.Generator().manual_seed(m))
    try:
        torch.set_num_threads(1)
        alone = w4gemm.linear(x, w)
        torch.set_num_threads(threads)
        assert torch.equal(w4gemm.linear(x, w), alone)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("has_bf16", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["cpu", "canonical"])
def test_16_bits_are_multiplied_in_the_dtype_that_is_fast(without_llvmlite, monkeypatch, has_bf16, dtype, layout):
    """Without AVX-512, AMX or the like PyTorch's bfloat16 matmul takes 40 times as long as float32's. Gradients too."""
    dtypes = set()

    def noting(product):
        def noted(a, b, *rest, **named):
            dtypes.update((a.dtype, b.dtype))
            return product(a, b, *rest, **named)

        return noted

    for module, name in ((torch, "mm"), (torch, "matmul"), (torch.nn.functional, "linear")):
        monkeypatch.setattr(module, name, noting(getattr(module, name)))
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(matmul, "fast_dtype", functools.cache(matmul.fast_dtype.__wrapped__))
    monkeypatch.setattr(kernel, "fast_dtype", matmul.fast_dtype)
    w = random_weight(WeightFormat.parse("int4_g32"), 130, 96).repack(layout)
    x, m_offsets = torch.randn(64, 96).to(dtype).requires_grad_(), torch.tensor([0, 64], dtype=torch.int32)
    expected = {dtype if has_bf16 and dtype == torch.bfloat16 else torch.float32}
    d = w4gemm.linear(x, w)
    assert dtypes == expected
    for result in (d, w4gemm.grouped_linear(x, w4gemm.QuantizedWeight.stack([w]), m_offsets)):
        dtypes.clear()
        (dx,) = torch.autograd.grad(result, x, d)
        assert dtypes == expected and dx.dtype == dtype
        torch.testing.assert_close(dx.float(), d.float() @ w.dequantize(), rtol=0.02, atol=0.02 * dx.abs().max().item())
    assert_close(d, x, w)


@pytest.mark.parametrize("layout", ["cpu", "canonical"])
@pytest.mark.parametrize("k", [320, 336])
def test_a_row_reads_nothing_of_its_neighbours(layout, k):
    """PyTorch's bfloat16 matmul does on CPUs with AMX, if k is no multiple of 32."""
    w = random_weight(WeightFormat.parse("int4_g32"), 130, k)
    w = w.repack("cpu") if layout == "cpu" else w
    x = torch.randn(65, k).bfloat16()
    dense = str(CpuMixedGemm().configs(problem(64, layout, k, w.format))[0])
    alone = w4gemm.linear(x[:64], w, config=dense)
    x[64] = torch.nan
    assert alone.isfinite().all() and torch.equal(w4gemm.linear(x, w, config=dense)[:64], alone)


@pytest.mark.parametrize("experts", [False, True])
def test_a_gradient_takes_nothing_in_from_its_neighbours(experts):
    w = random_weight(WeightFormat.parse("int4_g32"), 100, 64)
    x = torch.randn(96, 64).bfloat16().requires_grad_()
    offsets = torch.tensor([0, 48, 96], dtype=torch.int32)
    y = w4gemm.grouped_linear(x, w4gemm.QuantizedWeight.stack([w, w]), offsets) if experts else w4gemm.linear(x, w)
    grad = torch.randn_like(y)
    (alone,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    grad[32] = torch.nan
    (dx,) = torch.autograd.grad(y, x, grad)
    others = torch.arange(96) != 32
    assert alone.isfinite().all() and torch.equal(dx[others], alone[others])


@needs_llvmlite
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_results_are_sums_rounded_once(dtype: torch.dtype) -> None:
    """A few tokens are read and written without a copy in float32. A NaN stays one."""
    w = random_weight(WeightFormat.parse("int4_g32_zint"), 192, 320).repack("cpu")
    product, x = compiled.CompiledProduct(w.format, w.n, w.k), torch.randn(3, 320).to(dtype)
    x[2, 7] = torch.nan
    for m in (1, 3):
        out = torch.empty(m, w.n, dtype=dtype)
        assert product(x[:m], w.tensors, out) is out
        assert torch.equal(out.nan_to_num(9), product(x[:m].float(), w.tensors, None).to(dtype).nan_to_num(9))
        assert bool(out[-1].isnan().all()) == (m == 3)
