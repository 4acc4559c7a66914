"""Act-order: groups whose columns are not adjacent, as GPTQ with ``desc_act`` makes them.

``g_idx`` (k,) has the group of each column of w. In a packed weight the columns of a group are contiguous. So the
columns are sorted by group once, when the weight is made, and the weight keeps ``perm`` (k,): packed column j is column
perm[j] of w. A product gathers x's columns in the same order. No code below :func:`w4gemm.linear` depends on perm.
"""

from __future__ import annotations

import torch

from w4gemm.core.errors import require_dense
from w4gemm.core.formats import WeightFormat

PERM_DTYPE = torch.int32


def sorting_perm(g_idx: torch.Tensor, format: WeightFormat, k: int, device: torch.device) -> torch.Tensor | None:
    """Return the stable order of columns that makes the groups contiguous, or None if they are contiguous already.

    Args:
        g_idx: integers (k,), the group of each column, 0 .. groups - 1. Every group has ``group_size`` columns; the
            last one has the remaining columns of k.
        device: device that g_idx must be on.

    Returns:
        int32 (k,), a permutation: packed column j is column perm[j].

    Raises:
        TypeError, ValueError: naming g_idx and the first bad group.
    """
    if (
        not isinstance(g_idx, torch.Tensor)
        or g_idx.dtype.is_floating_point
        or g_idx.dtype.is_complex
        or (g_idx.dtype == torch.bool)
    ):
        came = g_idx.dtype if isinstance(g_idx, torch.Tensor) else type(g_idx).__name__
        raise TypeError(f"g_idx: wanted integers (k) or None, got {came}")
    require_dense("g_idx", g_idx)
    if tuple(g_idx.shape) != (k,):
        raise ValueError(f"g_idx: wanted shape ({k},), k of codes, got {tuple(g_idx.shape)}")
    if g_idx.device != device:
        raise ValueError(f"g_idx: wanted device {device} like codes, got {g_idx.device}")
    g_idx = g_idx.long()  # of some unsigned integers PyTorch knows no smallest
    groups, length = format.groups(k), format.group_length(k)
    columns, first, last = torch.arange(k, device=device), int(g_idx.min()), int(g_idx.max())
    if first < 0 or last >= groups:
        bad = first if first < 0 else last
        raise ValueError(f"g_idx: wanted groups 0..{groups - 1} for k {k} in {format}, got {bad}")
    sizes = torch.bincount(g_idx, minlength=groups)
    wrong = sizes != torch.bincount(columns // length, minlength=groups)
    if wrong.any():
        group = int(wrong.nonzero()[0])
        wanted = min(length, k - group * length)
        raise ValueError(
            f"g_idx: group {group} wants {wanted} columns in {format} with k {k}, got {int(sizes[group])}; "
            "groups of other sizes cannot be packed"
        )
    perm = torch.argsort(g_idx, stable=True)
    return None if torch.equal(perm, columns) else perm.to(PERM_DTYPE)


def check_perm(perm: torch.Tensor, k: int, device: torch.device) -> None:
    """Raise ValueError if perm has a wrong dtype, shape or device. :func:`is_permutation` checks its numbers."""
    if not isinstance(perm, torch.Tensor) or perm.dtype != PERM_DTYPE or tuple(perm.shape) != (k,):
        came = f"{perm.dtype} {tuple(perm.shape)}" if isinstance(perm, torch.Tensor) else type(perm).__name__
        raise ValueError(f"perm: wanted {PERM_DTYPE} ({k},) or None, got {came}")
    if perm.device != device or not perm.is_contiguous():
        raise ValueError(f"perm: wanted it contiguous on {device}, got it on {perm.device}, stride {perm.stride(0)}")


def is_permutation(perm: torch.Tensor) -> bool:
    """True if perm (k,) holds each of 0 .. k - 1 once. Synchronizes on a GPU."""
    return torch.equal(perm.sort().values, torch.arange(len(perm), dtype=perm.dtype, device=perm.device))


def in_original_order(columns: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """Return ``columns`` (n, k) from packed order to w's: result[:, perm[j]] is columns[:, j]."""
    return columns.index_select(1, torch.argsort(perm))
