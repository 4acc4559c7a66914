"""The benchmark of engines: whole runs that fail, end early or share memory. Needs neither a GPU nor vLLM."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.engine import __main__ as program  # noqa: E402
from bench.engine import (  # noqa: E402
    launch,
)
from bench.engine.implementations import Implementation  # noqa: E402
from bench.engine.models import model_named  # noqa: E402
from bench.engine.offline import Result  # noqa: E402
from bench.rows import read  # noqa: E402

from engine_samples import MACHETE, MARLIN, OURS, result, soon  # noqa: E402


def test_a_run_goes_on_when_one_implementation_fails(tmp_path, monkeypatch, capsys):
    """And its table, rows and reasons are those of what the engines returned."""
    kernels = {"default": {MACHETE: 14}, "marlin": {MACHETE: 14}}

    def run_offline(task, variables, log, seconds, preloaded):
        name = Path(variables["VLLM_CACHE_ROOT"]).parent.name.rpartition("-")[2]
        if name == "humming":
            raise launch.EngineError("ended with 1: out of memory")
        answers = [[1] * task.tokens_out] * 2
        return Result(**{**vars(result(3.0, answers)), "kernels": {"linear": kernels[name], "experts": {}}})

    monkeypatch.setattr(program, "run_offline", run_offline)
    out = tmp_path / "rows.jsonl"
    options = ["--tiny", "--fresh", "--batch", "2", "--work", str(tmp_path / "work"), "--out", str(out)]
    program.main([*options, "--impl", "default", "marlin", "humming"])
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["kind"] for row in found} == {"engine"} and {row["format"] for row in found} == {"gptq-int4-g128"}
    good = [row for row in found if row["phase"] != "failed"]
    assert [row["parts"] for row in good if row["phase"] == "start"] == [{"import": 0.0, "other": 20.0}]
    assert {row["impl"] for row in good} == {"machete"} and all(row["chosen"] for row in good)
    assert all(row["kernels"] == {"MacheteLinearKernel": 14} for row in good)
    reasons = {row["impl"]: row["reason"] for row in found if row["phase"] == "failed"}
    assert reasons["humming"] == "ended with 1: out of memory"
    assert "asked for marlin, but its linear layers got 14 x" in reasons["marlin"]
    shown = capsys.readouterr().err
    assert "first start: 20.0 s (other 20.0)" in shown and "measured for 0.0 s" in shown
    assert "humming: ended with 1: out of memory" in shown and "decode batch 2, tokens/s" in shown


VLLM_THAT_STARTS_SLOWLY = """
import json, os, time
__version__ = '0'
def note(event):
    with open(os.environ['EVENTS'], 'a') as file:
        file.write(json.dumps([event, os.getpid(), time.monotonic()]) + chr(10))
class SamplingParams:
    def __init__(self, **options): self.tokens = options['max_tokens']
class Answer:
    def __init__(self, tokens): self.outputs, self.token_ids = [self], [1] * tokens
class LLM:
    def __init__(self, **options):
        note('start'); time.sleep(0.5 if options['max_num_seqs'] == 2 else 0.0); note('up')
    def collective_rpc(self, name): return [{'linear': {'MacheteLinearKernel': 14}}]
    def generate(self, prompts, params, use_tqdm):
        note('measure'); time.sleep(0.005 * params.tokens); note('measured')
        return [Answer(params.tokens) for _ in prompts]
