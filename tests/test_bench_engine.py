"""The benchmark of engines: how they are named, started, measured and ended. Needs neither a GPU nor vLLM."""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench.engine import __main__ as program
from bench.engine import launch, offline, pair, rows, serve, turns, worker
from bench.engine.implementations import Implementation
from bench.engine.models import model_named
from bench.engine.offline import Result, Task
from bench.rows import read

ROOT = Path(__file__).resolve().parent.parent

OURS = "w4gemm.integrations.vllm.dense.LinearKernel"
MACHETE = "vllm.model_executor.kernels.linear.mixed_precision.machete.MacheteLinearKernel"
MARLIN = "vllm.model_executor.kernels.linear.mixed_precision.marlin.MarlinLinearKernel"
MARLIN_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.marlin_moe.MarlinExperts"


def result(ms_step: float, tokens: list[list[int]]) -> Result:
    """Return the result of an engine whose decode steps take ``ms_step``, with the answers ``tokens``."""
    total = 0.5 + (len(tokens[0]) - 1) * ms_step / 1e3
    decode = {"batch": len(tokens), "first_token_s": [0.5], "total_s": [total], "tokens": tokens}
    return Result("0.26.0", 20.0, {}, [{**decode, "repeats_itself": True}], [0.25])


@pytest.mark.parametrize(
    "name, model, arguments, switch",
    [
        ("marlin", "llama-3-8b", {"linear_backend": "marlin"}, "off"),
        ("marlin", "qwen3-30b-a3b", {"linear_backend": "marlin", "moe_backend": "marlin"}, "off"),
        ("marlin", "gpt-oss-20b", {"moe_backend": "marlin"}, "off"),
        ("w4gemm+marlin", "qwen3-30b-a3b", {"moe_backend": "marlin"}, "on"),
        ("w4gemm", "qwen3-30b-a3b", {}, "on"),
        ("default", "qwen3-30b-a3b", {}, "off"),
    ],
)
def test_implementations_become_flags_and_a_switch(name, model, arguments, switch):
    implementation = Implementation.parse(name)
    assert implementation.engine_arguments(model_named(model)) == arguments
    assert implementation.environment() == {"W4GEMM_VLLM": switch}


@pytest.mark.parametrize(
    "asked, linear, experts, name",
    [
        ("default", {MACHETE: 128}, {}, "machete"),
        ("default", {MACHETE: 96}, {MARLIN_EXPERTS: 48}, "machete+marlin"),
        ("w4gemm", {OURS: 128}, {}, "w4gemm"),
        ("marlin", {MARLIN: 9}, {MARLIN_EXPERTS: 4}, "marlin"),
    ],
)
def test_a_row_is_named_by_what_the_layers_run(asked, linear, experts, name):
    assert Implementation.parse(asked).check({"linear": linear, "experts": experts}) == name


@pytest.mark.parametrize(
    "linear, experts, message",
    [
        ({MARLIN: 128}, {}, "asked for w4gemm, but its linear layers got 128 x .*Marlin"),
        ({OURS: 96, MARLIN: 32}, {}, "linear layers got 96 x .*, 32 x"),
        ({OURS: 96}, {MARLIN_EXPERTS: 48}, "its experts layers got 48 x .*MarlinExperts"),
        ({}, {}, "no layer of the model is quantized"),
    ],
)
def test_other_kernels_than_asked_for_are_refused(linear, experts, message):
    with pytest.raises(ValueError, match=message):
        Implementation.parse("w4gemm").check({"linear": linear, "experts": experts})


def instance(qualified: str, **attributes: object) -> object:
    """An object of a class of this name."""
    module, _, name = qualified.rpartition(".")
    made = type(name, (), {"__module__": module})()
    vars(made).update(attributes)
    return made


