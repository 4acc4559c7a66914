"""The benchmark of engines: how engines are started, measured and ended. Needs neither a GPU nor vLLM."""

from __future__ import annotations

import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.engine import __main__ as program  # noqa: E402
from bench.engine import (  # noqa: E402
    launch,
    offline,
    phases,
    preload,
    rows,
    serve,
    worker,
)
from bench.engine.implementations import Implementation  # noqa: E402
from bench.engine.models import model_named  # noqa: E402
from bench.engine.offline import Result, Task  # noqa: E402
from bench.rows import read  # noqa: E402

from engine_samples import MACHETE, MARLIN, result  # noqa: E402

# --- implementations ------------------------------------------------------------------------------------------------

MARLIN_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.marlin_moe.MarlinExperts"
OURS = "w4gemm.integrations.vllm.dense.LinearKernel"


def test_implementations_become_flags_and_a_switch():
    dense, experts, gpt_oss = (model_named(n) for n in ("llama-3-8b", "qwen3-30b-a3b", "gpt-oss-20b"))
    marlin, ours, default = (Implementation.parse(n) for n in ("marlin", "w4gemm", "default"))
    mixed = Implementation.parse("w4gemm+marlin")
    assert marlin.engine_arguments(dense) == {"linear_backend": "marlin"}
    assert marlin.engine_arguments(experts) == {"linear_backend": "marlin", "moe_backend": "marlin"}
    assert marlin.engine_arguments(gpt_oss) == {"moe_backend": "marlin"}
    assert mixed.engine_arguments(experts) == {"moe_backend": "marlin"}
    assert not ours.engine_arguments(experts) and not default.engine_arguments(experts)
    switches = [i.environment()["W4GEMM_VLLM"] for i in (marlin, ours, default, mixed)]
    assert switches == ["off", "on", "off", "on"]
    with pytest.raises(ValueError, match="impl: wanted one of default, w4gemm, .*got 'marlyn'"):
        Implementation.parse("marlyn")


def test_a_row_is_named_by_what_the_layers_run():
    default = Implementation.parse("default")
    assert default.check({"linear": {MACHETE: 128}, "experts": {}}) == "machete"
    assert default.check({"linear": {MACHETE: 96}, "experts": {MARLIN_EXPERTS: 48}}) == "machete+marlin"
    assert Implementation.parse("w4gemm").check({"linear": {OURS: 128}, "experts": {}}) == "w4gemm"
    assert Implementation.parse("marlin").check({"linear": {MARLIN: 9}, "experts": {MARLIN_EXPERTS: 4}}) == "marlin"


@pytest.mark.parametrize(
    "kernels, message",
    [
        ({"linear": {MARLIN: 128}, "experts": {}}, "asked for w4gemm, but its linear layers got 128 x .*Marlin"),
        ({"linear": {OURS: 96, MARLIN: 32}, "experts": {}}, "linear layers got 96 x .*, 32 x"),
        ({"linear": {OURS: 96}, "experts": {MARLIN_EXPERTS: 48}}, "its experts layers got 48 x .*MarlinExperts"),
        ({"linear": {}, "experts": {}}, "no layer of the model is quantized"),
    ],
)
def test_other_kernels_than_asked_for_are_refused(kernels, message):
    with pytest.raises(ValueError, match=message):
        Implementation.parse("w4gemm").check(kernels)


class AutoGPTQLinearMethod:
    kernel: object = None


class UnquantizedLinearMethod:
    pass


class AutoGPTQMoEMethod:
    moe_kernel: object = None


def test_kernels_are_found_where_vllm_keeps_them():
    model = torch.nn.Module()
    kernel_class = type("MacheteLinearKernel", (), {"__module__": "vllm.machete"})
    for name, method in (
        ("a", AutoGPTQLinearMethod()),
        ("b", AutoGPTQLinearMethod()),
        ("c", UnquantizedLinearMethod()),
    ):
        layer = torch.nn.Module()
        layer.quant_method = method
        if isinstance(method, AutoGPTQLinearMethod):
            method.kernel = kernel_class()
        model.add_module(name, layer)
    scheme = torch.nn.Module()  # compressed-tensors: the kernel is the scheme's
    scheme.quant_method, scheme.scheme = SimpleNamespace(), SimpleNamespace(kernel=kernel_class())
    model.add_module("d", scheme)
    experts, method = torch.nn.Module(), AutoGPTQMoEMethod()
    marlin = type("MarlinExperts", (), {"__module__": "vllm.marlin_moe"})()
    method.moe_kernel = SimpleNamespace(impl=SimpleNamespace(fused_experts=marlin))
    experts.quant_method = method
    model.add_module("e", experts)
    wanted = {"linear": {"vllm.machete.MacheteLinearKernel": 3}, "experts": {"vllm.marlin_moe.MarlinExperts": 1}}
    assert worker.kernels_of(model) == wanted


# --- engines ----------------------------------------------------------------------------------------------------------

OPTIONS = launch.EngineOptions("bfloat16", compiled=True, eager=False, gpus=2, memory=0.8, max_len=8448)


