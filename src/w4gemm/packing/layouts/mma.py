"""The layouts of the GPU kernels, ``mma16`` and ``mma8``: one contiguous block for each 64 rows x 128 columns.

blocks int32 (ceil(n / 64), ceil(k / 128), words), an even number along k if two share factors: see
:mod:`w4gemm.packing.block` for the parts of a block, and where they lie. Scales of
output channels, if the format has any or the codec takes them out of the groups' scales, are a second tensor, float32
(n).

With lane = 4 * g + q, a lane has in mma16 the codes that it feeds to four m64nNk16 WGMMAs (or m16n8k16 mmas) as
operand A, eight to each. The word of a step has those of 4 bits:

    rows 16 * strip + 8 * row8 + g,  columns 16 * step + 8 * col8 + 2 * q + {0, 1} of the half: register row8 + 2 * col8

In mma8 it has those of two m64nNk32 (or m16n8k32), sixteen to each. Word 2 * step + row8 has those of 4 bits:

    row 16 * strip + 8 * row8 + g,  columns 32 * step + 16 * col16 + 4 * q + {0 .. 3}: register row8 + 2 * col16

The format's codec says which bits of a lane's words a code has, and how a scale's field is filled. A scale word holds
the fields of rows g (low halfword) and g + 8. A group of more than 128 columns repeats its scale in each block, and so
does a per-column scale. Rows past n and groups past k have fields 0, so their weight is 0; columns past k in the last
group have the code of 0, and need activations of 0 there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from w4gemm.core.formats import TensorShape, WeightFormat
from w4gemm.packing.block import BLOCK_K, BLOCK_N, Block
from w4gemm.packing.codecs import Codec, Fragment, codec_for, refusal
from w4gemm.packing.layouts.base import WeightComponents, picked

_ELEMENTS = 2**22
"""Elements of whole blocks that are unpacked at a time for some of their rows."""


class MmaLayout:
    """Blocks in the order of a fragment."""

    def __init__(self, fragment: Fragment) -> None:
        self.name, self.fragment = fragment.name, fragment

    def supports(self, format: WeightFormat) -> str:
        return refusal(format, self.fragment)

    def codec(self, format: WeightFormat) -> Codec:
        """The format's codec.

        Raises:
            ValueError: if there is none, with the reason.
        """
        codec = codec_for(format, self.fragment)
        if codec is None:
            raise ValueError(f"layout: {self.name} cannot hold {format}: {self.supports(format)}")
        return codec

    def shapes(self, format: WeightFormat, n: int, k: int) -> tuple[TensorShape, ...]:
        block = self.codec(format).block(format)
        blocks = (-(-n // BLOCK_N), block.blocks_along(k), block.words)
        channels = ((torch.float32, (n,)),) if self.codec(format).has_channels(format) else ()
        return ((torch.int32, blocks), *channels)

    def pack(self, parts: WeightComponents, format: WeightFormat) -> tuple[torch.Tensor, ...]:
        n, k = parts.codes.shape
        codec, block = self.codec(format), self.codec(format).block(format)
        (_, shape), *_ = self.shapes(format, n, k)
        pad = (0, shape[1] * BLOCK_K - k, 0, shape[0] * BLOCK_N - n)
        codes = codec.codes_beside(parts.codes, parts.scales, format)
        codes = torch.nn.functional.pad(codes, pad, value=format.element_rule.padding_code)
        words = [codec.code_words(codes)]
        scales = format.scales_of_rows(parts.scales, shape[0] * BLOCK_N)
        fields = codec.stored_fields(scales, parts.zeros, format)
        columns = _Columns(block, format.group_length(k), k)
        words += [_scale_words(fields, columns, shape[0], shape[1])] if fields else []
        if parts.factors is not None:
            fields = [t.contiguous().view(torch.int16) for t in parts.factors.unbind(-1)]
            factors = _scale_words(fields, columns.of_factors(format), shape[0], shape[1])
            if block.factor_blocks == 2:  # first block, factors, second block
                own = torch.cat(words, dim=2)
                words = [own[:, ::2], factors[:, ::2], own[:, 1::2]]
            else:
                words.append(factors)
        blocks = torch.cat(words, dim=2).view(shape)
        channels = codec.stored_channels(parts.scales, parts.channels)
        return (blocks,) if channels is None else (blocks, channels.contiguous())

    def unpack(self, tensors: tuple[torch.Tensor, ...], format: WeightFormat, n: int, k: int) -> WeightComponents:
        blocks, channels = tensors[0], tensors[1] if len(tensors) > 1 else None
        codec, block = self.codec(format), self.codec(format).block(format)
        factors, count = None, block.group_bytes // 4
        if block.factor_blocks == 2:
            sizes = block.code_words + count, block.factor_bytes // 4, block.code_words + count
            first, words, second = blocks.view(len(blocks), -1, 2 * block.words).split(sizes, 2)
            blocks, factors = torch.stack([first, second], 2).flatten(1, 2), words.repeat_interleave(2, 1)
        elif format.has_factors:
            factors = blocks[:, :, block.code_words + count :]
        codes = codec.codes_of(blocks[:, :, : block.code_words])[:n, :k].contiguous()
        words = blocks[:, :, block.code_words : block.code_words + count]
        columns = _Columns(block, format.group_length(k), k)
        rows = len(blocks) * BLOCK_N if format.scale_rule.block_rows else n
        fields = _from_scale_words(words, columns, rows) if count else []
        scales, zeros = codec.from_fields(fields, format, channels)
        scales = format.scales_of_blocks(scales)
        if factors is not None:
            each = _from_scale_words(factors, columns.of_factors(format), n)
            factors = torch.stack([t.view(torch.float16) for t in each], dim=-1)
        return WeightComponents(codes, scales, zeros, channels if format.has_channels else None, factors)

    def unpack_rows(
        self, tensors: tuple[torch.Tensor, ...], format: WeightFormat, k: int, ids: torch.Tensor
    ) -> WeightComponents:
        """Blocks are unpacked whole, those of some rows at a time."""
        some = ids.split(max(1, _ELEMENTS // BLOCK_N // k))
        each = [self._rows_of_blocks(tensors, format, k, own) for own in some]
        together = (None if ts[0] is None else _joined(ts) for ts in zip(*each, strict=True))
        return WeightComponents.of(together)

    def _rows_of_blocks(
        self, tensors: tuple[torch.Tensor, ...], format: WeightFormat, k: int, ids: torch.Tensor
    ) -> WeightComponents:
        """Unpack as many whole blocks as rows share scales, and take one row of each."""
        high, count = format.scale_rule.block_rows or BLOCK_N, len(ids)
        first, (blocks, *channels) = ids // high * high, tensors

        def whole(t: torch.Tensor, rows: int) -> torch.Tensor:
            every = first[:, None] // rows + torch.arange(high // rows, device=ids.device)
            return t[every.clamp(max=len(t) - 1).flatten()]

        some = (whole(blocks, BLOCK_N), *(whole(t, 1) for t in channels))
        parts = self.unpack(some, format, count * high, k)
        own = torch.arange(count, device=ids.device) * high + ids % high
        scales = format.scales_of_rows(parts.scales, count * high)
        return WeightComponents.of(None if t is None else picked(t, own) for t in parts._replace(scales=scales))


def _joined(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return tensors one below the other, also of fp8."""
    if tensors[0].itemsize > 1:
        return torch.cat(tensors)
    return torch.cat([t.view(torch.uint8) for t in tensors]).view(tensors[0].dtype)


