"""The decoders of integers to bf16 and fp16, run here: every weight is its exact number, rounded once."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from ptx_interpreter import HALVES, run_ptx
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.block import LANES, Block
from w4gemm.packing.codecs import Codec
from w4gemm.packing.codecs.base import MMA16, Decoding, WeightOperand
from w4gemm.packing.codecs.integers import INTEGERS, HalfCodec
from w4gemm.weights.checks import check_range

CODECS = [codec for codec in INTEGERS if type(codec) is HalfCodec]
FORMS = list(itertools.product(("bf16", "f16"), ("bf16", "f16"), ("none", "int", "float")))


def test_halves_are_pytorchs() -> None:
    """The interpreter's numbers, rounding and overflow of the significand."""
    for kind, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        half = HALVES[kind]
        values = torch.randn(500, generator=torch.Generator().manual_seed(1)) * torch.exp2(torch.arange(500) % 40 - 30)
        for value in [*values.tolist(), 2.0**-24 * 1.5, 1 - 2.0**-13, 0.0]:
            bits = torch.tensor(value).to(dtype).view(torch.int16).item() & 0xFFFF
            assert half.bits(Fraction(value)) == bits or value == 0
            assert half.number(bits) == Fraction(torch.tensor(value).to(dtype).item())


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The decoders' module, with words as Python's integers and float32 as numpy's."""
    module = pytest.importorskip("w4gemm.packing.codecs.integers_decode")

    def pack(kind: str, low: np.float32, high: np.float32) -> int:
        return HALVES[kind].bits(Fraction(float(low))) | HALVES[kind].bits(Fraction(float(high))) << 16

    def half(kind: str, word: int, high: bool) -> np.float32:
        return np.float32(float(HALVES[kind].number(word >> 16 if high else word & 0xFFFF)))

    monkeypatch.setattr(module, "asm", lambda text, outputs, inputs, **_: run_ptx(text, len(outputs), inputs))
    monkeypatch.setattr(module, "Int32", lambda bits: bits & 0xFFFFFFFF)
    monkeypatch.setattr(module, "Float32", np.float32)
    monkeypatch.setattr(module, "pack_half2", pack)
    monkeypatch.setattr(module, "half_to_float", half)
    monkeypatch.setattr(module, "broadcast_half", lambda word, high: (word >> 16 if high else word & 0xFFFF) * 0x10001)
    monkeypatch.setattr(module, "hidden_constant", lambda word: word)
    monkeypatch.setattr(module, "to_float", lambda kind, word: np.array(word, np.uint32).view(np.float32)[()])
    monkeypatch.setattr(module, "fma", lambda x, y, z: np.float32(np.float64(x) * np.float64(y) + np.float64(z)))
    return module


def lane_words(codec: Codec, codes: torch.Tensor) -> list[list[int]]:
    """The code words of each lane of each half and strip."""
    words = (codec.code_words(codes).long() & 0xFFFFFFFF).view(8, -1)
    parts = words.split([LANES * segment.words for segment in Block(codec.bits).segments], 1)
    return torch.cat([part.reshape(8 * LANES, -1) for part in parts], 1).tolist()


def words_of_step(codec: Codec, words: list[int], step: int) -> tuple[int, ...]:
    """The words that a decoder takes, turned."""
    turned, at = [], 0
    for i, segment in enumerate(Block(codec.bits).segments):
        first, _ = Block.words_of_step(segment, step, 4)
        word, turn = words[at + first], codec.turns[i][step] if codec.turns else 0
        turned.append((word | word << 32) >> turn & 0xFFFFFFFF)
        at += segment.words
    return tuple(turned)


def exact(bits: int, u: int, scale: Fraction, zero: Fraction | None, rule: str) -> Fraction:
    """The number of a code."""
    if rule == "none":
        return scale * (u - 2 ** (bits - 1))
    assert zero is not None
    return scale * (u - zero) if rule == "int" else scale * u + zero


