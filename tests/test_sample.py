"""A sample of a test's cases leaves out no value of any parameter."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import _sample_seed
from sample import chosen, left_out
from w4gemm.core.epilogue import Epilogue

CASES = [{"target": t, "format": f, "n": n} for t, f, n in itertools.product("abcd", range(30), (7, 130))]
ALONE = [{"target": "a", "config": str(i)} for i in range(20)]


@dataclass(eq=False)
class Item:
    """What a sample reads of a pytest.Item."""

    nodeid: str
    callspec: Any
    get_closest_marker: Any


def test_every_value_occurs() -> None:
    for seed in map(str, range(20)):
        actual = chosen(CASES, 0.25, seed)
        assert len(actual) == len(set(actual)) == len(CASES) / 4
        for name in ("target", "format", "n"):
            assert {CASES[i][name] for i in actual} == {case[name] for case in CASES}, name
    assert len(chosen(ALONE, 0.25, "0")) == len(ALONE), "each has a config of its own"


def test_any_two_values_of_two_parameters_occur_in_pairs() -> None:
    cases = [dict(zip("abcd", values, strict=True)) for values in itertools.product(range(5), repeat=4)]
    for seed in map(str, range(5)):
        sample = [cases[i] for i in chosen(cases, 0.01, seed, pairs=True)]
        assert len(sample) < 2 * 25, "25 cases are the fewest"
        for one, other in itertools.combinations("abcd", 2):
            assert {(case[one], case[other]) for case in sample} == set(itertools.product(range(5), repeat=2))


def test_epilogues_configs_and_formats_stand_for_their_fields() -> None:
    epilogues = [
        Epilogue(None, alpha, bias, residual) for alpha in (None, "host") for bias in (0, 1) for residual in (0, 1)
    ]
    assert len(chosen([{"epilogue": e} for e in epilogues], 0, "0")) < len(epilogues)
    sizes = itertools.product((16, 32, 64), (64, 128), (1, 2))
    configs = [{"config": f"sm90_decode/{m}x{n}x128_1x1x1_coop_k{split}"} for m, n, split in sizes]
    sample = [configs[i]["config"] for i in chosen(configs, 0, "0")]
    assert len(sample) < len(configs)
    assert {config[12:14] for config in sample} == {"16", "32", "64"}
    several = [{"configs": list(some)} for some in itertools.combinations([c["config"] for c in configs], 3)]
    assert len(chosen(several, 0, "0")) < len(configs), "lists of configs stand for all fields of theirs"
    formats = [{"format": f"{element}_g{size}"} for element in ("int3", "int4", "e2m1") for size in (32, 64, 128)]
    assert len(chosen(formats, 0, "0")) < len(formats) == len(chosen(formats, 0, "0", pairs=True))


def test_tests_with_the_same_cases_have_the_same_sample() -> None:
    """Their kernels are compiled once. Those of another file or with other parameters have their own."""

    def items(test: str) -> list[Any]:
        marks = {"sampled": SimpleNamespace(args=(0.25,))}.get
        return [
            Item(f"{test}[{i}]", SimpleNamespace(params={"kernel": case["target"], "n": case["n"]}), marks)
            for i, case in enumerate(CASES)
        ]

    tests = {test: items(test) for test in ("a.py::one", "a.py::two", "b.py::one")}
    outside = left_out(itertools.chain.from_iterable(tests.values()), "0")
    samples = [{item.nodeid.split("[")[1] for item in cases if item not in outside} for cases in tests.values()]
    assert samples[0] == samples[1] != samples[2]


def test_seeds_give_other_cases_until_all_have_run() -> None:
    assert chosen(CASES, 0.25, "a") == chosen(CASES, 0.25, "a")
    assert set().union(*(chosen(CASES, 0.25, str(seed)) for seed in range(40))) == set(range(len(CASES)))


@pytest.mark.parametrize(
    ("source", "options", "whole"),
    [
        ("TESTPATHS", {}, False),
        ("ARGS", {}, True),
        ("TESTPATHS", {"-m": "gpu"}, False),
        ("TESTPATHS", {"-m": "gpu", "--every-case": True}, True),
        ("TESTPATHS", {"-m": "not gpu"}, True),
        ("TESTPATHS", {"-k": "a"}, True),
    ],
)
def test_a_run_that_names_what_it_wants_takes_every_case(source: str, options: dict[str, str], whole: bool) -> None:
    config: Any = SimpleNamespace(args_source=pytest.Config.ArgsSource[source], getoption=options.get)
    assert (_sample_seed(config) is None) == whole
    worker: Any = SimpleNamespace(workerinput={"sample": _sample_seed(config)})
    assert _sample_seed(worker) == _sample_seed(config)
