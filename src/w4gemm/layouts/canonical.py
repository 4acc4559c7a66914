"""The canonical layout: what is saved, sharded and converted. Plain row-major, two codes a byte.

codes uint8 (n, ceil(k / 2)), the even column in the low nibble; scales (n, groups); zeros (n, groups) if any.
"""

from __future__ import annotations

import torch

from w4gemm.formats import WeightFormat
from w4gemm.layouts.base import Parts


class CanonicalLayout:
    name = "canonical"

    def supports(self, format: WeightFormat) -> str:
        return ""

    def shapes(self, format: WeightFormat, n: int, k: int) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        groups = (n, format.groups(k))
        shapes = [(torch.uint8, (n, -(-k // 2))), (format.scale_dtype, groups)]
        if format.zero_dtype is not None:
            shapes.append((format.zero_dtype, groups))
        return tuple(shapes)

    def pack(self, parts: Parts, format: WeightFormat) -> tuple[torch.Tensor, ...]:
        codes = torch.nn.functional.pad(parts.codes, (0, parts.codes.shape[1] % 2))
        packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
        tensors = (packed, parts.scales.contiguous())
        return tensors if parts.zeros is None else (*tensors, parts.zeros.contiguous())

    def unpack(self, tensors: tuple[torch.Tensor, ...], format: WeightFormat, n: int, k: int) -> Parts:
        packed, scales, *zeros = tensors
        codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).reshape(n, -1)[:, :k]
        return Parts(codes.contiguous(), scales, zeros[0] if zeros else None)
