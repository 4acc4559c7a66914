"""Kimi's folders: compressed-tensors with routed experts alone in 4 bits, as a part of a larger model or not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import test_compressed_tensors
from quantized_model import Writer, convert
from test_deepseek import EXPERT, IDS, mxfp4
from test_mixtures import dense_model
from tiny_model import EXPERTS, write_dense
from w4gemm import FormatError, W4Experts
from w4gemm.checkpoints import open_checkpoint
from w4gemm.cli.__main__ import main
from w4gemm.integrations.transformers import W4GemmConfig, load

IGNORED = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*")
INT4 = test_compressed_tensors.config(ignore=IGNORED)
FLOATS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
MXFP4 = test_compressed_tensors.config(FLOATS, "mxfp4-pack-quantized", IGNORED)
OURS = {"quantization_config": W4GemmConfig(), "dtype": torch.float32}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 2}


def knows(architecture: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(architecture not in CONFIG_MAPPING_NAMES, reason="this transformers does not know it")


def of_experts(write: Writer) -> Writer:
    """Routed experts by ``write``, other layers dense."""
    return lambda name, n, k: write(name, n, k) if EXPERT.fullmatch(name) else ({"weight": dense(n, k)}, dense(n, k))


def dense(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)) / 10


def floats(name: str, n: int, k: int) -> Any:
    packed, scale, weight = mxfp4(n, k)
    return {"weight_packed": packed.view(torch.uint8), "weight_scale": scale.view(torch.uint8)}, weight


def write_k2(folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """Write a tiny Kimi-K2; return its experts' weights. Its model type is none of transformers'."""
    write_dense(folder, "deepseek_v3")
    expected = convert(folder, INT4, of_experts(test_compressed_tensors.writer()), ("lm_head", "mlp.gate"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"} | settings))
    return {name: w for name, w in expected.items() if EXPERT.fullmatch(name)}


def write_k25(folder: Path) -> dict[str, torch.Tensor]:
    """Write a tiny Kimi-K2.5, whose language model is a Kimi-K2; return its experts' weights."""
    expected = write_k2(folder)
    text = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    whole |= {"vision_config": VISION, "projection_hidden_size": 32, "tie_word_embeddings": False}
    plain = {key: value for key, value in text.items() if key != "quantization_config"}
    config = AutoConfig.for_model(**whole | {"text_config": plain})
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder / "vision")
    others = load_file(folder / "vision" / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(whole))
    return as_part(folder, expected, {n: t for n, t in others.items() if not n.startswith("language_model.")})


def write_k3(folder: Path) -> dict[str, torch.Tensor]:
    """Write what Kimi-K3 keeps in 4 bits, and a little of the rest; return its experts' weights. The model is none of
    transformers'."""
    folder.mkdir()
    tensors, expected = {}, {}
    for expert in range(EXPERTS):
        for role, n, k in (("w1", 48, 64), ("w2", 64, 64), ("w3", 48, 64)):
            name = f"model.layers.1.block_sparse_moe.experts.{expert}.{role}"
            parts, expected[name] = floats(name, n, k)
            tensors |= {f"{name}.{leaf}": t for leaf, t in parts.items()}
    save_file(tensors | {"lm_head.weight": dense(8, 64).bfloat16()}, folder / "model.safetensors")
    text = {"model_type": "kimi_k3_text", "quantization_config": MXFP4, "dtype": "bfloat16"}
    config = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    return as_part(folder, expected, {"vision_tower.norm.weight": torch.ones(8)})


