"""Files of measured rows: ``python -m bench.rows FILE...`` stores one compactly.

Benchmarks append whole rows. A stored file has a line of kind ``run`` with the facts that all rows of a run share, then
a line for each timed point of that run, whose ``us`` has each implementation's median. :func:`read` returns whole rows
of either form. bench.sweep's files of timings have a line for each problem, whose ``us`` has the time of each config,
stored by kernel and without a cluster of 1x1x1: :func:`timings_of`. To join files, give the rows of each a ``run``.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.options import command

Row = dict[str, Any]
FACTS = ("gpu", "driver", "torch", "dsl", "commit", "dirty")
"""Facts of the machine that a row has at least, of ``w4gemm.tuning.record.facts``."""
OF_IMPL = ("impl", "impl_version", "config", "rel_error", "us_p20", "us_p50", "us_p80")
"""Fields that differ between the implementations of a point."""
OURS = ("configs", "best_config_us")
"""Fields of w4gemm's row that a point keeps."""
OF_PART = ("work", "format", "dtype", "routing")
"""Fields by which the rows of a run are grouped."""
BY_CONFIG = ("us", "predicted", "gathered", "copied", "down")
"""Fields that may have a number for each config, "kernel/config", which are stored by kernel."""
_TILE_ALONE = re.compile(r"(?<![\d_])\d+x\d+x\d+_(?=[a-z])")
"""The tile of a config that is stored without its cluster."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.rows", __doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="file of rows, which is written anew")
    for path in parser.parse_args(argv).files:
        path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in compact(read(path))))


def read(path: Path) -> list[Row]:
    """Return the rows of a file, each with all of its facts."""
    common: dict[str, Row] = defaultdict(dict)
    run, part = "", Row()
    rows: list[Row] = []
    for row in map(json.loads, path.read_text().splitlines()):
        if row.get("kind") == "run":
            run, part = row.get("run", ""), {}
            common[run] = row["all"] | ({"run": run} if run else {})
            continue
        if row.get("kind") == "part":
            part = row["all"]
            continue
        row = common[row.get("run", run)] | part | row
        row |= {name: _by_config(row[name]) for name in BY_CONFIG if isinstance(row.get(name), dict)}
        versions = row.pop("versions", None)
        if versions is None or "impl" in row:
            rows.append(row)
        else:
            ours = {name: row.pop(name) for name in OURS if name in row}
            for impl, us in row.pop("us").items():
                own = ours if impl == "w4gemm" else {}
                rows.append(row | {"impl": impl, "impl_version": versions[impl], "us_p50": us} | own)
    return rows


def compact(rows: Iterable[Row]) -> list[Row]:
    """Return the lines of a stored file."""
    runs: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        runs[row.get("run", "")].append(row)
    lines = []
    for run, own in runs.items():
        timed = all(row.get("kind") == "time" and "us_p50" in row for row in own)
        facts = {"versions": {row["impl"]: row["impl_version"] for row in own}} if timed else {}
        own = _points(own) if timed else own
        common = {name: value for name, value in own[0].items() if name not in ("run", "us", *OURS)}
        common = {name: value for name, value in common.items() if all(name in r and r[name] == value for r in own)}
        lines.append({"kind": "run", **({"run": run} if run else {}), "all": common | facts})
        parts = _parts(own, common)
        for part, rows_of_part in parts:
            if len(parts) > 1:
                lines.append({"kind": "part", "all": part})
            for row in rows_of_part:
                line = {name: value for name, value in row.items() if name not in ("run", *common, *part)}
                line |= {name: _by_kernel(line[name]) for name in BY_CONFIG if isinstance(line.get(name), dict)}
                lines.append(line)
    return lines


def _parts(rows: list[Row], common: Row) -> list[tuple[Row, list[Row]]]:
    """Return the rows of each part of a run with what they share, or all in one part where parts would be longer."""
    parts: dict[str, tuple[Row, list[Row]]] = {}
    for row in rows:
        part = {name: row[name] for name in OF_PART if name in row and name not in common}
        parts.setdefault(json.dumps(part), (part, []))[1].append(row)
    return list(parts.values()) if 2 * len(parts) < len(rows) else [({}, rows)]


def _by_kernel(numbers: Row) -> Row:
    """Return {kernel: {config without a cluster of 1x1x1: number}}; names without a kernel stay as they are."""
    nested: Row = {}
    for name, number in numbers.items():
        kernel, slash, config = name.partition("/")
        if slash:
            nested.setdefault(kernel, {})[config.replace("_1x1x1_", "_")] = number
        else:
            nested[name] = number
    return nested


def _by_config(nested: Row) -> Row:
    """Return {"kernel/config": number}, what :func:`_by_kernel` was given."""
    numbers: Row = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            for config, number in value.items():
                numbers[f"{name}/" + _TILE_ALONE.sub(r"\g<0>1x1x1_", config)] = number
        else:
            numbers[name] = value
    return numbers


def _points(rows: Iterable[Row]) -> list[Row]:
    """Merge the implementations of each point of a run, except forced choices such as w4gemm_config."""
    points: dict[str, Row] = {}
    for row in rows:
        if row["impl"].startswith("w4gemm_"):
            continue
        left_out = (*OF_IMPL, *OURS, "best_config")
        shared = {name: value for name, value in row.items() if name not in left_out}
        point = points.setdefault(json.dumps(shared, sort_keys=True), shared | {"us": {}})
        point["us"][row["impl"]] = row["us_p50"]
        if row["impl"] == "w4gemm":
            point |= {name: row[name] for name in OURS if name in row}
    return list(points.values())


def timings_of(path: Path) -> Iterator[Row]:
    """Yield a row for each timing, with ``config`` ("kernel/config") and ``us``."""
    for problem in read(path):
        for config, us in problem.pop("us").items():
            yield problem | {"config": config, "us": us}


def by_problem(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the lines of a file of timings, given rows like those of :func:`timings_of`, a problem's in succession."""
    for _, group in itertools.groupby(rows, lambda row: {**row, "config": "", "us": 0}):
        problem, times = {}, {}
        for row in group:
            if row["config"] in times:  # timed again
                yield problem | {"us": times}
                times = {}
            problem = {name: value for name, value in row.items() if name not in ("config", "us")}
            times[row["config"]] = row["us"]
        yield problem | {"us": times}


if __name__ == "__main__":
    main()
