"""Fuzz w4gemm: random problems against formulas of the fuzzer's own.

    PYTHONPATH=src:tests python -m fuzz.run --seconds 60                   on the CPU, or the GPU where there is one
    PYTHONPATH=src:tests python -m fuzz.run --seconds 200 --processes 16 --json bench/results/fuzz.jsonl
    PYTHONPATH=src:tests python -m fuzz.run --only 17:3:123456             one problem again, by its name
    PYTHONPATH=src:tests python -m fuzz.run --like kind=grouped --like dtype=float8 --config sm90_fp8_gemm/
    PYTHONPATH=src:tests python -m fuzz.run --only step_attention:17:123456 one problem of a helper kernel

Each problem is run twice or more, into outputs full of NaN; on a GPU sometimes on two streams at once or in a graph. A
seed gives the same problems again; without --seed it is the time. A process takes one variant after the other, which
costs a compilation or a few, and runs --weights weights of each with --problems problems each. A variant in twelve is
one of the helper kernels (``fuzz.helpers``).

Exit status: 0, or 1 if a problem had a wrong result or an unexpected error, a process did not end, or nothing was run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import w4gemm
from fuzz import helpers
from fuzz.calls import Checked, check, name_of, verdicts
from fuzz.cases import Case, draw, drawn_variant
from fuzz.weights import Matrices

GRACE = 90
"""Seconds that a process may take beyond its time, for the compilation that it is in."""


@dataclass
class Findings:
    """Findings of one process."""

    problems: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How many problems by (what, which): ("formats", "int4_bf16_zint")."""
    broken: bool = False
    """True if nothing more can be run in this process."""


def one_weight(cases: list[Case], device: str, findings: Findings) -> None:
    """Run problems that share a weight."""
    run: list[Checked] = []
    matrices = None
    for case in cases:
        findings.problems += 1
        try:
            matrices = matrices or Matrices.of(case, device)
            run.append(check(case, device, matrices))
        except w4gemm.UnsupportedError:
            findings.refused += 1
        except Exception as error:
            _failed(case, error, findings)
            if findings.broken:
                return
    try:
        judged = verdicts([checked.verdict for checked in run])
    except Exception as error:
        return _failed(cases[-1], error, findings)
    for (case, kernel, _), verdict in zip(run, judged, strict=True):
        findings.counts.update((*_facts(case), ("launched", kernel)))
        if str(verdict):
            findings.wrong.append(f"{case.name}: {verdict}\n  {case}")


def of_helper(name: str, form: int, seeds: list[int], device: str, findings: Findings) -> None:
    """Run problems of one form of a helper kernel."""
    for seed in seeds:
        findings.problems += 1
        findings.counts["helpers", name] += 1
        case = f"{name}:{form}:{seed}"
        try:
            findings.wrong += [f"{case}: {fault}" for fault in helpers.check(name, form, seed, device)]
        except Exception as error:
            return _failed(case, error, findings)


def _failed(case: Case | str, error: Exception, findings: Findings) -> None:
    text = "".join(traceback.format_exception(error, limit=-3))
    findings.broken = "cuda error" in text.lower()
    before = ", or one of its weight before it" if findings.broken else ""
    name = case if isinstance(case, str) else case.name
    findings.wrong.append(f"{name}{before}: {text}\n  {case}")


def _facts(case: Case) -> list[tuple[str, str]]:
    v = case.variant
    fp8 = "float8 per 128 columns" if v.block_scale else "float8 quantized" if v.quantized else name_of(v.dtype)
    f = w4gemm.WeightFormat.parse(v.format)
    format = f"{f.element[:8]}_{f.scale}" + ("" if f.zero == "none" else f"_z{f.zero}")
    return [("kinds", f"{v.kind} {fp8}"), ("formats", format), ("ways", case.way), ("numbers", case.numbers)]


def fuzz(args: argparse.Namespace, process: int, at: Any = None) -> Findings:
    """Run problems of one process until its time is over. at: shared memory for the seeds of what is run."""
    torch.set_num_threads(1)
    findings, device = Findings(), args.device
    expected = [text.split("=", 1) for text in args.like]
    first = args.seed * 10_000 + process
    for variant in range(first, first + args.variants * args.processes, args.processes):
        helper = None if expected or args.config else helpers.drawn(variant)
        facts = drawn_variant(variant, device, args.config)
        if not all(text in str(getattr(facts, name)) for name, text in expected):
            if time.monotonic() > args.end:
                return findings
            continue
        seeds = random.Random(f"{variant} {process}")
        for _ in range(args.weights):
            weight = seeds.randrange(2**31)
            if at is not None:
                at[2 * process : 2 * process + 2] = variant, weight
            problems = [seeds.randrange(2**31) for _ in range(args.problems)]
            if helper:
                of_helper(helper, variant, problems, device, findings)
            else:
                one_weight([draw(variant, weight, seed, device, args.config) for seed in problems], device, findings)
            if time.monotonic() > args.end or len(findings.wrong) >= args.wrong or findings.broken:
                return findings
    return findings