"""


def side_by_side(folder: Path, monkeypatch, memory: float, at_once: int, *implementations: str) -> list[dict]:
    """Rows of engines that start slowly, on a GPU with so much memory; ``folder`` gets a file of their events."""
    (folder / "vllm").mkdir()
    (folder / "vllm/__init__.py").write_text(VLLM_THAT_STARTS_SLOWLY)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
    monkeypatch.setenv("EVENTS", str(folder / "events"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=0: (memory, memory))
    options = ["--tiny", "--fresh", "--batch", "2", "--tokens-out", "8", "--prefill", "0", "--at-once", str(at_once)]
    options += ["--work", str(folder / "work"), "--out", str(folder / "rows.jsonl"), "--impl", *implementations]
    program.main(options)
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_engines_start_side_by_side_and_are_measured_one_at_a_time(tmp_path, monkeypatch):
    found = side_by_side(tmp_path, monkeypatch, 80e9, 3, "default", "machete", "marlin")
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    names = [name for name, *_ in events]
    assert names[:6].count("start") == names[:6].count("up") == 3, "one was measured before all had started"
    processes = [process for name, process, _ in events if name == "measure"]
    assert sorted(processes, key=processes.index) == processes, "two were measured at a time"
    assert {row["at_once"] for row in found} == {3}
    assert {row["impl"] for row in found if row["phase"] == "decode"} == {"machete"}
    assert [row["impl"] for row in found if row["phase"] == "failed"] == ["marlin"]  # its layers got Machete


def test_engines_that_have_no_room_beside_each_other_start_one_after_the_other(tmp_path, monkeypatch, capsys):
    found = side_by_side(tmp_path, monkeypatch, 16e9, 2, "default", "machete")
    wanted = "2 engines side by side: memory: 7 GB for each engine are too few for 0 GB of weights; 1 instead"
    assert wanted in capsys.readouterr().err
    assert {row["at_once"] for row in found} == {1} and "failed" not in {row["phase"] for row in found}


VLLM_THAT_ENDS_EARLY = """
import os, time
__version__ = '0.26.0'
class SamplingParams:
    def __init__(self, **options): self.tokens = options['max_tokens']
class Answer:
    def __init__(self, tokens): self.outputs, self.token_ids = [self], [1] * tokens
class LLM:
    def __init__(self, **options): pass
    def collective_rpc(self, name): return [{'linear': {'MacheteLinearKernel': 14}}]
    def generate(self, prompts, params, use_tqdm):
        if len(prompts) == 4:
            if os.environ['END'] == 'crash': raise ValueError('no more memory')
            print('hanging', flush=True); time.sleep(600)
        time.sleep(0.001 * params.tokens)
        return [Answer(params.tokens) for _ in prompts]
"""
"""Two requests at a time are answered, four are not."""


@pytest.fixture
def ends_early(tmp_path, monkeypatch):
    """Options of a run whose engines answer two requests at a time, but not four, and its environment."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text(VLLM_THAT_ENDS_EARLY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}:{ROOT / 'src'}")
    monkeypatch.setenv("END", "hang")
    options = ["--tiny", "--batch", "2", "4", "--tokens-out", "8", "--prefill", "0", "--impl", "default"]
    folders = {"--work": "work", "--logs": "logs", "--out": "rows.jsonl"}
    return [*options, *(word for name, to in folders.items() for word in (name, str(tmp_path / to)))]


def rows_before_the_end(folder: Path) -> tuple[list[dict[str, object]], str]:
    """Rows of the last run of ``ends_early``, and the reason that its engine ended for."""
    *found, failed = read(folder / "rows.jsonl")[-3:]
    assert [(row["phase"], row.get("batch")) for row in found] == [("start", None), ("decode", 2)]
    assert failed["phase"] == "failed" and "partial" not in failed
    for row in (*found, failed):
        assert (row["impl"], row["chosen"], row["engine_version"]) == ("machete", True, "0.26.0")
    assert all(row["partial"] and row["kernels"] == {"MacheteLinearKernel": 14} for row in found)
    return found, str(failed["reason"])


