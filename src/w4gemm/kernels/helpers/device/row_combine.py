"""out[t, :] = sum over j of weights[t, j] * d[rows[t, j], :], for 16-bit d, in float32 and rounded once. If there is an
``added``, each j also has a row of it, which is added as it is, behind all of d's.

The terms are added in the order of j, so the bits of a token depend on nothing else. A negative row adds nothing. A
thread computes eight columns of one token: it requests those of all of the token's rows before it adds the first.

Programmatic dependent launch: rows and weights are read before ``griddepcontrol.wait`` if they are settled, that is, if
the launch before this one, which writes d, came after what wrote them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from w4gemm.ptx.arithmetic import floats_to_halves, halves_to_floats, to_float
from w4gemm.ptx.memory import load_global, load_int32, store_global

_THREADS = 128
_VECTOR = 8  # columns of a thread
_CTAS_PER_SM = 4  # that registers must suffice for; if ptxas has the choice it takes 32, and loads row after row


class RowCombineKernel:
    """The kernel for ``terms`` rows per token of ``kind`` "f16" or "bf16"."""

    def __init__(self, kind: str, terms: int) -> None:
        self.kind, self.terms = kind, terms

    @cute.jit
    def __call__(
        self,
        d: cute.Tensor,
        rows: cute.Tensor,
        weights: cute.Tensor,
        added: cute.Tensor | None,
        out: cute.Tensor,
        settled: Int32,
        stream: Any,
    ) -> None:
        """d (any number, n) and out (tokens, n), n a multiple of 8; rows int32 and weights float32 (tokens, terms);
        added None or (tokens * terms, n); settled: 1 if rows and weights are, else 0."""
        ctas_per_token = cute.ceil_div(out.shape[1], _VECTOR * _THREADS)
        self.kernel(d, rows, weights, added, out, settled, ctas_per_token).launch(
            grid=[out.shape[0] * ctas_per_token, 1, 1],
            block=[_THREADS, 1, 1],
            min_blocks_per_mp=_CTAS_PER_SM,
            preferred_smem_carveout=100,  # as the products beside it: another one would wait for an idle SM
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        d: cute.Tensor,
        rows: cute.Tensor,
        weights: cute.Tensor,
        added: cute.Tensor | None,
        out: cute.Tensor,
        settled: Int32,
        ctas_per_token: Int32,
    ) -> None:
        cta = cute.arch.block_idx()[0]
        token, run = cta // ctas_per_token, cta % ctas_per_token
        column = (run * _THREADS + cute.arch.thread_idx()[0]) * _VECTOR
        n = out.shape[1]
        if settled == 0:
            cute.arch.griddepcontrol_wait()
        first, early = Int64(token) * (4 * self.terms), settled != 0  # before the wait L1 may hold older ones
        own_rows = [load_int32(rows.iterator.toint() + first + 4 * j, early) for j in range(self.terms)]
        bits = [load_int32(weights.iterator.toint() + first + 4 * j, early) for j in range(self.terms)]
        # a row elsewhere adds nothing, whatever its weight: NaN times 0 is NaN
        factors = [
            Float32(cutlass.select_(row >= 0, to_float("f32", word), Float32(0.0)))
            for row, word in zip(own_rows, bits, strict=True)
        ]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if column < n:
            loaded = []
            for j in cutlass.range_constexpr(self.terms):
                row = own_rows[j]
                address = d.iterator.toint() + (Int64(row) * n + column) * 2
                loaded.append(load_global(address, _VECTOR // 2, row >= 0))
            sums = [Float32(0.0)] * _VECTOR
            for j in cutlass.range_constexpr(self.terms):
                values = halves_to_floats(self.kind, loaded[j])
                sums = [sums[i] + factors[j] * values[i] for i in range(_VECTOR)]
            if const_expr(added is not None):
                first_added = added.iterator.toint() + (Int64(token) * self.terms * n + column) * 2
                more = [
                    load_global(first_added + Int64(j) * n * 2, _VECTOR // 2, Boolean(True)) for j in range(self.terms)
                ]
                for j in cutlass.range_constexpr(self.terms):
                    values = halves_to_floats(self.kind, more[j])
                    sums = [sums[i] + values[i] for i in range(_VECTOR)]
            words = floats_to_halves(self.kind, sums)
            store_global(out.iterator.toint() + (Int64(token) * n + column) * 2, words, Boolean(True))
