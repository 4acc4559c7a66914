"""The benchmark of engines: how engines are named, started and ended. Needs neither a GPU nor vLLM."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.engine import (  # noqa: E402
    launch,
    phases,
    preload,
    serve,
    worker,
)
from bench.engine.implementations import Implementation  # noqa: E402
from bench.engine.models import model_named  # noqa: E402
from bench.engine.offline import Result, Task  # noqa: E402

from engine_samples import MACHETE, MARLIN, OURS, soon  # noqa: E402

# --- implementations ------------------------------------------------------------------------------------------------

MARLIN_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.marlin_moe.MarlinExperts"


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


def test_experts_are_divided_among_gpus_and_moved():
    given = Path("/m"), Implementation.parse("w4gemm"), model_named("qwen3-30b-a3b"), (8,)
    assert "enable_expert_parallel" not in OPTIONS.arguments(*given)
    arguments = replace(OPTIONS, expert_parallel=True, rebalance=50).arguments(*given)
    assert arguments["enable_expert_parallel"] and arguments["enable_eplb"]
    words = serve.command(arguments, 8000)
    assert "--enable-expert-parallel" in words
    assert json.loads(words[words.index("--eplb-config") + 1]) == {"window_size": 50, "step_interval": 50}


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
(EngineCore pid=6) INFO [kv_cache_utils.py:2177] GPU KV cache size: 49,984 tokens
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
    assert phases.cache_tokens(LOG) == 49_984 and phases.cache_tokens("nothing") is None
