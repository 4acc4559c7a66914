"""From one layout to another, a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.packing.layouts.base import PackLayout, WeightComponents

ROWS = 128
"""Row granularity of repacking: in every layout, 128 rows of w are a whole number of entries of each tensor's first
dimension."""
_ELEMENTS = 2**22
"""Elements repacked at a time, so that temporary memory stays small beside the result."""
_ELEMENTS_OF_EXPERTS = 2**24
"""Elements of experts repacked at a time. A launch for a single expert takes longer on the host than on the GPU, and a
layer has hundreds of experts."""

Tensors = tuple[torch.Tensor, ...]


class Matrix(NamedTuple):
    """The format and size of a weight, whatever its layout."""

    format: WeightFormat
    n: int
    k: int


def repack_rows(target: PackLayout, into: Tensors, source: PackLayout, tensors: Tensors, matrix: Matrix) -> None:
    """Fill ``into``, tensors of the target layout, with the weight that ``tensors`` of the source layout hold.

    Raises:
        ValueError: if the target cannot hold the format.
    """
    if source is target:
        for t, own in zip(into, tensors, strict=True):
            t.copy_(own)
        return

    def unpacked(first: int, last: int) -> WeightComponents:
        rows = tuple(entries_of_rows(t, i, source, matrix, first, last) for i, t in enumerate(tensors))
        return source.unpack(rows, matrix.format, last - first, matrix.k)

    pack_rows(target, into, unpacked, matrix)


def pack_rows(
    target: PackLayout,
    into: Tensors,
    rows: Callable[[int, int], WeightComponents],
    matrix: Matrix,
) -> None:
    """Fill ``into``, tensors of the target layout, with a weight.

    Args:
        rows: return the weight's rows from the first to before the last; the first is a multiple of 128.

    Raises:
        ValueError: if the target cannot hold the format.
    """
    format, n, k = matrix.format, matrix.n, matrix.k
    if reason := target.supports(format):
        raise ValueError(f"layout: {target.name} cannot hold {format}: {reason}")
    step = max(ROWS, _ELEMENTS // k // ROWS * ROWS)
    for first in range(0, n, step):
        last = min(first + step, n)
        packed = target.pack(rows(first, last), format)
        for i, (t, part) in enumerate(zip(into, packed, strict=True)):
            entries_of_rows(t, i, target, matrix, first, last).copy_(part)


def pack_experts(
    target: PackLayout,
    into: Tensors,
    tall: Callable[[slice], WeightComponents],
    matrix: Matrix,
) -> None:
    """Fill ``into``, tensors of the target layout with a dimension of experts in front, with a weight for each expert.

    Args:
        tall: return the rows of some experts as one matrix, an expert's after the other's.
        matrix: format and size of one expert's weight.
    """
    # experts that are a whole number of a layout's entries are packed as one tall matrix
    step = max(1, _ELEMENTS_OF_EXPERTS // (matrix.n * matrix.k)) if matrix.n % ROWS == 0 else 1
    for first in range(0, len(into[0]), step):
        some = slice(first, min(first + step, len(into[0])))
        for t, packed in zip(into, target.pack(tall(some), matrix.format), strict=True):
            t[some] = packed.view(t[some].shape)


def rows_in_pairs(rows: torch.Tensor) -> torch.Tensor:
    """Return rows (experts or tokens, n, ...), whose gates all come before the ups, as pairs of a gate and an up."""
    return rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def entries_of_rows(
    t: torch.Tensor, index: int, layout: PackLayout, matrix: Matrix, first: int, last: int
) -> torch.Tensor:
    """Entries of packed tensor ``index`` of a layout that hold the rows first .. last; first is a multiple of ROWS."""
    _, shape = layout.shapes(matrix.format, ROWS, matrix.k)[index]
    each = shape[0]
    return t[first // ROWS * each : -(-last // ROWS) * each]
