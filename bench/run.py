"""Measure layers with every implementation in one process: ``python -m bench.run --shapes layers --m 1,16,256``.

The protocol, with random weights and activations:

- Every output is checked against the float32 product with the dequantized weight before it is timed.
- A CUDA graph calls an implementation once on each of several copies of the weight, over 400 MB together, so that L2
  holds none of them. Two activations alternate.
- The graphs of all implementations (formats, dtypes) are replayed in turn, in an order that changes. The median counts.

Rows go to bench/results/times.jsonl.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench.options import add_formats, add_out, add_shapes, command, dtypes, typed
from bench.peers import PEERS, Peer, Prepared, peers_named
from bench.peers.base import available, float_name
from bench.shapes import parse_tokens

from w4gemm import QuantizedWeight, WeightFormat
from w4gemm.core.epilogue import default_out_dtype
from w4gemm.core.formats import PER_COLUMN
from w4gemm.tuning import random_weight as random_numbers
from w4gemm.tuning import record
from w4gemm.tuning.timing import Timing, time_graphs

RESULTS = Path(__file__).parent / "results/times.jsonl"
MAX_ERROR = 1e-2
_MANY_TOKENS = 512
"""For more tokens a few copies are enough, because the product takes longer than reading its weight."""


@dataclass(frozen=True)
class Entry:
    """An implementation with a weight in its own form, in copies to rotate over."""

    peer: Peer
    weight: QuantizedWeight
    dtype: torch.dtype
    prepared: Prepared
    copies: list[Any]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.run", __doc__)
    add_shapes(parser, "layers")
    parser.add_argument(
        "--m",
        type=typed(parse_tokens),
        default="all",
        help="numbers of tokens like 1,16,256, or all, or awkward (default: %(default)s)",
    )
    add_formats(parser)
    parser.add_argument(
        "--dtype", type=typed(dtypes), default="bfloat16", help="of the activations, one or more (default: %(default)s)"
    )
    parser.add_argument(
        "--impl",
        type=typed(peers_named),
        default="all",
        help=f"some of {', '.join(p.name for p in PEERS)} (default: all but the last)",
    )
    add_out(parser, RESULTS)
    args = parser.parse_args(argv)
    facts = record.facts()
    peers = available(args.impl)
    for n, k in args.shapes:
        entries = [
            entry
            for weight in [random_weight(n, k, format, args.dtype) for format in args.format]
            for dtype in args.dtype
            for entry in prepare(peers, weight, dtype)
        ]
        for m in args.m:
            rows = measure(entries, m)
            common = {"kind": "time", "run": record.run_name(facts), "m": m, "n": n, "k": k}
            common |= {"experts": 0, "routing": "balanced"}
            record.append(args.out, *(common | row | facts for row in rows))
            print(line(n, k, m, rows), flush=True)


def random_weight(n: int, k: int, format: WeightFormat, dtypes: Sequence[torch.dtype]) -> QuantizedWeight:
    """For fp8 activations int4 without the code of -8, which some of the peers cannot hold. For others with it, since
    Humming takes 14 to 34 % longer without. NVFP4 with one factor for all rows, and blocks of rows with one scale, as
    checkpoints have. Weights of 8 bits with one scale for each row have the same for all, which Quack wants."""
    least = int(format.element == "int4" and torch.float8_e4m3fn in dtypes)
    w = random_numbers.random_weight(format, n, k, device="cuda", least_code=least)
    codes, scales, _, channels, *_ = w.parts()
    if float_name(format) == "nvfp4":
        channels = channels.mean().expand(n).contiguous()
    elif format.scale_rule.block_rows:
        scales = scales[::2].repeat_interleave(2, dim=0)
    elif format.bits == 8 and format.group_size == PER_COLUMN:
        scales = scales[:1].expand(n, 1).contiguous()
    else:
        return w
    return QuantizedWeight.from_codes(format, codes, scales, channels=channels)


def prepare(peers: list[Peer], weight: QuantizedWeight, dtype: torch.dtype) -> list[Entry]:
    """Each peer's own form of the weight. What one cannot do is said, not dropped."""
    entries: list[Entry] = []
    for peer in peers:
        reason = peer.supports(weight.n, weight.k, weight.format, dtype)
        if reason:
            print(f"  {peer.name}: {reason}", flush=True)
            continue
        try:
            prepared = peer.prepare(weight, dtype)
        except Exception as e:  # a peer's failure is a result, not the end of the run
            print(f"  {peer.name}: {e!r:.200}", flush=True)
            continue
        entries.append(Entry(peer, weight, dtype, prepared, prepared.copies()))
    return entries


def measure(entries: list[Entry], m: int) -> list[dict[str, Any]]:
    """A row for each entry whose output is right."""
    rows, graphs = [], []
    for entry in entries:
        if m > entry.prepared.most_tokens:
            continue
        weight, name, run = entry.weight, f"{entry.peer.name}, {entry.weight.format}, m {m}", entry.prepared.run
        device = weight.device
        xs = [torch.randn(m, weight.k, device=device).to(entry.dtype) for _ in range(2)]
        out = torch.empty(m, weight.n, device=device, dtype=default_out_dtype(entry.dtype))
        exact = xs[0].float() @ weight.dequantize().T
        try:
            d = run(entry.copies[0], xs[0], out).float()
            error = ((d - exact).norm() / exact.norm()).item()
        except Exception as e:
            print(f"  {name}: {e!r:.200}", flush=True)
            continue
        if not error < MAX_ERROR:
            print(f"  {name}: relative error {error:.3g}, not timed", flush=True)
            continue
        used = entry.copies if m <= _MANY_TOKENS else entry.copies[:4]
        graphs.append([lambda r=run, t=t, x=xs[i % 2], d=out: r(t, x, d) for i, t in enumerate(used)])  # type: ignore[misc]
        rows.append(
            {
                "work": f"w{weight.format.bits}a{8 * entry.dtype.itemsize}",
                "format": str(weight.format),
                "dtype": str(entry.dtype).removeprefix("torch."),
                "impl": entry.peer.name,
                "impl_version": entry.peer.version(),
                "config": entry.prepared.chosen(m),
                "rel_error": round(error, 6),
            }
        )
    for row, time in zip(rows, time_graphs(graphs, replays=11 if m <= 1024 else 5), strict=True):
        row |= percentiles(time)
    return rows


def percentiles(time: Timing) -> dict[str, float]:
    """Return the fields of a row for the microseconds of a call."""
    return {"us_p20": round(time.p20, 2), "us_p50": round(time.p50, 2), "us_p80": round(time.p80, 2)}


def line(n: int, k: int, m: int, rows: list[dict[str, Any]]) -> str:
    """Return a line of the times, and w4gemm's beside the fastest peer's and, if timed, that of its own best config."""
    several = len({row["impl"] for row in rows}) < len(rows)  # formats or dtypes
    us = {f"{r['impl']} {r['format']} {r['dtype']}" if several else r["impl"]: r["us_p50"] for r in rows}
    ours, text = next((row for row in rows if row["impl"] == "w4gemm"), None), f"{n}x{k}, m {m}: "
    if ours is not None and not several:
        others = [time for name, time in us.items() if name != "w4gemm"]
        text += f"best peer / w4gemm {min(others) / us['w4gemm']:.2f}; " if others else ""
        if "best_config_us" in ours:
            text += f"first / fastest config {us['w4gemm'] / ours['best_config_us']:.3f}; "
        text += f"{ours['config']}; "
    return text + ", ".join(f"{name} {time:.1f}" for name, time in us.items()) + " us"


if __name__ == "__main__":
    main()
