"""x8[i, :] = e4m3(y[i, :] * (448 / top)), scales[i] = top / 448, top = max of abs(y[i, :]), for 16-bit x (m, columns).

y by ``front``: "" x itself; "rms" x / sqrt(mean(x**2) + eps) * weight; "add_rms" the same of x + residual, which is
rounded to x's dtype and stored as ``total``; "silu_mul" silu(x[:, :k]) * x[:, k:]. The last three are computed in
float32 and rounded once to x's dtype. ``w4gemm.api.activations`` has the same formulas in PyTorch, in the same order of
roundings.

A CTA quantizes one row. A thread has ``chunks`` chunks of eight columns, ``threads`` chunks apart: it requests all of
them before it uses the first, and keeps y in registers, two columns per word. Without their sign, the bits of 16-bit
numbers are ordered like the numbers, infinity above all and NaN above that. So the top of a warp is one ``redux`` of
integers, after maxima of two numbers at a time in each thread; a second ``redux`` over the warps follows the row's one
barrier. "rms" has one more barrier before it, for the sum of squares, which is added in an order that depends on k
alone.

Every access is of eight columns if k and the addresses allow that (``wide``), else of one column.

Programmatic dependent launch, from SM90 on: the product that follows requests its weights early. "add_rms", which only
comes between products, lets it start at once (sm90_mixed_gemm/kernel.py), the others after their own wait. Before
``griddepcontrol.wait`` the norm's weight is brought into L2, and loaded only after it, because the launch before may
have written it: what a kernel of PyTorch stored is not visible before the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from w4gemm.kernels.device.activation import silu
from w4gemm.kernels.device.sums import cta_sum_of_squares
from w4gemm.ptx.arithmetic import (
    divide,
    floats_to_halves,
    halves_to_floats,
    maximum,
    maximum_halves,
    pack_e4m3,
    square_root,
    to_float,
    warp_maximum,
)
from w4gemm.ptx.memory import (
    copies_wait,
    copy_async_if,
    load_global,
    load_global_half,
    load_shared,
    prefetch_global,
    shared_address,
    store_global,
    store_global_byte,
)

_MAGNITUDES = 0x7FFF7FFF
_LINE = 8  # threads whose columns are the 128 bytes of one prefetch


class QuantizeRows(NamedTuple):
    """x (m, k), for silu_mul (m, 2 k); weight (k,) for the norms; x8 as bytes (m, k), contiguous; scales float32 (m,).
    For add_rms residual and total (m, k), contiguous. What a front does not take is None."""

    x: cute.Tensor
    residual: cute.Tensor | None
    weight: cute.Tensor | None
    x8: cute.Tensor
    scales: cute.Tensor
    total: cute.Tensor | None


@dataclass(frozen=True)
class ActivationQuantizeKernel:
    """The kernel for x of ``kind`` "f16" or "bf16" and rows of at most 8 * threads * chunks columns.

    Args:
        gates: True for silu_mul; which norm there is, the operands say.
        wide: True if eight columns are loaded and stored at a time.
        staged_bytes: shared memory for a row of x, of a wide silu_mul.
        largest: e4m3's largest number.
        smallest: smallest top that a row is scaled by.
        dependent_launch: True if the device has programmatic dependent launch.
    """

    kind: str
    gates: bool
    wide: bool
    threads: int
    chunks: int
    staged_bytes: int
    largest: float
    smallest: float
    dependent_launch: bool

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        residual: cute.Tensor | None,
        weight: cute.Tensor | None,
        x8: cute.Tensor,
        scales: cute.Tensor,
        total: cute.Tensor | None,
        eps: Float32,
        stream: Any,
    ) -> None:
        """Launch; tensors as in :class:`QuantizeRows`."""
        self.kernel(QuantizeRows(x, residual, weight, x8, scales, total), eps).launch(
            grid=[x8.shape[0], 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=self.dependent_launch
        )

    @cute.kernel
    def kernel(self, rows: QuantizeRows, eps: Float32) -> None:
        thread, row, k = cute.arch.thread_idx()[0], Int64(cute.arch.block_idx()[0]), rows.x8.shape[1]
        smem = cutlass.memory.SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout(32))
        tops = smem.allocate_tensor(Int32, cute.make_layout(32))
        columns = [(thread + i * self.threads) * 8 for i in range(self.chunks)]
        if cutlass.const_expr(self.dependent_launch):
            if cutlass.const_expr(rows.residual is not None):
                cute.arch.griddepcontrol_launch_dependents()
            if cutlass.const_expr(rows.weight is not None):
                for column in columns:
                    prefetch_global(
                        rows.weight.iterator.toint() + Int64(column) * 2, (column < k) & (thread % _LINE == 0)
                    )
            cute.arch.griddepcontrol_wait()
            if cutlass.const_expr(rows.residual is None):
                cute.arch.griddepcontrol_launch_dependents()
        factors = []
        if cutlass.const_expr(rows.weight is not None):
            factors = [self.load(rows.weight.iterator.toint(), column, k) for column in columns]
        source = rows.x.iterator.toint() + row * rows.x.stride[0] * 2
        if cutlass.const_expr(self.gates):
            y = self.gated_row(source, columns, k, smem)
        else:
            y = [self.load(source, column, k) for column in columns]
        if cutlass.const_expr(rows.residual is not None):
            first = row * k * 2
            added = [self.load(rows.residual.iterator.toint() + first, column, k) for column in columns]
            for i in cutlass.range_constexpr(self.chunks):
                pairs = zip(self.floats(y[i]), self.floats(added[i]), strict=True)
                y[i] = self.halves([value + more for value, more in pairs])
                store_global(rows.total.iterator.toint() + first + Int64(columns[i]) * 2, y[i], columns[i] < k)
        if cutlass.const_expr(rows.weight is not None):
            mean = divide(
                cta_sum_of_squares([self.floats(words) for words in y], sums, thread, self.threads), Float32(k)
            )
            scale = divide(Float32(1.0), square_root(mean + eps))
            for i in cutlass.range_constexpr(self.chunks):
                y[i] = self.normed(y[i], scale, factors[i])
        top = self.top(y, tops, thread)
        counted, largest = maximum(top, Float32(self.smallest)), Float32(self.largest)
        if thread == 0:
            rows.scales[row] = divide(counted, largest) if top != Float32(0.0) else Float32(1.0)
        factor = divide(largest, counted)
        target = rows.x8.iterator.toint() + row * k
        for i in cutlass.range_constexpr(self.chunks):
            values = [value * factor for value in self.floats(y[i])]
            self.store(target + columns[i], [pack_e4m3(values[:4]), pack_e4m3(values[4:])], columns[i], k)

    def load(self, row: Int64, column: Int32, k: Int32) -> list[Int32]:
        """Return eight columns in four words, 0 past the last column."""
        address = row + Int64(column) * 2
        if self.wide:
            return load_global(address, 4, column < k)
        halves = [load_global_half(address + 2 * i, column + i < k) for i in range(8)]
        return [low | (high << 16) for low, high in zip(halves[::2], halves[1::2], strict=True)]

    def store(self, address: Int64, words: list[Int32], column: Int32, k: Int32) -> None:
        """Store eight bytes, without those past the last column."""
        if self.wide:
            store_global(address, words, column < k)
            return
        for i in range(8):
            store_global_byte(address + i, words[i // 4] >> (8 * (i % 4)), column + i < k)

    def floats(self, words: Sequence[Int32]) -> list[Float32]:
        """Widen the two numbers of each word."""
        return halves_to_floats(self.kind, words)

    def halves(self, values: list[Float32]) -> list[Int32]:
        """Round eight numbers to x's dtype, two per word."""
        return floats_to_halves(self.kind, values)

    def gated_row(self, source: Int64, columns: list[Int32], k: Int32, smem: Any) -> list[list[Int32]]:
        """Return y of silu_mul. If wide, x passes through shared memory, where each thread reads only what it copied
        itself: loads to registers would wait for each other, because ptxas saves registers there."""
        up = source + Int64(k) * 2
        if not self.wide:
            return [self.gated(self.load(source, column, k), self.load(up, column, k)) for column in columns]
        words = smem.allocate_array(Int32, self.staged_bytes // 4, byte_alignment=16)
        address, step = shared_address(words) + cute.arch.thread_idx()[0] * 16, self.threads * 16
        for i, column in enumerate(columns):
            copy_async_if(address + 2 * i * step, source + Int64(column) * 2, column < k)
            copy_async_if(address + (2 * i + 1) * step, up + Int64(column) * 2, column < k)
        copies_wait()
        pairs = [[load_shared(address + (2 * i + j) * step, 4) for j in (0, 1)] for i in range(self.chunks)]
        return [self.gated(*pair) for pair in pairs]

    def gated(self, gates: Sequence[Int32], ups: Sequence[Int32]) -> list[Int32]:
        """silu(gate) * up of eight columns."""
        pairs = zip(self.floats(gates), self.floats(ups), strict=True)
        return self.halves([silu(gate) * up for gate, up in pairs])

    def normed(self, words: list[Int32], scale: Float32, factors: list[Int32]) -> list[Int32]:
        """x * scale * factor of eight columns."""
        pairs = zip(self.floats(words), self.floats(factors), strict=True)
        return self.halves([(value * scale) * factor for value, factor in pairs])

    @cute.jit
    def top(self, y: list[list[Int32]], tops: cute.Tensor, thread: Int32) -> Float32:
        """Largest magnitude of the CTA's numbers, NaN if one is NaN; every thread gets it."""
        both = Int32(0)
        for words in y:
            for word in words:
                both = maximum_halves(self.kind, both, word & _MAGNITUDES)
        bits = warp_maximum(maximum_halves(self.kind, both, both >> 16) & 0xFFFF)
        if cutlass.const_expr(self.threads > 32):
            lane = thread % 32
            if lane == 0:
                tops[thread // 32] = bits
            cute.arch.sync_threads()
            bits = warp_maximum(tops[lane] if lane < self.threads // 32 else Int32(0))
        return to_float(self.kind, bits)
