"""Blocks of GGUF's quantized types: :data:`TYPES` has the format of each type, and takes its blocks apart.

=======  =====================================================  ============================  ======================
type     block along k                                          w                             WeightFormat
=======  =====================================================  ============================  ======================
Q8_0     32 elements: fp16 d, int8 q                            d * q                         int8_g32_fp16
Q6_K     256: 128 bytes, 64 bytes, int8 s of each 16, fp16 d    (d * s) * (q - 32)            q6_k
Q5_K     256: as Q4_K, with 32 bytes of upper bits              (d * s) * q - e * m           q5_k
Q5_0     32: fp16 d, 4 bytes of upper bits, 16 bytes            d * (q - 16)                  int5_g32_fp16
Q5_1     32: fp16 d, fp16 m, the same                           d * q + m                     int5_g32_zfloat_fp16
Q4_0     32: fp16 d, 16 bytes of codes                          d * (q - 8)                   int4_g32_fp16
Q4_1     32: fp16 d, fp16 m, 16 bytes                           d * q + m                     int4_g32_zfloat_fp16
Q4_K     256: fp16 d, e, 8 times 6-bit s and m, 4 x 32 bytes    (d * s) * q - e * m           q4_k
Q3_K     256: 32 bytes of upper bits, 64 bytes, 6-bit s, d      (d * (s - 32)) * (q - 4)      q3_k
Q2_K     256: 4-bit s and m of each 16, 64 bytes, fp16 d, e     (d * s) * q - e * m           q2_k
Q2_0     64: fp16 d, 16 bytes                                   d * (q - 1)                   int2_g64_zint_fp16
TQ2_0    256: 64 bytes, fp16 d                                  d * (q - 1)                   int2_g256_zint_fp16
IQ4_NL   32: fp16 d, 16 bytes                                   d * v(q), 16 fixed numbers    iq4_g32_fp16
IQ4_XS   256: fp16 d, 8 times 6-bit s, 8 x 16 bytes             (d * (s - 32)) * v(q)         iq4_g32_s8x256
MXFP4    32: e8m0 d, 16 bytes                                   d * e2m1(q)                   mxfp4
NVFP4    64: four e4m3 d without sign, of 16 each; 4 x 8 bytes  d * e2m1(q) * f               nvfp4
IQ3_*    256: fp16 d, 4-bit s of each 32, lattice               (d * (2 s + 1) / 4 or 1) * v  codebook*_g32_s8x256
IQ2_XXS  the same                                               (d * (2 s + 1) / 8) * v       codebook*_g32_s8x256
IQ2_*    256: fp16 d, 4-bit s of each 16, lattice               (d * (2 s + 1) / 8) * v       codebook*_g16_s8x256
=======  =====================================================  ============================  ======================

Fields of codes lie so that a run of bytes has the lowest fields of the first elements, the next ones of the next
elements, and so on: element j of 32 (of 16, in Q4_K and Q5_K of 64, in Q6_K, Q3_K and Q2_K of 128) is in byte j modulo
the bytes. Only Q2_0 has four neighbours a byte. f is one number of a matrix in NVFP4, in a tensor beside it whose name
ends in ``.scale``, or 1.

A lattice has signs, and numbers of 4 or 8 neighbours together by their place in a table: 8 sizes of IQ3, 3 of IQ2. The
``gguf`` package, which has the tables, gives the numbers; codes of them take 4 bits instead of 2 or 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from w4gemm.checkpoints.gguf.header import gguf_package
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.core.elements import codebook
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.bits import fields, unpack
from w4gemm.packing.layouts import WeightComponents

_ELEMENTS = 2**22
"""Elements of a lattice looked up at a time, because the package gives them in float32."""


class Parts(NamedTuple):
    """Numbers of rows of blocks, as :meth:`w4gemm.QuantizedWeight.from_codes` takes them."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    factors: torch.Tensor | None = None


class BlockType(NamedTuple):
    """A type of tensor whose matrices become a :class:`w4gemm.QuantizedWeight`."""

    format: WeightFormat
    parts: Callable[[torch.Tensor], Parts]
    """Takes the blocks of rows apart, uint8 (n, blocks, bytes)."""


