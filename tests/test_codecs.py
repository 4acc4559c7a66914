"""Codecs: each is lossless and has a decoder, and another element needs no other host code."""

from __future__ import annotations

import hashlib

import pytest
import torch

from conformance.cases import FORMATS
from ptx_interpreter import run_ptx
from test_layouts import random_parts
from w4gemm import WeightFormat, fold_scales, quantize
from w4gemm.core import formats
from w4gemm.core.config import GemmConfig
from w4gemm.core.elements import ELEMENTS, codebook, element_named
from w4gemm.core.problem import H200, GemmProblem
from w4gemm.kernels import kernel_named
from w4gemm.packing import codecs
from w4gemm.packing.codecs import (
    CODECS,
    MMA8,
    MMA16,
    PAIR_TABLE_BYTES,
    Codec,
    Pairs,
    codec_for,
    refusal,
    weight_operand,
)
from w4gemm.packing.codecs.base import PAIR_ROW_BYTES
from w4gemm.packing.layouts import BIT_ORDER, LAYOUTS, layout_named
from w4gemm.tuning.random_weight import random_components

UNSORTABLE = codebook([-(1 + i / 100) for i in range(8)] + [2.0**-i for i in range(8)])
"""Numbers that have no order in which a prmt's signs are zeros."""
BOOKS = {
    "iq4": "iq4",
    "nf4": "nf4",
    "e2m1": "e2m1",
    "table": codebook([v / 3 for v in range(-9, 7)]),
    "unsortable": UNSORTABLE,
}


def test_padding_is_the_code_of_zero():
    format = WeightFormat(32, element=BOOKS["e2m1"])
    assert format.element_rule.padding_code == 0
    (blocks,) = layout_named("mma16").pack(random_parts(format, 5, 40), format)
    codec = codec_for(format, MMA16)
    assert not codec.codes_of(blocks[:, :, :1024])[5:].any()
    assert not codec.codes_of(blocks[:, :, :1024])[:, 40:].any()


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda e: e.name)
def test_numbers_beside_16_bit_activations(element):
    """They are exact, or those of NF4 the nearest, and their products with an 11-bit scale are exact in float32."""
    codes = torch.tensor([u for u in range(2**element.bits) if u not in element.refused_codes])
    values = torch.tensor(element.values, dtype=torch.float64)[codes]
    for dtype in (torch.bfloat16, torch.float16):
        numbers = element.numbers(codes, dtype).double()
        error = (numbers - values).abs() / values.abs().clamp(min=0.01)
        assert error.max() <= (torch.finfo(dtype).eps / 2 if element.name == "nf4" else 0)
        assert torch.equal((numbers * 2047 / 2048).float().double(), numbers * 2047 / 2048)


def test_codebook_nearest():
    element = ELEMENTS["iq4"]
    numbers = torch.linspace(-140, 140, 5601)
    away = (numbers[:, None] - torch.tensor(element.values)).abs()
    assert torch.equal(away.gather(1, element.nearest(numbers).long()[:, None])[:, 0], away.amin(1))


