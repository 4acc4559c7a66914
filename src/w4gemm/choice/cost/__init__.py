"""About how long a config takes, without running it: one formula per kernel, with constants as data (constants.py).

The Hopper kernels' is in waves.py, that of kernels of mma.sync in mma_sync.py. Those of kernels that call a library are
here: dequantize_gemm (cuBLAS) and cpu_mixed_gemm (PyTorch). A new kernel needs no formula: it is ranked by twice its
roofline until one is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from w4gemm.choice.cost import mma_sync, waves
from w4gemm.choice.cost.constants import constants_for, scale_of
from w4gemm.choice.cost.traffic import Timer, unmeasured_us
from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import PLAIN
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels import Kernel
from w4gemm.kernels.cpu.matmul import fast_dtype
from w4gemm.kernels.cpu.spec import COMPILED_TOKENS, ROUNDED_TOKENS, TILES_TOKENS
from w4gemm.kernels.dequantize_gemm.spec import dense_bytes

_TILES = ((128, 256), (256, 128), (128, 128))
"""Tokens and features of the tiles that cuBLAS is taken to choose from."""
_SUM_TOKENS = 4
"""Largest m that the CPU's "sum" is ranked first for. Time of "sum" / time of "dense", geometric mean over four sizes
of layers, float32 and bfloat16, one and two cores of an EPYC with AVX-512 (2026-11-22): 0.7 at 4 tokens, 1.1 at 6, 1.5
at 8."""
_NATIVE_TOKENS = 96
"""Largest m that "compiled" is ranked first for where PyTorch multiplies bfloat16 faster than float32. Time of
"compiled" / time of "dense", one thread of a Xeon with AMX, 4096 x 4096, 1536 x 576 and 576 x 576: 0.8, 0.8 and
0.6 at 64 tokens, 1.0, 0.9 and 0.8 at 96, 1.0, 1.5 and 1.0 at 128 (2026-11-28)."""


_TILED_FROM = {torch.bfloat16: 4, torch.float16: 6}
"""Least m that "tiles" is ranked first for, by dtype; 9 for others, of which AMX multiplies three parts.

Time of "tiles" / time of "compiled", one thread of a busy Xeon, 4096 x 4096, 1536 x 576 and 576 x 576 (2026-11-28):
bfloat16 1.3, 0.9 and 1.5 at 2 tokens, 0.9, 0.8 and 0.7 at 4, 0.4, 0.6 and 0.6 at 16; float32 1.2, 0.9 and 1.2 at 8,
1.0, 0.7 and 0.9 at 12, 0.7, 0.7 and 0.7 at 64."""
_EXACT_TOKENS = 96
"""Largest m that "tiles" is ranked before "rounded" for. Time of "rounded" / time of "tiles", a thread of a busy Xeon,
bfloat16: 1.6, 0.8 and 1.5 at 64 tokens of 4096 x 4096 in groups of 128, 11008 x 2048 and 1536 x 576 in groups of 32,
0.9 at 96 of 1536 x 576, 0.7, 0.4 and 0.6 at 256 (2026-11-29)."""


def _cpu_order(kernel: Any, problem: GemmProblem, config: GemmConfig) -> float:
    """Return 1 for the CPU kernel's compiled method, 0.4 for that by AMX's tiles or 1.5 for few tokens, 0.3 for tiles
    of rounded numbers or 1.6 for few tokens, 2 for the faster of the other two and 3 for the last; 0.5 where PyTorch's
    bfloat16 matmul is faster than compiled vectors. Only this order holds on every CPU."""
    if config.tile_m == ROUNDED_TOKENS:
        return 0.3 if problem.m > _EXACT_TOKENS else 1.6
    if config.tile_m == TILES_TOKENS:
        return 0.4 if problem.m >= _TILED_FROM.get(problem.dtype, 9) else 1.5
    is_native = problem.dtype == fast_dtype(problem.dtype) == torch.bfloat16 and problem.epilogue == PLAIN
    if is_native and problem.m > _NATIVE_TOKENS and config.tile_m > ROUNDED_TOKENS:
        return 0.5
    if config.tile_m == COMPILED_TOKENS:
        return 1.0
    few = problem.m <= _SUM_TOKENS
    return 2.0 if (config.tile_m == 1) == few else 3.0


def _dequantize_gemm_us(kernel: Any, problem: GemmProblem, config: GemmConfig) -> float:
    """Return the microseconds of all launches: two for each chunk of tile_n features.

    The dense weight is written and read once, and cuBLAS multiplies at its usual rate. In fp8 the rate falls as less of
    a wave is filled; in 16 bits the power limit sets it, whatever the waves. Storing the results takes time of its own,
    which counts if k is small: an SM's tensor cores do nothing while it stores a tile.
    """
    constants, scale, device = constants_for(problem.device), scale_of(problem.device), problem.device
    model = constants.models["cublas"]
    moved = dense_bytes(problem, problem.n) + problem.n * problem.k // 2
    others = constants.models["cublas_rate"]
    rate = constants.models.get(f"cublas_rate/{'.'.join(map(str, device.capability))}", others)
    per_sm, result_us = rate["operations"] / rate["sms"], model["result_us"]
    if problem.dtype.itemsize == 1:
        result_us = model["fp8_result_us"]
        per_sm = model["fp8_operations"] / constants.device.sms
        per_sm *= _filled(problem.m, min(problem.n, config.tile_n), device.sms) ** model["fp8_waves"]
    per_sm /= scale.mma
    chunks = -(-problem.n // config.tile_n)
    results = problem.m * problem.n / device.sms
    product = results * (2 * problem.k / per_sm + result_us * scale.clock)
    return float(chunks * model["launch_us"] + moved / model["bytes_per_us"] * scale.memory + product)


def _filled(m: int, n: int, sms: int) -> float:
    """Part of the tensor cores' time in which waves of cuBLAS's best tiles use them."""
    waves = ((tokens * features * sms, -(-m // tokens) * -(-n // features) / sms) for tokens, features in _TILES)
    return max(m * n / (each * math.ceil(count)) for each, count in waves)


_Timers = Callable[[GemmConfig], Timer]


def _each(model: Callable[[Any, GemmProblem, GemmConfig], float]) -> Callable[[Any, GemmProblem], _Timers]:
    """A model of one problem and config as the timers of all configs."""
    return lambda kernel, problem: lambda config: lambda m: model(kernel, replace(problem, m=m), config)


_TIMERS: dict[str, Callable[[Any, GemmProblem], _Timers]] = {
    "sm90_decode": waves.timers,
    "sm90_mixed_gemm": waves.timers,
    "sm90_fp8_gemm": waves.timers,
    "sm90_fp8_block_gemm": waves.timers,
    "sm89_fp8_gemm": mma_sync.timers,
    "sm80_mixed_gemm": mma_sync.timers,
    "dequantize_gemm": _each(_dequantize_gemm_us),
    "cpu_mixed_gemm": _each(_cpu_order),
}
"""By the kernel's name."""
_UNMEASURED = _each(lambda kernel, problem, config: unmeasured_us(problem))


def timers(kernel: Kernel, problem: GemmProblem) -> _Timers:
    """Return a function from a config to its :data:`Timer`. Times are above 0. They order configs and kernels on one
    device, no more."""
    return _TIMERS.get(kernel.name, _UNMEASURED)(kernel, problem)


def predicted_us(kernel: Kernel, problem: GemmProblem, config: GemmConfig) -> float:
    """Return the microseconds of a launch of one config at the problem's m."""
    return timers(kernel, problem)(config)(problem.m)
