"""Run the tests and measurements that need a GPU, one after another: ``python -m bench.gpu_steps --minutes 60``.

Each step writes its log, and its rows as bench/results keeps them, to a folder of its own below build/gpu_steps. A step
that needs a package, a program or a GPU that is not there is left out. Exit status: 0 if every chosen step passed.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 5
"""Seconds between the interrupt that ends a step and the kill."""


@dataclass(frozen=True)
class Step:
    """One command line.

    Attributes:
        command: begins with python. ``{rows}`` stands for the file of its rows, ``{folder}`` for its folder.
        seconds: it is ended after so long.
        rows: name of the file in bench/results that its rows belong to.
        needs: Python packages and programs without which it is left out.
        gpus: number of GPUs that it needs.
    """

    name: str
    command: str
    seconds: int
    rows: str
    needs: tuple[str, ...] = ()
    gpus: int = 1


_PEERS = ("humming", "vllm")
_FP4 = "--format mxfp4,nvfp4 --dtype bfloat16,float8_e4m3fn"
_ENGINE = "python -m bench.engine --out {rows} --logs {folder}"
STEPS = (
    # a release
    Step("tests", "python -m pytest -q -m gpu -n 15 --record {rows}", 720, "tests.jsonl", needs=("xdist",)),
    Step(
        "tests-of-every-case",
        "python -m pytest -q -m gpu --every-case -n 15 --record {rows}",
        1200,
        "tests.jsonl",
        needs=("xdist",),
    ),
    Step(
        "tests-of-time",
        "python -m pytest -q -m gpu --record {rows} tests/test_ops.py::test_a_warm_call_costs_little",
        60,
        "tests.jsonl",
    ),
    Step(
        "tests-of-two-gpus",
        "python -m torch.distributed.run --nproc-per-node 2 tests/two_gpus.py --json {rows}",
        240,
        "parallel.jsonl",
        needs=("transformers",),
        gpus=2,
    ),
    Step(
        "fuzz",
        "python -m fuzz.run --device cuda --seconds 200 --processes 16 --weights 6 --problems 48 --json {rows}",
        320,
        "fuzz.jsonl",
    ),
    Step("fuzz-experts", "python -m fuzz.experts --device cuda --count 20000 --json {rows}", 900, "fuzz.jsonl"),
    Step("repeat", "python tests/repeat.py --processes 14 --seconds 280 --json {rows}", 320, "fuzz.jsonl"),
    Step("load", "python tests/load.py --device cuda --seconds 60 --json {rows}", 240, "fuzz.jsonl"),
    Step(
        "sanitize",
        "python tests/sanitize_matrix.py --jobs 12 --seconds 560 --out {folder}",
        600,
        "sanitizers.jsonl",
        needs=("compute-sanitizer",),
    ),
    # the pages of benchmarks
    Step("products", "python -m bench.run --out {rows}", 1800, "times.jsonl", needs=_PEERS),
    Step("products-fp4", f"python -m bench.run {_FP4} --out {{rows}}", 560, "fp4.jsonl", needs=_PEERS),
    Step("experts", "python -m bench.grouped --out {rows}", 1800, "grouped.jsonl", needs=_PEERS),
    Step(
        "experts-fp4",
        f"python -m bench.grouped {_FP4} --shapes fp4-moe --tokens 1,16,64,128,512 --routing balanced,zipf "
        "--seconds 370 --out {rows}",
        400,
        "grouped_fp4.jsonl",
        needs=_PEERS,
    ),
    Step("unknown", "python -m bench.unknown --every 4 --configs 8 --seconds 450 --out {rows}", 500, "unknown.jsonl"),
    Step(
        "engine",
        f"{_ENGINE} --model llama-3-8b --format gptq-int4-g128 ct-int4-g128-fp8 --impl default w4gemm --seconds 550",
        600,
        "engine.jsonl",
        needs=("vllm",),
    ),
    Step(
        "engine-experts",
        f"{_ENGINE} --model qwen3-30b-a3b=ct-int4-g128 gpt-oss-20b=mxfp4 --impl default w4gemm --seconds 550",
        600,
        "engine.jsonl",
        needs=("vllm",),
    ),
    Step(
        "sglang",
        "python -m bench.engine.sglang --model llama-3-8b qwen3-30b-a3b=ct-int4-g128 --out {rows}",
        300,
        "sglang.jsonl",
        needs=("sglang",),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.gpu_steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60, help="for all steps together (default: %(default)s)")
    parser.add_argument("--only", metavar="NAME", nargs="+", default=["*"], help="steps like this: tests-* fuzz")
    parser.add_argument(
        "--work",
        type=Path,
        metavar="FOLDER",
        default=ROOT / "build/gpu_steps",
        help="gets logs and rows (default: %(default)s)",
    )
    parser.add_argument("--list", action="store_true", help="print the steps and run nothing")
    args = parser.parse_args(argv)
    steps = chosen(args.only)
    if args.list:
        print("\n".join(f"{step.name:18} {step.seconds:5} s  {step.command}" for step in steps))
        return 0
    gpus = gpu_names()
    if not gpus:
        raise SystemExit("nvidia-smi lists no NVIDIA GPU")
    if not (ROOT / ".git").exists() and not os.environ.get("W4GEMM_COMMIT"):
        raise SystemExit(f"W4GEMM_COMMIT: expected the commit of {ROOT}, which has no git folder")
    end, outcomes = time.monotonic() + 60 * args.minutes, {}
    for step in steps:
        outcomes[step.name] = missing(step, gpus) or run(step, args.work / step.name, end - time.monotonic())
        print(f"{step.name}: {outcomes[step.name]}", flush=True)
    return 0 if set(outcomes.values()) == {"passed"} else 1


def chosen(patterns: Sequence[str]) -> list[Step]:
    """Return the steps whose names match one of the patterns.

    Raises:
        SystemExit: if a pattern matches no name.
    """
    for pattern in patterns:
        if not fnmatch.filter([step.name for step in STEPS], pattern):
            raise SystemExit(f"--only: expected names that --list prints, got {pattern}")
    return [step for step in STEPS if any(fnmatch.fnmatch(step.name, pattern) for pattern in patterns)]


def gpu_names() -> list[str]:
    """Return the names of this machine's GPUs, without a CUDA context."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.check_output(query, text=True).splitlines()
    return []


