"""The benchmark inside SGLang, with an engine that stands for SGLang's. Needs neither a GPU nor SGLang."""

from __future__ import annotations

import os

import pytest
from bench.engine import launch, sglang
from bench.rows import Row, read

ENGINE = """
import os, time
clock = [time.perf_counter()]
time.perf_counter = lambda: clock[0]  # it goes on with each token alone
from importlib.metadata import entry_points
__version__ = "0.5.23"

class Engine:
    def __init__(self, model_path, cuda_graph_bs_decode, max_running_requests, **others):
        assert os.path.exists(f"{model_path}/config.json") and others["attention_backend"] == "triton"
        assert cuda_graph_bs_decode == [1, 2, 3] and max_running_requests == 3
        assert [p.value for p in entry_points(group="sglang.srt.plugins")] == ["w4gemm.integrations.sglang:register"]
        self.ours = os.environ["W4GEMM_SGLANG"] == "auto"
        assert others["log_level"] == "info"  # SGLang logs errors alone otherwise
        if self.ours and not SILENT:
            print("[2026] w4gemm runs 8 linear layers; 3 kernels ready")

    def generate(self, input_ids, sampling_params):
        count = sampling_params["max_new_tokens"]
        clock[0] += count * (0.002 if self.ours else 0.004)
        if BREAKS and self.ours and len(input_ids) == 3:
            raise RuntimeError("no memory")
        return [{"output_ids": [*ids[:4], *[self.ours] * count][:count]} for ids in input_ids]

    def shutdown(self):
        pass
"""


def run(folder, monkeypatch, *more: str, breaks: bool = False, silent: bool = False) -> list[Row]:
    """Rows of a run; w4gemm's engine fails at a batch of three, or is not heard of."""
    (folder / "sglang.py").write_text(f"BREAKS, SILENT = {breaks}, {silent}\n{ENGINE}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", ""))))
    options = ["--tiny", "--batch", "1", "3", "--tokens-in", "8", "--tokens-out", "12", "--repeat", "2", *more]
    sglang.main([*options, "--work", str(folder / "work"), "--out", str(folder / "rows.jsonl")])
    return read(folder / "rows.jsonl")


def test_a_step_is_what_more_tokens_take(tmp_path, monkeypatch, capsys):
    rows = run(tmp_path, monkeypatch)
    assert {(row["engine"], row["engine_version"], row["model"]) for row in rows} == {
        ("sglang", "0.5.23", "tiny-llama-3-8b")
    }
    assert [(row["impl"], row["phase"], row.get("batch")) for row in rows] == [
        (impl, *phase) for impl in ("default", "w4gemm") for phase in (("start", None), ("decode", 1), ("decode", 3))
    ]
    decode = {(row["impl"], row["batch"]): row for row in rows if row["phase"] == "decode"}
    for (impl, _), row in decode.items():
        assert row["ms_step_least"] == row["ms_step"] == row["ms_step_most"] == (2.0 if impl == "w4gemm" else 4.0)
        assert row["repeats_itself"] and "tokens" not in row
        assert row["took_over"].startswith("w4gemm runs 8" if impl == "w4gemm" else "")
    ours = decode["w4gemm", 3]
    assert (ours["same_tokens_as"], ours["equal_prefix"], ours["equal_first"]) == ("default", 4, 3)
    printed = capsys.readouterr()
    assert "decode batch 3, tokens/s" in printed.out + printed.err


@pytest.mark.parametrize("fault", ["breaks", "silent"])
def test_an_engine_that_fails_or_has_none_of_our_layers_keeps_what_it_measured(fault, tmp_path, monkeypatch):
    *rows, failed = run(tmp_path, monkeypatch, "--impl", "w4gemm", **{fault: True})
    assert all(row["partial"] for row in rows) and failed["phase"] == "failed"
    phases = [("start", None), ("decode", 1), ("decode", 3)]
    assert [(row["phase"], row.get("batch")) for row in rows] == phases[: 2 if fault == "breaks" else 3]
    start, end = ("ended with 1 after", "no memory") if fault == "breaks" else ("w4gemm took over nothing", "")
    assert failed["reason"].startswith(start) and (end in failed["reason"])


def test_sglang_finds_the_plugin_of_a_source_tree(tmp_path):
    folder = launch.plugin_metadata(tmp_path / "plugin", sglang.GROUP)
    if folder is not None:  # else it is installed
        text = (folder / "w4gemm-0.dist-info/entry_points.txt").read_text()
        assert text == "[sglang.srt.plugins]\nw4gemm = w4gemm.integrations.sglang:register\n"
