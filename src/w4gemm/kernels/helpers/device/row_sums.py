"""sums[j, i] = the sum of x[i, group * j : group * (j + 1)] in float32, of e4m3 x (m, k).

A lane adds up 16 columns in order, then the lanes of a group add their sums in pairs, fours and eights: a row's bits
depend on the row alone. Tokens are contiguous, as TMA wants them.

Programmatic dependent launch: the product that follows may start after this kernel's own wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int64

from w4gemm.ptx.arithmetic import e4m3_to_halves, float_word, halves_to_floats
from w4gemm.ptx.memory import load_global, store_global

_LANE_COLUMNS, _THREADS = 16, 256


@dataclass(frozen=True)
class RowSumsKernel:
    """The kernel for groups of 32, 64 or 128 columns."""

    group: int

    @cute.jit
    def __call__(self, x: cute.Tensor, sums: cute.Tensor, stream: Any) -> None:
        """Launch. x: bytes (m, k), k and its rows multiples of 16. sums: (groups, m or more)."""
        parts = cute.ceil_div(x.shape[1], _THREADS * _LANE_COLUMNS)
        self.kernel(x, sums, parts).launch(
            grid=[x.shape[0] * parts, 1, 1], block=[_THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, sums: cute.Tensor, parts: Any) -> None:
        cta = cute.arch.block_idx()[0]
        row, column = Int64(cta // parts), (cta % parts * _THREADS + cute.arch.thread_idx()[0]) * _LANE_COLUMNS
        exists = column < x.shape[1]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        words = load_global(x.iterator.toint() + row * x.stride[0] + column, 4, exists)
        total = Float32(0.0)
        for word in words:
            for value in halves_to_floats("f16", e4m3_to_halves(word)):
                total += value
        for lanes in (1, 2, 4):
            if lanes * _LANE_COLUMNS < self.group:
                total += cute.arch.shuffle_sync_bfly(total, lanes)
        target = sums.iterator.toint() + (Int64(column // self.group) * sums.shape[1] + row) * 4
        store_global(target, [float_word(total)], exists & (column % self.group == 0))
