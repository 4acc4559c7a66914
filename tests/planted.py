"""Plant faults in a copy of the sources, one at a time, and see whether the tests find them.

    PYTHONPATH=src:tests python tests/planted.py [--jobs 2] [--json bench/results/planted.jsonl]
    PYTHONPATH=src:tests python tests/planted.py --only NAME [--only NAME ...]

A fault is a small mistake as a programmer makes it: tests/planted_faults/ lists them, each with the tests, or the
slice of the fuzzer, that should catch it. One that is caught makes them fail. Before, the same commands run on an
unchanged copy, where they must pass; --no-whole leaves that out. A command that runs past --seconds is LATE: it has
caught nothing, because a busy machine makes it late too. Run that fault again, with more seconds or fewer jobs.

Exit status: 0, or 1 if a fault was not caught or its command was late, or a command failed or was late without one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from planted_faults import FAULTS, Fault
from w4gemm.tuning import record

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("src", "tests", "bench", "pyproject.toml")
FUZZ = ("-m", "fuzz.run", "--wrong", "1", "--weights", "2", "--seed", "7")
LENGTH = ("--variants", "400", "--seconds", "280")
"""Length of a slice of the fuzzer."""


class Outcome(NamedTuple):
    """The end of a command in a copy."""

    passed: bool | None
    """None if it did not end in time."""
    said: str
    """The reason why it failed, in a line."""
    seconds: float


def planted(fault: Fault, folder: Path) -> None:
    """Put a fault into the copy in a folder."""
    file = folder / fault.file
    text = file.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.old!r} occurs {text.count(fault.old)} times in {fault.file}, wanted 1")
    file.write_text(text.replace(fault.old, fault.new))


def command(by: str) -> list[str]:
    """Return the command of tests or, from ``fuzz`` on, of a slice of the fuzzer."""
    first, *rest = by.split()
    if first == "fuzz":
        return [sys.executable, *FUZZ, *LENGTH, "--device", "cpu", *rest]
    return [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", first, *rest]


def run(by: str, fault: Fault | None, seconds: float) -> Outcome:
    """Run a command in a copy of its own, with a fault or without."""
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder = Path(name)
        for part in COPIED:
            if (ROOT / part).is_dir():
                skipped = shutil.ignore_patterns("__pycache__", "results")
                shutil.copytree(ROOT / part, folder / part, ignore=skipped)
            else:
                shutil.copy(ROOT / part, folder / part)
        if fault is not None:
            planted(fault, folder)
        (folder / "cache").mkdir(mode=0o700)
        paths = os.pathsep.join(str(folder / part) for part in ("src", "tests", "."))
        before = os.environ.get("PYTHONPATH")
        environment = os.environ | {
            "PYTHONPATH": paths + (os.pathsep + before if before else ""),
            "W4GEMM_CACHE_DIR": str(folder / "cache"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        started = time.monotonic()
        process = subprocess.Popen(
            command(by),
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the processes that it started too
            process.communicate()
            return Outcome(None, f"did not end in {seconds:.0f} s", seconds)
        # pytest: 1 if tests failed, more if none could run
        if process.returncode not in (0, 1):
            return Outcome(False, f"exit status {process.returncode}: {output[-600:]}", time.monotonic() - started)
        return Outcome(process.returncode == 0, reason(output), time.monotonic() - started)


def reason(output: str) -> str:
    """Return the line of an output that says what failed; the empty string if there is none."""
    match = re.search(r"^(FAILED .*|ERROR .*|\d+:\d+:\d+.*|\d+:\d+: .*)$", output, re.MULTILINE)
    return match[1][:240] if match else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="side by side (1)")
    parser.add_argument("--seconds", type=float, default=300, help="for each command (300)")
    parser.add_argument("--only", metavar="NAME", action="append", help="a fault by its name")
    parser.add_argument("--no-whole", action="store_true", help="do not run the commands without a fault first")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a JSON line for each fault")
    args = parser.parse_args()
    faults = [fault for fault in FAULTS if not args.only or fault.name in args.only]
    right, words = True, Counter[str]()
    with ThreadPoolExecutor(args.jobs) as pool:
        commands = [] if args.no_whole else sorted({fault.by for fault in faults})
        whole = pool.map(lambda by: run(by, None, args.seconds), commands)
        for by, outcome in zip(commands, whole, strict=True):
            if not outcome.passed:
                right = False
                print(
                    f"{'late' if outcome.passed is None else 'fails'} without a fault: {by}: {outcome.said}", flush=True
                )
        facts = record.facts()
        outcomes = pool.map(lambda f: run(f.by, f, args.seconds), faults)
        for fault, outcome in zip(faults, outcomes, strict=True):
            word = {False: "caught", True: "NOT CAUGHT", None: "LATE"}[outcome.passed]
            words[word] += 1
            print(f"{word:10} {outcome.seconds:4.0f} s  {fault.name}: {fault.by}: {outcome.said}", flush=True)
            if args.json:
                caught = None if outcome.passed is None else not outcome.passed
                row = {"kind": "planted", "fault": fault.name, "file": fault.file, "by": fault.by}
                record.append(args.json, row | {"caught": caught, "said": outcome.said[:160]} | facts)
    print(f"{len(faults)} faults: {words['caught']} caught, {words['NOT CAUGHT']} not caught, {words['LATE']} late")
    return 0 if right and words["caught"] == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
