"""The benchmark of engines: what is measured of one, and the rows of it. Needs neither a GPU nor vLLM."""

from __future__ import annotations

import json
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.engine import (  # noqa: E402
    offline,
    rows,
    worker,
)
from bench.engine.offline import Result, Task  # noqa: E402

from engine_samples import result  # noqa: E402


def test_a_result_is_saved_in_one_step(tmp_path):
    found, file = result(2.5, [[1, 2]]), tmp_path / "result.json"
    found.save(file)
    with pytest.raises(TypeError):
        replace(found, read=[{"after": object()}]).save(file)
    assert Result(**json.loads(file.read_text())) == found


def test_rows_of_a_result():
    task = Task({}, 512, (2,), 16, 5, prefill=8192)
    start, decode, prefill = rows.rows_of(result(2.5, [[1, 2, 3, 4, 5]] * 2), task)
    assert start == {"phase": "start", "seconds": 20.0}
    assert (decode["ms_step"], decode["tokens_s"], decode["batch"]) == (2.5, 800.0, 2)
    assert decode["first_tokens_s"] == 0.5
    assert (prefill["tokens_s"], prefill["tokens_in"]) == (32768.0, 8192)


def test_a_batch_that_was_still_compiled_is_no_measurement():
    still = result(-1.0, [[1, 2, 3, 4, 5]])
    _, failed, _ = rows.rows_of(still, Task({}, 512, (1,), 16, 5, prefill=8192))
    assert failed == {"phase": "failed", "reason": "batch 1: first tokens took 0.500 s, whole answers 0.496 s"}


def test_a_batch_without_room_in_the_cache_is_no_measurement():
    found = rows.rows_of(result(2.5, [[1, 2, 3, 4, 5]] * 2), Task({}, 512, (2,), 16, 5, prefill=8192))
    assert rows.with_room(found, 2 * (16 + 5)) == rows.with_room(found, None) == found
    start, failed, prefill = rows.with_room(found, 41)
    assert failed["phase"] == "failed" and failed["reason"].startswith("batch 2: 42 tokens, and the KV cache holds 41;")
    assert [start, prefill] == [found[0], found[2]]


def test_engines_warm_up_until_nothing_is_compiled_any_more(monkeypatch):
    seconds = iter([9.0, 3.0, 4.0, 1.0, 1.02])
    engine = offline.Engine.__new__(offline.Engine)
    monkeypatch.setattr(engine, "generate", lambda prompts, tokens: (next(seconds), []), raising=False)
    assert engine.warm_up([], 128) == [(1.0, []), (1.02, [])]
    assert not list(seconds)


def engine_of(monkeypatch: pytest.MonkeyPatch, seconds: list[float], repeat: int = 1) -> offline.Engine:
    """Engine whose runs take ``seconds``, one after the other, and then as long as the last."""
    engine, left = offline.Engine.__new__(offline.Engine), iter(seconds)
    engine.task, engine._random = Task({}, 512, repeat=repeat), random.Random(1)
    monkeypatch.setattr(engine, "generate", lambda prompts, tokens: (next(left, seconds[-1]), [[1]]), raising=False)
    return engine


@pytest.mark.parametrize(
    "seconds, repeat, kept",
    [
        ([9.0, 3.7, 3.7, 3.8], 1, [3.7, 3.7, 3.8]),
        ([3.7, 3.7, 6.9, 3.8], 1, [3.7, 3.7, 6.9, 3.8]),  # a run that was disturbed
        ([6.9, 6.8, 3.7], 1, [6.9, 6.8, *[3.7] * 6]),  # a warm-up that was
        ([3.7, 3.7, 3.6, 6.9, 3.7], 3, [3.7, 3.7, 3.6, 6.9, 3.7]),
        ([3.7, 3.7, 6.9, 5.0, 3.7], 3, [3.7, 3.7, 6.9, 5.0, *[3.7] * 4]),
    ],
)
def test_one_disturbed_run_is_no_measurement(monkeypatch, seconds, repeat, kept):
    runs = engine_of(monkeypatch, seconds, repeat).timed([], 128)
    assert [time for time, _ in runs] == kept
    assert statistics.median(kept) in (3.7, 3.75)


def test_an_engine_that_never_settles_is_given_up(monkeypatch):
    """After the 8 runs of a warm-up, which do not count, and 7 more."""
    assert len(engine_of(monkeypatch, [2.0**i for i in range(20)]).timed([], 128)) == 7


def test_all_runs_of_a_point_come_to_its_row(monkeypatch):
    engine = engine_of(monkeypatch, [4.0, 4.1, 7.0, 4.0, 1.0, 1.0, 1.2, 1.0])
    found = engine.decode(2)
    assert (found["total_s"], found["first_token_s"]) == ([4.0, 4.1, 7.0, 4.0], [1.0, 1.0, 1.2, 1.0])
    _, decode, prefill = rows.rows_of(
        Result(decode=[found], prefill_s=[0.25, 0.26, 0.5]), Task({}, 512, (2,), 16, 4, prefill=8192)
    )
    assert (decode["ms_step"], decode["ms_step_least"], decode["ms_step_most"]) == (1016.6667, 1000.0, 2000.0)
    assert [decode[f"first_tokens_s{end}"] for end in ("", "_least", "_most")] == [1.0, 1.0, 1.2]
    assert (decode["runs"], decode["tokens_s"], prefill["runs"]) == (4, 2.0, 3)
    assert [prefill[f"seconds{end}"] for end in ("", "_least", "_most")] == [0.26, 0.25, 0.5]


def test_answers_are_compared_up_to_the_first_token_that_differs():
    marlin, ours = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], [[1, 2, 3, 4, 5], [9, 2, 3, 4, 5]]
    found = rows.rows_of(result(2.5, ours), Task({}, 512, (2,), 16, 5))
    rows.add_agreement(found, {2: ours}, "marlin", {2: marlin})
    (decode,) = [row for row in found if row["phase"] == "decode"]
    assert (decode["same_tokens_as"], decode["equal_prefix"]) == ("marlin", 2.5)


def test_experts_that_moved_are_counted_and_compared():
    before = [[[[0, 70], [1, 71]]], [[[2, 72], [3, 73]]]]  # two GPUs, one layer
    after = [[[[2, 72], [1, 71]]], [[[0, 70], [3, 73]]]]
    assert offline.moves(before, before) == {"places": 4, "moved": 0, "intact": True}
    assert offline.moves(before, after) == {"places": 4, "moved": 2, "intact": True}
    after[0][0][0] = [2, 70]  # said to be expert 2, with the weights of 0
    assert offline.moves(before, after) == {"places": 4, "moved": 2, "intact": False}
    found = result(2.5, [[1, 2, 3]])
    found.moves = offline.moves(before, after)
    assert rows.rows_of(found, Task({}, 512, (1,), 16, 3))[-1] == {"phase": "moves", **found.moves}


def test_a_checksum_tells_bytes_and_their_order():
    a, b = torch.arange(16, dtype=torch.bfloat16), torch.arange(4).to(torch.float8_e4m3fn)
    swapped = a.clone()
    swapped[:2] = a[[1, 0]]
    sums = [worker.checksum(t) for t in ([a, b], [b, a], [swapped, b], [a], [a.view(4, 4), b])]
    assert len(set(sums[:4])) == 4 and sums[4] == sums[0]
