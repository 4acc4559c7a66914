"""The benchmark of engines, as far as it needs neither a GPU nor vLLM."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import signal
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
    agreement,
    launch,
    layer,
    offline,
    options,
    page,
    phases,
    preload,
    profile,
    rows,
    serve,
    tables,
    worker,
)
from bench.engine.checkpoint import tensors_of, write  # noqa: E402
from bench.engine.implementations import Implementation  # noqa: E402
from bench.engine.models import cut, model_named, tiny  # noqa: E402
from bench.engine.offline import Result, Task  # noqa: E402
from bench.engine.packing import Packing  # noqa: E402
from bench.rows import read  # noqa: E402

from tiny_model import write_gguf  # noqa: E402
from w4gemm import W4Experts  # noqa: E402
from w4gemm.checkpoints import open_checkpoint  # noqa: E402
from w4gemm.checkpoints.hugging_face import SafetensorsFolder  # noqa: E402
from w4gemm.integrations.vllm.models import read_model  # noqa: E402

CHECKPOINTS = [
    ("llama-3-8b", "gptq-int4-g128"),
    ("qwen2.5-32b", "awq-int4-g128"),
    ("qwen3-30b-a3b", "ct-int4-g128-fp8"),
    ("deepseek-v3-5-layers", "ct-int4-g32"),
    ("llama-3-8b", "gptq-int4-g64-act"),
    ("llama-3-8b", "gptq-int4-g128-head"),
    ("mixtral-8x7b", "gptq-int4-g128"),
    ("qwen2.5-32b", "ct-nvfp4"),
    ("llama-3-8b", "ct-mxfp4"),
    ("qwen3-30b-a3b", "modelopt-nvfp4"),
    ("llama-3-8b", "ct-nvfp4-a16"),
    ("llama-3-8b", "modelopt-nvfp4-a16"),
]


def test_the_page_says_what_was_measured_in_an_engine():
    """Cells of docs/vllm.md that begin with "measured" are those of which there are rows."""
    kinds = {"W4GemmLinearKernel": 1, "W4gemmExperts": 2}
    found = [row for row in read(launch.RESULTS) if row["impl"] == "w4gemm" and row["phase"] == "decode"]
    lines = (ROOT / "docs/vllm.md").read_text().partition("## What was run")[2].partition("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    said = {
        (format, column)
        for name, *runs in cells
        for format in re.findall(r"`([\w.-]+)`", name)
        for column, cell in enumerate(runs, 1)
        if cell.startswith("measured")
    }
    assert said == {(row["format"], kinds[kernel]) for row in found for kernel in row["kernels"]}


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, format", CHECKPOINTS)
def test_a_tiny_checkpoint_opens_and_keeps_the_size_of_activations(name, format, tmp_path):
    model, packing = tiny(model_named(name)), Packing.parse(format)
    size = write(model, packing, tmp_path)
    assert size == sum(t.nbytes for t in tensors_of(model, packing))
    checkpoint = open_checkpoint(tmp_path)
    assert ("lm_head" in checkpoint.modules) == (packing.option == "head") and checkpoint.modules
    wanted = {"ct-int4-g128-fp8": "int4_g128_e4m3", "ct-nvfp4": "e2m1_g16_e4m3_row", "ct-mxfp4": "e2m1_g32_e8m0"}
    if format in wanted:  # as the plugin packs it
        assert {str(layer.format) for layer in read_model(str(tmp_path)).layers} == {wanted[format]}
    for module_name, module in checkpoint.modules.items():
        activations = "fp8" if packing.option == "fp8" else None
        assert (module.format.group_size, module.activations) == (packing.group_size, activations)
        gain = 4.0 if module_name == "lm_head" else 0.5 if module_name.endswith(("o_proj", "down_proj", "w2")) else 1.0
        w = checkpoint.weight(module_name).dequantize()
        assert w.std().item() * module.k**0.5 == pytest.approx(gain, rel=0.4 if "mxfp4" in format else 0.1), module_name


def test_fused_modules_have_their_columns_in_one_order(tmp_path):
    """An engine keeps one g_idx of q, k and v."""
    write(tiny(model_named("llama-3-8b")), Packing.parse("gptq-int4-g64-act"), tmp_path)
    stored = SafetensorsFolder(tmp_path)
    orders = [stored.tensor(f"model.layers.1.self_attn.{name}_proj.g_idx") for name in "qkv"]
    assert all(torch.equal(order, orders[0]) for order in orders)
    assert not torch.equal(orders[0], orders[0].sort().values)
    assert orders[0].bincount().tolist() == [64] * 4


@pytest.mark.parametrize("name", ["qwen2.5-32b", "qwen3-30b-a3b", "deepseek-v3-5-layers", "gpt-oss-20b"])
def test_transformers_makes_the_same_dense_model(name, tmp_path):
    """Names and shapes are those of transformers' own model of the config, which engines share."""
    transformers = pytest.importorskip("transformers")
    model = tiny(model_named(name))
    write(model, Packing("bf16") if not model.stacked else Packing("mxfp4"), tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    wanted = {name: tuple(p.shape) for name, p in made.state_dict().items() if "experts." not in name}
    stored = {name: info.shape for name, info in SafetensorsFolder(tmp_path).tensors.items() if "experts." not in name}
    assert stored == {name: shape for name, shape in wanted.items() if not name.endswith("inv_freq")}


def test_gpt_oss_experts_have_the_published_shapes():
    shapes = {t.name: (t.dtype, t.shape) for t in tensors_of(model_named("gpt-oss-20b"), Packing.parse("mxfp4"))}
    experts = "model.layers.23.mlp.experts."
    assert shapes[f"{experts}gate_up_proj_blocks"] == (torch.uint8, (32, 5760, 90, 16))
    assert shapes[f"{experts}gate_up_proj_scales"] == (torch.uint8, (32, 5760, 90))
    assert shapes[f"{experts}down_proj_blocks"] == (torch.uint8, (32, 2880, 90, 16))
    assert shapes[f"{experts}down_proj_bias"] == (torch.bfloat16, (32, 2880))


@pytest.mark.parametrize(
    "name, format, gigabytes",
    [
        ("llama-3-8b", "gptq-int4-g128", 5.7),
        ("llama-3-70b", "gptq-int4-g128", 39.8),
        ("qwen2.5-32b", "awq-int4-g128", 19.3),
        ("qwen3-30b-a3b", "gptq-int4-g128", 16.9),
        ("mixtral-8x7b", "gptq-int4-g128", 24.7),
        ("gpt-oss-20b", "mxfp4", 13.8),
    ],
)
def test_models_are_as_large_as_the_published_ones(name, format, gigabytes):
    size = sum(t.nbytes for t in tensors_of(model_named(name), Packing.parse(format)))
    assert size / 1e9 == pytest.approx(gigabytes, abs=0.1)


def documented() -> list[list[str]]:
    """Arguments of the commands of bench.engine in "To be run next"."""
    page = Path(__file__).parents[1] / "docs/measured/engine.md"
    (block,) = re.findall(r"## To be run next.*?```console\n(.*?)```", page.read_text(), re.DOTALL)
    commands = [shlex.split(line) for line in block.replace("\\\n", " ").split("$ ") if line]
    return [command[3:] for command in commands if command[2] == "bench.engine"]


@pytest.mark.parametrize("arguments", documented(), ids=" ".join)
def test_the_checkpoints_of_documented_commands_are_written_and_open(arguments, tmp_path):
    args = options.parser().parse_args([*arguments, "--tiny"])
    packings = [Packing.parse(text) for text in args.format]
    for model, packing in (pair for text in args.model for pair in options.pairs_of(text, packings, args)):
        folder = tmp_path / f"{model.name}-{packing}"
        assert write(model, packing, folder) == sum(t.nbytes for t in tensors_of(model, packing))
        assert open_checkpoint(folder).modules


def test_layers_differ_and_a_second_folder_is_the_same(tmp_path):
    model, packing = tiny(model_named("llama-3-8b")), Packing.parse("gptq-int4-g128")
    for folder in ("a", "b"):
        write(model, packing, tmp_path / folder)
    a, b = (SafetensorsFolder(tmp_path / folder) for folder in ("a", "b"))
    first, second = (a.tensor(f"model.layers.{i}.mlp.up_proj.qweight") for i in range(2))
    assert not torch.equal(first, second)
    assert all(torch.equal(a.tensor(name), b.tensor(name)) for name in a.tensors)


def test_bad_models_and_formats_are_named():
    with pytest.raises(ValueError, match="model: wanted one of llama-3-8b, .*got 'llama'"):
        model_named("llama")
    with pytest.raises(ValueError, match="format: wanted gptq-int4-g128, .*got 'gptq-int4-g128-fp8'"):
        Packing.parse("gptq-int4-g128-fp8")
    with pytest.raises(ValueError, match="gpt-oss-20b wants mxfp4, got gptq-int4-g128"):
        program.main(["--model", "gpt-oss-20b", "--format", "gptq-int4-g128"])
    with pytest.raises(ValueError, match="llama-3-8b wants a format of int4, got mxfp4"):
        program.main(["--model", "llama-3-8b", "--format", "mxfp4"])
    pairs = options.formats_of(model_named("gpt-oss-20b"), [Packing.parse("gptq-int4-g128"), Packing.parse("mxfp4")])
    assert [str(packing) for _, packing in pairs] == ["mxfp4"]
    args = options.parser().parse_args(["--layers", "2"])
    own = options.pairs_of("mixtral-8x7b=ct-int4-g128-fp8", [Packing.parse("bf16")], args)
    assert [(model.name, str(packing)) for model, packing in own] == [("mixtral-8x7b-2-layers", "ct-int4-g128-fp8")]
    assert cut(model_named("gpt-oss-20b"), 3).config["layer_types"] == [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ]


# --- implementations ------------------------------------------------------------------------------------------------

MACHETE = "vllm.model_executor.kernels.linear.mixed_precision.machete.MacheteLinearKernel"
MARLIN = "vllm.model_executor.kernels.linear.mixed_precision.marlin.MarlinLinearKernel"
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


def result(ms_step: float, tokens: list[list[int]]) -> Result:
    steps = len(tokens[0]) - 1
    decode = {"batch": len(tokens), "first_token_s": 0.5, "total_s": 0.5 + steps * ms_step / 1e3, "tokens": tokens}
    return Result("0.26.0", 20.0, {}, [{**decode, "repeats_itself": True}], 0.25)


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
    engine.warm_up([], 128)
    assert not list(seconds)


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
    starts = iter([replace(result(3.0, [[1] * 128] * 2), decode=[], prefill_s=0.0)])

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


def test_figures_of_a_load():
    answers = [serve.Answer(0.1 * i, [0.01, 0.02], 3) for i in range(1, 5)]
    found = serve.figures(answers, 2.0, streamed=True)
    assert (found["tokens_s"], found["requests"], found["streamed"]) == (6.0, 4, True)
    assert (found["first_token_ms_p50"], found["first_token_ms_p99"]) == (250.0, 400.0)
    assert (found["between_tokens_ms_p50"], found["between_tokens_ms_p99"]) == (15.0, 20.0)
    found = serve.figures([serve.Answer(tokens=3, whole=i) for i in (1.0, 2.0, 4.0)], 3.0, streamed=False)
    assert found == {"requests": 3, "streamed": False, "tokens_s": 3.0, "answer_ms_p50": 2000, "answer_ms_p99": 4000}


def test_a_profile_is_that_of_decode_steps():
    """The steps before the last ones are left out, kernels are grouped by name, and time without kernels is gaps. The
    prefill's is whole."""

    def step(start: float, marlin_us: float) -> list[dict[str, object]]:
        marlin = {"cat": "kernel", "name": "marlin::Marlin<256>", "ts": start, "dur": marlin_us}
        sampler = {"cat": "kernel", "name": "_gumbel_sample_kernel", "ts": start + marlin_us + 8, "dur": 2.0}
        return [marlin, sampler, {"cat": "cpu_op", "name": "aten::mm", "ts": start, "dur": 1e6}]

    prefill = [event for i in range(2) for event in step(1000.0 * i, 900.0)]
    steps = [event for i in range(offline.PROFILED_STEPS) for event in step(2000.0 + 30 * i, 20.0)]
    found = worker.summarize(worker.last_steps(prefill + steps, offline.PROFILED_STEPS))
    result = offline.Result(profiles=[{"batch": 8, **found}], prefill_profile=worker.summarize(prefill))
    row, whole = profile.rows_of(result)
    assert (row["phase"], row["batch"], row["us_step"]) == ("profile", 8, 30.0)
    assert row["groups"] == {"4-bit products": 20.0, "sampling": 2.0} and row["gaps"] == 8.0
    assert "at batch 8, 30 us" in profile.table(row) and "67%" in profile.table(row)
    assert whole["groups"] == {"4-bit products": 1800.0, "sampling": 4.0} and whole["us_step"] == 1910.0
    text = "\n".join(tables.steps([{**row, "impl": "machete"}, {**whole, "impl": "machete"}]))
    assert "| a decode step at batch 8, us | machete |" in text and "| the prefill, us | machete |" in text
    with pytest.raises(ValueError, match="no kernel of a sampler runs more than 32 times"):
        worker.last_steps(prefill, offline.PROFILED_STEPS)


@pytest.mark.parametrize(
    "kernel, group",
    [
        ("void marlin_moe_wna16::Marlin<...>", "4-bit products"),
        ("kernel_cutlass_kernel_w4gemmkernelssm90_mixed_gemmkernelMixedGemm_object_at__...", "4-bit products"),
        ("kernel_cutlass_kernel_w4gemmkernelsactivation_quantize...", "quantization"),
        ("kernel_cutlass_kernel_w4gemmkernelsgate_halves...", "activation"),
        ("void cutlass::device_kernel<machete::MacheteKernel...>", "4-bit products"),
        ("nvjet_tst_128x64_64x9_2x1_v_bz_TNT", "16-bit products"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90...>>", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<...>", "attention"),
        ("void vllm::fused_add_rms_norm_kernel<...>", "norm"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norm"),
        ("triton_red_fused_fused_add_rms_norm_machete_mm_2", "norm"),
        ("triton_poi_fused_machete_mm_mul_silu_slice_1", "activation"),
        ("triton_red_fused__to_copy_abs_clamp_cutlass_w4a8_mm_div_max_mul_reciprocal_silu_", "quantization"),
        ("nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_ovscale_TNT", "4-bit products"),
        ("void vllm::rotary_embedding_kernel<...>", "rope"),
        ("void vllm::act_and_mul_kernel<...>", "activation"),
        ("void vllm::moe::topkGatingSoftmax<...>", "routing"),
        ("void at::native::reduce_kernel<512, 1, ArgMaxOps...>", "sampling"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
    ],
)
def test_kernels_are_grouped_by_what_they_do(kernel, group):
    assert profile.group_of(kernel) == group


# --- the page -------------------------------------------------------------------------------------------------------


def engine_rows(impl: str, gain: float, run: str = "1", **changed: object) -> list[dict[str, object]]:
    """Rows of an implementation that is ``gain`` times as fast as vLLM's choice, as a run writes them."""
    task = Task({}, 512, (1, 256), 128, 128, prefill=8192)
    found = result(4.0 / gain, [[7] * 128])
    found.decode.append({**result(8.0 / gain, [[7] * 128] * 256).decode[0], "batch": 256})
    common = {"kind": "engine", "run": run, "engine": "vllm", "engine_version": "0.26.0", "model": "llama-3-8b"}
    common |= {"format": "gptq-int4-g128", "dtype": "bfloat16", "gpus": 1, "mode": "graphs", "impl": impl}
    facts = {"gpu": "NVIDIA H200", "driver": "580", "torch": "2.11", "commit": "ab", "dirty": False, "utc": ""}
    measured = [{"start": "cold", **row} if row["phase"] == "start" else row for row in rows.rows_of(found, task)]
    return [{**common, "chosen": impl == "machete", **row, **facts, **changed} for row in measured]


def test_the_page_of_sample_rows():
    """The last run only; failed rows leave no trace; ratios are over vLLM's choice and over the best."""
    stored = [*engine_rows("w4gemm", 9.0, run="0"), *engine_rows("w4gemm", 1.5), *engine_rows("humming", 1.2)]
    stored += [*engine_rows("machete", 1.0), {**stored[0], "impl": "conch", "phase": "failed", "reason": "no"}]
    load = {"phase": "serve", "batch": 64, "tokens_s": 9000.0, "first_token_ms_p50": 80.0, "first_token_ms_p99": 120.0}
    load |= {"between_tokens_ms_p50": 6.0, "between_tokens_ms_p99": 9.0}
    stored += [
        {**row, **load} for row in stored if row["phase"] == "decode" and row["batch"] == 1 and row["run"] == "1"
    ]
    kl = {"phase": "agreement", "positions": 700, "kl_mean": 0.00012, "kl_max": 0.004, "top1": 0.995, "tokens_out": 64}
    stored += [{**row, **kl, "equal_prefix": 60.0} for row in stored[:1]]
    text = page.text(stored, "engine.jsonl")
    assert "| gptq-int4-g128 | w4gemm | 0.00012 | 0.004 | 99.5% | 60 |" in text
    assert "| decode, batch 1: tokens/s (ms a step) | 375 (2.67) | 250 (4.00) | 300 (3.33) | 1.50 | 1.25 |" in text
    assert "|  | w4gemm | machete, vLLM's choice | humming | over vLLM's choice | over the best |" in text
    assert "| llama-3-8b, gptq-int4-g128, NVIDIA H200, CUDA graphs only | 1 to 64 | 1.50 | 1.25 |" in text
    assert "| prefill of 8192: tokens/s | 32,768 | 32,768 | 32,768 | 1.00 | 1.00 |" in text
    assert "| humming | 64 | 80.0 (120.0) | 6.0 (9.0) |" in text
    assert "conch" not in text and "| cold start: s | 20 |" in text


def test_the_page_keeps_an_earlier_run_of_more_implementations():
    first = [
        row for impl, gain in (("w4gemm", 1.2), ("machete", 1.0), ("humming", 1.1)) for row in engine_rows(impl, gain)
    ]
    last = [row for impl, gain in (("w4gemm", 1.5), ("machete", 1.0)) for row in engine_rows(impl, gain, run="2")]
    text = page.text([*first, *last], "engine.jsonl")
    assert "| llama-3-8b, gptq-int4-g128, NVIDIA H200, CUDA graphs only | 1 to 64 | 1.50 | - |" in text
    assert "| llama-3-8b, gptq-int4-g128, NVIDIA H200, CUDA graphs only, earlier (ab) | 1 to 64 | 1.20 | 1.09 |" in text
    text = page.text(
        [*last, *engine_rows("w4gemm", 1.6, run="3"), *engine_rows("machete", 1.0, run="3")], "engine.jsonl"
    )
    assert "earlier" not in text


def test_the_page_leaves_out_engines_that_ended_early():
    whole = [row for impl, gain in (("w4gemm", 1.2), ("machete", 1.0)) for row in engine_rows(impl, gain)]
    early = [row for row in engine_rows("w4gemm", 2.0, run="2", partial=True) if row.get("batch") != 256]
    assert page.text([*whole, *early], "engine.jsonl") == page.text(whole, "engine.jsonl")


def test_the_page_of_a_layer_of_experts():
    facts = engine_rows("w4gemm", 1.0)[0]
    times = {1: (10.0, 20.0), 64: (50.0, 40.0), 128: (60.0, 120.0)}
    stored = [
        {**facts, "mode": "layer", "phase": "experts", "batch": batch, "impl": impl, "us": us}
        for batch, both in times.items()
        for impl, us in zip(("w4gemm", "marlin"), both, strict=True)
    ]
    text = page.text([*engine_rows("w4gemm", 1.0), {**stored[0], "run": "0", "us": 1.0}, *stored], "engine.jsonl")
    assert "| tokens | 1 | 64 | 128 |\n|---|---|---|---|\n| w4gemm, us | 10.0 | 50.0 | 60.0 |" in text
    assert "| gain | 2.00 | 0.80 | 2.00 |" in text and "1 to 64 tokens: 1.26." in " ".join(text.split())


def test_a_layer_of_experts_is_what_is_timed():
    sizes = layer.Sizes(experts=4, top_k=2, hidden=256, width=128)
    assert layer.Sizes.of(model_named("qwen3-30b-a3b")) == layer.Sizes(128, 8, 2048, 768)
    ours, draw = layer.Ours(sizes, "cpu"), layer.drawn(sizes, 3, 0, "cpu")
    assert all(len(set(ids)) == 2 for ids in draw.ids.tolist())
    gate_up, down = ours.layers[1]
    wanted = W4Experts(gate_up, down)(*draw)
    assert torch.equal(ours.call(draw, 1)(), wanted) and wanted.any()


def test_a_page_without_our_rows_has_no_ratios():
    text = page.text([*engine_rows("machete", 1.0), *engine_rows("humming", 1.2)], "engine.jsonl")
    assert "| 250 (4.00) | 300 (3.33) | - | - |" in text


@pytest.mark.skipif(not launch.RESULTS.exists(), reason="no stored rows")
def test_the_stored_page_is_that_of_the_stored_rows():
    stored = read(launch.RESULTS)
    assert page.PAGE.read_text() == page.text(stored, launch.RESULTS.name), "run python -m bench.report"
    assert page.PLOT.exists() and not any(row["dirty"] for row in stored)


# --- agreement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["gptq-int4-g32", "awq-int4-g32", "ct-int4-g32"])
def test_a_requantized_checkpoint_has_the_numbers_of_its_matrices(format, tmp_path):
    pytest.importorskip("gguf")
    source = open_checkpoint(write_gguf(tmp_path / "model.gguf", tied=False))
    packed, dense = agreement.requantize(source, Packing.parse(format), tmp_path)
    found, matrices = open_checkpoint(packed), SafetensorsFolder(dense)
    assert found.modules.keys() == source.modules.keys() - {"lm_head"}
    for name in found.modules:
        w = found.weight(name)
        assert torch.equal(w.dequantize().bfloat16(), matrices.tensor(f"{name}.weight")), name
        nearest = source.weight(name).dequantize()
        assert (w.dequantize() - nearest).norm() < 0.15 * nearest.norm()
    assert {*found.tensors} | {f"{name}.weight" for name in found.modules} == {*matrices.tensors}


def test_divergence_is_that_of_the_likeliest_and_of_all_others():
    p = {"1": math.log(0.5), "2": math.log(0.25)}
    assert agreement.divergence(p, p) == pytest.approx(0.0, abs=1e-12)
    q = {"1": math.log(0.25), "2": math.log(0.5)}
    assert agreement.divergence(p, q) == pytest.approx(0.25 * math.log(2))
    reading = {"after": [p, p], "answer": [1, 2, 3]}
    other = {"after": [p, q], "answer": [1, 2, 4]}
    found = agreement.compare([other], [reading])
    assert (found["top1"], found["equal_prefix"], found["positions"]) == (0.5, 2.0, 2)
    assert found["kl_max"] == pytest.approx(0.25 * math.log(2), abs=1e-5)


def test_agreement_of_a_checkpoint_is_rows(tmp_path, monkeypatch):
    """Each format's matrices are read first, then its 4-bit folder with each implementation."""
    pytest.importorskip("gguf")
    read: list[str] = []

    def run_offline(task, variables, log, seconds, preloaded):
        folder = Path(task.engine["model"])
        read.append(f"{folder.name} {variables['W4GEMM_VLLM']}")
        assert (folder / "model.safetensors").exists() and preloaded is None and task.texts == ([5, 6, 7],)
        after = [{"1": math.log(0.5), "2": math.log(0.25)}] * 2
        early = {"failure": "not done"} if task.engine.get("linear_backend") == "marlin" else {}
        kernels = {"linear": {MARLIN if early else MACHETE: 14}}
        return Result("0.26.0", 1.0, kernels, read=[{"after": after, "answer": [1, 2]}], **early)

    monkeypatch.setattr(agreement, "run_offline", run_offline)
    monkeypatch.setattr(agreement, "preloaded_vllm", lambda *unused: contextlib.nullcontext())
    monkeypatch.setattr(agreement, "tokens_of", lambda folder: ([5, 6, 7],))
    source, out = write_gguf(tmp_path / "model.gguf", tied=False), tmp_path / "rows.jsonl"
    options = ["--format", "awq-int4-g32", "--impl", "machete", "w4gemm", "marlin", "--work", str(tmp_path / "w")]
    agreement.main([*options, "--checkpoint", str(source), "--out", str(out)])
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]  # w4gemm got other kernels, Marlin ended early
    assert read == ["awq-int4-g32-matrices off", "awq-int4-g32 off", "awq-int4-g32 on", "awq-int4-g32 off"]
    assert (row["phase"], row["impl"], row["kl_max"], row["top1"]) == ("agreement", "machete", 0.0, 1.0)
