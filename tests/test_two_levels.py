"""Scales of more than 16 bits: GGUF's Q4_K, of two levels, and float32 ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ptx_interpreter import HALVES, run_ptx
from test_layouts import assert_same, random_parts
from w4gemm import QuantizedWeight, WeightFormat, linear, quantize
from w4gemm.packing.codecs import MMA16, Pairs, codec_for, weight_operand
from w4gemm.packing.codecs.base import PAIR_ROW_BYTES
from w4gemm.tuning.random_weight import random_components
from w4gemm.weights.components import with_plain_scales

Q4_K = WeightFormat.parse("q4_k")


@pytest.mark.parametrize("k", [32, 100, 1024])
def test_a_short_last_superblock(k):
    dense = torch.randn(5, k, generator=torch.Generator().manual_seed(0))
    w = quantize(dense, "q4_k", search=True)
    assert (w.dequantize() - dense).norm() < 0.1 * dense.norm()
    assert int(w.parts().scales.max()) <= 63 and int(w.parts().zeros.max()) <= 63, "as GGUF stores them"
    assert_same(w.repack("mma16").parts(), w.parts())
    assert torch.equal(linear(torch.eye(k), w.repack()).T, w.dequantize())


@pytest.mark.parametrize("name", ["q4_k", "int4_g32_zfloat_u8x128", "int4_g32_zfloat_fp16"])
def test_small_weights_are_never_further_off_than_zeros(name):
    """Down to where fp16 scales are 0: a factor or scale that was rounded to 0 beside a zero point that was not gave
    each number of a group the group's minimum."""
    dense = torch.randn(16, 512, generator=torch.Generator().manual_seed(0))
    for size in (1e-5, 3e-6, 1e-6, 1e-7, 1e-8):
        error = (quantize(dense * size, name).dequantize() / size - dense).norm() / dense.norm()
        assert error < (0.1 if size >= 1e-6 else 1.001), size


def test_zeros_and_one_sign():
    dense = torch.rand(4, 512) + 1
    dense[1], dense[2, :300] = -dense[1], 0
    w = quantize(dense, "q4_k")
    assert (w.dequantize() - dense).abs().max() < 0.2 and not w.dequantize()[2, :256].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda p: p._replace(factors=None), r"factors: int4_g32_zfloat_u8x256 wants torch.float16 \(4, 2, 2\), got"),
        (lambda p: p._replace(factors=p.factors[:, :1]), r"factors: wanted shape \(4, 2, 2\), got \(4, 1, 2\)"),
        (lambda p: p._replace(factors=p.factors * torch.nan), "the weights of 48 groups would not be finite"),
        (lambda p: p._replace(factors=p.factors.float()), "factors: wanted torch.float16, got torch.float32"),
    ],
)
def test_parts_that_do_not_fit_are_refused(arguments, message):
    parts = arguments(random_parts(Q4_K, 4, 384))
    with pytest.raises((TypeError, ValueError), match=message):
        QuantizedWeight.from_codes(Q4_K, *parts[:3], factors=parts.factors)


def test_formats_that_are_refused():
    for group, zero in ((96, "float"), (-1, "float"), (32, "none"), (32, "int")):
        with pytest.raises(ValueError, match="u8x256 has factors of 256 columns.*wanted zero 'float' and a group_size"):
            WeightFormat(group, zero, "u8x256")


def test_float32_scales_of_too_many_bits():
    format = WeightFormat(32, "float", "fp32")
    parts = random_parts(format, 4, 64)
    w = QuantizedWeight.from_codes(format, *parts[:3])
    assert torch.equal(w.dequantize(), (parts.codes.double() * wide(parts.scales) + wide(parts.zeros)).float())
    with pytest.raises(ValueError, match="scales: wanted at most 20 significant bits.*got 0.1000000.* row 0, group 1"):
        QuantizedWeight.from_codes(format, parts.codes, torch.tensor([[0.5, 0.1]] * 4), parts.zeros)


def wide(t: torch.Tensor) -> torch.Tensor:
    return t.double().repeat_interleave(32, dim=1)


