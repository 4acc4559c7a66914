"""The decoders of integers to e4m3, run here: their instructions on words of the layout, the rows of their tables."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

from ptx_interpreter import run_ptx
from w4gemm.packing.block import Block
from w4gemm.packing.codecs import CODECS, INT4_MMA8, INT4_MMA8_FLOATS, INT4_MMA8_FOLDED, INT4_MMA8_ZEROS, Codec
from w4gemm.packing.codecs.base import MMA8

E4M3 = torch.float8_e4m3fn
SOME = slice(0, None, 7)
"""Every seventh word."""
CODES = torch.randint(0, 16, (64, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def e4m3(numbers: torch.Tensor) -> torch.Tensor:
    """The bits of the nearest numbers."""
    return numbers.clamp(-448, 448).to(E4M3).view(torch.uint8)


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The decoders' module, with Python's integers and floats in the place of the device's."""
    module = pytest.importorskip("w4gemm.packing.codecs.integers_decode_fp8")

    def run(text: str, outputs: list[Any], inputs: list[int], **_: Any) -> tuple[int, ...]:
        return run_ptx(text, len(outputs), [word & 0xFFFFFFFF for word in inputs])

    monkeypatch.setattr(module, "asm", run)
    monkeypatch.setattr(module, "Int32", int)
    monkeypatch.setattr(module, "Float32", float)
    monkeypatch.setattr(module, "hidden_constant", int)
    monkeypatch.setattr(module, "cutlass", SimpleNamespace(range_constexpr=range, max=max, min=min))
    monkeypatch.setattr(module, "_float_of_e4m3", lambda bits: float(torch.tensor(bits).byte().view(E4M3)))
    monkeypatch.setattr(module, "pack_e4m3", lambda values: word(e4m3(torch.tensor(values))))
    for name in ("_differences", "_scaled_codes"):
        monkeypatch.setattr(module, name, as_written(getattr(module, name)))
    return module


def as_written(jitted: Any) -> FunctionType:
    """A device function in Python: CuTe DSL replaces the code of one that was compiled in this process."""
    function = jitted.__wrapped__
    return FunctionType(getattr(function, "_original_code", function.__code__), function.__globals__)


def word(bytes_: torch.Tensor) -> int:
    """Four bytes as a word."""
    return int.from_bytes(bytes(bytes_.tolist()), "little")


@functools.cache
def all_words(codec: Codec) -> torch.Tensor:
    return codec.code_words(CODES).flatten()


def decoded(codec: Codec, row: Any, some: slice = SOME) -> torch.Tensor:
    """Return uint8 (words, col16, i): some code words of a block, decoded by ``row``."""
    words = [int(w) & 0xFFFFFFFF for w in all_words(codec)[some]]
    return torch.tensor([[list(r.to_bytes(4, "little")) for r in row(w)] for w in words], dtype=torch.uint8)


def codes_of_words(some: slice = SOME) -> torch.Tensor:
    """The codes of the same words (words, col16, i)."""
    return MMA8.split(CODES).reshape(-1, 2, 4)[some].int()


def test_signed_codes(decode: Any) -> None:
    decoder = decode.Fp8Decoder("bf16")
    actual = decoded(INT4_MMA8, lambda w: decoder._row(w, None))
    assert torch.equal(actual, e4m3((codes_of_words() - 8) * 2.0**-8))


def test_codes_beside_float_zero_points(decode: Any) -> None:
    decoder = decode.PlainDecoder("bf16")
    actual = decoded(INT4_MMA8_FLOATS, lambda w: decoder._row(w, None))
    assert torch.equal(actual, e4m3(codes_of_words() / decoder.factor))


