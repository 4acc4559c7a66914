"""fp8 activations and e4m3 scales: what users call, on the CPU; the kernels are in conformance/."""

from __future__ import annotations

import pytest
import torch

import w4gemm
from reference import grouped_reference, linear_reference
from w4gemm import QuantizedWeight, W4Linear, WeightFormat, linear
from w4gemm.api.product import Product

N, K = 130, 384
FP8 = torch.float8_e4m3fn


@pytest.fixture
def w() -> QuantizedWeight:
    return w4gemm.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(0)))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 3, K, generator=torch.Generator().manual_seed(1))


def close(d: torch.Tensor, expected: torch.Tensor) -> None:
    assert (d.double() - expected).norm() < 4e-3 * expected.norm()


def test_quantized_and_multiplied(w, x):
    x8, scale = w4gemm.quantize_activations(x)
    for one in (w, w.repack(), w4gemm.fold_scales(w)[0]):
        d = linear(x8, one, token_scale=scale)
        assert d.dtype == torch.bfloat16 and d.shape == (2, 3, N)
        expected = linear_reference(x8.view(-1, K), one, token_scale=scale.view(-1)).view(2, 3, N)
        close(d, expected)
        assert torch.equal(linear(x8, one, token_scale=scale[..., None]), d)
    assert (linear(x8, w, token_scale=scale).float() - linear(x, w)).norm() < 0.04 * linear(x, w).norm()


def test_dtypes_of_the_result_and_the_bias(w, x):
    x8, bias = x.to(FP8), torch.randn(N)
    assert linear(x8, w, bias.bfloat16()).dtype == torch.bfloat16
    assert linear(x8, w, bias.half(), out_dtype=torch.float16).dtype == torch.float16
    assert linear(x8, w, bias.bfloat16(), out_dtype=torch.float32).dtype == torch.float32
    with pytest.raises(TypeError, match=r"bias: wanted torch.bfloat16 with fp8 x, got torch.float32"):
        linear(x8, w, bias)
    with pytest.raises(TypeError, match=r"out: wanted torch.bfloat16"):
        linear(x8, w, out=torch.empty(2, 3, N))


@pytest.mark.parametrize(
    "scale, error, message",
    [
        (
            torch.ones(2, 3, dtype=torch.float64),
            TypeError,
            r"token_scale: wanted torch.float32 \(2, 3\), got torch.float64",
        ),
        (torch.ones(6), ValueError, r"token_scale: wanted shape \(2, 3\), one number for each row of x"),
        (1.0, TypeError, r"token_scale: wanted torch.float32 \(2, 3\), got float"),
    ],
)
def test_bad_token_scale(w, x, scale, error, message):
    with pytest.raises(error, match=message):
        linear(x.to(FP8), w, token_scale=scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_bias_has_the_dtype_of_x_that_is_quantized(w, x, dtype, out_dtype, compiled):
    """Whatever dtype the result has."""
    w, x, bias = w.repack(activations="fp8"), x.view(-1, K).to(dtype), torch.randn(N).to(dtype)
    torch.compiler.reset()
    function = torch.compile(linear, fullgraph=True, backend="aot_eager") if compiled else linear
    d = function(x, w, bias, out_dtype=out_dtype)
    sums = linear(x, w, out_dtype=torch.float32)
    assert d.dtype == out_dtype
    close = 0.0 if out_dtype == torch.float32 else 4 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(d.float(), sums + bias.float(), rtol=close, atol=4 * close)
    stack, rows = w4gemm.QuantizedWeight.stack([w]), torch.tensor([0, len(x)], dtype=torch.int32)
    assert torch.equal(w4gemm.grouped_linear(x, stack, rows, bias[None], out_dtype=out_dtype), d)


def test_scales_that_are_a_column_of_others(w, x, device):
    x8, scales = x.to(device).to(FP8), torch.rand(2, 3, 4, device=device)
    one = w.to(device).repack("mma8" if device == "cuda" else None)
    d = linear(x8, one, token_scale=scales[..., 1])
    assert torch.equal(d, linear(x8, one, token_scale=scales[..., 1].clone()))


def test_no_gradients_to_scales(w, x):
    with pytest.raises(NotImplementedError, match="token_scale: requires grad, but gradients with fp8 act"):
        linear(x.to(FP8), w, token_scale=torch.ones(2, 3, requires_grad=True))
    layer = w4gemm.W4Linear.from_linear(torch.nn.Linear(64, 8), activations="fp8")
    with pytest.raises(NotImplementedError, match="^x and bias: requires grad, .* or train with activations None"):
        layer(torch.ones(2, 64, requires_grad=True))  # once x was told of quantize_activations, which nobody had called
    with pytest.raises(NotImplementedError, match="^bias: requires grad"):
        layer(torch.ones(2, 64))


def test_only_fp8_has_scales(w, x):
    with pytest.raises(TypeError, match=r"token_scale: wanted None for x of torch.float32"):
        linear(x, w, token_scale=torch.ones(2, 3))


def test_compiled_and_through_the_operator(w, x):
    x8, scale = w4gemm.quantize_activations(x)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x8, scale: linear(x8, w, token_scale=scale, activation="gelu"), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x8, scale), linear(x8, w, token_scale=scale, activation="gelu"))