class _Columns(NamedTuple):
    """The columns of a weight that share what a scale word holds."""

    block: Block
    length: int
    """Columns that share a scale."""
    k: int

    def of_factors(self, format: WeightFormat) -> _Columns:
        """Return the columns that share factors."""
        return _Columns(Block(self.block.bits, has_zero=format.has_zero), format.scale_rule.factor_columns, self.k)

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return -(-self.k // self.length)


def _scale_words(fields: list[torch.Tensor], columns: _Columns, n_blocks: int, k_blocks: int) -> torch.Tensor:
    """Words (n_blocks, k_blocks, all scale words) of fields (n, groups), of scales and, if they have words of their
    own, of zero points: int16, or int32 if they have 32 bits."""
    block, shared = columns.block, columns.block.groups_per_word
    first = torch.arange(0, k_blocks * BLOCK_K, block.scale_group, device=fields[0].device)
    source = (first // columns.length).clamp(max=fields[0].shape[1] - 1)
    words: list[torch.Tensor] = []
    for field in fields:
        expanded = torch.where(first < columns.k, field[:, source], 0)  # a step wholly past k gets 0
        expanded = torch.nn.functional.pad(expanded, (0, 0, 0, n_blocks * BLOCK_N - field.shape[0]))
        bits = expanded.int() & block.field_mask
        bits = bits.view(n_blocks * BLOCK_N, k_blocks, block.groups)
        bits = torch.nn.functional.pad(bits, (0, block.runs * shared - block.groups))
        bits = bits.view(n_blocks, 4, 2, 8, k_blocks, block.runs, shared)  # nb strip row8 g kb run group
        shifts = block.scale_bits * torch.arange(shared, dtype=torch.int32, device=bits.device)
        rows = (bits << shifts).sum(-1, dtype=torch.int32).unbind(2)
        words += rows if block.scale_bits == 32 else [rows[0] | rows[1] << 16]
    return torch.stack(words, dim=-1).permute(0, 3, 4, 1, 2, 5).reshape(n_blocks, k_blocks, -1)


def _from_scale_words(words: torch.Tensor, columns: _Columns, n: int) -> list[torch.Tensor]:
    """The inverse of :func:`_scale_words`."""
    block, (n_blocks, k_blocks) = columns.block, words.shape[:2]
    words = words.reshape(n_blocks, k_blocks, block.runs, 4, 8, -1).permute(5, 0, 3, 4, 1, 2)  # word nb strip g kb run
    wide = block.scale_bits == 32
    fields = []
    for pair in words.split(2) if wide else words.split(1):
        rows = [pair[0], pair[1]] if wide else [pair[0], pair[0] >> 16]
        shifts = [block.scale_bits * group for group in range(block.groups_per_word)]
        bits = [torch.stack([(row >> shift) & block.field_mask for shift in shifts], dim=-1) for row in rows]
        field = torch.stack(bits, dim=2).reshape(n_blocks * BLOCK_N, k_blocks, -1)  # nb strip row8 g kb run group
        field = field[:, :, : block.groups].flatten(1)
        first = torch.arange(columns.groups, device=words.device) * (columns.length // block.scale_group)
        fields.append(field[:n, first].to(torch.int32 if wide else torch.int16).contiguous())
    return fields
