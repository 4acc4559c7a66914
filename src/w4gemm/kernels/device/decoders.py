"""The device's half of every codec: :func:`decoder_of`.

A decoder turns code words into the registers of operand A. What a kernel calls:

    all                   ``prepare(words, table, field)`` once per scale group: the scale words, and what ``decode``
                          needs of rows g and g + 8. ``decode(words, prepared)``: the fragment registers of one matrix
                          instruction, in the order row g, row g + 8, and both again further along k.
                          ``words``: those of one instruction, see device/block.py. ``sum_scale``: what a decoded
                          1.0 stands for; the epilogue multiplies the sums by it, so without allow_sum_scale it must
                          be 1
    sm90_decode           if ``separate_scales``, it multiplies numbers without scales: ``offsets(words, table)``,
                          ``decode_exact(words, offsets)``, ``scales_and_zeros(words, field)``, ``exact_scale``
    scales on sums        ``scales(words)``: float32 factors of the sums of rows g and g + 8
    codec.table_bytes     ``fill_table(table, thread, threads)``, before a barrier

For 16-bit x, a subclass of :class:`Decoder` has all of this, and may override only ``decode_exact`` if its numbers are
multiplied by a scale of 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable

from w4gemm.kernels.device.decode import Decoder, SubnormalDecoder
from w4gemm.kernels.device.decode_codebook import CodebookDecoder, IntegerDecoder
from w4gemm.kernels.device.decode_e2m1 import E2m1Decoder
from w4gemm.kernels.device.decode_e2m1_fp8 import E2m1Fp8Decoder
from w4gemm.kernels.device.decode_fp8 import FoldedDecoder, Fp8Decoder, TableDecoder
from w4gemm.kernels.device.decode_pairs import BarePairDecoder, PairDecoder, TwoLevelPairDecoder, WidePairDecoder
from w4gemm.kernels.device.decode_wide import TwoLevelDecoder, WideDecoder
from w4gemm.packing.codecs import (
    E2M1_MMA8,
    INT4_MMA8,
    INT4_MMA8_FOLDED,
    INT4_MMA8_ZEROS,
    INT4_MMA16,
    INT4_TWO_LEVELS_MMA16,
    INT4_WIDE_MMA16,
    MXFP4_MMA16,
    NVFP4_MMA16,
    CodebookCodec,
    Codec,
    WeightOperand,
)
from w4gemm.packing.codecs.codebook import are_bytes
from w4gemm.packing.codecs.pairs import Pairs

AnyDecoder = Decoder | Fp8Decoder | E2m1Fp8Decoder


def decoder_of(
    weight: WeightOperand,
    only_fma: bool = False,
    allow_sum_scale: bool = False,
    pairs: Pairs | None = None,
    on_sums: bool = False,
) -> AnyDecoder:
    """The decoder of a weight's codec. only_fma: see Decoder. allow_sum_scale: True if the kernel multiplies its sums
    by the decoder's ``sum_scale``, which may then be other than 1. pairs: what the kernel's table in shared
    memory holds, if it decodes by one. on_sums: True if the kernel applies a codebook's scales to sums."""
    if pairs is not None:
        return _by_pairs(weight, pairs, on_sums)
    if isinstance(weight.codec, CodebookCodec):
        return _codebook(weight, weight.codec.values, only_fma, allow_sum_scale)
    return _DECODERS[weight.codec](weight, only_fma, allow_sum_scale)


def _int4_mma16(weight: WeightOperand, only_fma: bool, allow_sum_scale: bool) -> Decoder:
    form = weight.kind, weight.scale, weight.zero
    if allow_sum_scale and not only_fma and SubnormalDecoder.decodes(*form):
        return SubnormalDecoder(*form)
    return Decoder(*form, only_fma)


def _codebook(weight: WeightOperand, values: tuple[float, ...], only_fma: bool, allow_sum_scale: bool) -> Decoder:
    facts = weight.kind, weight.scale, weight.zero, only_fma, values
    return IntegerDecoder(*facts, allow_sum_scale) if are_bytes(values) else CodebookDecoder(*facts)


def _by_pairs(weight: WeightOperand, pairs: Pairs, on_sums: bool) -> Decoder:
    facts = weight.kind, weight.scale, weight.zero
    if isinstance(weight.codec, CodebookCodec):
        return (BarePairDecoder if on_sums else PairDecoder)(*facts, values=weight.codec.values, pairs=pairs)
    return (TwoLevelPairDecoder if weight.codec is INT4_TWO_LEVELS_MMA16 else WidePairDecoder)(*facts)


def _e2m1(weight: WeightOperand, only_fma: bool, allow_sum_scale: bool) -> Decoder:
    return E2m1Decoder(weight.kind, weight.scale, weight.zero, only_fma, allow_sum_scale)


def _wide(decoder: type[WideDecoder]) -> Callable[[WeightOperand, bool, bool], WideDecoder]:
    return lambda weight, only_fma, allow: decoder(weight.kind, weight.scale, weight.zero, only_fma, allow)


def _fp8(decoder: type[Fp8Decoder]) -> Callable[[WeightOperand, bool, bool], Fp8Decoder]:
    return lambda weight, only_fma, allow_sum_scale: decoder(weight.scale)


_DECODERS: dict[Codec, Callable[[WeightOperand, bool, bool], AnyDecoder]] = {
    INT4_MMA16: _int4_mma16,
    INT4_WIDE_MMA16: _wide(WideDecoder),
    INT4_TWO_LEVELS_MMA16: _wide(TwoLevelDecoder),
    MXFP4_MMA16: _e2m1,
    NVFP4_MMA16: _e2m1,
    INT4_MMA8: _fp8(Fp8Decoder),
    INT4_MMA8_ZEROS: _fp8(TableDecoder),
    INT4_MMA8_FOLDED: _fp8(FoldedDecoder),
    E2M1_MMA8: lambda weight, only_fma, allow_sum_scale: E2m1Fp8Decoder(),
}
