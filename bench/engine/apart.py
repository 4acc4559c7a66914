"""Engines in a process each, of which some start at a time and are then timed by turns: :func:`rows_apart`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from bench.rows import Row


class Started(NamedTuple):
    """An engine that runs in this process."""

    row: Row
    answers: Any
    times: Iterator[Row]
    """Rows that are timed when they are asked for."""


Start = Callable[[str], Started]
"""Starts the engine of a name."""

_times: Iterator[Row] = iter(())
"""Of the engine of this process."""


def rows_apart(start: Start, names: Sequence[str], at_a_time: int) -> Iterator[tuple[str, Row, Any]]:
    """Start engines, ``at_a_time`` of them together, and time those by turns, a row of each. Generate names, rows, and
    beside the row of a start its answers, else None. An engine that fails has a row that says why.

    Args:
        start: called with a name in a process of its own, so it can be pickled.
    """
    rest = iter(names)
    while group := list(itertools.islice(rest, at_a_time)):
        with contextlib.ExitStack() as stack:
            pools = {name: stack.enter_context(ProcessPoolExecutor(1, get_context("spawn"))) for name in group}
            starting = {name: pool.submit(_start, start, name) for name, pool in pools.items()}
            for name, future in starting.items():
                try:
                    row, answers = future.result()
                except Exception as e:  # whatever the engine's own kernels lack here
                    row, answers = _failed(name, e), None
                    del pools[name]
                yield name, row, answers
            while pools:
                for name, pool in list(pools.items()):
                    try:
                        timed = pool.submit(_next).result()
                    except Exception as e:
                        timed = _failed(name, e)
                    if timed is None or timed["phase"] == "failed":
                        del pools[name]
                    if timed is not None:
                        yield name, timed, None


def _failed(name: str, e: Exception) -> Row:
    return {"impl": name, "phase": "failed", "reason": f"{type(e).__name__}: {e}"[:400]}


def _start(start: Start, name: str) -> tuple[Row, Any]:
    global _times
    row, answers, _times = start(name)
    return row, answers


def _next() -> Row | None:
    return next(_times, None)
