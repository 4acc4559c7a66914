"""Names of kernels, results of engines, and waiting for something, for tests of bench.engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.engine.offline import Result

OURS = "w4gemm.integrations.vllm.dense.LinearKernel"
MACHETE = "vllm.model_executor.kernels.linear.mixed_precision.machete.MacheteLinearKernel"
MARLIN = "vllm.model_executor.kernels.linear.mixed_precision.marlin.MarlinLinearKernel"


def result(ms_step: float, tokens: list[list[int]]) -> Result:
    """Return the result of an engine whose decode steps take ``ms_step``, with the answers ``tokens``."""
    steps = len(tokens[0]) - 1
    total = 0.5 + steps * ms_step / 1e3
    decode = {"batch": len(tokens), "first_token_s": [0.5], "total_s": [total], "tokens": tokens}
    return Result("0.26.0", 20.0, {}, [{**decode, "repeats_itself": True}], [0.25])


def soon(condition: Callable[[], bool]) -> bool:
    """True as soon as the condition is, which may take some seconds."""
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()
