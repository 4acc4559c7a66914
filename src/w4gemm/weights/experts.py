"""Weights made of several: experts in one, gate and up rows in pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from w4gemm.core.errors import is_int, kind_of, require_int
from w4gemm.packing.layouts import WeightComponents, layout_named
from w4gemm.packing.packed_shape import packed_shape
from w4gemm.weights.repack import repack_into, target_layout
from w4gemm.weights.rows import padded

if TYPE_CHECKING:
    from w4gemm.weights.weight import QuantizedWeight


def stack(
    cls: type[QuantizedWeight], weights: Iterable[QuantizedWeight], count: int | None, layout: str | None
) -> QuantizedWeight:
    """See :meth:`w4gemm.QuantizedWeight.stack`."""
    if not isinstance(weights, Iterable) or isinstance(weights, torch.Tensor):
        raise TypeError(f"weights: wanted QuantizedWeights, a sequence or other iterable, got {kind_of(weights)}")
    if count is None:
        if not isinstance(weights, Sequence):
            raise TypeError(f"count: wanted the number of weights, because a {kind_of(weights)} has no length")
        count = len(weights)
        if not count:
            raise ValueError("weights: wanted at least one, got none")
    require_int("count", count)
    weights = tuple(weights) if isinstance(weights, Sequence) else weights
    if isinstance(weights, tuple) and len(weights) != count:
        raise ValueError(f"weights: wanted {count}, got {len(weights)}")
    found, first, common = 0, None, None
    for w in weights:
        if not isinstance(w, cls) or w.experts or w.perm is not None:
            came = w if isinstance(w, cls) else kind_of(w)
            raise TypeError(f"weights: wanted QuantizedWeights without experts and perm, got {came}")
        facts = {name: getattr(w, name) for name in ("format", "n", "k", "device", "activations")}
        if first is None or common is None:
            first, common = w, facts
            target = packed_shape(w.format, target_layout(w, layout, w.activations), w.n, w.k, count)
            tensors = target.empty(w.device)
        if found == count:
            raise ValueError(f"weights: wanted {count}, got more")
        if facts != common:
            wanted, came = (
                ", ".join(f"{name} {value}" for name, value in of.items() if facts[name] != common[name])
                for of in (common, facts)
            )
            raise ValueError(f"weights: wanted {wanted} like the first, got {came} as number {found + 1} of {count}")
        repack_into(w, target.layout, tuple(t[found] for t in tensors))
        found += 1
    if first is None or found < count:
        raise ValueError(f"weights: wanted {count}, got {found}")
    return replace(first, layout=target.layout, tensors=tensors, experts=count)


def expert(w: QuantizedWeight, index: int) -> QuantizedWeight:
    """See :meth:`w4gemm.QuantizedWeight.expert`."""
    if not w.experts:
        raise ValueError(f"expert: wanted a weight of several experts, got a single one, {w!r}")
    if not is_int(index) or not 0 <= index < w.experts:
        raise ValueError(f"index: wanted an expert 0 .. {w.experts - 1}, got {index!r}")
    return replace(w, tensors=tuple(t[index] for t in w.tensors), experts=0)


def as_one(w: QuantizedWeight, first: int = 0, last: int | None = None) -> QuantizedWeight | None:
    """Return the weight (count * n, k) of the experts first .. last - 1, one below the other, sharing this weight's
    memory; None if the layout pads n, because the padding lies between the experts."""
    if padded(w):
        return None
    tensors = tuple(t[first:last].flatten(0, 1) for t in w.tensors)
    return replace(w, n=w.n * len(w.tensors[0][first:last]), tensors=tensors, experts=0)


def interleave(cls: type[QuantizedWeight], gate: QuantizedWeight, up: QuantizedWeight) -> QuantizedWeight:
    """See :meth:`w4gemm.QuantizedWeight.interleave`."""
    for name, w in (("gate", gate), ("up", up)):
        if not isinstance(w, cls):
            raise TypeError(f"{name}: wanted a QuantizedWeight, got {type(w).__name__}")
    perms = [w.perm for w in (gate, up) if w.perm is not None]
    facts = [(w.format, w.n, w.k, w.device, w.activations) for w in (gate, up)]
    if facts[0] != facts[1] or len(perms) == 1 or (perms and not torch.equal(*perms)):
        raise ValueError(f"up: wanted format, n, k, device, activations and perm of gate, {gate}, got {up}")
    if gate.experts or up.experts:
        if gate.experts != up.experts:
            raise ValueError(f"up: wanted {gate.experts} experts like gate, got {up.experts}")
        each = (interleave(cls, gate.expert(e), up.expert(e)) for e in range(gate.experts))
        return stack(cls, each, gate.experts, gate.layout)
    up = up.repack(gate.layout)
    if gate.layout == "canonical":  # every tensor has a row for each of w's
        rows = zip(gate.tensors, up.tensors, strict=True)
        return replace(gate, n=2 * gate.n, tensors=tuple(torch.stack(both, 1).flatten(0, 1) for both in rows))
    pairs = WeightComponents.of(
        None if a is None or b is None else torch.stack((a, b), dim=1).flatten(0, 1)
        for a, b in zip(gate.parts(), up.parts(), strict=True)
    )
    return replace(gate, n=2 * gate.n, tensors=layout_named(gate.layout).pack(pairs, gate.format))
