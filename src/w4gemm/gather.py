"""x's columns in the order of a weight's ``perm``: :func:`gather_columns`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from w4gemm.config import GemmConfig
from w4gemm.formats import WeightFormat
from w4gemm.jit import compiled
from w4gemm.kernels import on_hopper
from w4gemm.kernels.base import selected
from w4gemm.kernels.column_gather.spec import ColumnGather
from w4gemm.problem import Device, GemmProblem

_KERNEL = ColumnGather()
_NO_CONFIG = GemmConfig(1, 1, 1)


def gather_columns(x: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """x (m, k) with its columns in the order of perm int32 (k), bit for bit: a contiguous (m, k).

    On Hopper a kernel of our own where rows and perm are aligned to 16 bytes: 1.5 us for 16 tokens of k 8192 where
    ``index_select`` takes 6, and 39 for 4096 tokens where it takes 151 (H200, 2026-11-21). Else ``index_select``.
    """
    device = x.device
    if device.type == "cuda" and x.shape[0] and device.index == torch.cuda.current_device() and _KERNEL.takes(x, perm):
        m, k = x.shape
        found = _launcher(k, x.dtype, device)
        if found is not None:
            function, sms = found
            out = torch.empty((m, k), dtype=x.dtype, device=device)
            function(x, perm, out, _KERNEL.parts(m, k, sms))
            return out
    return selected(x, 1, perm)


@functools.cache
def _launcher(k: int, dtype: torch.dtype, device: torch.device) -> tuple[Callable[..., Any], int] | None:
    """The compiled kernel and the device's number of multiprocessors; None where our kernels do not run."""
    problem = GemmProblem(1, k, k, dtype, WeightFormat(), "mma16", device=Device.of(device))
    if not on_hopper(problem):
        return None
    function = compiled(_KERNEL, problem, _NO_CONFIG)
    return None if function is None else (function, problem.device.sms)
