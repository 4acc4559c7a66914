"""Make the table that ships for this GPU, and record what it brings: ``python -m bench.tune``.

Runs ``w4gemm tune`` for each set of layers in a process of its own with an empty cache, so that its time is what a user
waits. Then every choice is measured again beside the heuristic's first guess, since the fastest of several noisy
timings flatters itself. Writes src/w4gemm/choice/tables/, where what was not measured stays, and appends a
row of ``{"kind": "tuning", ...}`` for each point to bench/results/tuning.jsonl.

With ``--rows FILE``, measures nothing: of the timings that bench/fit.py takes, the fastest config at the last m of each
interval, or the heuristic's first guess where that is within 1 %.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench.options import add_out, command, some_of, typed
from bench.shapes import SETS
from bench.sweep import gpu_of
from bench.timings import rows_of

from w4gemm import choice
from w4gemm.choice import store
from w4gemm.choice.records import Record, device_facts, effective
from w4gemm.console.devices import chosen_device
from w4gemm.console.options import chosen_dtype, parse_tokens
from w4gemm.core import environment
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.kernels import config_named
from w4gemm.packing.layouts import layout_for
from w4gemm.tuning import record
from w4gemm.tuning.tuner import record_of
from w4gemm.tuning.workload import Workload

RESULTS = Path(__file__).parent / "results/tuning.jsonl"
_REPLAYS = 15


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.tune", __doc__)
    parser.add_argument(
        "--shapes",
        type=typed(some_of(*SETS)),
        default="llama-3-8b,layers",
        help="sets of layers of bench/shapes.py (default: %(default)s)",
    )
    parser.add_argument("--m", default="1..", help="tokens, as of w4gemm tune (default: every interval)")
    parser.add_argument("--format", default="int4_g128", help="of the weights (default: %(default)s)")
    parser.add_argument("--dtype", help="of activations, as of w4gemm tune")
    parser.add_argument("--device", help="as of w4gemm tune")
    add_out(parser, RESULTS)
    parser.add_argument("--table", type=Path, help="file for the records (default: the shipped one of this device)")
    parser.add_argument(
        "--rows",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: make the table of timings that bench.sweep wrote",
    )
    args = parser.parse_args(argv)
    if args.rows:
        timed_on = gpu_of([row for path in args.rows for row in rows_of(path)])
        records = from_rows(args.rows, args, timed_on)
        replace(args.table or store.shipped_path(timed_on.name), records)
        print(f"{len(records)} records of {len({r.key for r in records})} layers")
        return
    device, where = chosen_device(args.device)
    facts = record.facts()
    with tempfile.TemporaryDirectory() as folder:
        environment.set_cache_dir(Path(folder))
        seconds = {name: tune(name, args) for name in args.shapes}
        path = store.user_path()
        assert path is not None
        records = effective(store.read(path))
        rows: list[dict[str, Any]] = []
        for name in seconds:
            rows += gains(name, args, device, where)
    for row in rows:
        row |= {"tune_s": round(seconds[row["shapes"]], 1), **facts, "run": record.run_name(facts)}
    record.append(args.out, *rows)
    replace(args.table or store.shipped_path(device_facts(device)[0]), records)
    for name, took in seconds.items():
        gain = [row["first_guess_us"] / row["us"] for row in rows if row["shapes"] == name]
        mean = statistics.geometric_mean(gain)
        over = f"geometric mean {mean:.3f}, worst {min(gain):.3f}, best {max(gain):.3f}"
        print(f"{name}: {len(gain)} points in {took:.1f} s; first guess / choice, measured anew: {over}")


def replace(table: Path, records: list[Record]) -> None:
    """``records`` in the table, where those of other intervals and keys stay."""
    new = {(r.key, r.m) for r in records}
    store.replace_table(table, [*(r for r in store.read(table) if (r.key, r.m) not in new), *records])


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
    last of them). Files are of different machines: of a point in several, what was measured in all of them counts."""
    ratios: dict[tuple[int, int, int], dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        points: dict[tuple[int, int, int], dict[str, float]] = defaultdict(dict)
        for row in rows_of(path):
            if row["format"] == format and not row.get("experts"):
                points[row["n"], row["k"], row["m"]][row["config"]] = row["us"]
        for point, times in points.items():
            for config, us in times.items():
                ratios[point][config].append((us / min(times.values()), us))
    found = {}
    for point, configs in ratios.items():
        files = max(map(len, configs.values()))
        in_all = {config: pairs for config, pairs in configs.items() if len(pairs) == files}
        found[point] = {c: (math.prod(r for r, _ in p) ** (1 / files), p[-1][1]) for c, p in in_all.items()}
    return found


def tune(name: str, args: argparse.Namespace) -> float:
    """Seconds that ``w4gemm tune`` takes."""
    sizes = ",".join(f"{n}x{k}" for n, k in SETS[name])
    command = [sys.executable, "-m", "w4gemm.cli", "tune", "--shapes", sizes, "--m", args.m, "--format", args.format]
    started = time.perf_counter()
    for option in ("dtype", "device"):
        command += [f"--{option}", getattr(args, option)] if getattr(args, option) else []
    subprocess.run(command, check=True)
    return time.perf_counter() - started


def gains(name: str, args: argparse.Namespace, device: Any, where: torch.device) -> list[dict[str, Any]]:
    """A row for each point: its choice and the first guess, interleaved."""
    rows = []
    dtype = chosen_dtype(args.dtype, device)
    format = WeightFormat.parse(args.format)
    for n, k in SETS[name]:
        workload = None
        for m in parse_tokens(args.m):
            problem = GemmProblem(m, n, k, dtype, format, layout_for(device, format, dtype), device=device)
            workload = workload or Workload(problem, where)
            plan = choice.choose(problem).plan()
            guess = choice.choose(problem, str(choice.explain(problem).candidates[0])).plan()
            launches = [plan.launch] if str(plan) == str(guess) else [plan.launch, guess.launch]
            times = workload.time(launches, workload.operands(m), _REPLAYS if m <= 128 else _REPLAYS // 3)
            us, first = times[0].p50, times[-1].p50
            what = {"kind": "tuning", "shapes": name, "m": m, "n": n, "k": k, "format": str(format)}
            what |= {"dtype": str(dtype).removeprefix("torch."), "config": str(plan), "first_guess": str(guess)}
            rows.append({**what, "source": plan.source, "us": round(us, 3), "first_guess_us": round(first, 3)})
            print(f"  m {m}, n {n}, k {k}: {plan} {us:.1f} us, first guess {guess} {first:.1f}", flush=True)
    return rows


if __name__ == "__main__":
    main()