def _child(args: argparse.Namespace, process: int, at: Any, results: Any) -> None:
    try:
        results.put((process, fuzz(args, process, at)))
    except Exception:
        results.put((process, Findings(wrong=[traceback.format_exc()])))


def _side_by_side(args: argparse.Namespace) -> list[Findings]:
    """The findings of processes that run at once, also of those that do not end."""
    context = multiprocessing.get_context("spawn")
    at, results = context.Array("q", 2 * args.processes), context.Queue()
    children = [context.Process(target=_child, args=(args, i, at, results)) for i in range(args.processes)]
    for child in children:
        child.start()
    by_process = dict[int, Findings]()
    while len(by_process) < args.processes and time.monotonic() < args.end + GRACE:
        try:
            process, findings = results.get(timeout=1)
            by_process[process] = findings
        except queue.Empty:
            if not any(child.is_alive() for child in children) and results.empty():
                break
    for i, child in enumerate(children):
        child.join(timeout=5 if i in by_process else 0)
        if i not in by_process:
            state = f"ended with {child.exitcode}" if child.exitcode is not None else "did not end"
            by_process[i] = Findings(
                wrong=[f"{at[2 * i]}:{at[2 * i + 1]}: the process {state} in problems of this weight"]
            )
            child.kill()
    return list(by_process.values())


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="how long (60)")
    parser.add_argument("--variants", type=int, default=2**31, help="at most so many a process (no limit)")
    parser.add_argument("--processes", type=int, default=1, help="side by side on one device (1)")
    parser.add_argument("--weights", type=int, help="of each variant (5; 2 on the CPU, which compiles nothing)")
    parser.add_argument("--problems", type=int, help="with each weight (24; 4 on the CPU)")
    parser.add_argument("--seed", type=int, help="of all that is drawn (the time)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    parser.add_argument("--wrong", type=int, default=20, help="end a process after so many wrong problems (20)")
    parser.add_argument("--like", metavar="FIELD=TEXT", action="append", default=[], help="only variants like this")
    parser.add_argument("--config", default="", metavar="PATTERN", help="only forced configs like this")
    parser.add_argument("--only", metavar="VARIANT:WEIGHT:PROBLEM", help="one problem, by its name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the counts to FILE as a JSON line")
    args = parser.parse_args(arguments)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.weights = args.weights or (5 if args.device == "cuda" else 2)
    args.problems = args.problems or (24 if args.device == "cuda" else 4)
    args.end = time.monotonic() + args.seconds  # one clock for all processes
    args.seed = int(time.time()) % 100_000 if args.seed is None else args.seed
    return args


def only(name: str, device: str, config: str) -> bool:
    """Run one problem again; True if it is wrong."""
    first, *seeds = name.split(":")
    if first in helpers.HELPERS:
        wrong = helpers.check(first, *map(int, seeds), device)
        print("\n".join(wrong) or "right")
        return bool(wrong)
    variant, weight, problem = int(first), *map(int, seeds)
    case = draw(variant, weight, problem, device, config)
    print(case)
    (verdict,) = verdicts([check(case, device).verdict])
    print(str(verdict) or "right")
    return bool(str(verdict))


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.only:
        return only(args.only, args.device, args.config)
    print(f"seed {args.seed}, {args.processes} processes, {args.seconds:g} s, {args.device}", flush=True)
    started = time.monotonic()
    findings = [fuzz(args, 0)] if args.processes == 1 else _side_by_side(args)
    seconds = time.monotonic() - started
    problems, refused = sum(f.problems for f in findings), sum(f.refused for f in findings)
    wrong = [text for f in findings for text in f.wrong]
    counts: dict[str, dict[str, int]] = {}
    for (what, which), count in sorted(sum((f.counts for f in findings), Counter[tuple[str, str]]()).items()):
        counts.setdefault(what, {})[which] = count
    for text in wrong:
        print(text)
    for what, of in counts.items():
        print(f"{what}: " + ", ".join(f"{which} {count}" for which, count in of.items()))
    print(f"{problems} problems in {seconds:.0f} s, {refused} refused, {len(wrong)} wrong, seed {args.seed}")
    if args.json:
        from w4gemm.tuning import record

        facts = record.facts()
        row = {"kind": "fuzz", "run": record.run_name(facts), "device": args.device, "problems": problems}
        row |= {"wrong": len(wrong), "refused": refused, "seed": args.seed, "seconds": round(seconds)}
        row |= {"processes": args.processes, **counts, "kernels": record.kernels_hash()}
        row |= {"names": [text[:120] for text in wrong[:20]]} if wrong else {}
        record.append(args.json, row | facts)
    if not problems:
        print(f"no variant is like {args.like} with a config like {args.config!r}")
    return 1 if wrong or not problems else 0


if __name__ == "__main__":
    sys.exit(main())
