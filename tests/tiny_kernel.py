"""The smallest kernel that the jit can compile: y = factor * x. It is a unit and nothing of a GEMM."""

import functools
from collections.abc import Hashable
from typing import Any

from w4gemm.jit import Program, Unit

THREADS = 128


def tiny(factor: float = 2.0, key: Hashable = None, arch: str = "sm_90a") -> Unit:
    """The unit with ``factor`` compiled in. key: the unit's key, None for the factor."""
    return Unit("tiny", factor if key is None else key, arch, functools.partial(_program, factor))


def _program(factor: float) -> Program:
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    size = cute.sym_int()
    x, y = (make_fake_compact_tensor(cutlass.Float32, (size,), assumed_align=16) for _ in range(2))
    return Program(_entry(factor), (x, y))


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
    def entry(x: cute.Tensor, y: cute.Tensor, stream: Any):
        blocks = (cute.size(x) + THREADS - 1) // THREADS
        scale(x, y).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)

    return entry
