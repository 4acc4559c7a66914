"""hidden[c, :] = act(rows[r, :] + added[c, :]) and moved[r, :] = hidden[c, :] with r = row_of_choice[c], in 16 bits.

``added`` holds what adapters contribute to the rows of choices. They are added in float32 and rounded once, behind the
activation. A choice whose row is negative has an expert elsewhere: it gets act(added), and nothing is moved.

A thread computes eight columns of one choice. ``rows`` holds pairs of a gate and an up if the activation is gated;
``added`` does too, or has all gates in its left half and all ups in its right one.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from w4gemm.core.activation import Activation
from w4gemm.kernels.device.activation import activated
from w4gemm.ptx.arithmetic import floats_to_halves, halves_to_floats
from w4gemm.ptx.memory import load_global, load_row_index, store_global

_THREADS = 128
_VECTOR = 8  # columns of a thread


class AdaptedRowsKernel:
    """The kernel for an activation and rows of ``kind`` "f16" or "bf16". halves: True if ``added`` has halves."""

    def __init__(self, kind: str, activation: Activation, halves: bool) -> None:
        self.kind, self.activation, self.halves = kind, activation, halves
        self.parts = 2 if activation.formula.gated else 1

    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,
        added: cute.Tensor,
        row_of_choice: cute.Tensor,
        hidden: cute.Tensor,
        moved: cute.Tensor,
        stream: Any,
    ) -> None:
        """rows and added (choices, n), or (choices, 2 n) if the activation is gated; row_of_choice int32 (choices,);
        hidden and moved (choices, n); all contiguous, n a multiple of 8."""
        ctas_per_row = cute.ceil_div(hidden.shape[1], _VECTOR * _THREADS)
        self.kernel(rows, added, row_of_choice, hidden, moved, ctas_per_row).launch(
            grid=[hidden.shape[0] * ctas_per_row, 1, 1], block=[_THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        rows: cute.Tensor,
        added: cute.Tensor,
        row_of_choice: cute.Tensor,
        hidden: cute.Tensor,
        moved: cute.Tensor,
        ctas_per_row: Int32,
    ) -> None:
        cta, n = cute.arch.block_idx()[0], hidden.shape[1]
        choice = Int64(cta // ctas_per_row)
        column = (cta % ctas_per_row * _THREADS + cute.arch.thread_idx()[0]) * _VECTOR
        exists = column < n
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        row = load_row_index(row_of_choice.iterator.toint() + choice * 4, exists)
        here = row >= 0
        y = self.features(rows, Int64(row), n, column, here, False)
        more = self.features(added, choice, n, column, exists, self.halves)
        sums = [[a + b for a, b in zip(*both, strict=True)] for both in zip(y, more, strict=True)]
        words = floats_to_halves(self.kind, [activated(self.activation, *each) for each in zip(*sums, strict=True)])
        store_global(hidden.iterator.toint() + (choice * n + column) * 2, words, exists)
        store_global(moved.iterator.toint() + (Int64(row) * n + column) * 2, words, here)

    def features(
        self, t: cute.Tensor, row: Int64, n: Int32, column: Int32, exists: Boolean, halves: bool
    ) -> list[list[Float32]]:
        """Return the gates and the ups of a thread's columns, or what they have in place of them; zeros if they do
        not exist. halves: True if all gates of a row come first."""
        part, between = (1, n) if halves else (self.parts, _VECTOR)
        first = t.iterator.toint() + (row * (self.parts * n) + column * part) * 2
        values: list[Float32] = []
        for i in range(self.parts):
            words = load_global(first + Int64(i) * between * 2, _VECTOR // 2, exists)
            values += halves_to_floats(self.kind, words)
        if halves or self.parts == 1:
            return [values[i * _VECTOR : (i + 1) * _VECTOR] for i in range(self.parts)]
        return [values[i :: self.parts] for i in range(self.parts)]
