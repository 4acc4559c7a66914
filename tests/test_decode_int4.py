"""The decoders of int4 to bf16 and fp16, run here: every weight is its exact number, rounded once."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from ptx_interpreter import HALVES, run_ptx
from w4gemm.packing.codecs import INT4_MMA16
from w4gemm.packing.codecs.base import MMA16

CODES = torch.randint(0, 16, (64, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
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
    module = pytest.importorskip("w4gemm.packing.codecs.int4_decode")

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
    return module


def exact(u: int, scale: Fraction, zero: Fraction | None, rule: str) -> Fraction:
    """The number of a code."""
    if rule == "none":
        return scale * (u - 8)
    assert zero is not None
    return scale * (u - zero) if rule == "int" else scale * u + zero


@pytest.mark.parametrize("only_fma", [False, True], ids=["", "only_fma"])
@pytest.mark.parametrize("kind, scale_kind, zero", FORMS)
@pytest.mark.parametrize("subnormal", [False, True], ids=["", "subnormal"])
def test_weights_are_rounded_once(
    decode: Any, kind: str, scale_kind: str, zero: str, subnormal: bool, only_fma: bool
) -> None:
    if subnormal and (only_fma or not decode.SubnormalDecoder.decodes(kind, scale_kind, zero)):
        pytest.skip("another decoder's")
    decoder = (decode.SubnormalDecoder if subnormal else decode.Decoder)(kind, scale_kind, zero, only_fma)
    stored, wanted_half, g = HALVES[scale_kind], HALVES[kind], torch.Generator().manual_seed(2)
    words = (INT4_MMA16.code_words(CODES).flatten().long() & 0xFFFFFFFF).tolist()
    elements = MMA16.split(CODES).reshape(-1, 2, 2, 2).tolist()  # element col8 row8
    unit = Fraction(1) / Fraction(decoder.sum_scale)
    for i in range(0, 1024, 37):
        scales = [stored.bits(Fraction(x)) for x in (torch.randn(2, generator=g) * 0.02).tolist()]
        numbers = torch.randint(0, 16, (2,), generator=g) if zero == "int" else torch.randn(2, generator=g) * 0.1
        zeros = [stored.bits(Fraction(x)) for x in numbers.tolist()]
        both = [low | high << 16 for low, high in (scales, zeros)]
        prepared = decoder.prepare(tuple(both if zero != "none" else both[:1]), 0)
        found = decoder.decode((words[i],), prepared)
        for register, (col8, row8) in zip(found, itertools.product(range(2), range(2)), strict=True):
            scale, own_zero = (stored.number(bits[row8]) for bits in (scales, zeros))
            for element in range(2):
                value = exact(elements[i][element][col8][row8], scale, own_zero, zero)
                if zero == "float" and kind != scale_kind:  # formed in float32
                    value = Fraction(float(np.float32(float(value))))
                got = wanted_half.number(register >> 16 * element & 0xFFFF)
                assert got == wanted_half.number(wanted_half.bits(value * unit)), (i, col8, row8, element)
