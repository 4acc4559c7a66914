"""``w4gemm tune``: measure the likeliest configs of a model's layers, and keep the fastest."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from w4gemm.choice import table
from w4gemm.cli.parser import ALL_TOKENS, CPU_TOKENS
from w4gemm.cli.problems import parse_layers, problems
from w4gemm.console.devices import chosen_device, device_line, device_name, say_if_busy
from w4gemm.console.errors import memory_for
from w4gemm.console.progress import counted, delete_line, progress_bar, say
from w4gemm.console.values import chosen_dtype, parse_tokens
from w4gemm.core import environment
from w4gemm.tuning.tuner import TOP, Outcome, is_tuned, tune


def run(args: argparse.Namespace) -> int:
    device, where = chosen_device(args.device)
    dtype = chosen_dtype(args.dtype, device)
    layers = parse_layers(args, device)
    dense = [layer for layer in layers if not layer.experts]
    name, value = ("--shapes", args.shapes) if args.model is None else ("--model", args.model)
    if not dense:
        raise ValueError(f"{name}: wanted a layer that is not of experts, since those are not tuned, got {value!r}")
    tokens = parse_tokens(args.m or (CPU_TOKENS if device.kind == "cpu" else ALL_TOKENS))
    if left_out := len(layers) - len(dense):
        say(f"left out, since experts are not tuned: {counted(left_out, 'layer')} of experts")
    needed = problems(dense, tokens, device, dtype, args.batch_invariant)
    tuned = 0 if args.force else sum(map(is_tuned, needed))
    say(f"{device_line(device)}; {counted(len(needed), 'problem')}")
    say_if_busy(where)
    top = TOP if args.top is None else args.top
    started = time.perf_counter()
    outcomes: list[Outcome] = []
    try:
        too_large = f"{name}: wanted layers that fit the memory of {device_name(where)}, got {value!r}"
        with memory_for(too_large), progress_bar() as progress:
            options = {"top": top, "force": args.force, "workers": args.workers}
            for outcome in tune(needed, where, **options, progress=progress):
                outcomes.append(outcome)
                if not args.json:
                    delete_line()
                    print(line(outcome), flush=True)
    finally:
        seconds = time.perf_counter() - started
        say(f"{len(outcomes)} of {len(needed)} measured in {seconds:.0f} s{summary(outcomes, tuned)}")
        path = table.user_path()
        if path is None:
            say(f"kept in no file: {environment.why_nothing_is_kept()}")
        elif (outcomes or tuned) and all(outcome.stored for outcome in outcomes):
            say(f"kept in {path}")  # else a warning has said what is in the way
    if args.json:
        print(json.dumps({"device": device_line(device), "tuned": [_facts(each) for each in outcomes]}, indent=2))
    return 0


def _facts(outcome: Outcome) -> dict[str, Any]:
    problem, record = outcome.problem, outcome.record
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k, "format": str(problem.format)}
    return sizes | {
        "config": record.choice,
        "us": record.us,
        "gain": outcome.gain,
        "steady": outcome.steady,
        "kept": outcome.stored,
    }


def line(outcome: Outcome) -> str:
    problem, record = outcome.problem, outcome.record
    gain = "the first guess" if record.choice == outcome.first_guess else f"{outcome.gain:.2f} x the first guess"
    doubt = "" if outcome.steady else "; its repeats disagree"
    return f"m {problem.m}, n {problem.n}, k {problem.k}: {record.choice}, {record.us:.1f} us, {gain}{doubt}"


def summary(outcomes: list[Outcome], tuned: int) -> str:
    """Return the end of a line: the gain of tuning over the heuristic, and how many problems had records before."""
    before = f"; with a record already: {tuned} (--force measures again)" if tuned else ""
    if not outcomes:
        return before
    mean = statistics.geometric_mean(o.gain for o in outcomes)
    best = max(o.gain for o in outcomes)
    return f"; over the first guesses {mean:.3f} x in the geometric mean, at most {best:.2f} x{before}"
