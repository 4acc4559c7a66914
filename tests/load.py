"""Load: threads and processes that mix products, tuning, compiling and clearing on one device and one cache folder.

    PYTHONPATH=src:tests python tests/load.py --seconds 60                 on the GPU, or the CPU where there is none
    PYTHONPATH=src:tests python tests/load.py --seconds 60 --json bench/results/fuzz.jsonl

One process has ``--threads`` threads, ``--processes`` more have one each. Every product is held to float64. At the end
every record and every object that is left in the folder must be whole, and every process must have ended.

Exit status: 0, or 1 if a call failed, a product was wrong, a file is damaged or a process hangs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import w4gemm
from tiny_kernel import tiny
from w4gemm import choice
from w4gemm.choice import table
from w4gemm.choice.table import parse_lines
from w4gemm.jit import disk, object_code

FORMATS = ("int4_g128", "int4_g32_zint", "int4_g64_zfloat_fp16")
SIZES = ((192, 256), (130, 320))
TOKENS = (1, 3, 8, 17, 64)
TOLERANCE = 6e-3
"""Largest relative error of a product of bfloat16."""
GRACE_S = 240.0
"""How long processes may take to start and, after the time is over, to end."""


class Product(NamedTuple):
    w: w4gemm.QuantizedWeight
    x: torch.Tensor
    expected: torch.Tensor
    """x @ w.T in float64."""


class Outcome(NamedTuple):
    calls: Counter[str]
    problems: list[str]


def products(device: str) -> list[Product]:
    loaded = []
    for i, (name, (n, k)) in enumerate((f, size) for f in FORMATS for size in SIZES):
        g = torch.Generator().manual_seed(i)
        w = w4gemm.quantize(torch.randn(n, k, generator=g), name)
        x = torch.randn(max(TOKENS), k, generator=g).bfloat16()
        expected = x.double() @ w.dequantize(torch.bfloat16).double().T
        loaded.append(Product(w.to(device).repack(), x.to(device), expected.to(device)))
    return loaded


def linear(r: random.Random, p: Product) -> str:
    m = r.choice(TOKENS)
    d, expected = w4gemm.linear(p.x[:m], p.w), p.expected[:m]
    error = ((d.double() - expected).norm() / expected.norm()).item()
    return "" if error < TOLERANCE else f"{p.w!r}, m {m}: relative error {error:.3g}"


def tune(r: random.Random, p: Product) -> str:
    with w4gemm.autotune(top=2):
        return linear(r, p)


def compile(r: random.Random, p: Product) -> str:
    code = object_code(tiny(float(r.randrange(4))))
    return "" if code.startswith(b"\x7fELF") else "a compiled object is none"


def clear(r: random.Random, p: Product) -> str:
    r.choice([table.clear, disk.clear, choice.forget])()
    return ""


CALLS: dict[Callable[[random.Random, Product], str], int] = {linear: 30, tune: 3, compile: 3, clear: 1}
"""Calls, and how often each is made beside the others."""


def work(seed: str, device: str, end: float, loaded: list[Product], outcome: Outcome) -> None:
    """One thread. end: by the clock of the machine."""
    r = random.Random(seed)
    stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else torch.no_grad()
    with stream:
        while time.time() < end and len(outcome.problems) < 10:
            (call,) = r.choices(list(CALLS), list(CALLS.values()))
            try:
                problem = call(r, r.choice(loaded))
            except Exception:
                problem = traceback.format_exc(limit=-4)
            outcome.calls[call.__name__] += 1
            if problem:
                outcome.problems.append(f"{call.__name__}: {problem}")


def process(seed: str, threads: int, device: str, seconds: float, start: Any, results: Any) -> None:
    """One process, which begins when all of them have imported what they need."""
    torch.set_num_threads(1)
    outcome, loaded = Outcome(Counter(), []), products(device)
    if device == "cuda":
        torch.cuda.synchronize()
    start.wait(GRACE_S)
    end = time.time() + seconds
    workers = [
        threading.Thread(target=work, args=(f"{seed} {i}", device, end, loaded, outcome)) for i in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    results.put(outcome)


def left_behind(folder: Path) -> list[str]:
    """Return a line for each damaged record and object in the cache folder."""
    table = folder / "tuned.jsonl"
    _, bad = parse_lines(table.read_text().splitlines()) if table.exists() else ([], [])
    faults = [f"tuned.jsonl, line {number}: {reason}" for number, reason in bad]
    faults += [f"{path.name} is not whole" for path in folder.glob("*.o") if disk.read(path.name) is None]
    return faults + [f"{path.name} was left" for path in folder.glob(".*.o.*")]


def run(seed: str, threads: int, processes: int, seconds: float, device: str, folder: Path) -> Outcome:
    os.environ["W4GEMM_CACHE_DIR"] = str(folder)
    context = multiprocessing.get_context("spawn")
    counts = [threads, *[1] * processes]
    results, start = context.Queue(), context.Barrier(len(counts))
    children = [
        context.Process(target=process, args=(f"{seed} {i}", count, device, seconds, start, results))
        for i, count in enumerate(counts)
    ]
    for child in children:
        child.start()
    latest = time.time() + GRACE_S + seconds
    total = Outcome(Counter(), [])
    for child in children:
        child.join(max(0.0, latest - time.time()))
        if child.exitcode != 0:
            total.problems.append("a process hangs" if child.exitcode is None else f"a process ended: {child.exitcode}")
            child.kill()
    while not results.empty():
        outcome = results.get()
        total.calls.update(outcome.calls)
        total.problems.extend(outcome.problems)
    total.problems.extend(left_behind(folder))
    total.problems.extend(f"nothing called {call.__name__}" for call in CALLS if not total.calls[call.__name__])
    return total


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="how long (60)")
    parser.add_argument("--threads", type=int, default=8, help="of one process (8)")
    parser.add_argument("--processes", type=int, default=8, help="besides it, of one thread each (8)")
    parser.add_argument("--seed", help="of all that is drawn (the time)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the counts to FILE as a JSON line")
    args = parser.parse_args(arguments)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    seed = args.seed or str(int(time.time()) % 100_000)
    print(
        f"seed {seed}, {args.threads} threads and {args.processes} processes, {args.seconds:g} s, {device}", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(seed, args.threads, args.processes, args.seconds, device, Path(folder))
    for problem in outcome.problems:
        print(problem)
    print(", ".join(f"{name} {count}" for name, count in sorted(outcome.calls.items())))
    print(f"{sum(outcome.calls.values())} calls, {len(outcome.problems)} problems, seed {seed}")
    if args.json:
        from w4gemm.tuning import record

        facts = record.facts()
        row = {
            "kind": "load",
            "run": record.run_name(facts),
            "device": device,
            "threads": args.threads,
            "processes": args.processes,
            "seconds": args.seconds,
            "calls": dict(sorted(outcome.calls.items())),
            "problems": len(outcome.problems),
            "seed": seed,
        }
        record.append(args.json, row | facts)
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
