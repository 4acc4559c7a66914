"""``w4gemm gemm``: run one product, check it, time it; or measure every config of it."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from w4gemm import choice
from w4gemm.console.devices import chosen_device, device_line, device_name, say_if_busy
from w4gemm.console.errors import memory_for
from w4gemm.console.options import three_sizes
from w4gemm.console.progress import counted, progress_bar, progress_line
from w4gemm.console.values import chosen_dtype
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import GemmProblem
from w4gemm.packing.layouts import layout_for
from w4gemm.packing.packed_shape import packed_shape
from w4gemm.tuning.roofline import Roofline, Work
from w4gemm.tuning.tuner import Outcome, tune
from w4gemm.tuning.workload import Workload

_REPLAYS, _SHOWN = 15, 10


def run(args: argparse.Namespace) -> int:
    m, n, k = three_sizes(args)
    if args.top and not args.profile:
        raise ValueError("--top: goes with --profile, which measures configs")
    device, where = chosen_device(args.device)
    format = WeightFormat.parse(args.format)
    dtype = chosen_dtype(args.dtype, device)
    problem = GemmProblem(m, n, k, dtype, format, layout_for(device, format, dtype), device=device)
    say_if_busy(where)
    with memory_for(f"M, N, K: wanted sizes that fit the memory of {device_name(where)}, got {m}, {n}, {k}"):
        if args.profile:
            return _profile(problem, where, args.top, args.json)
        return _run_once(problem, where, args.config, args.json)


def _profile(problem: GemmProblem, where: torch.device, top: int | None, as_json: bool) -> int:
    if not as_json:
        print(_heading(problem), flush=True)
    with progress_bar() as progress:
        outcomes = list(tune([problem], where, top=top, force=True, progress=progress))
    for outcome in outcomes:
        print(json.dumps(_facts_of(outcome), indent=2) if as_json else profile_text(outcome))
    return 0 if outcomes else 1


def _run_once(problem: GemmProblem, where: torch.device, config: str | None, as_json: bool) -> int:
    # planned as linear does it, for the interval of m
    weight = packed_shape(problem.format, problem.layout, problem.n, problem.k)
    key = choice.PlanKey.of(weight, problem.m, problem.dtype, where, config=config or "")
    if config is not None:
        choice.explain(key.problem(), config)  # refuses a config before the heading; plan_for compiles after it
    if not as_json:
        print(_heading(problem), flush=True)
    with progress_line() as progress:  # large sizes take minutes on a CPU
        progress(0, 0, "choosing a config")
        plan = choice.plan_for(key)
        progress(0, 0, "making a random weight")
        workload = Workload(problem, where)
        operands = workload.operands(problem.m)
        progress(0, 0, "checking the result")
        error = workload.error(plan.launch, operands[0])
        progress(0, 0, "timing")
        (time,) = workload.time([plan.launch], operands, _REPLAYS)
    if as_json:
        chosen = {"config": str(plan), "source": plan.source, "relative_error": error}
        print(json.dumps(_facts(problem) | chosen | _speed(problem, time.p50), indent=2))
    else:
        print(f"{plan} ({plan.source}): {speed(problem, time.p50)}; relative error {error:.1e}")
    return 0


def _heading(problem: GemmProblem) -> str:
    return f"{device_line(problem.device)}\n{problem}"


def _facts(problem: GemmProblem) -> dict[str, Any]:
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k}
    kinds = {"dtype": str(problem.dtype).removeprefix("torch."), "format": str(problem.format)}
    least = Roofline.of(problem)
    limit = {"roofline_us": least and least.us, "bound": least and least.bound}
    return {"device": device_line(problem.device)} | sizes | kinds | limit


def _speed(problem: GemmProblem, us: float) -> dict[str, float]:
    work = Work.of(problem)
    return {"us": us, "operations_per_s": work.operations / us * 1e6, "bytes_per_s": work.bytes / us * 1e6}


def _facts_of(outcome: Outcome) -> dict[str, Any]:
    """Return the facts of :func:`profile_text`, for every config."""
    record = outcome.record
    return _facts(outcome.problem) | {
        "configs": [{"config": name, **_speed(outcome.problem, t.p50)} for name, t in outcome.times.items()],
        "first_guess": outcome.first_guess,
        "left_out": outcome.failed,
        "fastest": record.choice,
        "interval": list(record.m),
        "kept": outcome.stored,
        "gain": outcome.gain,
    }


def speed(problem: GemmProblem, us: float) -> str:
    """Return a time in words, with the operations and bytes per second that it comes to."""
    facts = _speed(problem, us)
    rates = f"{_scaled(facts['operations_per_s'], 'FLOP/s')}, {_scaled(facts['bytes_per_s'], 'B/s')}"
    least, time = Roofline.of(problem), f"{us:.1f} us" if us < 1e4 else f"{us / 1e3:.1f} ms"
    if least is not None:
        return f"{time}, {rates}, {100 * least.us / us:.0f} % of the roofline ({least.us:.1f} us)"
    return f"{time}, {rates} (no roofline is known for this device)"


def _scaled(rate: float, unit: str) -> str:
    """Return a rate in units of 10**12 a second if it is at least one of these, else of 10**9."""
    return f"{rate / 1e12:.3g} T{unit}" if rate >= 1e12 else f"{rate / 1e9:.3g} G{unit}"


def profile_text(outcome: Outcome) -> str:
    """Return lines with the fastest configs, the rank of the heuristic's first guess, and what was kept."""
    problem, times = outcome.problem, outcome.times
    lines = [f"measured at m {problem.m}, which stands for its interval: {counted(len(times), 'config')}"]
    guesses = choice.configs(problem)
    for rank, (name, time) in enumerate(list(times.items())[:_SHOWN], 1):
        lines.append(f"{rank:3}  {name}: {speed(problem, time.p50)}; guess {guesses.index(name) + 1}")
    if outcome.first_guess in times:
        rank = list(times).index(outcome.first_guess) + 1
        lines.append(f"the heuristic's first guess, {outcome.first_guess}, is number {rank} of {len(times)}")
    lines += [f"left out: {name}: {reason}" for name, reason in outcome.failed.items()]
    span = choice.span(*outcome.record.m)
    kept = "kept" if outcome.stored else "fastest, and not kept,"
    lines.append(f"{kept} for {span}: {outcome.record.choice}, {outcome.gain:.2f} times as fast as the first guess")
    return "\n".join(lines)
