"""Fuzz w4gemm: random problems against formulas of the fuzzer's own.

    PYTHONPATH=src:tests python -m fuzz.run --seconds 60                   on the CPU, or the GPU where there is one
    PYTHONPATH=src:tests python -m fuzz.run --seconds 240 --processes 14 --json bench/results/fuzz.jsonl
    PYTHONPATH=src:tests python -m fuzz.run --only 17:123456               one problem again, by its name

Each problem is run twice, into an output full of NaN. A seed gives the same problems again; without --seed it is the
time. ``--variants`` bounds how many kernels are compiled.

Exit status: 0, or 1 if a problem had a wrong result or an unexpected error.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

import w4gemm
from fuzz.cases import check, draw


@dataclass
class Found:
    """Findings of one process."""

    problems: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


def one(variant_seed: int, problem_seed: int, device: str, found: Found) -> None:
    case = draw(variant_seed, problem_seed, device)
    found.problems += 1
    found.kinds[f"{case.kind} {str(case.dtype).removeprefix('torch.')}"] += 1
    try:
        problem = check(case, device)
    except w4gemm.UnsupportedError:
        found.refused += 1
        return
    except Exception:
        problem = traceback.format_exc(limit=-3)
    if problem:
        found.wrong.append(f"{case.name}: {problem}\n  {case}")


def fuzz(seed: int, process: int, seconds: float, most: int, variants: int, device: str) -> Found:
    """Run problems of one process until the time is over."""
    torch.set_num_threads(1)
    r, found, end = random.Random(f"{seed} {process}"), Found(), time.monotonic() + seconds
    while time.monotonic() < end and found.problems < most and len(found.wrong) < 20:
        one(seed * 10_000 + r.randrange(variants), r.randrange(2**31), device, found)
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="how long (60)")
    parser.add_argument("--problems", type=int, default=10**9, help="at most so many a process")
    parser.add_argument("--processes", type=int, default=1, help="side by side on one device (1)")
    parser.add_argument("--variants", type=int, default=300, help="kinds of problems, each a kernel or a few (300)")
    parser.add_argument("--seed", type=int, help="of all that is drawn (the time)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    parser.add_argument("--only", metavar="VARIANT:PROBLEM", help="one problem, by its name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the counts to FILE as a JSON line")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.only:
        variant, problem = map(int, args.only.split(":"))
        case = draw(variant, problem, device)
        print(case)
        found_problem = check(case, device)
        print(found_problem or "right")
        return bool(found_problem)
    seed = int(time.time()) % 100_000 if args.seed is None else args.seed
    print(f"seed {seed}, {args.processes} processes, {args.seconds:g} s, {device}", flush=True)
    started = time.monotonic()
    jobs = [(seed, i, args.seconds, args.problems, args.variants, device) for i in range(args.processes)]
    if args.processes == 1:
        founds = [fuzz(*jobs[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
            founds = pool.starmap(fuzz, jobs, chunksize=1)
    total, kinds = sum(f.problems for f in founds), sum((f.kinds for f in founds), Counter[str]())
    refused, wrong = sum(f.refused for f in founds), [text for f in founds for text in f.wrong]
    for text in wrong:
        print(text)
    print(", ".join(f"{name} {count}" for name, count in sorted(kinds.items())))
    print(f"{total} problems, {refused} refused, {len(wrong)} wrong, seed {seed}")
    if args.json:
        from w4gemm.tuning import record

        facts = record.facts()
        row = {
            "kind": "fuzz",
            "run": record.run_name(facts),
            "device": device,
            "problems": total,
            "wrong": len(wrong),
            "refused": refused,
            "seed": seed,
            "seconds": round(time.monotonic() - started),
            "processes": args.processes,
            "kinds": dict(sorted(kinds.items())),
            "kernels": record.kernels_hash(),
        }
        record.append(args.json, row | facts)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
