"""out[t, :] = sum over j of weights[t, j] * d[places[t, j], :], for 16-bit d, in float32 and rounded once.

The terms are added in the order of j, so that the bits do not depend on anything else; a negative place adds nothing.
A thread has eight columns of a token: it requests those of all of the token's rows before it adds the first ones.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from w4gemm.kernels.device.ptx import load_global, pack_half2, store_global, to_float

_THREADS = 128


class Combine:
    """The kernel for ``terms`` rows a token of ``kind`` "f16" or "bf16"."""

    def __init__(self, kind: str, terms: int):
        self.kind, self.terms = kind, terms

    @cute.jit
    def __call__(self, d: cute.Tensor, places: cute.Tensor, weights: cute.Tensor, out: cute.Tensor, stream: Any):
        """d (rows, n) and out (tokens, n), n a multiple of 8; places int32 and weights float32 (tokens, terms)."""
        parts = cute.ceil_div(out.shape[1], 8 * _THREADS)
        self.kernel(d, places, weights, out, parts).launch(
            grid=[out.shape[0] * parts, 1, 1], block=[_THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, d: cute.Tensor, places: cute.Tensor, weights: cute.Tensor, out: cute.Tensor, parts: Int32):
        cta = cute.arch.block_idx()[0]
        token, part = cta // parts, cta % parts
        column = (part * _THREADS + cute.arch.thread_idx()[0]) * 8
        n = out.shape[1]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if column < n:
            rows, factors = [], []
            for j in cutlass.range_constexpr(self.terms):
                place = places[token, j]
                address = d.iterator.toint() + (Int64(place) * n + column) * 2
                rows.append(load_global(address, 4, place >= 0))
                factors.append(weights[token, j])
            sums = [Float32(0.0)] * 8
            for j in cutlass.range_constexpr(self.terms):
                values = [to_float(self.kind, rows[j][i // 2], i % 2 == 1) for i in range(8)]
                sums = [sums[i] + factors[j] * values[i] for i in range(8)]
            words = [pack_half2(self.kind, sums[i], sums[i + 1]) for i in range(0, 8, 2)]
            store_global(out.iterator.toint() + (Int64(token) * n + column) * 2, words, Boolean(True))