def as_part(
    folder: Path, expected: dict[str, torch.Tensor], others: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Rename a folder's tensors to those of the language model of another model, and add others."""
    tensors = {f"language_model.{name}": t for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors | others, folder / "model.safetensors")
    return {f"language_model.{name}": t for name, t in expected.items()}


def write_linear(folder: Path) -> dict[str, torch.Tensor]:
    """Write a tiny Kimi-Linear with experts in MXFP4 and under the names of Kimi-K3; return their weights."""
    write_dense(folder, "kimi_linear")
    expected = convert(folder, MXFP4, of_experts(floats), ("lm_head", "gate"))
    return {name: w for name, w in expected.items() if EXPERT.fullmatch(name)}


def assert_experts(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.modules
    for name, module in checkpoint.modules.items():
        owner, _, product = name.rpartition(".")
        roles = (("gate_proj", "up_proj"), ("w1", "w3")) if product == "gate_up_proj" else (("down_proj",), ("w2",))
        used = next(r for r in roles if f"{owner}.0.{r[0]}" in expected)
        each = [[expected[f"{owner}.{e}.{role}"] for role in used] for e in range(EXPERTS)]
        assert module.experts == EXPERTS
        rows = torch.stack([torch.stack(parts, 1).flatten(0, 1) for parts in each])
        assert torch.equal(checkpoint.weight(name).dequantize(), rows), name


def test_k2(tmp_path: Path) -> None:
    """A DeepSeek-V3 by another name."""
    expected = write_k2(tmp_path)
    assert_experts(tmp_path, expected)
    model, _ = load(tmp_path)
    assert type(model).__name__ == "DeepseekV3ForCausalLM"
    assert sum(isinstance(module, W4Experts) for module in model.modules()) == 1
    with torch.inference_mode():
        assert model(IDS).logits.isfinite().all()


@knows("kimi_k25")
def test_k25(tmp_path: Path) -> None:
    """The whole, by both ways, has the numbers of its language model in a folder of its own."""
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    write_k2(alone)
    assert_experts(whole, write_k25(whole))
    with torch.inference_mode():
        logits = load(alone)[0](IDS).logits
        assert torch.equal(load(whole)[0](IDS).logits, logits)
        model = AutoModelForImageTextToText.from_pretrained(whole, **OURS)
        assert torch.equal(model(IDS).logits, logits)


@knows("kimi_linear")
def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """The names of experts are not those of the model, and transformers merges some of its dense tensors."""
    folder = tmp_path / "model"
    expected = write_linear(folder)
    assert_experts(folder, expected)
    own = dense_model(folder, {f"{name}.weight": w for name, w in expected.items()}, ("weight_packed", "weight_scale"))
    model = AutoModelForCausalLM.from_pretrained(folder, **OURS)
    assert sum(isinstance(module, W4Experts) for module in model.modules()) == 1
    with torch.inference_mode():
        torch.testing.assert_close(model(IDS).logits, own(IDS).logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(load(folder)[0](IDS).logits, model(IDS).logits)


def test_k3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that transformers does not know is read, shown and converted; its own code may then load it."""
    folder, converted = tmp_path / "model", tmp_path / "converted"
    expected = write_k3(folder)
    assert_experts(folder, expected)
    assert main(["inspect", str(folder), "--device", "h200"]) == 0
    shown = capsys.readouterr().out
    row = rf"language_model\.model\.layers\.\*\.block_sparse_moe\.experts\.down_proj +mxfp4 +{EXPERTS} x 64"
    assert re.search(row, shown)
    assert main(["convert", str(folder), str(converted), "--to", "w4gemm"]) == 0
    config = json.loads((converted / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "w4gemm"
    assert "quantization_config" not in config["text_config"]
    assert open_checkpoint(converted).stored_type("language_model.lm_head.weight") == "BF16"
    name = "language_model.model.layers.1.block_sparse_moe.experts.gate_up_proj"
    w, copy = (open_checkpoint(path).weight(name) for path in (folder, converted))
    assert torch.equal(w.dequantize(), copy.dequantize())
    with pytest.raises(FormatError, match="transformers makes no (model|tokenizer .*) of it: ValueError: .*kimi_k3"):
        load(folder)


def test_code_of_a_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi's folders have some; transformers would ask whether to run it."""
    ran = tmp_path / "ran"
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    write_k2(tmp_path, architectures=["OtherForCausalLM"], auto_map={"AutoConfig": "configuration_x.XConfig"})
    code = f"open({str(ran)!r}, 'w')\nfrom transformers import PretrainedConfig as XConfig\n"
    (tmp_path / "configuration_x.py").write_text(code)
    with pytest.raises(FormatError, match="code lies in the folder, and load and the commands run no such code"):
        load(tmp_path)
    write_k2(tmp_path, auto_map={"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "configuration_x.X"})
    load(tmp_path)  # transformers' own code does for it
    assert not ran.exists()
