"""The decoders of floats of 8 and 6 bits to bf16 and fp16, run here: every weight is its exact number, rounded once."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from ptx_interpreter import HALVES
from test_decode_integers import decode, lane_words, words_of_step
from w4gemm.core.elements import ELEMENTS
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.block import Block
from w4gemm.packing.codecs.base import MMA16, Codec, Decoding, WeightOperand
from w4gemm.packing.codecs.e2m1 import POWER_BIAS
from w4gemm.packing.codecs.floats import FLOAT_CODECS, FLOATS, MicroscalingCodec, WideFloatCodec

__all__ = ["decode"]
CODECS = [codec for codec in FLOAT_CODECS if codec.fragment is MMA16]


@pytest.fixture
def decode_floats(monkeypatch: pytest.MonkeyPatch, decode: Any) -> Any:
    """The decoders' modules, with the arithmetic of :func:`test_decode_integers.decode`."""
    floats = pytest.importorskip("w4gemm.packing.codecs.floats_decode")
    e2m1 = pytest.importorskip("w4gemm.packing.codecs.e2m1_decode")
    for module in (floats, e2m1):
        for name in ("asm", "Int32", "Float32", "pack_half2", "half_to_float", "to_float", "fma"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(decode, name))
    monkeypatch.setattr(e2m1, "repeat_half", decode.broadcast_half)
    monkeypatch.setattr(e2m1, "signed", lambda bits: bits)
    return floats


@pytest.mark.parametrize("exponent", [-14, -3])
@pytest.mark.parametrize("sum_scale", [False, True], ids=["", "sum_scale"])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_weights_are_rounded_once(decode_floats: Any, codec: Codec, kind: str, sum_scale: bool, exponent: int) -> None:
    """Scales of 2**exponent for the largest number, which an e8m0 scale of e5m2 is so much less than."""
    element, g = ELEMENTS[codec.element], torch.Generator().manual_seed(2)
    scale_kind = "e8m0" if isinstance(codec, MicroscalingCodec) else "f32"
    weight = WeightOperand(
        codec, kind, scale_kind, "none", codec.block(WeightFormat.parse(f"{codec.element}_g32_e8m0"))
    )
    decoder = codec.decoder(weight, Decoding(allow_sum_scale=sum_scale))
    legal = torch.tensor([code for code in range(2**codec.bits) if code not in element.refused_codes])
    codes = legal[torch.randint(0, len(legal), (64, 128), generator=g)].to(torch.uint8)
    lanes = lane_words(codec, codes)
    elements = MMA16.split(codes).reshape(-1, 4, 2, 2, 2).tolist()  # lane step element col8 row8
    power = exponent - int(np.log2(element.largest_value))
    exponents = (power, power + 2)  # of rows g and g + 8
    scales = [Fraction(1), Fraction(1)]
    scale_words: tuple[int, ...] = ()
    if isinstance(codec, MicroscalingCodec):
        fields = [127 + e + POWER_BIAS for e in exponents]
        assert all(0 <= field < 256 for field in fields)
        scale_words, scales = (fields[0] | fields[1] << 16,), [Fraction(2) ** e for e in exponents]
    elif isinstance(codec, WideFloatCodec):
        values = [np.float32(1.25 * 2.0**e) for e in exponents]
        scale_words, scales = tuple(int(v.view(np.uint32)) for v in values), [Fraction(float(v)) for v in values]
    half = HALVES[kind]
    for lane in range(0, len(lanes), 17):
        for step in range(4):
            words = words_of_step(codec, lanes[lane], step)
            registers = decoder.decode(words, decoder.prepare(scale_words, 0))
            for i, register in enumerate(registers):
                for e in range(2):
                    number = Fraction(element.values[elements[lane][step][e][i // 2][i % 2]]) * scales[i % 2]
                    stored = register >> 16 * e & 0xFFFF
                    exact = number / Fraction(decoder.sum_scale)
                    assert half.number(stored) == half.number(half.bits(exact))


@pytest.mark.parametrize("number", FLOATS.values(), ids=lambda number: number.name)
def test_each_bit_of_a_word_is_one_codes(number: Any) -> None:
    """Registers of both rows have all bits of a code, and turned words no bit twice."""
    for parts in number.registers:
        masks = [part.mask for part in parts]
        assert sum(masks) == number.size_mask | 0x8000 and len({*masks}) == len(masks)
    assert number.bits == ELEMENTS[number.name].bits and Block(number.bits).lane_words == 2 * number.bits
