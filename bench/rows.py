"""Files of measured rows in which what all rows of a run have in common stands once: ``python -m bench.rows FILE...``.

A line of kind ``run`` with these facts (``all``) goes before a run's rows; rows that name no run are one run.
:func:`read` gives whole rows, of any file; benchmarks append whole rows, and the command stores a file's rows
compactly.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.options import command

Row = dict[str, Any]
FACTS = ("gpu", "driver", "torch", "dsl", "commit", "dirty")
"""Facts of the machine that a row has at least, of ``w4gemm.tuning.record.facts``."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.rows", __doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="file of rows, which is written anew")
    for path in parser.parse_args(argv).files:
        path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in compact(read(path))))


def read(path: Path) -> list[Row]:
    """Return the rows of a file."""
    common: dict[str, Row] = {}
    rows: list[Row] = []
    for row in map(json.loads, path.read_text().splitlines()):
        if row.get("kind") == "run":
            common[row.get("run", "")] = row["all"]
        else:
            rows.append(common.get(row.get("run", ""), {}) | row)
    return rows


def compact(rows: Iterable[Row]) -> list[Row]:
    """Return the lines of a file of rows."""
    runs: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        runs[row.get("run", "")].append(row)
    found = []
    for run, own in runs.items():
        common = {name: fact for name, fact in own[0].items() if name != "run"}
        common = {name: fact for name, fact in common.items() if all(name in r and r[name] == fact for r in own)}
        found.append({"kind": "run", **({"run": run} if run else {}), "all": common})
        found += [{name: fact for name, fact in row.items() if name not in common} for row in own]
    return found


if __name__ == "__main__":
    main()
