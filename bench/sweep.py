"""Time the likeliest configs of products side by side: ``python -m bench.sweep --shapes models --m 1.. --out FILE``.

FILE gets a JSON line for each product: n, k, m, format, the microseconds of each config, and the machine. bench/fit.py
makes constants of the cost model of it, and ``bench.tune --rows`` the shipped table. Take a new FILE for each machine,
because machines differ by more than configs do. ``--drawn`` takes layers and ragged m at random, as bench.unknown does,
but none of its own. For a GPU or a kernel that the model does not know, ``--configs 1000`` times all configs.

``python -m bench.grouped --configs N`` times configs of mixtures of experts; ``--grouped FILE`` copies these timings to
``--out`` in the same form.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.drawn import MOST_TOKENS, draw
from bench.options import add_shapes, command, typed
from bench.peers.base import epilogue_of
from bench.rows import FACTS, by_problem, read

from w4gemm import choice
from w4gemm.console.devices import chosen_device, described_device
from w4gemm.console.options import positive
from w4gemm.console.progress import progress_bar
from w4gemm.console.values import DTYPES, chosen_dtype, parse_tokens
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import H100, H200, Device, GemmProblem
from w4gemm.jit import Unit, adopt
from w4gemm.jit.pool import CompilePool
from w4gemm.kernels import config_named
from w4gemm.packing.layouts import layout_for
from w4gemm.tuning import record
from w4gemm.tuning.tuner import MAX_ERROR
from w4gemm.tuning.workload import Launch, Workload

_REPLAYS, _FEW_REPLAYS = 9, 4
_MANY_TOKENS = 512
"""For more tokens the timer warms up before each replay, so that few are enough."""


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if args.grouped:
        rows = list(rows_of_experts(args.grouped))
        record.append(args.out, *by_problem(rows))
        print(f"{args.out}: {len(rows)} timings of experts' products")
        return
    if args.compile_only:
        configs = prepared(products(args, described_device(args.device)))
        print(f"{len({unit_of(p, name) for p, names in configs.items() for name in names} - {None})} kernels")
        return
    device, where = chosen_device(args.device)
    facts = {name: fact for name, fact in record.facts().items() if name in FACTS}
    configs = prepared(products(args, device))
    started, count = time.monotonic(), 0
    for (n, k), group in itertools.groupby(configs, lambda p: (p.n, p.k)):
        workload: Workload | None = None
        for problem in group:
            if time.monotonic() - started > args.seconds:
                print(f"{args.out}: {count} timings, cut short before {n} x {k}, m {problem.m}")
                return
            workload = workload or Workload(problem, where)
            times = measure(problem, configs[problem], workload)
            what = {"n": n, "k": k, "m": problem.m, "format": str(problem.format)}
            record.append(args.out, what | {"us": {c: round(us, 3) for c, us in times.items()}} | facts)
            count += len(times)
            print(f"{n} x {k}, m {problem.m}: " + ", ".join(f"{us:.1f} {c}" for c, us in times.items()), flush=True)
    print(f"{args.out}: {count} timings")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command("bench.sweep", __doc__)
    add_shapes(parser, "layers")
    parser.add_argument("--m", default="1..", help="tokens, as of w4gemm tune (default: every interval)")
    parser.add_argument("--format", default="int4_g128", help="of the weights (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, help="of activations, as of w4gemm tune")
    parser.add_argument("--device", help="as of w4gemm tune")
    parser.add_argument(
        "--drawn",
        type=positive,
        metavar="LAYERS",
        help="so many layers, drawn at random with ragged m, instead of --shapes and --m",
    )
    parser.add_argument("--seed", type=int, default=1, help="of --drawn (default: %(default)s)")
    parser.add_argument(
        "--drawn-m",
        type=typed(token_range),
        default=(1, MOST_TOKENS),
        metavar="LEAST..MOST",
        help=f"ragged m of --drawn, one in each quarter of this range's logarithm (default: 1..{MOST_TOKENS})",
    )
    parser.add_argument(
        "--configs", type=positive, default=8, help="of each product, best guess first (default: %(default)s)"
    )
    parser.add_argument(
        "--within",
        type=float,
        metavar="FACTOR",
        default=math.inf,
        help="leave out configs that are predicted to take more than FACTOR times the best guess (default: none)",
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further product after so long")
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="compile the kernels and measure nothing; --device may be h100 or h200, which need not be there",
    )
    parser.add_argument(
        "--grouped", type=Path, metavar="FILE", help="measure nothing: copy the timings of configs from FILE"
    )
    parser.add_argument("--out", type=Path, required=True, help="file for the timings")
    return parser.parse_args(argv)


def token_range(text: str) -> tuple[int, int]:
    """Read a range of m like 17..333.

    Raises:
        ValueError: if it is none.
    """
    least, dots, most = text.partition("..")
    if not (dots and least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise ValueError(f"wanted a range of tokens like 17..333, got {text!r}")
    return int(least), int(most)


def products(args: argparse.Namespace, device: Device) -> dict[GemmProblem, list[str]]:
    """The products to time, those of one weight in a row, with their configs as ``"<kernel>/<config>"``."""
    format, dtype = WeightFormat.parse(args.format), chosen_dtype(args.dtype, device)
    rest = format, layout_for(device, format, dtype), epilogue_of(format, dtype), device
    if args.drawn:
        points = [(layer.n, layer.k, m) for layer in draw(args.seed, args.drawn, *args.drawn_m) for m in layer.tokens]
    else:
        tokens = sorted({choice.interval_end(m) for m in parse_tokens(args.m)})
        points = [(n, k, m) for (n, k), m in itertools.product(args.shapes, tokens)]
    configs = {}
    for n, k, m in points:
        problem = GemmProblem(m, n, k, dtype, *rest)
        candidates = choice.explain(problem).candidates[: args.configs]
        configs[problem] = [str(each) for each in candidates if each.us <= args.within * candidates[0].us]
    return configs


def prepared(configs: dict[GemmProblem, list[str]]) -> dict[GemmProblem, list[str]]:
    """Compile the configs of each product; return those that can be compiled."""
    units = {unit: f"{p}: {name}" for p, names in configs.items() for name in names if (unit := unit_of(p, name))}
    broken = units.keys() - compiled(units)
    return {p: [name for name in names if unit_of(p, name) not in broken] for p, names in configs.items()}


def compiled(units: Mapping[Unit, str]) -> set[Unit]:
    """Compile units on all cores, since one process compiles one kernel at a time; return those that can be compiled.

    Args:
        units: what messages call each.
    """
    done: set[Unit] = set()
    with CompilePool() as pool, progress_bar() as progress:
        for count, (unit, future) in enumerate(zip(units, pool.submit(units), strict=True)):
            progress(count, len(units), "compiling")
            try:
                adopt(unit, future.result())
                done.add(unit)
            except RuntimeError as e:
                print(f"{units[unit]} is left out: {e}", flush=True)
    return done


def unit_of(problem: GemmProblem, name: str) -> Unit | None:
    kernel, config = config_named(name)
    return kernel.unit(problem, config)


def measure(problem: GemmProblem, names: list[str], workload: Workload) -> dict[str, float]:
    """Microseconds of each config, fastest first; of none whose result is wrong."""
    operands, launches = workload.operands(problem.m), dict[str, Launch]()
    for name in names:
        kernel, config = config_named(name)
        launch = choice.Plan(problem, kernel, config).launch
        if (error := workload.error(launch, operands[0])) < MAX_ERROR:
            launches[name] = launch
        else:
            print(f"{problem}: {name} is left out, relative error {error:.3g}", flush=True)
    times = workload.time(list(launches.values()), operands, _FEW_REPLAYS if problem.m > _MANY_TOKENS else _REPLAYS)
    return dict(sorted(((name, t.p50) for name, t in zip(launches, times, strict=True)), key=lambda pair: pair[1]))


def gpu_of(rows: list[dict[str, Any]]) -> Device:
    """The GPU that timings were made on, an H200 if they do not say.

    Raises:
        SystemExit: if they are of several, or of one that nothing is known of.
    """
    names = sorted({row.get("gpu") or H200.name for row in rows})
    if len(names) > 1:
        raise SystemExit(f"rows: wanted those of one kind of GPU, got {', '.join(names)}; fit each by itself")
    known = {device.name: device for device in (H100, H200)}
    if names[0] not in known:
        raise SystemExit(f"rows: wanted a GPU of w4gemm/core/problem.py, {' or '.join(known)}, got {names[0]}")
    return known[names[0]]


def rows_of_experts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the timings of configs in a file of bench/grouped.py, with tokens divided evenly."""
    for row in read(path):
        if row["impl"] == "w4gemm_config" and row["routing"] == "balanced":
            kept = ("n", "k", "m", "experts", "format", "config", *FACTS)
            yield {name: row[name] for name in kept} | {"us": row["us_p50"]}


if __name__ == "__main__":
    main()
