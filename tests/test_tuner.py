"""The tuner, on the CPU kernel: what it measures, keeps and leaves alone; and on a GPU where there is one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import w4gemm
from w4gemm import choice
from w4gemm.choice import table
from w4gemm.core.epilogue import PLAIN, Epilogue
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import H200, Device, GemmProblem
from w4gemm.kernels.base import Operands
from w4gemm.kernels.cpu import spec
from w4gemm.tuning import tuner
from w4gemm.tuning.roofline import Roofline, Work
from w4gemm.tuning.timing import Timing
from w4gemm.tuning.workload import Workload

CPU = GemmProblem(8, 96, 64, torch.float32, WeightFormat(32), "cpu", device=Device("cpu"))


@pytest.fixture(autouse=True)
def folder(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user's table and no shipped one."""
    monkeypatch.setattr(table, "_TABLES", cache_folder / "tables")
    return cache_folder


def is_of(launch: Callable[[Operands], None], name: str) -> bool:
    """Whether a launch, or its method for plain calls, is of a config."""
    return name.endswith(f"/{getattr(launch, '__self__', launch).config}")


@pytest.fixture
def favourite(monkeypatch: pytest.MonkeyPatch) -> str:
    """The second guess, which the clock is made to find ten times as fast."""
    _, second, *_ = choice.configs(CPU)

    def time(self, launches, operands, replays):
        actual = []
        for launch in launches:
            launch(operands[0])
            us = 10.0 if is_of(launch, second) else 100.0
            actual.append(Timing(us, us, us))
        return actual

    monkeypatch.setattr(Workload, "time", time)
    return second


def test_the_fastest_is_kept_and_chosen(favourite, folder):
    steps = []
    outcomes = list(tuner.tune([CPU, replace(CPU, m=5)], "cpu", progress=lambda *step: steps.append(step)))
    assert len(outcomes) == 1, "both m are of one interval"
    (outcome,) = outcomes
    assert outcome.record.choice == favourite != outcome.first_guess
    assert outcome.gain == 10 and outcome.record.m == (5, 8) and not outcome.failed
    count = len(choice.configs(CPU))
    assert steps == [(i, count, "m 8, n 96, k 64") for i in range(1, count + 1)]
    assert (folder / table.USER_FILE).read_text() == outcome.record.line()
    assert str(choice.choose(CPU).ready()) == favourite and choice.choose(CPU).ready().source == "tuned"
    assert not list(tuner.tune([CPU], "cpu")), "it has a record"
    assert len(list(tuner.tune([CPU], "cpu", force=True))) == 1


def test_a_callers_random_numbers_stay_the_same(favourite):
    state = torch.get_rng_state()
    assert len(list(tuner.tune([CPU], "cpu"))) == 1
    assert torch.equal(torch.get_rng_state(), state)


def test_an_interrupted_run_goes_on_where_it_stopped(favourite):
    problems = [replace(CPU, m=m) for m in (8, 16, 32)]
    run = tuner.tune(problems, "cpu")
    next(run), next(run)
    run.close()
    assert [o.problem.m for o in tuner.tune(problems, "cpu")] == [32]


def test_a_wrong_or_broken_config_is_left_out(favourite, monkeypatch, caplog):
    launch = spec._Launch.__call__

    def broken(self, operands):
        launch(self, operands)
        if f"cpu_mixed_gemm/{self.config}" == favourite:
            operands.out[0, 0] += 1000

    monkeypatch.setattr(spec._Launch, "__call__", broken)
    with caplog.at_level(logging.WARNING, "w4gemm"):
        (outcome,) = tuner.tune([CPU], "cpu")
    assert outcome.record.choice == outcome.first_guess and list(outcome.failed) == [favourite]
    assert f"{favourite} is left out: relative error" in caplog.text


def test_a_small_gain_keeps_the_first_guess(monkeypatch):
    monkeypatch.setattr(
        Workload,
        "time",
        lambda self, launches, operands, replays: [Timing(0, 100 - i * 0.5, 0) for i in range(len(launches))],
    )
    (outcome,) = tuner.tune([CPU], "cpu")
    assert outcome.record.choice == outcome.first_guess


@pytest.mark.parametrize("noisy_tries", [0, 1, 9])
def test_repeats_that_disagree_are_timed_again(monkeypatch, caplog, noisy_tries):
    """On a busy machine one repeat took 9,872 us, where the next number of tokens takes 369."""
    calls = []

    def time(self, launches, operands, replays):
        calls.append(replays)
        noisy = sum(each == tuner._REPLAYS for each in calls) <= 2 * noisy_tries
        return [Timing(369.0, 369.0, 9872.0 if noisy else 380.0) for _ in launches]

    monkeypatch.setattr(Workload, "time", time)
    (outcome,) = tuner.tune([CPU], "cpu")
    assert outcome.steady == (noisy_tries < tuner._TRIES)
    assert len(calls) == 3 * min(noisy_tries + 1, tuner._TRIES)
    assert ("repeats of" in caplog.text and "369 to 9872 us" in caplog.text) == (not outcome.steady)


