"""A sample of the cases of tests that are marked ``sampled``, which take more than half of the time of all tests.

A run of everything (``./dev test``) takes the sample, which is another one for each commit; its seed stands in the
report's header. A run that names a file, a folder or a test takes every case (CONTRIBUTING.md says which before a
release).
"""

from __future__ import annotations

import argparse
import functools
import random
import re
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from w4gemm.packing.layouts import layout_named

NEIGHBOURS = 16
"""Tests of the conformance suite that stay together in a shard, because neighbours share compiled kernels."""


class Shard(NamedTuple):
    """One of several parts of all tests."""

    number: int
    """From 1 on."""
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise argparse.ArgumentTypeError(f"wanted I/N with I from 1 to N, like 1/12, got {text!r}")
        return cls(int(found[1]), int(found[2]))

    def of(self, items: Sequence[Any]) -> list[Any]:
        """Return the items of this shard: the conformance suite's last, so that if time runs out among its thousands,
        all others have run."""
        last = [item for item in items if is_conformance(item)]
        first = [item for item in items if not is_conformance(item)]
        return first[self.number - 1 :: self.count] + [
            item for i, item in enumerate(last) if i // NEIGHBOURS % self.count == self.number - 1
        ]

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def is_conformance(item: pytest.Item) -> bool:
    """True for tests of the conformance suite."""
    return "conformance" in item.path.parts


@functools.cache
def seed() -> str:
    """The checkout's commit, in short; where there is no git, the date."""
    found = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return found.stdout.strip() if found.returncode == 0 else time.strftime("%Y-%m-%d", time.gmtime())


def chosen(cases: list[dict[str, Any]], share: float, seed: str) -> list[int]:
    """Return the indices of a sample, a ``share`` of the cases. Each value of each parameter occurs in it, if need be
    with more cases. A parameter that has ``facts`` stands for these."""
    order = random.Random(seed).sample(range(len(cases)), len(cases))
    seen: set[tuple[str, str]] = set()
    first, others = [], []
    for i in order:
        facts = [value.facts if hasattr(value, "facts") else {name: value} for name, value in cases[i].items()]
        values = {(name, str(value)) for fact in facts for name, value in fact.items()}
        (others if values <= seen else first).append(i)
        seen |= values
    return first + others[: max(0, round(share * len(cases)) - len(first))]


def is_sampled(item: pytest.Item) -> bool:
    """False for a case for a GPU, and for one that only sees that its layout cannot hold its format."""
    if item.get_closest_marker("sampled") is None or item.get_closest_marker("gpu") or not hasattr(item, "callspec"):
        return False
    target, format = (item.callspec.params.get(name) for name in ("target", "format"))
    return target is None or format is None or not layout_named(target.layout).supports(format)


def left_out(items: Iterable[pytest.Item], seed: str) -> set[pytest.Item]:
    """Return the cases that do not run."""
    tests: dict[str, list[Any]] = {}
    for item in items:
        if is_sampled(item):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    found: set[pytest.Item] = set()
    for name, cases in tests.items():
        (share,) = cases[0].get_closest_marker("sampled").args
        taken = set(chosen([case.callspec.params for case in cases], share, f"{seed} {name}"))
        found |= {case for i, case in enumerate(cases) if i not in taken}
    return found