@pytest.mark.parametrize("format", ["int4_g128", "int4_g32_e4m3"])
def test_experts(format):
    each = [w4gemm.quantize(torch.randn(N, K), format) for _ in range(3)]
    several, offsets = QuantizedWeight.stack(each), torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    x8, scale = w4gemm.quantize_activations(torch.randn(9, K))
    expected = grouped_reference(x8, several, offsets, token_scale=scale)
    close(w4gemm.grouped_linear(x8, several, offsets, token_scale=scale), expected)
    order = torch.randperm(9)
    back = torch.argsort(order)
    gathered = w4gemm.grouped_linear(
        x8.view(torch.uint8)[order].view(FP8), several, offsets, indices=back, token_scale=scale[order]
    )
    close(gathered, expected)


# --- e4m3 scales -----------------------------------------------------------------------------------------------------


def test_folding_keeps_the_codes_and_says_what_it_costs(w):
    for one in (w, w.repack("mma8"), QuantizedWeight.stack([w, w], layout="canonical")):
        folded, error = w4gemm.fold_scales(one)
        assert str(folded.format) == "int4_g128_e4m3" and folded.layout == one.layout
        before, after = one.parts(), folded.parts()
        assert torch.equal(before.codes, after.codes) and before.channels is None
        assert after.channels.shape == before.scales.shape[:-1] and after.scales.float().abs().max() == 56
        measured = (folded.dequantize() - one.dequantize()).norm() / one.dequantize().norm()
        assert error == pytest.approx(measured.item(), rel=1e-4) and 0.005 < error < 0.05


def test_folding_what_has_no_scale():
    zero = QuantizedWeight.from_codes(
        WeightFormat(), torch.randint(0, 16, (4, 256)), torch.zeros(4, 2, dtype=torch.bfloat16)
    )
    folded, error = w4gemm.fold_scales(zero)
    assert error == 0 and (folded.dequantize() == 0).all()


def every_scale() -> torch.Tensor:
    """All e4m3 that a weight may have, negative ones too."""
    bits = torch.arange(256, dtype=torch.uint8)
    return bits[bits.view(FP8).float().abs() <= 56].view(FP8)


def test_of_two_codes_that_share_a_selector_one_is_a_sum():
    """Premise of packing/codecs/integers_decode_fp8.py: each byte of the second is not less than that of the first, and
    the difference not more than 127, so that sums of four bytes at once carry nothing and its sign is 0."""
    scale = every_scale().float()[:, None]
    for first, second in ((-4, -8), (0, 4)):
        bytes = [(scale * torch.arange(v, v + 4)).to(FP8).view(torch.uint8).int() for v in (first, second)]
        difference = bytes[1] - bytes[0]
        assert difference.min() == 0 and 0 < difference.max() < 128


def every_number() -> tuple[QuantizedWeight, torch.Tensor]:
    """A weight with a row for each scale, with every code, and its e4m3."""
    scales = every_scale()
    codes = torch.arange(128, dtype=torch.uint8).repeat(len(scales), 1) % 16
    format, channels = WeightFormat.parse("int4_g128_e4m3"), torch.ones(len(scales))
    one = QuantizedWeight.from_codes(format, codes, scales[:, None], channels=channels)
    return one, (scales.float()[:, None] * (codes.float() - 8)).to(FP8)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [128, 200])
def test_every_code_with_every_scale_on_a_gpu(m):
    """The 16 numbers of each scale, read off one by one."""
    one, expected = every_number()
    x = torch.eye(m, 128).to("cuda", FP8)
    assert torch.equal(linear(x, one.to("cuda").repack("mma8"))[:128].cpu().float(), expected.float().T)


