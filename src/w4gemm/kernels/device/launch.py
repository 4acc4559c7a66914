"""Launches of kernels that take :class:`w4gemm.kernels.arguments.Arguments`: the ``cute.compile`` entry, and the shared
memory of a launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from w4gemm.kernels.arguments import Arguments, nested
from w4gemm.kernels.variant import HOPPER_SHARED_MEMORY, GpuVariant, shared_memory_of_each

_MORE_THAN_HALF = shared_memory_of_each(HOPPER_SHARED_MEMORY, 2) + 16
"""Bytes with which only one CTA fits a multiprocessor."""


@dataclass(frozen=True)
class FlatEntry:
    """Takes the values of ``Arguments`` without the nesting, then the stream: one nested argument does not compile with
    a number in it (CuTe DSL 4.8.1)."""

    launch: Callable[[Arguments, Any], None]

    @cute.jit
    def __call__(self, *values: Any):
        self.launch(nested(values[:-1]), values[-1])


def memory_of_launch(variant: GpuVariant, clusters: Int32, max_clusters: Int32) -> Int32 | int:
    """The dynamic shared memory of a launch of at most ``max_clusters`` clusters, as many as are resident at once.

    A launch that starts while another one ends gets its places one by one, and two CTAs of it that fit one
    multiprocessor would share the first that is free, although there is one for each. So if there are no more CTAs than
    multiprocessors, each asks for more than half of the memory.
    """
    if variant.shared_bytes >= _MORE_THAN_HALF:
        return variant.shared_bytes
    alone = clusters * variant.occupancy <= max_clusters
    return Int32(cutlass.select_(alone, Int32(_MORE_THAN_HALF), Int32(variant.shared_bytes)))
