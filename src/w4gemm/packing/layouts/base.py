"""The interface of a pack layout, the order of a weight's bits: :class:`PackLayout`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch

from w4gemm.core.formats import WeightFormat


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

    def shapes(self, format: WeightFormat, n: int, k: int) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        """dtype and shape of each packed tensor."""
        ...

    def pack(self, parts: WeightComponents, format: WeightFormat) -> tuple[torch.Tensor, ...]: ...

    def unpack(self, tensors: tuple[torch.Tensor, ...], format: WeightFormat, n: int, k: int) -> WeightComponents: ...
