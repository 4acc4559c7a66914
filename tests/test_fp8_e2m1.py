"""4-bit floats beside fp8 activations: MXFP4 in e5m2, relative to a row's largest scale, and NVFP4 rounded to e4m3.
What can be run on the CPU, and every code of MXFP4 with every scale on a GPU; the kernels are in conformance/."""

from __future__ import annotations

import pytest
import torch

from ptx_interpreter import run_ptx
from reference import grouped_reference, linear_reference
from test_layouts import assert_same
from w4gemm import QuantizedWeight, W4Linear, WeightFormat, fold_scales, grouped_linear, linear, quantize
from w4gemm import quantize_activations as quantized
from w4gemm.core.elements import ELEMENTS
from w4gemm.packing.codecs import E2M1_MMA8, EXACT_BINADES, weight_operand
from w4gemm.packing.layouts import WeightComponents, layout_named

MXFP4, FOLDED = WeightFormat.parse("mxfp4"), WeightFormat.parse("e2m1_g16_e4m3")
FP8, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
LARGEST = 140
"""Exponent of the largest scale of ``spread``."""


def components(exponents: torch.Tensor) -> WeightComponents:
    """Random codes with scales of these bits, uint8 (n, groups)."""
    n, groups = exponents.shape
    codes = torch.randint(0, 16, (n, 32 * groups), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return WeightComponents(codes, exponents.to(torch.uint8).view(E8M0), None)


def spread(binades: int = 64, n: int = 70) -> QuantizedWeight:
    """Every row has every scale of so many binades, in an order of its own."""
    order = torch.rand(n, binades, generator=torch.Generator().manual_seed(0)).argsort(1)
    return QuantizedWeight.from_codes(MXFP4, *components(LARGEST - order)[:2])


def rounded_to_e5m2(w: QuantizedWeight) -> torch.Tensor:
    """float32: the weights as PyTorch rounds them to e5m2, the largest scale of ``spread`` being 2**13."""
    unit = 2.0 ** (LARGEST - 127 - 13)
    return (w.dequantize() / unit).to(E5M2).float() * unit


@pytest.mark.parametrize("n, k", [(1, 32), (70, 300), (130, 4096)])
def test_any_scales_are_lossless(n, k):
    """All of them in a row too: 0 is 2**-127, and the row's factor of small ones is subnormal."""
    exponents = torch.randint(0, 255, (n, -(-k // 32)), generator=torch.Generator().manual_seed(1))
    exponents[: n // 3] %= 16
    parts = components(exponents)
    parts = parts._replace(codes=parts.codes[:, :k].contiguous())
    layout = layout_named("mma8")
    tensors = layout.pack(parts, MXFP4)
    assert [(t.dtype, tuple(t.shape)) for t in tensors] == list(layout.shapes(MXFP4, n, k))
    assert_same(layout.unpack(tensors, MXFP4, n, k), parts)
    assert tensors[0].shape[-1] * 32 / (64 * 128) == 4.25, "bits of a weight"


def test_the_steps_of_the_decoder(monkeypatch):
    """Its instructions, run here on words of the layout, with the table's rows that it should find: each element is
    what PyTorch rounds to e5m2."""
    decode = pytest.importorskip("w4gemm.packing.codecs.e2m1_decode_fp8")
    for module in ("packing.codecs.e2m1_decode_fp8", "ptx.arithmetic"):
        monkeypatch.setattr(f"w4gemm.{module}.asm", lambda text, outs, inputs, **_: run_ptx(text, len(outs), inputs))
    powers = torch.exp2(13 - torch.arange(256.0))[:, None]
    table = (torch.tensor(ELEMENTS["e2m1"].values[:8]) * powers).to(E5M2).view(torch.uint8).tolist()
    rows = [int.from_bytes(bytes(row), "little") for row in table]
    seen = []

    def load_shared(address: int, count: int) -> tuple[int, int]:
        assert count == 2 and address % 8 == 0
        seen.append(address // 8)
        return rows[address // 8] & 0xFFFFFFFF, rows[address // 8] >> 32

    monkeypatch.setattr(decode, "load_shared", load_shared)
    exponents = torch.tensor([0, 1, 12, 28, 29, 30, 33, 254])[(torch.arange(64)[:, None] * 3 + torch.arange(4)) % 8]
    exponents[:, 0] = 0
    parts = components(254 - exponents)
    (blocks, _), decoder = layout_named("mma8").pack(parts, MXFP4), decode.E2m1Fp8Decoder()
    words = (blocks[0, 0].long() & 0xFFFFFFFF).tolist()
    numbers = (254 - exponents.repeat_interleave(32, 1) - 127).double().exp2() * MXFP4.element_rule.numbers(parts.codes)
    expected = (numbers * 2.0 ** (127 + 13 - 254)).to(torch.float32).to(E5M2).view(torch.uint8)
    for strip, lane, step in ((s, i, t) for s in range(4) for i in range(0, 32, 3) for t in range(4)):
        g, q = divmod(lane, 4)
        first = ((step // 2 * 4 + strip) * 32 + lane) * 4 + step % 2 * 2
        scale_word = words[1024 + (step // 2 * 4 + strip) * 8 + g]
        prepared = decoder.prepare((scale_word,), 0, step % 2)
        actual = decoder.decode(tuple(words[first : first + 2]), prepared)
        for register, (col16, row8) in zip(actual, ((0, 0), (0, 1), (1, 0), (1, 1)), strict=True):
            row, column = 16 * strip + 8 * row8 + g, 32 * step + 16 * col16 + 4 * q
            assert list(register.to_bytes(4, "little")) == expected[row, column : column + 4].tolist()
    assert {0, 1, 28, 29, 254} <= set(seen)


def test_29_binades_are_exact():
    """All numbers times these powers of two, by PyTorch's e5m2."""
    sizes = torch.tensor(MXFP4.element_rule.values)
    exact = [d for d in range(64) if torch.equal((sizes * 2.0 ** (13 - d)).to(E5M2).float(), sizes * 2.0 ** (13 - d))]
    assert exact == list(range(EXACT_BINADES))
    assert torch.finfo(E5M2).max < 6 * 2.0**14


def test_folding_says_what_fp8_rounds():
    w = spread(EXACT_BINADES)
    folded, error = fold_scales(w)
    assert error == 0 and str(folded.format) == "e2m1_g32_e8m0"
    assert_same(folded.parts(), w.parts())
    w = spread()
    for one in (w, w.repack("mma8", activations="fp8"), QuantizedWeight.stack([w, w], layout="canonical")):
        folded, error = fold_scales(one)
        assert (folded.layout, folded.activations) == (one.layout, one.activations)
        expected = rounded_to_e5m2(w)
        assert torch.equal(folded.dequantize(), expected.expand(folded.shape))
        measured = (expected.double() - w.dequantize().double()).norm() / w.dequantize().double().norm()
        assert 0 < error < 2**-28 and error == pytest.approx(measured.item(), rel=1e-3)
    assert fold_scales(folded)[1] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 2048])
def test_every_code_with_every_scale_on_a_gpu(m):
    """The numbers of 64 binades of scales, read off one by one: exact to the 29th, then as e5m2 rounds."""
    w = spread()
    x = torch.eye(w.k)[:m].to("cuda", FP8)
    packed = w.to("cuda").repack("mma8")
    d = torch.cat([linear(part, packed, out_dtype=torch.float32) for part in torch.eye(w.k).to("cuda", FP8).split(m)])
    assert torch.equal(d.T.cpu(), rounded_to_e5m2(w)) and x.shape[0] == m


def test_products_on_the_cpu():
    dense, x = torch.randn(72, 320), torch.randn(9, 320)
    w = quantize(dense, "mxfp4")
    x8, scale = quantized(x)
    d = linear(x8, w.repack(), token_scale=scale)
    expected = linear_reference(x8, w, token_scale=scale)
    assert (d.double() - expected).norm() < 4e-3 * expected.norm()
    layer = W4Linear.from_weight(w.repack(activations="fp8"))
    assert torch.equal(layer(x), linear(x8, w, token_scale=scale, out_dtype=torch.float32))
    several, offsets = QuantizedWeight.stack([w, w.repack()]), torch.tensor([0, 4, 9], dtype=torch.int32)
    expected = grouped_reference(x8, several, offsets, token_scale=scale)
    assert (grouped_linear(x8, several, offsets, token_scale=scale) - expected).norm() < 4e-3 * expected.norm()


def test_one_packed_weight_splits_and_joins():
    w = spread(16, 128).repack("mma8")
    assert torch.equal(w.shard(1, 1, 2).dequantize(), w.dequantize()[:, 256:])
    assert torch.equal(w.shard(0, 1, 2).dequantize(), w.dequantize()[64:])
    both = QuantizedWeight.interleave(w, w)
    assert both.layout == "mma8" and torch.equal(both.dequantize()[1::2], w.dequantize())


def test_what_a_kernel_is_compiled_for():
    operand = weight_operand(MXFP4, FP8)
    assert (operand.kind, operand.decoded, operand.scale) == ("e4m3", "e5m2", "e8m0")
    assert operand.channels and not MXFP4.has_channels and operand.codec is E2M1_MMA8
    assert operand.block.words * 32 / (64 * 128) == 4.25


@pytest.mark.parametrize("name", ["nvfp4", "e2m1_g32"])
def test_other_scales_are_refused(name):
    w = quantize(torch.randn(8, 64), name)
    with pytest.raises(ValueError, match=r"fp8 activations take e2m1 with e8m0 scales.*16-bit activations"):
        w.repack("mma8")


# --- NVFP4 -----------------------------------------------------------------------------------------------------------


def every_scale() -> QuantizedWeight:
    """NVFP4 whose rows have every code beside every scale that is finite, in an order of its own."""
    scales = torch.arange(256, dtype=torch.uint8).view(FP8)
    scales = scales[scales.float().isfinite()]
    order = torch.rand(16, len(scales), generator=torch.Generator().manual_seed(0)).argsort(1)
    codes = torch.arange(16, dtype=torch.uint8).repeat(16, len(scales))
    channels = torch.exp2(torch.arange(16) - 8.0)
    return QuantizedWeight.from_codes(WeightFormat.parse("nvfp4"), codes, scales[order], channels=channels)


def test_products_of_nvfp4_are_rounded_once():
    """Each product of a scale and a number is the nearest e4m3 of 8 times that, or half of the least one away."""
    w = every_scale()
    folded, error = fold_scales(w)
    assert folded.format == FOLDED and 0.015 < error < 0.025
    parts, before = folded.parts(), w.parts()
    assert torch.equal(parts.codes, before.codes) and torch.equal(parts.channels, 8 * before.channels)
    products = before.scales.float().repeat_interleave(16, 1) * MXFP4.element_rule.numbers(before.codes)
    actual = folded.dequantize() / parts.channels[:, None]
    assert torch.equal(actual, actual.to(FP8).float())
    nearest, expected = (products / 8).to(FP8).float(), products / 8
    small = before.scales.float().repeat_interleave(16, 1).abs() < 8 * 2.0**-6  # whose eighths are subnormal
    assert torch.equal(actual[~small], nearest[~small])
    assert (actual - expected)[small].abs().max() <= 2.0**-10 * 6


@pytest.mark.parametrize("largest", [448.0, 74.0, 2.0**-7])
def test_rows_of_any_scales_use_the_range_of_e4m3(largest):
    w = quantize(torch.randn(8, 256), "nvfp4")
    parts = w.parts()
    scales = (parts.scales.float() * (largest / 448)).to(FP8)
    w = QuantizedWeight.from_codes(w.format, parts.codes, scales, channels=parts.channels)
    folded, error = fold_scales(w)
    assert error < 0.03 and torch.log2(folded.parts().channels / parts.channels).frac().eq(0).all()
    most = (folded.dequantize().abs() / folded.parts().channels[:, None]).max().item()
    assert 112 < most <= 448


def test_folded_nvfp4_is_packed_without_loss():
    folded, _ = fold_scales(every_scale())
    packed = folded.repack("mma8")
    assert torch.equal(packed.dequantize(), folded.dequantize())
    assert torch.equal(packed.repack("canonical").dequantize(), folded.dequantize())
    operand = weight_operand(FOLDED, FP8)
    assert (operand.decoded, operand.channels, operand.block.words * 32 / (64 * 128)) == ("e4m3", True, 4.5)
    experts, error = fold_scales(QuantizedWeight.stack([quantize(torch.randn(64, 128), "nvfp4")] * 2))
    assert str(experts.format) == "e2m1_g16_e4m3" and error < 0.03


def test_the_steps_of_the_folded_decoder(monkeypatch):
    """Its instructions, run here on words of the layout."""
    decode = pytest.importorskip("w4gemm.packing.codecs.e2m1_decode_fp8")
    for module in ("packing.codecs.e2m1_decode_fp8", "ptx.arithmetic"):
        monkeypatch.setattr(f"w4gemm.{module}.asm", lambda text, outs, inputs, **_: run_ptx(text, len(outs), inputs))
    values = torch.tensor(ELEMENTS["e2m1"].values[:8]) * torch.arange(128, dtype=torch.uint8).view(FP8).float()[:, None]
    rows = [int.from_bytes(bytes(row), "little") for row in values.clamp(max=448).to(FP8).view(torch.uint8).tolist()]
    monkeypatch.setattr(
        decode, "load_shared", lambda address, count: (rows[address // 8] & 0xFFFFFFFF, rows[address // 8] >> 32)
    )
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (64, 128), generator=g).to(torch.uint8)
    scales = (torch.rand(64, 8, generator=g) * 60 - 30).to(FP8)
    w = QuantizedWeight.from_codes(FOLDED, codes, scales, channels=torch.ones(64)).repack("mma8")
    expected, decoder = w.dequantize().to(FP8).view(torch.uint8), decode.E2m1FoldedDecoder(halves=True)
    words = (w.tensors[0][0, 0].long() & 0xFFFFFFFF).tolist()
    for strip, lane, step in ((s, i, t) for s in range(4) for i in range(0, 32, 3) for t in range(4)):
        row8s, q = divmod(lane, 4)
        first = ((step // 2 * 4 + strip) * 32 + lane) * 4 + step % 2 * 2
        scale_word = words[1024 + (step * 4 + strip) * 8 + row8s]
        actual = decoder.decode(tuple(words[first : first + 2]), decoder.prepare((scale_word,), 0))
        for register, (col16, row8) in zip(actual, ((0, 0), (0, 1), (1, 0), (1, 1)), strict=True):
            row, column = 16 * strip + 8 * row8 + row8s, 32 * step + 16 * col16 + 4 * q
            bits = torch.tensor(list(register.to_bytes(4, "little")), dtype=torch.uint8)
            assert torch.equal(bits.view(FP8).float(), expected[row, column : column + 4].view(FP8).float())


def test_products_of_folded_nvfp4_on_the_cpu():
    x = torch.randn(9, 320)
    folded, _ = fold_scales(quantize(torch.randn(72, 320), "nvfp4"))
    x8, scale = quantized(x)
    expected = linear_reference(x8, folded, token_scale=scale)
    d = linear(x8, folded.repack(), token_scale=scale)
    assert (d.double() - expected).norm() < 4e-3 * expected.norm()
