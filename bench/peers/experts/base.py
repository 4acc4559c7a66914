"""The benchmark's interface to an implementation of products of several experts: :class:`ExpertsPeer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from bench.peers.base import Adapter, Tensors, words_of

from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight

Run = Callable[[Tensors, torch.Tensor, torch.Tensor], torch.Tensor]
"""run(tensors, x (rows, k), out (rows, n)) -> d (rows, n), in ``out`` if the implementation can write there. Rows are
in order of their experts."""


class Experts(NamedTuple):
    """Weights of several experts as checkpoints hold them."""

    format: WeightFormat
    words: torch.Tensor
    """int32 (experts, n, k / 8): eight codes along k in a word, the first in the lowest bits."""
    scales: torch.Tensor
    """(experts, n, groups), in the dtype that the format stores."""
    channels: torch.Tensor | None
    """float32 (experts, n), or None if the format has none."""

    @property
    def n(self) -> int:
        return self.words.shape[1]

    @property
    def k(self) -> int:
        return 8 * self.words.shape[2]

    @classmethod
    def rotated(cls, weight: QuantizedWeight, experts: int) -> Experts:
        """Return experts whose rows are those of ``weight``, moved down by the expert's number."""
        _, scales, _, channels, *_ = weight.parts()
        moved = (torch.stack([rotate(t, e) for e in range(experts)]) for t in (words_of(weight), _bytes(scales)))
        own = None if channels is None else torch.stack([channels.roll(e) for e in range(experts)])
        words, stored = moved
        return cls(weight.format, words, stored.view(scales.dtype), own)

    def factors(self) -> torch.Tensor:
        """float32 (experts): the factor of each expert's rows, 1 without.

        Raises:
            ValueError: if rows of an expert have different ones, which no other library takes.
        """
        if self.channels is None:
            return torch.ones(len(self.words), device=self.words.device)
        if not bool((self.channels == self.channels[:, :1]).all()):
            raise ValueError("one factor for all rows of an expert only")
        return self.channels[:, 0].contiguous()


def rotate(t: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a tensor whose rows are moved down, those at the end to the top; of any dtype."""
    return _bytes(t).roll(rows, 0).view(t.dtype)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """A view with a dtype that every operation takes: uint8 for numbers of one byte."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


@dataclass(frozen=True)
class Prepared:
    """Weights of experts in an implementation's own layout, and how to multiply by them."""

    tensors: Tensors
    """Every tensor of the weights that a call reads: the benchmark rotates over copies of them."""
    routed: Callable[[Sequence[int]], Run]
    """routed(rows of each expert) -> run: what a call wants to know of a division of rows is made here and not timed.
    The run works in a CUDA graph."""
    ahead: Callable[[int], object] = lambda rows: None
    """ahead(rows of all experts) compiles what a call needs. It may run in a thread beside others and launches nothing
    on the GPU."""
    activations: torch.dtype | None = None
    """dtype of x that ``run`` takes, if the implementation quantizes x itself; else None."""
    note: str = ""
    """Differences from the problem, like a padded size; it stands where others have their config."""

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)


class ExpertsPeer(Adapter, Protocol):
    """An implementation of the products of rows of x by the weights of their experts."""

    def prepare(self, experts: Experts, dtype: torch.dtype) -> Prepared:
        """Repack the codes and scales, bit for bit, for activations of ``dtype``."""
        ...
