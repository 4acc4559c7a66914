"""Kill processes that write to the cache folder at random moments, and look at what they leave.

    PYTHONPATH=src:tests python tests/killed.py --kills 500 --json bench/results/fuzz.jsonl

No record is lost but the one that was being written, no damaged object is read and no older one comes back, and the
next writer finds no lock.

Exit status: 0, or 1 with the reason and the seed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from test_table import record
from w4gemm.choice import table
from w4gemm.choice.table import parse_lines
from w4gemm.jit import disk

NAME = "toy-sm_90a-0123-4567.o"


class Lost(AssertionError):
    """A record or an object is lost or damaged, or a writer did not die."""


def killed(write: Callable[[int], None], first: int, r: random.Random) -> int:
    """Run write(first), write(first + 1), ... in a process that is killed some ms after it began; return how many were
    done."""
    reader, writer = os.pipe()

    def work() -> None:
        os.write(writer, b"here")
        for i in range(first, first + 10**6):
            write(i)
            os.write(writer, struct.pack("<i", i))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    os.close(writer)
    os.read(reader, 4)  # a busy machine may take longer to begin than the writes do
    time.sleep(r.uniform(0, 0.03))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(20)
    if process.exitcode != -signal.SIGKILL:
        raise Lost(f"a writer ended with {process.exitcode}")
    data = b""
    while piece := os.read(reader, 1 << 16):
        data += piece
    os.close(reader)
    return len(data) // 4


def records(kills: int, seed: int) -> int:
    """Kill writers of tuning records; return how many records were written."""
    path, made, done, first = table.user_path(), record(), list[int](), 1
    assert path is not None
    r = random.Random(seed)
    for _ in range(kills):
        count = killed(lambda i: table.append(path, [replace(made, us=float(i))]), first, r)
        done += range(first, first + count)
        first += count + 1  # the record that may be written, and was not told of, has a number of its own
    table.append(path, [replace(made, us=0.5)])  # no lock is left
    actual, bad = parse_lines(path.read_text().splitlines())
    times = [one.us for one in actual]
    if lost := {*map(float, done), 0.5} - set(times):
        raise Lost(f"{len(lost)} of {len(done)} records are lost, the first {min(lost):g}")
    if len(bad) > kills or len(times) != len(set(times)):
        raise Lost(f"{len(bad)} lines are damaged, {len(times) - len(set(times))} came twice")
    return len(done)


def objects(kills: int, seed: int) -> int:
    """Kill writers of compiled objects; return how many were written."""
    r, total = random.Random(seed), 0
    for _ in range(kills):
        count = killed(lambda i: disk.write(NAME, struct.pack("<i", i) * 50_000), total + 1, r)
        actual = disk.read(NAME)
        if actual is None:
            if total + count:
                raise Lost(f"object {total + count} is lost")
            continue
        number = struct.unpack("<i", actual[:4])[0]
        if actual != struct.pack("<i", number) * 50_000:
            raise Lost(f"a damaged object was read, by its first bytes {number}")
        if number not in (total + count, total + count + 1):
            raise Lost(f"object {number} came back, {total + count} were written")
        total += count
    return total


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500, help="of each kind of writer (500)")
    parser.add_argument("--seed", type=int, help="of the moments (drawn)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the counts to FILE as a JSON line")
    args = parser.parse_args(arguments)
    seed = random.randrange(10**6) if args.seed is None else args.seed
    started, written, problem = time.monotonic(), {}, ""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["W4GEMM_CACHE_DIR"] = folder
        try:
            for kind in (records, objects):
                written[kind.__name__] = kind(args.kills, seed)
        except Lost as e:
            problem = str(e)
    print(f"{args.kills} kills of each, {written}, {problem or 'nothing lost'}, seed {seed}")
    if args.json:
        from w4gemm.tuning import record as facts_of

        facts = facts_of.facts()
        row = {"kind": "killed", "run": facts_of.run_name(facts), "kills": args.kills, "written": written}
        row |= {"problem": problem, "seed": seed, "seconds": round(time.monotonic() - started)}
        facts_of.append(args.json, row | facts)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