def test_an_engine_that_crashes_keeps_the_points_before(ends_early, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("END", "crash")
    program.main([*ends_early, "--fresh"])
    _, reason = rows_before_the_end(tmp_path)
    assert re.fullmatch(r"ended with 1 after \d+ s: ValueError: no more memory", reason)
    shown = capsys.readouterr().err
    assert f"machete failed: {reason}" in shown and "decode batch 2, tokens/s" in shown


def test_an_engine_that_is_stopped_by_its_limit_keeps_the_points_before(ends_early, tmp_path):
    for seconds in (4, 20, 100):  # a busy machine may not come so far
        program.main([*ends_early, "--fresh", "--seconds", str(seconds)])
        if "hanging" in read(tmp_path / "rows.jsonl")[-1]["reason"]:
            break
    _, reason = rows_before_the_end(tmp_path)
    assert reason == f"not done in {seconds} s, its limit: hanging"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("more", [[], ["--fresh"]], ids=["forked", "fresh"])
def test_an_interrupted_run_keeps_the_points_before(ends_early, tmp_path, number, more):
    command = [sys.executable, "-m", "bench.engine", *ends_early, *more, "--seconds", "500"]
    logs, start = tmp_path / "logs", time.monotonic()
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    try:
        assert soon(lambda: any("hanging" in log.read_text() for log in logs.glob("*-default-1.log")))
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    _, reason = rows_before_the_end(tmp_path)
    ran = re.fullmatch(r"interrupted: ended with -\d+ after (\d+) s: hanging", reason)
    assert ran and int(ran[1]) <= time.monotonic() - start + 1
    assert f"machete failed: {reason}" in said and process.returncode != 0


def test_an_engine_that_ended_early_is_no_reference_and_is_compared_at_its_batches(tmp_path, monkeypatch):
    """The first of three engines lacks a batch, so the second is the reference; the last lacks one too."""

    def run_offline(task, variables, log, seconds, preloaded):
        name = Path(variables["VLLM_CACHE_ROOT"]).parent.name.rpartition("-")[2]
        found = result(3.0, [[1] * task.tokens_out] * 2)
        kernel = {"marlin": MARLIN, "machete": MACHETE, "w4gemm": OURS}[name]
        if name == "machete":
            found.decode.append({**result(3.0, [[1] * task.tokens_out] * 4).decode[0]})
        else:
            found.failure = "not done in 300 s, its limit: batch 2"
        return Result(**{**vars(found), "kernels": {"linear": {kernel: 14}, "experts": {}}})

    monkeypatch.setattr(program, "run_offline", run_offline)
    out = tmp_path / "rows.jsonl"
    options = ["--tiny", "--fresh", "--batch", "2", "4", "--work", str(tmp_path / "work"), "--out", str(out)]
    program.main([*options, "--in-order", "--impl", "marlin", "machete", "w4gemm"])
    decode = [row for row in read(out) if row["phase"] == "decode"]
    found = [(row["impl"], row["batch"], row.get("same_tokens_as"), row.get("partial")) for row in decode]
    assert found == [
        ("marlin", 2, None, True),
        ("machete", 2, None, None),
        ("machete", 4, None, None),
        ("w4gemm", 2, "machete", True),
    ]


def test_a_start_is_kept_if_the_next_one_fails(tmp_path, monkeypatch):
    starts = iter([replace(result(3.0, [[1] * 128] * 2), decode=[], prefill_s=[])])

    def run_offline(task, variables, log, seconds, preloaded):
        if not (found := next(starts, None)):
            raise launch.EngineError("ended with 1 after 9 s: out of memory")
        return Result(**{**vars(found), "kernels": {"linear": {MACHETE: 14}, "experts": {}}})

    monkeypatch.setattr(program, "run_offline", run_offline)
    out = tmp_path / "rows.jsonl"
    options = ["--tiny", "--fresh", "--starts", "2", "--work", str(tmp_path / "work"), "--out", str(out)]
    program.main([*options, "--impl", "default"])
    start, failed = read(out)
    assert (start["phase"], start["impl"], start["partial"]) == ("start", "machete", True)
    assert failed["reason"] == "ended with 1 after 9 s: out of memory"


def test_engines_that_share_memory_are_told_how_much_keys_and_values_may_take(tmp_path, monkeypatch):
    (tmp_path / "a.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=0: (80e9, 80e9))
    shared = launch.EngineOptions("bfloat16", True, False, 1, 0.8, 4096, at_once=2)
    dense, experts = model_named("llama-3-8b"), model_named("qwen3-30b-a3b")
    arguments = shared.arguments(tmp_path, Implementation.parse("default"), dense, (8,))
    assert arguments["gpu_memory_utilization"] == 0.4
    assert arguments["kv_cache_memory_bytes"] == int(0.4 * 80e9 - 1100 - 6e9)
    with pytest.raises(launch.EngineError, match="memory: 6 GB for each engine are too few for 0 GB of weights"):
        replace(shared, memory=0.16).cache_bytes(tmp_path, dense)
    os.truncate(tmp_path / "a.safetensors", 16 * 10**9)  # which experts take twice while they are loaded
    assert shared.cache_bytes(tmp_path, dense) == int(32e9 - 17.6e9 - 6e9)
    with pytest.raises(launch.EngineError, match="memory: 32 GB for each engine are too few for 16 GB of weights"):
        shared.cache_bytes(tmp_path, experts)
