"""Run what needs a GPU and has not run, side by side within a time limit: ``python -m bench.gpu_steps --minutes 10``.

bench/gpu_steps/steps.py has the steps: tests, fuzzing, sanitizers and measurements that a release or a page of docs/
wants. They start in order of worth. A step that measures times has its GPUs to itself; the others share one. A step
that wants a package, a program or a GPU that is not there is left out. Each step writes its log, and its rows as
bench/results keeps them, to a folder of its own below --work; with --out all of them are also packed into one archive,
anew every 25 s.

A folder without git needs its commit in W4GEMM_COMMIT. Exit status: 0 if every chosen step passed, else 1.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.gpu_steps.process import ROOT, Running, pack
from bench.gpu_steps.schedule import next_start
from bench.gpu_steps.steps import STEPS, Step

ARCHIVE = "steps.tgz"
PACKED_EVERY_S = 25
LAST_S = 10
"""Seconds before the end in which no step runs: for the archive and the table."""
TOOLS = "/usr/local/cuda/bin"


class Gpu(NamedTuple):
    id: str
    """Its number, for CUDA_VISIBLE_DEVICES."""
    name: str


class Outcome(NamedTuple):
    """The end of a step."""

    step: Step
    seconds: float
    outcome: str
    last_line: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    steps = chosen(args.only, args.skip)
    if args.list:
        print(_table([[s.name, f"{s.seconds} s", _lane(s), " ".join(s.needs) or "-", s.wanted_by] for s in steps]))
        return 0
    if args.dry_run:
        return dry_run(steps)
    if not (ROOT / ".git").exists() and not os.environ.get("W4GEMM_COMMIT"):
        raise SystemExit(f"W4GEMM_COMMIT: wanted the commit of {ROOT}, where there is no git to ask, got nothing")
    gpus = gpus_here()[: args.gpus]
    if not gpus:
        raise SystemExit("wanted an NVIDIA GPU, nvidia-smi lists none")
    os.environ["PATH"] += os.pathsep + TOOLS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    outcomes = run(steps, gpus, args.minutes * 60, args.work, args.out)
    print("\n" + _table([[o.step.name, f"{o.seconds:.0f} s", o.outcome, o.last_line[:100]] for o in outcomes]))
    return 0 if all(o.outcome == "passed" for o in outcomes) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bench.gpu_steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60, help="for all steps together (default: %(default)s)")
    parser.add_argument("--gpus", type=int, help="use at most so many (default: all)")
    parser.add_argument("--only", metavar="NAME", nargs="+", default=["*"], help="steps like this: fuzz-* engine-*")
    parser.add_argument("--skip", metavar="NAME", nargs="+", default=[], help="no steps like this")
    parser.add_argument(
        "--work", type=Path, metavar="FOLDER", default=ROOT / "build/gpu_steps", help="(default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"for the archive, {ARCHIVE} (default: no archive)")
    parser.add_argument("--list", action="store_true", help="run nothing: print the steps in order of worth")
    parser.add_argument("--dry-run", action="store_true", help="run nothing, on any machine: see that commands parse")
    return parser


def chosen(only: Sequence[str], skip: Sequence[str] = ()) -> list[Step]:
    """Return the steps whose names are like one of ``only`` and like none of ``skip``.

    Raises:
        SystemExit: if a pattern is like no name.
    """
    for pattern in (*only, *skip):
        if not fnmatch.filter([step.name for step in STEPS], pattern):
            raise SystemExit(f"--only, --skip: wanted names that --list prints, or patterns of them, got {pattern}")
    names = {name for pattern in only for name in fnmatch.filter([step.name for step in STEPS], pattern)}
    return [s for s in STEPS if s.name in names and not any(fnmatch.fnmatch(s.name, pattern) for pattern in skip)]


def dry_run(steps: Sequence[Step]) -> int:
    """Print for each step whether its command parses; return 1 if one does not."""
    from bench.gpu_steps.parsing import problem_of  # imports PyTorch, which would take seconds of a run

    problems = 0
    for step in steps:
        problem = problem_of(step)
        problems += bool(problem)
        print(f"{step.name}: {problem or 'parses'}", flush=True)
    return 1 if problems else 0


def gpus_here() -> list[Gpu]:
    """Return the GPUs of this machine, without a CUDA context on any."""
    try:
        listed = subprocess.check_output(["nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    found = [Gpu(*line.split(", ", 1)) for line in listed.splitlines()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else [gpu for gpu in found if gpu.id in visible.split(",")]


def missing(step: Step, gpus: Sequence[Gpu]) -> str:
    """Return what a step needs and this machine lacks, or the empty string."""
    for need in step.needs:
        package = need.isidentifier() and importlib.util.find_spec(need)
        if not (package or shutil.which(need) or (ROOT / need).exists()):
            return f"no {need}"
    if step.gpus > len(gpus):
        return f"wants {step.gpus} GPUs"
    return "" if step.gpu in gpus[0].name else f"for {step.gpu}"


def run(steps: Sequence[Step], gpus: Sequence[Gpu], seconds: float, work: Path, out: Path | None) -> list[Outcome]:
    """Run steps until all have ended or the time is over; return what became of each.

    Args:
        steps: in order of worth.
        work: gets a folder for this run, with a folder for each step, and folders of compiled kernels.
        out: gets the archive; None for no archive.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background, and steps would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    began = packed = time.monotonic()
    end, cores = began + seconds - LAST_S, os.cpu_count() or 1
    folder = work / time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    folder.mkdir(parents=True)
    outcomes = [Outcome(step, 0, f"left out: {why}") for step in steps if (why := missing(step, gpus))]
    waiting = [step for step in steps if not missing(step, gpus)]
    running: list[Running] = []
    try:
        while waiting or running:
            for one in [one for one in running if one.ended()]:
                running.remove(one)
                outcomes.append(Outcome(one.step, one.seconds, one.outcome(), one.last_line()))
                _say(began, f"{one.step.name}: {one.outcome()} after {one.seconds:.0f} s: {one.last_line()}")
            now = time.monotonic()
            for step in [step for step in waiting if step.least_seconds > end - now]:
                waiting.remove(step)
                outcomes.append(Outcome(step, 0, "no time left"))
            while start := next_start(waiting, [one.busy for one in running], [gpu.id for gpu in gpus], cores, now):
                step, limit = start.step, min(start.step.seconds, end - now)
                waiting.remove(step)
                # configs that tests have tuned must not be chosen where times are measured
                kernels = work / ("kernels-of-timed-steps" if step.alone else "kernels")
                running.append(Running(step, start.gpus, folder / step.name, kernels, limit))
                _say(began, f"{step.name} starts on GPU {','.join(start.gpus)}, for {limit:.0f} s at most")
            if now - packed > PACKED_EVERY_S:
                packed = now
                if out:
                    pack(folder, out / ARCHIVE)
                names = ", ".join(one.step.name for one in running)
                _say(began, f"{len(outcomes)} ended, {len(waiting)} wait, {len(running)} run: {names}")
            time.sleep(0.1)
    finally:
        for one in running:
            one.kill()
        if out:
            pack(folder, out / ARCHIVE)
    return outcomes


def _lane(step: Step) -> str:
    return ("alone" if step.alone else "shared") + ("" if step.gpus == 1 else f", {step.gpus} GPUs")


def _say(began: float, text: str) -> None:
    print(f"{time.monotonic() - began:5.0f} s  {text[:200]}", flush=True)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main())
