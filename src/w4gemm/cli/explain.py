"""``w4gemm explain``: what each kernel says about a problem, every config, and which one runs and why."""

from __future__ import annotations

import argparse

from w4gemm import choice
from w4gemm.console.devices import described_device, device_line
from w4gemm.console.options import add_device_arguments, chosen_dtype, positive
from w4gemm.core.activation import canonical
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import GemmProblem
from w4gemm.packing.layouts import layout_for
from w4gemm.tuning.roofline import roofline_us

NAME = "explain"
HELP = "say which configs can run a problem, which one does, and why"
DESCRIPTION = "What each kernel says about a problem, every config with its predicted time, and which one runs and why."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, what in (("m", "tokens"), ("n", "output features"), ("k", "input features")):
        parser.add_argument(f"--{name}", type=int, required=True, help=what)
    parser.add_argument("--format", default="int4_g128", help="(default: %(default)s)")
    add_device_arguments(parser, simulated=True)
    parser.add_argument("--config", help="as if this one were forced")
    parser.add_argument("--why", metavar="CONFIG", help="the rules that exclude this config, or where it ranks")
    parser.add_argument("--activation", metavar="NAME", help="of the epilogue (default: none)")
    parser.add_argument("--residual", action="store_true", help="a residual is added to the product")
    parser.add_argument("--batch-invariant", action="store_true", help="for linear(..., batch_invariant=True)")
    parser.add_argument("--rows", type=positive, metavar="N", help="only the N best guesses (default: all)")


def run(args: argparse.Namespace) -> int:
    if min(args.m, args.n, args.k) < 1:
        raise ValueError(f"--m, --n, --k: wanted numbers from 1, got {args.m}, {args.n}, {args.k}")
    device = described_device(args.device)
    format, dtype = WeightFormat.parse(args.format), chosen_dtype(args.dtype, device)
    problem = GemmProblem(
        choice.planned(args.m),
        args.n,
        args.k,
        dtype,
        format,
        layout_for(device, format, dtype),
        Epilogue(canonical(args.activation), residual=args.residual),
        device,
        args.batch_invariant,
    )
    if args.why:
        print(device_line(device))
        print(problem)
        for verdict in choice.why(problem, args.why):
            print(verdict)
        return 0
    found = choice.explain(problem, args.config)
    print(device_line(device))
    print(found)
    if device.kind == "cpu":
        print("  predicted times only order the configs here: nothing is known of this CPU")
    elif (least := roofline_us(problem)) is not None:
        print(f"  roofline: {least:.1f} us")
    if found.chosen is None:
        return 1
    if args.m <= choice.WAVES_FROM:
        print(f"  chosen once for {choice.span(*choice.interval_of(args.m))}")
    else:
        print(f"  chosen for m {problem.m}, of the few configs that serve more than {choice.WAVES_FROM} tokens")
    print(f"\n{found.table(args.rows)}")
    return 0
