"""Plans of a whole model before its first call: chosen once, compiled in other processes, shared between ranks."""

from __future__ import annotations

import contextlib
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from w4gemm import UnsupportedError, WeightFormat, choice
from w4gemm.choice import PlanKey, plan_cache, prepare
from w4gemm.core.problem import H200
from w4gemm.jit import Unit
from w4gemm.packing.packed_shape import packed_shape

pytest.importorskip("cutlass")


class Pool:
    """A pool that compiles nothing, and remembers the units in the order in which they came."""

    error = ""
    seen: list[Unit]
    workers: int

    def __init__(self, workers: int) -> None:
        type(self).workers = workers

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, units: list[Unit]) -> list[Future[bytes]]:
        type(self).seen = list(units)
        futures = []
        for _ in units:
            futures.append(Future())
            if self.error:
                futures[-1].set_exception(RuntimeError(self.error))
            else:
                futures[-1].set_result(b"object")
        return futures


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Pool]:
    """Problems are an H200's, nothing is stored, and what is compiled is not loaded."""
    mine = type("Pool", (Pool,), {})
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(plan_cache, "Device", type("OnH200", (), {"of": staticmethod(lambda device: H200)}))
    monkeypatch.setattr(plan_cache, "_plans", {})
    monkeypatch.setattr("w4gemm.choice.plan_cache.CompilePool", mine)
    monkeypatch.setattr("w4gemm.choice.plan_cache.usable_processors", lambda: 8)
    adopted: dict[Unit, Any] = {}
    monkeypatch.setattr("w4gemm.choice.plan_cache.adopt", adopted.setdefault)
    monkeypatch.setattr(sys.modules["w4gemm.jit.compile"], "_memory", {})  # what other tests compiled
    monkeypatch.setattr("w4gemm.choice.plan.compiled", adopted.__getitem__)
    return mine


def keys(n: int, *tokens: int) -> list[PlanKey]:
    weight = packed_shape(WeightFormat(128), "mma16", n, 1024)
    return [PlanKey.of(weight, m, torch.bfloat16, torch.device("cuda", 0)) for m in tokens]


def test_each_unit_is_compiled_once(pool: type[Pool]) -> None:
    expected = [*keys(512, 1, 16, 64), *keys(512, 16), *keys(768, 16)]
    done = prepare(expected)
    assert len(pool.seen) == len(set(pool.seen)) == done.units == done.compiled >= 2
    chosen = {choice.choose(key.problem()).unit for key in expected}
    assert set(pool.seen) == chosen
    assert all(choice.plan_for(key).compiled == b"object" for key in expected)


def test_plans_that_are_known_cost_nothing(pool: type[Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(keys(512, 16))
    monkeypatch.setattr("w4gemm.choice.plan_cache.choose", lambda problem: pytest.fail("it was chosen again"))
    assert prepare(keys(512, 16))[:2] == (0, 0)


def test_processes_take_turns(pool: type[Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has all processors; the next finds what the first has stored."""
    needed = keys(512, 1, 2, 16, 64)
    assert prepare(needed, ranks=2).compiled == len(pool.seen) >= 2 and pool.workers == min(8, len(pool.seen))

    monkeypatch.setattr(plan_cache, "_plans", {})
    ready = iter([False] * len(pool.seen) + [True] * len(pool.seen))  # before its turn, and in it
    monkeypatch.setattr(plan_cache, "is_ready", lambda unit: next(ready))
    units = pool.seen
    done = prepare(needed, rank=1, ranks=2)
    assert (done.units, done.compiled) == (len(units), 0) and pool.seen is units


def test_without_turns_ranks_divide_the_processors_and_begin_apart(
    pool: type[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = []
    monkeypatch.setattr(plan_cache, "turn", lambda: contextlib.nullcontext(False))
    for rank in (0, 1):
        monkeypatch.setattr(plan_cache, "_plans", {})
        prepare(keys(512, 1, 2, 16, 64, 256, 1024, 4096), rank=rank, ranks=2)
        orders.append(pool.seen)
        assert pool.workers <= 4
    first, second = orders
    half = len(first) // 2
    assert half and second == first[half:] + first[:half]


def test_a_unit_that_cannot_be_compiled_is_named(pool: type[Pool]) -> None:
    pool.error = "ptxas died"
    with pytest.raises(UnsupportedError, match=r"sm90_\w+ .* cannot be compiled for sm_90a: ptxas died"):
        prepare(keys(512, 16))


def test_where_compiling_is_forbidden(pool: type[Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEMM_COMPILE", "off")
    monkeypatch.undo()
    monkeypatch.setenv("W4GEMM_COMPILE", "off")
    monkeypatch.setattr(plan_cache, "Device", type("OnH200", (), {"of": staticmethod(lambda device: H200)}))
    monkeypatch.setattr(plan_cache, "_plans", {})
    monkeypatch.setenv("W4GEMM_CACHE_DIR", "off")
    monkeypatch.setattr("w4gemm.jit.compile._memory", {})
    with pytest.raises(UnsupportedError, match="W4GEMM_COMPILE=off forbids compiling"):
        prepare(keys(512, 16))
