"""Measure layers that nobody tuned beside the peers: ``python -m bench.unknown --kinds w4a16 --seconds 200``.

Draws layers and ragged numbers of tokens (bench/drawn.py) that are neither in a shipped table nor in the fit of the
cost model, and times w4gemm's first choice beside every peer, as bench.run does. With ``--every``, it times w4gemm's
best guesses at some layers too; the fastest of them says what the choice lost. w4gemm's kernels are compiled first, in
as many processes as there are cores; peers that compile at run time do so at their first call.

Points that ``--out`` has are passed over, so that runs of limited ``--seconds`` add up.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from bench.drawn import UNKNOWN_LAYERS, UNKNOWN_SEED, Drawn, draw
from bench.options import add_out, command, some_of, typed
from bench.peers import Peer, peers_named
from bench.peers.base import FP8, token_scales
from bench.rows import FACTS, read
from bench.run import Entry, line, measure, prepare, random_weight
from bench.sweep import compiled

import w4gemm
from w4gemm import QuantizedWeight, WeightFormat, choice
from w4gemm.console.options import positive
from w4gemm.core.epilogue import PLAIN, default_out_dtype
from w4gemm.core.problem import H200, Device, GemmProblem
from w4gemm.jit import Unit
from w4gemm.kernels import config_named
from w4gemm.packing.layouts import layout_for
from w4gemm.tuning import record
from w4gemm.tuning.timing import time_graphs

RESULTS = Path(__file__).resolve().parent / "results/unknown.jsonl"


class Kind(NamedTuple):
    """What is multiplied with what."""

    work: str
    """The rows' name for it."""
    format: str
    dtype: str
    """dtype of x."""


KINDS = {
    "w4a16": Kind("w4a16", "int4_g128", "bfloat16"),
    "w4a8_exact": Kind("w4a8_exact", "int4_g128", "float8_e4m3fn"),
    "w4a8_folded": Kind("w4a8_folded", "int4_g128_e4m3", "float8_e4m3fn"),
    "int8": Kind("w8a16", "int8_col", "bfloat16"),
    "e4m3": Kind("w8a16", "e4m3_col_fp32", "bfloat16"),
    "q6_k": Kind("w6a16", "q6_k", "bfloat16"),
    "int3": Kind("w3a16", "int3_g128", "bfloat16"),
}
_FOUR_BITS = ("w4a16", "w4a8_exact", "w4a8_folded")
_PEERS = ("w4gemm", "humming", "machete", "marlin", "quack", "cutlass_w4a8", "cublas")
_REPLAYS, _LOOKS, _FINALISTS = 9, 2, 4


