"""The cache of plans: :func:`plan_for` chooses once for each :class:`PlanKey`, :func:`prepare` beforehand."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import NamedTuple

import torch

from w4gemm.choice.model import BOUNDS, interval_end, plan_rows
from w4gemm.choice.plan import Plan, choose, problems_of_interval
from w4gemm.core import environment
from w4gemm.core.epilogue import PLAIN, Epilogue
from w4gemm.core.errors import UnsupportedError
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.jit import Unit, adopt, compiled, is_ready
from w4gemm.jit.pool import CompilePool, usable_processors
from w4gemm.jit.turns import turn
from w4gemm.packing.packed_shape import PackedShape
from w4gemm.weights.weight import QuantizedWeight

_log = logging.getLogger("w4gemm")

Tuner = Callable[[GemmProblem], None]
"""A function that is called with a problem before a plan is chosen for it, and may store a record for it."""


class PlanKey(NamedTuple):
    """All that a plan depends on; cheap to build and to look up."""

    m: int
    """The m that the plan is chosen for, see :func:`w4gemm.choice.model.plan_rows`."""
    weight: PackedShape
    dtype: torch.dtype
    epilogue: Epilogue
    device: torch.device
    config: str = ""
    """A forced config as :func:`w4gemm.choice.choose` takes it, or the empty string."""
    batch_invariant: bool = False
    gathered: bool = False

    @classmethod
    def of(
        cls,
        weight: PackedShape,
        m: int,
        dtype: torch.dtype,
        device: torch.device,
        epilogue: Epilogue = PLAIN,
        batch_invariant: bool = False,
        gathered: bool = False,
        config: str = "",
    ) -> PlanKey:
        """Return the key of the plan for m rows of x, of all experts together. dtype: of x as it is multiplied."""
        return cls(plan_rows(m, weight.experts), weight, dtype, epilogue, device, config, batch_invariant, gathered)

    @classmethod
    def of_layer(
        cls,
        w: QuantizedWeight,
        m: int,
        dtype: torch.dtype,
        epilogue: Epilogue,
        batch_invariant: bool = False,
        gathered: bool = False,
    ) -> PlanKey:
        """Return the key of the plan for m rows of x of ``dtype``, which are quantized first if the weight says so."""
        if w.activations == "fp8":
            dtype, epilogue = torch.float8_e4m3fn, epilogue.of_quantized(dtype)
        return cls.of(w.packed, m, dtype, w.device, epilogue, batch_invariant, gathered)

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
_untuned: dict[PlanKey, Plan] = {}
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
    """Return the plan of ``key``, chosen and compiled once. Errors are those of :func:`w4gemm.choice.choose`."""
    plan = _plans.get(key)
    return _new_plan(key) if plan is None else plan


def _new_plan(key: PlanKey) -> Plan:
    tuners = _tuners.get()
    untuned = _open_tuners > 0 and not tuners
    if untuned and (plan := _untuned.get(key)) is not None:
        return plan
    problem = key.problem()
    if tuners and not key.config and not key.weight.experts:
        tuners[-1](problem)
    started, seen = time.perf_counter(), generation
    plan = choose(problem, key.config or None).ready()
    with _lock:
        if not untuned:
            if seen == generation:  # else another thread tuned meanwhile, or began to: the next call chooses anew
                _plans[key] = plan
        elif _open_tuners:  # else the last block ended meanwhile, and forgot what was chosen without a tuner
            _untuned[key] = plan
    ms = 1e3 * (time.perf_counter() - started)
    _log.debug("%s: %s (%s), for m up to %d, ready in %.0f ms", problem, plan, plan.source, problem.m, ms)
    return plan


def tokens_of_all_plans(key: PlanKey, most: int) -> list[int]:
    """Return numbers of tokens within 1 .. most. Together they need every plan that the key's weight, not of experts,
    needs for 1 .. most tokens."""
    return list(_tokens_of_all_plans(replace(key.problem(), m=1), most, generation))


@functools.lru_cache(maxsize=256)
def _tokens_of_all_plans(problem: GemmProblem, most: int, generation: int) -> tuple[int, ...]:
    """:func:`tokens_of_all_plans`, which takes about a tenth of a second, once for all layers of a kind."""
    starts = (start for start in (1, *(bound + 1 for bound in BOUNDS)) if start <= most)
    ends = (replace(problem, m=interval_end(start)) for start in starts)
    return tuple(min(one.m, most) for end in ends for one in problems_of_interval(end, most))


def is_kept(key: PlanKey, plan: Plan | None = None) -> bool:
    """True if the cache holds a plan of ``key``; if ``plan`` is not None, that very plan. A plan that only serves while
    another thread tunes is not in the cache."""
    cached = _plans.get(key)
    return cached is not None and (plan is None or cached is plan)


class Prepared(NamedTuple):
    """Result of :func:`prepare`."""

    units: int
    """Number of compiled kernels that the plans and helpers need."""
    compiled: int
    """Number of these that this process compiled; the others were in memory or in the cache folder."""
    seconds: float
    """Time that all of it took."""


def prepare(keys: Iterable[PlanKey], helpers: Collection[Unit] = (), rank: int = 0, ranks: int = 1) -> Prepared:
    """Choose and compile the plans of ``keys`` in several processes and compile ``helpers``, so that no later call has
    to wait for them.

    Several processes of one machine may prepare the same keys, as the ranks of a tensor-parallel engine do. They take
    turns (:func:`~w4gemm.jit.turns.turn`): the first compiles, the others load what it has stored. Where they cannot,
    they divide the work: each uses its fraction of the processors and begins at another unit.

    Args:
        keys: the products, each with a number of tokens: ``PlanKey.of(weight, m, dtype, device)``.
        helpers: units of small kernels that run before or after the products.
        rank, ranks: the index of this process among ``ranks`` processes that prepare the same.

    Raises:
        UnsupportedError: if no kernel runs one of the products, or a unit cannot be compiled; with the reason.
    """
    started = time.perf_counter()
    plans = {key: choose(key.problem()) for key in dict.fromkeys(keys) if not is_kept(key)}
    needed = (*(plan.unit for plan in plans.values()), *helpers)
    units = list(dict.fromkeys(unit for unit in needed if unit is not None))
    missing = [unit for unit in units if not is_ready(unit)]
    count = _compile(missing, rank, ranks) if missing and environment.may_compile() else 0
    for key, plan in plans.items():
        _plans.setdefault(key, plan.ready())
    for helper in helpers:
        compiled(helper)
    return Prepared(len(units), count, time.perf_counter() - started)


def _compile(units: Collection[Unit], rank: int, ranks: int) -> int:
    """Compile the units that no other process stores meanwhile; return their number."""
    with turn() as is_alone:
        missing = [unit for unit in units if not is_ready(unit)]
        if not missing:
            return 0
        first, workers = 0, usable_processors()
        if not is_alone:
            first, workers = rank * len(missing) // ranks, max(1, workers // ranks)
        ordered = [*missing[first:], *missing[:first]]
        with CompilePool(min(workers, len(ordered))) as pool:
            for unit, future in zip(ordered, pool.submit(ordered), strict=True):
                try:
                    adopt(unit, future.result())
                except RuntimeError as e:
                    raise UnsupportedError(f"{unit.name} {unit.key} cannot be compiled for {unit.arch}: {e}") from None
        return len(missing)


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
                _untuned.clear()
        _outdate()
