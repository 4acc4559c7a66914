"""Weights are rounded once: against exact rational arithmetic."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

from fuzz import formulas
from w4gemm import codebook, quantize
from w4gemm.core.elements import ELEMENTS
from w4gemm.core.formats import PER_COLUMN, SCALES, ZEROS, WeightFormat
from w4gemm.kernels.cpu.kernel import _fits_float32
from w4gemm.packing.layouts import WeightComponents
from w4gemm.tuning.random_weight import random_components
from w4gemm.weights.components import dequantize_parts, rounded_sum

DIGITS = {torch.float16: (11, -24), torch.bfloat16: (8, -133), torch.float32: (24, -149)}
"""Digits of a significand and the exponent of a subnormal's last digit."""


def rounded(value: Fraction, dtype: torch.dtype) -> float:
    """The nearest number of ``dtype``, ties to even; by definition rather than by hardware."""
    if value == 0:
        return 0.0
    digits, smallest = DIGITS[dtype]
    exponent = 0
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** max(exponent - digits + 1, smallest)
    return float(round(value / step) * step)


def samples(dtype: torch.dtype, spread: int, count: int = 400) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(spread)
    u = torch.randint(0, 16, (count,), generator=g).float()
    s = torch.randn(count, generator=g).mul(0.01).to(dtype)
    z = torch.randn(count, generator=g).mul(torch.rand(count, generator=g).mul(spread).neg().exp2()).to(dtype)
    return u, s, z


@pytest.mark.parametrize("spread", [1, 12, 40])
@pytest.mark.parametrize("scale", ["fp16", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_float_zero_points_are_rounded_once(dtype, scale, spread):
    format = WeightFormat(32, "float", scale)
    u, s, z = samples(format.scale_dtype, spread)
    got = dequantize_parts(WeightComponents(u.to(torch.uint8)[:, None], s[:, None], z[:, None]), format, dtype)[:, 0]
    exact = [Fraction(a) * Fraction(b) + Fraction(c) for a, b, c in zip(*(t.tolist() for t in (u, s, z)), strict=True)]
    assert got.tolist() == [rounded(v, dtype) for v in exact]


def test_rounding_twice_would_be_wrong():
    """1 + 2**-8 lies between two bfloat16 numbers; a little more must go up, though float32 cannot hold it."""
    a, b = torch.tensor([1 + 2.0**-8, 1 + 2.0**-8, 1 + 2.0**-8]), torch.tensor([2.0**-40, -(2.0**-40), 0.0])
    up, down, even = 1 + 2.0**-7, 1.0, 1.0
    assert (a + b).to(torch.bfloat16).tolist() == [1.0, 1.0, 1.0]
    assert rounded_sum(a, b, torch.bfloat16).tolist() == [up, down, even]
    assert rounded_sum(-a, -b, torch.bfloat16).tolist() == [-up, -down, -even]


def test_float32_is_product_then_sum():
    u, s, z = samples(torch.float16, 12)
    got = dequantize_parts(
        WeightComponents(u.byte()[:, None], s[:, None], z[:, None]), WeightFormat(32, "float", "fp16"), torch.float32
    )
    assert torch.equal(got[:, 0], u * s.float() + z.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fits_float32(dtype):
    """True only where every sum is exact, and for what real models hold."""
    for spread in range(0, 60, 4):
        _, s, z = samples(dtype, spread, 50)
        for i in range(len(s)):
            u = torch.arange(16)
            exact = [Fraction(int(v)) * Fraction(s[i].item()) + Fraction(z[i].item()) for v in u]
            is_exact = all(rounded(v, torch.float32) == v for v in exact)
            fits = _fits_float32(s[i], z[i], 15)
            assert is_exact or not fits
    assert _fits_float32(
        torch.tensor([0.01, 0.0, 0.003], dtype=dtype), torch.tensor([-0.08, 0.1, 0.0], dtype=dtype), 15
    )
    if dtype == torch.float16:  # below 1 float16 is fixed point with 24 digits
        assert _fits_float32(torch.tensor([0.03, 6e-8], dtype=dtype), torch.tensor([6e-8, 0.4], dtype=dtype), 15)


THIRDS = codebook([v / 3 for v in range(-9, 7)])


def rules() -> Iterator[WeightFormat]:
    """Every element with every zero and scale rule that it may have, and groups that divide k or not."""
    for parts in itertools.product((32, 160, PER_COLUMN), ZEROS, SCALES, (*ELEMENTS, THIRDS)):
        with contextlib.suppress(ValueError):  # there is no such format
            yield WeightFormat(*parts)


@pytest.mark.parametrize("format", [*rules()], ids=str)
def test_every_rule_is_its_formula(format):
    """Weights are those of the fuzzer's formulas, which share no code with the library; 16-bit ones are rounded once,
    or once more where float32 already was."""
    n, k = 20, 300
    parts = random_components(format, n, k, signed=True)
    codes, scales, zeros, channels, factors = parts
    group = torch.arange(k) // format.group_length(k)
    if format.scale == "b128":
        scales = scales[torch.arange(n) % 2]
    if factors is not None:
        of_group = torch.arange(scales.shape[1]) * 32 // format.scale_rule.factor_columns
        numbers = [t * factors[:, of_group, i].float() for i, t in enumerate((scales, zeros)[: factors.shape[2]])]
        scales, zeros = numbers if format.zero == "float" else (numbers[0], None)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        args = (codes, scales, zeros, channels, group, format.zero, format.element, format.scale == "e4m3", name)
        expected = formulas.weight(*args).value
        if channels is not None or scales.dtype == torch.float32:
            expected = formulas.rounded(expected, formulas.TYPES["float32"])
        expected = formulas.rounded(expected, formulas.TYPES[name])
        actual = dequantize_parts(parts, format, dtype)
        if format.element in ("nf4", THIRDS) and channels is not None:  # the product with the scale is rounded too
            assert ((actual - expected).abs() <= 2 * formulas.TYPES[name].unit * expected.abs()).all()
        else:
            assert torch.equal(actual.double(), expected)


def test_the_formulas_have_every_element():
    assert set(formulas.CODEBOOKS) == set(ELEMENTS)
    for name, element in ELEMENTS.items():
        values = [value if math.isfinite(value) else math.nan for value in formulas.CODEBOOKS[name]]
        assert torch.equal(torch.tensor(values).nan_to_num(-1e9), torch.tensor(element.values).nan_to_num(-1e9)), name


@pytest.mark.parametrize("name", ["int4_g{}", "int4_g{}_zint", "int4_g{}_zfloat", "int4_g{}_e4m3", "int4_g{}_e8m0"])
def test_a_group_longer_than_k_is_one_of_k_columns(name):
    """Nothing is allocated by the size that a name or a file gives: these would take 137 GB."""
    dense = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    w = quantize(dense, name.format(2**30))
    assert w.parts().scales.shape == (4, 1)
    assert torch.equal(w.repack().dequantize(), quantize(dense, name.format(64)).dequantize())
    with pytest.raises(ValueError, match=f"group_size: wanted .* up to {2**31 - 32}, or -1 .*, got {2**40}"):
        quantize(dense, name.format(2**40))
