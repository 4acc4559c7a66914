"""``w4gemm explain``: what each kernel says about a problem, every config, and which one runs and why."""

from __future__ import annotations

import argparse

from w4gemm import choice
from w4gemm.console.devices import SIMULATED, described_device, device_line
from w4gemm.console.options import (
    add_device_arguments,
    add_format_argument,
    add_size_arguments,
    chosen_dtype,
    positive,
    sizes_of,
)
from w4gemm.core.activation import canonical
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import GemmProblem
from w4gemm.packing.layouts import layout_for
from w4gemm.tuning.roofline import roofline_us

NAME = "explain"
HELP = "say which configs can run a problem, which one does, and why"
DESCRIPTION = (
    "Print what each kernel says about a product x (M, K) @ w (N, K).T, which config runs it and why, and every config "
    "with its predicted microseconds, least first. * marks the one that runs. Nothing is compiled or measured."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_size_arguments(parser)
    add_format_argument(parser)
    add_device_arguments(parser, SIMULATED, "device to choose for")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--config", help="explain the call in which this config is forced")
    which.add_argument(
        "--why", metavar="CONFIG", help="say only why this config is not legal, or where it ranks by predicted time"
    )
    parser.add_argument("--activation", metavar="NAME", help="activation in the epilogue, such as silu (default: none)")
    parser.add_argument("--residual", action="store_true", help="the epilogue adds a residual")
    parser.add_argument("--batch-invariant", action="store_true", help="explain linear(..., batch_invariant=True)")
    parser.add_argument(
        "--rows", type=positive, metavar="N", help="print only the N configs of least predicted time (default: all)"
    )


def run(args: argparse.Namespace) -> int:
    m, n, k = sizes_of(args)
    device = described_device(args.device)
    format, dtype = WeightFormat.parse(args.format), chosen_dtype(args.dtype, device)
    problem = GemmProblem(
        choice.plan_m(m),
        n,
        k,
        dtype,
        format,
        layout_for(device, format, dtype),
        Epilogue(canonical(args.activation), residual=args.residual),
        device,
        args.batch_invariant,
    )
    if args.why is not None:
        verdicts = choice.why(problem, args.why)  # before the heading, because CONFIG may be none
        shared = () if problem.m == m else (f"  m {m} is planned as m {problem.m}",)
        print(device_line(device), problem, *shared, *verdicts, sep="\n")
        return 0
    explanation = choice.explain(problem, args.config)
    print(device_line(device))
    print(explanation)
    if device.kind == "cpu":
        print("  predicted times only order the configs here: nothing is known of this CPU")
    elif (least := roofline_us(problem)) is not None:
        print(f"  roofline: {least:.1f} us")
    if explanation.chosen is None:
        return 1
    if m <= choice.WAVES_FROM:
        print(f"  chosen once for {choice.span(*choice.interval_of(m))}")
    else:
        print(f"  chosen for m {problem.m}, of the few configs that serve more than {choice.WAVES_FROM} tokens")
    print(f"\n{explanation.table(args.rows)}")
    return 0
