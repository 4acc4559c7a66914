"""The vLLM plugin in vLLM's own layers, which load checkpoints: with ``VLLM_SOURCES``, see vllm_sources.py."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file, save_file

if "VLLM_SOURCES" not in os.environ:
    pytest.skip("VLLM_SOURCES does not name vLLM's sources", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.engine.checkpoint import write
from bench.engine.models import model_named, tiny
from bench.engine.packing import Packing

import vllm_sources
from w4gemm.checkpoints import find_checkpoint, open_checkpoint
from w4gemm.checkpoints.hugging_face import SafetensorsFolder
from w4gemm.cli.__main__ import main
from w4gemm.integrations.engines.warmup import Warmup
from w4gemm.integrations.vllm import takeover
from w4gemm.weights.quantize import quantize
from w4gemm.weights.weight import QuantizedWeight

vllm_sources.install(os.environ["VLLM_SOURCES"].split(os.pathsep))

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
CONFIGS = {
    "gptq": "auto_gptq",
    "auto-round": "inc",
    "awq": "auto_awq",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "modelopt_fp4",
}
FORMATS = {
    "gptq-int4-g64": ("W4GemmLinearKernel", 0.004),
    "gptq-int4-g64-act": ("W4GemmLinearKernel", 0.004),
    "gptq-int4-g64-head": ("W4GemmLinearKernel", 0.004),
    "auto-round-int4-g64": ("W4GemmLinearKernel", 0.004),
    "awq-int4-g64": ("W4GemmLinearKernel", 0.004),
    "ct-int4-g32": ("W4GemmLinearKernel", 0.004),
    "ct-int4-g128-fp8": ("W4GemmLinearKernel", 0.06),
    "ct-nvfp4": ("W4GemmNvFp4LinearKernel", 0.004),
    "ct-mxfp4": ("W4GemmMxFp4LinearKernel", 0.004),
    "ct-mxfp4-fp8": ("W4GemmMxFp4LinearKernel", 0.06),
    "modelopt-nvfp4": ("W4GemmNvFp4LinearKernel", 0.004),
    "ct-nvfp4-a16": ("W4GemmNvFp4LinearKernel", 0.004),
    "modelopt-nvfp4-a16": ("W4GemmNvFp4LinearKernel", 0.004),
    "quark-nvfp4": ("W4GemmNvFp4LinearKernel", 0.004),
    "quark-mxfp4": ("W4GemmMxFp4LinearKernel", 0.004),
    "quark-mxfp6": ("W4GemmMxFp6LinearKernel", 0.004),
    "quark-e3m2": ("W4GemmMxFp6LinearKernel", 0.004),
    "quark-int4-g64": ("W4GemmLinearKernel", 0.004),
    "auto-round-mxfp4": ("W4GemmMxFp4LinearKernel", 0.004),
}
"""The kernel that vLLM must choose, and the largest relative error: of rounding x and the result to bf16, and for fp8
activations of rounding x and folding scales into weights."""


SINCE_0_33 = ("quark-int4-g64", "auto-round-mxfp4", "ct-mxfp4-fp8")
"""Formats that vLLM 0.26 does not load."""


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("W4GEMM_VLLM", "on")
    for part in ("dense", "gptq", "floats", "fp8", "experts"):
        importlib.import_module(f"w4gemm.integrations.vllm.{part}").install()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("format", FORMATS)
def test_vllms_layers_load_a_checkpoint_and_multiply_its_numbers(format: str, tmp_path: Path) -> None:
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if format.endswith("-act") and "has_g_idx" not in MPLinearLayerConfig.__dataclass_fields__:
        pytest.skip("this vLLM has no act-order")
    if not loads(format):
        pytest.skip("this vLLM has no kernels for such layers")
    model = tiny(model_named("llama-3-8b"))
    write(model, Packing.parse(format), tmp_path)
    check_layers(model.config, tmp_path, format)
    if format.endswith("-head"):
        sizes, arguments = (model.config["vocab_size"], model.config["hidden_size"]), quantization(tmp_path)
        head = loaded(ParallelLMHead(*sizes, prefix="lm_head", quant_config=arguments), tmp_path, "", {"lm_head": None})
        kernel = type(head.quant_method.kernel).__name__
        check(tmp_path, format, kernel, ["lm_head"], lambda x: [head.quant_method.apply(head, x)])


@pytest.mark.parametrize("format", [name for name in FORMATS if "nvfp4" in name])
def test_parts_of_a_merged_layer_keep_their_factors(format: str, tmp_path: Path) -> None:
    """Of which vLLM's own kernels use the largest for all."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    model, parent, shards = tiny(model_named("llama-3-8b")), "model.layers.1.mlp", {"gate_proj": 0, "up_proj": 1}
    write(model, Packing.parse(format), tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name.startswith(f"{parent}.up_proj") and name.endswith(("weight_scale_2", "weight_global_scale")):
                tensors[name] /= 4
        save_file(tensors, file)
    sizes = model.config["hidden_size"], [model.config["intermediate_size"]] * 2
    made = MergedColumnParallelLinear(
        *sizes, bias=False, quant_config=quantization(tmp_path), prefix=f"{parent}.gate_up_proj"
    )
    layer = loaded(made, tmp_path, parent, shards)
    check(tmp_path, format, kernel_of(layer), [f"{parent}.{shard}" for shard in shards], layer)


@pytest.mark.parametrize("format", ["gptq-int4-g64", "awq-int4-g64", "ct-int4-g128-fp8", "ct-mxfp4"])
def test_vllms_layers_load_what_convert_writes(format: str, tmp_path: Path) -> None:
    model = tiny(model_named("llama-3-8b"))
    write(model, Packing.parse(format), tmp_path / "in")
    converted(tmp_path)
    check_layers(model.config, tmp_path / "out", format)


def converted(folder: Path) -> None:
    """Make a folder ``out`` for vLLM of a folder ``in``."""
    torch.set_default_dtype(torch.float32)
    assert main(["convert", str(folder / "in"), str(folder / "out"), "--to", "compressed-tensors"]) == 0
    torch.set_default_dtype(torch.bfloat16)
    assert find_checkpoint(folder / "out").format.name == "compressed-tensors"


@pytest.mark.parametrize("format", ["ct-int4-g32", "awq-int4-g64", "gptq-int4-g64"])
def test_layers_whose_results_must_not_depend_on_the_batch(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM dequantizes those of AWQ and, since 0.33, of compressed-tensors in each step, without asking its kernels."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    c = tiny(model_named("llama-3-8b"))
    write(c, Packing.parse(format), tmp_path)
    check_layers(c.config, tmp_path, format)
    sizes, prefix = (c.config["intermediate_size"], c.config["hidden_size"]), "model.layers.1.mlp.down_proj"

    def made() -> Any:
        layer = RowParallelLinear(*sizes, bias=False, quant_config=quantization(tmp_path), prefix=prefix)
        fill(layer, tmp_path, "model.layers.1.mlp", {"down_proj": None})
        return layer

    layer = made()
    assert kernel_in(layer).batch_invariant
    if hasattr(getattr(layer, "scheme", None), "use_batch_invariant"):  # of compressed-tensors in 0.33
        layer.weight_scale.data[0, 0] = float("nan")  # which cannot be packed
        layer.quant_method.process_weights_after_loading(layer)
        assert layer.scheme.use_batch_invariant and layer.scheme.kernel.vllm_kernel.scheme is layer.scheme
        monkeypatch.setenv("W4GEMM_VLLM", "off")
        scheme = made().scheme
        assert scheme.use_batch_invariant and scheme.kernel is None


def check_layers(c: Mapping[str, Any], folder: Path, format: str) -> None:
    """Have vLLM make and load the linear layers of a decoder layer, and hold them to the checkpoint's numbers. c: the
    model's config."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear

    options: dict[str, Any] = {"bias": False, "quant_config": quantization(folder)}
    hidden, width = c["hidden_size"], c["intermediate_size"]
    heads = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    layers: list[tuple[str, Callable[..., Any], dict[str, Any]]] = [
        (
            "self_attn.qkv_proj",
            lambda **o: QKVParallelLinear(hidden, *heads, **o),
            {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
        ),
        (
            "mlp.gate_up_proj",
            lambda **o: MergedColumnParallelLinear(hidden, [width] * 2, **o),
            {"gate_proj": 0, "up_proj": 1},
        ),
        ("mlp.down_proj", lambda **o: RowParallelLinear(width, hidden, **o), {"down_proj": None}),
    ]
    for name, make, shards in layers:
        prefix = f"model.layers.1.{name}"
        layer = loaded(make(prefix=prefix, **options), folder, prefix.rpartition(".")[0], shards)
        check(folder, format, kernel_of(layer), [f"{prefix.rpartition('.')[0]}.{shard}" for shard in shards], layer)


def kernel_of(layer: Any) -> str:
    """Name of the kernel that vLLM chose for a layer."""
    return type(kernel_in(layer)).__name__


def kernel_in(layer: Any) -> Any:
    """The kernel that vLLM chose for a layer."""
    holders = [getattr(layer, name, None) for name in ("quant_method", "scheme")]
    scheme = getattr(holders[0], "scheme", None)  # of AutoRound, whose method of integers has another name in 0.33
    holders += [scheme, *(getattr(scheme, name, None) for name in ("inner_method", "linear_method"))]
    actual = (getattr(holder, name, None) for name in ("kernel", "ocp_mx_linear") for holder in holders)
    return next(filter(None, actual))


def quantization(folder: Path) -> Any:
    """vLLM's quantization config of a checkpoint."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = get_quantization_config(CONFIGS.get(stored["quant_method"], stored["quant_method"])).from_config(stored)
    config.packed_modules_mapping = FUSED
    config.maybe_update_config(str(folder))
    return config


def loaded(layer: Any, folder: Path, parent: str, shards: dict[str, Any]) -> Any:
    """Have vLLM's loaders fill a layer from the tensors of its modules, and the plugin pack it."""
    parameters, filled = fill(layer, folder, parent, shards)
    assert parameters - filled <= {"input_scale", "bias"}  # vLLM makes the first for W4A16_NVFP4 too
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def fill(layer: Any, folder: Path, parent: str, shards: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Have vLLM's loaders fill a layer; return the names of its parameters, and of those that were filled."""
    stored, parameters, filled = SafetensorsFolder(folder), dict(layer.named_parameters()), set()
    for shard, position in shards.items():
        prefix = f"{parent}.{shard}.".lstrip(".")
        for name in (name for name in stored.tensors if name.startswith(prefix)):
            if _is_unused(name, parameters):
                continue
            parameter = parameters[name.removeprefix(prefix)]
            parameter.weight_loader(parameter, stored.tensor(name), *(() if position is None else (position,)))
            filled.add(name.removeprefix(prefix))
    return {name for name, p in parameters.items() if p.numel()}, filled


def _is_unused(name: str, parameters: Mapping[str, Any]) -> bool:
    """True for the order of columns where this vLLM has none."""
    return name.endswith("g_idx") and not any(held.endswith("g_idx") for held in parameters)


def check(folder: Path, format: str, kernel: str, modules: list[str], layer: Callable[[torch.Tensor], Any]) -> None:
    """Hold a layer's kernel and product to the checkpoint's numbers."""
    expected, most = FORMATS[format]
    assert kernel == expected
    checkpoint = open_checkpoint(folder)
    w = torch.cat([checkpoint.weight(name).dequantize().double() for name in modules])
    x = torch.randn(5, w.shape[1], dtype=torch.bfloat16)
    product = x.double() @ w.T
    assert (layer(x)[0].double() - product).norm() < most * product.norm(), modules


@pytest.mark.parametrize("format", ["gptq-int4-g64", "awq-int4-g64", "ct-int4-g128-fp8", "ct-nvfp4"])
def test_vllm_reloads_the_weights_of_a_layer(format: str, tmp_path: Path) -> None:
    """The weights of another layer, into the tensors of the first."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    model, shards = tiny(model_named("llama-3-8b")), {"gate_proj": 0, "up_proj": 1}
    write(model, Packing.parse(format), tmp_path)
    sizes = model.config["hidden_size"], [model.config["intermediate_size"]] * 2
    layer = MergedColumnParallelLinear(
        *sizes, bias=False, quant_config=quantization(tmp_path), prefix="model.layers.0.mlp.gate_up_proj"
    )
    again = reloading(layer)
    loaded(layer, tmp_path, "model.layers.0.mlp", shards)
    before = {name: p.data_ptr() for name, p in layer.named_parameters()}
    for i in (1, 0, 1):
        again(lambda i=i: fill(layer, tmp_path, f"model.layers.{i}.mlp", shards))
        assert {name: p.data_ptr() for name, p in layer.named_parameters()} == before
        check(tmp_path, format, kernel_of(layer), [f"model.layers.{i}.mlp.{shard}" for shard in shards], layer)


DENSE = (
    "gptq-int4-g64",
    "gptq-int4-g64-act",
    "awq-int4-g64",
    "ct-int4-g128-fp8",
    "ct-nvfp4",
    "ct-mxfp4",
    "quark-mxfp4",
    "quark-mxfp6",
)


@pytest.mark.parametrize("format", DENSE)
def test_dense_weights_come_for_a_layer_in_use(format: str, tmp_path: Path) -> None:
    """By turns in a session of vLLM's reloading and without, in one format 200 times; then a part of a layer alone."""
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    if format.endswith("-act") and "has_g_idx" not in MPLinearLayerConfig.__dataclass_fields__:
        pytest.skip("this vLLM has no act-order")
    model, shards = tiny(model_named("llama-3-8b")), {"gate_proj": 0, "up_proj": 1}
    write(model, Packing.parse(format), tmp_path)
    hidden, width = model.config["hidden_size"], model.config["intermediate_size"]
    layer = MergedColumnParallelLinear(
        hidden, [width] * 2, bias=True, quant_config=quantization(tmp_path), prefix="model.layers.0.mlp.gate_up_proj"
    )
    layer.bias.data.zero_()
    again = reloading(layer)
    loaded(layer, tmp_path, "model.layers.0.mlp", shards)
    before = {name: p.data_ptr() for name, p in layer.named_parameters()}
    kernel, x = kernel_in(layer), torch.randn(5, hidden, dtype=torch.bfloat16)
    for i in range(200 if format == DENSE[0] else 6):
        dense = torch.randn(2, width, hidden, dtype=torch.bfloat16)

        def send(*parts: int, dense: torch.Tensor = dense) -> None:
            held = dict(layer.named_parameters())["weight"]
            for part in parts:
                held.weight_loader(held, dense[part], part)

        if i % 2:
            again(functools.partial(send, 1, 0))
        else:
            send(0)
            send(1)
        assert {name: p.data_ptr() for name, p in layer.named_parameters()} == before
        w = kernel.weight(layer._parameters | layer._buffers)
        assert_fresh(w, dense.flatten(0, 1))

    bias = torch.randn(2, width, dtype=torch.bfloat16)

    def send_all() -> None:
        held = dict(layer.named_parameters())["bias"]
        held.weight_loader(held, bias[0], 0)
        send(0, 1)
        held.weight_loader(held, bias[1], 1)

    again(send_all)
    assert {name: p.data_ptr() for name, p in layer.named_parameters()} == before
    product = bias.flatten() + x.double() @ dense.flatten(0, 1).double().T
    assert (layer(x)[0].double() - product).norm() < 0.2 * product.norm()
    with pytest.raises(RuntimeError, match=r"gate_up_proj: weight: 50.00% of its shape .* was not loaded"):
        again(functools.partial(send, 0))
    assert {name: p.data_ptr() for name, p in layer.named_parameters()} == before
    assert_fresh(w, dense.flatten(0, 1))


def test_new_weights_for_a_layer_whose_parts_have_different_formats(tmp_path: Path) -> None:
    """A gate in 4 bits and a dense up: both come dense in a session of vLLM's reloading, and then without."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    model = tiny(model_named("llama-3-8b"))
    write(model, Packing.parse("gptq-int4-g64"), tmp_path)
    hidden, width = model.config["hidden_size"], model.config["intermediate_size"]
    config, prefix = quantization(tmp_path), "model.layers.0.mlp.gate_up_proj"
    config.dynamic = {r"-:.*up_proj": {}}
    layer = MergedColumnParallelLinear(hidden, [width] * 2, bias=False, quant_config=config, prefix=prefix)
    again, dense = reloading(layer), torch.randn(3, 2, width, hidden, dtype=torch.bfloat16)

    def send(name: str, t: torch.Tensor, part: int) -> None:
        held = dict(layer.named_parameters())[name]
        held.weight_loader(held, t, part)

    def send_both(i: int) -> None:
        for part in (0, 1):
            send("weight", dense[i, part], part)

    stored, module = SafetensorsFolder(tmp_path), "model.layers.0.mlp.gate_proj."
    for name in ("qweight", "scales", "qzeros", "g_idx"):
        if name in dict(layer.named_parameters()):
            send(name, stored.tensor(module + name), 0)
    send("weight", dense[0, 1], 1)
    for shard in layer.w4gemm_shards:
        shard.quant_method.process_weights_after_loading(shard)
    before, x = [p.data_ptr() for p in layer.parameters()], torch.randn(5, hidden, dtype=torch.bfloat16)
    for i in (1, 2):
        again(functools.partial(send_both, i)) if i == 1 else send_both(i)
        assert [p.data_ptr() for p in layer.parameters()] == before
        gate = layer.w4gemm_shards[0]
        assert_fresh(kernel_in(gate).weight(gate._parameters | gate._buffers), dense[i, 0])
        product = x.double() @ dense[i, 1].double().T
        assert (layer(x)[0][:, width:].double() - product).norm() < 0.01 * product.norm()


def assert_fresh(w: QuantizedWeight, dense: torch.Tensor) -> None:
    """Hold the bits of a weight to those of its dense numbers quantized anew."""
    fresh = quantize(dense if w.perm is None else dense[:, w.perm], w.format).repack(w.layout)
    pairs = zip(w.tensors, fresh.tensors, strict=True)
    assert all(torch.equal(a.data.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def test_layers_that_vllm_keeps_and_never_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Encoders that may get no input, in both ways in which models mark them."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear
    from vllm.model_executor.model_loader import base_loader
    from vllm.model_executor.models.utils import StageMissingLayer, no_init_weights

    model, shards, whole = tiny(model_named("llama-3-8b")), {"gate_proj": 0, "up_proj": 1}, torch.nn.Module()
    write(model, Packing.parse("gptq-int4-g64"), tmp_path)
    monkeypatch.setattr(takeover, "WARMUP", Warmup(takeover.VLLM))

    def made() -> Any:
        sizes = model.config["hidden_size"], [model.config["intermediate_size"]] * 2
        prefix = "model.layers.1.mlp.gate_up_proj"
        return MergedColumnParallelLinear(*sizes, bias=False, quant_config=quantization(tmp_path), prefix=prefix)

    for name, targets in (("image", None), ("audio", torch.nn.Sequential)):
        with no_init_weights(whole, lambda module: StageMissingLayer("tower", module), targets=targets):
            setattr(whole, name, torch.nn.Sequential(made()))
        assert isinstance(getattr(whole, name), StageMissingLayer)
    whole.mlp = made()
    fill(whole.mlp, tmp_path, "model.layers.1.mlp", shards)
    config = SimpleNamespace(quantization="gptq", word_embeddings_untied_by_checkpoint=False)
    names = [f"model.layers.1.mlp.{s}" for s in shards]
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        base_loader.process_weights_after_loading(whole, config, torch.device("cpu"))
    assert [r for r in caplog.records if "w4gemm runs 1 linear layers" in r.message]
    check(tmp_path, "gptq-int4-g64", kernel_of(whole.mlp), names, whole.mlp)
    base_loader.process_weights_after_loading(whole.mlp, config, torch.device("cpu"))  # as verl does
    check(tmp_path, "gptq-int4-g64", kernel_of(whole.mlp), names, whole.mlp)


def test_vllm_checks_that_all_was_loaded(tmp_path: Path) -> None:
    """A gate in 4 bits beside a dense up, and experts of which other GPUs have some, with ``enable_weights_track``."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    if "quantized" not in inspect.signature(DefaultModelLoader.track_weights_loading).parameters:
        pytest.skip("this vLLM passes over all quantized layers")
    dense, mixture = tiny(model_named("llama-3-8b")), tiny(model_named("qwen3-30b-a3b"))
    write(dense, Packing.parse("gptq-int4-g64"), tmp_path / "dense")
    write(mixture, Packing.parse("gptq-int4-g64"), tmp_path / "mixture")
    config, root = quantization(tmp_path / "dense"), torch.nn.Module()
    config.dynamic = {r"-:.*up_proj": {}}
    sizes, prefix = (dense.config["hidden_size"], [dense.config["intermediate_size"]] * 2), "model.layers.0.mlp"
    root.merged = MergedColumnParallelLinear(*sizes, bias=False, quant_config=config, prefix=f"{prefix}.gate_up_proj")
    root.experts = routed_experts(mixture.config, quantization(tmp_path / "mixture"), f"{prefix}.experts")
    root.experts.register_parameter("w4gemm_last", torch.nn.Parameter(torch.empty(1)))
    came = {name for name, _ in root.named_parameters() if "w4gemm_" not in name}
    check = functools.partial(DefaultModelLoader.track_weights_loading, None, root, quantized=True)
    check(set(came))
    with pytest.raises(ValueError, match=r"not initialized from checkpoint: \{'merged.w4gemm_shards.0.scales'\}"):
        check(came - {"merged.scales"})


def reloading(layer: Any) -> Callable[[Callable[[], Any]], None]:
    """Let vLLM note what a layer looks like before it is loaded; return what has it load weights anew."""
    from vllm.model_executor.model_loader.reload import layerwise

    layerwise.record_metadata_for_reloading(layer)

    def again(fill: Callable[[], Any]) -> None:
        layerwise.initialize_layerwise_reload(layer)
        fill()
        layerwise.finalize_layerwise_reload(layer, None)

    return again


# --- experts ----------------------------------------------------------------------------------------------------------

EXPERTS = {
    "gptq-int4-g64": 0.008,
    "auto-round-int4-g64": 0.008,
    "awq-int4-g64": 0.008,
    "ct-int4-g64": 0.008,
    "ct-int4-g128-fp8": 0.1,
    "ct-nvfp4": 0.008,
    "ct-mxfp4": 0.008,
    "modelopt-nvfp4": 0.008,
    "ct-nvfp4-a16": 0.008,
    "modelopt-nvfp4-a16": 0.008,
    "quark-nvfp4": 0.008,
    "quark-mxfp4": 0.008,
    "quark-int4-g64": 0.008,
    "auto-round-mxfp4": 0.008,
}
"""Largest relative error: of rounding x, what lies between the products, and the result."""
_PROJECTIONS = {"gate_proj": ("w13", "w1"), "up_proj": ("w13", "w3"), "down_proj": ("w2", "w2")}
"""vLLM's parameter and name of each part of it."""


@pytest.mark.parametrize("format", EXPERTS)
def test_vllms_experts_load_a_checkpoint_and_multiply_its_numbers(format: str, tmp_path: Path) -> None:
    if not loads(format):
        pytest.skip("this vLLM has no such experts")
    layer, prefix, _ = experts_in_use(format, tmp_path)
    assert type(layer.quant_method.moe_kernel.fused_experts).__name__ == "W4gemmExperts"
    check_experts(layer, tmp_path, prefix, EXPERTS[format])


@pytest.mark.parametrize("format", ["gptq-int4-g64", "awq-int4-g64", "ct-int4-g128-fp8", "ct-mxfp4"])
def test_vllms_experts_load_what_convert_writes(format: str, tmp_path: Path) -> None:
    model, prefix = tiny(model_named("qwen3-30b-a3b")), "model.layers.1.mlp.experts"
    write(model, Packing.parse(format), tmp_path / "in")
    converted(tmp_path)
    layer = routed_experts(model.config, quantization(tmp_path / "out"), prefix)
    fill_experts(layer, tmp_path / "out", prefix)
    layer.quant_method.process_weights_after_loading(layer)
    check_experts(layer, tmp_path / "out", prefix, EXPERTS[format])


def loads(format: str) -> bool:
    """True if this vLLM loads checkpoints of a format."""
    from vllm.model_executor.layers.quantization.quark import quark_moe

    return format not in SINCE_0_33 or hasattr(quark_moe, "QuarkW4A16Int4MoEMethod")


def experts_in_use(format: str, folder: Path) -> tuple[Any, str, Callable[[Callable[[], Any]], None]]:
    """vLLM's experts of a layer of a small model in ``folder``, loaded and packed; their prefix, and :func:`reloading`
    of them."""
    model, prefix = tiny(model_named("qwen3-30b-a3b")), "model.layers.0.mlp.experts"
    write(model, Packing.parse(format), folder)
    layer = routed_experts(model.config, quantization(folder), prefix)
    again = reloading(layer)
    fill_experts(layer, folder, prefix)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, prefix, again


def fill_experts(layer: Any, folder: Path, prefix: str) -> None:
    """Have vLLM's loaders fill a layer of experts."""
    stored, parameters = SafetensorsFolder(folder), dict(layer.named_parameters())
    for name in (name for name in stored.tensors if name.startswith(f"{prefix}.")):
        expert, projection, leaf = name.removeprefix(f"{prefix}.").split(".")
        product, shard = _PROJECTIONS[projection]
        if _is_unused(name, parameters):
            continue
        held = parameters[f"{product}_{leaf}"]
        held.weight_loader(held, stored.tensor(name), f"{prefix}.{product}_{leaf}", shard, int(expert))


def check_experts(layer: Any, folder: Path, prefix: str, most: float) -> None:
    """Hold what a layer of experts computes to the checkpoint's numbers."""
    checkpoint = open_checkpoint(folder)
    both, down = (checkpoint.weight(f"{prefix}.{name}").dequantize().double() for name in ("gate_up_proj", "down_proj"))
    count, top_k, hidden = len(both), layer.moe_config.experts_per_token, both.shape[-1]
    x, weights = torch.randn(5, hidden, dtype=torch.bfloat16), torch.rand(5, top_k, dtype=torch.float32)
    ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(5)]).int()
    with torch.inference_mode():
        d = layer.quant_method.apply(layer, x, weights, ids, None, None)
    expected = torch.zeros(5, hidden, dtype=torch.float64)
    for t, j in torch.nonzero(ids >= 0).tolist():
        gate, up = (both[ids[t, j]] @ x[t].double()).view(-1, 2).T
        expected[t] += weights[t, j].double() * (down[ids[t, j]] @ (torch.nn.functional.silu(gate) * up))
    assert (d.double() - expected).norm() < most * expected.norm()


@pytest.mark.parametrize("format", ["gptq-int4-g64", "awq-int4-g64", "ct-int4-g128-fp8", "ct-nvfp4"])
def test_vllm_reloads_the_weights_of_experts(format: str, tmp_path: Path) -> None:
    """The weights of another layer, into the tensors of the first, which are what is multiplied."""
    layer, first, again = experts_in_use(format, tmp_path)
    kernel, before = layer.quant_method.moe_kernel.fused_experts, dict(layer.named_parameters())
    second = first.replace(".0.", ".1.")
    for prefix in (second, first, second):
        again(lambda prefix=prefix: fill_experts(layer, tmp_path, prefix))
        assert all(p is before[name] for name, p in layer.named_parameters())
        assert layer.quant_method.moe_kernel.fused_experts is kernel
        assert kernel.gate_up.tensors[0] is layer.w13_weight
        check_experts(layer, tmp_path, prefix, EXPERTS[format])


@pytest.mark.parametrize("format", ["ct-int4-g64", "ct-int4-g128-fp8", "modelopt-nvfp4", "quark-nvfp4"])
def test_vllms_experts_find_their_parameters_when_they_are_loaded_anew(format: str, tmp_path: Path) -> None:
    """Each tensor by its name, to the last one of each expert: a ``weight_shape``, in compressed-tensors' integers; in
    NVFP4 a second scale, and each has an ``input_scale``, of which vLLM keeps one for gates and ups."""
    model, prefix = tiny(model_named("qwen3-30b-a3b")), "model.layers.{}.mlp.experts"
    write(model, Packing.parse(format), tmp_path)
    layer = routed_experts(model.config, quantization(tmp_path), prefix.format(0))
    if not hasattr(layer, "load_weights"):
        pytest.skip("this vLLM's models look for the parameters before")
    again, stored, parameters = reloading(layer), SafetensorsFolder(tmp_path), dict(layer.named_parameters())

    def load(i: int) -> None:
        names = sorted(name for name in stored.tensors if name.startswith(f"{prefix.format(i)}."))
        for name in (name for name in names if not _is_unused(name, parameters)):
            list(layer.load_weights([(name.removeprefix(f"{prefix.format(i)}."), stored.tensor(name))]))

    load(0)
    layer.quant_method.process_weights_after_loading(layer)
    for i in (1, 0):
        again(lambda i=i: load(i))
        check_experts(layer, tmp_path, prefix.format(i), EXPERTS[format])


@pytest.mark.parametrize("format", ["gptq-int4-g64", "ct-mxfp4"])
def test_vllm_sees_whether_an_update_brought_all_of_packed_experts(format: str, tmp_path: Path) -> None:
    """By its ``/weight_checker``, which makes weights zero, and by ``/weight_info``, their digests."""
    checksums = pytest.importorskip("vllm.model_executor.model_loader.weight_checksum")
    layer, prefix, again = experts_in_use(format, tmp_path)
    digests = checksums.compute_tensor_digests(layer)
    checksums.zero_weights(layer)
    assert not set(digests.values()) & set(checksums.compute_tensor_digests(layer).values())
    again(lambda: fill_experts(layer, tmp_path, prefix))
    assert checksums.compute_tensor_digests(layer) == digests


@pytest.mark.parametrize("format", ["gptq-int4-g64", "ct-int4-g64", "ct-nvfp4", "modelopt-nvfp4", "ct-mxfp4"])
def test_dense_experts_come_for_experts_in_use(format: str, tmp_path: Path) -> None:
    """In a session of vLLM's reloading and without, of one product or of both."""
    layer, prefix, again = experts_in_use(format, tmp_path)
    before = {name: p.data_ptr() for name, p in layer.named_parameters()}
    products = layer.quant_method.products
    count, hidden, width = products[0].weight.experts, products[0].weight.k, products[1].weight.k
    for i in range(4):
        gates, ups, downs = (torch.randn(count, *size) for size in ((width, hidden), (width, hidden), (hidden, width)))
        dense = {"w1": gates.bfloat16(), "w3": ups.bfloat16(), "w2": downs.bfloat16()}
        sent = ("w3", "w1") if i % 2 else ("w1", "w3", "w2")
        old = [t.data.clone() for t in products[1].weight.tensors]

        def send(dense: Mapping[str, torch.Tensor] = dense, sent: Any = sent) -> None:
            parameters = dict(layer.named_parameters())
            for shard in sent:
                name = "w2_weight" if shard == "w2" else "w13_weight"
                for e in range(count):
                    held = parameters[name]
                    options = {"shard_id": shard, "expert_id": e, "return_success": True}
                    assert held.weight_loader(held, dense[shard][e], f"{prefix}.{name}", **options)

        again(send) if i < 2 else send()
        assert {name: p.data_ptr() for name, p in layer.named_parameters()} == before
        for e in range(count):
            both = torch.stack((dense["w1"][e], dense["w3"][e]), 1).flatten(0, 1)
            assert_fresh(products[0].weight.expert(e), both)
            if "w2" in sent:
                assert_fresh(products[1].weight.expert(e), dense["w2"][e])
        assert "w2" in sent or all(map(torch.equal, old, (t.data for t in products[1].weight.tensors)))


def routed_experts(
    config: Mapping[str, Any],
    quantization: Any,
    prefix: str,
    moe_settings: Mapping[str, Any] = MappingProxyType({}),
    layer_settings: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """vLLM's layer of experts, on one GPU, with settings of FusedMoEConfig and of the layer."""
    from vllm.model_executor.layers.fused_moe import config as moe_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    count, top_k = config["num_experts"], config["num_experts_per_tok"]
    sizes = {f"{name}_size": 1 for name in ("tp", "pcp", "dp", "ep", "sp")}
    ranks = {f"{name}_rank": 0 for name in ("tp", "pcp", "dp", "ep")}
    parallel = moe_config.FusedMoEParallelConfig(**sizes, **ranks, use_ep=False, all2all_backend="", enable_eplb=False)
    settings: dict[str, Any] = {
        "num_experts": count,
        "experts_per_token": top_k,
        "hidden_dim": config["hidden_size"],
        "intermediate_size": config["moe_intermediate_size"],
        "num_local_experts": count,
        "num_logical_experts": count,
        "activation": MoEActivation.SILU,
        "device": "cpu",
        "routing_method": moe_config.RoutingMethodType.Renormalize,
        "moe_parallel_config": parallel,
        "in_dtype": torch.bfloat16,
        "max_num_tokens": 8,
    }
    moe = moe_config.FusedMoEConfig(**settings | dict(moe_settings))
    parallel = moe.moe_parallel_config
    manager = ExpertMapManager(
        8, top_k, moe.num_experts, moe.num_experts - count, None, parallel, "linear", parallel.enable_eplb
    )
    return RoutedExperts(prefix, torch.bfloat16, moe, quantization, manager, **layer_settings)


@pytest.mark.parametrize("format", ["gptq-int4-g64", "ct-int4-g32", "modelopt-nvfp4", "ct-mxfp4"])
def test_experts_whose_gpus_come_and_go_are_vllms_own(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.config.vllm

    model, prefix = tiny(model_named("qwen3-30b-a3b")), "model.layers.1.mlp.experts"
    write(model, Packing.parse(format), tmp_path)
    ours = routed_experts(model.config, quantization(tmp_path), prefix)
    settings = vllm.config.vllm._current_vllm_config.parallel_config
    monkeypatch.setattr(settings, "enable_elastic_ep", True)
    layer = routed_experts(model.config, quantization(tmp_path), prefix)
    assert type(layer.quant_method).__module__.startswith("vllm.")
    assert isinstance(layer.quant_method, type(ours.quant_method.vllm_method))
    assert any(name.startswith("w13_weight") or name == "w13_qweight" for name, _ in layer.named_parameters())


def test_experts_are_in_no_cache_of_weights(tmp_path: Path) -> None:
    """vLLM 0.33 hands weights that one process has packed to others, which would pack them once more."""
    protocol = pytest.importorskip("vllm.model_executor.model_loader.weight_cache.protocol", reason="before 0.33")
    model, prefix = tiny(model_named("qwen3-30b-a3b")), "model.layers.1.mlp.experts"
    write(model, Packing.parse("modelopt-nvfp4"), tmp_path)
    layer = routed_experts(model.config, quantization(tmp_path), prefix)
    assert layer.quant_method.vllm_method.supports_pre_processed_weights
    with pytest.raises(protocol.UnsupportedQuantForIPCError, match="ModelOptNvFp4FusedMoE"):
        protocol.check_ipc_quant_support(layer)


def test_linear_layers_are_in_no_cache_of_weights(tmp_path: Path) -> None:
    from vllm.model_executor.layers.linear import RowParallelLinear

    protocol = pytest.importorskip("vllm.model_executor.model_loader.weight_cache.protocol", reason="before 0.33")
    c = tiny(model_named("llama-3-8b"))
    write(c, Packing.parse("modelopt-nvfp4"), tmp_path)
    sizes, prefix = (c.config["intermediate_size"], c.config["hidden_size"]), "model.layers.1.mlp.down_proj"
    layer = RowParallelLinear(*sizes, bias=False, quant_config=quantization(tmp_path), prefix=prefix)
    own: Any = type(layer.quant_method).__mro__[1]
    assert own.supports_pre_processed_weights.fget(layer.quant_method)
    with pytest.raises(protocol.UnsupportedQuantForIPCError, match="ModelOptLinearMethod does not support"):
        protocol.check_ipc_quant_support(layer)


@pytest.mark.parametrize("format", ["gptq-int4-g64", "ct-int4-g32", "ct-nvfp4", "ct-mxfp4"])
def test_what_mla_keeps_of_earlier_chunks(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks the weight of kv_b_proj for the dtype that it gives it."""
    from vllm.model_executor.layers.attention import mla_attention as mla
    from vllm.model_executor.layers.linear import RowParallelLinear

    c = tiny(model_named("llama-3-8b"))
    write(c, Packing.parse(format), tmp_path)
    n, k = c.config["hidden_size"], c.config["intermediate_size"]
    own = RowParallelLinear(
        k, n, bias=False, quant_config=quantization(tmp_path), prefix="model.layers.1.mlp.down_proj"
    )
    layer = loaded(own, tmp_path, "model.layers.1.mlp", {"down_proj": None})
    heads = {"num_heads": 2, "qk_nope_head_dim": n // 4, "v_head_dim": n // 4, "kv_lora_rank": k}
    attention = SimpleNamespace(kv_b_proj=layer, kv_cache_dtype="auto", _concat_k_nope_k_pe=lambda k, pe: k, **heads)
    kept, seen = torch.randn(5, k + 8, dtype=torch.bfloat16), {}
    each = {"num_context_tokens": 5, "request_slice": slice(0, 1), "token_slice": slice(0, 5)}  # of 0.33
    context = MagicMock(seq_tot=[5], workspace=kept, has_empty_context=[False], empty_token_slices=[])
    context.chunks = [MagicMock(**each)]
    prefill = MagicMock(q_data_type=torch.bfloat16, chunked_context=context)
    prefill.prefill_backend.run_prefill_context_chunk = lambda **call: seen.update(call) or (None, None)
    monkeypatch.setattr(mla, "ops", MagicMock())
    q = torch.zeros(5, 2, n // 4, dtype=torch.bfloat16)
    mla.MLACommonBaseImpl._compute_prefill_context(attention, q, kept, SimpleNamespace(prefill=prefill), None)
    assert torch.equal(torch.cat((seen["k"], seen["v"]), 2).view(5, n), layer(kept[:, :k])[0])


@pytest.mark.parametrize("format", ["gptq-int4-g64", "awq-int4-g64", "ct-int4-g32", "ct-int4-g128-fp8", "ct-nvfp4"])
def test_lora_beside_a_layer(format: str, tmp_path: Path) -> None:
    """Two adapters of a fused layer, each with a part for each slice, and a third one that is zero."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.layers import MergedColumnParallelLinearWithLoRA
    from vllm.lora.layers.utils import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    model, shards = tiny(model_named("llama-3-8b")), {"gate_proj": 0, "up_proj": 1}
    write(model, Packing.parse(format), tmp_path)
    hidden, width, rank = model.config["hidden_size"], model.config["intermediate_size"], 8
    base = MergedColumnParallelLinear(
        hidden, [width] * 2, bias=False, quant_config=quantization(tmp_path), prefix="model.layers.1.mlp.gate_up_proj"
    )
    plain = loaded(base, tmp_path, "model.layers.1.mlp", shards)
    layer = MergedColumnParallelLinearWithLoRA(plain)
    layer.create_lora_weights(3, LoRAConfig(max_lora_rank=rank, max_loras=3, lora_dtype=torch.bfloat16))
    adapters = [[(torch.randn(rank, hidden) / 16, torch.randn(width, rank) / 16) for _ in shards] for _ in range(2)]
    for i, adapter in enumerate(adapters):
        layer.set_lora(i, *([pair[j] for pair in adapter] for j in range(2)))
    wrapper = PunicaWrapperCPU(16, 16, "cpu")
    layer.set_mapping(wrapper)
    which = (3, 1, 2, 3, 2)
    wrapper.update_metadata(LoRAMapping(which, which, is_prefill=False), [1, 2, 3], 3, 512)
    x = torch.randn(5, hidden, dtype=torch.bfloat16)
    actual, expected = layer(x)[0].double(), plain(x)[0].double()
    assert torch.equal(actual[[0, 3]], expected[[0, 3]])
    for row, number in enumerate(which):
        for i, (a, b) in enumerate(adapters[number - 1] if number < 3 else ()):
            expected[row, i * width : (i + 1) * width] += (x[row].double() @ a.double().T) @ b.double().T
    assert (actual - expected).norm() < 0.01 * expected.norm()
    assert (actual - plain(x)[0].double())[[1, 2, 4]].norm() > 0.1 * expected.norm()
