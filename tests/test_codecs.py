"""Codecs: each is lossless and has a decoder, and another element needs no other host code."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from test_layouts import assert_same, random_parts
from w4gemm import WeightFormat, linear, quantize
from w4gemm.core import formats
from w4gemm.core.formats import ELEMENTS, Element
from w4gemm.packing import codecs
from w4gemm.packing.codecs import CODECS, INT4_MMA16, MMA8, MMA16, Bits, WeightOperand, codec_for, refusal
from w4gemm.packing.layouts import layout_named

SQUARES = Element("squares", tuple(float(v * abs(v)) for v in (0, 1, 2, 3, 4, 5, 6, -1, -2, -3, -4, -5, -6, -7, 7, 8)))


@pytest.fixture
def squares(monkeypatch) -> WeightFormat:
    """A format of another element: a table of 16 numbers, its nibbles in another order."""
    codec = dataclasses.replace(
        INT4_MMA16,
        name="squares_mma16",
        element="squares",
        zeros=("none",),
        stored=tuple(range(15, -1, -1)),
        bits=tuple(Bits(p, 15, 4 * (7 - p)) for p in range(8)),
    )
    monkeypatch.setitem(ELEMENTS, "squares", SQUARES)
    monkeypatch.setattr(codecs, "CODECS", (*CODECS, codec))
    return WeightFormat(32, element="squares")


def test_another_element(squares):
    w = torch.randn(70, 200, generator=torch.Generator().manual_seed(0))
    for search in (False, True):
        q = quantize(w, squares, search=search)
        assert (q.dequantize() - w).norm() < 0.15 * w.norm()
    packed = q.repack("mma16")
    assert_same(packed.parts(), q.parts())
    assert torch.equal(packed.dequantize(), q.dequantize())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        on_cpu = q.repack()
        assert on_cpu.layout == "canonical"
        assert torch.equal(linear(torch.eye(200, dtype=dtype), on_cpu).T, q.dequantize(dtype))


def test_padding_is_the_code_of_zero(squares):
    assert squares.element_rule.padding_code == 0
    parts = random_parts(squares, 5, 40)
    (blocks,) = layout_named("mma16").pack(parts, squares)
    codec = codec_for(squares, MMA16)
    assert not codec.codes_of(blocks[:, :, :1024])[5:].any()
    assert not codec.codes_of(blocks[:, :, :1024])[:, 40:].any()


def test_another_element_has_no_zero_points(squares):
    with pytest.raises(ValueError, match="zero: wanted 'none' beside squares elements, got 'int'"):
        WeightFormat(32, "int", element="squares")
    assert "no decoder of squares with bf16 scales" in refusal(squares, MMA8)
    with pytest.raises(ValueError, match="format: there is no decoder of squares"):
        WeightOperand.of(squares, torch.float8_e4m3fn)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_codes_are_lossless(codec):
    codes = torch.arange(64 * 128, dtype=torch.int64).mul(7).add(3).remainder(16).to(torch.uint8).view(64, 128)
    words = codec.code_words(codes)
    assert words.shape == (1, 1, 1024) and torch.equal(codec.codes_of(words), codes)
    masks = [bits.mask << bits.shift for bits in codec.bits]
    assert sum(masks) == 2**32 - 1, "each bit of a word once"


def test_each_codec_has_a_decoder():
    decoders = pytest.importorskip("w4gemm.kernels.device.decoders")
    assert set(decoders._DECODERS) == set(CODECS)


def test_each_format_has_one_codec():
    for element, zero, scale in ((e, z, s) for e in ELEMENTS for z in formats.ZEROS for s in formats.SCALES):
        try:
            format = WeightFormat(32, zero, scale, element)
        except ValueError:
            continue
        for fragment in (MMA16, MMA8):
            held = [codec for codec in CODECS if codec.fragment is fragment and codec.holds(format)]
            assert len(held) <= 1 and bool(held) != bool(refusal(format, fragment)), format
