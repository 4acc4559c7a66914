"""The layout of the CPU kernel: code columns as rows of a 4-bit embedding table, which PyTorch can sum with weights.

rows uint8 (ceil(n / 128), k, 68): entry [c, j] holds the 128 codes w[128 * c .. 128 * c + 127, j], the even row of w in
the low nibble, then the float16 factor 1 and offset -8. scales (ceil(n / 128), groups, 128); zeros the same shape if
any; factors (ceil(n / 128), 2 * superblocks, 128) if any, alternately those of scales and of zero points. Padding has
scale and zero point 0, so its weight is 0. The order is the same on every machine.

PyTorch's ``embedding_bag_4bit`` gives sum_j x[j] * (factor * code[j] + offset) over a range of j, in float32: the dot
products of one token with 128 output features, before the scale. The codes are centred because a sum of codes 0..15
would mostly cancel with the zero points, and float32 would show it.
"""

from __future__ import annotations

import torch

from w4gemm.core.elements import ELEMENTS
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.bits import pack, unpack
from w4gemm.packing.layouts.base import WeightComponents

TABLE_N = 128
"""Output features in one row of the table. Wider is up to 10 % faster, but small n are padded to it."""

_CODES = ELEMENTS["int4"]  # embedding_bag_4bit sums these
SYMMETRIC_ZERO = _CODES.padding_code
"""What is subtracted from codes before they are summed."""
CODE_BYTES = TABLE_N * _CODES.bits // 8
"""Bytes of the codes in one row of the table; factor and offset follow."""
ROW_BYTES = CODE_BYTES + 4


class CpuLayout:
    name = "cpu"

    def supports(self, format: WeightFormat) -> str:
        if format.has_channels:
            return "it has no place for scales of output channels; the canonical layout has"
        if format.scale_dtype.itemsize < 2 and not format.has_factors:
            return "it holds scales of 16 and 32 bits; the canonical layout holds these"
        return "" if format.element == _CODES.name else f"its sums are of {_CODES.name} codes, not of {format.element}"

    def shapes(self, format: WeightFormat, n: int, k: int) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        chunks = -(-n // TABLE_N)
        groups = (chunks, format.groups(k), TABLE_N)
        shapes = [(torch.uint8, (chunks, k, ROW_BYTES)), (format.scale_dtype, groups)]
        if format.zero_dtype is not None:
            shapes.append((format.zero_dtype, groups))
        if format.has_factors:
            shapes.append((torch.float16, (chunks, 2 * format.superblocks(k), TABLE_N)))
        return tuple(shapes)

    def pack(self, parts: WeightComponents, format: WeightFormat) -> tuple[torch.Tensor, ...]:
        codes = _chunked(parts.codes)
        n_chunks, k, _ = codes.shape
        row = torch.tensor([1, -SYMMETRIC_ZERO], dtype=torch.float16, device=codes.device).view(torch.uint8)
        rows = torch.cat((pack(codes, _CODES.bits), row.expand(n_chunks, k, 4)), dim=-1)
        factors = None if parts.factors is None else parts.factors.flatten(1)
        return (rows, *(_chunked(t) for t in (parts.scales, parts.zeros, factors) if t is not None))

    def unpack(self, tensors: tuple[torch.Tensor, ...], format: WeightFormat, n: int, k: int) -> WeightComponents:
        rows, *scales = tensors
        codes = unpack(rows[..., :CODE_BYTES], _CODES.bits)
        found = [t.transpose(1, 2).flatten(0, 1)[:n].contiguous() for t in (codes, *scales)]
        factors = found.pop().unflatten(1, (-1, 2)) if format.has_factors else None
        return WeightComponents(found[0], found[1], found[2] if format.has_zero else None, factors=factors)


def _chunked(t: torch.Tensor) -> torch.Tensor:
    """(n, columns) to (chunks, columns, TABLE_N), filled up with zeros."""
    n, columns = t.shape
    padded = torch.nn.functional.pad(t, (0, 0, 0, -n % TABLE_N))
    return padded.view(-1, TABLE_N, columns).transpose(1, 2).contiguous()
