"""The device's half of every codec: :func:`decoder_of`."""

from __future__ import annotations

from w4gemm.kernels.device.decode import Decoder, SubnormalDecoder
from w4gemm.kernels.device.decode_fp8 import FoldedDecoder, Fp8Decoder, TableDecoder
from w4gemm.packing.codecs import INT4_MMA8, INT4_MMA8_FOLDED, INT4_MMA8_ZEROS, INT4_MMA16, WeightOperand

_DECODERS_16 = {INT4_MMA16: Decoder}
_DECODERS_8 = {INT4_MMA8: Fp8Decoder, INT4_MMA8_ZEROS: TableDecoder, INT4_MMA8_FOLDED: FoldedDecoder}


def decoder_of(weight: WeightOperand, only_fma: bool = False, allow_sum_scale: bool = False) -> Decoder | Fp8Decoder:
    """The decoder of a weight's codec. only_fma: see Decoder. allow_sum_scale: True if the kernel multiplies its sums
    by the decoder's ``sum_scale``, which may then be other than 1."""
    if weight.codec in _DECODERS_8:
        return _DECODERS_8[weight.codec](weight.scale)
    form = weight.kind, weight.scale, weight.zero
    if weight.codec is INT4_MMA16 and allow_sum_scale and SubnormalDecoder.decodes(*form):
        return SubnormalDecoder(*form)
    return _DECODERS_16[weight.codec](*form, only_fma)
