"""The plans that were chosen: :func:`plan_for` chooses once for each :class:`PlanKey`."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import NamedTuple

import torch

from w4gemm.choice import choose
from w4gemm.choice.choose import Plan, plan
from w4gemm.choice.intervals import BOUNDS, representative, representative_rows
from w4gemm.core.epilogue import PLAIN, Epilogue
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.packing.packed_shape import PackedShape
from w4gemm.weights.weight import QuantizedWeight

_log = logging.getLogger("w4gemm")

Tuner = Callable[[GemmProblem], None]
"""A function that is called with a problem before a plan is chosen for it, and may store a record for it."""


class PlanKey(NamedTuple):
    """All that a plan depends on; cheap to build and to look up."""

    m: int
    """The m that the plan is chosen for, see :func:`w4gemm.choice.intervals.representative_rows`."""
    weight: PackedShape
    dtype: torch.dtype
    epilogue: Epilogue
    device: torch.device
    config: str = ""
    """A forced config as :func:`w4gemm.choice.plan` takes it, or the empty string."""
    batch_invariant: bool = False
    gathered: bool = False

    @classmethod
    def of(
        cls,
        w: QuantizedWeight | PackedShape,
        m: int,
        dtype: torch.dtype,
        epilogue: Epilogue = PLAIN,
        batch_invariant: bool = False,
        gathered: bool = False,
        *,
        config: str = "",
        device: torch.device | None = None,
    ) -> PlanKey:
        """Return the key of the plan for m rows of x, of all experts together.

        Args:
            w: the weight; of a PackedShape, which has no device, ``device`` says where it is.
            dtype: dtype of x as it is multiplied.
        """
        if isinstance(w, PackedShape):
            assert device is not None
            weight, at = w, device
        else:
            weight, at = w.packed, device or w.device
        stands = representative_rows(m, weight.experts)
        return cls(stands, weight, dtype, epilogue, at, config, batch_invariant, gathered)

    def problem(self) -> GemmProblem:
        """Return the problem that the plan is chosen for."""
        weight = self.weight
        return GemmProblem(
            self.m,
            weight.n,
            weight.k,
            self.dtype,
            weight.format,
            weight.layout,
            self.epilogue,
            Device.of(self.device),
            self.batch_invariant,
            weight.experts,
            self.gathered,
        )


_plans: dict[PlanKey, Plan] = {}
_beside: dict[PlanKey, Plan] = {}
"""Plans that were chosen without a tuner while another thread has one. They are kept apart, because that thread's tuner
must still see their problems."""
_tuners: ContextVar[tuple[Tuner, ...]] = ContextVar("w4gemm_tuners", default=())
"""The tuners of this thread or task, the innermost last."""
_open_tuners = 0
"""Number of :func:`tuning_with` blocks that are open in all threads."""
_lock = threading.Lock()
generation = 0
"""Number of times that plans were forgotten. Code that keeps plans of its own drops them when this has changed."""


def plan_for(key: PlanKey) -> Plan:
    """Return the plan of ``key``, which is chosen and compiled once. Errors are those of :func:`w4gemm.choice.plan`."""
    found = _plans.get(key)
    return _resolved(key) if found is None else found


def _resolved(key: PlanKey) -> Plan:
    tuners = _tuners.get()
    beside = _open_tuners > 0 and not tuners
    if beside and (found := _beside.get(key)) is not None:
        return found
    problem = key.problem()
    if tuners and not key.config and not key.weight.experts:
        tuners[-1](problem)
    started, seen = time.perf_counter(), generation
    found = plan(problem, key.config or None)
    with _lock:
        if not beside:
            if seen == generation:  # else another thread tuned meanwhile, or began to: the next call chooses anew
                _plans[key] = found
        elif _open_tuners:  # else the last block ended meanwhile, and forgot what was chosen beside it
            _beside[key] = found
    ms = 1e3 * (time.perf_counter() - started)
    _log.debug("%s: %s (%s), for m up to %d, ready in %.0f ms", problem, found, found.source, problem.m, ms)
    return found


def meeting(key: PlanKey, most: int) -> list[int]:
    """Return numbers of tokens within 1 .. most that between them need every plan that a single weight like the key's
    needs for 1 .. most tokens."""
    return list(_meeting(replace(key.problem(), m=1), most, generation))


@functools.lru_cache(maxsize=256)
def _meeting(problem: GemmProblem, most: int, generation: int) -> tuple[int, ...]:
    """:func:`meeting`, which takes about a tenth of a second, once for all layers of a kind."""
    starts = (start for start in (1, *(bound + 1 for bound in BOUNDS)) if start <= most)
    problems = (replace(problem, m=representative(start)) for start in starts)
    return tuple(min(met.m, most) for one in problems for met in choose.met(one, most))


def is_known(key: PlanKey) -> bool:
    """True if the plan of ``key`` was chosen already."""
    return key in _plans


def keep(key: PlanKey, found: Plan) -> None:
    """Make ``found`` the plan of ``key`` until plans are forgotten, unless ``key`` has a plan by now."""
    _plans.setdefault(key, found)


def stays(key: PlanKey, found: Plan) -> bool:
    """True if ``found`` is the plan of ``key`` until plans are forgotten; False if it only serves while another thread
    tunes."""
    return _plans.get(key) is found


def forget(n: int | None = None, k: int | None = None) -> None:
    """Forget the plans of weights (n, k), or of all weights, because the tables of measured configs have changed."""
    with _lock:
        _outdate()
        for key in list(_plans):
            if n is None or (key.weight.n, key.weight.k) == (n, k):
                _plans.pop(key, None)


def _outdate() -> None:
    global generation
    generation += 1


@contextmanager
def tuning_with(tuner: Tuner) -> Iterator[None]:
    """Let ``tuner`` see every problem, in this thread or task, before a plan is chosen for it. Plans that were chosen
    before are chosen anew. Other threads tune nothing, and blocks of several threads may overlap in any order."""
    global _open_tuners
    _tuners.set((*_tuners.get(), tuner))
    with _lock:
        _open_tuners += 1
    forget()
    try:
        yield
    finally:
        _tuners.set(tuple(other for other in _tuners.get() if other is not tuner))
        with _lock:
            _open_tuners -= 1
            if not _open_tuners:
                _beside.clear()
        _outdate()