def test_kernels_are_found_where_vllm_keeps_them():
    """At a method or, of compressed-tensors, at a scheme; of experts in a modular kernel."""
    model, machete, marlin = torch.nn.Module(), instance("vllm.a.MacheteLinearKernel"), instance("vllm.b.MarlinExperts")
    modular = SimpleNamespace(impl=SimpleNamespace(fused_experts=marlin))
    for name, attributes in {
        "a": {"quant_method": instance("v.AutoGPTQLinearMethod", kernel=machete)},
        "b": {"quant_method": instance("v.UnquantizedLinearMethod")},
        "c": {"quant_method": instance("v.Method"), "scheme": SimpleNamespace(kernel=machete)},
        "d": {"quant_method": instance("v.AutoGPTQMoEMethod", moe_kernel=modular)},
    }.items():
        layer = torch.nn.Module()
        vars(layer).update(attributes)
        model.add_module(name, layer)
    expected = {"linear": {"vllm.a.MacheteLinearKernel": 2}, "experts": {"vllm.b.MarlinExperts": 1}}
    assert worker.kernels_of(model) == expected


OPTIONS = launch.EngineOptions("bfloat16", compiled=True, eager=False, gpus=2, memory=0.8, max_len=8448)


def test_engine_arguments_are_vllms_defaults_but_for_what_is_said():
    arguments = OPTIONS.arguments(Path("/m"), Implementation.parse("marlin"), model_named("llama-3-8b"), (1, 256))
    assert arguments["compilation_config"] == {"cudagraph_capture_sizes": [*launch.CAPTURED, 256]}
    assert (arguments["max_num_seqs"], arguments["tensor_parallel_size"]) == (256, 2)
    words = serve.command(arguments, 8000)
    assert "--no-enable-prefix-caching" in words and words[words.index("--linear-backend") + 1] == "marlin"
    assert json.loads(words[words.index("--compilation-config") + 1]) == arguments["compilation_config"]


def test_rows_of_a_result():
    """A batch that was still compiled, or without room in the cache, is no measurement."""
    task = Task({}, 512, (2,), 16, 5, prefill=8192)
    actual = start, decode, prefill = rows.rows_of(result(2.5, [[1, 2, 3, 4, 5]] * 2), task)
    assert start == {"phase": "start", "seconds": 20.0}
    assert (decode["ms_step"], decode["tokens_s"], decode["batch"]) == (2.5, 800.0, 2)
    assert decode["first_tokens_s"] == 0.5
    assert (prefill["tokens_s"], prefill["tokens_in"]) == (32768.0, 8192)
    _, failed, _ = rows.rows_of(result(-1.0, [[1, 2, 3, 4, 5]] * 2), task)
    assert failed == {"phase": "failed", "reason": "batch 2: first tokens took 0.500 s, whole answers 0.496 s"}
    assert rows.with_room(actual, 2 * (16 + 5)) == rows.with_room(actual, None) == actual
    assert rows.cache_tokens("a\nINFO GPU KV cache size: 49,984 tokens\n") == 49_984 and rows.cache_tokens("") is None
    before, failed, behind = rows.with_room(actual, 41)
    assert failed["phase"] == "failed" and failed["reason"].startswith("batch 2: 42 tokens, and the KV cache holds 41;")
    assert [before, behind] == [start, prefill]


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


def test_all_runs_of_a_point_come_to_its_row(monkeypatch):
    engine = engine_of(monkeypatch, [4.0, 4.1, 7.0, 4.0, 1.0, 1.0, 1.2, 1.0])
    actual = engine.decode(2)
    assert (actual["total_s"], actual["first_token_s"]) == ([4.0, 4.1, 7.0, 4.0], [1.0, 1.0, 1.2, 1.0])
    _, decode, prefill = rows.rows_of(
        Result(decode=[actual], prefill_s=[0.25, 0.26, 0.5]), Task({}, 512, (2,), 16, 4, prefill=8192)
    )
    assert (decode["ms_step"], decode["ms_step_least"], decode["ms_step_most"]) == (1016.6667, 1000.0, 2000.0)
    assert [decode[f"first_tokens_s{end}"] for end in ("", "_least", "_most")] == [1.0, 1.0, 1.2]
    assert (decode["runs"], decode["tokens_s"], prefill["runs"]) == (4, 2.0, 3)
    assert [prefill[f"seconds{end}"] for end in ("", "_least", "_most")] == [0.26, 0.25, 0.5]


