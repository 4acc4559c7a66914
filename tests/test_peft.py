"""LoRA beside quantized layers trains like LoRA beside the same numbers in dense layers."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")

import peft
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantized_model import change
from tiny_model import HIDDEN, LAYERS, write_dense
from w4gemm import W4Linear, WeightFormat, quantize
from w4gemm.core.imports import when_imported
from w4gemm.integrations.peft import W4LoraLinear
from w4gemm.integrations.transformers import W4GemmConfig, dequantize_layers, load, quantize_layers

IDS = torch.arange(1, 25).view(2, 12)
STEPS = 12


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], torch.nn.Module]:
    folder = write_dense(tmp_path_factory.mktemp("model"), "qwen2")
    change(folder, lambda t: t["lm_head.weight"].mul_(10))  # so that there is something to learn in front of it

    def load() -> torch.nn.Module:
        config = W4GemmConfig("int4_g32")
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)

    return load


def with_lora(model: torch.nn.Module, **config: Any) -> torch.nn.Module:
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"} | config
    return peft.get_peft_model(model, peft.LoraConfig(**settings))


@pytest.mark.parametrize("cast", [True, False])
def test_adapters_begin_as_those_of_a_dense_model(base: Callable[[], torch.nn.Module], cast: bool) -> None:
    """In the model's dtype. Once they were rounded to that of the weight's scales."""

    def adapted(model: torch.nn.Module) -> torch.nn.Module:
        torch.manual_seed(1)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]), autocast_adapter_dtype=cast)

    actual, expected = adapted(base()), adapted(base().dequantize())
    adapters = {name: p for name, p in expected.named_parameters() if "lora_" in name}
    assert adapters and {p.dtype for p in adapters.values()} == {torch.float32}
    for name, p in actual.named_parameters():
        if "lora_" in name:
            torch.testing.assert_close(p, adapters[name], rtol=0, atol=0)


@pytest.mark.gpu
def test_training_on_a_gpu(base: Callable[[], torch.nn.Module]) -> None:
    model = base().to("cuda", torch.bfloat16)
    dense = with_lora(dequantize_layers(copy.deepcopy(model), torch.bfloat16))
    losses, expected = train(with_lora(model)), train(dense)
    assert losses[-1] < 0.8 * losses[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0.05, atol=0)


def train(model: torch.nn.Module) -> list[float]:
    ids = IDS.to(model.device)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


def test_training_equals_that_beside_dense_layers(base: Callable[[], torch.nn.Module], tmp_path: Path) -> None:
    model = base()
    dense = with_lora(dequantize_layers(copy.deepcopy(model), torch.float32))
    weights = {name: m.weight.dequantize() for name, m in model.named_modules() if isinstance(m, W4Linear)}
    adapted = with_lora(model)
    layers = [m for m in adapted.modules() if isinstance(m, W4LoraLinear)]
    assert len(layers) == 2 * LAYERS
    assert {p.dtype for layer in layers for p in layer.lora_A.parameters()} == {torch.float32}
    losses, expected = train(adapted), train(dense)
    assert losses[-1] < 0.8 * losses[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-4, atol=0)
    torch.testing.assert_close(logits(adapted), logits(dense), rtol=0, atol=0.05)  # Adam divides small gradients
    for name, layer in adapted.base_model.model.named_modules():
        if isinstance(layer, W4Linear):
            assert torch.equal(layer.weight.dequantize(), weights[name.removesuffix(".base_layer")])

    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base(), tmp_path)
    assert torch.equal(logits(again), logits(adapted))
    with again.disable_adapter():
        assert torch.equal(logits(again), logits(base()))


@pytest.mark.parametrize("format", ["q6_k", "q2_k", "int8_g32_zint", "int3_g32", "e4m3_col_fp32", "mxfp8"])
def test_gradients_of_adapters_beside_other_widths(format: str, tmp_path: Path) -> None:
    folder = write_dense(tmp_path, "qwen2")
    config: Any = W4GemmConfig(format)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    gradients = []
    for each in (dequantize_layers(copy.deepcopy(model), torch.float32), model):
        adapted = with_lora(each)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zeros, behind which lora_A has no gradient
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
        adapted(IDS, labels=IDS).loss.backward()
        gradients.append({name: p.grad for name, p in adapted.named_parameters() if p.grad is not None})
    assert {m.weight.format.bits for m in model.modules() if isinstance(m, W4Linear)} == {
        WeightFormat.parse(format).bits
    }
    assert len(gradients[0]) == 2 * 2 * LAYERS and gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_peft_sees_4_bit_layers_without_a_call() -> None:
    """Whether PEFT or ours is imported first. Once "all-linear" found no layer, and PEFT said that no target_modules
    were passed. Programs look for PEFT before they import it."""
    script = f"""