def test_what_nothing_supports_is_skipped(caplog):
    assert not list(tuner.tune([replace(CPU, layout="mma16")], "cpu"))
    assert "no kernel supports it" in caplog.text


def test_autotune_tunes_inside_and_only_there(favourite, folder):
    w = w4gemm.quantize(torch.randn(96, 64), CPU.format).repack()
    x = torch.randn(6, 64)
    before = w4gemm.linear(x, w)
    assert not (folder / table.USER_FILE).exists(), "never by surprise"
    with w4gemm.autotune():
        inside = w4gemm.linear(x, w)
        w4gemm.linear(x[:5], w)
    after = w4gemm.linear(x, w)
    w4gemm.linear(torch.randn(9, 64), w)
    (record,) = table.read(folder / table.USER_FILE)
    assert record.choice == favourite and record.m == (5, 8)
    assert torch.equal(inside, after)
    assert torch.allclose(before, after, atol=1e-4)
    assert not choice.plan_cache._tuners.get() and not choice.plan_cache._open_tuners


def test_overlapping_threads_leave_no_tuner_behind(folder):
    """A enters, B enters, A leaves, B leaves; another thread's calls are tuned by neither."""
    w = w4gemm.quantize(torch.randn(96, 64), CPU.format).repack()
    layer = w4gemm.W4Linear.from_weight(w)
    seen: dict[str, list[int]] = {"a": [], "b": []}
    turns = [threading.Event() for _ in range(4)]

    def run(name: str, enter: int, leave: int) -> None:
        turns[enter].wait(30)
        with choice.tuning_with(lambda problem: seen[name].append(problem.m)):
            turns[enter + 1].set()
            turns[leave].wait(30)
            w4gemm.linear(torch.randn(2 if name == "a" else 1, 64), w)
            layer(torch.randn(16, 64))
        turns[min(leave + 1, 3)].set()

    threads = [threading.Thread(target=run, args=args) for args in (("a", 0, 2), ("b", 1, 3))]
    for thread in threads:
        thread.start()
    turns[0].set()
    turns[1].wait(30)
    w4gemm.linear(torch.randn(3, 64), w)
    layer(torch.randn(16, 64)), layer(torch.randn(16, 64))
    for thread in threads:
        thread.join(60)
    assert seen["a"] == [2, 16] and seen["b"][0] == 1 and 4 not in seen["a"] + seen["b"]
    w4gemm.linear(torch.randn(24, 64), w)
    assert 24 not in seen["a"] + seen["b"], "nothing is tuned unasked"
    assert not choice.plan_cache._open_tuners and not choice.plan_cache._untuned


def test_a_plan_that_was_begun_before_a_block_is_tuned_inside(monkeypatch):
    """Another thread's plan may take a second of compiling, and be there only when the block has begun."""
    w = w4gemm.quantize(torch.randn(96, 64), CPU.format).repack()
    x, seen, began, block = torch.randn(3, 64), [], threading.Event(), threading.Event()
    choose = choice.plan_cache.choose

    def slowly(problem, config):
        began.set()
        assert block.wait(30)
        return choose(problem, config)

    monkeypatch.setattr(choice.plan_cache, "choose", slowly)
    choice.forget()  # another test may have chosen this plan
    other = threading.Thread(target=w4gemm.linear, args=(x, w))
    other.start()
    assert began.wait(30)
    with choice.tuning_with(lambda problem: seen.append(problem.m)):
        block.set()
        other.join(60)
        w4gemm.linear(x, w)
    assert seen == [4]


def test_blocks_that_end_in_another_order_leave_no_tuner_behind():
    """Generators of one thread may overlap so."""
    first, second = (choice.tuning_with(lambda problem: None) for _ in range(2))
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None), second.__exit__(None, None, None)
    assert not choice.plan_cache._tuners.get() and not choice.plan_cache._open_tuners


def test_a_warm_call_looks_nothing_up(monkeypatch):
    w = w4gemm.quantize(torch.randn(96, 64), CPU.format).repack()
    x = torch.randn(3, 64)
    w4gemm.linear(x, w)
    monkeypatch.setattr(table, "find", lambda problem: pytest.fail("a warm call asked the tables"))
    w4gemm.linear(x, w)


