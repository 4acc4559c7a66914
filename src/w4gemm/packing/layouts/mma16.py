"""The layout of the Hopper kernels: one contiguous block for each 64 rows x 128 columns.

blocks int32 (ceil(n / 64), ceil(k / 128), words). A block is what one bulk copy brings: 1024 words of codes, then the
scales (and zero points) of its 128 / g groups, where g = gcd(group_size, 128); a group of more than 128 repeats its
scale in each block, and so does a per-column scale.

    codes   [chunk of 64 columns: 2][warp: 4][lane: 32][step of 16 columns: 4]
    scales  [group][warp: 4][lane / 4: 8][scale, zero point if any]

A code word holds the eight codes that a lane feeds to one m64nNk16 WGMMA (or one m16n8k16 mma) as operand A. With
lane = 4 * g + q, bits 4 * i .. of the low and high halfword are the codes of the first and second element of
register i:

    i = row8 + 2 * col8:  row 16 * warp + 8 * row8 + g,  columns 16 * step + 8 * col8 + 2 * q + {0, 1}

A scale word holds the 16-bit scales of rows g (low halfword) and g + 8. Zero points are stored likewise in the scale
dtype, in which an integer 0..15 is exact. Rows past n and groups past k have scale and zero point 0, so their weight
is 0; columns past k in the last group have code 8, and need activations of 0 there.
"""

from __future__ import annotations

import torch

from w4gemm.formats import SYMMETRIC_ZERO, WeightFormat
from w4gemm.packing.block import BLOCK_K, BLOCK_N, CODE_WORDS, Block
from w4gemm.packing.layouts.base import Parts


