"""Products by AMX and by AVX-512's dot products, whose instructions are loops here: :mod:`software_amx`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

import w4gemm
from conformance.cases import assert_close, random_weight
from test_cpu_kernel import other_configs
from w4gemm.core.formats import WeightFormat
from w4gemm.kernels.cpu import machine, tile_product
from w4gemm.kernels.cpu.tile_product import PairProduct, TileProduct

pytestmark = pytest.mark.skipif(not machine.is_available(), reason=f"needs {machine.NEEDS}")


def product(w: w4gemm.QuantizedWeight, is_rounded: bool = False) -> TileProduct:
    from software_amx import SoftwareAmx

    return TileProduct(w.format, w.n, w.k, is_rounded, SoftwareAmx)


def pairs(w: w4gemm.QuantizedWeight, is_rounded: bool = False) -> PairProduct:
    from software_amx import SoftwareAmx

    return PairProduct(w.format, w.n, w.k, is_rounded, SoftwareAmx)


def weight(format: str, n: int, k: int) -> w4gemm.QuantizedWeight:
    return random_weight(WeightFormat.parse(format), n, k).repack("cpu")


@pytest.mark.parametrize(
    ("format", "n", "k", "m"),
    [
        ("int4_g32", 200, 1024, 1),
        ("int4_g32", 64, 1024, 40),
        ("int4_g128_zint", 64, 640, 20),
        ("int4_g64_zfloat_fp16", 129, 320, 33),
        ("int4_g512_zfloat_fp32", 64, 1024, 2),
        ("int4_col", 64, 352, 3),
        ("int3_g32_zint_fp32", 64, 96, 16),
        ("int2_g64_zint", 100, 128, 17),
        ("int8_g32", 64, 96, 5),
        ("int8_g32_zint", 64, 96, 20),
        ("q4_k", 64, 512, 1),
    ],
)
def test_products_are_those_of_the_numbers(format: str, n: int, k: int, m: int) -> None:
    """One token, full tiles of two and of one, and padding. The parts of float32 x hold all of its bits."""
    w, generator = weight(format, n, k), torch.Generator().manual_seed(m)
    x = torch.randn(m, k, generator=generator) * 2.0 ** torch.randint(-9, 9, (m, k), generator=generator)
    numbers = w.dequantize(torch.float32).double()
    for dtype in (torch.bfloat16 if m % 2 else torch.float16, torch.float32):
        exact = x.to(dtype).double() @ numbers.T
        error = product(w)(x.to(dtype), w.tensors, None).double() - exact
        assert error.norm() < 6e-7 * exact.norm(), dtype
    x, exact = x.bfloat16(), x.bfloat16().double() @ w.dequantize(torch.bfloat16).double().T
    for make in (product, pairs):
        error = make(w, is_rounded=True)(x, w.tensors, None).double() - exact
        assert error.norm() < 6e-7 * exact.norm(), f"rounded, {make.__name__}"
    exact = x.double() @ numbers.T
    assert (pairs(w)(x, w.tensors, None).double() - exact).norm() < 6e-7 * exact.norm(), "pairs"


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("m", [3, 4, 9, 16])
@pytest.mark.parametrize("k", [64, 160])
@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("make", [product, pairs])
def test_results_of_16_bits_are_those_of_float32_rounded(
    make: Callable[[w4gemm.QuantizedWeight, bool], TileProduct], is_rounded: bool, k: int, m: int
) -> None:
    """Of tiles of two sizes, of tiles with padding, of a chunk that is not full, of one panel and of several."""
    w, x = weight("int4_g32_zint", 192, k), torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()
    run, out = make(w, is_rounded), torch.full((m, 192), torch.nan, dtype=torch.bfloat16)
    result = run(x, w.tensors, out)
    assert result.dtype is torch.float32 or result is out
    assert torch.equal(result.bfloat16(), run(x, w.tensors, None).bfloat16())


@pytest.mark.parametrize(
    ("tokens", "dtype", "is_rounded"),
    [((1, 17), torch.float32, False), ((1, 16), torch.bfloat16, False), ((1, 17), torch.bfloat16, True)],
)
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(
    tokens: tuple[int, ...], dtype: torch.dtype, is_rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on whether x is copied to the order of tiles."""
    w = weight("int4_g32_zfloat", 64, 1024)
    run, x = product(w, is_rounded), torch.randn(40, 1024, generator=torch.Generator().manual_seed(1)).to(dtype)
    every = run(x, w.tensors, None).clone()
    for m in tokens:
        assert torch.equal(run(x[:m], w.tensors, None), every[:m]), m
    monkeypatch.setattr(tile_product, "_FEW_NUMBERS", 0)
    assert torch.equal(product(w, is_rounded)(x, w.tensors, None), every), "copied"
    if dtype is torch.bfloat16 and not is_rounded:
        run = pairs(w)
        every = run(x, w.tensors, None).clone()
        for m in (1, 5, 16):
            assert torch.equal(run(x[:m], w.tensors, None), every[:m]), f"pairs, {m}"


