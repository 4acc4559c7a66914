"""out[i, :] = half(y[i, :] / sqrt(mean(y[i, :] ** 2) + eps)) * weight, for 16-bit x (m, k).

y is x, or x + residual rounded to x's dtype, which is stored as ``total``. In float32, rounded to x's dtype before it
is multiplied by the weight and after, as transformers' models have it. A CTA has one row; a thread has ``chunks``
chunks of eight columns, ``threads`` chunks apart, and keeps them in registers. One barrier, for the sum of squares,
which is added in an order that depends on k alone.

Programmatic dependent launch: the launch behind this one may start at once (sm90_mixed_gemm/kernel.py). Before
``griddepcontrol.wait`` the weight is brought into L2, and loaded only after it, because the launch before may have
written it: what a kernel of PyTorch stored is not visible before the wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from w4gemm.kernels.device.sums import cta_sum_of_squares
from w4gemm.ptx.arithmetic import divide, floats_to_halves, halves_to_floats, square_root
from w4gemm.ptx.memory import load_global, prefetch_global, store_global

_VECTOR = 8
_LINE = 8  # threads whose columns are the 128 bytes of one prefetch


class Rows(NamedTuple):
    """(m, k) contiguous, but weight (k,); k a multiple of 8. residual and total are None without an addition."""

    x: cute.Tensor
    residual: cute.Tensor | None
    weight: cute.Tensor
    out: cute.Tensor
    total: cute.Tensor | None


@dataclass(frozen=True)
class RmsNormKernel:
    """The kernel for x of ``kind`` "f16" or "bf16" and rows of at most 8 * threads * chunks columns."""

    kind: str
    threads: int
    chunks: int
    add: bool
    """True if there is a residual."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        residual: cute.Tensor | None,
        weight: cute.Tensor,
        out: cute.Tensor,
        total: cute.Tensor | None,
        eps: Float32,
        stream: Any,
    ) -> None:
        """Launch; tensors as in :class:`Rows`."""
        self.kernel(Rows(x, residual, weight, out, total), eps).launch(
            grid=[x.shape[0], 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, rows: Rows, eps: Float32) -> None:
        thread, k = cute.arch.thread_idx()[0], rows.x.shape[1]
        row = Int64(cute.arch.block_idx()[0]) * k * 2
        sums = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(32))
        columns = [(thread + i * self.threads) * _VECTOR for i in range(self.chunks)]
        cute.arch.griddepcontrol_launch_dependents()
        for column in columns:
            prefetch_global(rows.weight.iterator.toint() + Int64(column) * 2, (column < k) & (thread % _LINE == 0))
        cute.arch.griddepcontrol_wait()
        loaded = [self.load(rows.weight.iterator.toint(), column, k) for column in columns]
        values = [self.floats(self.load(rows.x.iterator.toint() + row, column, k)) for column in columns]
        if cutlass.const_expr(self.add):
            added = [self.floats(self.load(rows.residual.iterator.toint() + row, column, k)) for column in columns]
            for i in cutlass.range_constexpr(self.chunks):
                words = self.pack([value + more for value, more in zip(values[i], added[i], strict=True)])
                store_global(rows.total.iterator.toint() + row + Int64(columns[i]) * 2, words, columns[i] < k)
                values[i] = self.floats(words)
        mean = divide(cta_sum_of_squares(values, sums, thread, self.threads), Float32(k))
        scale = divide(Float32(1.0), square_root(mean + eps))
        for i in cutlass.range_constexpr(self.chunks):
            words = self.times(self.pack([value * scale for value in values[i]]), self.floats(loaded[i]))
            store_global(rows.out.iterator.toint() + row + Int64(columns[i]) * 2, words, columns[i] < k)

    def load(self, row: Int64, column: Int32, k: Int32) -> list[Int32]:
        """Eight columns in four words, 0 past the last."""
        return load_global(row + Int64(column) * 2, _VECTOR // 2, column < k)

    def floats(self, words: list[Int32]) -> list[Float32]:
        return halves_to_floats(self.kind, words)

    def pack(self, values: list[Float32]) -> list[Int32]:
        return floats_to_halves(self.kind, values)

    def times(self, words: list[Int32], factors: list[Float32]) -> list[Int32]:
        return self.pack([value * factor for value, factor in zip(self.floats(words), factors, strict=True)])
