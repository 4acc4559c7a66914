"""Count what a kernel does with its cycles: ``python -m bench.counters --shapes 8192x8192,128x1536x2048 --m 1,32``.

Runs w4gemm's own choice for each layer (n x k, or experts x n x k with m tokens each) under NVIDIA's ncu, with cold
caches and the clock as it is, and prints for each product

- its time under ncu, which is some per cent longer than in a CUDA graph;
- percent of what the GPU can do: DRAM, issue slots while a warp is there, the ALU, the FMA pipe's half-precision part,
  the uniform pipe, tensor cores, reads and writes of shared memory, what multiprocessors receive from L2;
- of all samples of warps, the share that a reason accounts for: ``mbarrier``, consumers wait for a stage to be filled
  or the producer for one to be empty, told apart from ``loads`` by where it happens; ``gmma``, the wait for WGMMA;
  ``selected``, an instruction was issued.

Rows go to bench/results/counters.jsonl. Products of two launches (a config with a tail) are left out.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench.options import add_formats, add_out, command, counts, dtypes, typed
from bench.peers.base import FP8, token_scales
from bench.run import random_weight

from w4gemm import QuantizedWeight, WeightFormat, choice, grouped_linear, linear
from w4gemm.core.epilogue import PLAIN
from w4gemm.core.problem import Device
from w4gemm.packing.layouts import layout_for
from w4gemm.tuning import record

RESULTS = Path(__file__).parent / "results/counters.jsonl"
_SECTIONS = (
    "SpeedOfLight",
    "SchedulerStats",
    "WarpStateStats",
    "InstructionStats",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "SourceCounters",
    "LaunchStats",
)
_PERCENT = {
    "dram": "dram__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "alu": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "half": "sm__inst_executed_pipe_fma_type_fp16.avg.pct_of_peak_sustained_active",
    "uniform": "sm__inst_executed_pipe_uniform.avg.pct_of_peak_sustained_active",
    "tensor": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "shared_reads": "l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed",
    "shared_writes": "l1tex__data_bank_writes.avg.pct_of_peak_sustained_elapsed",
    "from_l2": "l1tex__m_xbar2l1tex_read_sectors.avg.pct_of_peak_sustained_elapsed",
}
"""Percentages by ncu's name of the metric."""
_TIME, _SAMPLES, _INSTRUCTIONS = "gpu__time_duration.sum", "smsp__pcsamp_sample_count", "smsp__inst_executed.sum"
_STALL = re.compile(r"smsp__pcsamp_warps_issue_stalled_(\w+)(?<!_not_issued)$")
_REASONS = {"warpgroup_arrive": "gmma", "long_scoreboard": "loads", "math_pipe_throttle": "math_pipe"}
"""Other names for ncu's reasons."""
_MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
_LEAST_SHARE = 0.005


class Layer(NamedTuple):
    experts: int
    """0 for a dense layer."""
    n: int
    k: int


