"""A sample of a test's cases leaves out no value of any parameter."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import _sample_seed
from sample import chosen

CASES = [{"target": t, "format": f, "n": n} for t, f, n in itertools.product("abcd", range(30), (7, 130))]
ALONE = [{"target": "a", "config": str(i)} for i in range(20)]


def test_every_value_occurs() -> None:
    for seed in map(str, range(20)):
        found = chosen(CASES, 0.25, seed)
        assert len(found) == len(set(found)) == len(CASES) / 4
        for name in ("target", "format", "n"):
            assert {CASES[i][name] for i in found} == {case[name] for case in CASES}, name
    assert len(chosen(ALONE, 0.25, "0")) == len(ALONE), "each has a config of its own"


def test_seeds_give_other_cases_until_all_have_run() -> None:
    assert chosen(CASES, 0.25, "a") == chosen(CASES, 0.25, "a")
    assert set().union(*(chosen(CASES, 0.25, str(seed)) for seed in range(40))) == set(range(len(CASES)))


@pytest.mark.parametrize(
    ("source", "options", "whole"),
    [
        ("TESTPATHS", {}, False),
        ("ARGS", {}, True),
        ("TESTPATHS", {"-m": "gpu"}, True),
        ("TESTPATHS", {"-k": "a"}, True),
    ],
)
def test_a_run_that_names_what_it_wants_takes_every_case(source: str, options: dict[str, str], whole: bool) -> None:
    config: Any = SimpleNamespace(args_source=pytest.Config.ArgsSource[source], getoption=options.get)
    assert (_sample_seed(config) is None) == whole
    worker: Any = SimpleNamespace(workerinput={"sample": _sample_seed(config)})
    assert _sample_seed(worker) == _sample_seed(config)
