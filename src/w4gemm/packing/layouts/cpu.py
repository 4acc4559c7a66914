"""The layout of the CPU kernel: code columns as rows of an embedding table, which PyTorch can sum with weights.

rows uint8 (ceil(n / 128), k, row bytes): entry [c, j] holds the 128 codes w[128 * c .. 128 * c + 127, j] in 2, 4 or 8
bits each, the first row of w lowest, then the factor 1 and the offset -2**(bits - 1), in float16 or, behind codes of 8
bits, in float32. scales (ceil(n / 128), groups, 128); zeros the same shape if any; factors (ceil(n / 128), factors *
superblocks, 128) if any, in turn those of scales and of zero points. Padding has scale and zero point 0, so its weight
is 0. The order is the same on every machine.

PyTorch's ``embedding_bag_4bit`` gives sum_j x[j] * (factor * code[j] + offset) over a range of j, in float32: the dot
products of one token with 128 output features, before the scale. The codes are centred because a sum of codes 0..15
would mostly cancel with the zero points, and float32 would show it.
"""

from __future__ import annotations

import torch

from w4gemm.core.formats import TensorShape, WeightFormat
from w4gemm.packing.bits import pack, unpack
from w4gemm.packing.layouts.base import WeightComponents

TABLE_N = 128
"""Output features in one row of the table. Wider is up to 10 % faster, but small n are padded to it."""


def table_bits(format: WeightFormat) -> int:
    """Bits of a code in the table: 2, 4 or 8, for which PyTorch has operators."""
    return 1 << (format.bits - 1).bit_length()


def _trailer(format: WeightFormat) -> torch.Tensor:
    """The bytes behind the codes of a row, which make a code the number that is summed."""
    dtype = torch.float32 if table_bits(format) == 8 else torch.float16
    return torch.tensor([1, -format.element_rule.padding_code], dtype=dtype, device="cpu").view(torch.uint8)


class CpuLayout:
    name = "cpu"

    def supports(self, format: WeightFormat) -> str:
        if format.has_channels:
            return "it has no place for scales of output channels; the canonical layout has"
        if format.scale_dtype.itemsize < 2 and not format.has_factors:
            return "it holds scales of 16 and 32 bits; the canonical layout holds these"
        if format.scale_rule.block_rows:
            return "it has no place for scales that rows share; the canonical layout has"
        return "" if format.element_rule.counts else f"its sums are of integers, not of {format.element}"

    def shapes(self, format: WeightFormat, n: int, k: int) -> tuple[TensorShape, ...]:
        chunks = -(-n // TABLE_N)
        groups = (chunks, format.groups(k), TABLE_N)
        row_bytes = TABLE_N * table_bits(format) // 8 + len(_trailer(format))
        shapes = [(torch.uint8, (chunks, k, row_bytes)), (format.scale_dtype, groups)]
        if format.zero_dtype is not None:
            shapes.append((format.zero_dtype, groups))
        if format.has_factors:
            shapes.append((torch.float16, (chunks, format.factors * format.superblocks(k), TABLE_N)))
        return tuple(shapes)

    def pack(self, parts: WeightComponents, format: WeightFormat) -> tuple[torch.Tensor, ...]:
        codes = _chunked(parts.codes)
        n_chunks, k, _ = codes.shape
        trailer = _trailer(format).to(codes.device)
        rows = torch.cat((pack(codes, table_bits(format)), trailer.expand(n_chunks, k, -1)), dim=-1)
        factors = None if parts.factors is None else parts.factors.flatten(1)
        return (rows, *(_chunked(t) for t in (parts.scales, parts.zeros, factors) if t is not None))

    def unpack(self, tensors: tuple[torch.Tensor, ...], format: WeightFormat, n: int, k: int) -> WeightComponents:
        rows, *scales = tensors
        codes = unpack(rows[..., : TABLE_N * table_bits(format) // 8], table_bits(format))
        numbers = [t.transpose(1, 2).flatten(0, 1)[:n].contiguous() for t in (codes, *scales)]
        factors = numbers.pop().unflatten(1, (-1, format.factors)) if format.has_factors else None
        return WeightComponents(numbers[0], numbers[1], numbers[2] if format.has_zero else None, factors=factors)

    def unpack_rows(
        self, tensors: tuple[torch.Tensor, ...], format: WeightFormat, k: int, ids: torch.Tensor
    ) -> WeightComponents:
        rows, *scales = tensors
        bits, chunk, row = table_bits(format), ids // TABLE_N, ids % TABLE_N
        codes = rows[chunk, :, row * bits // 8] >> (row * bits % 8)[:, None] & 2**bits - 1
        numbers = [t[chunk, :, row] for t in scales]
        factors = numbers.pop().unflatten(1, (-1, format.factors)) if format.has_factors else None
        return WeightComponents(
            codes.to(torch.uint8), numbers[0], numbers[1] if format.has_zero else None, None, factors
        )


def _chunked(t: torch.Tensor) -> torch.Tensor:
    """(n, columns) to (chunks, columns, TABLE_N), filled up with zeros."""
    n, columns = t.shape
    padded = torch.nn.functional.pad(t, (0, 0, 0, -n % TABLE_N))
    return padded.view(-1, TABLE_N, columns).transpose(1, 2).contiguous()
