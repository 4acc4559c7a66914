"""Launch every kernel x schedule x dense, of experts, gathered x 16-bit, fp8 again and again: each time the same bits.

    PYTHONPATH=src:tests python tests/repeat.py [--repetitions 1000] [--processes 14] [--json bench/results/fuzz.jsonl]

The products are those of tests/launch_cells.py, with longer k, so that rings wrap often. Every launch writes over NaN,
while a second stream runs the same kernel on other tensors and copies that change when the two meet. The first result
is held to the float64 reference.

Exit status: 0, or 1 if a launch gave other bits or a wrong result.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import w4gemm
from launch_cells import COUNTS, NUMBERS, Cell, cells
from reference import grouped_reference, linear_reference
from w4gemm.core.formats import WeightFormat
from w4gemm.tuning.random_weight import random_weight

K = 4112
TOLERANCE = 6e-3
"""Largest relative error of a result."""


def products() -> list[Cell]:
    """Return the cells, of the formats that come in every way."""
    return cells([numbers for numbers in NUMBERS if numbers.every_way])


def chosen(cells: str) -> list[Cell]:
    """Return the products first .. end - 1 of "first:end"."""
    first, _, end = cells.partition(":")
    return products()[int(first or 0) : int(end) if end else None]


class Outcome(NamedTuple):
    cell: Cell
    launches: int
    other_bits: int
    """Launches whose result had other bits than the first one."""
    problem: str = ""


class Job(NamedTuple):
    """A launch of a cell."""

    launch: Callable[[torch.Tensor], torch.Tensor]
    """Computes d into its argument."""
    expected: torch.Tensor
    """d in float64."""


def job(cell: Cell, seed: int) -> Job:
    """Tensors of a cell on the GPU, its expert rows in order or, gathered, mixed."""
    n, k = cell.n, cell.k if cell.n >= 9000 else K
    dense = cell.kind == "dense"
    m = 200 if dense else sum(COUNTS)
    g = torch.Generator("cuda").manual_seed(seed)
    format = WeightFormat.of(cell.format)
    parts = [random_weight(format, n, k, seed + e, device="cuda") for e in range(1 if dense else len(COUNTS))]
    x = torch.randn(m, k, generator=g, device="cuda").to(cell.dtype)
    scales = {"token_scale": torch.rand(m, generator=g, device="cuda") + 0.5} if cell.fp8 else {}
    fused: dict[str, Any] = {**scales, "config": cell.config}
    if dense:
        w = parts[0].repack(cell.layout)
        return Job(lambda out: w4gemm.linear(x, w, out=out, **fused), linear_reference(x, w, **scales))
    w = w4gemm.QuantizedWeight.stack(parts, layout=cell.layout)
    ends = torch.tensor((0, *COUNTS), device="cuda").cumsum(0).int()
    rows, own = x, scales
    if cell.kind == "gathered":
        order = torch.randperm(m, generator=g, device="cuda")
        fused["indices"] = order
        rows = x.view(torch.uint8).view(m, -1)[order].view(x.dtype)
        own = {name: t[order] for name, t in scales.items()}
    expected = grouped_reference(rows, w, ends, **own)
    return Job(lambda out: w4gemm.grouped_linear(x, w, ends, out=out, **fused), expected)


def repeated(cell: Cell, repetitions: int) -> Outcome:
    """Launch a cell on two streams, many times."""
    jobs = [job(cell, seed) for seed in (1, 2)]
    outs = [torch.full(j.expected.shape, torch.nan, dtype=torch.bfloat16, device="cuda") for j in jobs]
    firsts = [j.launch(out.clone()) for j, out in zip(jobs, outs, strict=True)]
    for j, first in zip(jobs, firsts, strict=True):
        error = float((first.double() - j.expected).norm() / j.expected.norm())
        if not error < TOLERANCE:
            return Outcome(cell, 1, 0, f"relative error {error:.3g}")
    traffic = torch.empty(2, 2**25, dtype=torch.uint8, device="cuda")
    bad = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in jobs]
    streams = [torch.cuda.Stream() for _ in jobs]
    torch.cuda.synchronize()
    for i in range(repetitions):
        for side, (j, out, first, stream) in enumerate(zip(jobs, outs, firsts, streams, strict=True)):
            with torch.cuda.stream(stream):
                if side:
                    size = 2 ** (10 + i % 16)
                    traffic[0, :size].copy_(traffic[1, :size])
                out.fill_(torch.nan)
                j.launch(out)
                bad[side] += (out.view(torch.int16) != first.view(torch.int16)).any()
    torch.cuda.synchronize()
    return Outcome(cell, 2 * repetitions, int(bad[0] + bad[1]))


def _child(args: argparse.Namespace, process: int, results: Any) -> None:
    for cell in chosen(args.cells)[process :: args.processes]:
        try:
            outcome = repeated(cell, args.repetitions)
        except Exception:
            outcome = Outcome(cell, 0, 0, traceback.format_exc(limit=-3))
        results.put(outcome)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=1000, help="on each of two streams (1000)")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--cells", default=":", metavar="FIRST:END", help="only these, as they are numbered")
    parser.add_argument("--seconds", type=float, default=600, help="at most so long (600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the counts to FILE as a JSON line")
    args = parser.parse_args()
    started, every = time.monotonic(), chosen(args.cells)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    children = [context.Process(target=_child, args=(args, i, results)) for i in range(args.processes)]
    for child in children:
        child.start()
    outcomes: list[Outcome] = []
    while len(outcomes) < len(every) and time.monotonic() - started < args.seconds:
        if not results.empty():
            outcomes.append(results.get())
        elif not any(child.is_alive() for child in children) and results.empty():
            break
        else:
            time.sleep(0.05)
    for child in children:
        child.kill() if len(outcomes) < len(every) else child.join()
    wrong = [o for o in outcomes if o.other_bits or o.problem]
    for o in wrong:
        print(f"{o.cell}: {o.other_bits} of {o.launches} launches gave other bits {o.problem}")
    for cell in sorted(set(every) - {o.cell for o in outcomes}):
        print(f"not done: {every.index(cell)} of {args.cells}: {cell}")
    launches = sum(o.launches for o in outcomes)
    print(f"{len(outcomes)} of {len(every)} cells, {launches} launches, {len(wrong)} cells wrong")
    if args.json:
        from w4gemm.tuning import record

        facts = record.facts()
        row = {"kind": "repeat", "run": record.run_name(facts), "cells": len(outcomes), "of": len(every)}
        row |= {"launches": launches, "wrong": len(wrong), "seconds": round(time.monotonic() - started)}
        row |= {"processes": args.processes, "kernels": record.kernels_hash()}
        record.append(args.json, row | facts)
    return 1 if wrong or len(outcomes) < len(every) else 0


if __name__ == "__main__":
    sys.exit(main())