def test_folding_refuses(w):
    with pytest.raises(ValueError, match="w: wanted a format without zero points and with 16-bit scales, got .*_zint"):
        w4gemm.fold_scales(w4gemm.quantize(torch.randn(4, 128), "int4_g128_zint"))
    with pytest.raises(ValueError, match="got int4_g128_e4m3"):
        w4gemm.fold_scales(w4gemm.fold_scales(w)[0])
    with pytest.raises(TypeError, match="w: wanted a QuantizedWeight, got torch.float32"):
        w4gemm.fold_scales(torch.randn(4, 128))


def test_e4m3_parts_are_checked():
    format, codes = WeightFormat.parse("int4_g128_e4m3"), torch.zeros(4, 128, dtype=torch.uint8)
    scales, channels = torch.ones(4, 1).to(FP8), torch.ones(4)
    make = QuantizedWeight.from_codes
    assert make(format, codes, scales, channels=channels).parts().channels is not None
    with pytest.raises(ValueError, match=r"channels: int4_g128_e4m3 wants torch.float32 \(4,\), got NoneType"):
        make(format, codes, scales)
    with pytest.raises(ValueError, match="channels: int4_g128 has none, got torch.float32"):
        make(WeightFormat(), codes, scales.bfloat16(), channels=channels)
    with pytest.raises(ValueError, match="scales: wanted at most 56 in magnitude"):
        make(format, codes, (100 * torch.ones(4, 1)).to(FP8), channels=channels)
    with pytest.raises(ValueError, match="zero: wanted 'none' with e4m3 scales"):
        WeightFormat(128, "int", "e4m3")


def test_the_layouts_that_cannot_hold_it_say_so(w):
    folded = w4gemm.fold_scales(w)[0]
    with pytest.raises(ValueError, match="layout: mma16 cannot hold int4_g128_e4m3: .*mma8 layout"):
        folded.repack("mma16")
    assert folded.repack().layout == "canonical"  # what the CPU can read of it
    with pytest.raises(ValueError, match="layout: mma8 cannot hold int5_g32_zfloat: .*16-bit activations"):
        w4gemm.quantize(torch.randn(4, 64), "int5_g32_zfloat").repack("mma8")


def test_a_layer(w, x):
    folded = w4gemm.fold_scales(w)[0]
    layer = W4Linear.from_weight(folded)
    d = layer(x)
    assert torch.equal(d, linear(x, folded))
    other = W4Linear(K, N, bias=False, format="int4_g128_e4m3")
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), d) and set(layer.state_dict()) >= {"codes", "scales", "channels"}
    assert torch.equal(layer.half().weight.parts().channels, folded.parts().channels)


# --- 16-bit activations of a weight for fp8 --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_activations_are_quantized_on_the_way(w, x, dtype, monkeypatch):
    """Looks at what a kernel would be given, because none runs such a weight on the CPU."""
    seen = []
    monkeypatch.setattr(Product, "launch", lambda product, operands, m: seen.append((operands, product.epilogue)))
    x, bias, w = x.to(dtype), torch.randn(N).to(dtype), w.repack("mma8", activations="fp8")
    d = linear(x, w, bias)
    assert d.dtype == dtype and d.shape == (2, 3, N)
    ((operands, epilogue),) = seen
    x8, scale = w4gemm.quantize_activations(x.view(-1, K))
    assert torch.equal(operands.x.view(torch.uint8), x8.view(torch.uint8)) and torch.equal(
        operands.epilogue.token_scale, scale
    )
    assert operands.out.dtype == dtype and epilogue.token_scale and epilogue.result_dtype(FP8) == dtype
    with pytest.raises(TypeError, match=f"token_scale: wanted None for x of {dtype}, which is quantized here"):
        linear(x, w, token_scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["int4_g128", "int4_g128_e4m3"])
def test_wide_activations_on_a_gpu(w, x, format):
    """linear, a layer and experts quantize x themselves."""
    one = w if format == "int4_g128" else w4gemm.fold_scales(w)[0]
    packed, x = one.to("cuda").repack(activations="fp8"), x.to("cuda", torch.bfloat16)
    x8, scale = w4gemm.quantize_activations(x)
    expected = linear(x8, packed, token_scale=scale)
    assert torch.equal(linear(x, packed), expected)
    assert torch.equal(W4Linear.from_weight(packed)(x), expected)
    several, offsets = QuantizedWeight.stack([packed] * 2), torch.tensor([0, 2, 6], dtype=torch.int32, device="cuda")
    assert several.layout == "mma8"
    rows, scales = x8.view(-1, K), scale.view(-1)
    alone = w4gemm.grouped_linear(rows, several, offsets, token_scale=scales)
    assert torch.equal(w4gemm.grouped_linear(x.view(-1, K), several, offsets), alone)