def test_engines_start_without_other_models_routers(monkeypatch):
    ran: list[object] = []
    name = "vllm.model_executor.kernels.linear.cute_dsl.ll_bf16"
    parts = name.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
    worker.skip_router_warmup()  # another version of vLLM
    module = ModuleType(name)
    module.ll_bf16_gemm_kernel = SimpleNamespace(warmup=lambda **given: ran.append(given))
    monkeypatch.setitem(sys.modules, name, module)
    worker.skip_router_warmup()
    module.ll_bf16_gemm_kernel.warmup(shapes=(), m_values=())
    assert not ran


def test_engine_arguments_are_vllms_defaults_but_for_what_is_said():
    arguments = OPTIONS.arguments(Path("/m"), Implementation.parse("marlin"), model_named("llama-3-8b"), (1, 256))
    assert arguments["compilation_config"] == {"cudagraph_capture_sizes": [*launch.CAPTURED, 256]}
    assert (arguments["max_num_seqs"], arguments["tensor_parallel_size"]) == (256, 2)
    words = serve.command(arguments, 8000)
    assert "--no-enable-prefix-caching" in words and words[words.index("--linear-backend") + 1] == "marlin"
    assert json.loads(words[words.index("--compilation-config") + 1]) == arguments["compilation_config"]


def test_starts_are_first_cold_or_warm(tmp_path):
    """And share what vLLM knows of the model's class, but no compiled graphs."""
    marlin, machete = (launch.Caches(tmp_path / name, tmp_path / "shared") for name in ("marlin", "machete"))
    assert [marlin.start(), marlin.start()] == ["first", "first"]  # the former failed
    marlin.started()
    assert [marlin.start(), machete.start()] == ["warm", "cold"]
    (tmp_path / "marlin/vllm/modelinfos/a").touch()
    assert (tmp_path / "machete/vllm/modelinfos/a").exists()
    assert marlin.environment()["VLLM_CACHE_ROOT"] != machete.environment()["VLLM_CACHE_ROOT"]


def test_a_source_trees_plugin_is_found_by_metadata(tmp_path):
    (point,) = launch.entry_points(ROOT / "pyproject.toml")
    assert point.partition(" = ")[2].startswith("w4gemm.integrations.vllm:")
    launch.write_metadata(tmp_path, [point])
    found = importlib_entry_points(tmp_path)
    assert [f"{p.name} = {p.value}" for p in found] == [point]


def importlib_entry_points(folder: Path):
    import importlib.metadata

    (distribution,) = importlib.metadata.distributions(path=[str(folder)])
    assert distribution.metadata["Name"] == "w4gemm"
    return [p for p in distribution.entry_points if p.group == "vllm.general_plugins"]


def test_a_process_that_fails_says_why_and_one_that_hangs_is_ended(tmp_path):
    broken = tmp_path / "sitecustomize.py"
    broken.write_text("raise SystemExit('no such kernel')")
    task = Task({}, 512)
    variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with pytest.raises(launch.EngineError, match=r"ended with 1 after \d+ s: SystemExit: no such kernel"):
        launch.run_offline(task, variables, tmp_path / "log", 300)
    broken.write_text("import time; print('started', flush=True); time.sleep(600)")
    hung = once_begun(lambda seconds: launch.run_offline(task, variables, tmp_path / "hangs", seconds))
    assert re.fullmatch(r"not done in \d+ s, its limit: started", hung)


def test_the_reason_is_the_engines_own_error(tmp_path):
    log = tmp_path / "log"
    lines = (
        "core.py:9] ValueError: too little memory",
        "    raise RuntimeError(",
        "RuntimeError: failed. See root cause above.",
    )
    log.write_text("\n".join(lines))
    assert launch.last_error(log) == "core.py:9] ValueError: too little memory"


def test_an_engine_waits_for_the_memory_of_the_one_before(monkeypatch):
    free = iter([10, 50, 90, 20, 20])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free, 20), 100))
    launch.wait_for_memory(0.85, 1)
    with pytest.raises(launch.EngineError, match="20% of a GPU's memory is free, wanted 85%"):
        launch.wait_for_memory(0.85, 1, seconds=0.3)


