"""From one layout to another, a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.packing.layouts.base import PackLayout, WeightComponents

ROWS = 128
"""Row granularity of repacking: in every layout, 128 rows of w are a whole number of entries of each tensor's first
dimension."""
_ELEMENTS = 2**22
"""Elements repacked at a time, so that temporary memory stays small beside the result."""

Tensors = tuple[torch.Tensor, ...]


def repack_rows(
    target: PackLayout, into: Tensors, source: PackLayout, tensors: Tensors, what: tuple[WeightFormat, int, int]
) -> None:
    """Fill ``into``, tensors of the target layout, with what ``tensors`` of the source layout hold: a weight of
    ``what``, (format, n, k).

    Raises:
        ValueError: if the target cannot hold the format.
    """
    format, _, k = what

    def unpacked(first: int, last: int) -> WeightComponents:
        rows = tuple(_entries(t, i, source, format, k, first, last) for i, t in enumerate(tensors))
        return source.unpack(rows, format, last - first, k)

    pack_rows(target, into, unpacked, what)


def pack_rows(
    target: PackLayout,
    into: Tensors,
    rows: Callable[[int, int], WeightComponents],
    what: tuple[WeightFormat, int, int],
) -> None:
    """Fill ``into``, tensors of the target layout, with a weight of ``what``, (format, n, k).

    Args:
        rows: return the weight's rows from the first to before the last; the first is a multiple of 128.

    Raises:
        ValueError: if the target cannot hold the format.
    """
    format, n, k = what
    if reason := target.supports(format):
        raise ValueError(f"layout: {target.name} cannot hold {format}: {reason}")
    step = max(ROWS, _ELEMENTS // k // ROWS * ROWS)
    for first in range(0, n, step):
        last = min(first + step, n)
        packed = target.pack(rows(first, last), format)
        for i, (t, part) in enumerate(zip(into, packed, strict=True)):
            _entries(t, i, target, format, k, first, last).copy_(part)


def _entries(
    t: torch.Tensor, index: int, layout: PackLayout, format: WeightFormat, k: int, first: int, last: int
) -> torch.Tensor:
    """Entries of packed tensor ``index`` of a layout that hold the rows first .. last; first is a multiple of ROWS."""
    _, shape = layout.shapes(format, ROWS, k)[index]
    each = shape[0]
    return t[first // ROWS * each : -(-last // ROWS) * each]
