"""Divisions of rows among experts, in the forms that implementations take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch


def ends_of(counts: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return (experts + 1,): the first row of each expert, and the number of all rows."""
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=dtype, device=device)


class Blocks(NamedTuple):
    """Rows in blocks of one expert each, as vLLM's moe_align_block_size gives them. All int32."""

    size: int
    """Rows of a block."""
    ids: torch.Tensor
    """(most rows in blocks): numbers of rows, block after block; the number of all rows where a block has none."""
    experts: torch.Tensor
    """(most blocks): the expert of each block."""
    used: torch.Tensor
    """(1): rows in blocks, with those that have none."""


def blocks_of(counts: Sequence[int], size: int, device: torch.device | str) -> Blocks:
    total, owners = sum(counts), [e for e, count in enumerate(counts) for _ in range(-(-count // size))]
    used, most = size * len(owners), -(-(total + len(counts) * (size - 1)) // size)
    ids = torch.full((most, size), total, dtype=torch.int32)
    block = row = 0
    for count in counts:
        blocks = -(-count // size)
        ids[block : block + blocks].view(-1)[:count] = torch.arange(row, row + count, dtype=torch.int32)
        block, row = block + blocks, row + count
    experts = torch.zeros(most, dtype=torch.int32)
    experts[: len(owners)] = torch.tensor(owners, dtype=torch.int32)
    parts = (ids.view(-1), experts, torch.tensor([used], dtype=torch.int32))
    return Blocks(size, *(t.to(device) for t in parts))


def block_size(counts: Sequence[int]) -> int:
    """Return the rows of a block that vLLM chooses for Marlin: the least of which the mean expert fills at most 90 %,
    64 at most."""
    mean = sum(counts) / len(counts)
    return next((size for size in (8, 16, 32, 48) if mean / size < 0.9), 64)