@pytest.mark.parametrize("name", BOOKS)
@pytest.mark.parametrize("kind, dtype", [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_codebook_decoder(monkeypatch, kind, dtype, name):
    """The decoder's instructions, run here, give each element of a word its number, as the dtype holds it."""
    actual, element = _decoder(monkeypatch, kind, BOOKS[name]), element_named(BOOKS[name])
    unit = 64 if (name, kind) == ("iq4", "bf16") else 1
    for registers, codes in _words(BOOKS[name]):
        got = actual.decode_exact((registers,), actual.offsets((), 0))
        numbers = element.numbers(codes, dtype).permute(1, 2, 0).reshape(4, 2)
        assert torch.equal(_halves(got, dtype) * unit, numbers)


def test_integers_as_subnormals(monkeypatch):
    """Bytes in bf16 and in float32, of which one fma makes a weight."""
    actual = _decoder(monkeypatch, "bf16", "iq4")
    for registers, codes in _words("iq4"):
        numbers = ELEMENTS["iq4"].numbers(codes).permute(1, 2, 0).reshape(4, 2)
        assert torch.equal(_halves(actual._spread(registers, 0), torch.bfloat16).double() * 2.0**133 - 128, numbers)
        singles = torch.tensor(actual._singles(registers), dtype=torch.int32).view(torch.float32).view(4, 2)
        assert torch.equal(singles.double() * 2.0**133 - 128, numbers)


@pytest.mark.parametrize("pairs", Pairs, ids=lambda pairs: pairs.value)
@pytest.mark.parametrize("name", BOOKS)
@pytest.mark.parametrize("kind, dtype", [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_codebook_table(monkeypatch, kind, dtype, name, pairs):
    """A table of pairs: each lane finds every number in its copy, and no two lanes of a load want the same bank."""
    decode_pairs = pytest.importorskip("w4gemm.packing.codecs.pairs_decode")
    actual, element = _decoder(monkeypatch, kind, BOOKS[name], pairs), element_named(BOOKS[name])
    words, loaded = 1 if pairs is Pairs.HALVES else 2, list[int]()
    _table_in_memory(monkeypatch, actual, loaded)
    for i, (word, codes) in enumerate(_words(BOOKS[name])):
        table = decode_pairs.own_pairs(4096, i % 32, pairs)
        numbers = element.numbers(codes, dtype).permute(1, 2, 0).reshape(4, 2)
        if pairs is Pairs.HALVES:
            got = _halves(actual.decode_exact((word,), actual.offsets((), table)), dtype)
        else:
            bits = torch.tensor([_signed(n) for n in actual.floats(word, table)], dtype=torch.int32)
            got = bits.view(torch.float32).view(4, 2)
        assert torch.equal(got.float(), numbers.float())
    banks = [{(decode_pairs.own_pairs(0, lane, pairs) // 4 + i) % 32 for i in range(words)} for lane in range(32)]
    for first in range(0, 32, 32 // words):  # lanes that are served together
        assert set().union(*banks[first : first + 32 // words]) == set(range(32))
    assert {address % PAIR_ROW_BYTES for address in loaded} == set(range(0, PAIR_ROW_BYTES, 4 * words))


@pytest.mark.parametrize("pairs", [None, *Pairs], ids=["registers", "halves", "floats"])
def test_codebook_weights_have_the_scale_of_their_row(monkeypatch, pairs):
    """Rows g and g + 8, which alternate in the registers of a code word."""
    decode = pytest.importorskip("w4gemm.packing.codecs.integers_decode")
    decode_pairs = pytest.importorskip("w4gemm.packing.codecs.pairs_decode")
    actual, element, scales = _decoder(monkeypatch, "bf16", "nf4", pairs), ELEMENTS["nf4"], (3.0, 5.0)
    _table_in_memory(monkeypatch, actual, [])

    def scaled(decoder, numbers, scale, zero):
        return _halves([numbers], torch.bfloat16).double() * scale

    def number(kind, word):
        return torch.tensor(_signed(word), dtype=torch.int32).view(torch.float32).double()

    monkeypatch.setattr(decode.Decoder, "_scaled", scaled)
    monkeypatch.setattr(decode_pairs, "to_float", number)
    monkeypatch.setattr(decode_pairs, "pack_half2", lambda kind, low, high: torch.stack((low, high))[None])
    for i, (word, codes) in enumerate(_words("nf4")):
        prepared = scales if pairs is None else (*scales, decode_pairs.own_pairs(4096, i % 32, pairs))
        numbers = element.numbers(codes, torch.bfloat16).double()  # element, col8, row8
        expected = (numbers * torch.tensor(scales)).permute(1, 2, 0).reshape(4, 2)
        assert torch.equal(torch.cat(actual.decode((word,), prepared)), expected)


@pytest.mark.parametrize("element", ["iq4", "nf4"])
def test_codebook_numbers_whose_scales_multiply_sums(monkeypatch, element):
    """The numbers alone, and both rows' scales."""
    decode_pairs = pytest.importorskip("w4gemm.packing.codecs.pairs_decode")
    actual = _decoder(monkeypatch, "bf16", element, Pairs.HALVES, scale="fp32", on_sums=True)
    _table_in_memory(monkeypatch, actual, [])
    assert actual.scales((3, 5)) == (3, 5)
    for i, (word, codes) in enumerate(_words(element)):
        prepared = actual.prepare((3, 5), decode_pairs.own_pairs(4096, i % 32, Pairs.HALVES))
        numbers = ELEMENTS[element].numbers(codes, torch.bfloat16).permute(1, 2, 0).reshape(4, 2)
        assert torch.equal(_halves(actual.decode((word,), prepared), torch.bfloat16), numbers)


@pytest.mark.parametrize(
    ("config", "promotions", "ranges"),
    [
        ("32x64x256_1x1x1_coop", 2, 1),
        ("32x256x128_1x1x1_coop", 2, 2),
        ("64x256x128_1x1x1_coop", 0, 1),  # eight ranges would be wanted
        ("32x64x64_1x1x1_coop", 0, 1),
        ("128x128x128_1x1x1_coop", 0, 1),
    ],
)
def test_where_scales_of_a_codebook_multiply_sums(config, promotions, ranges):
    """With few tokens and registers for few ranges of them; 0 promotions: nowhere."""
    kernel = kernel_named("sm90_mixed_gemm")
    for name, times in (("iq4_g32_fp16", promotions), ("nf4_g64_fp32", min(promotions, 1)), ("nf4", 0)):
        problem = GemmProblem(32, 4096, 4096, torch.bfloat16, WeightFormat.parse(name), "mma16", device=H200)
        v = kernel.variant.of(problem, GemmConfig.parse(config))
        assert v.scales_on_sums == v.promotes == bool(times)
        if times:
            assert (v.promotions, v.token_splits, v.pairs) == (times, ranges, Pairs.HALVES)


@pytest.mark.parametrize("element", ["nf4", "int4"])
def test_kernels_that_decode_by_pairs_have_room_for_their_table(element):
    for name in ("sm90_mixed_gemm", "sm90_decode"):
        kernel, format = kernel_named(name), WeightFormat(128, element=element)
        problem = GemmProblem(1, 4096, 4096, torch.bfloat16, format, "mma16", device=H200)
        variants = [kernel.variant.of(problem, config) for config in kernel.configs(problem)]
        by_pairs = [v for v in variants if v.pairs is not None]
        assert bool(by_pairs) == (element == "nf4")
        assert {v.decode_table_bytes for v in by_pairs} <= {PAIR_TABLE_BYTES}


def _table_in_memory(monkeypatch, decoder, loaded: list[int]) -> None:
    """Let a decoder load from its table, which lies from address 4096 on. loaded: takes the addresses."""
    decode_pairs, memory = pytest.importorskip("w4gemm.packing.codecs.pairs_decode"), dict[int, int]()
    for index in range(64 if hasattr(decoder, "rows") else 0):
        for byte, both in enumerate(decoder.rows(index)):
            row = 4096 + (4 * index + byte) * PAIR_ROW_BYTES
            memory |= {row + 4 * lane: int(both[lane % 2]) & 0xFFFFFFFF for lane in range(32)}
    assert not memory or sorted(memory) == list(range(4096, 4096 + PAIR_TABLE_BYTES, 4))

    def load_shared(address, count, constant):
        assert constant and address % (4 * count) == 0
        loaded.append(address)
        return [memory[address + 4 * i] for i in range(count)]

    monkeypatch.setattr(decode_pairs, "load_shared", load_shared)


def _decoder(monkeypatch, kind: str, element: str, pairs: Pairs | None = None, scale: str = "bf16", on_sums=False):
    """A decoder of which arithmetic is run here, as far as it is integers' and the fma and sum of constants."""
    decode_codebook = pytest.importorskip("w4gemm.packing.codecs.codebook_decode")
    decode = pytest.importorskip("w4gemm.packing.codecs.integers_decode")
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16

    def arithmetic(text, outputs, inputs, **_):
        if not text.startswith(("fma.rn", "add.rn")):
            return run_ptx(text, len(outputs), [int(word) & 0xFFFFFFFF for word in inputs])
        x, *y, z = (_halves([word], dtype).double() for word in inputs)
        result = (x * y[0] + z if y else x + z).to(dtype)
        return [int(result.view(torch.int16).view(torch.int32))]

    monkeypatch.setattr(decode, "asm", arithmetic)
    monkeypatch.setattr(decode_codebook, "asm", arithmetic)
    monkeypatch.setattr(decode_codebook, "hidden_constant", lambda word: word)
    monkeypatch.setattr(decode_codebook, "to_float", lambda kind, word: _signed(word))
    monkeypatch.setattr(decode_codebook, "Int32", int, raising=False)
    monkeypatch.setattr(decode, "Int32", int)
    weight = weight_operand(WeightFormat(32, scale=scale, element=element), dtype)
    decode_pairs = pytest.importorskip("w4gemm.packing.codecs.pairs_decode")
    monkeypatch.setattr("w4gemm.ptx.arithmetic.asm", arithmetic)
    monkeypatch.setattr(decode_pairs, "to_float", lambda kind, word: word)
    monkeypatch.setattr(decode_pairs, "float_word", lambda number: int(number.view(torch.int32)))
    monkeypatch.setattr(
        decode_pairs, "half_to_float", lambda kind, word, high: _halves([word], dtype)[0, int(high)].float()
    )
    return weight.decoder(allow_sum_scale=True, pairs=pairs, on_sums=on_sums)


def _words(element: str):
    """Words of packed codes, and the codes (element, col8, row8) of each."""
    codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = codec_for(WeightFormat(32, element=element), MMA16).code_words(codes).flatten()
    elements = MMA16.split(codes).reshape(-1, 2, 2, 2)
    return [(int(words[i]) & 0xFFFFFFFF, elements[i]) for i in range(0, 1024, 9)]


def _halves(words: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The numbers in the halves of words."""
    return torch.tensor([_signed(int(word)) for word in words], dtype=torch.int32).view(dtype).view(len(words), 2)


def _signed(word: int) -> int:
    return (word + 2**31) % 2**32 - 2**31


def test_codebook_beside_fp8_activations_is_refused():
    w = quantize(torch.randn(8, 64), "iq4_g32")
    with pytest.raises(ValueError, match="fp8 activations would round iq4: e4m3 holds not all"):
        w.repack("mma8")
    with pytest.raises(ValueError, match="w: wanted int4 elements, got iq4_g32: no kernel decodes"):
        fold_scales(w)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_codes_are_lossless(codec):
    codes = torch.arange(64 * 128).mul(7).add(3).remainder(2**codec.bits).to(torch.uint8).view(64, 128)
    words = codec.code_words(codes)
    assert words.shape == (1, 1, 256 * codec.bits) and torch.equal(codec.codes_of(words), codes)
    if codec.sums:
        words = torch.randint(-(2**31), 2**31, (1, 1, 256 * codec.bits)).int()
        assert torch.equal(codec.code_words(codec.codes_of(words)), words), "all words are codes'"
        return
    masks = [bits.mask << bits.shift + 32 * bits.word + 32 >> 32 for bits in codec.places]
    assert sum(masks) == 2 ** (32 * (1 + max(bits.word for bits in codec.places))) - 1, "each bit of a word once"


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_each_codec_is_tested(codec):
    """By a format in the conformance suite, and by one whose machine code is looked at, where there is a compiler. Each
    scale rule by a format of this codec, or of one that differs in the element alone."""
    alike = [other for other in CODECS if type(other) is type(codec) and other.fragment is codec.fragment]
    untested = {*codec.scales} - {format.scale for format in FORMATS for other in alike if other.holds(format)}
    assert not untested, f"add a format with {untested} scales to FORMATS in conformance/cases.py"
    assert any(map(codec.holds, FORMATS)), "add a format to FORMATS in conformance/cases.py"
    pytest.importorskip("cutlass")
    from test_sass import INSTRUCTION, formats_of

    compiled = {name for kernel in INSTRUCTION for name, _ in formats_of(kernel)}
    assert any(codec.holds(WeightFormat.parse(name)) for name in compiled), "add a format to formats_of in test_sass.py"


@pytest.mark.parametrize("element", [element.name for element in ELEMENTS.values() if element.bits == 4])
def test_each_element_of_4_bits_has_a_codec(element):
    """The same 16 numbers without a name run on GPUs, as any codebook; so a name may not take that away."""
    assert any(codec.element == element and codec.fragment is MMA16 for codec in CODECS), (
        f"add a codec of {element} to CODECS, or to CODEBOOKS of packing/codecs/codebook.py if it is a table"
    )


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_each_codec_has_a_decoder(codec):
    pytest.importorskip("cutlass")
    format = next(format for format in FORMATS if codec.holds(format))
    operand = weight_operand(format, torch.float8_e4m3fn if codec.fragment is MMA8 else torch.bfloat16)
    decoders = [operand.decoder(only_fma=fma) for fma in (False, True)]
    if pairs := codec.pairs(operand, on_sums=False):
        decoders.append(operand.decoder(pairs=pairs))
    for decoder in decoders:
        assert callable(decoder.prepare) and callable(decoder.decode) and decoder.sum_scale == 1


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_stored_scales_are_what_a_decoder_reads(codec):
    """Scales that are stored bit for bit fill their field. Bits of an 8-bit scale in one of 16 bits would still be
    lossless, and a decoder would take them for another number."""
    if codec.scale_bits and type(codec).stored_scales is Codec.stored_scales and codec.scale_step == 1:
        bits = {scale: 8 * formats.SCALES[scale].dtype.itemsize for scale in codec.scales}
        assert {*bits.values()} == {codec.scale_bits}, f"override stored_scales and scales_from: {bits}"


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_each_scale_dtype_has_a_name_that_decoders_know(codec):
    for dtype in {formats.SCALES[scale].dtype for scale in codec.scales}:
        assert dtype in codecs._SCALE_KIND, "a line of _SCALE_KIND in packing/codecs/__init__.py"


def test_a_refusal_says_which_scales_or_elements_there_are():
    assert refusal(WeightFormat.parse("iq4_g32_e8m0"), MMA16) == (
        "there is no decoder of iq4 with e8m0 scales for mma16; scales may be fp16, bf16, fp32, s8x256, s8x128"
    )
    assert refusal(WeightFormat(32, scale="e8m0", element=BOOKS["table"]), MMA16).endswith(
        "with e8m0 scales for mma16; scales may be fp16, bf16, fp32, s8x256, s8x128"
    )
    assert refusal(WeightFormat.parse("e2m3_g128"), MMA8) == (
        "there is no decoder of e2m3 with bf16 scales for mma8; elements may be "
        "e2m1, e4m3, e5m2, int2, int3, int4, int5"
    )


@pytest.mark.parametrize(
    "name, message",
    [
        ("int8_g128", "fp8 activations would round int8"),
        ("int6_g32_zint", "fp8 activations would round int6"),
        ("int5_g128_zint", "the numbers of int5 reach 31, and e4m3 holds no odd ones above 16"),
        ("int5_g64_zfloat", "the numbers of int5 reach 31, and e4m3 holds no odd ones above 16"),
        ("int4_g64_fp32", "there is no decoder of int4 with fp32 scales for mma8"),
        ("e5m2_g32_e8m0", "would multiply the sums of each matrix instruction"),
        ("mxfp6", "would multiply the sums of each matrix instruction"),
        ("e5m2_g64_fp32", "fp8 activations take e5m2 with one float32 scale a row"),
        ("e4m3_g64_fp32", "float32 scales of groups of a multiple of 128 columns"),
        ("mxfp8", "would multiply the sums of each matrix instruction"),
        ("e4m3_g128", "fp8 activations take e4m3 with one float32 scale a row"),
    ],
)
def test_fp8_activations_refuse_what_e4m3_or_sums_cannot_hold(name, message):
    assert message in refusal(WeightFormat.parse(name), MMA8)


def test_each_format_has_one_codec():
    for element, zero, scale in ((e, z, s) for e in ELEMENTS for z in formats.ZEROS for s in formats.SCALES):
        try:
            format = WeightFormat(32, zero, scale, element)
        except ValueError:
            continue
        for fragment in (MMA16, MMA8):
            held = [codec for codec in CODECS if codec.fragment is fragment and codec.holds(format)]
            assert len(held) <= 1 and bool(held) != bool(refusal(format, fragment)), format


def test_the_order_of_bits_has_a_number():
    """If this fails because an order is meant to change, raise BIT_ORDER, which has older pickles refused. New
    FORMATS change the digest alone."""
    digest = hashlib.sha256()
    for format in FORMATS:
        parts = random_components(format, 80, 512)
        for layout in (layout for layout in LAYOUTS.values() if not layout.supports(format)):
            for t in layout.pack(parts, format):
                digest.update(t.contiguous().view(torch.uint8).numpy().tobytes())
    assert (BIT_ORDER, digest.hexdigest()[:16]) == (2, "ad7f6deeebdf7562")
