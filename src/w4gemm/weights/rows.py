"""Weights one below the other as one weight, and the rows of a weight as weights of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from w4gemm.core.autocast import without_autocast
from w4gemm.packing.packed_shape import packed_shape

if TYPE_CHECKING:
    from w4gemm.weights.weight import QuantizedWeight


@without_autocast
def joined(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return one weight whose rows are those of ``weights``, one below the other, bit for bit.

    Raises:
        ValueError: if they differ in anything but n, have experts, or their layout pads n.
    """
    first = weights[0]
    facts = [(w.format, w.k, w.layout, w.device, w.activations) for w in weights]
    perms = [w.perm for w in weights]
    equal = all(p is perms[0] or (p is not None and perms[0] is not None and torch.equal(p, perms[0])) for p in perms)
    if any(w.experts for w in weights) or len(set(facts)) > 1 or not equal:
        raise ValueError(f"weights: wanted the same format, k, layout, device, activations and perm, got {weights}")
    if any(padded(w) for w in weights):
        raise ValueError(f"weights: wanted n without padding in the layout {first.layout}, got {weights}")
    tensors = tuple(torch.cat(ts) for ts in zip(*(w.tensors for w in weights), strict=True))
    return replace(first, n=sum(w.n for w in weights), tensors=tensors)


def parts(w: QuantizedWeight, sizes: Sequence[int]) -> list[QuantizedWeight]:
    """Return the weights of the first ``sizes[0]`` rows of w, of the next ``sizes[1]``, and so on, which share w's
    memory. ``sizes`` are the n of weights that :func:`joined` put together."""
    found, start = [], 0
    for size in sizes:
        cut = [len(t) * start // w.n for t in w.tensors], [len(t) * (start + size) // w.n for t in w.tensors]
        tensors = tuple(t[a:b] for t, a, b in zip(w.tensors, *cut, strict=True))
        found.append(replace(w, n=size, tensors=tensors))
        start += size
    return found


def padded(w: QuantizedWeight) -> bool:
    """True if the layout pads the rows of w, so that it has room for another row."""
    own, more = (packed_shape(w.format, w.layout, n, w.k).tensors for n in (w.n, w.n + 1))
    return any(shape[0] == larger[0] for (_, shape), (_, larger) in zip(own, more, strict=True))