def test_engines_are_timed_by_turns_in_both_orders(monkeypatch):
    clock, order = [0.0], []

    class Llm:
        def __init__(self, name, ms_step):
            self.name, self.ms_step = name, ms_step

        def generate(self, requests, params):
            clock[0] += len(requests[0]["prompt_token_ids"]) * 1e-4 + (params["max_tokens"] - 1) * self.ms_step * 1e-3
            order.append(self.name)

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    monkeypatch.setattr(turns.time, "perf_counter", lambda: clock[0])
    engines = {"a": Llm("a", 2.0).generate, "b": Llm("b", 3.0).generate}
    a, b, long_a, _ = turns.timed(engines, 100, [4], [2000], turns.Repeats(2))
    assert [(row["impl"], row["batch"], row["ms_step"], row["tokens_s"]) for row in (a, b)] == [
        ("a", 4, pytest.approx(2.0), 2000.0),
        ("b", 4, pytest.approx(3.0), pytest.approx(1333.3)),
    ]
    assert (long_a["phase"], long_a["impl"], long_a["tokens_in"]) == ("prefill", "a", 2000)
    assert long_a["seconds"] == pytest.approx(0.2)
    warm_up, timed = order[:8], order[8:16]  # a step is the difference of two runs
    assert warm_up == [*"aaaabbbb"] and timed == [*"aabbbbaa"]


def test_adapters_take_turns_among_requests_and_answers_of_one_adapter_come_from_its_own_batch(monkeypatch):
    batches = []

    def generate(requests, params, adapters):
        batches.append(adapters)
        log = [{7: SimpleNamespace(logprob=-0.5)}]
        numbers = adapters or [None] * len(requests)
        outputs = [SimpleNamespace(token_ids=[7], logprobs=log, adapter=number) for number in numbers]
        return [SimpleNamespace(outputs=[out]) for out in outputs]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    engine = pair.Engine.__new__(pair.Engine)
    engine.kernels, engine.generate = "w4gemm", generate
    assert engine.answer([[4]] * 5, ["a", "b"], whole=False).tokens == [[7]] * 5
    engine.answer_by_adapter([[4]] * 3, ["a", "b"])
    assert batches == [["a", "b", None, "a", "b"], ["a"] * 3, ["b"] * 3, None]
    engine.kernels = pair.WITHOUT_LORA
    engine.answer([[4]] * 2, ["a"], whole=False)
    assert batches[-1] is None


@pytest.mark.parametrize(
    "asked, kernel, name",
    [
        ("default", "HummingFP8ScaledMMKernel", "humming"),
        ("default", "CutlassFP8ScaledMM", "dense"),
        ("w4gemm-fp8", "W4GemmMxFp4LinearKernel", "w4gemm-fp8"),
        ("w4gemm-fp8", "MarlinMxFp4LinearKernel", "marlin"),
    ],
)
def test_engines_are_named_by_what_their_layers_run_but_for_fp8_weights_beside_fp8(asked, kernel, name, monkeypatch):
    monkeypatch.setattr(pair, "kernels_of", lambda model: {"linear": {f"vllm.scaled_mm.{kernel}": 4}})
    engine = pair.Engine.__new__(pair.Engine)
    engine.kernels, engine.llm = asked, SimpleNamespace(collective_rpc=lambda call: [None])
    engine.look()
    assert engine.name == name


def test_answers_are_compared_up_to_the_first_token_that_differs():
    marlin, ours = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], [[1, 2, 3, 4, 5], [9, 2, 3, 4, 5]]
    actual = rows.rows_of(result(2.5, ours), Task({}, 512, (2,), 16, 5))
    rows.add_agreement(actual, {2: ours}, "marlin", {2: marlin})
    (decode,) = [row for row in actual if row["phase"] == "decode"]
    assert (decode["same_tokens_as"], decode["equal_prefix"]) == ("marlin", 2.5)


def test_experts_that_moved_are_counted_and_compared():
    before = [[[[0, 70], [1, 71]]], [[[2, 72], [3, 73]]]]  # two GPUs, one layer
    after = [[[[2, 72], [1, 71]]], [[[0, 70], [3, 73]]]]
    assert offline.moves(before, before) == {"places": 4, "moved": 0, "intact": True}
    assert offline.moves(before, after) == {"places": 4, "moved": 2, "intact": True}
    after[0][0][0] = [2, 70]  # said to be expert 2, with the weights of 0
    assert offline.moves(before, after) == {"places": 4, "moved": 2, "intact": False}
    actual = result(2.5, [[1, 2, 3]])
    actual.moves = offline.moves(before, after)
    assert rows.rows_of(actual, Task({}, 512, (1,), 16, 3))[-1] == {"phase": "moves", **actual.moves}


