"""bench.grouped without a GPU: which peers take what, and points. A run holds each peer's result to the product."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from bench import grouped
from bench.mixtures import points, weights
from bench.peers.base import FP8, float_name
from bench.peers.experts import PEERS, Experts, Prepared, humming, marlin
from bench.peers.experts.base import rotate
from bench.peers.experts.rows import block_size, blocks_of
from bench.shapes import FP4_EXPERTS

from w4gemm import QuantizedWeight, WeightFormat
from w4gemm.tuning import timing
from w4gemm.tuning.random_weight import random_weight


def on_cpu(n: int, k: int, format: str) -> QuantizedWeight:
    """A random weight; of NVFP4 with one factor, as peers take it."""
    w = random_weight(WeightFormat.parse(format), n, k)
    if float_name(w.format) != "nvfp4":
        return w
    codes, scales, _, channels, *_ = w.parts()
    return QuantizedWeight.from_codes(w.format, codes, scales, channels=channels.mean().expand(n).contiguous())


@pytest.fixture
def cpu_weights(monkeypatch):
    monkeypatch.setattr(weights, "_ROTATED_BYTES", 40e3)
    monkeypatch.setattr(weights, "random_weight", lambda n, k, format, dtypes: on_cpu(n, k, str(format)))


def test_rows_in_blocks_of_one_expert():
    blocks = blocks_of([3, 0, 5], 4, "cpu")
    assert blocks.ids[:12].tolist() == [0, 1, 2, 8, 3, 4, 5, 6, 7, 8, 8, 8] and int(blocks.used) == 12
    assert blocks.experts[:3].tolist() == [0, 2, 2] and len(blocks.ids) == 4 * len(blocks.experts) >= 8 + 3 * 3
    assert [block_size([m] * 8) for m in (1, 7, 8, 14, 43, 44, 512)] == [8, 8, 16, 16, 48, 64, 64]


def test_peers_say_what_they_do_not_take():
    marlin_, mxfp4, nvfp4 = marlin.PEER, WeightFormat.parse("mxfp4"), WeightFormat.parse("nvfp4")
    for _, n, k in FP4_EXPERTS:
        assert not marlin_.supports(n, k, mxfp4, torch.bfloat16) and not marlin_.supports(n, k, nvfp4, torch.bfloat16)
        assert not humming.PEER.supports(n, k, mxfp4, FP8) and not humming.PEER.supports(n, k, nvfp4, torch.bfloat16)
        assert marlin_.supports(n, k, mxfp4, FP8) and humming.PEER.supports(n, k, nvfp4, FP8)
    assert marlin_.supports(96, 128, mxfp4, torch.bfloat16) == "wants n % 64 == 0 and k % 64 == 0"
    assert not humming.PEER.supports(256, 256, WeightFormat.parse("int4_g128_e4m3"), FP8)
    takes = [peer.name for peer in PEERS if not peer.supports(256, 256, WeightFormat.parse("int4_g128_e4m3"), FP8)]
    assert takes == ["humming", "cutlass_w4a8"]


class Dense:
    """A peer that multiplies each expert's rows by its dequantized weight, or wrongly, or fails."""

    def __init__(self, name: str) -> None:
        self.name = name

    def version(self) -> str:
        return "1"

    def supports(self, n, k, format, dtype) -> str:
        return "no such size" if self.name == "unable" else ""

    def prepare(self, experts: Experts, dtype: torch.dtype) -> Prepared:
        if self.name == "broken":
            raise RuntimeError("cannot pack")
        one = on_cpu(experts.n, experts.k, str(experts.format)).dequantize()
        each = torch.stack([one.roll(e, 0) for e in range(len(experts.words))]).bfloat16()

        def routed(counts):
            if self.name == "lost":
                raise RuntimeError("cannot route")

            def product(tensors, x, out):
                shift = int(self.name == "wrong")
                rows = zip(x.split(counts), tensors[0].roll(shift, 0), strict=True)
                return out.copy_(torch.cat([r @ w.T for r, w in rows]))

            return product

        return Prepared((each,), routed, note="dense")


def test_a_point_on_the_cpu(cpu_weights, monkeypatch, capsys):
    """Right results have rows; what is wrong, fails or cannot run is printed and ends nothing."""
    monkeypatch.setattr(points, "time_graphs", timing.time_calls)
    names = "dense", "wrong", "lost", "broken", "unable"
    mixtures = []
    for format in ("mxfp4", "nvfp4"):
        sizes = (4, 64, 128)
        mixtures.append(
            weights.draw(sizes, WeightFormat.parse(format), torch.bfloat16, [Dense(name) for name in names])
        )
    assert len(mixtures[0].copies) == 3 == len(mixtures[0].contenders[0].copies)
    rows = points.measure(mixtures, 3, "zipf", torch.bfloat16, points.Extra(replays=1))
    said = capsys.readouterr().out
    actual = [(row["impl"], row["config"] == "dense", WeightFormat.parse(row["format"]).group_size) for row in rows]
    assert actual == [("w4gemm", False, 32), ("dense", True, 32), ("w4gemm", False, 16), ("dense", True, 16)]
    assert all(row["us_p50"] > 0 and row["rel_error"] < 1e-2 for row in rows)
    for words in ("wrong e2m1_g32_e8m0 dense, 12 rows: relative error", "cannot route", "cannot pack", "no such size"):
        assert words in said
    text = grouped.line("4x64x128", 3, "zipf", rows)
    assert text.count("dense / w4gemm ") == 2 and text.startswith("4x64x128, 3 tokens, zipf: e2m1_g32_e8m0 dense / ")


def test_rows_of_experts_are_those_of_one_weight_rotated(cpu_weights):
    drawn = weights.draw((3, 64, 128), WeightFormat.parse("nvfp4"), torch.bfloat16, [])
    one = on_cpu(64, 128, "nvfp4").dequantize()
    assert all(torch.equal(drawn.weight.expert(e).dequantize(), one.roll(e, 0)) for e in range(3))
    assert rotate(torch.tensor([1.0, 2.0, 3.0]), 1).tolist() == [3, 1, 2]


def test_a_run_on_the_cpu_goes_from_the_command_to_rows(cpu_weights, tmp_path, monkeypatch, capsys):
    """All but what only a GPU has: peers, compiled kernels, graphs, the amount of free memory."""
    monkeypatch.setattr(points, "time_graphs", timing.time_calls)
    monkeypatch.setattr(grouped, "available", lambda names: [Dense("dense"), Dense("broken")])
    monkeypatch.setattr(grouped, "Kernels", lambda *tensors: SimpleNamespace(wait=lambda products: list(products)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**12, 10**12))
    shapes, formats = ["--shapes", "2x64x128,3x64x64"], ["--format", "mxfp4,nvfp4"]
    options = [*shapes, *formats, "--tokens", "1,2", "--routing", "balanced,zipf", "--replays", "1"]
    grouped.main([*options, "--out", str(tmp_path / "rows.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 2 * 2 * 2 * 2 and len({row["run"] for row in rows}) == 1
    assert {row["work"] for row in rows} == {"w4a16_grouped"} and {row["impl"] for row in rows} == {"w4gemm", "dense"}
    assert [(r["experts"], r["m"], r["routing"]) for r in rows[::4]] == [
        (e, m, routing) for routing in ("balanced", "zipf") for m in (1, 2) for e in (2, 3)
    ]
    grouped.main([*options, "--seconds", "0", "--out", str(tmp_path / "none.jsonl")])
    assert not (tmp_path / "none.jsonl").exists() and "0 s are over" in capsys.readouterr().out
