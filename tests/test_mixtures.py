"""Models with experts, loaded with all of them packed: the numbers are those of transformers' own dense model."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

import test_awq
import test_compressed_tensors
import test_gptq
from quantized_model import Numbers, Writer, change, configure, convert
from tiny_model import EXPERTS, LAYERS, write_dense
from w4gemm import FormatError, W4Experts, W4GroupedLinear, W4Linear, WeightFormat, quantize
from w4gemm.checkpoints import dense, open_checkpoint
from w4gemm.checkpoints.model_experts import activation_of
from w4gemm.cli.__main__ import main
from w4gemm.integrations.transformers import W4GemmConfig, describe, load, quantize_layers
from w4gemm.tuning.random_weight import random_weight

ROUTERS = ("lm_head", "mlp.gate", "block_sparse_moe.gate", "mlp.router", "feed_forward.router")
FOLDERS: dict[str, tuple[str, dict[str, Any], Writer]] = {
    "qwen3_moe-gptq": ("qwen3_moe", test_gptq.CONFIG, test_gptq.writer(-1)),
    "mixtral-awq": ("mixtral", test_awq.CONFIG, test_awq.writer(zeros=(1, 15))),
    "deepseek_v2-gptq": ("deepseek_v2", test_gptq.CONFIG, test_gptq.writer(-1)),
    "deepseek_v3-compressed-tensors": (
        "deepseek_v3",
        test_compressed_tensors.config(),
        test_compressed_tensors.writer(),
    ),
    "llama4_text-compressed-tensors": (
        "llama4_text",
        test_compressed_tensors.config(),
        test_compressed_tensors.writer(),
    ),
}
ROLES = "gate_proj", "up_proj", "down_proj"
IDS = torch.arange(1, 12)[None]
OBEYS_LIMIT = "swiglu_limit" in inspect.getsource(GptOssExperts)
"""False for transformers 5.17, which has a limit of 7 for every gpt-oss."""


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


def logits_of(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the model of a folder, in one process."""
    with torch.inference_mode():
        return load(folder)[0](ids).logits


def dense_model(folder: Path, weights: Mapping[str, torch.Tensor], marks: tuple[str, ...]) -> torch.nn.Module:
    """transformers' own model of a quantized folder, with ``weights`` in the place of the tensors that have marks."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: t for name, t in tensors.items() if not name.endswith(marks)}
    dense = folder.parent / f"{folder.name}-dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps(config))
    save_file(tensors | {name: t.contiguous() for name, t in weights.items()}, dense / "model.safetensors")
    return AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()


MARKS = ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_shape")


def quantized(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    architecture, config, write = FOLDERS[kind]
    write_dense(folder, architecture)
    if architecture == "llama4_text":  # llm-compressor makes modules of its experts
        change(folder, one_by_one)
    return convert(folder, config, write, ROUTERS)


def one_by_one(tensors: dict[str, torch.Tensor]) -> None:
    """Replace Llama 4's parameters of all experts by those of each."""
    for name in [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]:
        owner, _, leaf = name.rpartition(".")
        roles = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
        for e, matrix in enumerate(tensors.pop(name)):
            parts = zip(roles, matrix.T.chunk(len(roles)), strict=True)
            tensors |= {f"{owner}.{e}.{role}.weight": rows.contiguous() for role, rows in parts}


def together(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undo :func:`one_by_one`."""
    whole = {name: t for name, t in tensors.items() if ".experts." not in name}
    for owner in {name.rsplit(".", 3)[0] for name in tensors.keys() - whole}:
        each = [[tensors[f"{owner}.{e}.{role}.weight"].T for e in range(EXPERTS)] for role in ROLES]
        gates, ups, whole[f"{owner}.down_proj"] = map(torch.stack, each)
        whole[f"{owner}.gate_up_proj"] = torch.cat((gates, ups), 2)
    return whole


@pytest.mark.parametrize("kind", FOLDERS)
def test_experts_of_their_own(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Folders with modules of each expert."""
    folder = tmp_path / "model"
    expected = quantized(folder, kind)
    checkpoint = open_checkpoint(folder)
    stacked = {name: module for name, module in checkpoint.modules.items() if module.experts}
    assert stacked and all(module.experts == EXPERTS for module in stacked.values())
    for name, module in stacked.items():
        owner, sources = name.rpartition(".")[0], module.fused or ("down_proj", "w2")
        each = [
            [expected[f"{owner}.{e}.{s}"] for s in sources if f"{owner}.{e}.{s}" in expected] for e in range(EXPERTS)
        ]
        rows = [torch.stack(weights, 1).flatten(0, 1) for weights in each]
        assert torch.equal(checkpoint.weight(name).dequantize(), torch.stack(rows)), name
    model, _ = load(folder)
    experts = [module for module in model.modules() if isinstance(module, W4Experts)]
    assert 2 * len(experts) == len(stacked) and experts[0].activation == "silu_mul"
    weights = {f"{name}.weight": t for name, t in expected.items()}
    plain = dense_model(folder, together(weights) if kind.startswith("llama4") else weights, MARKS)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)
    assert main(["generate", "hello", "--model", str(folder), "--max-new-tokens", "2", "--device", "cpu"]) == 0
    assert "layers quantized" in capsys.readouterr().err


