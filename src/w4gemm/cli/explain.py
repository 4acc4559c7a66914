"""``w4gemm explain``: what each kernel says about a problem, every config, and which one runs and why."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import torch

from w4gemm import choice
from w4gemm.console.devices import described_device, device_line
from w4gemm.console.options import three_sizes
from w4gemm.console.values import chosen_dtype
from w4gemm.core.activation import canonical
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import GemmProblem
from w4gemm.packing.layouts import layout_for
from w4gemm.tuning.roofline import Roofline

_ROWS = 20
"""Configs that are printed if --rows does not say how many."""


def run(args: argparse.Namespace) -> int:
    m, n, k = three_sizes(args)
    device = described_device(args.device)
    format, dtype = WeightFormat.parse(args.format), chosen_dtype(args.dtype, device)
    if args.block_scales and dtype != torch.float8_e4m3fn:
        raise ValueError(f"--block-scales: wanted --dtype float8_e4m3fn beside it, got {dtype}")
    problem = GemmProblem(
        choice.plan_m(m),
        n,
        k,
        dtype,
        format,
        layout_for(device, format, dtype),
        Epilogue(canonical(args.activation), residual=args.residual, block_scale=args.block_scales),
        device,
        args.batch_invariant,
    )
    least = Roofline.of(problem)
    heading = {"device": device_line(device), "problem": str(problem), "m": m, "planned_m": problem.m, "n": n, "k": k}
    if args.why is not None:
        verdicts = choice.why(problem, args.why)  # before the heading, because CONFIG may be none
        if args.json:
            print(json.dumps(heading | {"verdicts": [_verdict(verdict) for verdict in verdicts]}, indent=2))
            return 0
        shared = () if problem.m == m else (f"  m {m} is planned as m {problem.m}",)
        print(device_line(device), problem, *shared, *verdicts, sep="\n")
        return 0
    explanation = choice.explain(problem, args.config)
    status = 0 if explanation.chosen else 1
    if args.json:
        print(json.dumps(heading | _limit(least, explanation) | _facts(explanation, args.rows), indent=2))
        return status
    print(device_line(device))
    print(explanation)
    if device.kind == "cpu":
        print("  w4gemm gemm times them: the cost model only orders methods on a CPU")
    elif least is not None:
        share = _limit(least, explanation)["predicted_share"]
        reached = "" if share is None else f"; the choice is predicted to reach {share:.0%} of that"
        launched = f"{least.limit_us:.1f} us with a launch"
        print(f"  roofline: {least.us:.1f} us for its {least.bound}, {launched}{reached}")
        if least.sums_us > 0:
            print(f"  scales multiply float32 sums, beside which tensor cores wait: {least.sums_us:.1f} us more")
    if explanation.chosen is None:
        return status
    if m <= choice.WAVES_FROM:
        print(f"  chosen once for {choice.span(*choice.interval_of(m))}")
    else:
        print(f"  chosen for m {problem.m}, of the few configs that serve more than {choice.WAVES_FROM} tokens")
    rows, configs = args.rows or _ROWS, len(explanation.candidates)
    print(f"\n{explanation.table(rows)}")
    if args.rows is None and configs > rows:
        print(f"of {configs} configs; --rows {configs} prints all")
    return status


def _verdict(verdict: choice.Verdict) -> dict[str, Any]:
    return {
        "config": f"{verdict.kernel}/{verdict.config}",
        "legal": verdict.legal,
        "reasons": [verdict.unsupported] if verdict.unsupported else [str(each) for each in verdict.exclusions],
        "rank": verdict.rank or None,
        "predicted_us": _finite(verdict.us) or None,
    }


def _finite(us: float) -> float | None:
    """The predicted time; None of a needless config, which JSON has no number for."""
    return us if math.isfinite(us) else None


def _limit(least: Roofline | None, explanation: choice.Explanation) -> dict[str, Any]:
    """The least time, and which part of the chosen config's predicted time it is with that of a launch."""
    times = {str(each): _finite(each.us) for each in explanation.candidates}
    us = times.get(str(explanation.chosen))
    return {
        "roofline_us": None if least is None else least.us,
        "bound": None if least is None else least.bound,
        "limit_us": None if least is None else least.limit_us,
        "sums_us": None if least is None else least.sums_us,
        "predicted_share": None if least is None or us is None else least.limit_us / us,
    }


def _facts(explanation: choice.Explanation, rows: int | None) -> dict[str, Any]:
    configs = [{"config": str(each), "predicted_us": _finite(each.us)} for each in explanation.candidates[:rows]]
    return {
        "kernels": {name: status.reason for name, status in explanation.status.items()},
        "chosen": None if explanation.chosen is None else str(explanation.chosen),
        "source": explanation.source,
        "configs": configs,
    }
