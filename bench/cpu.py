"""The CPU kernel beside torch.nn.functional.linear on the same weight in 16 and 32 bits: ``python -m bench.cpu``.

Calls rotate over copies of the weight that together exceed any cache. Times are medians of the processor time of one
thread, which other programs disturb less than the clock. Rows go to bench/results/cpu.jsonl; those without "clock" were
measured by the clock, with the threads that they name.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from bench.options import command, typed
from bench.shapes import parse_layers, parse_tokens

from w4gemm import choice, linear, quantize
from w4gemm.choice.table import device_facts
from w4gemm.core.problem import Device
from w4gemm.tuning import record

RESULTS = Path(__file__).parent / "results/cpu.jsonl"
_ROTATED_BYTES = 300e6
DTYPES = (torch.float32, torch.bfloat16)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.cpu", __doc__)
    parser.add_argument(
        "--shapes", type=typed(parse_layers), default="4096x4096", help="as of bench.run (default: %(default)s)"
    )
    parser.add_argument(
        "--m", type=typed(parse_tokens), default="1,16,256", help="as of bench.run (default: %(default)s)"
    )
    parser.add_argument("--format", default="int4_g128", help="of the weights (default: %(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    processor, threads = device_facts(Device("cpu"))
    facts = record.facts() | {"processor": processor, "threads": threads}
    print(f"{processor}, {threads} threads; microseconds a call, and the speed over the dense weight in x's dtype")
    for n, k in args.shapes:
        dense = torch.randn(n, k) * 0.02
        weight = quantize(dense, args.format).repack()
        copies = [
            replace(weight, tensors=tuple(t.clone() for t in weight.tensors)) for _ in range(_copies(weight.nbytes))
        ]
        for dtype in DTYPES:
            plain = dense.to(dtype)
            plains = [plain.clone() for _ in range(_copies(plain.nbytes))]
            for m in args.m:
                x = torch.randn(m, k).to(dtype)
                calls = [functools.partial(linear, x, w) for w in copies]
                calls_dense = [functools.partial(torch.nn.functional.linear, x, w) for w in plains]
                ours, theirs = medians_us([calls, calls_dense])
                plan = choice.plan_for(choice.PlanKey.of(weight, m, dtype))
                row = {"kind": "cpu", "run": record.run_name(facts), "m": m, "n": n, "k": k, "format": args.format}
                row |= {"dtype": str(dtype).removeprefix("torch."), "config": str(plan)}
                row |= {"us": round(ours, 1), "dense_us": round(theirs, 1), "clock": "processor"}
                record.append(RESULTS, row | facts)
                print(
                    f"{n}x{k}, m {m}, {row['dtype']}: {ours:.0f}, dense {theirs:.0f} us: {theirs / ours:.2f}",
                    flush=True,
                )


def medians_us(variants: Sequence[Sequence[Callable[[], object]]]) -> list[float]:
    """Return the processor time of a call of each variant, measured in turn. Each has calls of equal work."""
    times: list[list[float]] = [[] for _ in variants]
    for i in range(22):
        for calls, samples in zip(variants, times, strict=True):
            started = time.process_time()
            calls[i % len(calls)]()
            samples.append(1e6 * (time.process_time() - started))
    return [statistics.median(samples[1:]) for samples in times]  # the first call chooses and compiles


def _copies(size: int) -> int:
    return max(2, int(_ROTATED_BYTES // size))


if __name__ == "__main__":
    main()
