"""The columns of x in the order of a weight's ``perm`` (act-order): :func:`gather_columns`, of experts
:func:`gather_columns_of_experts`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from w4gemm.api.modes import is_eager
from w4gemm.core.problem import Device
from w4gemm.kernels import launcher
from w4gemm.kernels.base import selected
from w4gemm.kernels.helpers.rows import ColumnGather

_INDICES = 2**24
"""Most columns that are gathered together with an index each, which takes 12 bytes."""


def gather_columns(x: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """Return x[:, perm], contiguous, for x (m, k) and perm int32 (k,).

    On Hopper a kernel of our own does it if the rows of x and perm are aligned to 16 bytes, and ``index_select``
    elsewhere. For k 8192 the kernel takes 1.5 us for 16 tokens and 39 us for 4096, ``index_select`` 6 and 151 us
    (H200, 2026-11-21).
    """
    device = x.device
    if device.type == "cuda" and x.shape[0] and ColumnGather.takes(x, perm):
        m, k = x.shape
        gather, sms = _gather_on(device, x.dtype, k)
        if gather is not None:
            out = torch.empty((m, k), dtype=x.dtype, device=device)
            gather(x, perm, None, None, out, ColumnGather.ctas_per_row(m, k, sms))
            return out
    return selected(x, 1, perm)


def gather_columns_of_experts(
    x: torch.Tensor, perm: torch.Tensor, starts: torch.Tensor, indices: torch.Tensor | None
) -> torch.Tensor:
    """Return, for each i, row indices[i] of x (rows, k) with its columns in the order perm[e], where e is the expert of
    row i. A kernel does it where one does it for a single weight; else PyTorch's operators do, some rows at a time, and
    gradients to x are added in the order of rows.

    Args:
        perm: int32 (experts, k).
        starts: int32 (experts,), the first row of each expert, ascending.
        indices: int32 or int64 (m,); None for row i.
    """
    m, k, device = (x if indices is None else indices).shape[0], x.shape[1], x.device
    if device.type == "cuda" and m and is_eager(x) and ColumnGather.takes(x, perm):
        gather, sms = _gather_on(device, x.dtype, k, True, indices is not None)
        if gather is not None:
            out = torch.empty((m, k), dtype=x.dtype, device=device)
            sources = None if indices is None else indices.int().contiguous()
            gather(x, perm, starts, sources, out, ColumnGather.ctas_per_row(m, k, sms))
            return out
    every = torch.arange(m, dtype=torch.int32, device=device)
    owner = (torch.searchsorted(starts, every, right=True) - 1).clamp(min=0)
    some = max(1, _INDICES // k)
    bits = x.view(torch.uint8) if x.element_size() == 1 else x  # PyTorch gathers no fp8

    def gathered(rows: slice) -> torch.Tensor:
        part = bits[rows] if indices is None else bits[indices[rows]]
        return part.gather(1, perm[owner[rows]].long())

    if torch.compiler.is_compiling():  # a traced loop would serve one m
        d = gathered(slice(None))
    else:
        d = torch.cat([gathered(slice(i, i + some)) for i in range(0, max(1, m), some)])
    return d if bits is x else d.view(x.dtype)  # a view of a dtype has no gradient


@functools.cache
def _gather_on(device: torch.device, *parameters: Any) -> tuple[Callable[..., Any] | None, int]:
    """Return the compiled gather, None if it does not run here, and the device's number of multiprocessors. One cache
    holds both, so that a call looks up once."""
    return launcher(ColumnGather.of, device, *parameters), Device.of(device).sms