import sys; sys.path[:] = {sys.path!r}
import importlib.util, os, torch, transformers.modeling_utils, w4gemm  # most of what PEFT imports, once for both
assert importlib.util.find_spec("peft") and "peft" not in sys.modules
for first in ("peft", "w4gemm.integrations.peft"):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, first
        continue
    importlib.import_module(first)
    import peft
    layer = w4gemm.W4Linear.from_linear(torch.nn.Linear(64, 64))
    adapted = peft.get_peft_model(torch.nn.Sequential(layer), peft.LoraConfig(target_modules=["0"]))
    assert type(adapted.base_model.model[0]).__name__ == "W4LoraLinear"
    assert type(peft.__loader__).__module__ == "_frozen_importlib_external" and peft.__spec__.loader is peft.__loader__
    os._exit(0)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0 and "not adapted" not in run.stderr, run.stderr


def test_what_follows_an_import_is_done_once(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    (tmp_path / "late_package.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    seen = []
    when_imported("late_package", lambda: seen.append(sys.modules["late_package"].x))
    when_imported("late_package", lambda: 1 / 0)
    assert not seen
    for _ in range(2):
        importlib.import_module("late_package")
        monkeypatch.delitem(sys.modules, "late_package")
    assert seen == [1] and caplog.text.count("late_package is not adapted to quantized layers: ZeroDivisionError") == 1
    when_imported("sys", lambda: seen.append(2))
    assert seen == [1, 2]


def test_all_linear_layers_but_the_head(base: Callable[[], torch.nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        adapted = with_lora(base(), target_modules="all-linear")
    assert sum(isinstance(m, W4LoraLinear) for m in adapted.modules()) == 7 * LAYERS
    assert not isinstance(adapted.base_model.model.lm_head, peft.tuners.lora.LoraLayer)


def test_all_parameters_are_counted(base: Callable[[], torch.nn.Module]) -> None:
    dense = with_lora(base().dequantize())
    assert with_lora(base()).get_nb_trainable_parameters() == dense.get_nb_trainable_parameters()


def test_merging_rounds_and_unmerging_brings_back_every_bit(base: Callable[[], torch.nn.Module]) -> None:
    adapted = with_lora(base(), init_lora_weights=False)
    before, name = logits(adapted), "model.layers.0.mlp.down_proj"
    layer = adapted.base_model.model.get_submodule(name)
    weight, delta = layer.base_layer.weight, layer.get_delta_weight("default").detach()
    with pytest.warns(
        UserWarning, match=r"merging rounds the adapter to int4_g32; apart, or merged after .*dequantize"
    ):
        adapted.merge_adapter()
    expected = quantize(weight.dequantize() + delta, weight.format)
    assert torch.equal(layer.base_layer.weight.dequantize(), expected.dequantize())
    assert not torch.equal(logits(adapted), before)
    adapted.unmerge_adapter()
    assert torch.equal(layer.base_layer.weight.dequantize(), weight.dequantize())
    assert torch.equal(logits(adapted), before)
    with pytest.warns(UserWarning, match="merging rounds"):
        merged = adapted.merge_and_unload()
    assert isinstance(merged.get_submodule(name), W4Linear)
    assert torch.equal(merged.get_submodule(name).weight.dequantize(), expected.dequantize())


def test_unmerging_where_the_model_is_now(base: Callable[[], torch.nn.Module]) -> None:
    """Once the weight came back on the device on which it had been merged."""
    layer = with_lora(base()).base_model.model.model.layers[0].mlp.down_proj
    with pytest.warns(UserWarning, match="merging rounds"):
        layer.merge()
    layer.to("meta").unmerge()
    assert layer.base_layer.weight.device.type == "meta"


def test_gradients_under_torch_compile(base: Callable[[], torch.nn.Module]) -> None:
    layer = with_lora(base(), init_lora_weights=False).base_model.model.model.layers[0].mlp.down_proj
    x = torch.randn(5, layer.base_layer.in_features, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), (x, layer.lora_A["default"].weight))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    actual = torch.autograd.grad(compiled(x).square().sum(), (x, layer.lora_A["default"].weight))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_layers_with_an_activation_are_refused(base: Callable[[], torch.nn.Module]) -> None:
    model = base()
    model.model.layers[0].mlp.down_proj.activation = "relu"
    with pytest.raises(ValueError, match="activation: wanted None in a layer with an adapter, got 'relu'"):
        with_lora(model)


def test_shards_of_layers_are_refused(base: Callable[[], torch.nn.Module]) -> None:
    """The sums of an adapter beside them would stay apart, where those of the layer are added."""
    model = base()
    layer = model.model.layers[0].mlp.down_proj
    k = layer.in_features
    layer.weight = layer.weight.shard(1, 0, 2)
    layer.in_features = k
    with pytest.raises(ValueError, match=rf"target_modules: wanted whole layers, .* shard \(\d+, {k // 2}\) of"):
        with_lora(model)


def test_experts_have_no_adapter(tmp_path: Path) -> None:
    """Once "all-linear" failed, and a target by name got one adapter for all experts, which could not be merged."""
    folder = write_dense(tmp_path, "qwen3_moe")
    model = load(folder, dtype=torch.float32, format="int4_g32")[0]
    adapted = with_lora(model, target_modules="all-linear")
    names = [name for name, m in adapted.named_modules() if isinstance(m, W4LoraLinear)]
    assert len(names) == 4 * LAYERS and all(".self_attn." in name for name in names)
    assert all(loss > 0 for loss in train(adapted))
    with pytest.raises(ValueError, match="target_modules: wanted layers .*experts.down with 4 experts"):
        with_lora(load(folder, dtype=torch.float32, format="int4_g32")[0], target_modules=["down"])


@pytest.mark.parametrize(
    "targets",
    [
        {"target_parameters": ["mlp.experts.down_proj"]},
        {"target_parameters": ["gate_up_proj"]},
        {"target_parameters": ["q_proj.weight"]},
        {"target_modules": ["q_proj", "down_proj"]},
    ],
)
def test_adapters_for_parameters_in_4_bits_are_refused(tmp_path: Path, targets: dict[str, Any]) -> None:
    """Once they were dropped without a word, also by PeftModel.from_pretrained."""
    folder = write_dense(tmp_path / "model", "qwen3_moe")
    dense = with_lora(AutoModelForCausalLM.from_pretrained(folder), **({"target_modules": ["k_proj"]} | targets))
    dense.save_pretrained(tmp_path / "adapter")
    model = load(folder, dtype=torch.float32, format="int4_g32")[0]
    message = r"target_parameters: wanted dense parameters, got \S+, which model\.layers\.0\.\S+ holds packed"
    with pytest.raises(ValueError, match=message):
        with_lora(model, **({"target_modules": ["k_proj"]} | targets))
    with pytest.raises(ValueError, match=message):
        peft.PeftModel.from_pretrained(model, tmp_path / "adapter")


def test_an_adapter_with_more_layers_than_its_config_names_is_refused(tmp_path: Path) -> None:
    folder = write_dense(tmp_path / "model", "qwen3_moe")
    adapted = with_lora(load(folder, dtype=torch.float32, format="int4_g32")[0], target_modules=["k_proj"])
    adapted.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    experts = "base_model.model.model.layers.0.mlp.experts"
    save_file(tensors | {f"{experts}.{e}.down_proj.lora_A.weight": torch.ones(4, 96) for e in range(2)}, file)
    model = load(folder, dtype=torch.float32, format="int4_g32")[0]
    with pytest.raises(ValueError, match=rf"adapter: wanted none for quantized .*, got {experts}\.\S+ and \d more"):
        peft.PeftModel.from_pretrained(model, tmp_path / "adapter")


def test_layers_in_4_bits_are_not_modules_to_save(base: Callable[[], torch.nn.Module]) -> None:
    """Once they were copied into every adapter, and nothing but a bias was trained."""
    with pytest.raises(ValueError, match=r"modules_to_save: wanted layers with dense .*, got W4Linear\(in_features=96"):
        with_lora(base(), modules_to_save=["down_proj"], target_modules=["q_proj"])
    adapted = with_lora(base(), modules_to_save=["lm_head"], target_modules=["q_proj"])
    assert adapted.base_model.model.lm_head.modules_to_save["default"].weight.requires_grad


def test_the_trainer_takes_it(base: Callable[[], torch.nn.Module], tmp_path: Path) -> None:
    """transformers' Trainer, with activation checkpointing; it refuses a model without adapters."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        tmp_path, max_steps=2, report_to=[], use_cpu=True, gradient_checkpointing=True, disable_tqdm=True
    )
    rows = [{"input_ids": IDS[0], "labels": IDS[0]}] * 4
    assert Trainer(with_lora(base()), arguments, train_dataset=rows).train().training_loss > 0
    with pytest.raises(ValueError, match="purely quantized"):
        Trainer(base(), arguments, train_dataset=rows)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights: wanted one of .* got 'pissa'"),
        ({"use_dora": True}, "use_dora"),
    ],
)
def test_variants_that_need_the_dense_weight_are_refused(
    base: Callable[[], torch.nn.Module], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        with_lora(base(), **config)


def test_a_model_that_has_adapters_is_not_quantized() -> None:
    """They are linear layers too, and would be in 4 bits and frozen."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))
    with pytest.raises(ValueError, match=r"model: wanted one without adapters, got PEFT's at .*0'; quantize first"):
        quantize_layers(wrapped, "int4_g32")
    assert quantize_layers(wrapped.merge_and_unload(), "int4_g32") is model and isinstance(model[0], W4Linear)


@pytest.mark.parametrize(
    "config",
    [
        peft.OSFConfig(target_modules=["q_proj"]),
        peft.TinyLoraConfig(target_modules=["down_proj"]),
        peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_other_methods_beside_4_bit_layers_are_refused(base: Callable[[], torch.nn.Module], config: Any) -> None:
    """Some of them would pass the layer over, and train nothing."""
    refused = rf"wanted LoRA alone for the quantized layer model\.\S+, got {config.peft_type.value}"
    with pytest.raises(ValueError, match=refused):
        peft.get_peft_model(base(), config)
    assert peft.get_peft_model(base(), peft.OSFConfig(target_modules=["lm_head"])).lm_head is not None
    with pytest.raises(ValueError, match="got LORA by MixedModel"):
        peft.get_peft_model(base(), peft.LoraConfig(target_modules=["q_proj"]), mixed=True)


def test_adapters_that_x_lora_mixes(base: Callable[[], torch.nn.Module], tmp_path: Path) -> None:
    """Its config has no target_parameters, without which dense models were refused too, once w4gemm was imported."""
    trained = with_lora(base())
    train(trained)
    trained.save_pretrained(tmp_path / "adapter")
    config = peft.XLoraConfig("CAUSAL_LM", hidden_size=HIDDEN, adapters={"0": str(tmp_path / "adapter")})
    mixed = []
    for model in (base(), dequantize_layers(base(), torch.float32)):
        model.config.use_cache = False
        torch.manual_seed(1)  # of the weights that X-LoRA makes
        mixed.append(logits(peft.get_peft_model(model, config)))
    torch.testing.assert_close(*mixed, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(mixed[0], logits(base()), rtol=1e-2, atol=1e-2)


def test_an_adapter_is_merged_into_a_layer_that_scales_x(base: Callable[[], torch.nn.Module]) -> None:
    """The weight meets x * scale, the adapter x itself."""
    model, scale = base(), torch.rand(96, generator=torch.Generator().manual_seed(2)) + 0.5
    model.model.layers[1].mlp.down_proj.pre_quant_scale = scale
    adapted = with_lora(model, init_lora_weights=False).eval()
    layer = adapted.base_model.model.model.layers[1].mlp.down_proj
    before, apart = layer.base_layer.weight.dequantize(), logits(adapted)
    with pytest.warns(UserWarning, match="merging rounds the adapter"):
        adapted.merge_adapter()
    expected = quantize(before + layer.get_delta_weight("default") / scale, "int4_g32").dequantize()
    assert torch.equal(layer.base_layer.weight.dequantize(), expected)
    adapted.unmerge_adapter()
    assert torch.equal(logits(adapted), apart)
    scale[3] = 0
    with pytest.raises(ValueError, match="pre_quant_scale: an adapter cannot be merged into a layer that ignores"):
        layer.merge()


def test_adapters_of_a_model_that_was_dequantized_are_merged_exactly(base: Callable[[], torch.nn.Module]) -> None:
    model = base()
    adapted = with_lora(model, init_lora_weights=False).eval()
    apart = logits(adapted)
    model.dequantize()
    adapted.merge_adapter()
    torch.testing.assert_close(logits(adapted), apart, rtol=1e-4, atol=1e-4)
    adapted.unmerge_adapter()
    torch.testing.assert_close(logits(adapted), apart, rtol=1e-4, atol=1e-4)