def missing(step: Step, gpus: Sequence[str]) -> str:
    """Return why the step is left out on this machine, or the empty string."""
    lacking = [n for n in step.needs if not (shutil.which(n) or (n.isidentifier() and importlib.util.find_spec(n)))]
    if lacking:
        return f"left out: no {lacking[0]}"
    return f"left out: needs {step.gpus} GPUs" if step.gpus > len(gpus) else ""


def run(step: Step, folder: Path, seconds: float) -> str:
    """Run a step for at most so many seconds; return its outcome."""
    seconds = min(step.seconds, seconds)
    if seconds < GRACE_S:
        return "no time left"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT / part) for part in ("src", "tests", ".")]
    # configs that tests have tuned must not be chosen where times are measured
    kernels = folder.parent / ("kernels" if " bench." in step.command else "kernels-of-tests")
    environment = {"W4GEMM_CACHE_DIR": str(kernels.resolve())} | os.environ
    environment |= {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    words = shlex.split(step.command.format(folder=folder, rows=folder / step.rows))[1:]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    late = False
    try:
        process.wait(seconds - GRACE_S)
    except subprocess.TimeoutExpired:
        late = True
        process.send_signal(signal.SIGINT)  # it prints what it has
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if late:
        return "ran out of time"
    return f"failed with exit status {process.returncode}" if process.returncode else "passed"


if __name__ == "__main__":
    sys.exit(main())