@pytest.mark.parametrize("name", ["q4_k", "int4_g32_zfloat_fp32", "int4_g32_fp32"])
@pytest.mark.parametrize("kind, dtype", [("bf16", torch.bfloat16), ("f16", torch.float16)])
@pytest.mark.parametrize("sum_scale", [True, False])
def test_decoders(monkeypatch, name, kind, dtype, sum_scale):
    """The decoders' instructions, run here on words of a packed block, give the dequantized weight."""
    decode_wide = pytest.importorskip("w4gemm.packing.codecs.integers_decode_wide")
    from w4gemm.packing.codecs import integers_decode as decode

    interpret(monkeypatch, decode_wide)
    interpret(monkeypatch, decode)
    monkeypatch.setattr(decode, "Int32", lambda bits: bits & 0xFFFFFFFF)
    format = WeightFormat.parse(name)
    decoder_type = decode_wide.TwoLevelDecoder if format.has_factors else decode_wide.WideDecoder
    decoder = decoder_type(kind, "", format.zero, allow_sum_scale=sum_scale)
    by_table = decoder_by_table(monkeypatch, kind, format)
    parts = random_components(format, 64, 128, signed=True)
    w = QuantizedWeight.from_codes(format, *parts[:3], factors=parts.factors).repack("mma16")
    block, words = codec_for(format, MMA16).block(format), w.tensors[0][0].flatten()  # with what a second block shares
    expected = MMA16.split(torch.arange(64 * 128).view(64, 128)).view(-1, 8)
    scales = with_plain_scales(parts, format)
    for i in range(0, 1024, 37):
        row, column = divmod(int(expected[i, 0]), 128)
        group = column // 32
        at = block.scales_at(group) // 4 + (row // 16 * 8 + row % 8) * block.words_per_scale
        actual = list(range(at, at + block.words_per_scale))
        if block.factors:
            at = block.factors_at // 4 + (row // 16 * 8 + row % 8) * block.words_per_scale
            actual += range(at, at + block.words_per_scale)
        arguments = tuple(int(words[j]) & 0xFFFFFFFF for j in actual)
        field = group % block.groups_per_word
        values = decoder.scales_and_zeros(arguments, field)
        for row8 in range(2):
            assert values[row8][0] == scales.scales[row + 8 * row8, group]
            zero = None if scales.zeros is None else scales.zeros[row + 8 * row8, group]
            assert values[row8][1] == zero
            if format.has_factors:  # as lanes prepare them for one another, and beside zero points in columns
                assert decoder.scale_of_row(arguments, row8, field) == values[row8][0]
                of_zeros = decoder.levels(arguments[1], arguments[3], field)
                assert (decoder.levels(arguments[0], arguments[2], field)[row8], of_zeros[row8]) == values[row8]
        word = int(words[i]) & 0xFFFFFFFF
        bits = [(r & 0xFFFF, r >> 16) for r in decoder.decode_exact((word,), decoder.offsets(arguments, 0))]
        exact = torch.tensor([[float(HALVES[kind].number(half)) for half in pair] for pair in bits])
        codes = MMA16.split(parts.codes).view(-1, 2, 2, 2)[i].permute(1, 2, 0).reshape(4, 2)
        shift = 8 if format.zero == "none" else 0
        assert torch.equal(exact * decoder.exact_scale, codes.float() - shift)
        registers = decoder.decode((int(words[i]) & 0xFFFFFFFF,), decoder.prepare(arguments, None, field))
        got = torch.tensor(registers, dtype=torch.float64) * decoder.sum_scale  # register, element
        elements = expected[i].view(2, 2, 2).permute(1, 2, 0).reshape(4, 2)  # element col8 row8
        exact = w.dequantize(dtype).flatten()[elements].double()
        assert torch.equal(got, exact)
        if not sum_scale:
            assert torch.equal(
                torch.tensor(by_table.decode((word,), by_table.prepare(arguments, 0, field))).double(), exact
            )


def decoder_by_table(monkeypatch, kind: str, format: WeightFormat):
    """The decoder that finds codes in a table, which lies from address 0 on."""
    decode_pairs = pytest.importorskip("w4gemm.packing.codecs.pairs_decode")
    interpret(monkeypatch, decode_pairs)
    monkeypatch.setattr(decode_pairs, "float_word", lambda number: int(np.float32(number).view(np.uint32)))
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    operand = weight_operand(format, dtype)
    actual = operand.decoder(pairs=Pairs.FLOATS)
    rows = [row for index in range(64) for row in actual.rows(index)]
    monkeypatch.setattr(decode_pairs, "load_shared", lambda at, *_, **__: rows[at // PAIR_ROW_BYTES])
    return actual


def interpret(monkeypatch, module) -> None:
    """Let a decoder's helpers compute with numpy's float32; two packed numbers are a tuple of float32."""

    def fma(x, y, z):
        return np.float32(np.float64(x) * np.float64(y) + np.float64(z))  # the product is exact there

    def pack(kind, low, high):
        rounded = torch.tensor([low, high]).to({"bf16": torch.bfloat16, "f16": torch.float16}[kind])
        return tuple(rounded.double().tolist())

    def run(text, outputs, inputs, **_):
        return run_ptx(text, len(outputs), inputs)

    functions = {
        "asm": run,
        "Float32": np.float32,
        "hidden_constant": lambda word: word,
        "fma": fma,
        "to_float": lambda kind, bits: np.uint32(bits).view(np.float32),
        "half_to_float": lambda _, w, high: np.float32(np.uint16(w >> 16 * high & 0xFFFF).view(np.float16)),
        "pack_half2": pack,
    }
    for name, function in functions.items():
        monkeypatch.setattr(module, name, function, raising=False)
    monkeypatch.setattr("w4gemm.ptx.arithmetic.asm", run)
