"""quantize: within half a step, search never worse, what it refuses."""

from __future__ import annotations

import pytest
import torch

from test_formats import ALL
from w4gemm import WeightFormat, fold_scales, quantize

SHAPES = [(1, 1), (5, 33), (64, 300), (16, 1024)]


def dense(n: int, k: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different size and offset, some outliers, some zeros."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=g) * 10 ** (torch.rand(n, 1, generator=g) * 4 - 3)
    w += w.abs().amax(1, keepdim=True) * (torch.rand(n, 1, generator=g) - 0.5)
    w[torch.rand(n, k, generator=g) < 0.01] *= 10
    w[torch.rand(n, k, generator=g) < 0.01] = 0
    return w


def group_errors(w: torch.Tensor, q) -> torch.Tensor:
    """Squared error of each row and group, in float64."""
    error = (q.dequantize().double() - w.double()).square()
    length, groups = q.format.group_length(q.k), q.format.groups(q.k)
    error = torch.nn.functional.pad(error, (0, groups * length - q.k))
    return error.view(q.n, groups, length).sum(-1)


@pytest.mark.parametrize("format", ALL, ids=str)
def test_error_is_about_half_a_step(format):
    """A step is the scale; rounding the scale and the zero point to 16 bits adds a little."""
    eps = torch.finfo(format.scale_dtype).eps
    # for integer zero points the zero point itself is rounded, which moves the whole range by up to half a step
    steps = {"none": 0.5 + 8 * eps, "int": 1 + 15 * eps, "float": 0.5 + 15 * eps}[format.zero]
    for seed, (n, k) in enumerate(SHAPES):
        w = dense(n, k, seed)
        q = quantize(w, format)
        assert q.format == format and (q.n, q.k, q.layout) == (n, k, "canonical")
        scales = q.parts().scales.float().abs().repeat_interleave(format.group_length(k), 1)[:, :k]
        bound = steps * scales + torch.finfo(format.scale_dtype).tiny * 16
        if format.zero == "float":
            zeros = q.parts().zeros.float().abs().repeat_interleave(format.group_length(k), 1)[:, :k]
            bound += eps * zeros
        error = (q.dequantize() - w).abs()
        assert (error <= bound).all(), (format, n, k, (error / scales).max())


@pytest.mark.parametrize("format", [f for f in ALL if f.group_size in (32, 160, -1)], ids=str)
def test_search_is_never_worse_in_any_group(format):
    for seed, (n, k) in enumerate(SHAPES):
        w = dense(n, k, seed)
        plain, searched = group_errors(w, quantize(w, format)), group_errors(w, quantize(w, format, search=True))
        assert (searched <= plain * (1 + 1e-5) + 1e-20).all(), (n, k, (searched / plain).max())
        if k > 100:
            assert searched.sum() < plain.sum()


@pytest.mark.parametrize("format", ALL, ids=str)
def test_what_is_representable_is_kept(format):
    """Codes over the whole range with a power-of-two scale come back exactly, and so do zeros."""
    k = 2 * format.group_length(64)
    codes = torch.arange(k).remainder(16).float().expand(3, k)
    w = {"none": 0.25 * (codes - 8), "int": 0.25 * (codes - 5), "float": 0.25 * codes - 1.5}[format.zero]
    assert torch.equal(quantize(w, format).dequantize(), w)
    assert not quantize(torch.zeros(3, k), format).dequantize().any()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("format", ["int4_g64", "nf4", "mxfp4", "nvfp4"])
def test_a_transposed_weight_is_taken_without_a_warning(format):
    w = dense(128, 64)
    torch.set_warn_always(True)
    try:
        transposed = quantize(w.T, format)
    finally:
        torch.set_warn_always(False)
    assert torch.equal(transposed.dequantize(), quantize(w.T.contiguous(), format).dequantize())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_and_views(dtype):
    w = dense(8, 256).to(dtype)
    assert torch.equal(quantize(w.T.contiguous().T).dequantize(), quantize(w).dequantize())
    assert torch.equal(quantize(w.float()).dequantize(), quantize(w).dequantize())
    assert torch.equal(quantize(torch.nn.Parameter(w)).dequantize(), quantize(w).dequantize())


def test_blocks_of_rows_and_progress():
    k, n = 2**20, 10
    seen = []
    w = torch.randn(n, 1).expand(n, k)
    q = quantize(w, "int4_col", progress=lambda done, rows: seen.append((done, rows)))
    assert seen == [(4, 10), (8, 10), (10, 10)]
    assert q.n == n and torch.allclose(q.dequantize()[:, 0], w[:, 0], rtol=0.01)


@pytest.mark.parametrize(
    "weight, error, message",
    [
        ([[1.0]], TypeError, r"weight: wanted a floating-point tensor \(n, k\), got list"),
        (torch.zeros(4), TypeError, r"weight: wanted .* got torch.float32 \(4,\)"),
        (torch.zeros(4, 4, dtype=torch.int8), TypeError, "weight: wanted .* got torch.int8"),
        (torch.zeros(0, 4), ValueError, r"weight: wanted n >= 1 and k >= 1, got shape \(0, 4\)"),
        (torch.full((2, 4), torch.nan), ValueError, "weight: wanted finite values .* got nan at row 0, column 0"),
        (torch.full((2, 4), -torch.inf), ValueError, "weight: wanted finite values .* got -inf at row 0, column 0"),
        (torch.full((2, 4), 9000.0), ValueError, "at most 8188 for int4_.*, got 9000 at row"),
        (torch.full((2, 4), 1e300, dtype=torch.float64), ValueError, r"at most 8188 for int4_.*, got 1e\+300 at row"),
    ],
)
def test_refuses(weight, error, message):
    with pytest.raises(error, match=message):
        quantize(weight, "int4_g32_fp16")


def test_refuses_a_search_that_is_no_bool():
    with pytest.raises(TypeError, match="search: wanted a bool, got str 'mse'"):
        quantize(torch.ones(2, 32), search="mse")


def test_refuses_a_wrong_format():
    with pytest.raises(ValueError, match="format: wanted int4_g<group size>"):
        quantize(torch.zeros(2, 32), "int5")
    for format in (None, 128):
        with pytest.raises(TypeError, match="format: wanted a WeightFormat or its string, got"):
            quantize(torch.zeros(2, 32), format)


@pytest.mark.parametrize("format", [f for f in ALL if f.group_size == 64], ids=str)
def test_the_largest_weights_stay_finite(format):
    limit = format.largest_weight / 8
    w = torch.empty(4, 128).uniform_(-1, 1) * limit
    w[0], w[1], w[2, ::2], w[2, 1::2] = limit, -limit, limit, -limit
    q = quantize(w, format, search=True)
    assert q.dequantize().isfinite().all() and q.dequantize(format.scale_dtype).isfinite().all()
    assert ((q.dequantize() - w).abs() <= limit / 5).all()  # half a step is 1 / 16; the search cuts a few numbers off


def test_default_format():
    assert quantize(torch.randn(2, 128)).format == WeightFormat(128, "none", "bf16")


@pytest.mark.parametrize("name", ["int4_g32_e4m3", "int4_col_e4m3", "int4_g16_e4m3_row", "int4_g32_e8m0", "int4_g64"])
def test_a_search_is_never_worse(name):
    """For scales of channels too, where what counts is the error after the scales were folded."""
    g = torch.Generator().manual_seed(0)
    better = 0
    for seed in range(24):
        n, k = 4, (32, 96, 128)[seed % 3]
        w = torch.randn(n, k, generator=g) * torch.rand(n, 1, generator=g) ** 3
        plain, searched = (quantize(w, name, search=search).dequantize() for search in (False, True))
        errors = [(q - w).square().sum().item() for q in (plain, searched)]
        assert errors[1] <= errors[0] * (1 + 1e-5), (seed, errors)
        better += errors[1] < 0.99 * errors[0]
    assert better > 16


@pytest.mark.parametrize("name", ["int4_g32_e4m3", "int4_col_e4m3"])
def test_e4m3_scales_are_those_of_fold_scales(name):
    w = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    a, b = quantize(w, name), fold_scales(quantize(w, name.removesuffix("_e4m3")))[0]
    for x, y in zip(a.parts(), b.parts(), strict=True):
        assert (x is None and y is None) or torch.equal(x.float(), y.float())


@pytest.mark.parametrize("name", ["int4_g32_e8m0", "int4_g32_e4m3", "int4_g32_zint"])
def test_fold_scales_wants_scales_of_16_bits(name):
    with pytest.raises(ValueError, match="w: wanted a format without zero points and with 16-bit scales"):
        fold_scales(quantize(torch.randn(4, 64), name))