class Work(NamedTuple):
    """A layer with the configs that each of its m may be run with."""

    layer: Drawn
    configs: dict[int, list[str]]
    """By m: the choice, and at every few layers the best guesses."""
    units: frozenset[Unit]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.unknown", __doc__)
    parser.add_argument(
        "--kinds",
        type=typed(some_of(*KINDS)),
        default=",".join(_FOUR_BITS),
        help=f"of work, some of {', '.join(KINDS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--layers", type=positive, default=UNKNOWN_LAYERS, help="to draw, four m each (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=UNKNOWN_SEED, help="of the drawn layers (default: %(default)s)")
    parser.add_argument("--most", metavar="N", type=positive, help="measure at most N of the layers that --out lacks")
    parser.add_argument(
        "--every",
        metavar="N",
        type=int,
        default=0,
        help="time w4gemm's best guesses at every N-th layer (default: none)",
    )
    parser.add_argument("--configs", type=positive, default=24, help="how many best guesses (default: %(default)s)")
    parser.add_argument("--impl", default=",".join(_PEERS), help="implementations (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1e9, help="for each kind; other points wait for the next run")
    parser.add_argument("--dry", action="store_true", help="measure nothing: say what would be compiled")
    add_out(parser, RESULTS)
    args = parser.parse_args(argv)
    for kind in args.kinds:
        run_kind(kind, args)


def of_kind(kind: str) -> tuple[WeightFormat, torch.dtype]:
    _, format, dtype = KINDS[kind]
    return WeightFormat.parse(format), getattr(torch, dtype)


def run_kind(kind: str, args: argparse.Namespace) -> None:
    """Measure the points that are left, layer by layer."""
    started = time.monotonic()
    format, dtype = of_kind(kind)
    layers, done = draw(args.seed, args.layers), measured(args.out, kind, args.seed)
    todo = [(i, left) for i, d in enumerate(layers) if (left := d._replace(tokens=unmeasured(d, done))).tokens]
    device = H200 if args.dry else Device.of(torch.device("cuda"))
    works = [
        work_of(layer, args.every > 0 and i % args.every == 0, args.configs, format, dtype, device)
        for i, layer in todo[: args.most]
    ]
    units = {unit: f"{unit.name} {unit.key}" for work in works for unit in sorted(work.units, key=str)}
    points = sum(len(work.layer.tokens) for work in works)
    if args.dry:
        print(f"{kind}: {points} points, {len(units)} variants to compile")
        return
    ready = compiled(units)
    print(f"{kind}: {len(ready)} of {len(units)} variants ready in {time.monotonic() - started:.0f} s", flush=True)
    peers = [peer for peer in peers_named(args.impl) if not peer.available()]
    count = 0
    for work in works:
        if work.units <= ready and time.monotonic() - started < args.seconds:
            count += measure_layer(kind, work, peers, args, started + args.seconds)
    print(f"{kind}: {count} of {points} points in {time.monotonic() - started:.0f} s", flush=True)


@functools.cache
def _run_name(commit: str) -> str:
    """The same for all rows of this process."""
    return record.run_name(record.facts() | {"commit": commit})


def measured(path: Path, kind: str, seed: int) -> set[tuple[int, int, int]]:
    """(n, k, m) of the points of a kind that a file has."""
    if not path.exists():
        return set()
    own = KINDS[kind].work, str(of_kind(kind)[0]), seed
    rows = (row for row in read(path) if (row["work"], row["format"], row["seed"]) == own)
    return {(row["n"], row["k"], row["m"]) for row in rows}


def unmeasured(layer: Drawn, done: set[tuple[int, int, int]]) -> tuple[int, ...]:
    return tuple(m for m in layer.tokens if (layer.n, layer.k, m) not in done)


def work_of(layer: Drawn, compared: bool, count: int, format: WeightFormat, dtype: torch.dtype, device: Device) -> Work:
    """Say what is to be compiled for a layer: its choices; if they are compared, the best guesses besides."""
    epilogue = PLAIN._replace(token_scale=dtype == FP8)
    configs: dict[int, list[str]] = {}
    units: set[Unit | None] = set()
    for m in layer.tokens:
        facts = layer.n, layer.k, dtype, format, layout_for(device, format, dtype), epilogue, device
        problem = GemmProblem(m, *facts)
        decision = choice.choose(GemmProblem(choice.plan_m(m), *facts))
        if decision.source != "heuristic":
            raise ValueError(f"{problem}: a {decision.source} record decides it; W4GEMM_CACHE_DIR names another folder")
        guesses = choice.configs(problem)[:count] if compared else []
        configs[m] = list(dict.fromkeys((f"{decision.kernel.name}/{decision.config}", *guesses)))
        units |= {kernel.unit(problem, config) for kernel, config in map(config_named, configs[m])}
    return Work(layer, configs, frozenset(unit for unit in units if unit is not None))


def measure_layer(kind: str, work: Work, peers: list[Peer], args: argparse.Namespace, deadline: float) -> int:
    """Append the rows of a layer's points, as many as begin before the deadline; return their number."""
    (n, k, tokens), (format, dtype) = work.layer, of_kind(kind)
    entries, count, facts = prepare(peers, random_weight(n, k, format, [dtype]), dtype), 0, record.facts()
    run = _run_name(facts["commit"])
    for m in tokens:
        if time.monotonic() > deadline:
            break
        rows = measure(entries, m)
        for row in rows:
            row["work"] = KINDS[kind].work
            if row["impl"] == "w4gemm" and len(work.configs[m]) > 1:
                own = next(entry for entry in entries if entry.peer.name == "w4gemm")
                loss = regret(own, m, row["config"], work.configs[m])
                row |= {"configs": len(work.configs[m]), "best_config_us": round(row["us_p50"] / loss, 2)}
        common = {"kind": "time", "set": "unknown", "seed": args.seed, "run": run, "m": m, "n": n, "k": k}
        record.append(args.out, *(common | row | {name: facts[name] for name in FACTS} for row in rows))
        print(line(n, k, m, rows), flush=True)
        count += 1
    return count


def regret(own: Entry, m: int, chosen: str, configs: list[str]) -> float:
    """Time of the chosen config / time of the fastest, at least 1: a brief look at all configs, then at the fastest."""
    device, n = own.weight.device, own.weight.n
    x = torch.randn(m, own.weight.k, device=device).to(own.dtype)
    out = torch.empty(m, n, device=device, dtype=default_out_dtype(own.dtype))
    scales = token_scales()[:m] if own.dtype == FP8 else None

    def call(weight: QuantizedWeight, config: str) -> torch.Tensor:
        return w4gemm.linear(x, weight, token_scale=scales, out=out, config=config)

    def timed(names: Sequence[str], replays: int) -> dict[str, float]:
        graphs = [[functools.partial(call, weight, name) for weight in own.copies] for name in names]
        return {name: time.p50 for name, time in zip(names, time_graphs(graphs, replays), strict=True)}

    looks = timed(configs, _LOOKS)
    finalists = [name for name in sorted(looks, key=looks.__getitem__) if name != chosen][:_FINALISTS]
    us = timed([chosen, *finalists], _REPLAYS)
    return us[chosen] / min(us.values())


if __name__ == "__main__":
    main()
