"""Weights of experts, drawn at random, in w4gemm's form and its peers': :func:`draw`, :class:`Drawn`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from bench.peers.base import Tensors
from bench.peers.experts import Experts, ExpertsPeer, Prepared
from bench.peers.experts.base import rotate
from bench.run import random_weight

from w4gemm import QuantizedWeight, WeightFormat
from w4gemm.core.problem import Device
from w4gemm.packing.layouts import layout_for

Sizes = tuple[int, int, int]
"""(experts, n, k)."""

_ROTATED_BYTES = 400e6
_SPARE_BYTES = 24e9
"""Memory that activations and the repacking of weights may take."""


@dataclass(frozen=True)
class Contender:
    """A peer with the weights in its own form, in copies to rotate over."""

    peer: ExpertsPeer
    prepared: Prepared
    copies: list[Tensors]


@dataclass(frozen=True)
class Mixture:
    """Weights of experts in one format."""

    copies: list[QuantizedWeight]
    """w4gemm's, to rotate over."""
    contenders: list[Contender]

    @property
    def weight(self) -> QuantizedWeight:
        return self.copies[0]


def draw(sizes: Sizes, format: WeightFormat, dtype: torch.dtype, peers: Sequence[ExpertsPeer]) -> Mixture:
    """Return random weights for activations of ``dtype``. What a peer cannot do is said, not dropped. The rows of all
    experts are the same, each time in another order, because drawing and packing each would take minutes."""
    experts, n, k = sizes
    one = random_weight(n, k, format, [dtype])
    each = (replace(one, tensors=tuple(rotate(t, e) for t in one.tensors)) for e in range(experts))
    w = QuantizedWeight.stack(each, experts, layout_for(Device.of(one.device), format, dtype))
    count = math.ceil(_ROTATED_BYTES / w.nbytes)
    copies = [w, *(replace(w, tensors=tuple(t.clone() for t in w.tensors)) for _ in range(count - 1))]
    return Mixture(copies, prepared_by(peers, one, experts, dtype, count))


def prepared_by(
    peers: Sequence[ExpertsPeer], one: QuantizedWeight, experts: int, dtype: torch.dtype, count: int
) -> list[Contender]:
    contenders, rotated = [], None
    for peer in peers:
        if reason := peer.supports(one.n, one.k, one.format, dtype):
            print(f"  {peer.name}, {experts}x{one.n}x{one.k} {one.format}: {reason}", flush=True)
            continue
        rotated = rotated or Experts.rotated(one, experts)
        try:
            prepared = peer.prepare(rotated, dtype)
        except Exception as e:  # a peer's failure is a result, not the end of the run
            print(f"  {peer.name}, {experts}x{one.n}x{one.k} {one.format}: {e!r:.300}", flush=True)
            continue
        tensors = prepared.tensors
        copies = [tensors, *(tuple(t.clone() for t in tensors) for _ in range(count - 1))]
        contenders.append(Contender(peer, prepared, copies))
    return contenders


class Drawn:
    """The weights that were drawn, each once while memory lasts.

    Args:
        peers: implementations that run on this machine.
        tokens: numbers of tokens per expert that will be measured; peers compile for them in the background.
    """

    def __init__(self, peers: Sequence[ExpertsPeer], tokens: Sequence[int], compilers: ThreadPoolExecutor) -> None:
        self._peers, self._tokens, self._compilers = peers, tokens, compilers
        self._kept: dict[tuple[Sizes, WeightFormat, torch.dtype], Mixture] = {}

    def get(self, sizes: Sizes, format: WeightFormat, dtype: torch.dtype) -> Mixture:
        key = sizes, format, dtype
        if key not in self._kept:
            self._make_room(math.prod(sizes))
            self._kept[key] = drawn = draw(*key, self._peers)
            for m in self._tokens:
                for contender in drawn.contenders:
                    self._compilers.submit(contender.prepared.ahead, m * sizes[0])
        return self._kept[key]

    def _make_room(self, numbers: int) -> None:
        """Drop the oldest weights until there is memory for as many numbers in each implementation's form."""
        torch.cuda.empty_cache()
        while self._kept and torch.cuda.mem_get_info()[0] < _SPARE_BYTES + (len(self._peers) + 2) * numbers:
            del self._kept[next(iter(self._kept))]
            torch.cuda.empty_cache()
