"""A sample of the cases of tests that are marked ``sampled``, which take more than half of the time of all tests.

A run of everything (``./dev test``, or ``pytest -m gpu`` on a GPU) takes the sample, which is another one for each
commit; its seed stands in the report's header. A run that names a file, a folder or a test takes every case, and so
does one with ``--every-case``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import re
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.layouts import layout_named

NEIGHBOURS = 16
"""Tests of the conformance suite that stay together in a shard, because neighbours share compiled kernels."""

WINDOW = 50
"""Cases of which a sample takes the one that covers most."""


class Shard(NamedTuple):
    """One of several parts of all tests."""

    number: int
    """From 1 on."""
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise argparse.ArgumentTypeError(f"wanted I/N with I from 1 to N, like 1/12, got {text!r}")
        return cls(int(match[1]), int(match[2]))

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
    match = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return match.stdout.strip() if match.returncode == 0 else time.strftime("%Y-%m-%d", time.gmtime())


def chosen(cases: list[dict[str, Any]], share: float, seed: str, pairs: bool = False) -> list[int]:
    """Return the indices of a sample, a ``share`` of the cases.

    Each fact of each parameter occurs in it, and with ``pairs`` any two facts that occur together in a test of three
    or more, if need be with more cases: the next is that of WINDOW which covers most. A format is one fact in pairs,
    else its parts are.
    """
    order = random.Random(seed).sample(range(len(cases)), len(cases))
    covers = []
    for case in cases:
        facts = sorted({fact for name, value in case.items() for fact in _facts(name, value, pairs)})
        covers.append(set(itertools.combinations(facts, 2 if pairs and len(facts) > 2 else 1)))
    covered: set[tuple[tuple[str, str], ...]] = set()
    first: list[int] = []
    others: list[int] = []
    window: list[int] = []
    while order or window:
        window += [order.pop() for _ in range(min(WINDOW - len(window), len(order)))]
        new = {i: len(covers[i] - covered) for i in window}
        others += [i for i in window if not new[i]]
        window = [i for i in window if new[i]]
        if window:
            best = max(window, key=new.__getitem__)
            window.remove(best)
            first.append(best)
            covered |= covers[best]
    return first + others[: max(0, round(share * len(cases)) - len(first))]


def _facts(name: str, value: Any, whole_formats: bool) -> list[tuple[str, str]]:
    """What a sample has to cover of a parameter: its ``facts``, the fields of an epilogue, a config or a format, or
    itself."""
    if isinstance(value, list):  # of configs
        return [fact for each in value for fact in _facts(name, each, whole_formats)]
    if name == "format" and isinstance(value, str):
        value = WeightFormat.of(value)
    if hasattr(value, "facts"):
        fields = value.facts
    elif isinstance(value, WeightFormat) and not whole_formats:
        fields = {"element": value.element, "zero": value.zero, "scale": value.scale, "group": value.group_size}
    elif isinstance(value, Epilogue):
        fields = value._asdict()
    elif isinstance(value, str) and _is_config(value):
        fields = vars(GemmConfig.parse(value.rpartition("/")[2]))
    else:
        fields = {name: value}
    return [(key, str(field)) for key, field in fields.items()]


def _is_config(text: str) -> bool:
    return re.fullmatch(r"(\w+/)?\d+x\d+x\d+_\d+x\d+x1_\w+(\+\S+)?", text) is not None


def is_sampled(item: pytest.Item) -> bool:
    """False for a case that only sees that its layout cannot hold its format."""
    if item.get_closest_marker("sampled") is None or not hasattr(item, "callspec"):
        return False
    target, format = (item.callspec.params.get(name) for name in ("target", "format"))
    return target is None or format is None or not layout_named(target.layout).supports(format)


def left_out(items: Iterable[pytest.Item], seed: str) -> set[pytest.Item]:
    """Return the cases that do not run. Cases for a GPU are sampled apart from those for CPUs, and by pairs. Tests of a
    file with the same cases have the same sample, since they launch the same kernels and each kernel is compiled."""
    tests: dict[tuple[str, bool], list[Any]] = {}
    for item in items:
        if is_sampled(item):
            on_gpu = item.get_closest_marker("gpu") is not None
            tests.setdefault((item.nodeid.partition("[")[0], on_gpu), []).append(item)
    unsampled: set[pytest.Item] = set()
    for (name, on_gpu), cases in tests.items():
        (share,) = cases[0].get_closest_marker("sampled").args
        params = [case.callspec.params for case in cases]
        file, names = name.partition("::")[0], ",".join(sorted(params[0]))
        sample = set(chosen(params, share, f"{seed} {file} {names}", pairs=on_gpu))
        unsampled |= {case for i, case in enumerate(cases) if i not in sample}
    return unsampled
