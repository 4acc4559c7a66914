"""Plans for many tokens: each m has its own, of few configs, and whoever compiles beforehand knows them all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from w4gemm import WeightFormat, choice
from w4gemm.choice import plan_cache, table
from w4gemm.choice.cost import predicted_us
from w4gemm.choice.model import MOST, ranked, shortlist
from w4gemm.choice.table import Record, key_of
from w4gemm.cli.needs import chosen as units_of
from w4gemm.core.problem import H200, GemmProblem
from w4gemm.kernels import KERNELS
from w4gemm.packing.packed_shape import packed_shape

FORMAT = WeightFormat.parse("int4_g128")
FEW_FEATURES = GemmProblem(5000, 1280, 8192, torch.bfloat16, FORMAT, "mma16", device=H200)
"""Served for up to 8192 tokens by one plan it took 209 us, where 158 were possible."""
LAYERS = (FEW_FEATURES, replace(FEW_FEATURES, n=4928, k=1600), replace(FEW_FEATURES, n=28672, k=4096))


@pytest.fixture(autouse=True)
def empty_table(tmp_path, monkeypatch):
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("problem", LAYERS, ids=lambda p: f"{p.n}x{p.k}")
def test_every_m_has_a_config_near_the_best_of_few(problem):
    candidates = shortlist(problem)
    assert 2 <= len(candidates) <= MOST and shortlist(replace(problem, m=300)) is candidates
    lost = []
    for m in (272, 448, 624, 1008, 1552, 2208, 3008, 5000, 7936):
        there = replace(problem, m=m)
        decision = choice.choose(there)
        if decision.source == "heuristic":
            assert (decision.kernel, decision.config) in [(c.kernel, c.config) for c in candidates]
        lost.append(predicted_us(decision.kernel, there, decision.config) / ranked(KERNELS, there)[0][0])
    assert max(lost) < 1.1 and sum(lost) / len(lost) < 1.03


def test_a_plan_for_the_end_of_the_interval_would_be_slow_inside():
    inside, last = (choice.choose(replace(FEW_FEATURES, m=m)) for m in (5000, 8192))
    us = [predicted_us(decision.kernel, FEW_FEATURES, decision.config) for decision in (inside, last)]
    assert us[0] < 0.95 * us[1]


def test_explain_says_what_is_planned():
    """For the m that comes, the config of the plan that serves it, though another may be predicted to be faster."""
    others = 0
    for problem in (FEW_FEATURES, replace(FEW_FEATURES, n=4096, k=11008)):
        for m in (3, 40, 70, 130, 290, 700, 1300, 2149, 3300, 5257, 7181):
            there = replace(problem, m=m)
            decision, actual = choice.choose(replace(there, m=choice.plan_m(m))), choice.explain(there)
            assert actual.chosen == (decision.kernel.name, decision.config) and actual.source == decision.source
            assert actual.problem == there
            at_m = choice.choose(there)
            others += (at_m.kernel, at_m.config) != (decision.kernel, decision.config)
    assert others, "every m has the config of its plan: take others"


def record(problem: GemmProblem, config: str) -> Record:
    kernel, _, text = config.partition("/")
    revision = next(k.revision for k in KERNELS if k.name == kernel)
    return Record(key_of(problem), choice.interval_of(problem.m), kernel, text, 1.0, revision, "2026-11-22")


def test_what_was_measured_for_the_end_of_an_interval_is_best_there_and_weighed_inside():
    last = replace(FEW_FEATURES, m=8192)
    slow = choice.configs(last)[30]
    table.add([record(last, slow)])
    plan = choice.choose(last)
    assert (str(plan), plan.source) == (slow, "tuned")
    sources = {choice.choose(replace(last, m=m)).source for m in range(4160, 8193, 64)}
    assert sources == {"tuned", "heuristic"}
    assert choice.choose(replace(last, m=4096)).source == "heuristic", "of another interval"


@pytest.mark.parametrize("tuned", [False, True], ids=["heuristic", "tuned"])
def test_all_that_can_be_met_is_known_beforehand(tuned):
    if tuned:
        table.add([record(replace(FEW_FEATURES, m=8192), choice.configs(FEW_FEATURES)[9])])
    every = range(choice.WAVES_FROM + 1, 16384, 97)
    seen = {choice.choose(replace(FEW_FEATURES, m=choice.plan_m(m))).unit for m in every}
    intervals = [replace(FEW_FEATURES, m=choice.interval_end(m)) for m in (*choice.BOUNDS, 10**5) if m > 256]
    assert seen <= set(units_of(intervals)[0])


def test_what_an_interval_can_meet_is_chosen_as_every_m_is():
    """Also with a record of an interval that began later once: it holds for some of its m."""
    last = replace(FEW_FEATURES, m=8192)
    whole, late = choice.configs(FEW_FEATURES)[0], choice.configs(last)[0]
    table.add([record(last, whole), replace(record(last, late), m=(6001, 8192))])
    last_m = {}
    for m in choice.model.plan_ms(4097, 8192):
        plan = choice.choose(replace(last, m=m))
        last_m[str(plan), plan.source] = m
    assert {problem.m for problem in choice.problems_of_interval(last)} == set(last_m.values())
    assert {config for config, source in last_m if source == "tuned"} == {whole, late}


@pytest.mark.parametrize("most", [1, 100, 3000, 9000])
def test_an_engine_knows_numbers_of_tokens_that_meet_every_choice(most, monkeypatch):
    monkeypatch.setattr(plan_cache.Device, "of", lambda device: H200)
    shape = packed_shape(FORMAT, "mma16", FEW_FEATURES.n, FEW_FEATURES.k)
    key = choice.PlanKey.of(shape, 1, torch.bfloat16, torch.device("cuda"))
    tokens = choice.tokens_of_all_plans(key, most)
    assert tokens[0] == 1 and max(tokens) == most and len(tokens) < 120

    def units(numbers):
        return {choice.choose(key._replace(m=choice.plan_m(m)).problem()).unit for m in numbers}

    assert units(range(1, most + 1, max(1, most // 150))) <= units(tokens)
    monkeypatch.setattr(plan_cache, "problems_of_interval", None)
    assert choice.tokens_of_all_plans(key, most) == tokens, "a model has a hundred layers of a kind"


def test_a_batch_invariant_shortlist_has_one_order():
    problem = replace(FEW_FEATURES, batch_invariant=True)
    orders = {c.kernel.reduction_order(problem, c.config) for c in shortlist(problem)}
    assert len(orders) == 1 and None not in orders
