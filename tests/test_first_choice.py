"""The host's work of the first choice of a process, counted: a few milliseconds in all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from w4gemm import choice
from w4gemm.choice import cost, model, plan, table
from w4gemm.choice.table import Record
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import H200, GemmProblem
from w4gemm.kernels import space

FEW = GemmProblem(16, 4864, 5120, torch.bfloat16, WeightFormat(), "mma16", device=H200)
MANY = replace(FEW, m=1000)
RECORDED = next(record for record in table.read(table.shipped_path(H200.name)) if record.key.dtype == "bfloat16")


def forget() -> None:
    of_space = (space._legal, space._not_excluded)
    for cached in (*of_space, model._shortlist, plan._is_legal, model._of_kernel, table._read):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    forget()


@pytest.fixture
def counted(monkeypatch):
    """Return a function that counts the calls of a function from then on."""

    def count(owner: object, name: str) -> list[int]:
        calls, wrapped = [0], getattr(owner, name)

        def counting(*args, **options):
            calls[0] += 1
            return wrapped(*args, **options)

        monkeypatch.setattr(owner, name, counting)
        return calls

    return count


def test_what_was_measured_for_a_layer_is_found_without_costing_others(counted):
    """The records of other layers are not parsed either."""
    key = RECORDED.key
    records = table.read(table.shipped_path(H200.name))
    problem = replace(FEW, m=RECORDED.m[1], n=key.n, k=key.k, format=WeightFormat.parse(key.format))
    parsed, timed = counted(Record, "parse"), counted(cost.waves, "launch_timer")
    assert choice.choose(problem).source == "shipped"
    assert timed[0] == 0 < parsed[0] < 0.2 * len(records)


def test_a_shortlist_makes_each_config_ready_once(counted):
    """It looks at several numbers of tokens."""
    timed = counted(cost.waves, "launch_timer")
    configs = [c for c in choice.configs(MANY) if c.startswith("sm90") and "+" not in c]
    forget()
    timed[0] = 0
    choice.choose(MANY)
    pairs = [c for c in choice.configs(MANY) if "+" in c]
    assert len(configs) <= timed[0] < 2 * len(configs) + 50 * len(pairs)


def test_a_new_m_of_many_tokens_makes_none_ready(counted):
    choice.choose(MANY)
    timed = counted(cost.waves, "launch_timer")
    for m in (320, 1008, 4096, 7808):
        choice.choose(replace(MANY, m=m))
    assert timed[0] <= 4 * 12, "at most a launch of two for each pair and m"


def test_records_of_a_layer_are_parsed_once_for_all_intervals(counted):
    layer = [r for r in table.read(table.shipped_path(H200.name)) if (r.key.n, r.key.k) == RECORDED.key[5:7]]
    format = WeightFormat.parse(RECORDED.key.format)
    parsed, sources = counted(Record, "parse"), set()
    for m in choice.BOUNDS:
        problem = replace(FEW, m=m, n=RECORDED.key.n, k=RECORDED.key.k, format=format)
        sources |= {choice.choose(seen).source for seen in choice.problems_of_interval(problem)}
    assert "shipped" in sources and parsed[0] == len(layer)


def test_every_interval_of_a_layer_takes_the_configs_that_one_made_ready(counted):
    choice.choose(FEW)
    timed = counted(cost.waves, "launch_timer")
    for m in choice.BOUNDS:
        if m <= choice.WAVES_FROM:
            assert choice.choose(replace(FEW, m=m)).source == "heuristic"
    pairs = [c for c in choice.configs(FEW) if "+" in c]
    assert timed[0] <= 2 * len(choice.BOUNDS) * len(pairs), "two launches are one problem for each number of features"
