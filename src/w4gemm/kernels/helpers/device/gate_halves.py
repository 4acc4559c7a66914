"""out[i, j] = act(x[i, j], x[i, n + j]) for 16-bit x (m, 2 n): gates in the left half, ups in the right, rounded once.

A thread computes eight columns of one row. The launch behind this one may start at once (sm90_mixed_gemm/kernel.py,
programmatic dependent launch).
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from w4gemm.core.activation import Activation
from w4gemm.kernels.device.activation import activated
from w4gemm.ptx.arithmetic import floats_to_halves, halves_to_floats
from w4gemm.ptx.memory import load_global, store_global

_THREADS = 128
_VECTOR = 8  # columns of a thread


class GateHalvesKernel:
    """The kernel for an activation and x of ``kind`` "f16" or "bf16"."""

    def __init__(self, kind: str, activation: Activation) -> None:
        self.kind, self.activation = kind, activation

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: Any) -> None:
        """x (m, 2 n) and out (m, n) contiguous, n a multiple of 8."""
        ctas_per_row = cute.ceil_div(out.shape[1], _VECTOR * _THREADS)
        self.kernel(x, out, ctas_per_row).launch(
            grid=[out.shape[0] * ctas_per_row, 1, 1], block=[_THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor, ctas_per_row: Int32) -> None:
        cta, n = cute.arch.block_idx()[0], out.shape[1]
        row = Int64(cta // ctas_per_row)
        column = (cta % ctas_per_row * _THREADS + cute.arch.thread_idx()[0]) * _VECTOR
        exists = column < n
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        source = x.iterator.toint() + (row * 2 * n + column) * 2
        gates, ups = (load_global(source + Int64(half) * n * 2, _VECTOR // 2, exists) for half in (0, 1))
        gate, up = (halves_to_floats(self.kind, words) for words in (gates, ups))
        y = [activated(self.activation, gate[i], up[i]) for i in range(_VECTOR)]
        store_global(out.iterator.toint() + (row * n + column) * 2, floats_to_halves(self.kind, y), exists)
