"""The plans of a whole model, made before its first call: :func:`prepare` compiles in several processes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import NamedTuple

from w4gemm.choice import plan_cache
from w4gemm.choice.choose import decide
from w4gemm.choice.plan_cache import PlanKey
from w4gemm.core import environment
from w4gemm.core.errors import UnsupportedError
from w4gemm.jit import Unit, adopt, compiled, is_ready
from w4gemm.jit.pool import CompilePool, usable_processors


class Prepared(NamedTuple):
    """Result of :func:`prepare`."""

    units: int
    """Number of compiled kernels that the plans and helpers need."""
    compiled: int
    """Number of these that had to be compiled; the others were in memory or in the cache folder."""
    seconds: float
    """Time that all of it took."""


def prepare(keys: Iterable[PlanKey], helpers: Collection[Unit] = (), rank: int = 0, ranks: int = 1) -> Prepared:
    """Choose and compile the plans of ``keys`` and compile ``helpers``, so that no later call has to wait for them.

    Several processes of one machine may prepare the same keys, as the ranks of a tensor-parallel engine do. They then
    divide the work through the cache folder: each uses its fraction of the processors and begins at another unit.

    Args:
        keys: the products, each with a number of tokens: ``PlanKey.of(weight, m, dtype, epilogue)``.
        helpers: units of small kernels that run beside the products.
        rank, ranks: the index of this process among ``ranks`` processes that prepare the same.

    Raises:
        UnsupportedError: if no kernel runs one of the products, or a unit cannot be compiled; with the reason.
    """
    started = time.perf_counter()
    decisions = {key: decide(key.problem()) for key in dict.fromkeys(keys) if not plan_cache.is_known(key)}
    wanted = (*(decision.unit for decision in decisions.values()), *helpers)
    units = list(dict.fromkeys(unit for unit in wanted if unit is not None))
    missing = [unit for unit in units if not is_ready(unit)]
    if missing and environment.may_compile():
        first = rank * len(missing) // ranks
        _compile([*missing[first:], *missing[:first]], max(1, usable_processors() // ranks))
    for key, decision in decisions.items():
        plan_cache.keep(key, decision.plan())
    for helper in helpers:
        compiled(helper)
    return Prepared(len(units), len(missing), time.perf_counter() - started)


def _compile(units: Collection[Unit], workers: int) -> None:
    with CompilePool(min(workers, len(units))) as pool:
        for unit, future in zip(units, pool.submit(units), strict=True):
            try:
                adopt(unit, future.result())
            except RuntimeError as e:
                raise UnsupportedError(f"{unit.name} {unit.key} cannot be compiled for {unit.arch}: {e}") from None