class Mma16Layout:
    name = "mma16"

    def supports(self, format: WeightFormat) -> str:
        return "e4m3 scales are for fp8 activations, the mma8 layout" if format.has_channels else ""

    def shapes(self, format: WeightFormat, n: int, k: int) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        blocks = (-(-n // BLOCK_N), -(-k // BLOCK_K), Block.of(format).words)
        return ((torch.int32, blocks),)

    def pack(self, parts: Parts, format: WeightFormat) -> tuple[torch.Tensor, ...]:
        n, k = parts.codes.shape
        dtype, shape = self.shapes(format, n, k)[0]
        blocks = torch.empty(shape, dtype=dtype, device=parts.codes.device)
        blocks[:, :, :CODE_WORDS] = self._pack_codes(parts.codes, format, shape[0], shape[1])
        words = [_pack_scales(self._scales_as_halves(parts.scales), format, k, shape[0], shape[1])]
        if parts.zeros is not None:
            words.append(_pack_scales(self._zeros_as_halves(parts.zeros, format), format, k, shape[0], shape[1]))
        blocks[:, :, CODE_WORDS:] = torch.stack(words, dim=-1).reshape(shape[0], shape[1], -1)
        return (blocks,)

    def unpack(self, tensors: tuple[torch.Tensor, ...], format: WeightFormat, n: int, k: int) -> Parts:
        (blocks,) = tensors
        codes = self._unpack_codes(blocks[:, :, :CODE_WORDS], format)[:n, :k].contiguous()
        words = blocks[:, :, CODE_WORDS:].reshape(*blocks.shape[:2], -1, 2 if format.has_zero else 1)
        scales = self._scales_from_halves(_unpack_scales(words[..., 0], format, n, k), format)
        if not format.has_zero:
            return Parts(codes, scales, None)
        zeros = self._zeros_from_halves(_unpack_scales(words[..., 1], format, n, k), format)
        return Parts(codes, scales, zeros)

    def _scales_as_halves(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.contiguous().view(torch.int16)

    def _scales_from_halves(self, halves: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        return halves.view(format.scale_dtype)

    def _zeros_as_halves(self, zeros: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        return zeros.to(format.scale_dtype).view(torch.int16)

    def _zeros_from_halves(self, halves: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        return halves.view(format.scale_dtype).to(format.zero_dtype)

    def _pack_codes(self, codes: torch.Tensor, format: WeightFormat, n_blocks: int, k_blocks: int) -> torch.Tensor:
        n, k = codes.shape
        pad = (0, k_blocks * BLOCK_K - k, 0, n_blocks * BLOCK_N - n)
        codes = torch.nn.functional.pad(codes, pad, value=SYMMETRIC_ZERO)
        #                 nb       warp row8 g  kb        chunk step col8 q element
        view = codes.view(n_blocks, 4, 2, 8, k_blocks, 2, 4, 2, 4, 2)
        words = torch.zeros(n_blocks, k_blocks, 2, 4, 8, 4, 4, dtype=torch.int32, device=codes.device)
        for row8 in range(2):
            for col8 in range(2):
                for element in range(2):
                    part = view[:, :, row8, :, :, :, :, col8, :, element]  # nb warp g kb chunk step q
                    words |= part.permute(0, 3, 4, 1, 2, 6, 5).int() << _register_shift(row8, col8, element)
        return words.view(n_blocks, k_blocks, CODE_WORDS)

    def _unpack_codes(self, words: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        n_blocks, k_blocks = words.shape[:2]
        words = words.reshape(n_blocks, k_blocks, 2, 4, 8, 4, 4).permute(
            0, 3, 4, 1, 2, 6, 5
        )  # nb warp g kb chunk step q
        codes = torch.empty(n_blocks, 4, 2, 8, k_blocks, 2, 4, 2, 4, 2, dtype=torch.uint8, device=words.device)
        for row8 in range(2):
            for col8 in range(2):
                for element in range(2):
                    part = (words >> _register_shift(row8, col8, element)) & 0xF
                    codes[:, :, row8, :, :, :, :, col8, :, element] = part.to(torch.uint8)
        return codes.view(n_blocks * BLOCK_N, k_blocks * BLOCK_K)


def _register_shift(row8: int, col8: int, element: int) -> int:
    return 4 * (row8 + 2 * col8) + 16 * element


def _pack_scales(scales: torch.Tensor, format: WeightFormat, k: int, n_blocks: int, k_blocks: int) -> torch.Tensor:
    """Words (n_blocks, k_blocks, groups per block * 32) of an int16 tensor (n, groups)."""
    step = Block.of(format).scale_group
    columns = torch.arange(0, k_blocks * BLOCK_K, step, device=scales.device)
    source = (columns // format.group_length(k)).clamp(max=scales.shape[1] - 1)
    expanded = torch.where(columns < k, scales[:, source], 0)  # a step wholly past k gets 0
    expanded = torch.nn.functional.pad(expanded, (0, 0, 0, n_blocks * BLOCK_N - scales.shape[0]))
    half = expanded.contiguous().int() & 0xFFFF
    half = half.view(n_blocks, 4, 2, 8, k_blocks, BLOCK_K // step)  # nb warp row8 g kb group
    words = half[:, :, 0] | (half[:, :, 1] << 16)
    return words.permute(0, 3, 4, 1, 2).reshape(n_blocks, k_blocks, -1)


def _unpack_scales(words: torch.Tensor, format: WeightFormat, n: int, k: int) -> torch.Tensor:
    n_blocks, k_blocks = words.shape[:2]
    step = Block.of(format).scale_group
    words = words.reshape(n_blocks, k_blocks, BLOCK_K // step, 4, 8).permute(0, 3, 4, 1, 2)  # nb warp g kb group
    half = torch.stack((words & 0xFFFF, (words >> 16) & 0xFFFF), dim=2)  # nb warp row8 g kb group
    half = half.reshape(n_blocks * BLOCK_N, k_blocks * (BLOCK_K // step))
    first = torch.arange(format.groups(k), device=words.device) * (format.group_length(k) // step)
    return half[:n, first].to(torch.int16).contiguous()