@pytest.fixture
def preloaded(tmp_path):
    """A process to fork from, whose "vLLM" fails, hangs or names the variables of its engine."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os, subprocess, time\n__version__ = '0'\nclass LLM:\n    def __init__(self, wish):\n"
        "        if wish == 'hang':\n"
        "            core = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "            print(f'hanging with {core.pid}', flush=True); time.sleep(600)\n"
        "        if wish == 'fail': raise ValueError('no such kernel')\n"
        "    def collective_rpc(self, name): return [{'linear': {os.environ['W4GEMM_VLLM']: 1}}]\n"
    )
    process = preload.Preloaded({"PYTHONPATH": f"{tmp_path}:{ROOT}"}, ROOT, tmp_path / "preload.log")
    yield process
    process.close()


def once_begun(hang: Callable[[float], object]) -> str:
    """Error about a process that hangs, which is given more time if it has printed nothing, as on a busy machine."""
    for seconds in (1.0, 5.0, 25.0, 125.0):
        with pytest.raises(launch.EngineError, match=f"not done in {seconds:.0f} s, its limit: ") as hung:
            hang(seconds)
        if "nothing was printed" not in str(hung.value):
            break
    return str(hung.value)


def soon(condition: Callable[[], bool]) -> bool:
    """True as soon as the condition is, which may take some seconds."""
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_engines_are_forked_from_a_process_that_has_imported_vllm(preloaded, tmp_path):
    def run(wish: str, switch: str, seconds: float = 300.0) -> Result:
        task = Task({"wish": wish}, 512, start_only=True)
        variables = {"W4GEMM_VLLM": switch, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
        return launch.run_offline(task, variables, tmp_path / f"{wish}.log", seconds, preloaded)

    assert preloaded.ready()
    assert run("on", "on").kernels == {"linear": {"on": 1}}
    with pytest.raises(launch.EngineError, match=r"ended with 1 after \d+ s: ValueError: no such kernel"):
        run("fail", "on")
    hung = once_begun(lambda seconds: run("hang", "on", seconds))
    assert re.fullmatch(r"not done in \d+ s, its limit: hanging with \d+", hung)
    core = Path(f"/proc/{hung.split()[-1]}/stat")
    assert soon(lambda: not core.exists() or core.read_text().split()[2] == "Z")  # in a group of its own, and killed
    assert run("off", "off").kernels == {"linear": {"off": 1}}
    preloaded.close()
    with pytest.raises(launch.EngineError, match="ended with -1 after 0 s: nothing was printed"):
        run("none", "on")
    assert not preloaded.ready() and run("again", "on").kernels  # by a process that imports vLLM itself


LOG = """\
(Worker_TP0 pid=7) INFO [warmup.py:126] w4gemm runs 96 4-bit linear layers; 60 kernels ready in 14.3 s: 60
(Worker_TP1 pid=8) INFO [warmup.py:126] w4gemm runs 96 4-bit linear layers; 60 kernels ready in 12.0 s: 60
(Worker_TP0 pid=7) INFO [model_runner.py:305] Model loading took 5.4 GiB and 20.000000 seconds
(Worker_TP1 pid=8) INFO [model_runner.py:305] Model loading took 5.4 GiB and 21.898375 seconds
(Worker_TP0 pid=7) INFO [monitor.py:53] torch.compile took 23.12 s in total
(EngineCore pid=6) INFO [model_runner.py:747] Graph capturing finished in 2 secs, took 0.28 GiB
(EngineCore pid=6) INFO [core.py:340] init engine (profile, create kv cache, warmup model) took 44.98 s \
(compilation: 23.12 s)
"""


def test_a_start_is_its_phases():
    """The slowest of several processes counts; what no line says is in the rest."""
    parts = phases.of_start(LOG, 86.51, 9.0)
    assert parts == {
        "import": 9.0,
        "load": 7.6,
        "kernels": 14.3,
        "torch.compile": 23.1,
        "graphs": 2.0,
        "other": 30.5,
    }
    assert phases.text(parts).startswith("other 30.5, torch.compile 23.1, kernels 14.3, import 9.0")
    assert phases.of_start("nothing", 20.0, 0.0) == {"import": 0.0, "other": 20.0}


# --- rows -------------------------------------------------------------------------------------------------------------


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


def test_engines_start_side_by_side_and_are_measured_one_at_a_time(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text(VLLM_THAT_STARTS_SLOWLY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("EVENTS", str(tmp_path / "events"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=0: (80e9, 80e9))
    out = tmp_path / "rows.jsonl"
    options = ["--tiny", "--fresh", "--batch", "2", "--tokens-out", "8", "--prefill", "0", "--at-once", "3"]
    options += ["--work", str(tmp_path / "work"), "--out", str(out), "--impl", "default", "machete", "marlin"]
    program.main(options)
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    names = [name for name, *_ in events]
    assert names[:6].count("start") == names[:6].count("up") == 3, "one was measured before all had started"
    processes = [process for name, process, _ in events if name == "measure"]
    assert sorted(processes, key=processes.index) == processes, "two were measured at a time"
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["at_once"] for row in found} == {3}
    assert {row["impl"] for row in found if row["phase"] == "decode"} == {"machete"}
    assert [row["impl"] for row in found if row["phase"] == "failed"] == ["marlin"]  # its layers got Machete


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
    arguments = shared.arguments(tmp_path, Implementation.parse("default"), model_named("llama-3-8b"), (8,))
    assert arguments["gpu_memory_utilization"] == 0.4
    assert arguments["kv_cache_memory_bytes"] == int(0.4 * 80e9 - 1100 - 6e9)
    with pytest.raises(launch.EngineError, match="memory: 6 GB for each engine are too few for 0 GB of weights"):
        replace(shared, memory=0.16).cache_bytes(tmp_path)
