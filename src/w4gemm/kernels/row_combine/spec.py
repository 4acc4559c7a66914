"""Host side of the combination: what it can take, and what is compiled.

No ``Kernel``, since it computes no product; ``w4gemm.routing`` is its only caller.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from w4gemm.config import GemmConfig
from w4gemm.kernels.base import Program
from w4gemm.problem import GemmProblem

_MOST_TERMS = 16
"""Largest number of terms: a thread holds one row of each in registers."""


class RowCombine:
    """Weighted sums of 16-bit rows on SM90. Has what ``w4gemm.jit`` needs of a ``Kernel``; of a problem's config only
    tile_k counts, the rows that are added up."""

    name = "row_combine"

    def takes(self, d: torch.Tensor, terms: int) -> bool:
        """Whether eight columns at a time can be loaded of d, and a token's rows fit the registers."""
        return d.shape[1] % 8 == 0 and d.data_ptr() % 16 == 0 and d.is_contiguous() and 0 < terms <= _MOST_TERMS

    def compile_key(self, problem: GemmProblem, config: GemmConfig) -> Hashable:
        return str(problem.dtype), config.tile_k

    def program(self, problem: GemmProblem, config: GemmConfig) -> Program:
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

        from w4gemm.kernels.row_combine.kernel import Combine

        kind = {torch.float16: "f16", torch.bfloat16: "bf16"}[problem.dtype]
        dtype = {"f16": cutlass.Float16, "bf16": cutlass.BFloat16}[kind]
        n, tokens, terms = cute.sym_int(divisibility=8), cute.sym_int(), config.tile_k
        d = make_fake_compact_tensor(dtype, (cute.sym_int(), n), stride_order=(1, 0), assumed_align=16)
        out = make_fake_compact_tensor(dtype, (tokens, n), stride_order=(1, 0), assumed_align=16)
        places = make_fake_compact_tensor(cutlass.Int32, (tokens, terms), stride_order=(1, 0), assumed_align=4)
        weights = make_fake_compact_tensor(cutlass.Float32, (tokens, terms), stride_order=(1, 0), assumed_align=4)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return Program(Combine(kind, terms), (d, places, weights, out, stream), "sm_90a")
