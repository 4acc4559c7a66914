"""Values that producer and consumers share: the pipeline's shared memory, and how x gets there."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32


class Pipeline(NamedTuple):
    """Shared memory of the pipeline; the arrive counts are in kernel.py."""

    full: cute.Pointer
    """One mbarrier per stage."""
    empty: cute.Pointer
    """One mbarrier per stage."""
    x: cute.Tensor
    """x of all stages, as WGMMA reads it."""
    weights: Int32
    """Address of the weights of all stages."""
    scales: Int32
    """Address of the scales of x of all stages, if each 128 columns have one."""


class ScaleSource(NamedTuple):
    """Where the producer reads scales of x."""

    tma: cute.CopyAtom
    scales: cute.Tensor
    """float32 (m, k blocks) as TMA sees it."""
    layout: cute.Layout
    """(token, k block, stage) of the scales of all stages."""


class XSource(NamedTuple):
    """Where the producer reads x."""

    tma: cute.CopyAtom | None
    """None if gathered."""
    x: cute.Tensor
    """(m, k) as TMA sees it; if gathered, x itself."""
    operand_layout: cute.ComposedLayout
    """x of all stages, as WGMMA reads it."""
    box_layout: cute.ComposedLayout
    """The same memory as boxes."""
    scales: ScaleSource | None = None
    """None unless each 128 columns of a row have a scale."""