class Product(NamedTuple):
    """One launch that is looked at."""

    experts: int
    n: int
    k: int
    m: int
    """Tokens, of each expert if there are any."""
    format: str
    dtype: str

    def __str__(self) -> str:
        sizes = "x".join(str(size) for size in (self.experts, self.n, self.k) if size)
        return f"{sizes}, m {self.m}, {self.format}, {self.dtype} x"


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.counters", __doc__)
    parser.add_argument("--shapes", type=typed(shapes), default="8192x8192", help="layers (default: %(default)s)")
    parser.add_argument("--m", type=typed(counts), default="32,64", help="tokens (default: %(default)s)")
    add_formats(parser)
    parser.add_argument("--dtype", type=typed(dtypes), default="bfloat16", help="of x (default: %(default)s)")
    parser.add_argument("--config", help="a config to force, instead of the choice")
    parser.add_argument("--ncu", default=shutil.which("ncu") or "ncu", help="the program (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="also keep ncu's report, FILE.ncu-rep")
    add_out(parser, RESULTS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        run_products(args.child)
        return
    each = itertools.product(args.shapes, args.m, args.format, args.dtype)
    products = [Product(*sizes, m, str(format), str(dtype).removeprefix("torch.")) for sizes, m, format, dtype in each]
    facts = record.facts()
    with tempfile.TemporaryDirectory() as folder:
        task, report = Path(folder) / "products.json", args.keep or Path(folder) / "report"
        task.write_text(json.dumps({"products": products, "config": args.config}))
        profile(args.ncu, task, report)
        configs = json.loads(task.with_suffix(".configs").read_text())
        found = zip(products, configs, of_report(args.ncu, report), strict=True)
        common = {"kind": "counters", "run": record.run_name(facts)}
        rows = [common | product._asdict() | {"config": config} | counted for product, config, counted in found]
    record.append(args.out, *(row | facts for row in rows))
    for product, row in zip(products, rows, strict=True):
        print(f"{product}: {text(row)}", flush=True)


def shapes(text: str) -> tuple[Layer, ...]:
    """Return comma-separated layers; experts are 0 for n x k alone.

    Raises:
        ValueError: for anything else.
    """
    found = []
    for part in text.split(","):
        sizes = part.split("x")
        if not (all(size.isdecimal() and int(size) for size in sizes) and len(sizes) in (2, 3)):
            raise ValueError(f"wanted layers like 8192x8192 or, of experts, 128x1536x2048, got {part!r}")
        found.append(Layer(*([0] * (3 - len(sizes))), *map(int, sizes)))
    return tuple(found)


def profile(ncu: str, task: Path, report: Path) -> None:
    """Run the products of ``task`` under ncu.

    Raises:
        SystemExit: if that fails; with what was printed.
    """
    if not shutil.which(ncu):
        sys.exit(f"bench.counters: there is no program {ncu!r}; it comes with CUDA, as nsight-compute")
    sections = [word for section in _SECTIONS for word in ("--section", section)]
    words = [ncu, "--profile-from-start", "off", "--clock-control", "none", *sections, "-f", "-o", str(report)]
    words += [sys.executable, "-m", "bench.counters", "--child", str(task)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bench.counters: {ncu} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}")


def run_products(task: Path) -> None:
    """Launch each product once while ncu looks, behind two launches while it does not. Writes their configs."""
    given, configs = json.loads(task.read_text()), []
    for product in (Product(*fields) for fields in given["products"]):
        call, config = prepared(product, given["config"])
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        configs.append(config)
    task.with_suffix(".configs").write_text(json.dumps(configs))


def prepared(product: Product, config: str | None) -> tuple[Callable[[], object], str]:
    """Return a call of a product on the GPU, and the config that it runs.

    Raises:
        SystemExit: if that is two launches.
    """
    format, dtype = WeightFormat.parse(product.format), getattr(torch, product.dtype)
    w = random_weight(product.n, product.k, format, [dtype])
    w = w.repack(layout_for(Device.of(w.device), format, dtype))
    rows, fp8 = product.m * max(product.experts, 1), dtype == FP8
    x, scales = torch.randn(rows, product.k, device="cuda").to(dtype), token_scales()[:rows] if fp8 else None
    if product.experts:
        w = QuantizedWeight.stack([w] * product.experts)
    offsets = torch.arange(0, rows + 1, product.m, dtype=torch.int32, device="cuda")
    chosen = config or str(choice.plan_for(choice.PlanKey.of(w, rows, dtype, PLAIN._replace(token_scale=fp8))))
    if "+" in chosen:
        sys.exit(f"{product}: {chosen} is two launches; force one of them by --config")
    if product.experts:
        return lambda: grouped_linear(x, w, offsets, token_scale=scales, config=config), chosen
    return lambda: linear(x, w, token_scale=scales, config=config), chosen


def of_report(ncu: str, report: Path) -> Iterator[dict[str, Any]]:
    """Yield what ncu's report says of each kernel."""
    raw, source = (
        subprocess.run(
            [ncu, "--import", f"{report}.ncu-rep", "--page", page, "--csv"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for page in ("raw", "source")
    )
    yield from counted(raw, source)


def counted(raw: str, source: str) -> Iterator[dict[str, Any]]:
    """Yield the numbers of each kernel of ncu's pages ``raw`` and ``source``, in CSV."""
    units, *kernels = csv.DictReader(raw[raw.index('"ID"') :].splitlines())
    codes = source.split('"Kernel Name"')[1:]
    for kernel, code in zip(kernels, codes, strict=True):
        number = {name: float(value.replace(",", "")) for name, value in kernel.items() if _is_number(value)}
        samples = number[_SAMPLES]
        waits = of_mbarriers(list(csv.DictReader(code.split("\n", 1)[1].splitlines()))) / samples
        shares = {name: number[metric] / samples for metric in number if (name := _stall(metric))}
        shares = {"mbarrier": waits, **shares, "loads": shares["loads"] - waits}
        yield {
            "us": round(number[_TIME] * _MICROSECONDS[units[_TIME]], 2),
            "instructions": int(number[_INSTRUCTIONS]),
            "percent": {name: round(number[metric], 1) for name, metric in _PERCENT.items()},
            "share": {
                name: round(share, 3)
                for name, share in sorted(shares.items(), key=lambda found: -found[1])
                if share >= _LEAST_SHARE
            },
        }


def of_mbarriers(code: Sequence[dict[str, str]]) -> float:
    """Samples of warps that wait for an mbarrier: at the branch behind a try of it, for the result.

    Args:
        code: a kernel's instructions in their order, with ncu's samples of each.
    """
    waits, tries = 0.0, False
    for line in code:
        if "SYNCS.PHASECHK" in line["Source"]:
            tries = True
        elif tries and "BRA" in line["Source"]:
            waits, tries = waits + float(line["stall_long_sb"] or 0), False
    return waits


def text(row: dict[str, Any]) -> str:
    """Return a line on a kernel."""
    percent = ", ".join(f"{name} {value:.0f}" for name, value in row["percent"].items())
    share = ", ".join(f"{name} {value:.0%}" for name, value in row["share"].items())
    return f"{row['config']} {row['us']} us; % of peak: {percent}; samples: {share}"


def _stall(metric: str) -> str:
    """Name of the reason that a metric counts samples of; empty if it counts something else."""
    found = _STALL.match(metric)
    return _REASONS.get(found[1], found[1]) if found else ""


def _is_number(value: str) -> bool:
    return bool(re.fullmatch(r"[\d,]+(\.\d+)?", value))


if __name__ == "__main__":
    main()
