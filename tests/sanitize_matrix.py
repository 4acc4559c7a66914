"""compute-sanitizer over the launches of tests/launch_cells.py: every kernel and schedule, and every helper kernel.

    python tests/sanitize_matrix.py [--tools memcheck,racecheck,synccheck,initcheck] [--seconds 540] [--out DIR]
    python tests/sanitize_matrix.py --cells 120:240                 some of them, as --list numbers them

First every cell runs without the sanitizer, which compiles it; then processes of a few cells each run side by side, as
far as the time reaches. A process with a launch that reads past its tensors runs beside them: memcheck must find that.
Prints a table, and writes a row a tool for bench/results/sanitizers.jsonl.

Exit status: 0, or 1 if a tool found something, a result was wrong or a cell did not run.
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
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

import w4gemm
from launch_cells import HELPER_CALLS, Cell, cells, run_cell, run_helper
from w4gemm.tuning import record

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
EACH = 12
"""Cells of one process."""
FAULT = -1
"""Number of the cell whose launch is wrong."""
KERNELS = "kernel_substring=kernel_cutlass"
"""In the names of all our kernels, and in none of PyTorch's."""
_running: set[subprocess.Popen[bytes]] = set()
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def every_cell() -> list[Cell | str]:
    """Return the cells of products, and the names of helpers' calls."""
    return [*cells(), *HELPER_CALLS]


def run_cells(first: int, count: int) -> None:
    """Run cells in this process."""
    if first == FAULT:
        d, weights = torch.zeros(8, 64).bfloat16().cuda(), torch.ones(2, 2).cuda()
        rows = torch.tensor([[0, 1], [2, 10_000]], dtype=torch.int32).cuda()
        w4gemm.combine(d, rows, weights)
        return torch.cuda.synchronize()
    print(flush=True)
    for cell in every_cell()[first : first + count]:
        try:
            run_helper(cell) if isinstance(cell, str) else run_cell(cell)
        except Exception:
            traceback.print_exc(limit=-3)
        else:
            print(f"right: {cell}", flush=True)


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


def command(piece: Slice) -> list[str]:
    ours = [sys.executable, __file__, f"--run={piece.first}:{piece.cells}"]
    if piece.tool == "none":
        return ours
    # initcheck must see other kernels write, the other tools need not look at them
    names = () if piece.tool == "initcheck" else ("--kernel-name", KERNELS)
    api = ("--report-api-errors", "no") if piece.tool in ("memcheck", "initcheck") else ()
    return [_sanitizer(), "--tool", piece.tool, *names, *api, *ours]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the tool and what it runs."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_all(*_: object) -> None:
    """Leave nothing on the GPU when this process is ended, by ``timeout`` for instance."""
    for process in list(_running):
        _kill(process)
    os._exit(1)


def _sanitizer() -> str:
    return shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


def run(piece: Slice, seconds: float, logs: Path) -> Outcome:
    if seconds <= 0:
        return Outcome(piece, 0, None, 0.0)
    started, log = time.monotonic(), logs / f"{piece.tool}-{piece.first}.log"
    # processes of as many threads as there are cores would wait for one another
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if piece.tool != "none":  # PyTorch's allocator would hide accesses past a tensor's end
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    with log.open("w") as out:
        process = subprocess.Popen(command(piece), stdout=out, stderr=out, env=environment, start_new_session=True)
        _running.add(process)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            _kill(process)
        _running.discard(process)
    text = log.read_text(errors="replace")
    summary = SUMMARY.search(text)
    errors = int(summary[1]) if summary else None
    return Outcome(piece, text.count("\nright: "), errors, time.monotonic() - started)


def slices(tools: list[str], first: int, end: int) -> Iterator[Slice]:
    for tool in tools:
        for start in range(first, end, EACH):
            yield Slice(tool, start, min(EACH, end - start))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--cells", default=":", metavar="FIRST:END", help="only these")
    parser.add_argument("--compiled", action="store_true", help="do not run without a tool first, which compiles")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--out", type=Path, default=Path("sanitizer"))
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="print the cells and end")
    args = parser.parse_args()
    if args.run is not None:
        run_cells(*map(int, args.run.split(":")))
        return 0
    every = every_cell()
    if args.list:
        for number, cell in enumerate(every):
            print(number, cell)
        return 0
    if not Path(_sanitizer()).exists():
        parser.error("there is no compute-sanitizer in PATH or /usr/local/cuda/bin")
    start, _, stop = args.cells.partition(":")
    first, end = int(start or 0), min(int(stop or len(every)), len(every))
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, end_all)
    until = time.monotonic() + args.seconds
    right = True
    for tools in ([] if args.compiled else ["none"], args.tools.split(",")):
        pieces = list(slices(tools, first, end))
        if "memcheck" in tools:
            pieces.insert(0, Slice("memcheck", FAULT, 0))
        with ThreadPoolExecutor(args.jobs) as pool:
            outcomes = []
            for outcome in pool.map(lambda piece: run(piece, until - time.monotonic(), args.out), pieces):
                outcomes.append(outcome)
                with (args.out / "outcomes.txt").open("a") as file:
                    print(outcome, file=file)
        for tool in tools:
            right &= report([o for o in outcomes if o.slice.tool == tool and o.slice.first != FAULT], tool, args.out)
        for o in outcomes:
            if o.slice.first == FAULT:
                print(f"the planted fault: {o.errors} findings")
                right &= bool(o.errors)
    return 0 if right else 1


def report(outcomes: list[Outcome], tool: str, out: Path) -> bool:
    """Print a tool's line, and write its row; True if all cells ran and nothing was found."""
    expected, done = sum(o.slice.cells for o in outcomes), sum(o.done for o in outcomes)
    errors = sum(o.errors or 0 for o in outcomes)
    unfinished = 0 if tool == "none" else sum(o.errors is None for o in outcomes)
    cut = f"{unfinished} of {len(outcomes)} processes without a summary"
    longest = max((o.seconds for o in outcomes), default=0.0)
    print(f"{tool:10} {done:4} of {expected} cells right, {errors} findings, {cut}, longest process {longest:.0f} s")
    for o in outcomes:
        if o.errors or o.done < o.slice.cells:
            last = o.slice.first + o.slice.cells
            summary = f"{o.done} of {o.slice.cells} cells, {o.errors} findings, {o.seconds:.0f} s"
            print(f"   cells {o.slice.first}:{last}, {tool}-{o.slice.first}.log: {summary}")
    if tool != "none":
        facts = {"kind": "sanitizer", "tool": tool, "part": "tests/sanitize_matrix.py", "products": done}
        row = {**facts, "of": expected, "kernel_errors": errors, "without_summary": unfinished, **record.facts()}
        record.append(out / "sanitizers.jsonl", row)
    return not errors and not unfinished and done == expected


if __name__ == "__main__":
    sys.exit(main())
