"""compute-sanitizer over one launch of every kernel x schedule x dense, of experts, gathered x 16-bit, fp8.

    python tests/sanitize_matrix.py [--tools memcheck,racecheck,synccheck,initcheck] [--seconds 540] [--out DIR]

Shapes are small and ragged: several tiles, rings that wrap; "stream" cuts k of tiles, ``+`` is two launches.
The cells come from what the registered kernels call legal, so that a new kernel or schedule is among them. First every
cell runs without the sanitizer, which compiles it; then processes of a few cells each run side by side, as far as the
time reaches. Prints a table, and writes a row a tool for bench/results/sanitizers.jsonl.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

import w4gemm
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import H200, Device, GemmProblem
from w4gemm.tuning import record
from w4gemm.weights.reference import grouped_reference, linear_reference

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
EACH = 6
"""Cells of one process."""
FP8 = torch.float8_e4m3fn
COUNTS = (5, 0, 38, 1, 20)
"""Rows of the experts."""
SHAPES = ((3, 700, 640), (40, 700, 640), (200, 700, 640), (40, 9000, 144))
"""m, n, k; the last has more than a wave of tiles."""
NUMBERS = {
    torch.bfloat16: ("int4_g128", "int4_g32_zfloat_fp16", "nvfp4"),
    FP8: ("int4_g128_e4m3", "int4_g32_zint", "mxfp4"),
}
"""Formats: one of each way to decode and to scale."""
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


class Cell(NamedTuple):
    """One launch."""

    kind: str
    fp8: bool
    format: str
    m: int
    n: int
    k: int
    config: str


def cells() -> list[Cell]:
    """One cell for each kernel, schedule, way to divide k and clusters, for each kind, dtype and format."""
    device = Device.of(torch.device("cuda")) if torch.cuda.is_available() else H200
    found: dict[tuple[object, ...], Cell] = {}
    for kind in ("dense", "experts", "gathered"):
        for dtype, formats in NUMBERS.items():
            for format in formats:
                for m, n, k in SHAPES:
                    for config in _configs(kind, dtype, format, (m, n, k), device):
                        kernel, _, text = config.rpartition("/")
                        c = w4gemm.GemmConfig.parse(text)
                        tail = c.tail is not None
                        if tail == (n < 9000):  # two launches want more than a wave, others take little time
                            continue
                        way = kernel, c.schedule, c.split_k > 1, c.cluster_m > 1, c.cluster_n > 1, tail
                        key = (kind, dtype, format, *way)
                        found.setdefault(key, Cell(kind, dtype == FP8, format, m, n, k, config))
    return list(found.values())


def _configs(kind: str, dtype: torch.dtype, format: str, shape: tuple[int, int, int], device: Device) -> list[str]:
    experts = 0 if kind == "dense" else len(COUNTS)
    layout = "mma8" if dtype == FP8 else "mma16"
    m, n, k = shape
    return w4gemm.configs(
        GemmProblem(
            m,
            *(n, k, dtype, WeightFormat.of(format), layout),
            device=device,
            experts=experts,
            gathered=kind == "gathered",
        )
    )


def launch(cell: Cell) -> None:
    """Run a cell and hold it to the reference. All that is no kernel of ours runs on the CPU."""
    m, n, k = cell.m, cell.n, cell.k
    dtype = FP8 if cell.fp8 else torch.bfloat16
    layout = "mma8" if cell.fp8 else "mma16"
    g = torch.Generator().manual_seed(1)
    w = w4gemm.quantize(torch.randn(n, k, generator=g), cell.format)
    if cell.kind != "dense":
        m = sum(COUNTS)
    x, scale = torch.randn(m, k, generator=g).to(dtype), torch.rand(m, generator=g) + 0.5
    scales = {"token_scale": scale} if cell.fp8 else {}
    on_gpu = {name: t.cuda() for name, t in scales.items()}
    if cell.kind == "dense":
        got = w4gemm.linear(x.cuda(), w.repack(layout).to("cuda"), config=cell.config, **on_gpu)
        wanted = linear_reference(x, w, **scales)
    else:
        several = w4gemm.QuantizedWeight.stack([w] * len(COUNTS), layout=layout).to("cuda")
        offsets = torch.tensor((0, *COUNTS)).cumsum(0).int()
        rows = torch.randperm(m, generator=g) if cell.kind == "gathered" else None
        indices = {} if rows is None else {"indices": rows.cuda()}
        got = w4gemm.grouped_linear(x.cuda(), several, offsets.cuda(), config=cell.config, **indices, **on_gpu)
        if rows is not None:
            x = x.view(torch.uint8).view(m, -1)[rows].view(dtype)
            scales = {name: t[rows] for name, t in scales.items()}
        canonical = w4gemm.QuantizedWeight.stack([w] * len(COUNTS), layout="canonical")
        wanted = grouped_reference(x, canonical, offsets, **scales)
    error = ((got.cpu().double() - wanted).norm() / wanted.norm()).item()
    assert error < 4e-3, f"{cell}: relative error {error}"


class Slice(NamedTuple):
    """Cells that one process runs under one tool."""

    tool: str
    first: int
    cells: int


class Outcome(NamedTuple):
    slice: Slice
    done: int
    """Cells that ran and were right."""
    errors: int | None
    """The tool's count; None without a summary."""
    seconds: float