@pytest.mark.parametrize(
    "epilogue",
    [Epilogue(), Epilogue("silu_mul", bias=True), Epilogue("gelu", "device", residual=True, out_dtype=torch.float16)],
    ids=str,
)
def test_the_workload_checks_what_it_times(epilogue):
    problem = replace(CPU, epilogue=epilogue, m=3)
    workload = Workload(problem, torch.device("cpu"))
    operands = workload.operands(3)
    assert len({id(o.weight) for o in operands}) == len(operands) > 1
    plan = choice.choose(problem).ready()
    assert workload.error(plan.launch, operands[0]) < 1e-3
    assert workload.error(lambda o: o.out.zero_(), operands[0]) == pytest.approx(1, abs=0.2)
    assert workload.error(lambda o: None, operands[0]) != workload.error(plan.launch, operands[0]), "nothing ran"
    (time,) = workload.time([plan.launch], operands, 2)
    assert 0 < time.p20 <= time.p50 <= time.p80


def test_roofline():
    problem = GemmProblem(1, 8192, 8192, torch.bfloat16, WeightFormat(), "mma16", device=H200)
    assert Work.of(problem).bytes == 8192 * 8192 // 2 + 2 * 8192 * 64 + 4 * 8192
    assert Roofline.of(problem) == (pytest.approx(7.7, abs=0.1), "bytes", 0)
    assert Roofline.of(replace(problem, m=4096)) == (pytest.approx(695.9, abs=0.5), "operations", 0)
    assert Roofline(7.7, "bytes").limit_us == 9.7
    many = replace(problem, m=4096, dtype=torch.float8_e4m3fn, layout="mma8")
    for name, epilogue, part in (
        ("int4_g128", PLAIN, 1 / 4),
        ("int4_g32", PLAIN, 1.0),
        ("int4_g128_e4m3", PLAIN, 0.0),
        ("int4_col", PLAIN, 0.0),
        ("int4_g128_e4m3", Epilogue(block_scale=True), 1 / 4),
    ):
        least = Roofline.of(replace(many, format=WeightFormat.parse(name), epilogue=epilogue))
        assert least is not None and least.sums_us == pytest.approx(part * least.us), name
    few = Roofline.of(replace(many, m=64))
    assert few is not None and (few.bound, few.sums_us) == ("bytes", 0), "hidden behind bytes"
    assert Roofline.of(CPU) is None


def test_a_choice_must_also_win_inside_its_interval(monkeypatch):
    """At the last m the second guess is twice as fast, at a ragged one four times slower."""
    second = choice.configs(CPU)[1]

    def time(self, launches, operands, replays):
        m = operands[0].x.shape[0]
        fast = {8: 50.0, 7: 400.0}[m]
        return [Timing(0, fast if is_of(launch, second) else 100.0, 0) for launch in launches]

    monkeypatch.setattr(Workload, "time", time)
    (outcome,) = tuner.tune([CPU], "cpu")
    assert next(iter(outcome.times)) == second
    assert outcome.record.choice == outcome.first_guess and outcome.record.us == 100 and outcome.gain == 1


def test_a_cliff_inside_the_interval_is_avoided(monkeypatch):
    """The first guess is 2 % faster at the last m and takes twice as long at a ragged one."""
    first = choice.configs(CPU)[0]

    def time(self, launches, operands, replays):
        us = {8: 98.0, 7: 200.0}[operands[0].x.shape[0]]
        return [Timing(0, us if is_of(launch, first) else 100.0, 0) for launch in launches]

    monkeypatch.setattr(Workload, "time", time)
    (outcome,) = tuner.tune([CPU], "cpu")
    assert outcome.record.choice != first and outcome.gain == pytest.approx(1.4)


@pytest.mark.parametrize("m", choice.BOUNDS)
def test_a_ragged_m_is_inside_the_interval(m):
    first, last = choice.interval_of(m)
    assert first <= choice.ragged(m) <= last and (choice.ragged(m) % 2 or first == last)


@pytest.mark.gpu
def test_on_the_gpu(folder):
    device = Device.of("cuda")
    problems = [
        GemmProblem(m, 1536, 1024, torch.bfloat16, WeightFormat(), "mma16", epilogue, device)
        for m in (8, 64)
        for epilogue in (Epilogue(), Epilogue("silu_mul"))
    ]
    outcomes = list(tuner.tune(problems, "cuda", top=4))
    assert len(outcomes) == 4 and not any(o.failed for o in outcomes)
    for outcome in outcomes:
        assert len(outcome.times) == 4 and choice.choose(outcome.problem).ready().source == "tuned"