def test_a_checksum_tells_bytes_and_their_order():
    a, b = torch.arange(16, dtype=torch.bfloat16), torch.arange(4).to(torch.float8_e4m3fn)
    swapped = a.clone()
    swapped[:2] = a[[1, 0]]
    sums = [worker.checksum(t) for t in ([a, b], [b, a], [swapped, b], [a], [a.view(4, 4), b])]
    assert len(set(sums[:4])) == 4 and sums[4] == sums[0]


def test_a_run_goes_on_when_one_implementation_fails(tmp_path, monkeypatch, capsys):
    """Its table, rows and reasons are those of what the engines returned; the first whole engine is the reference."""
    kernels = {"default": MACHETE, "marlin": MACHETE, "w4gemm": OURS}

    def run_offline(task, variables, log, seconds):
        name = Path(variables["VLLM_CACHE_ROOT"]).parent.name.rpartition("-")[2]
        if name == "humming":
            raise launch.EngineError("ended with 1: out of memory")
        actual = result(3.0, [[1] * task.tokens_out] * 2)
        actual.failure = "not done in 300 s, its limit: batch 2" if name == "w4gemm" else ""
        return replace(actual, kernels={"linear": {kernels[name]: 14}, "experts": {}})

    monkeypatch.setattr(program, "run_offline", run_offline)
    out = tmp_path / "rows.jsonl"
    options = ["--tiny", "--batch", "2", "--work", str(tmp_path / "work"), "--out", str(out), "--in-order"]
    program.main([*options, "--impl", "default", "marlin", "humming", "w4gemm"])
    actual = read(out)
    assert {row["kind"] for row in actual} == {"engine"} and {row["format"] for row in actual} == {"gptq-int4-g128"}
    decode = {row["impl"]: row for row in actual if row["phase"] == "decode"}
    assert decode.keys() == {"machete", "w4gemm"} and decode["machete"]["chosen"]
    assert decode["w4gemm"]["same_tokens_as"] == "machete" and decode["w4gemm"]["partial"]
    assert decode["machete"]["kernels"] == {"MacheteLinearKernel": 14} and "partial" not in decode["machete"]
    reasons = {row["impl"]: row["reason"] for row in actual if row["phase"] == "failed"}
    assert reasons["humming"] == "ended with 1: out of memory" and "its limit: batch 2" in reasons["w4gemm"]
    assert "asked for marlin, but its linear layers got 14 x" in reasons["marlin"]
    shown = capsys.readouterr().err
    assert "humming: ended with 1: out of memory" in shown and "decode batch 2, tokens/s" in shown


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


@pytest.mark.parametrize("end", ["crash", "hang"])
def test_an_engine_that_ends_early_keeps_the_points_before(end, tmp_path, monkeypatch, capsys):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text(VLLM_THAT_ENDS_EARLY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}:{ROOT / 'src'}")
    monkeypatch.setenv("END", end)
    options = ["--tiny", "--batch", "2", "4", "--tokens-out", "8", "--prefill", "0", "--impl", "default"]
    folders = {"--work": "work", "--logs": "logs", "--out": "rows.jsonl"}
    options += [word for name, to in folders.items() for word in (name, str(tmp_path / to))]
    for seconds in (4, 20, 100):  # a busy machine may not come so far
        program.main([*options, "--seconds", str(seconds)])
        *actual, failed = read(tmp_path / "rows.jsonl")[-3:]
        if re.search("hanging|no more memory", failed["reason"]):
            break
    assert [(row["phase"], row.get("batch")) for row in actual] == [("start", None), ("decode", 2)]
    assert failed["phase"] == "failed" and "partial" not in failed
    assert all(row["partial"] and row["kernels"] == {"MacheteLinearKernel": 14} for row in actual)
    for row in (*actual, failed):
        assert (row["impl"], row["chosen"], row["engine_version"]) == ("machete", True, "0.26.0")
    ended = r"ended with 1 after \d+ s: ValueError: no more memory"
    assert re.fullmatch(ended if end == "crash" else f"not done in {seconds} s, its limit: hanging", failed["reason"])
    assert f"machete failed: {failed['reason']}" in capsys.readouterr().err
