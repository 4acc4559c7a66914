"""MXFP4 and NVFP4: the 4-bit float e2m1 with powers of two for each 32, or with e4m3 for each 16 and a factor a row."""

from __future__ import annotations

import pytest
import torch

from ptx_interpreter import run_ptx
from test_layouts import assert_same
from w4gemm import QuantizedWeight, WeightFormat, linear, quantize
from w4gemm.core.elements import ELEMENTS
from w4gemm.packing.codecs import MMA16, MXFP4_MMA16, codec_for
from w4gemm.tuning.random_weight import random_weight

NAMES = ("mxfp4", "nvfp4")
E2M1 = ELEMENTS["e2m1"]


def test_mxfp4_and_nvfp4_are_names_of_formats():
    assert str(WeightFormat.parse("mxfp4")) == "e2m1_g32_e8m0" and str(WeightFormat.of("nvfp4")) == "e2m1_g16_e4m3_row"
    assert WeightFormat.parse("mxfp4") == WeightFormat(32, "none", "e8m0", "e2m1")
    with pytest.raises(ValueError, match="format: wanted .* mxfp4, nvfp4, nf4, .*; got 'nf5'; nearest is 'nf4'"):
        WeightFormat.parse("nf5")


def test_numbers_of_e2m1_and_their_codes():
    codes = torch.arange(16)
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert E2M1.numbers(codes).tolist() == sizes + [-v for v in sizes]
    assert E2M1.padding_code == 0 and E2M1.symmetric and not ELEMENTS["int4"].symmetric
    codes[8] = 0  # -0 is never the nearest
    assert torch.equal(E2M1.nearest(E2M1.numbers(torch.arange(16))), codes.float())


def test_the_nearest_of_two_is_the_even_one():
    """The mantissa's bit of the result is 0, as in IEEE 754."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert E2M1.numbers(E2M1.nearest(middles)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert E2M1.numbers(E2M1.nearest(-middles)).tolist() == [0, -1, -1, -2, -2, -4, -4]
    assert E2M1.nearest(torch.tensor([1e9, -1e9, -0.0, -0.2])).tolist() == [7, 15, 0, 0]


def test_quantized_scales_are_positive():
    w = quantize(-torch.rand(8, 64) - 1, "nvfp4")
    assert (w.parts().scales.float() > 0).all() and (w.dequantize() < 0).all()


def test_quantize_finds_what_was_quantized():
    for name in NAMES:
        w = random_weight(WeightFormat.parse(name), 24, 96).dequantize()
        for search in (False, True):
            again = quantize(w, name, search=search).dequantize()
            assert (again - w).norm() < (1e-6 if name == "mxfp4" else 0.06) * w.norm()


def e8m0(*bits: int) -> torch.Tensor:
    return torch.tensor([bits], dtype=torch.uint8).view(torch.float8_e8m0fnu)


def test_e8m0_limits():
    codes = torch.full((1, 64), 7)
    with pytest.raises(ValueError, match=r"scales: the weights of 1 groups would not be finite.*row 0, group 1"):
        QuantizedWeight.from_codes("mxfp4", codes, e8m0(127, 255))
    with pytest.raises(ValueError, match="would not be finite .6 . .scale. .* must be at most 2.147"):
        QuantizedWeight.from_codes("mxfp4", codes, e8m0(127, 156))
    w = QuantizedWeight.from_codes("mxfp4", codes, e8m0(0, 155))
    assert w.dequantize()[0, [0, -1]].tolist() == [6 * 2.0**-127, 6 * 2.0**28]
    assert not QuantizedWeight.from_codes("mxfp4", 0 * codes, e8m0(0, 0)).dequantize().any()


def test_nvfp4_scales_of_both_signs():
    codes = torch.arange(16).repeat(1, 4)
    scales = torch.tensor([[1.5, -1.5, 0.0, -448.0]]).to(torch.float8_e4m3fn)
    w = QuantizedWeight.from_codes("nvfp4", codes, scales, channels=torch.tensor([0.5]))
    assert w.dequantize().view(4, 16)[:, 7].tolist() == [4.5, -4.5, 0, -1344]  # of code 7, which is 6
    assert torch.equal(linear(torch.eye(64), w).T, w.dequantize())
    nan = (scales.float() * torch.nan).to(scales.dtype)
    with pytest.raises(ValueError, match="scales: wanted at most 448 in magnitude and no NaN"):
        QuantizedWeight.from_codes("nvfp4", codes, nan, channels=torch.tensor([0.5]))


@pytest.mark.parametrize("kind, dtype, power", [("bf16", torch.bfloat16, 126), ("f16", torch.float16, 14)])
def test_decoder(monkeypatch, kind, dtype, power):
    """The decoder's instructions, run here, put each element's bits where they are its number times a power of two."""
    decode_e2m1 = pytest.importorskip("w4gemm.packing.codecs.e2m1_decode")
    monkeypatch.setattr(decode_e2m1, "asm", lambda text, outputs, inputs, **_: run_ptx(text, len(outputs), inputs))
    decoder = decode_e2m1.E2m1Decoder(kind, "e8m0", "none")
    codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = MXFP4_MMA16.code_words(codes).flatten()
    elements = MMA16.split(codes).reshape(-1, 2, 2, 2)  # element col8 row8
    for i in range(0, 1024, 5):
        registers = decoder._numbers(int(words[i]) & 0xFFFFFFFF)
        halves = torch.tensor([[r & 0xFFFF, r >> 16] for r in registers], dtype=torch.int32).short().view(dtype)
        numbers = E2M1.numbers(elements[i]).permute(1, 2, 0).reshape(4, 2)
        assert torch.equal(halves.double() * 2.0**power, numbers.double())


def test_stored_scales():
    """One shift makes a number of each: of the exponent of a bf16, of the upper bits of an fp16."""
    powers = e8m0(*range(156))
    fields = codec_for(WeightFormat.parse("mxfp4"), MMA16).stored_scales(powers)
    numbers = (fields.int() << 7).short().view(torch.bfloat16).double() * 2.0**-99
    assert torch.equal(numbers, torch.exp2(torch.arange(156).double() - 127)[None])
    scales = torch.arange(127, dtype=torch.uint8)[None].view(torch.float8_e4m3fn)
    fields = codec_for(WeightFormat.parse("nvfp4"), MMA16).stored_scales(scales)
    assert torch.equal((fields << 7).view(torch.float16).float(), scales.float()) and int(fields.max()) < 256


@pytest.mark.parametrize("name", NAMES)
def test_packed(name):
    """Scales of both signs and 0: the packed weight has the same numbers, one without them the same parts too."""
    format = WeightFormat.parse(name)
    for signed in (False, True):
        w = random_weight(format, 70, 176, signed=signed)
        packed = w.repack("mma16")
        assert torch.equal(packed.dequantize(), w.dequantize())
        assert_same(packed.repack("canonical").repack("mma16").parts(), packed.parts())
        if not signed or name == "mxfp4":
            assert_same(packed.parts(), w.parts())
    bits = 8 * packed.tensors[0].numel() * 4 / (128 * 256)
    assert bits == (4.25 if name == "mxfp4" else 4.5)
