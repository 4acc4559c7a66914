"""Measure mixtures of experts: ``python -m bench.grouped --shapes 8x28672x4096 --tokens 1,16 --routing balanced,zipf``.

The protocol is that of bench/run.py, for weights of several experts (experts x n x k) and a number of tokens for each
on average; ``m`` of a row is that number. Beside w4gemm: Humming's grouped kernel, if installed. Rows go to
bench/results/grouped.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench.peers.base import gptq_words, missing_package, package_version
from bench.run import random_weight

import w4gemm
from w4gemm import QuantizedWeight, WeightFormat, dispatch
from w4gemm.config import GemmConfig
from w4gemm.jit import object_code
from w4gemm.kernels import kernel_named
from w4gemm.problem import Device, GemmProblem
from w4gemm.tuning import record
from w4gemm.tuning.timing import time_graphs

RESULTS = Path(__file__).parent / "results/grouped.jsonl"
SHAPES = "8x28672x4096,128x1536x2048,32x4096x7168"
TOKENS = "1,4,16,32,64,128,512,1024"
_ROTATED_BYTES = 400e6
_MAX_ERROR = 1e-2

Run = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""run(copy of the weight, x, m_offsets, out)."""


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.grouped", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--shapes", default=SHAPES, help="experts x n x k, ... (default: %(default)s)")
    parser.add_argument("--tokens", default=TOKENS, help="for each expert on average (default: %(default)s)")
    parser.add_argument("--routing", default="balanced", help="of balanced, zipf, hot (default: %(default)s)")
    parser.add_argument("--format", default="int4_g128", help="(default: %(default)s)")
    parser.add_argument("--configs", type=int, default=0, help="also time as many of the best-ranked configs")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further point after so long")
    parser.add_argument("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    args = parser.parse_args()
    facts, started = record.facts(), time.monotonic()
    format, tokens = WeightFormat.parse(args.format), [int(t) for t in args.tokens.split(",")]
    if args.configs:
        compile_ahead(args.shapes, tokens, format, args.configs)
    for shape in args.shapes.split(","):
        experts, n, k = map(int, shape.split("x"))
        weights, peers = prepare(experts, n, k, format)
        for m, routing in itertools.product(tokens, args.routing.split(",")):
            if time.monotonic() - started > args.seconds:
                return
            rows = measure(weights, peers, m, routing, args.configs)
            common = {"kind": "time", "run": record.run_name(facts), "work": "w4a16_grouped", "m": m, "n": n, "k": k}
            common |= {"experts": experts, "routing": routing, "format": args.format, "dtype": "bfloat16"}
            record.append(args.out, *(common | row | facts for row in rows))
            print(line(shape, m, routing, rows), flush=True)
        del weights, peers
        torch.cuda.empty_cache()


def prepare(experts: int, n: int, k: int, format: WeightFormat) -> tuple[list[QuantizedWeight], dict[str, Run]]:
    """Copies of a weight to rotate over, and each peer's way to multiply by its own copies."""
    words, scales = [], []

    def each() -> Iterator[QuantizedWeight]:
        one = random_weight(n, k, format)
        for e in range(experts):
            codes, s, zeros, _ = one.parts()
            codes = codes.roll(e, 0)
            if humming:
                words.append(gptq_words(codes))
                scales.append(s)
            yield QuantizedWeight.from_codes(format, codes, s, zeros)

    humming = not missing_package("humming-kernels", "humming") and not format.has_zero
    w = QuantizedWeight.stack(each(), experts)
    count = max(2, math.ceil(_ROTATED_BYTES / w.nbytes))
    copies = [w, *(replace(w, tensors=tuple(t.clone() for t in w.tensors)) for _ in range(count - 1))]
    peers: dict[str, Run] = {}
    if humming:
        try:
            peers["humming"] = humming_grouped(torch.stack(words), torch.stack(scales), format, n, k, count)
        except Exception as e:  # a peer's failure is a result, not the end of the run
            print(f"  humming: {e!r:.300}", flush=True)
    return copies, peers


def humming_grouped(words: torch.Tensor, scales: torch.Tensor, format: WeightFormat, n: int, k: int, count: int) -> Run:
    from humming.forward import humming_forward
    from humming.layer import HummingLayer

    weight_config = {"dtype": "int4", "group_size": max(0, format.group_size)}
    layer = HummingLayer(n, k, weight_config, num_experts=len(words), torch_dtype=torch.bfloat16).to("cuda")
    layer.load_from_tensors({"weight": words, "weight_scale": scales.bfloat16()})
    layer.transform()
    first = (layer.weight.data, layer.weight_scale.data, layer.locks)
    copies = [first, *(tuple(t.clone() for t in first) for _ in range(count - 1))]

    def run(copy: int, x: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        w, s, locks = copies[copy % count]
        grouped = {"gemm_type": "grouped_contiguous"}
        humming_forward(
            layer.humming_config, x, w, s, outputs=out, locks=locks, expert_layout=offsets, compute_config=grouped
        )
        return out

    return run


def measure(
    weights: list[QuantizedWeight], peers: dict[str, Run], m: int, routing: str, configs: int
) -> list[dict[str, Any]]:
    """A row for each implementation whose output is right, and for each of our configs asked for."""
    w = weights[0]
    counts = divide(routing, m, w.experts)
    offsets = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device="cuda")
    total = sum(counts)
    xs = [torch.randn(total, w.k, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    out = torch.empty(total, w.n, device="cuda", dtype=torch.bfloat16)

    def ours(config: str | None) -> Run:
        return lambda i, x, o, d: w4gemm.grouped_linear(x, weights[i % len(weights)], o, out=d, config=config)

    plan = str(dispatch.plan_for(call_of(w, total)))
    runs: list[tuple[str, str, str, Run]] = [("w4gemm", w4gemm.__version__, plan, ours(None))]
    runs += [(name, package_version("humming-kernels"), "", run) for name, run in peers.items()]
    runs += [("w4gemm_config", w4gemm.__version__, c, ours(c)) for c in best(w, total, configs)]
    rows, graphs = [], []
    for name, version, config, run in runs:
        layout = offsets if name.startswith("w4gemm") else offsets.long()
        try:
            error = error_of(run(0, xs[0], layout, out.fill_(torch.nan)), xs[0], w, counts)
        except Exception as e:
            print(f"  {name} {config}: {e!r:.200}", flush=True)
            continue
        if not error < _MAX_ERROR:
            print(f"  {name} {config}, {m} tokens: relative error {error:.3g}, not timed", flush=True)
            continue
        calls = range(max(2, len(weights)))
        graphs.append([lambda r=run, i=i, o=layout: r(i, xs[i % 2], o, out) for i in calls])  # type: ignore[misc]
        rows.append({"impl": name, "impl_version": version, "config": config, "rel_error": round(error, 6)})
    for row, t in zip(rows, time_graphs(graphs, replays=9 if m <= 128 else 5), strict=True):
        row |= {"us_p20": round(t.p20, 2), "us_p50": round(t.p50, 2), "us_p80": round(t.p80, 2)}
    return rows


def divide(routing: str, m: int, experts: int) -> list[int]:
    """Rows of each expert, m * experts together."""
    if routing == "balanced":
        return [m] * experts
    share = [1 / (1 + e) if routing == "zipf" else float(e == 0) for e in range(experts)]
    parts = itertools.accumulate(s / sum(share) for s in share)
    ends = [min(m * experts, round(p * m * experts)) for p in parts]
    counts = [b - a for a, b in itertools.pairwise([0, *ends])]
    return [counts[(7 * e + 3) % experts] if math.gcd(7, experts) == 1 else counts[e] for e in range(experts)]


def error_of(d: torch.Tensor, x: torch.Tensor, w: QuantizedWeight, counts: list[int]) -> float:
    """Relative, over the first, the last and the most used experts; NaN if anything else is missing."""
    ends = list(itertools.accumulate(counts, initial=0))
    looked = {0, w.experts - 1, max(range(w.experts), key=counts.__getitem__)}
    worst = float(d.isnan().any()) * torch.inf if d.isnan().any() else 0.0
    for e in looked:
        r = slice(ends[e], ends[e + 1])
        if counts[e]:
            wanted = x[r].float() @ w.expert(e).dequantize().T
            worst = max(worst, ((d[r].float() - wanted).norm() / wanted.norm()).item())
    return worst


def call_of(w: QuantizedWeight, total: int) -> dispatch.Call:
    x = torch.empty(0, dtype=torch.bfloat16, device=w.device)
    interval, plain = dispatch.interval(-(-total // w.experts)), dispatch.Epilogue()
    return dispatch.Call(interval, w.n, w.k, x.dtype, w.format, w.layout, plain, w.device, "", False, w.experts)


def best(w: QuantizedWeight, total: int, count: int) -> list[str]:
    """The best-ranked configs, of each token tile at most three."""
    problem = GemmProblem(
        total, w.n, w.k, torch.bfloat16, w.format, w.layout, device=Device.of(w.device), experts=w.experts
    )
    return best_of(problem, count)


def best_of(problem: GemmProblem, count: int) -> list[str]:
    found: list[str] = []
    seen: dict[tuple[str, int], int] = {}
    for _, kernel, config in dispatch.explain(problem).ranking:
        key = kernel, config.tile_m
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= 3 and len(found) < count:
            found.append(f"{kernel}/{config}")
    return found


def compile_ahead(shapes: str, tokens: list[int], format: WeightFormat, count: int) -> None:
    """On all cores, since one process compiles one kernel at a time."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    jobs: dict[str, GemmProblem] = {}
    for shape, m in itertools.product(shapes.split(","), tokens):
        experts, n, k = map(int, shape.split("x"))
        problem = GemmProblem(m * experts, n, k, torch.bfloat16, format, "sm90", experts=experts)
        jobs |= dict.fromkeys(best_of(problem, count), problem)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, jobs.items()))


def _compile(job: tuple[str, GemmProblem]) -> None:
    name, _, config = job[0].partition("/")
    object_code(kernel_named(name), job[1], GemmConfig.parse(config))


def line(shape: str, m: int, routing: str, rows: list[dict[str, Any]]) -> str:
    us = {row["impl"]: row["us_p50"] for row in rows if row["impl"] != "w4gemm_config"}
    tried = sorted((row["us_p50"], row["config"]) for row in rows if row["impl"] == "w4gemm_config")
    ratio = f"humming / w4gemm {us['humming'] / us['w4gemm']:.2f}; " if len(us) == 2 else ""
    chosen = next((row["config"] for row in rows if row["impl"] == "w4gemm"), "")
    text = f"{shape}, {m} tokens, {routing}: {ratio}{us} {chosen}"
    return text + "".join(f"\n    {t:.1f} {c}" for t, c in tried[:4])


if __name__ == "__main__":
    main()