@pytest.mark.parametrize(
    ("make", "format", "dtype"),
    [
        (product, "int4_g32", torch.float32),
        (product, "int4_g32_zfloat", torch.bfloat16),
        (pairs, "int4_g32_zfloat", torch.bfloat16),
    ],
)
def test_infinities_are_those_of_a_matmul(
    make: Callable[[w4gemm.QuantizedWeight], TileProduct], format: str, dtype: torch.dtype
) -> None:
    """Sums before the scale, and the parts of an infinite number, are infinite or NaN where a product is not. Other
    rows keep their bits."""
    w, x = weight(format, 130, 64), torch.randn(4, 64).to(dtype)
    run = make(w)
    alone = run(x, w.tensors, None).clone()
    x[0, 3], x[1, 40], x[2, :] = torch.inf, torch.nan, 3e38 / 64
    got, exact = run(x, w.tensors, None), x.float() @ w.dequantize(torch.float32).T
    assert torch.equal(got.isnan(), exact.isnan()) and torch.equal(got[0].isinf(), exact[0].isinf())
    torch.testing.assert_close(got[2], exact[2], rtol=1e-5, atol=1e32)
    assert torch.equal(got[3], alone[3])


def test_many_rows_that_are_not_finite() -> None:
    """They are computed anew, in panels of 64 columns, fewer than those of AMX."""
    w, x = weight("int4_g32", 130, 512), torch.randn(20, 512)
    x[:, 3] = torch.inf
    got, exact = product(w)(x, w.tensors, None), x @ w.dequantize(torch.float32).T
    assert torch.equal(got.nan_to_num(0, 1, -1), exact.nan_to_num(0, 1, -1))


@pytest.mark.parametrize("has_amx", [True, False])
def test_linear_takes_it_where_the_processor_has_it(has_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For bf16 x: codes, with AMX from some tokens on, and rounded numbers for many tokens. Groups of 48 columns are
    multiplied as elsewhere."""
    from software_amx import SoftwareAmx

    made: list[str] = []

    def software(kind: type[TileProduct], format: WeightFormat, n: int, k: int, is_rounded: bool) -> TileProduct:
        made.append("rounded" if is_rounded else "codes")
        return kind(format, n, k, is_rounded, SoftwareAmx)

    monkeypatch.setattr(tile_product, "is_available", lambda: has_amx)
    monkeypatch.setattr(tile_product, "has_pairs", lambda: not has_amx)
    for kind in (TileProduct, PairProduct):
        monkeypatch.setattr(tile_product, kind.__name__, functools.partial(software, kind))
    few = [] if has_amx else ["codes"]
    with other_configs():
        for format, m, methods in (
            ("int4_g48", 2, []),
            ("int4_g48", 40, []),
            ("int4_g32", 2, []),
            ("int4_g32", 4, few),
            ("int4_g32", 8, ["codes"]),
            ("int4_g32", 16, ["rounded"]),
            ("int4_g32", 200, ["rounded"]),
        ):
            made.clear()
            w, x = weight(format, 130, 96), torch.randn(m, 96).bfloat16()
            assert_close(w4gemm.linear(x, w), x, w)
            assert made == methods, (format, m)
        every = w4gemm.linear(x, w, batch_invariant=True)
        assert torch.equal(w4gemm.linear(x[:1], w, batch_invariant=True), every[:1])


@pytest.mark.parametrize("make", [product, pairs])
def test_threads_share_the_chunks(
    make: Callable[[w4gemm.QuantizedWeight], TileProduct], monkeypatch: pytest.MonkeyPatch
) -> None:
    w, before = weight("int4_g32", 320, 512), torch.get_num_threads()
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    run, out = make(w), torch.empty(16, 320, dtype=torch.bfloat16)
    try:
        torch.set_num_threads(1)
        alone = run(x, w.tensors, out).clone()
        torch.set_num_threads(3)
        for kind in (TileProduct, PairProduct):
            monkeypatch.setattr(kind, "worth", lambda self, tokens: 1)
        assert torch.equal(run(x, w.tensors, out), alone)
    finally:
        torch.set_num_threads(before)
