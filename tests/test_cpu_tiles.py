"""Products by AMX, whose instructions are loops here: :mod:`software_amx`."""

from __future__ import annotations

import pytest
import torch

import w4gemm
from conformance.cases import assert_close, random_weight
from test_cpu_kernel import other_configs
from w4gemm.core.formats import WeightFormat
from w4gemm.kernels.cpu import compiled, tile_product
from w4gemm.kernels.cpu.tile_product import TileProduct

pytestmark = pytest.mark.skipif(not compiled.is_available(), reason=f"needs {compiled.NEEDS}")


def product(w: w4gemm.QuantizedWeight, is_rounded: bool = False) -> TileProduct:
    from software_amx import SoftwareAmx

    return TileProduct(w.format, w.n, w.k, is_rounded, SoftwareAmx)


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
    error = product(w, is_rounded=True)(x, w.tensors, None).double() - exact
    assert error.norm() < 6e-7 * exact.norm(), "rounded"


@pytest.mark.parametrize(
    ("tokens", "dtype", "is_rounded"),
    [((1, 17), torch.float32, False), ((1, 16), torch.bfloat16, False), ((1, 17), torch.bfloat16, True)],
)
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(
    tokens: tuple[int, ...], dtype: torch.dtype, is_rounded: bool
) -> None:
    w = weight("int4_g32_zfloat", 64, 1024)
    run, x = product(w, is_rounded), torch.randn(40, 1024, generator=torch.Generator().manual_seed(1)).to(dtype)
    every = run(x, w.tensors, None).clone()
    for m in tokens:
        assert torch.equal(run(x[:m], w.tensors, None), every[:m]), m


@pytest.mark.parametrize(("format", "dtype"), [("int4_g32", torch.float32), ("int4_g32_zfloat", torch.bfloat16)])
def test_infinities_are_those_of_a_matmul(format: str, dtype: torch.dtype) -> None:
    """Sums before the scale, and the parts of an infinite number, are infinite or NaN where a product is not. Other
    rows keep their bits."""
    w, x = weight(format, 130, 64), torch.randn(4, 64).to(dtype)
    run = product(w)
    alone = run(x, w.tensors, None).clone()
    x[0, 3], x[1, 40], x[2, :] = torch.inf, torch.nan, 3e38 / 64
    got, exact = run(x, w.tensors, None), x.float() @ w.dequantize(torch.float32).T
    assert torch.equal(got.isnan(), exact.isnan()) and torch.equal(got[0].isinf(), exact[0].isinf())
    torch.testing.assert_close(got[2], exact[2], rtol=1e-5, atol=1e32)
    assert torch.equal(got[3], alone[3])


def test_linear_takes_it_where_the_processor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 4 tokens of bf16 on, with rounded numbers above 96. Groups of 48 columns are multiplied as elsewhere."""
    from software_amx import SoftwareAmx

    made: list[str] = []

    def software(format: WeightFormat, n: int, k: int, is_rounded: bool) -> TileProduct:
        made.append(f"{format} rounded" * is_rounded or str(format))
        return TileProduct(format, n, k, is_rounded, SoftwareAmx)

    monkeypatch.setattr(tile_product, "is_available", lambda: True)
    monkeypatch.setattr(tile_product, "TileProduct", software)
    with other_configs():
        for format, m in (("int4_g32", 2), ("int4_g48", 4), ("int4_g32", 4)):
            assert made == []
            w, x = weight(format, 130, 96), torch.randn(m, 96).bfloat16()
            assert_close(w4gemm.linear(x, w), x, w)
        assert made == ["int4_g32"]
        many = torch.randn(97, 96).bfloat16()
        assert_close(w4gemm.linear(many, w), many, w)
        assert made == ["int4_g32", "int4_g32 rounded"]
        every = w4gemm.linear(x, w, batch_invariant=True)
        assert torch.equal(w4gemm.linear(x[:1], w, batch_invariant=True), every[:1])


def test_threads_share_the_chunks() -> None:
    w, before = weight("int4_g32", 300, 512), torch.get_num_threads()
    x = torch.randn(20, 512, generator=torch.Generator().manual_seed(0))
    run = product(w)
    try:
        torch.set_num_threads(1)
        alone = run(x, w.tensors, None).clone()
        torch.set_num_threads(3)
        assert torch.equal(run(x, w.tensors, None), alone)
    finally:
        torch.set_num_threads(before)
