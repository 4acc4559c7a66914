"""The interface of a pack layout, the order of a weight's bits, :class:`PackLayout`; and the canonical one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch

from w4gemm.core.formats import TensorShape, WeightFormat
from w4gemm.packing.bits import pack, unpack


class WeightComponents(NamedTuple):
    """A weight taken apart: what every layout packs from and unpacks to."""

    codes: torch.Tensor
    """uint8 (n, k), each 0 .. 2**bits - 1."""
    scales: torch.Tensor
    """``format.scale_dtype`` (n, groups). If blocks of rows share scales, (format.scale_rows(n), groups): of each block
    the scales of its even rows, then those of its odd rows."""
    zeros: torch.Tensor | None
    """``format.zero_dtype`` (n, groups), or None for a format without zero points."""
    channels: torch.Tensor | None = None
    """float32 (n), or None for a format without scales of output channels."""
    factors: torch.Tensor | None = None
    """fp16 (n, superblocks, format.factors), of scales and, if there are any, of zero points; None for a format
    without."""

    @classmethod
    def of(cls, parts: Iterable[torch.Tensor | None]) -> WeightComponents:
        """From all of them in order."""
        codes, scales, *others = parts
        assert codes is not None and scales is not None
        return cls(codes, scales, *others)


class PackLayout(Protocol):
    """A lossless order of a weight's bits. It depends on the format, never on a launch's config.

    Rows and columns that a layout pads are dropped again by ``unpack``.
    """

    name: str

    def supports(self, format: WeightFormat) -> str:
        """Why ``format`` cannot be packed so, or the empty string."""
        ...

    def shapes(self, format: WeightFormat, n: int, k: int) -> tuple[TensorShape, ...]:
        """dtype and shape of each packed tensor."""
        ...

    def pack(self, parts: WeightComponents, format: WeightFormat) -> tuple[torch.Tensor, ...]: ...

    def unpack(self, tensors: tuple[torch.Tensor, ...], format: WeightFormat, n: int, k: int) -> WeightComponents: ...

    def unpack_rows(
        self, tensors: tuple[torch.Tensor, ...], format: WeightFormat, k: int, ids: torch.Tensor
    ) -> WeightComponents:
        """Unpack the rows ``ids``, int64 (rows,), in their order. Each has scales of its own, also where blocks of rows
        share them."""
        ...


class CanonicalLayout:
    """The layout that is saved, sharded and converted: plain row-major.

    codes uint8 (n, ceil(k * bits / 8)), a dense little-endian stream for each row: the first column in the lowest bits;
    scales (n, groups), of blocks of rows (2 * blocks, groups); zeros (n, groups) if any; channels float32 (n) if any;
    factors fp16 (n, superblocks, 1 or 2) if any. Scales and zero points of four bits are streams as codes are, those of
    six bits bytes.
    """

    name = "canonical"

    def supports(self, format: WeightFormat) -> str:
        return ""

    def shapes(self, format: WeightFormat, n: int, k: int) -> tuple[TensorShape, ...]:
        bits = {"codes": format.bits, **dict.fromkeys(("scales", "zeros"), _level_bits(format))}
        parts = {
            name: (dtype, (shape[0], -(-shape[1] * bits[name] // 8)) if name in bits else shape)
            for name, (dtype, shape) in format.parts(n, k).items()
        }
        return tuple(parts.values())

    def pack(self, parts: WeightComponents, format: WeightFormat) -> tuple[torch.Tensor, ...]:
        if _level_bits(format) < 8:
            assert parts.zeros is not None
            scales, zeros = (pack(t, _level_bits(format)) for t in (parts.scales, parts.zeros))
            parts = parts._replace(scales=scales, zeros=zeros)
        tensors = (pack(parts.codes, format.bits), *(t for t in parts[1:] if t is not None))
        return tuple(t.contiguous() for t in tensors)

    def unpack(self, tensors: tuple[torch.Tensor, ...], format: WeightFormat, n: int, k: int) -> WeightComponents:
        parts = self.unpack_scales(tensors, format, k)
        return parts._replace(codes=unpack(parts.codes, format.bits)[:, :k].contiguous())

    def unpack_rows(
        self, tensors: tuple[torch.Tensor, ...], format: WeightFormat, k: int, ids: torch.Tensor
    ) -> WeightComponents:
        codes, scales, *others = tensors
        in_block = format.scale_rule.block_rows
        of_scales = ids // in_block * 2 + ids % 2 if in_block else ids
        rows = (picked(codes, ids), picked(scales, of_scales), *(picked(t, ids) for t in others))
        return self.unpack(rows, format, len(ids), k)

    def unpack_scales(self, tensors: tuple[torch.Tensor, ...], format: WeightFormat, k: int) -> WeightComponents:
        """Like :meth:`unpack`, but with the codes as they are packed."""
        named = dict(zip(format.part_names, tensors, strict=True))
        if _level_bits(format) < 8:
            groups = format.groups(k)
            levels = {name: unpack(named[name], _level_bits(format))[:, :groups] for name in ("scales", "zeros")}
            named |= {name: t.contiguous() for name, t in levels.items()}
        return WeightComponents.of(named.get(name) for name in WeightComponents._fields)


def picked(t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return t[rows], also of fp8, which PyTorch 2.8 does not gather on the CPU."""
    return t.view(torch.uint8)[rows].view(t.dtype) if t.itemsize == 1 else t[rows]


def _level_bits(format: WeightFormat) -> int:
    """Bits that a scale with a factor takes; 8 without factors, whose scales are stored as they are."""
    return 4 if format.scale_rule.level_bits == 4 else 8
