"""Files of timings of configs: a line for each problem, whose ``us`` has the microseconds of each config."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.rows import Row, read


def rows_of(path: Path) -> Iterator[Row]:
    """Yield a row for each timing, with ``config`` ("kernel/config") and ``us``."""
    for problem in read(path):
        for config, us in problem.pop("us").items():
            yield problem | {"config": config, "us": us}


def by_problem(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the lines of a file of timings, given rows like those of :func:`rows_of`, a problem's in succession."""
    for _, group in itertools.groupby(rows, lambda row: {**row, "config": "", "us": 0}):
        problem, times = {}, {}
        for row in group:
            if row["config"] in times:  # timed again
                yield problem | {"us": times}
                times = {}
            problem = {name: value for name, value in row.items() if name not in ("config", "us")}
            times[row["config"]] = row["us"]
        yield problem | {"us": times}
