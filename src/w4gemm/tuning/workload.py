"""Random operands for measuring and checking a problem: :class:`Workload`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from w4gemm.core.epilogue import SCALE_BLOCK, EpilogueOperands, bias_dtype
from w4gemm.core.files import linux_says
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels import Operands
from w4gemm.tuning.random_weight import random_weight
from w4gemm.tuning.timing import Timing, time_calls, time_graphs

_ROTATED_BYTES = {"cuda": 400e6, "cpu": 64e6}
"""Bytes that all copies of the weight have together at least, so that no cache holds one when its turn comes."""
_MOST_COPIES = {"cuda": 64, "cpu": 4}
_MANY_TOKENS = 512
"""Largest number of tokens with which all copies are used. For more, four are enough, because the product takes longer
than reading its weight."""
_CHECKED_ROWS = 128

Launch = Callable[[Operands], object]


class Workload:
    """Several copies of a random weight, to rotate over, and activations of any m.

    Args:
        problem: the problem to measure; its m does not matter.
        device: the device to measure on.

    Raises:
        MemoryError: if a CPU has not enough memory for them.
    """

    def __init__(self, problem: GemmProblem, device: torch.device) -> None:
        self.problem, self.device = problem, device
        if device.type == "cpu":
            _require_memory(5 * problem.n * problem.k)  # dense numbers in float32, and packed ones twice
        # not PyTorch's own generator: a caller's random numbers stay the same, and threads may draw during a capture
        self._generator = torch.Generator(device).manual_seed(0)
        self.weight = random_weight(problem.format, problem.n, problem.k, device=device).repack(problem.layout)
        size = sum(t.numel() * t.element_size() for t in self.weight.tensors)
        count = max(2, min(_MOST_COPIES[device.type], math.ceil(_ROTATED_BYTES[device.type] / size)))
        self._copies = [self.weight.tensors]
        self._copies += [tuple(t.clone() for t in self.weight.tensors) for _ in range(count - 1)]

    def serves(self, problem: GemmProblem) -> bool:
        """True if a problem differs from this workload's in m only."""
        return replace(problem, m=self.problem.m) == self.problem

    @functools.cached_property
    def _dense(self) -> torch.Tensor:
        return self.weight.dequantize(torch.float32)

    def operands(self, m: int) -> list[Operands]:
        """Return the operands of a launch for each copy of the weight. Two activations alternate."""
        problem, epilogue = self.problem, self.problem.epilogue
        columns = epilogue.columns(problem.n)

        def random(*shape: int, dtype: torch.dtype = problem.dtype) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.float32, device=self.device, generator=self._generator).to(dtype)

        def scales(*shape: int) -> torch.Tensor:
            return torch.rand(*shape, dtype=torch.float32, device=self.device, generator=self._generator) + 0.5

        xs = [random(m, problem.k) for _ in range(2)]
        out = torch.empty(m, columns, dtype=problem.out_dtype, device=self.device)
        alpha: float | torch.Tensor | None = 0.5 if epilogue.alpha == "host" else None
        if epilogue.alpha == "device":
            alpha = torch.full((1,), 0.5, dtype=torch.float32, device=self.device)
        bias = random(problem.n, dtype=bias_dtype(problem.dtype, problem.out_dtype)) if epilogue.bias else None
        residual = random(m, columns, dtype=problem.out_dtype) if epilogue.residual else None
        copies = self._copies if m <= _MANY_TOKENS else self._copies[:4]
        token_scale = scales(m) if epilogue.token_scale else None
        tensors = EpilogueOperands(alpha, bias, residual, token_scale)
        if epilogue.block_scale:
            blocks, rows = -(-problem.k // SCALE_BLOCK), -(-m // 4) * 4  # kernels read them in place
            tensors = tensors._replace(block_scale=scales(blocks, rows)[:, :m].T)
        return [Operands(xs[i % 2], w, out, tensors) for i, w in enumerate(copies)]

    def error(self, launch: Launch, operands: Operands) -> float:
        """Return the relative error |d - expected| / |expected| of the first rows of a launch's result d. Expected is
        the float32 product with the dequantized weight."""
        operands.out.fill_(float("nan"))
        launch(operands)
        rows = slice(0, _CHECKED_ROWS)
        tensors = operands.epilogue.of_rows(rows)
        sums = tensors.scaled_blocks(operands.x[rows].float()) @ self._dense.T
        expected = self.problem.epilogue.apply(sums, tensors)
        return ((operands.out[rows].float() - expected).norm() / expected.norm()).item()

    def time(self, launches: list[Launch], operands: list[Operands], replays: int) -> list[Timing]:
        """Return the microseconds of each of several launches, which are measured interleaved."""
        variants = [[functools.partial(launch, o) for o in operands] for launch in launches]
        return (time_graphs if self.device.type == "cuda" else time_calls)(variants, replays)


def _require_memory(size: int) -> None:
    """Raise MemoryError if Linux has less memory for a process than ``size`` bytes: it would grant them, and end the
    process once they are written."""
    free = linux_says("meminfo", r"MemAvailable: +(\d+) kB")
    if free and size > 1024 * int(free):
        raise MemoryError(f"cannot allocate {size} bytes")
