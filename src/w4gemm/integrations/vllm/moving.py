"""Experts that vLLM moves between GPUs while it serves (EPLB), and new weights for them.

vLLM's loaders put each expert where it was at the start. Once experts have moved, its router looks for them elsewhere.
So dense numbers go where their experts are now, and those of a layer that is loaded anew are looked for where they were
at the start.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from w4gemm.integrations.wrapping import wrap

_balancers: weakref.WeakSet[Any] = weakref.WeakSet()
"""vLLM's EplbStates of this process."""


class MovingLayer(NamedTuple):
    """A layer whose experts move: its number in what vLLM knows of the model, and that."""

    number: int
    model_state: Any

    def places(self) -> list[list[int]]:
        """Return all places of each expert; those of the first GPU come first."""
        places: list[list[int]] = [[] for _ in self.model_state.logical_replica_count[self.number]]
        for place, expert in enumerate(self.model_state.physical_to_logical_map[self.number].tolist()):
            if expert >= 0:
                places[expert].append(place)
        return places

    def look_at_start(self) -> None:
        """Have the router look for experts where vLLM's loaders put them: in the order of their numbers, then the first
        ones a second time, as many as there are places."""
        state, i = self.model_state, self.number
        places = torch.arange(state.physical_to_logical_map.shape[1], device=state.physical_to_logical_map.device)
        experts = len(state.logical_replica_count[i])
        expert, copy = places % experts, places // experts
        state.physical_to_logical_map[i].copy_(expert)
        state.logical_replica_count[i].copy_(torch.bincount(expert, minlength=experts))
        state.logical_to_physical_map[i].fill_(-1)[expert, copy] = places


def note_balancers() -> None:
    """Note every load balancer that vLLM makes."""
    try:
        from vllm.distributed.eplb.eplb_state import EplbState
    except ImportError:
        return
    wrap(EplbState, "add_model", _add_model)


def _add_model(own: Callable[..., None], balancer: Any, *args: Any, **options: Any) -> None:
    own(balancer, *args, **options)
    _balancers.add(balancer)


def moving(layer: Any) -> MovingLayer | None:
    """Return what vLLM knows of a layer of experts that move; None before the model is loaded."""
    for balancer in _balancers:
        for state in balancer.model_states.values():
            for i, runner in enumerate(state.model.moe_layers):
                if getattr(runner, "routed_experts", runner) is layer:
                    return MovingLayer(i, state)
    return None


def placement() -> list[list[list[int]]]:
    """Return the numbers of experts at all places of all layers of all models."""
    states = (state for balancer in _balancers for state in balancer.model_states.values())
    return [state.physical_to_logical_map.tolist() for state in states]


def stop_moves() -> None:
    """Wait until no experts are on their way to another GPU, where old weights would come behind new ones. Called on
    all GPUs at a time."""
    for balancer in _balancers:
        balancer.drain_async()