def _fp16(bytes: torch.Tensor) -> torch.Tensor:
    """Return the fp16 numbers (...) of pairs of bytes (..., 2)."""
    return bytes.contiguous().view(torch.float16).squeeze(-1)


def _codes(bytes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Return the codes (n, k) of bytes (n, blocks, bytes): of a block the lowest fields of all, then the next ones."""
    return torch.cat(fields(bytes, bits), dim=-1).flatten(1)


def _runs(bytes: torch.Tensor, size: int) -> torch.Tensor:
    """Return bytes (n, blocks, bytes) as runs of ``size``, (n, runs, size)."""
    return bytes.reshape(len(bytes), -1, size)


def _q8_0(blocks: torch.Tensor) -> Parts:
    return Parts(blocks[..., 2:].flatten(1) ^ 0x80, _fp16(blocks[..., :2]))


def _q5_codes(bytes: torch.Tensor) -> torch.Tensor:
    """Return the codes of 20 bytes a block: bit j of the first four is the upper one of element j."""
    return _codes(bytes[..., 4:]) | unpack(bytes[..., :4], 1).flatten(1) << 4


def _q5_0(blocks: torch.Tensor) -> Parts:
    return Parts(_q5_codes(blocks[..., 2:]), _fp16(blocks[..., :2]))


def _q5_1(blocks: torch.Tensor) -> Parts:
    return Parts(_q5_codes(blocks[..., 4:]), _fp16(blocks[..., :2]), _fp16(blocks[..., 2:4]))


def _q6_k(blocks: torch.Tensor) -> Parts:
    codes = _codes(_runs(blocks[..., :128], 64)) | _codes(_runs(blocks[..., 128:192], 32), 2) << 4
    levels = blocks[..., 192:208].flatten(1).view(torch.int8)
    return Parts(codes, levels, factors=_fp16(blocks[..., 208:])[..., None])


def _q5_k(blocks: torch.Tensor) -> Parts:
    codes = _codes(_runs(blocks[..., 48:], 32)) | _codes(blocks[..., 16:48], 1) << 4
    return _q4_k(blocks)._replace(codes=codes)


def _q3_k(blocks: torch.Tensor) -> Parts:
    codes = _codes(_runs(blocks[..., 32:96], 32), 2) | _codes(blocks[..., :32], 1) << 2
    low, high = _codes(_runs(blocks[..., 96:104], 8)), _codes(_runs(blocks[..., 104:108], 4), 2)
    return Parts(codes, (low | high << 4).to(torch.int8) - 32, factors=_fp16(blocks[..., 108:])[..., None])


def _q2_k(blocks: torch.Tensor) -> Parts:
    levels = blocks[..., :16].flatten(1)
    return Parts(_codes(_runs(blocks[..., 16:80], 32), 2), levels & 15, levels >> 4, _factors(blocks[..., 80:]))


def _tq2_0(blocks: torch.Tensor) -> Parts:
    scales = _fp16(blocks[..., 64:])
    return Parts(_codes(_runs(blocks[..., :64], 32), 2), scales, torch.ones_like(scales, dtype=torch.uint8))


def _q2_0(blocks: torch.Tensor) -> Parts:
    scales = _fp16(blocks[..., :2])
    return Parts(unpack(blocks[..., 2:], 2).flatten(1), scales, torch.ones_like(scales, dtype=torch.uint8))


def _factors(bytes: torch.Tensor) -> torch.Tensor:
    """Return the factors of scales and of zero points, fp16 (n, blocks, 2), of bytes (n, blocks, 4): minimums are
    subtracted."""
    return bytes.contiguous().view(torch.float16) * torch.tensor([1, -1], dtype=torch.float16, device=bytes.device)


def _q4_0(blocks: torch.Tensor) -> Parts:
    return Parts(_codes(blocks[..., 2:]), _fp16(blocks[..., :2]))


def _q4_1(blocks: torch.Tensor) -> Parts:
    return Parts(_codes(blocks[..., 4:]), _fp16(blocks[..., :2]), _fp16(blocks[..., 2:4]))


def _q4_k(blocks: torch.Tensor) -> Parts:
    levels = _six_bits(blocks[..., 4:16]).transpose(1, 2).flatten(2)
    scales, zeros = (t.contiguous() for t in levels.unbind(1))
    return Parts(_codes(_runs(blocks[..., 16:], 32)), scales, zeros, _factors(blocks[..., :4]))


def _iq4_xs(blocks: torch.Tensor) -> Parts:
    levels = _signed_six_bits(blocks[..., 2:8]).flatten(1)
    return Parts(_codes(_runs(blocks[..., 8:], 16)), levels, factors=_fp16(blocks[..., :2])[..., None])


def _mxfp4(blocks: torch.Tensor) -> Parts:
    return Parts(_codes(blocks[..., 1:]), blocks[..., 0].contiguous().view(torch.float8_e8m0fnu))


def _nvfp4(blocks: torch.Tensor) -> Parts:
    n = len(blocks)
    scales, bytes = blocks[..., :4].reshape(n, -1), blocks[..., 4:].reshape(n, -1, 8)
    # the byte that is NaN in e4m3 is 0 in llama.cpp, which does not read the sign of others (of 0xFF it makes 480)
    scales = torch.where(scales == 0x7F, 0, torch.where(scales == 0xFF, scales, scales & 0x7F))
    return Parts(_codes(bytes), scales.view(torch.float8_e4m3fn))


def _six_bits(bytes: torch.Tensor) -> torch.Tensor:
    """Scales and minimums, uint8 (..., 2, 8), of Q4_K's twelve bytes (..., 12): the low six bits of the first eight
    bytes; the last four of each in nibbles of the last four bytes, below the high two bits of the first eight."""
    first, last = bytes[..., :8].unflatten(-1, (2, 4)), bytes[..., 8:]
    nibbles = torch.stack(fields(last, 4), dim=-2)
    return torch.cat((first & 63, nibbles | first >> 6 << 4), dim=-1)


def _signed_six_bits(bytes: torch.Tensor) -> torch.Tensor:
    """Scales -32..31, int8 (..., 8), of IQ4_XS's six bytes (..., 6): the high two bits of all in two bytes, then the
    low four in nibbles."""
    high = bytes[..., :2, None] >> torch.arange(0, 8, 2, dtype=torch.uint8, device=bytes.device) & 3
    low = torch.stack(fields(bytes[..., 2:], 4), dim=-1)
    return (high.flatten(-2) << 4 | low.flatten(-2)).to(torch.int8) - 32


class _Lattice(NamedTuple):
    """How a type stores numbers +-size * d * (2 s + 1) / unit."""

    sizes: tuple[int, ...]
    unit: int
    group: int
    """Elements that share s."""
    levels: slice
    """Bytes of a block that hold s: two in nibbles, or one above signs."""
    above_signs: bool = False

    @property
    def format(self) -> WeightFormat:
        numbers = sorted(sign * size / self.unit for size in self.sizes for sign in (-1, 1))
        return WeightFormat(self.group, "none", "s8x256", codebook((*numbers, *[0] * (16 - len(numbers)))))


def _lattice(type: str, lattice: _Lattice, blocks: torch.Tensor) -> Parts:
    bytes = blocks[..., lattice.levels]
    levels = bytes >> 4 if lattice.above_signs else torch.stack(fields(bytes, 4), -1).flatten(-2)
    plain = blocks.to("cpu", copy=True)
    plain[..., :2] = torch.ones(1, dtype=torch.float16, device="cpu").view(torch.uint8)
    plain[..., lattice.levels] = plain[..., lattice.levels] & 15 if lattice.above_signs else 0
    gguf, element = gguf_package(), lattice.format.element_rule
    codes = [
        element.nearest(
            torch.from_numpy(gguf.quants.dequantize(rows.flatten(1).numpy(), gguf.GGMLQuantizationType[type]))
        )
        .to(torch.uint8)
        .to(blocks.device)
        for rows in plain.split(max(1, _ELEMENTS // (256 * blocks.shape[1])))
    ]
    levels = (2 * levels + 1).to(torch.int8).flatten(1)
    return Parts(torch.cat(codes), levels, factors=_fp16(blocks[..., :2])[..., None])


_IQ2_SIZES = (8, 25, 43)
_LATTICES = {
    "IQ3_XXS": _Lattice((4, 12, 20, 28, 36, 44, 52, 62), 4, 32, slice(69, 98, 4), above_signs=True),
    "IQ3_S": _Lattice((1, 3, 5, 7, 9, 11, 13, 15), 1, 32, slice(106, 110)),
    "IQ2_XXS": _Lattice(_IQ2_SIZES, 8, 32, slice(9, 66, 8), above_signs=True),
    "IQ2_XS": _Lattice(_IQ2_SIZES, 8, 16, slice(66, 74)),
    "IQ2_S": _Lattice(_IQ2_SIZES, 8, 16, slice(74, 82)),
}
TYPES = {
    "Q8_0": BlockType(WeightFormat(32, "none", "fp16", "int8"), _q8_0),
    "Q6_K": BlockType(WeightFormat.parse("q6_k"), _q6_k),
    "Q5_K": BlockType(WeightFormat.parse("q5_k"), _q5_k),
    "Q5_0": BlockType(WeightFormat(32, "none", "fp16", "int5"), _q5_0),
    "Q5_1": BlockType(WeightFormat(32, "float", "fp16", "int5"), _q5_1),
    "Q4_0": BlockType(WeightFormat(32, "none", "fp16"), _q4_0),
    "Q4_1": BlockType(WeightFormat(32, "float", "fp16"), _q4_1),
    "Q4_K": BlockType(WeightFormat.parse("q4_k"), _q4_k),
    "Q3_K": BlockType(WeightFormat.parse("q3_k"), _q3_k),
    "Q2_K": BlockType(WeightFormat.parse("q2_k"), _q2_k),
    "Q2_0": BlockType(WeightFormat(64, "int", "fp16", "int2"), _q2_0),
    "TQ2_0": BlockType(WeightFormat(256, "int", "fp16", "int2"), _tq2_0),
    "IQ4_NL": BlockType(WeightFormat(32, "none", "fp16", "iq4"), _q4_0),
    "IQ4_XS": BlockType(WeightFormat(32, "none", "s8x256", "iq4"), _iq4_xs),
    "MXFP4": BlockType(WeightFormat.parse("mxfp4"), _mxfp4),
    "NVFP4": BlockType(WeightFormat.parse("nvfp4"), _nvfp4),
    **{name: BlockType(lattice.format, partial(_lattice, name, lattice)) for name, lattice in _LATTICES.items()},
}
"""By name of the type. Matrices of other types stay dense."""


class BlockNumbers(Numbers):
    """The numbers of a matrix, or of one of each expert, in blocks.

    Args:
        type: one of :data:`TYPES`.
        blocks: rows of blocks, uint8 (n, blocks, bytes) or (experts, n, blocks, bytes).
        factor: float32 (), f of a matrix in NVFP4; None for other types.
    """

    def __init__(self, type: str, blocks: torch.Tensor, factor: torch.Tensor | None = None) -> None:
        *experts, n, _, _ = blocks.shape
        k = TYPES[type].parts(blocks.flatten(0, -3)[:1]).codes.shape[1]
        super().__init__(TYPES[type].format, n, k, blocks.device, experts[0] if experts else 0)
        self._type, self._blocks, self._factor = type, blocks, factor

    def components(self, some: slice) -> WeightComponents:
        rows = self._blocks[some].flatten(0, -3)
        codes, scales, zeros, factors = TYPES[self._type].parts(rows)
        channels = None if self._factor is None else self._factor.expand(len(rows)).contiguous()
        return WeightComponents(codes, scales, zeros, channels, factors)

    def expert(self, index: int) -> Numbers:
        return BlockNumbers(self._type, self._blocks[index], self._factor)
