"""The layout of the Hopper kernels for fp8 activations: as layouts/mma16.py, but with each lane's codes of m64nNk32.

blocks int32 (ceil(n / 64), ceil(k / 128), words): 1024 words of codes, then scales (and zero points) as in sm90.

    codes   [half of 64 columns: 2][warp: 4][lane: 32][step of 32 columns: 2][row8: 2]

With lane = 4 * g + q, a code word holds the eight codes of row 16 * warp + 8 * row8 + g that the lane feeds to one
WGMMA as operand A: columns 32 * step + 16 * col16 + 4 * q + {0 .. 3} of the half, which are the bytes of register
row8 + 2 * col16. How a word holds them is what its decoder (kernels/device/decode_fp8.py) takes least time for:

    for symmetric codes   col16 at bits 8 * i + 4 * col16 .., as sign and magnitude: 2 * v for v = u - 8 >= 0, else
                          2 * (-1 - v) + 1
    zero points           u as an index into a table of 16: its low three bits at 4 * i + 16 * col16 .., its high bit
                          at 8 * i + 7 - 4 * col16
    e4m3 scales           an index too, of four bits at 4 * i + 16 * col16 ..: the low two of u, whether v >= 0, and
                          whether -4 <= v < 4

for i = 0 .. 3, the byte. A zero point z is stored as 16 * z; an e4m3 scale as 16 times its bits, and the
scales of output channels as a second tensor, float32 (n). Rows past n and groups past k have scale and zero point 0;
columns past k in the last group have code 8, and need activations of 0 there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from w4gemm.formats import SYMMETRIC_ZERO, WeightFormat
from w4gemm.packing.block import BLOCK_K, BLOCK_N, CODE_WORDS
from w4gemm.packing.layouts.base import Parts
from w4gemm.packing.layouts.mma16 import Mma16Layout

_SIGN_MAGNITUDE = [2 * (u - 8) if u >= 8 else 2 * (7 - u) + 1 for u in range(16)]
"""By code."""
_SIGN_AND_SIZE = [u & 3 | u >> 1 & 4 | (u << 1 ^ u) & 8 for u in range(16)]
"""By code."""
_ROW_BYTES = 16
"""Of a row of the decoder's table."""


class Mma8Layout(Mma16Layout):
    name = "mma8"

    def supports(self, format: WeightFormat) -> str:
        if format.zero == "float":
            return (
                "float zero points are not multiples of the scale, so e4m3 cannot hold u - z; 16-bit activations take "
                "them in the mma16 layout"
            )
        return ""

    def shapes(self, format: WeightFormat, n: int, k: int) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        channels = ((torch.float32, (n,)),) if format.has_channels else ()
        return (*super().shapes(format, n, k), *channels)

    def pack(self, parts: Parts, format: WeightFormat) -> tuple[torch.Tensor, ...]:
        blocks = super().pack(parts, format)
        return blocks if parts.channels is None else (*blocks, parts.channels.contiguous())

    def unpack(self, tensors: tuple[torch.Tensor, ...], format: WeightFormat, n: int, k: int) -> Parts:
        return super().unpack(tensors[:1], format, n, k)._replace(channels=tensors[1] if format.has_channels else None)

    def _scales_as_halves(self, scales: torch.Tensor) -> torch.Tensor:
        if scales.dtype != torch.float8_e4m3fn:
            return super()._scales_as_halves(scales)
        return scales.view(torch.uint8).short() * _ROW_BYTES

    def _scales_from_halves(self, halves: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        if not format.has_channels:
            return super()._scales_from_halves(halves, format)
        return (halves // _ROW_BYTES).to(torch.uint8).view(format.scale_dtype)

    def _zeros_as_halves(self, zeros: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        return zeros.short() * _ROW_BYTES

    def _zeros_from_halves(self, halves: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        return (halves // _ROW_BYTES).to(torch.uint8)

    def _pack_codes(self, codes: torch.Tensor, format: WeightFormat, n_blocks: int, k_blocks: int) -> torch.Tensor:
        n, k = codes.shape
        pad = (0, k_blocks * BLOCK_K - k, 0, n_blocks * BLOCK_N - n)
        codes = torch.nn.functional.pad(codes, pad, value=SYMMETRIC_ZERO)
        numbers = _numbers(format)
        if numbers:
            codes = torch.tensor(numbers, dtype=torch.uint8, device=codes.device)[codes.int()]
        #                 nb       warp row8 g  kb     half step col16 q  i
        view = codes.view(n_blocks, 4, 2, 8, k_blocks, 2, 2, 2, 4, 4)
        words = torch.zeros(n_blocks, k_blocks, 2, 4, 8, 4, 2, 2, dtype=torch.int32, device=codes.device)
        for col16, i, bits, shift in _places(format):
            part = (view[..., col16, :, i] & bits).permute(0, 4, 5, 1, 3, 7, 6, 2).int()  # as words
            words |= part << shift
        return words.view(n_blocks, k_blocks, CODE_WORDS)

    def _unpack_codes(self, words: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        n_blocks, k_blocks = words.shape[:2]
        # nb kb half warp g q step row8 to nb warp row8 g kb half step q
        words = words.reshape(n_blocks, k_blocks, 2, 4, 8, 4, 2, 2).permute(0, 3, 7, 4, 1, 2, 6, 5)
        codes = torch.zeros(n_blocks, 4, 2, 8, k_blocks, 2, 2, 2, 4, 4, dtype=torch.uint8, device=words.device)
        for col16, i, bits, shift in _places(format):
            codes[..., col16, :, i] |= ((words >> shift) & bits).to(torch.uint8)
        numbers = _numbers(format)
        if numbers:
            inverse = sorted(range(16), key=numbers.__getitem__)
            codes = torch.tensor(inverse, dtype=torch.uint8, device=words.device)[codes.int()]
        return codes.view(n_blocks * BLOCK_N, k_blocks * BLOCK_K)


def _numbers(format: WeightFormat) -> list[int]:
    """What a word holds for each code; empty where it is the code itself."""
    return [] if format.has_zero else _SIGN_AND_SIZE if format.has_channels else _SIGN_MAGNITUDE


def _places(format: WeightFormat) -> Iterator[tuple[int, int, int, int]]:
    """(col16, i, bits of what stands for a code, shift to where they lie in its word)."""
    for col16 in range(2):
        for i in range(4):
            if format.has_zero:
                yield col16, i, 7, 4 * i + 16 * col16
                yield col16, i, 8, 8 * i + 4 - 4 * col16
            else:
                yield col16, i, 15, 4 * i + 16 * col16 if format.has_channels else 8 * i + 4 * col16