@pytest.mark.parametrize("only_fma", [False, True], ids=["", "only_fma"])
@pytest.mark.parametrize("sum_scale", [False, True], ids=["", "sum_scale"])
@pytest.mark.parametrize("kind, scale_kind, zero", FORMS)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_weights_are_rounded_once(
    decode: Any, codec: HalfCodec, kind: str, scale_kind: str, zero: str, sum_scale: bool, only_fma: bool
) -> None:
    bits, g = codec.bits, torch.Generator().manual_seed(2)
    weight = WeightOperand(codec, kind, scale_kind, zero, Block(bits))
    decoder = codec.decoder(weight, Decoding(only_fma, sum_scale))
    codes = torch.randint(0, 2**bits, (64, 128), dtype=torch.uint8, generator=g)
    stored, expected_half, lanes = HALVES[scale_kind], HALVES[kind], lane_words(codec, codes)
    elements = MMA16.split(codes).reshape(-1, 4, 2, 2, 2).tolist()  # lane step element col8 row8
    unit = Fraction(1) / Fraction(decoder.sum_scale)
    for i in range(0, 1024, 205):
        lane, step = divmod(i, 4)
        scales = [stored.bits(Fraction(x)) for x in (torch.randn(2, generator=g) * 0.02).tolist()]
        numbers = torch.randint(0, 2**bits, (2,), generator=g) if zero == "int" else torch.randn(2, generator=g) * 0.1
        zeros = [stored.bits(Fraction(x)) for x in numbers.tolist()]
        both = [low | high << 16 for low, high in (scales, zeros)]
        scale_words = tuple(both if zero != "none" else both[:1])
        words = words_of_step(codec, lanes[lane], step)
        weights = decoder.decode(words, decoder.prepare(scale_words, 0))
        numbers_alone = decoder.decode_exact(words, decoder.offsets(scale_words, 0))
        values = decoder.scales_and_zeros(scale_words)
        order = itertools.product(range(2), range(2))
        for register, number, (col8, row8) in zip(weights, numbers_alone, order, strict=True):
            scale, own_zero = (stored.number(bits[row8]) for bits in (scales, zeros))
            for element in range(2):
                u = elements[lane][step][element][col8][row8]
                value = exact(bits, u, scale, own_zero, zero)
                if zero == "float" and kind != scale_kind:  # formed in float32
                    value = Fraction(float(np.float32(float(value))))
                got = expected_half.number(register >> 16 * element & 0xFFFF)
                assert got == expected_half.number(expected_half.bits(value * unit)), (i, col8, row8, element)
                alone = expected_half.number(number >> 16 * element & 0xFFFF) * Fraction(decoder.exact_scale)
                assert alone == (u if zero == "float" else exact(bits, u, Fraction(1), own_zero, zero))
            own_scale, of_sums = values[row8]
            assert own_scale == scale
            assert of_sums is None if zero != "float" else of_sums == own_zero


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_largest_scales_without_zero_points(decode: Any, codec: HalfCodec, kind: str) -> None:
    """Up to 65504 / 2**(bits - 1), of fp16 scales: with u as factor they would be half of it."""
    bits = codec.bits
    middle = 2 ** (bits - 1)
    scale = torch.tensor(65504 / middle).half()
    scale = scale if scale * middle <= 65504 else torch.nextafter(scale, torch.zeros(()).half())
    check_range(WeightFormat(32, "none", "fp16", f"int{bits}"), scale.view(1, 1), None, None)
    with pytest.raises(ValueError, match=rf"not be finite \({middle} \* \|scale\|"):
        too_large = torch.nextafter(scale, torch.full((), torch.inf).half())
        check_range(WeightFormat(32, "none", "fp16", f"int{bits}"), too_large.view(1, 1), None, None)
    weight = WeightOperand(codec, kind, "f16", "none", Block(bits))
    decoder = codec.decoder(weight, Decoding(False, True))
    codes = torch.zeros(64, 128, dtype=torch.uint8)
    codes[:, 1::2] = 2**bits - 1
    words = words_of_step(codec, lane_words(codec, codes)[0], 0)
    both = (scale.view(torch.int16).item() & 0xFFFF) * 0x10001
    numbers = {
        float(HALVES[kind].number(register >> 16 * element & 0xFFFF)) * decoder.sum_scale
        for register in decoder.decode(words, decoder.prepare((both,), 0))
        for element in range(2)
    }
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    assert numbers == {float((q * scale.float()).to(dtype)) for q in (-middle, middle - 1)}


@pytest.mark.parametrize("zero", ["none", "int", "float"])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_largest_bf16_scales(decode: Any, codec: HalfCodec, zero: str) -> None:
    """Up to the largest that a weight may have, none becomes infinite when it is multiplied by 2**100."""
    bits = codec.bits
    format = WeightFormat(32, zero, "bf16", f"int{bits}")
    largest = torch.tensor(format.largest_weight / format.largest_factor).bfloat16()
    within = largest.double() * format.largest_factor <= format.largest_weight
    scale = largest if within else torch.nextafter(largest, torch.zeros(()).bfloat16())
    zeros = {"int": torch.zeros(1, 1, dtype=torch.uint8), "float": torch.zeros(1, 1).bfloat16()}.get(zero)
    check_range(format, scale.view(1, 1), zeros, None)
    weight = WeightOperand(codec, "bf16", "bf16", zero, Block(bits))
    decoder = codec.decoder(weight, Decoding(False, True))
    codes = torch.full((64, 128), 2**bits - 1, dtype=torch.uint8)
    words = words_of_step(codec, lane_words(codec, codes)[0], 0)
    scale_word = (scale.view(torch.int16).item() & 0xFFFF) * 0x10001
    both = (scale_word,) if zero == "none" else (scale_word, 0)
    value = exact(bits, 2**bits - 1, Fraction(scale.item()), Fraction(0), zero)
    for register in decoder.decode(words, decoder.prepare(both, 0)):
        for element in range(2):
            number = torch.tensor(register >> 16 * element & 0xFFFF).to(torch.int16).view(torch.bfloat16)
            assert number.double() * decoder.sum_scale == torch.tensor(float(value)).bfloat16().double()
