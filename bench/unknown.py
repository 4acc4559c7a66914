"""Measure layers that nobody tuned beside the peers: ``python -m bench.unknown --kinds w4a16 --seconds 200``.

Draws layers and ragged numbers of tokens (drawn/points.py) that are neither in a shipped table nor in the fit of the
cost model, and times w4gemm's first choice beside every peer. With ``--every``, it times w4gemm's best guesses at some
layers too, and the fastest of them says what the choice lost. The protocol is that of bench/run.py with fewer copies
and replays; kernels are compiled beforehand, in as many processes as there are cores.

Points that ``--out`` has are passed over, so that runs of limited ``--seconds`` add up. Rows of one ``run`` are of one
process. ``python -m bench.report FILE`` makes the page.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench.drawn.points import UNKNOWN_LAYERS, UNKNOWN_SEED, Drawn, draw
from bench.drawn.warm import COMPILING_PEERS, Warmer, compile_all
from bench.options import add_out, command, some_of, typed
from bench.peers import Peer, Prepared, peers_named
from bench.peers.base import FP8, token_scales
from bench.rows import FACTS, read
from bench.run import MAX_ERROR, MAX_QUANTIZED_ERROR, percentiles, random_weight

import w4gemm
from w4gemm import QuantizedWeight, WeightFormat, choice
from w4gemm.console.options import positive
from w4gemm.core.epilogue import PLAIN, default_out_dtype
from w4gemm.core.problem import H200, Device, GemmProblem
from w4gemm.jit import Unit
from w4gemm.jit.pool import usable_processors
from w4gemm.kernels import config_named
from w4gemm.packing.layouts import layout_for
from w4gemm.tuning import record
from w4gemm.tuning.timing import time_graphs

RESULTS = Path(__file__).resolve().parent / "results/unknown.jsonl"
KINDS = {
    "w4a16": ("int4_g128", "bfloat16"),
    "w4a8_exact": ("int4_g128", "float8_e4m3fn"),
    "w4a8_folded": ("int4_g128_e4m3", "float8_e4m3fn"),
}
"""(format, dtype of x) of each kind of work."""
_PEERS = ("w4gemm", "humming", "machete", "marlin", "quack", "cutlass_w4a8", "cublas")
_OWN_SHARE, _PEERS_SHARE = 0.4, 0.7
"""Parts of the seconds after which w4gemm's kernels, and those of peers, are waited for no longer: what is left is
measured beside the peers that compile nothing."""
_MANY_TOKENS, _LONG_COPIES = 512, 3
_CHECKED_ROWS = 256
_REPLAYS, _FEW_REPLAYS, _LOOKS, _FINALISTS = 9, 5, 2, 4


class Work(NamedTuple):
    """A layer with the configs that each of its m may be run with."""

    layer: Drawn
    configs: dict[int, list[str]]
    """By m: the choice, and at every few layers the best guesses."""
    units: frozenset[Unit]


Calls = list[functools.partial[torch.Tensor]]
"""Calls of one graph: each with a copy of the weight, x and the output."""


@dataclass(frozen=True)
class Entry:
    """An implementation, and its weight in copies to rotate over."""

    name: str
    version: str
    prepared: Prepared
    copies: list[Any]


@dataclass(frozen=True)
class Layer:
    """A random weight in every implementation's own form."""

    dtype: torch.dtype
    """dtype of x."""
    dense: torch.Tensor
    """The numbers of the weight, float32."""
    entries: list[Entry]

    @classmethod
    def of(cls, n: int, k: int, format: WeightFormat, dtype: torch.dtype, peers: list[Peer]) -> Layer:
        """Make a weight; peers that cannot hold it are left out."""
        weight, entries = random_weight(n, k, format, [dtype]), []
        for peer in peers:
            if peer.supports(n, k, format, dtype):
                continue
            try:
                form = peer.prepare(weight, dtype)
            except Exception as e:  # a peer's failure is a result, not the end of the run
                print(f"  {peer.name}, {n}x{k}: {e!r:.200}", flush=True)
                continue
            entries.append(Entry(peer.name, peer.version(), form, form.copies()))
        return cls(dtype, weight.dequantize(torch.float32), entries)

    def run_config(self, config: str, w: QuantizedWeight, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """w4gemm with a config that is forced."""
        scales = token_scales()[: len(x)] if self.dtype == FP8 else None
        return w4gemm.linear(x, w, token_scale=scales, out=out, config=config)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.unknown", __doc__)
    parser.add_argument(
        "--kinds", type=typed(some_of(*KINDS)), default=",".join(KINDS), help="of work (default: %(default)s)"
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
    format, dtype = KINDS[kind]
    return WeightFormat.parse(format), getattr(torch, dtype)


def run_kind(kind: str, args: argparse.Namespace) -> None:
    """Measure the points that are left, layer by layer as soon as all that they run is compiled."""
    started = time.monotonic()
    format, dtype = of_kind(kind)
    layers, done = draw(args.seed, args.layers), measured(args.out, kind, args.seed)
    todo = [(i, left) for i, d in enumerate(layers) if (left := d._replace(tokens=unmeasured(d, done))).tokens]
    todo = todo[: args.most]
    device = H200 if args.dry else Device.of(torch.device("cuda"))
    peers = [] if args.dry else [peer for peer in peers_named(args.impl) if not peer.available()]
    with Warmer(0 if args.dry else usable_processors(), *KINDS[kind], [peer.name for peer in peers]) as warmer:
        works = [
            work_of(layer, args.every > 0 and i % args.every == 0, args.configs, format, dtype, device)
            for i, layer in todo
        ]
        units = list(dict.fromkeys(unit for work in works for unit in sorted(work.units, key=str)))
        points = sum(len(work.layer.tokens) for work in works)
        if args.dry:
            print(f"{kind}: {points} points, {len(units)} variants to compile")
            return
        ready = compile_all(units, usable_processors(), started + _OWN_SHARE * args.seconds)
        print(f"{kind}: {len(ready)} of {len(units)} variants ready in {time.monotonic() - started:.0f} s", flush=True)
        works = [work for work in works if work.units <= ready]
        warmer.start([work.layer for work in works])
        count = 0
        for work, all_peers in warmer.in_order(works, started + _PEERS_SHARE * args.seconds):
            if time.monotonic() - started > args.seconds:
                break
            able = [peer for peer in peers if all_peers or peer.name not in COMPILING_PEERS]
            count += measure_layer(kind, work, able, warmer, args, started + args.seconds)
        took = time.monotonic() - started
        print(f"{kind}: {count} of {points} points in {took:.0f} s; {warmer}", flush=True)


@functools.cache
def _run_name(commit: str) -> str:
    """The same for all rows of this process."""
    return record.run_name(record.facts() | {"commit": commit})


def measured(path: Path, kind: str, seed: int) -> set[tuple[int, int, int]]:
    """(n, k, m) of the points of a kind that a file has."""
    if not path.exists():
        return set()
    return {(row["n"], row["k"], row["m"]) for row in read(path) if row["work"] == kind and row["seed"] == seed}


def unmeasured(layer: Drawn, done: set[tuple[int, int, int]]) -> tuple[int, ...]:
    return tuple(m for m in layer.tokens if (layer.n, layer.k, m) not in done)


def work_of(layer: Drawn, compared: bool, count: int, format: WeightFormat, dtype: torch.dtype, device: Device) -> Work:
    """Say what is to be compiled for a layer: its choices; if they are compared, the best guesses besides."""
    epilogue = PLAIN._replace(token_scale=dtype == FP8)
    configs: dict[int, list[str]] = {}
    units: set[Unit | None] = set()
    for m in layer.tokens:
        given = layer.n, layer.k, dtype, format, layout_for(device, format, dtype), epilogue, device
        problem = GemmProblem(m, *given)
        decision = choice.decide(GemmProblem(choice.planned(m), *given))
        if decision.source != "heuristic":
            raise ValueError(f"{problem}: a {decision.source} record decides it; W4GEMM_CACHE_DIR names another folder")
        guesses = choice.configs(problem)[:count] if compared else []
        configs[m] = list(dict.fromkeys((f"{decision.kernel.name}/{decision.config}", *guesses)))
        units |= {kernel.unit(problem, config) for kernel, config in map(config_named, configs[m])}
    return Work(layer, configs, frozenset(unit for unit in units if unit is not None))


def measure_layer(
    kind: str, work: Work, peers: list[Peer], warmer: Warmer, args: argparse.Namespace, deadline: float
) -> int:
    """Append the rows of a layer's points, as many as begin before the deadline; return their number."""
    n, k, tokens = work.layer
    layer, count, facts = Layer.of(n, k, *of_kind(kind), peers), 0, record.facts()
    run = _run_name(facts["commit"])
    for m in tokens:
        if time.monotonic() > deadline:
            break
        with warmer.paused():
            rows = measure(layer, m, work.configs[m])
        common = {"kind": "time", "set": "unknown", "seed": args.seed, "run": run, "work": kind}
        common |= {"m": m, "n": n, "k": k, "format": KINDS[kind][0], "dtype": KINDS[kind][1]}
        record.append(args.out, *(common | row | {name: facts[name] for name in FACTS} for row in rows))
        print(line(n, k, m, rows), flush=True)
        count += 1
    return count


def measure(layer: Layer, m: int, configs: list[str]) -> list[dict[str, Any]]:
    """A row for each implementation whose output is right. With several configs, w4gemm's row has the fastest."""
    dense, dtype = layer.dense, layer.dtype
    xs = [torch.randn(m, dense.shape[1], device=dense.device).to(dtype) for _ in range(2)]
    out = torch.empty(m, dense.shape[0], device=dense.device, dtype=default_out_dtype(dtype))
    checked = torch.linspace(0, m - 1, min(m, _CHECKED_ROWS), device=dense.device).long()
    wanted = xs[0].float()[checked] @ dense.T
    rows: list[dict[str, Any]] = []
    graphs: list[Calls] = []
    for entry in layer.entries:
        if m > entry.prepared.most_tokens:
            continue
        given = [x.to(entry.prepared.activations or dtype) for x in xs]
        copies = entry.copies if m <= _MANY_TOKENS else entry.copies[:_LONG_COPIES]
        calls = [functools.partial(entry.prepared.run, copy, given[i % 2], out) for i, copy in enumerate(copies)]
        limit = MAX_QUANTIZED_ERROR if entry.prepared.activations else MAX_ERROR
        try:
            error = _error(calls[0](), checked, wanted)
        except Exception as e:
            print(f"  {entry.name}, m {m}: {e!r:.200}", flush=True)
            continue
        if not error < limit:
            print(f"  {entry.name}, m {m}: relative error {error:.3g}, not timed", flush=True)
            continue
        graphs.append(calls)
        version, config = entry.version, entry.prepared.chosen(m)
        rows.append({"impl": entry.name, "impl_version": version, "config": config, "rel_error": round(error, 6)})
    own = next((i for i, row in enumerate(rows) if row["impl"] == "w4gemm"), None)
    others: dict[str, Calls] = {}
    if own is not None and len(configs) > 1:
        others = finalists(layer, rows[own]["config"], configs, graphs[own])
    times = time_graphs([*graphs, *others.values()], _REPLAYS if m <= 2 * _MANY_TOKENS else _FEW_REPLAYS)
    for row, time_ in zip(rows, times, strict=False):
        row |= percentiles(time_)
    if own is not None and len(configs) > 1:
        found = {name: t.p50 for name, t in zip(others, times[len(graphs) :], strict=True)}
        found[rows[own]["config"]] = times[own].p50
        best = min(found, key=lambda name: found[name])
        rows[own] |= {"configs": len(configs), "best_config": best, "best_config_us": round(found[best], 2)}
    return rows


def finalists(layer: Layer, chosen: str, configs: list[str], calls: Calls) -> dict[str, Calls]:
    """The calls of the fastest few configs besides the chosen one, by a brief look at all; wrong ones are left out."""
    found = {}
    for config in configs:
        if config != chosen:
            found[config] = [functools.partial(layer.run_config, config, *call.args) for call in calls]
    if not found:
        return {}
    times = time_graphs([calls, *found.values()], _LOOKS)[1:]
    order = sorted(zip(times, found, strict=True), key=lambda pair: pair[0].p50)
    return {name: found[name] for _, name in order[:_FINALISTS]}


def _error(d: torch.Tensor, rows: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((d[rows].float() - wanted).norm() / wanted.norm()).item()


def line(n: int, k: int, m: int, rows: list[dict[str, Any]]) -> str:
    us = {row["impl"]: row["us_p50"] for row in rows}
    ours = next((row for row in rows if row["impl"] == "w4gemm"), None)
    text = f"{n}x{k}, m {m}: "
    if ours is not None:
        others = [t for name, t in us.items() if name != "w4gemm"]
        text += f"best peer / w4gemm {min(others) / ours['us_p50']:.2f}; " if others else ""
        if "best_config_us" in ours:
            text += f"regret {ours['us_p50'] / ours['best_config_us']:.3f} to {ours['best_config']}; "
        text += f"{ours['config']}; "
    return text + ", ".join(f"{name} {t:.1f}" for name, t in us.items())


if __name__ == "__main__":
    main()
