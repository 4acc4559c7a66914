"""Measure mixtures of experts: ``python -m bench.grouped --shapes 8x28672x4096 --tokens 1,16 --routing balanced,zipf``.

The protocol is that of bench/run.py, for weights of several experts (experts x n x k). ``m`` of a row is the average
number of tokens per expert. Peers, if installed: Humming's grouped kernel (in W4A8 it takes bf16 x and quantizes it
within the call), vLLM's Marlin for experts (bf16 x; a size that it cannot take is padded, and ``config`` says so), and
with ``--dtype float8_e4m3fn --format int4_g128,int4_g128_e4m3`` vLLM's CUTLASS kernel. Rows go to
bench/results/grouped.jsonl.

All shapes are measured with one number of tokens before the next, so that a run that ``--seconds`` ends has covered
them alike. Kernels are compiled on all cores meanwhile; ``--compile-only`` fills w4gemm's cache folder and needs no
GPU.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench.mixtures.ahead import Kernels, Product, unsupported
from bench.mixtures.points import Extra, measure
from bench.mixtures.weights import Drawn, Sizes
from bench.options import add_formats, add_out, command, counts, some_of, typed
from bench.peers.base import FP8, available
from bench.peers.experts import PEERS
from bench.shapes import ROUTINGS, parse_experts

from w4gemm import WeightFormat
from w4gemm.jit.pool import CompilePool, usable_processors
from w4gemm.tuning import record

RESULTS = Path(__file__).parent / "results/grouped.jsonl"
TOKENS = "1,4,16,32,64,128,512,1024"


_DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": FP8}


class Place(NamedTuple):
    """One point: a shape, its activations, and how many tokens go where."""

    routing: str
    m: int
    dtype: torch.dtype
    sizes: Sizes


class Means(NamedTuple):
    """The formats, weights and kernels that all points of a run share."""

    formats: dict[torch.dtype, list[WeightFormat]]
    drawn: Drawn
    kernels: Kernels
    extra: Extra
    out: Path
    facts: dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    args = parsed(argv)
    started, facts, extra = time.monotonic(), record.facts(), Extra(args.configs, args.replays)
    formats = {dtype: usable(args.format, args.shapes[0], dtype) for dtype in args.dtype}
    places = list(in_order(args))
    products = (Product(p.sizes, p.m, format, p.dtype) for p in places for format in formats[p.dtype])
    with CompilePool() as pool, ThreadPoolExecutor(usable_processors()) as compilers:
        kernels = Kernels(pool, dict.fromkeys(products), extra)
        if args.compile_only:
            print(f"{kernels.wait_for_all()} kernels, {time.monotonic() - started:.0f} s")
            return
        peers = available(peer for peer in PEERS if peer.name in args.impl)
        drawn = Drawn(peers, args.tokens, compilers)
        means = Means(formats, drawn, kernels, extra, args.out, facts)
        begun: set[torch.dtype] = set()
        for place in places:
            if time.monotonic() - started > args.seconds:
                print(f"{args.seconds:.0f} s are over", flush=True)
                break
            if place.dtype not in begun:  # all shapes, so that peers compile for all of them at once
                begun.add(place.dtype)
                for sizes, format in itertools.product(args.shapes, formats[place.dtype]):
                    drawn.get(sizes, format, place.dtype)
                print(f"weights for {place.dtype}: at {time.monotonic() - started:.0f} s", flush=True)
            one_point(place, means)
        compilers.shutdown(cancel_futures=True)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command("bench.grouped", __doc__)
    parser.add_argument(
        "--shapes",
        type=typed(parse_experts),
        default="moe",
        help="sizes like 8x28672x4096 (experts x n x k) and names: moe, six layers of three models; fp4-moe, ten of "
        "five whose checkpoints are in MXFP4 (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens", type=typed(counts), default=TOKENS, help="per expert, on average (default: %(default)s)"
    )
    parser.add_argument(
        "--routing",
        type=typed(some_of(*ROUTINGS)),
        default="balanced",
        help="how tokens are divided among experts: some of balanced, zipf, hot (default: %(default)s)",
    )
    add_formats(parser)
    parser.add_argument(
        "--dtype",
        type=typed(dtypes),
        default="bfloat16",
        help=f"of the activations, some of {', '.join(_DTYPES)} (default: %(default)s)",
    )
    names = [peer.name for peer in PEERS]
    parser.add_argument(
        "--impl", type=typed(some_of(*names)), default=",".join(names), help="peers, some of %(default)s (default: all)"
    )
    parser.add_argument(
        "--configs", metavar="N", type=int, default=0, help="also time the N best-ranked configs (default: none)"
    )
    parser.add_argument("--replays", metavar="N", type=int, default=9, help="of each graph (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further point after so long")
    parser.add_argument("--compile-only", action="store_true", help="compile w4gemm's kernels and measure nothing")
    add_out(parser, RESULTS)
    return parser.parse_args(argv)


def dtypes(text: str) -> tuple[torch.dtype, ...]:
    return tuple(_DTYPES[name] for name in some_of(*_DTYPES)(text))


def in_order(args: argparse.Namespace) -> Iterator[Place]:
    """Yield the points: all shapes before another dtype, both before more tokens, these before another routing."""
    for routing, m, dtype, sizes in itertools.product(args.routing, args.tokens, args.dtype, args.shapes):
        yield Place(routing, m, dtype, sizes)


def usable(formats: Sequence[WeightFormat], sizes: Sizes, dtype: torch.dtype) -> list[WeightFormat]:
    """Return the formats that w4gemm multiplies by activations of ``dtype``, and print why it does not the others."""
    reasons = {format: unsupported(Product(sizes, 1, format, dtype)) for format in formats}
    for reason in filter(None, reasons.values()):
        print(f"  w4gemm: {reason}", flush=True)
    return [format for format, reason in reasons.items() if not reason]


def one_point(place: Place, means: Means) -> None:
    """Measure a point, store its rows and print a line."""
    (routing, m, dtype, (experts, n, k)), facts, formats = place, means.facts, means.formats[place.dtype]
    started = time.monotonic()
    try:
        means.kernels.wait(Product(place.sizes, m, format, dtype) for format in formats)
    except RuntimeError as e:
        print(f"  w4gemm, {experts}x{n}x{k}, {m} tokens: {e!r:.300}", flush=True)
        return
    mixtures = [means.drawn.get(place.sizes, format, dtype) for format in formats]
    rows = measure(mixtures, m, routing, dtype, means.extra)
    name = str(dtype).removeprefix("torch.")
    work = "w4a8_grouped" if dtype == FP8 else "w4a16_grouped"
    common = {"kind": "time", "run": record.run_name(facts), "work": work, "m": m, "n": n, "k": k}
    common |= {"experts": experts, "routing": routing, "dtype": name}
    record.append(means.out, *(common | row | facts for row in rows))
    took = time.monotonic() - started
    print(f"{line(f'{experts}x{n}x{k} {name}', m, routing, rows)} ({took:.1f} s)", flush=True)


def line(shape: str, m: int, routing: str, rows: list[dict[str, Any]]) -> str:
    """Return one line, in which each format has its own ratio, and lines of the fastest forced configs."""
    times = {(row["impl"], row["format"]): row for row in rows if row["impl"] != "w4gemm_config"}
    tried = sorted((row["us_p50"], row["config"]) for row in rows if row["impl"] == "w4gemm_config")
    texts = []
    for format in dict.fromkeys(format for _, format in times):
        own = {name: row for (name, other), row in times.items() if other == format}
        ours = [row["us_p50"] for name, row in own.items() if name.startswith("w4gemm")]
        others = [(row["us_p50"], name) for name, row in own.items() if not name.startswith("w4gemm")]
        ratio = f" {min(others)[1]} / w4gemm {min(others)[0] / min(ours):.2f}:" if ours and others else ":"
        each = ", ".join(f"{name} {row['us_p50']} {row['config']}".strip() for name, row in own.items())
        texts.append(f"{format}{ratio} {each}")
    return f"{shape}, {m} tokens, {routing}: {'; '.join(texts)}" + "".join(f"\n    {t:.1f} {c}" for t, c in tried[:4])


if __name__ == "__main__":
    main()
