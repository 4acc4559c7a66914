"""Make the table that ships for a GPU of timings that bench.sweep wrote: ``python -m bench.tune --rows FILE...``.

A record is the fastest config at the last m of an interval, or the cost model's first guess if that is within 1 %.
Records of other intervals stay in src/w4gemm/choice/tables/.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bench.options import command, some_of, typed
from bench.rows import timings_of
from bench.shapes import SETS
from bench.sweep import gpu_of

from w4gemm import choice
from w4gemm.choice import table
from w4gemm.choice.table import Record
from w4gemm.console.values import chosen_dtype
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.kernels import config_named
from w4gemm.packing.layouts import layout_for
from w4gemm.tuning.tuner import record_of


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.tune", __doc__)
    parser.add_argument(
        "--rows", type=Path, nargs="+", metavar="FILE", required=True, help="timings that bench.sweep wrote"
    )
    parser.add_argument(
        "--shapes",
        type=typed(some_of(*SETS)),
        default="llama-3-8b,layers",
        help="sets of layers of bench/shapes.py (default: %(default)s)",
    )
    parser.add_argument("--format", default="int4_g128", help="of the weights (default: %(default)s)")
    parser.add_argument("--dtype", help="of activations, as of w4gemm tune")
    parser.add_argument("--table", type=Path, help="file for the records (default: the shipped one of the rows' GPU)")
    args = parser.parse_args(argv)
    timed_on = gpu_of([row for path in args.rows for row in timings_of(path)])
    records = from_rows(args.rows, args, timed_on)
    replace(args.table or table.shipped_path(timed_on.name), records)
    print(f"{len(records)} records of {len({r.key for r in records})} layers")


def replace(path: Path, records: list[Record]) -> None:
    """``records`` in a table, where those of other intervals and keys stay."""
    new = {(r.key, r.m) for r in records}
    table.replace_table(path, [*(r for r in table.read(path) if (r.key, r.m) not in new), *records])


def from_rows(paths: Sequence[Path], args: argparse.Namespace, device: Device) -> list[Record]:
    """A record for each measured interval of the layers."""
    layers = {layer for name in args.shapes for layer in SETS[name]}
    format, dtype, records = WeightFormat.parse(args.format), chosen_dtype(args.dtype, device), []
    for (n, k, m), configs in sorted(measured(paths, str(format)).items()):
        if (n, k) not in layers or m != choice.interval_end(m):
            continue
        if other := next((c for c in configs if dtype not in config_named(c)[0].dtypes), None):
            raise SystemExit(f"--dtype: wanted that of the rows' activations, got {dtype}, which {other} does not take")
        problem = GemmProblem(m, n, k, dtype, format, layout_for(device, format, dtype), device=device)
        chosen = guess = str(choice.explain(problem).candidates[0])
        if guess not in configs or configs[guess][0] > 1.01 * min(configs.values())[0]:
            chosen = min(configs, key=lambda c: configs[c])
        records.append(record_of(problem, chosen, configs[chosen][1]))
    return records


def measured(paths: Sequence[Path], format: str) -> dict[tuple[int, int, int], dict[str, tuple[float, float]]]:
    """For each (n, k, m) and config (its time over the fastest's there, geometric mean over the files; its time in the
    last of them). Files, and runs of a stored file, are of different machines: of a point in several, what was measured
    in all of them counts."""
    ratios: dict[tuple[int, int, int], dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    points: dict[tuple[str, str, int, int, int], dict[str, float]] = defaultdict(dict)
    for path in paths:
        for row in timings_of(path):
            if row["format"] == format and not row.get("experts"):
                points[str(path), row.get("run", ""), row["n"], row["k"], row["m"]][row["config"]] = row["us"]
    for (_, _, *point), times in points.items():
        for config, us in times.items():
            ratios[point[0], point[1], point[2]][config].append((us / min(times.values()), us))
    best = {}
    for point, configs in ratios.items():
        files = max(map(len, configs.values()))
        in_all = {config: pairs for config, pairs in configs.items() if len(pairs) == files}
        best[point] = {c: (math.prod(r for r, _ in p) ** (1 / files), p[-1][1]) for c, p in in_all.items()}
    return best


if __name__ == "__main__":
    main()
