"""``w4gemm gemm``: run one product, check it, time it; or measure every config of it."""

from __future__ import annotations

import argparse

import torch

from w4gemm import choice
from w4gemm.console.devices import chosen_device, device_line, device_name
from w4gemm.console.errors import memory_for
from w4gemm.console.options import (
    add_device_arguments,
    add_format_argument,
    add_size_arguments,
    chosen_dtype,
    positive,
    sizes_of,
)
from w4gemm.console.progress import counted, progress_bar
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import GemmProblem
from w4gemm.packing.layouts import layout_for
from w4gemm.packing.packed_shape import packed_shape
from w4gemm.tuning.roofline import Work, roofline_us
from w4gemm.tuning.tuner import Outcome, tune
from w4gemm.tuning.workload import Workload

NAME = "gemm"
HELP = "run one product of random numbers, check and time it; --profile measures every config"
DESCRIPTION = (
    "Multiply random activations (M, K) by a random 4-bit weight (N, K), check the result against a plain product and "
    "time it, with a weight that is in no cache. --profile measures every config and keeps the fastest for later calls."
)
_REPLAYS, _SHOWN = 15, 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_size_arguments(parser)
    add_format_argument(parser)
    add_device_arguments(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--config", help="run this config, as `w4gemm explain` names them")
    which.add_argument("--profile", action="store_true", help="measure every config and keep the fastest")
    parser.add_argument(
        "--top", type=positive, metavar="N", help="with --profile: measure only the N configs of least predicted time"
    )


def run(args: argparse.Namespace) -> int:
    m, n, k = sizes_of(args)
    if args.top and not args.profile:
        raise ValueError("--top: goes with --profile, which measures configs")
    device, where = chosen_device(args.device)
    format = WeightFormat.parse(args.format)
    dtype = chosen_dtype(args.dtype, device)
    problem = GemmProblem(m, n, k, dtype, format, layout_for(device, format, dtype), device=device)
    with memory_for(f"M, N, K: wanted sizes that fit the memory of {device_name(where)}, got {m}, {n}, {k}"):
        return _profile(problem, where, args.top) if args.profile else _run_once(problem, where, args.config)


def _profile(problem: GemmProblem, where: torch.device, top: int | None) -> int:
    print(_heading(problem))
    with progress_bar() as progress:
        outcomes = list(tune([problem], where, top=top, force=True, progress=progress))
    for outcome in outcomes:
        print(profile_text(outcome))
    return 0 if outcomes else 1


def _run_once(problem: GemmProblem, where: torch.device, config: str | None) -> int:
    # planned as linear does it, for the interval of m
    weight = packed_shape(problem.format, problem.layout, problem.n, problem.k)
    key = choice.PlanKey.of(weight, problem.m, problem.dtype, config=config or "", device=where)
    if config is not None:
        choice.explain(key.problem(), config)  # refuses a config before the heading; plan_for compiles after it
    print(_heading(problem), flush=True)
    plan = choice.plan_for(key)
    workload = Workload(problem, where)
    operands = workload.operands(problem.m)
    error = workload.error(plan.launch, operands[0])
    (time,) = workload.time([plan.launch], operands, _REPLAYS)
    print(f"{plan} ({plan.source}): {speed(problem, time.p50)}; relative error {error:.1e}")
    return 0


def _heading(problem: GemmProblem) -> str:
    return f"{device_line(problem.device)}\n{problem}"


def speed(problem: GemmProblem, us: float) -> str:
    """Return a time in words, with the operations and bytes per second that it comes to."""
    work = Work.of(problem)
    text = f"{us:.1f} us, {work.operations / us / 1e6:.3g} TFLOP/s, {work.bytes / us / 1e6:.3g} TB/s"
    least = roofline_us(problem)
    if least is not None:
        return f"{text}, {100 * least / us:.0f} % of the roofline ({least:.1f} us)"
    return f"{text} (no roofline is known for this device)"


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
