"""About how long a config takes, without running it: :func:`predicted_us`, and :func:`ranked`, which orders by it.

Each kernel has a model; its constants are data, see constants.py. A new kernel needs none: it is ranked by twice its
roofline until one is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from w4gemm.choice.cost import cpu, cublas, mma_sync, waves
from w4gemm.choice.cost.traffic import copy_us, roofline_us
from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels import Kernel

Model = Callable[[Kernel, GemmProblem, GemmConfig], float]

MODELS: dict[str, Model] = {
    "sm90_decode": waves.predicted_us,
    "sm90_mixed_gemm": waves.predicted_us,
    "sm90_fp8_gemm": waves.predicted_us,
    "sm89_fp8_gemm": mma_sync.predicted_us,
    "sm80_mixed_gemm": mma_sync.predicted_us,
    "dequantize_gemm": cublas.predicted_us,
    "cpu_mixed_gemm": cpu.predicted_us,
}
"""By the kernel's name."""


def predicted_us(kernel: Kernel, problem: GemmProblem, config: GemmConfig) -> float:
    """Microseconds of a launch, more than 0: they order configs and kernels on one device, no more."""
    model = MODELS.get(kernel.name)
    return 2 * roofline_us(problem) if model is None else model(kernel, problem, config)


def ranked(kernels: Iterable[Kernel], problem: GemmProblem) -> list[tuple[float, Kernel, GemmConfig]]:
    """(predicted us, kernel, config) of every kernel that supports ``problem``, best guess first."""
    found = [
        (predicted_us(kernel, problem, config), kernel, config)
        for kernel in kernels
        if kernel.supports(problem)
        for config in kernel.configs(problem)
    ]
    return sorted(found, key=lambda entry: (entry[0], entry[1].name, str(entry[2])))


__all__ = ["copy_us", "predicted_us", "ranked"]