def test_experts_in_act_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each expert in its own order, which its gate and up share because they have one input. compressed-tensors no
    longer holds such weights, our own folder does."""
    folder, saved, config = tmp_path / "model", tmp_path / "saved", test_gptq.CONFIG | {"desc_act": True}

    def write(name: str, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        numbers = Numbers.random(n, k, 32)
        order = np.random.default_rng(len(name) if by_module else int(re.findall(r"\d+", name)[-1])).permutation(k)
        numbers = replace(numbers, groups=numbers.groups[order])
        parts, _ = test_gptq.writer(-1)(name, n, k)
        return parts | {"g_idx": torch.from_numpy(numbers.groups).int()}, numbers.weight

    by_module = False
    expected = convert(write_dense(folder, "qwen3_moe"), config, write, ROUTERS)
    model, _ = load(folder)
    experts = next(module for module in model.modules() if isinstance(module, W4Experts))
    perm = experts.gate_up.weight.perm  # down has one group
    assert perm is not None and perm.shape == (EXPERTS, 64) and len(perm.unique(dim=0)) == EXPERTS
    plain = dense_model(folder, {f"{name}.weight": t for name, t in expected.items()}, MARKS)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)
    model.save_pretrained(saved)
    assert torch.equal(logits(load_beside(saved)), logits(model))
    assert main(["convert", str(folder), str(tmp_path / "other"), "--to", "compressed-tensors"]) == 1
    assert "does not hold weights in act-order" in capsys.readouterr().err
    by_module = True
    convert(write_dense(tmp_path / "odd", "qwen3_moe"), config, write, ROUTERS)
    with pytest.raises(FormatError, match="wanted the columns of an expert's gate and up in the same order"):
        load(tmp_path / "odd")


def test_a_mixture_whose_tokens_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """All quantized layers of a model made batch invariant: each gives rows of its input the bits that it gave among
    others."""
    quantized(tmp_path / "model", "qwen3_moe-gptq")
    model, _ = load(tmp_path / "model")
    layers = [module for module in model.modules() if isinstance(module, (W4Linear, W4Experts))]
    assert {type(layer) for layer in layers} == {W4Linear, W4Experts}
    calls: list[tuple[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor]] = []
    for layer in layers:
        layer.batch_invariant = True
        layer.register_forward_hook(lambda *call: calls.append(call))
    logits(model)
    for layer, args, out in calls[:]:
        flat, rows = [t.flatten(0, -2) for t in args], out.flatten(0, -2)
        with torch.inference_mode():
            for some in (slice(1), slice(4, 11)):
                assert torch.equal(layer(*(t[some] for t in flat)), rows[some])


def write_gpt_oss(folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """Write a tiny gpt-oss in OpenAI's layout, and return its experts' dense weights as transformers has them."""
    write_dense(folder, "gpt_oss")
    config = json.loads((folder / "config.json").read_text()) | settings
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    expected = {}

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, k, n = tensors.pop(name).shape
            each = [random_weight(WeightFormat.parse("mxfp4"), n, k, seed=e) for e in range(experts)]
            tensors[f"{name}_blocks"] = torch.stack([w.tensors[0].view(n, k // 32, 16) for w in each])
            tensors[f"{name}_scales"] = torch.stack([w.tensors[1].view(torch.uint8) for w in each])
            expected[name] = torch.stack([w.dequantize().T for w in each])

    change(folder, pack)
    return expected


@pytest.mark.parametrize(("limit", "activation"), [(7.0, "swiglu_oai"), (0.5, "swiglu_oai(limit=0.5)")])
def test_gpt_oss(tmp_path: Path, limit: float, activation: str) -> None:
    folder = tmp_path / "model"
    expected = write_gpt_oss(folder, swiglu_limit=limit)
    if not OBEYS_LIMIT and limit != 7:
        with pytest.raises(FormatError, match="its config says swiglu_limit 0.5, but GptOssExperts of this transf"):
            load(folder)
        return
    model, _ = load(folder)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, W4Experts) and experts.activation == activation
    assert experts.gate_up.bias.shape == (EXPERTS, 2 * 96) and str(experts.gate_up.format) == "e2m1_g32_e8m0"
    plain = dense_model(folder, expected, ("_blocks", "_scales"))
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)
    assert sum(isinstance(module, W4GroupedLinear) for module in model.modules()) == 2 * LAYERS


def test_a_bias_of_experts_that_float16_cannot_hold(tmp_path: Path) -> None:
    """from_pretrained made it infinite."""
    folder, name = tmp_path / "model", "model.layers.0.mlp.experts.down_proj_bias"
    write_gpt_oss(folder)
    change(folder, lambda tensors: tensors.update({name: torch.full_like(tensors[name], 1e5)}))
    for way in (load, partial(AutoModelForCausalLM.from_pretrained, quantization_config=W4GemmConfig())):
        with pytest.raises(FormatError, match="down_proj.bias' holds 100000, which float16 cannot hold"):
            way(folder, dtype=torch.float16)


@pytest.mark.parametrize("kind", ["qwen3_moe-gptq", "mixtral-awq", "gpt_oss", "llama4_text-compressed-tensors"])
def test_from_pretrained_and_back(tmp_path: Path, kind: str) -> None:
    """The same numbers as by ``load``, and again after ``save_pretrained``."""
    folder, saved = tmp_path / "model", tmp_path / "saved"
    write_gpt_oss(folder, swiglu_limit=3.0 if OBEYS_LIMIT else 7.0) if kind == "gpt_oss" else quantized(folder, kind)
    own = load(folder)[0]
    loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=W4GemmConfig(), dtype=torch.float32)
    assert torch.equal(logits(loaded), logits(own))
    loaded.save_pretrained(saved)
    for again in (load_beside(saved), AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)):
        assert torch.equal(logits(again), logits(own))
    plain = loaded.dequantize(torch.float32)
    assert not any(isinstance(module, W4Experts) for module in plain.modules())
    torch.testing.assert_close(logits(plain), logits(own), rtol=1e-4, atol=1e-4)
    if kind.startswith("llama4"):
        with pytest.raises(ValueError, match="experts that dequantize_layers made, which no folder has a place for"):
            plain.save_pretrained(tmp_path / "plain")  # transformers would draw its experts at random
    else:
        plain.save_pretrained(tmp_path / "plain")
        dense = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
        assert torch.equal(logits(dense), logits(plain))
        experts, restored = (m.get_submodule("model.layers.1.mlp.experts") for m in (dense, plain))
        assert type(experts) is type(restored)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "gpt_oss", "llama4_text"])
def test_a_dense_mixture_is_quantized(tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts too; their numbers are those of each, rounded. Qwen's are read one layer at a time."""
    write_dense(tmp_path, architecture)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    if architecture != "mixtral":  # it renames its modules
        monkeypatch.setattr(dense, "dense_model", None)
    model, _ = load(tmp_path, format="int4_g32")
    owner = "feed_forward" if architecture == "llama4_text" else "mlp"
    experts, before = (m.get_submodule(f"model.layers.1.{owner}.experts") for m in (model, own))
    assert isinstance(experts, W4Experts)
    for product, parameter in ((experts.gate_up, before.gate_up_proj), (experts.down, before.down_proj)):
        rows = parameter.detach().mT if architecture in ("gpt_oss", "llama4_text") else parameter.detach()
        if architecture != "gpt_oss" and product is experts.gate_up:
            rows = torch.stack(rows.chunk(2, 1), 2).flatten(1, 2)
        for e in range(EXPERTS):
            assert torch.equal(product.weight.expert(e).dequantize(), quantize(rows[e], "int4_g32").dequantize())
    if architecture == "gpt_oss":
        assert torch.equal(experts.gate_up.bias, before.gate_up_proj_bias)
    expected = logits(own)
    difference = (logits(model) - expected).norm() / expected.norm()
    assert 0 < difference < 1
    said: list[tuple[int, int, str]] = []
    assert quantize_layers(own, "int4_g32", progress=lambda *each: said.append(each)) is own
    assert torch.equal(logits(own), logits(model)) and said[-1][0] == said[-1][1] == len(said)
    describe(own)
    own.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(logits(again), logits(own))


