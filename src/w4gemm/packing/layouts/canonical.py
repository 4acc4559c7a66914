"""The canonical layout: what is saved, sharded and converted. Plain row-major.

codes uint8 (n, ceil(k * bits / 8)), the first column in the lowest bits; scales (n, groups); zeros (n, groups) if any;
channels float32 (n) if any; factors fp16 (n, superblocks, 2) if any.
"""

from __future__ import annotations

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.packing.bits import pack, unpack
from w4gemm.packing.layouts.base import WeightComponents


class CanonicalLayout:
    name = "canonical"

    def supports(self, format: WeightFormat) -> str:
        return ""

    def shapes(self, format: WeightFormat, n: int, k: int) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        groups = (n, format.groups(k))
        shapes: list[tuple[torch.dtype, tuple[int, ...]]] = [
            (torch.uint8, (n, -(-k * format.bits // 8))),
            (format.scale_dtype, groups),
        ]
        if format.zero_dtype is not None:
            shapes.append((format.zero_dtype, groups))
        if format.has_channels:
            shapes.append((torch.float32, (n,)))
        if format.has_factors:
            shapes.append((torch.float16, (n, format.superblocks(k), 2)))
        return tuple(shapes)

    def pack(self, parts: WeightComponents, format: WeightFormat) -> tuple[torch.Tensor, ...]:
        tensors = (pack(parts.codes, format.bits), *(t for t in parts[1:] if t is not None))
        return tuple(t.contiguous() for t in tensors)

    def unpack(self, tensors: tuple[torch.Tensor, ...], format: WeightFormat, n: int, k: int) -> WeightComponents:
        packed, *rest = tensors
        codes = unpack(packed, format.bits)[:, :k]
        found = dict(zip(format.part_names, (codes.contiguous(), *rest), strict=True))
        return WeightComponents.of(found.get(name) for name in WeightComponents._fields)