def command(tool: str, first: int) -> list[str]:
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # initcheck must see other kernels write, the other tools need not look at them
    ours = () if tool == "initcheck" else ("--kernel-name", "kernel_substring=w4gemm")
    api = ("--report-api-errors", "no") if tool in ("memcheck", "initcheck") else ()
    return [found, "--tool", tool, *ours, *api, sys.executable, __file__, "--run", str(first)]


def run(piece: Slice, seconds: float, logs: Path) -> Outcome:
    started, log = time.monotonic(), logs / f"{piece.tool}-{piece.first}.log"
    arguments = [sys.executable, __file__, "--run", str(piece.first)]
    if piece.tool != "none":
        arguments = command(piece.tool, piece.first)
    # PyTorch's allocator would hide accesses past a tensor's end
    environment = {**os.environ, **({} if piece.tool == "none" else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})}
    with log.open("w") as out:
        process = subprocess.Popen(arguments, stdout=out, stderr=out, env=environment, start_new_session=True)
        try:
            process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool and what it runs
            process.wait()
    text = log.read_text(errors="replace")
    summary = SUMMARY.search(text)
    errors = int(summary[1]) if summary else None
    return Outcome(piece, text.count("\nright: "), errors, time.monotonic() - started)


def slices(tools: list[str], count: int) -> Iterator[Slice]:
    for first in range(0, count, EACH):
        for tool in tools:
            yield Slice(tool, first, min(EACH, count - first))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--out", type=Path, default=Path("sanitizer"))
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="print the cells and end")
    given = parser.parse_args()
    every = cells()
    if given.list:
        for cell in every:
            print(cell)
        return
    if given.run is not None:
        print(flush=True)
        for cell in every[given.run : given.run + EACH]:
            launch(cell)
            print(f"right: {cell}", flush=True)
        return
    if not Path(command("memcheck", 0)[0]).exists():
        parser.error("there is no compute-sanitizer in PATH or /usr/local/cuda/bin")
    given.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + given.seconds
    for tools in (["none"], given.tools.split(",")):
        with ThreadPoolExecutor(given.jobs) as pool:
            pieces = list(slices(tools, len(every)))
            outcomes = list(pool.map(lambda piece: run(piece, end - time.monotonic(), given.out), pieces))
        for tool in tools:
            report(tool, [o for o in outcomes if o.slice.tool == tool], given.out)


def report(tool: str, outcomes: list[Outcome], out: Path) -> None:
    wanted, done = sum(o.slice.cells for o in outcomes), sum(o.done for o in outcomes)
    errors = sum(o.errors or 0 for o in outcomes)
    unfinished = sum(o.errors is None for o in outcomes)
    cut = f"{unfinished} of {len(outcomes)} processes without a summary"
    print(f"{tool:10} {done:4} of {wanted} cells right, {errors} findings, {cut}")
    for o in outcomes:
        if tool != "none" and (o.errors or o.done < o.slice.cells):
            found = f"{o.done} of {o.slice.cells} cells, {o.errors} findings, {o.seconds:.0f} s"
            print(f"   {tool}-{o.slice.first}.log: {found}")
    if tool != "none":
        facts = {"kind": "sanitizer", "tool": tool, "part": "tests/sanitize_matrix.py", "products": done}
        row = {**facts, "of": wanted, "kernel_errors": errors, "without_summary": unfinished, **record.facts()}
        record.append(out / "sanitizers.jsonl", row)


if __name__ == "__main__":
    main()
