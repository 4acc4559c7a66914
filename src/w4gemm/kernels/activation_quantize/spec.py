"""Host side of the quantization of activations: what it can take, and what is compiled.

No ``Kernel``, since it computes no product; ``w4gemm.activations`` is its only caller.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from w4gemm.config import GemmConfig
from w4gemm.kernels.base import Program
from w4gemm.kernels.gpu import HOPPER_SHARED_MEMORY
from w4gemm.kernels.sm80_mixed_gemm.spec import TARGETS
from w4gemm.problem import GemmProblem

LARGEST = 448.0
"""Largest float8_e4m3fn."""
SMALLEST = 2.0**-100
"""Least magnitude of a row: a smaller one counts as this, so that 448 over it is finite."""

_VECTOR = 8
_MOST_THREADS = 1024
_MOST_CHUNKS = 8
"""Chunks of eight columns that the registers of a thread hold; half as many where the norm's weight or single columns
need registers too."""
_REDUCED_BYTES = 256
"""Bytes of shared memory per CTA through which warps reduce."""


@dataclass(frozen=True)
class ActivationQuantize:
    """Rows to e4m3 from SM89 on, for 16-bit x. Has what ``w4gemm.jit`` needs of a ``Kernel``; of a problem only dtype,
    k and device count, and of the code neither depends on m: a row's bits are the same whatever the others are.

    Args:
        front: what is done to x first: "", "rms" or "silu_mul".
        wide: whether eight columns can be loaded and stored at a time, see :meth:`aligned`.
        chunks: of eight columns, for a thread; more where a row needs it.
    """

    front: str
    wide: bool
    chunks: int = 4

    name = "activation_quantize"

    def takes(self, k: int, shared_memory: int = HOPPER_SHARED_MEMORY) -> bool:
        """Whether the registers of a CTA hold a row, and its shared memory the two that silu_mul makes one of."""
        most = _MOST_CHUNKS if self.wide and self.front != "rms" else _MOST_CHUNKS // 2
        return self.shape(k)[1] <= most and self.staged_bytes(k) + _REDUCED_BYTES <= shared_memory

    @staticmethod
    def aligned(x: torch.Tensor, weight: torch.Tensor | None, k: int) -> bool:
        """Whether rows of x and a weight lie where 16 bytes can be loaded at a time, and those of x8 where 8 can be
        stored."""
        address = x.data_ptr() | (0 if weight is None else weight.data_ptr())
        return k % _VECTOR == 0 and x.stride(0) % _VECTOR == 0 and address % 16 == 0

    def shape(self, k: int) -> tuple[int, int]:
        """Threads of a CTA, whole warps, and chunks of a thread."""
        vectors = -(-k // _VECTOR)
        threads = min(_MOST_THREADS, 32 * -(-vectors // (32 * self.chunks)))
        return threads, -(-vectors // threads)

    def staged_bytes(self, k: int) -> int:
        """Bytes of shared memory per CTA for a row of x."""
        threads, chunks = self.shape(k)
        return 2 * threads * chunks * _VECTOR * 2 if self.front == "silu_mul" and self.wide else 0

    def compile_key(self, problem: GemmProblem, config: GemmConfig) -> Hashable:
        return str(problem.dtype), self.front, self.wide, *self.shape(problem.k)

    def program(self, problem: GemmProblem, config: GemmConfig) -> Program:
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

        from w4gemm.kernels.activation_quantize.kernel import Quantize

        kind = {torch.float16: "f16", torch.bfloat16: "bf16"}[problem.dtype]
        dtype = {"f16": cutlass.Float16, "bf16": cutlass.BFloat16}[kind]
        vector = _VECTOR if self.wide else 1
        m, k = cute.sym_int(), cute.sym_int(divisibility=vector)
        x = make_fake_tensor(
            dtype, (m, cute.sym_int()), (cute.sym_int64(divisibility=vector), 1), assumed_align=2 * vector
        )
        weight = None
        if self.front == "rms":
            weight = make_fake_compact_tensor(dtype, (k,), assumed_align=2 * vector)
        x8 = make_fake_compact_tensor(cutlass.Uint8, (m, k), stride_order=(1, 0), assumed_align=vector)
        scales = make_fake_compact_tensor(cutlass.Float32, (m,), assumed_align=4)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        kernel = Quantize(
            kind,
            self.front,
            self.wide,
            *self.shape(problem.k),
            self.staged_bytes(problem.k),
            LARGEST,
            SMALLEST,
            dependent_launch=problem.device.capability >= (9, 0),
        )
        return Program(kernel, (x, weight, x8, scales, 0.0, stream), TARGETS[problem.device.capability])