@pytest.mark.parametrize("name", ["experts", "down_proj", "mlp.experts", "model.layers.1.mlp.experts"])
def test_experts_that_are_skipped(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """By their own name or that of a product, and without a warning. Once they were quantized all the same."""
    skip = ("lm_head", name)
    write_dense(tmp_path, "deepseek_v3")  # with dense and shared layers of these names too
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=W4GemmConfig("int4_g32", skip=skip), dtype=torch.float32
    )
    before = own.model.layers[1].mlp.experts
    assert quantize_layers(own, "int4_g32", skip=skip).model.layers[1].mlp.experts is before
    assert not caplog.text and isinstance(own.model.layers[1].mlp.shared_experts.up_proj, W4Linear)
    assert isinstance(own.model.layers[0].mlp.down_proj, W4Linear) == (name != "down_proj")
    assert torch.equal(logits(loaded), logits(own))
    loaded.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(logits(again), logits(own))


@pytest.mark.parametrize("kind", ["deepseek_v3-compressed-tensors", "gpt_oss", "llama4_text-compressed-tensors"])
def test_convert(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts keep their numbers in a folder of w4gemm's own, and one by one in compressed-tensors, which has no place
    for their biases. The latter is made of the former too."""
    folder, converted = tmp_path / "model", tmp_path / "converted"
    write_gpt_oss(folder) if kind == "gpt_oss" else quantized(folder, kind)
    assert main(["convert", str(folder), str(converted)]) == 0
    assert torch.equal(logits(load_beside(converted)), logits(load(folder)[0]))
    assert main(["inspect", str(converted)]) == 0 and f"{EXPERTS} x " in capsys.readouterr().out
    for source in (folder, converted):
        other = tmp_path / f"{source.name}-other"
        code = main(["convert", str(source), str(other), "--to", "compressed-tensors"])
        if kind == "gpt_oss":
            assert code == 1 and "compressed-tensors has no biases of experts" in capsys.readouterr().err
            continue
        assert code == 0
        before, after = open_checkpoint(folder), open_checkpoint(other)
        assert before.modules == after.modules and before.tensors == after.tensors
        for name in before.modules:
            assert torch.equal(before.weight(name).dequantize(), after.weight(name).dequantize()), name


def load_beside(folder: Path) -> torch.nn.Module:
    """``load``, with the tokenizer of the folder beside it."""
    for file in (folder.parent / "model").glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return load(folder)[0]


def test_what_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    quantized(folder, "qwen3_moe-gptq")

    def refused(message: str) -> None:
        with pytest.raises(FormatError, match=message):
            load(folder)

    kept = load_file(folder / "model.safetensors")
    one = "model.layers.1.mlp.experts.2.up_proj"
    for leaf in ("qweight", "qzeros", "scales", "g_idx"):
        change(folder, lambda tensors, leaf=leaf: tensors.pop(f"{one}.{leaf}", None))
    refused(r"model\.layers\.1\.mlp\.experts\.gate_up_proj: expert 2 of 4 lacks a packed module")
    save_file(kept, folder / "model.safetensors")
    configure(folder, dynamic={rf"-:{one}": {}})
    refused(r"says by .* that it is dense, but it has GPTQ's tensors")
    configure(folder, dynamic={})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "tanh"}))
    refused(r"model\.layers\.0\.mlp\.experts: its Qwen3MoeExperts compute another activation than silu_mul")
    (folder / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 64}))
    refused(r"experts\.down_proj has shape \(4, 64, 32\), its config wants \(4, 64, 64\)")


def test_damaged_gpt_oss(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_gpt_oss(folder)
    name = "model.layers.1.mlp.experts.down_proj"
    kept = load_file(folder / "model.safetensors")
    for leaf, damaged, message in (
        ("scales", kept[f"{name}_scales"][:, :5].clone(), "down_proj: blocks have shape .* and scales"),
        ("scales", kept[f"{name}_scales"].float(), "wanted scales of uint8"),
        ("bias", kept[f"{name}_bias"][:2].clone(), "bias has shape"),
    ):
        save_file(kept | {f"{name}_{leaf}": damaged}, folder / "model.safetensors")
        with pytest.raises(FormatError, match=message):
            open_checkpoint(folder)
    scales = kept[f"{name}_scales"].clone()
    scales[1, 2, 0] = 255
    save_file(kept | {f"{name}_scales": scales}, folder / "model.safetensors")
    with pytest.raises(FormatError, match="down_proj: "):
        open_checkpoint(folder).weight(name)


@pytest.mark.parametrize(
    ("act", "name"), [("silu", "silu_mul"), ("gelu", "gelu_mul"), ("gelu_pytorch_tanh", "gelu_tanh_mul")]
)
def test_the_activation_is_found_by_its_numbers(act: str, name: str) -> None:
    """Gemma 4's is a gelu, of whose tail float32 rounds off more than of silu's."""
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_act=act, hidden_size=64, moe_intermediate_size=32, num_experts=2, num_hidden_layers=1
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert activation_of(model.model.layers[0].mlp.experts) == name
