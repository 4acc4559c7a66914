"""The benchmark of layers that nobody tuned, as far as it needs no GPU."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from bench import drawn as points
from bench import run, unknown
from bench.peers import base
from bench.peers.base import Prepared

import w4gemm
from w4gemm import WeightFormat, choice
from w4gemm.choice import table
from w4gemm.core.problem import H200, Device, GemmProblem
from w4gemm.tuning.random_weight import random_weight
from w4gemm.tuning.timing import time_calls


def test_a_seed_draws_the_same_points_and_no_layer_that_was_tuned_or_fitted():
    drawn = points.draw(7, 60)
    assert drawn[:20] == points.draw(7, 20) != points.draw(8, 20)
    assert not {layer[:2] for layer in points.draw(1, 60)} & {layer[:2] for layer in drawn[: points.UNKNOWN_LAYERS]}
    tuned = {(r.key.n, r.key.k) for path in table.shipped_tables() for r in table.read(path)}
    assert tuned and not {(layer.n, layer.k) for layer in drawn} & tuned
    assert (3584, 18944) in points.known() and not points.allowed(3584, 18944)


def test_points_cover_the_sizes_of_models_and_every_number_of_tokens():
    drawn = points.draw(7, 60)
    for n, k, tokens in drawn:
        assert 512 <= n <= 60_000 and 512 <= k <= 30_000 and n % 64 == k % 64 == 0 and n * k <= 2**29
        assert [int(4 * math.log(m + 0.5, 8192.5)) <= quarter for quarter, m in enumerate(tokens)] == [True] * 4
        assert tokens[0] >= 1 and tokens[-1] <= 8192
    assert sum(n % 128 > 0 or k % 128 > 0 for n, k, _ in drawn) in range(3, 40)
    assert {math.log2(n) // 1 for n, _, _ in drawn} >= {10, 11, 12, 13, 14}
    narrow = points.draw(7, 60, 17, 333)
    assert [layer[:2] for layer in narrow] == [layer[:2] for layer in drawn]
    assert all(17 <= a <= 36 <= b <= 75 <= c <= 158 <= d <= 333 for *_, (a, b, c, d) in narrow)


def test_what_a_layer_compiles_is_its_choices_and_the_best_guesses():
    arguments = WeightFormat.parse("int4_g128"), torch.bfloat16, H200
    layer = points.Drawn(1280, 2560, (2, 1048))
    alone, compared = (unknown.work_of(layer, asked, 6, *arguments) for asked in (False, True))
    assert [len(alone.configs[m]) for m in layer.tokens] == [1, 1] and 1 <= len(alone.units) <= 2
    assert all(compared.configs[m][0] == alone.configs[m][0] for m in layer.tokens)
    assert alone.units < compared.units and len(compared.configs[1048]) in (6, 7)


class Ours:
    """w4gemm on the CPU."""

    name = "w4gemm"

    def version(self) -> str:
        return "1"

    def supports(self, *problem: object) -> str:
        return ""

    def prepare(self, weight, dtype) -> Prepared:
        packed = weight.repack("cpu")
        run = lambda w, x, out: w4gemm.linear(x, w, out=out)  # noqa: E731
        return Prepared(packed.tensors, run, lambda m: CONFIGS[0], weight_of=lambda ts: replace(packed, tensors=ts))


_CPU = GemmProblem(5, 64, 128, torch.bfloat16, WeightFormat.parse("int4_g128"), "cpu", device=Device("cpu"))
CONFIGS = choice.configs(_CPU)


class Same(Ours):
    """A peer that multiplies by the dequantized weight; wrong: by another."""

    def __init__(self, name: str, wrong: bool = False) -> None:
        self.name, self.wrong = name, wrong

    def prepare(self, weight, dtype) -> Prepared:
        dense = weight.dequantize(dtype) * (1 + self.wrong)
        return Prepared((dense,), lambda tensors, x, out: torch.mm(x, tensors[0].T, out=out), lambda m: "a")


@pytest.fixture
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(unknown, "random_weight", lambda n, k, format, dtypes: random_weight(format, n, k))
    for module in (unknown, run):
        monkeypatch.setattr(module, "time_graphs", lambda graphs, replays: time_calls(graphs, replays))
    monkeypatch.setattr(base, "_MOST_COPIES", 3)


def test_rows_of_a_point_have_every_right_implementation_and_what_the_choice_lost(on_the_cpu, monkeypatch):
    peers = [Ours(), Same("peer"), Same("liar", wrong=True)]
    entries = run.prepare(peers, random_weight(WeightFormat.parse("int4_g128"), 64, 128), torch.bfloat16)
    own, peer = run.measure(entries, 5)
    assert (own["impl"], peer["impl"]) == ("w4gemm", "peer") and own["rel_error"] < 1e-2
    asked: list[list[str]] = []
    us = {config: 5.0 + i for i, config in enumerate(CONFIGS)}

    def timed(graphs, replays):
        asked.append([graph[0].args[1] for graph in graphs])
        return [SimpleNamespace(p50=us[name]) for name in asked[-1]]

    monkeypatch.setattr(unknown, "time_graphs", timed)
    assert len(CONFIGS) > 1 and unknown.regret(entries[0], 5, CONFIGS[1], CONFIGS) == pytest.approx(6.0 / 5.0)
    assert asked[0] == CONFIGS and asked[1][0] == CONFIGS[1] and len(asked[1]) <= 5


def test_a_run_writes_rows_and_the_next_one_goes_on(on_the_cpu, monkeypatch, tmp_path, capsys):
    layers = [points.Drawn(64, 128, (3, 300)), points.Drawn(128, 128, (5,))]
    monkeypatch.setattr(unknown, "draw", lambda seed, count: layers)
    monkeypatch.setattr(unknown, "peers_named", lambda text: [SimpleNamespace(available=lambda: "no GPU"), peer])
    monkeypatch.setattr(unknown.Device, "of", lambda device: Device("cpu"))
    peer = Ours()
    peer.available = lambda: ""
    args = Namespace(out=tmp_path / "rows.jsonl", seed=7, layers=2, most=1, every=1, configs=2, impl="", dry=False)
    args.seconds = 60.0
    for done in (2, 3):
        unknown.run_kind("w4a16", args)
        rows = [json.loads(line) for line in args.out.read_text().splitlines()]
        assert len(rows) == done and {row["set"] for row in rows} == {"unknown"}
    assert [(row["n"], row["m"]) for row in rows] == [(64, 3), (64, 300), (128, 5)]
    assert all(0 < row["best_config_us"] <= row["us_p50"] for row in rows if "configs" in row)
    assert "2 of 2 points" in capsys.readouterr().out


def test_points_that_a_file_has_are_not_measured_again(tmp_path):
    path = tmp_path / "unknown.jsonl"
    assert unknown.measured(path, "w4a16", 7) == set()
    row = {"work": "w4a16", "format": "int4_g128", "n": 512, "k": 1024, "m": 3, "seed": 7}
    eight = row | {"work": "w8a16", "format": "e4m3_col_fp32", "m": 5}
    path.write_text("".join(json.dumps(each) + "\n" for each in (row, eight)))
    assert unknown.measured(path, "w4a16", 7) == {(512, 1024, 3)}
    assert unknown.measured(path, "w4a8_exact", 7) == unknown.measured(path, "w4a16", 8) == set()
    assert unknown.measured(path, "e4m3", 7) == {(512, 1024, 5)} and unknown.measured(path, "int8", 7) == set()
    assert unknown.unmeasured(points.Drawn(512, 1024, (1, 3, 9)), {(512, 1024, 3)}) == (1, 9)
