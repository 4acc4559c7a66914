"""The layouts of the GPU kernels, ``mma16`` and ``mma8``: one contiguous block for each 64 rows x 128 columns.

blocks int32 (ceil(n / 64), ceil(k / 128), words): see :mod:`w4gemm.packing.block` for the parts of a block. Scales of
output channels, if the format has any or the codec takes them out of the groups' scales, are a second tensor, float32
(n).

    mma16   codes   [half of 64 columns: 2][strip: 4][lane: 32][step of 16 columns: 4]
    mma8    codes   [half of 64 columns: 2][strip: 4][lane: 32][step of 32 columns: 2][row8: 2]

With lane = 4 * g + q, a word of mma16 holds the eight codes that a lane feeds to one m64nNk16 WGMMA (or one m16n8k16
mma) as operand A:

    rows 16 * strip + 8 * row8 + g,  columns 16 * step + 8 * col8 + 2 * q + {0, 1} of the half: register row8 + 2 * col8

A word of mma8 holds one row for m64nNk32 (or m16n8k32):

    row 16 * strip + 8 * row8 + g,  columns 32 * step + 16 * col16 + 4 * q + {0 .. 3}: register row8 + 2 * col16

The format's codec says which bits of the word they are, and how a scale's field is filled. A scale word holds the
fields of rows g (low halfword) and g + 8. A group of more than 128 columns repeats its scale in each block, and so does
a per-column scale. Rows past n and groups past k have fields 0, so their weight is 0; columns past k in the last group
have the code of 0, and need activations of 0 there.
"""

from __future__ import annotations

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.packing.block import BLOCK_K, BLOCK_N, CODE_WORDS, Block
from w4gemm.packing.codecs import Codec, Fragment, codec_for, refusal
from w4gemm.packing.layouts.base import WeightComponents


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

    def shapes(self, format: WeightFormat, n: int, k: int) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        blocks = (-(-n // BLOCK_N), -(-k // BLOCK_K), self.codec(format).block(format).words)
        channels = ((torch.float32, (n,)),) if self.codec(format).has_channels(format) else ()
        return ((torch.int32, blocks), *channels)

    def pack(self, parts: WeightComponents, format: WeightFormat) -> tuple[torch.Tensor, ...]:
        n, k = parts.codes.shape
        codec, block = self.codec(format), self.codec(format).block(format)
        (dtype, shape), *_ = self.shapes(format, n, k)
        blocks = torch.empty(shape, dtype=dtype, device=parts.codes.device)
        pad = (0, shape[1] * BLOCK_K - k, 0, shape[0] * BLOCK_N - n)
        codes = codec.codes_beside(parts.codes, parts.scales, format)
        codes = torch.nn.functional.pad(codes, pad, value=format.element_rule.padding_code)
        blocks[:, :, :CODE_WORDS] = codec.code_words(codes)
        fields = [codec.stored_scales(parts.scales)]
        if parts.zeros is not None:
            fields.append(codec.stored_zeros(parts.zeros, format))
        words = [w for s in fields for w in _scale_words(s, block, format, k, shape[0], shape[1])]
        blocks[:, :, CODE_WORDS:] = torch.stack(words, dim=-1).flatten(2)
        channels = codec.stored_channels(parts.scales, parts.channels)
        return (blocks,) if channels is None else (blocks, channels.contiguous())

    def unpack(self, tensors: tuple[torch.Tensor, ...], format: WeightFormat, n: int, k: int) -> WeightComponents:
        blocks, channels = tensors[0], tensors[1] if len(tensors) > 1 else None
        codec, block = self.codec(format), self.codec(format).block(format)
        codes = codec.codes_of(blocks[:, :, :CODE_WORDS])[:n, :k].contiguous()
        words = blocks[:, :, CODE_WORDS:].unflatten(2, (-1, block.words_per_scale))
        fields = [
            _from_scale_words(part, block, format, n, k) for part in words.split(max(1, block.scale_bits // 16), -1)
        ]
        zeros = codec.zeros_from(fields[1], format) if format.has_zero else None
        scales = codec.scales_from(fields[0], format, channels)
        return WeightComponents(codes, scales, zeros, channels if format.has_channels else None)


def _scale_words(
    fields: torch.Tensor, block: Block, format: WeightFormat, k: int, n_blocks: int, k_blocks: int
) -> list[torch.Tensor]:
    """Words (n_blocks, k_blocks, runs * 32) of fields int16 (n, groups); two of them of fields int32."""
    step, shared = block.scale_group, block.groups_per_word
    columns = torch.arange(0, k_blocks * BLOCK_K, step, device=fields.device)
    source = (columns // format.group_length(k)).clamp(max=fields.shape[1] - 1)
    expanded = torch.where(columns < k, fields[:, source], 0)  # a step wholly past k gets 0
    expanded = torch.nn.functional.pad(expanded, (0, 0, 0, n_blocks * BLOCK_N - fields.shape[0]))
    bits = expanded.int() & block.field_mask
    bits = bits.view(n_blocks * BLOCK_N, k_blocks, block.groups)
    bits = torch.nn.functional.pad(bits, (0, block.runs * shared - block.groups))
    bits = bits.view(n_blocks, 4, 2, 8, k_blocks, block.runs, shared)  # nb strip row8 g kb run group
    words = [torch.zeros(n_blocks, 4, 8, k_blocks, block.runs, dtype=torch.int32, device=fields.device)]
    words += [torch.zeros_like(words[0])] if block.scale_bits == 32 else []
    for row8 in range(2):
        for group in range(shared):
            at = row8 * max(16, block.scale_bits) + group * block.scale_bits
            words[at // 32] |= bits[:, :, row8, ..., group] << at % 32
    return [w.permute(0, 3, 4, 1, 2).reshape(n_blocks, k_blocks, -1) for w in words]


def _from_scale_words(words: torch.Tensor, block: Block, format: WeightFormat, n: int, k: int) -> torch.Tensor:
    """The inverse of :func:`_scale_words`: (n, groups). words: (n_blocks, k_blocks, runs * 32, 1 or 2)."""
    n_blocks, k_blocks = words.shape[:2]
    words = words.reshape(n_blocks, k_blocks, block.runs, 4, 8, -1).permute(5, 0, 3, 4, 1, 2)  # word nb strip g kb run
    rows = []
    for row8 in range(2):
        places = [row8 * max(16, block.scale_bits) + i * block.scale_bits for i in range(block.groups_per_word)]
        rows.append(torch.stack([(words[at // 32] >> at % 32) & block.field_mask for at in places], dim=-1))
    bits = torch.stack(rows, dim=2)  # nb strip row8 g kb run group
    bits = bits.reshape(n_blocks * BLOCK_N, k_blocks, -1)[:, :, : block.groups].flatten(1)
    first = torch.arange(format.groups(k), device=words.device) * (format.group_length(k) // block.scale_group)
    return bits[:n, first].to(torch.int32 if block.scale_bits == 32 else torch.int16).contiguous()
