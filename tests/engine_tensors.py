"""Integers in the words that engines hold, for tests of their plugins."""

from __future__ import annotations

import torch

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def words(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8)), bits: int = 4) -> torch.Tensor:
    """int32 (..., ceil(columns * bits / 32)): a stream of codes, lowest bits first. Of 4 bits, nibble order[i] of a
    word is its number i."""
    if bits == 4 and order != tuple(range(8)):
        codes = codes.unflatten(-1, (-1, 8))[..., [order.index(i) for i in range(8)]].flatten(-2)
    stream = (codes.long()[..., None] >> torch.arange(bits) & 1).flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % 32)).unflatten(-1, (-1, 32))
    return (stream << torch.arange(32)).sum(-1).int()
