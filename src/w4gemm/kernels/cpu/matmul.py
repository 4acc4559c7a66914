"""Operands of PyTorch's matmul, for CPUs with AMX."""

from __future__ import annotations

import torch

_COLUMNS = 32


def whole_columns(t: torch.Tensor, dim: int) -> torch.Tensor:
    """Return t with zeros at the end of the dimension (-1 or -2) that a matmul sums over, or t itself.

    On CPUs with AMX PyTorch's matmul of 16-bit numbers reads whole multiples of 32 columns, and so a NaN of the next
    row or beside the tensor (PyTorch 2.13, from 16 rows on). Elsewhere nothing is added.
    """
    missing = -t.shape[dim] % _COLUMNS
    if t.is_cuda or t.dtype.itemsize > 2 or not missing:
        return t
    return torch.nn.functional.pad(t, (0, missing) if dim == -1 else (0, 0, 0, missing))
