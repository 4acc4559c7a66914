"""Host side of the gather: what it can take, what is compiled, and in how many parts a row is done.

No ``Kernel``, since it computes no product; ``w4gemm.gather`` is its only caller.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from w4gemm.config import GemmConfig
from w4gemm.kernels.base import Program
from w4gemm.kernels.gpu import HOPPER_SHARED_MEMORY
from w4gemm.problem import GemmProblem

_BARRIER_BYTES = 64
_LARGEST = (HOPPER_SHARED_MEMORY - _BARRIER_BYTES) // 2 // 8 * 8
_SMALLEST = 4096  # capacity; less would not let more CTAs run
_COLUMNS = 2048  # that a CTA gathers in one pass
_CTAS_PER_SM = 2


def capacity(k: int) -> int:
    """Elements of a row that shared memory holds: powers of two, so that many k share a compiled object."""
    return min(max(_SMALLEST, 1 << (k - 1).bit_length()), _LARGEST)


class ColumnGather:
    """x's columns in the order of a perm, on SM90, for 16-bit x. Has what ``w4gemm.jit`` needs of a ``Kernel``."""

    name = "column_gather"

    def takes(self, x: torch.Tensor, perm: torch.Tensor) -> bool:
        """Whether rows of x and perm lie where 16 bytes can be copied at a time, and a row fits shared memory."""
        k, (row, column) = x.shape[1], x.stride()
        aligned = column == 1 and row % 8 == 0 and (x.data_ptr() | perm.data_ptr()) % 16 == 0
        return aligned and k % 8 == 0 and k <= _LARGEST

    def parts(self, m: int, k: int, sms: int) -> int:
        """CTAs that share the columns of a row: few rows alone would not fill the GPU."""
        return max(1, min(-(-k // _COLUMNS), sms * _CTAS_PER_SM // m))

    def compile_key(self, problem: GemmProblem, config: GemmConfig) -> Hashable:
        return str(problem.dtype), capacity(problem.k)

    def program(self, problem: GemmProblem, config: GemmConfig) -> Program:
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

        from w4gemm.kernels.column_gather.kernel import Gather

        dtype = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}[problem.dtype]
        m, k = cute.sym_int(), cute.sym_int()
        x = make_fake_tensor(dtype, (m, k), (cute.sym_int64(divisibility=8), 1), assumed_align=16)
        perm = make_fake_compact_tensor(cutlass.Int32, (k,), assumed_align=16)
        out = make_fake_tensor(dtype, (m, k), (cute.sym_int64(divisibility=8), 1), assumed_align=16)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return Program(Gather(capacity(problem.k)), (x, perm, out, 1, stream), "sm_90a")
