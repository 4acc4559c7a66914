"""The smallest kernel that the jit can compile: y = factor * x. With ``Kernel``'s compile part only."""

from collections.abc import Hashable
from typing import Any

from w4gemm.config import GemmConfig
from w4gemm.kernels.base import Program
from w4gemm.problem import GemmProblem

THREADS = 128


class TinyKernel:
    """Args: factor: compiled in. key: the compile key, None for the factor. arch: None where nothing is compiled."""

    name = "tiny"

    def __init__(self, factor: float = 2.0, key: Hashable = None, arch: str | None = "sm_90a") -> None:
        self.factor, self.key, self.arch = factor, key, arch
        self.programs = 0

    def compile_key(self, problem: GemmProblem, config: GemmConfig) -> Hashable:
        return self.factor if self.key is None else self.key

    def program(self, problem: GemmProblem, config: GemmConfig) -> Program | None:
        self.programs += 1
        if self.arch is None:
            return None
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

        size = cute.sym_int()
        x, y = (make_fake_compact_tensor(cutlass.Float32, (size,), assumed_align=16) for _ in range(2))
        return Program(_entry(self.factor), (x, y, make_fake_stream(use_tvm_ffi_env_stream=True)), self.arch)


def _entry(factor: float) -> Any:
    import cutlass
    import cutlass.cute as cute

    @cute.kernel
    def scale(x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * THREADS + thread
        if i < cute.size(x):
            y[i] = x[i] * cutlass.Float32(factor)

    @cute.jit
    def entry(x: cute.Tensor, y: cute.Tensor, stream):
        blocks = (cute.size(x) + THREADS - 1) // THREADS
        scale(x, y).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)

    return entry
