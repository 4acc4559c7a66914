"""Whatever goes through the protocol of checkpoints works for a format that the library has never seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

import toy_checkpoint
from tiny_model import LAYERS, write_dense
from w4gemm import FormatError, WeightFormat, checkpoints
from w4gemm.checkpoints import experts, find_checkpoint, open_checkpoint
from w4gemm.checkpoints.base import Module
from w4gemm.cli import problems
from w4gemm.cli.__main__ import main
from w4gemm.core.problem import Device
from w4gemm.integrations.transformers import dequantize_layers, load, summarize


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "FORMATS", (*checkpoints.FORMATS, toy_checkpoint.FORMAT))


@pytest.fixture(params=["llama", "qwen2"])
def toy(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder, and the numbers of its linear layers; a qwen2 has biases of q, k and v."""
    folder = write_dense(tmp_path / "toy", request.param)
    return folder, toy_checkpoint.convert(folder)


def test_opens_without_reading_tensors(toy: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = toy
    assert find_checkpoint(folder).format is toy_checkpoint.FORMAT
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, toy_checkpoint.ToyCheckpoint)
    assert len(checkpoint.modules) == 7 * LAYERS
    assert not checkpoint.read


def test_loads_a_model(toy: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, expected = toy
    model, tokenizer = load(folder)
    assert summarize(model).formats == {toy_checkpoint.FORMAT_NAME: 7 * LAYERS}
    ids = tokenizer("hello", return_tensors="pt").input_ids
    with torch.inference_mode():
        logits = model(ids).logits
        assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]
    biases = {n: p for n, p in model.named_parameters() if n.endswith("_proj.bias")}
    assert bool(biases) == (model.config.model_type == "qwen2") and all(p.any() for p in biases.values())
    dequantize_layers(model, torch.float32)
    for name, weight in expected.items():
        assert torch.equal(model.get_parameter(name), weight), name
    with torch.inference_mode():
        torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_the_commands_know_its_layers(toy: tuple[Path, dict[str, torch.Tensor]], capsys, monkeypatch) -> None:
    folder, _ = toy
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(folder / "cache"))
    args = problems.argparse.Namespace(model=str(folder), shapes=None, format=None)
    layers = problems.parse_layers(args, Device("cpu"))
    has_bias = json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"
    assert {(layer.n, layer.k, layer.bias) for layer in layers} == {
        (64, 64, has_bias),
        (32, 64, has_bias),
        (64, 64, False),
        (96, 64, False),
        (64, 96, False),
    }
    assert main(["tune", "--model", str(folder), "--m", "4", "--device", "cpu"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(layers)
    assert main(["generate", "hello", "--model", str(folder), "--max-new-tokens", "2", "--device", "cpu"]) == 0
    assert f"14 of 15 linear layers quantized (14 x {toy_checkpoint.FORMAT_NAME}" in capsys.readouterr().err


def test_the_model_and_the_checkpoint_must_agree(toy: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = toy
    tensors, facts = load_file(folder / "toy.safetensors"), json.loads((folder / "toy.json").read_text())

    def refused(message: str) -> None:
        with pytest.raises(FormatError, match=message):
            load(folder)

    save_file(tensors | {"model.layers.0.extra.weight": torch.zeros(3)}, folder / "toy.safetensors")
    refused(r"no place for model\.layers\.0\.extra\.weight")
    save_file({n: t for n, t in tensors.items() if n != "model.norm.weight"}, folder / "toy.safetensors")
    refused(r"no tensor for model\.norm\.weight")
    save_file(tensors | {"model.norm.weight": torch.zeros(3)}, folder / "toy.safetensors")
    refused(r"'model\.norm\.weight' has shape \(3,\), its config wants \(64,\)")
    save_file(tensors, folder / "toy.safetensors")

    stray = {"model.layers.1.mlp.down_proj.bias": torch.zeros(64)}
    save_file(tensors | stray, folder / "toy.safetensors")
    refused(r"no place for model\.layers\.1\.mlp\.down_proj\.bias")
    save_file(tensors, folder / "toy.safetensors")

    down = facts["model.layers.1.mlp.down_proj"]
    for change, message in (
        ({"bias": True}, "down_proj has a bias, its config wants none"),
        ({"n": 65}, r"down_proj has shape \(65, 96\), its config wants \(64, 96\)"),
        ({"experts": 4}, r"no place for model\.layers\.1\.mlp\.down_proj \(4 experts\)"),
    ):
        changed = facts | {"model.layers.1.mlp.down_proj": down | change}
        (folder / "toy.json").write_text(json.dumps(changed))
        refused(message)
    renamed = {n: f for n, f in facts.items() if n != "model.layers.1.mlp.down_proj"} | {"model.layers.7.down": down}
    (folder / "toy.json").write_text(json.dumps(renamed))
    refused(r"no tensor for model\.layers\.1\.mlp\.down_proj\.weight; no place for model\.layers\.7\.down in the model")


def test_what_no_format_knows_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"path: wanted a file or folder, got an empty string; '\.' is"):
        open_checkpoint("")
    with pytest.raises(TypeError, match="path: wanted a file or folder, got int 5"):
        open_checkpoint(5)  # type: ignore[arg-type]
    with pytest.raises(
        FormatError, match="is an empty folder; what can be loaded: a GGUF file.*quantized by gptq, .*toy"
    ):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(FormatError, match="is a file of tensors: give its folder, .*what can be loaded"):
        open_checkpoint(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FormatError, match=r"is a folder with pytorch_model\.bin; what can be loaded"):
        open_checkpoint(tmp_path)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(FormatError, match=r"is an adapter of PEFT: give its model, .*; what can be loaded"):
        open_checkpoint(tmp_path)
    snapshot = tmp_path / "snapshots" / "123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(FormatError, match=rf"is a folder of the hub's cache: give .*'{snapshot}'; what can be loaded"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("keys", [("quantization",), ("quantization", "quantization_config")], ids=len)
def test_a_folder_of_mlx_is_refused_by_its_name(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """MLX names no method, and some of its folders have a key of their own alone, as no dense folder has."""
    folder = write_dense(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    config |= {key: {"group_size": 64, "bits": 4} for key in keys}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="is a model quantized by 'MLX', which cannot be loaded yet; what can be"):
        open_checkpoint(folder)


def test_experts_are_stacked_with_gates_and_without() -> None:
    module = Module(64, 64, WeightFormat())
    names = [f"mixer.experts.{e}.{part}" for e in range(3) for part in ("up_proj", "down_proj")]
    without = {"mixer.experts.up_proj", "mixer.experts.down_proj"}
    assert experts.stacks(dict.fromkeys(names, module)).keys() == without
    names += [f"mlp.experts.{e}.{part}" for e in range(3) for part in ("gate_proj", "up_proj", "down_proj")]
    with_gates = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert experts.stacks(dict.fromkeys(names, module)).keys() == without | with_gates
    with pytest.raises(ValueError, match="expert 1 of 3 lacks a packed module"):
        experts.stacks(dict.fromkeys([name for name in names if name != "mlp.experts.1.gate_proj"], module))
    unlike = dict.fromkeys(names, module) | {"mlp.experts.2.up_proj": replace(module, format=WeightFormat(32))}
    legal = "wanted format int4_g128 as mlp.experts.0.gate_proj has$"
    with pytest.raises(ValueError, match=f"^mlp.experts.2.up_proj has format int4_g32, {legal}"):
        experts.stacks(unlike)