def registers_of_steps(codec: Codec, decoder: Any, prepared: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Some steps of a block of CODES of fewer or more bits than four, its words turned as a kernel turns them: what is
    decoded and the codes, by register and byte."""
    bits = codec.bits
    codes = CODES % 2**bits if bits < 4 else CODES * 2 + CODES.flip(1) % 2
    strips = codec.code_words(codes).view(-1, 32 * bits)
    segments = Block(bits).segments
    loads = strips.split([32 * segment.words for segment in segments], 1)
    parts = [part.view(-1, 32, segment.words) for part, segment in zip(loads, segments, strict=True)]
    lanes = MMA8.split(codes).view(-1, 32, 2, 2, 2, 4)
    for strip, lane, step in ((0, 0, 0), (1, 31, 1), (5, 17, 0), (7, 6, 1)):
        words: list[int] = []
        for i, (part, segment) in enumerate(zip(parts, segments, strict=True)):
            first, count = Block.words_of_step(segment, step, 2)
            turn = codec.turns[i][step] if codec.turns else 0
            stored = [int(w) & 0xFFFFFFFF for w in part[strip, lane, first : first + count]]
            words += [(w >> turn | w << 32 - turn) & 0xFFFFFFFF for w in stored]
        registers = [list(r.to_bytes(4, "little")) for r in decoder.decode(tuple(words), prepared)]
        of_registers = lanes[strip, lane, step].transpose(0, 1).reshape(4, 4).int()  # row8 + 2 * col16, i
        yield torch.tensor(registers, dtype=torch.uint8), of_registers


def codec_of(bits: int, zero: str) -> Codec:
    (codec,) = (
        c for c in CODECS if c.fragment is MMA8 and c.element == f"int{bits}" and zero in c.zeros and "bf16" in c.scales
    )
    return codec


@pytest.mark.parametrize("bits, unit", [(2, 2.0**-8), (3, 2.0**-8), (5, 2.0**-9)])
def test_signed_codes_of_other_widths(decode: Any, bits: int, unit: float) -> None:
    decoder = decode.FiveBitDecoder("bf16") if bits == 5 else decode.NarrowDecoder("bf16", bits)
    assert decoder.factor * unit == 1
    for registers, codes in registers_of_steps(codec_of(bits, "none"), decoder, decoder.prepare((), 0)):
        assert torch.equal(registers, e4m3((codes - 2 ** (bits - 1)) * unit))


@pytest.mark.parametrize("bits", [2, 3])
def test_codes_of_fewer_bits_beside_float_zero_points(decode: Any, bits: int) -> None:
    decoder = decode.NarrowDecoder("bf16", bits, plain=True)
    for registers, codes in registers_of_steps(codec_of(bits, "float"), decoder, decoder.prepare((), 0)):
        assert torch.equal(registers, e4m3(codes / decoder.factor))


@pytest.mark.parametrize("bits", [2, 3])
def test_codes_of_fewer_bits_beside_zero_points(decode: Any, bits: int) -> None:
    decoder = decode.NarrowTableDecoder("bf16", bits)
    rows = [tuple(decoder.table_word(zero, i) for i in range(2**bits // 4)) for zero in range(2**bits)]
    for low, high in itertools.product(range(2**bits), repeat=2):
        for registers, codes in registers_of_steps(codec_of(bits, "int"), decoder, (rows[low], rows[high])):
            zeros = torch.tensor([low, high, low, high])[:, None]
            assert torch.equal(registers.view(E4M3).float(), (codes - zeros) * 2.0**-8)


@pytest.mark.parametrize("zero", range(16))
def test_codes_beside_zero_points(decode: Any, zero: int) -> None:
    decoder = decode.TableDecoder("bf16")
    table_row = [decoder.table_word(zero, i) for i in range(4)]
    actual = decoded(INT4_MMA8_ZEROS, lambda w: decoder._row(w, table_row))
    expected = e4m3((codes_of_words() - zero) * 2.0**-8)
    assert torch.equal(actual.view(E4M3).float(), expected.view(E4M3).float())


def test_codes_times_e4m3_scales(decode: Any) -> None:
    """Every one that a weight may have, each with other words."""
    decoder = decode.FoldedDecoder("e4m3")
    for bits in torch.arange(256).byte():
        scale, some = bits.view(E4M3).float(), slice(int(bits) % 49, None, 49)
        if not scale.abs() <= 56:
            continue
        table_row = [decoder.table_word(int(bits), i) & 0xFFFFFFFF for i in range(4)]
        actual = decoded(INT4_MMA8_FOLDED, lambda w, row=table_row: decoder._row(w, row), some)
        expected = e4m3((codes_of_words(some) - 8) * scale)
        assert torch.equal(actual.view(E4M3).float(), expected.view(E4M3).float()), float(scale)
