"""4-bit numbers in the words that engines hold, for tests of their plugins."""

from __future__ import annotations

import torch

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def words(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 (..., columns / 8): nibble order[i] of a word is its number i."""
    eights = codes.long().unflatten(-1, (-1, 8))
    total = sum(eights[..., i] << 4 * place for i, place in enumerate(order))
    return (total - (total >= 2**31) * 2**32).int()
