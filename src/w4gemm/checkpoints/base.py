"""What a checkpoint format is to the rest of the library: :class:`CheckpointFormat` opens a :class:`Checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from w4gemm.weight import QuantizedWeight


class Checkpoint(Protocol):
    """An open checkpoint: named tensors, some of them 4-bit weights that are taken over without requantization."""

    path: Path

    def names(self) -> list[str]:
        """Every tensor, in the checkpoint's own names."""
        ...

    def is_int4(self, name: str) -> bool:
        """Whether :meth:`weight` can give this tensor."""
        ...

    def weight(self, name: str, rows: torch.Tensor | None = None) -> QuantizedWeight:
        """A 4-bit tensor, losslessly, in the canonical layout on the CPU.

        Args:
            rows: int64 indices: take these rows (output features), in this order; None for all as stored.
        """
        ...

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Any tensor, dequantized in float32 and rounded once to ``dtype``, on the CPU."""
        ...


@dataclass(frozen=True)
class CheckpointFormat:
    """One format: a name, how a path is recognized, and how it is opened."""

    name: str
    find: Callable[[Path], Path | None]
    """The file or folder to open for a path, or None if there is nothing of this format there."""
    open: Callable[[Path], Checkpoint]
