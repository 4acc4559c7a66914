"""Folders that are half there, or whose config and tensors disagree: one sentence says what is wrong, for every method.

Every folder is small and has no model behind it, but for the last tests, which load tiny models.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, ViTConfig, ViTForImageClassification

import test_deepseek
import test_from_pretrained
import test_hqq
import test_mixtures
import test_modelopt
from fuzz import samples
from quantized_model import write_model
from w4gemm import FormatError, W4Linear
from w4gemm.checkpoints import open_checkpoint
from w4gemm.checkpoints.hugging_face import metadata
from w4gemm.integrations.transformers import W4GemmConfig, load

INDEX = "model.safetensors.index.json"
FOLDERS = tuple(name for name in samples.FORMATS if not name.startswith(("gguf", "weight")))
every_folder = pytest.mark.parametrize("kind", FOLDERS)
NOT_NEEDED = ("input_scale", "weight_shape", "g_idx", "pre_quant_scale", "bias", "norm.weight", "fp8.weight")
"""Ends of the names of tensors without which a folder is whole, or another one."""


def read(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(folder)
    actual = {name: checkpoint.weight(name).dequantize() for name in checkpoint.modules}
    return actual | {name: checkpoint.dense(name) for name in checkpoint.tensors}


def refused(folder: Path, message: str) -> None:
    """One sentence that begins with the folder or a file in it."""
    with pytest.raises(FormatError, match=message) as caught:
        read(folder)
    text = str(caught.value)
    assert str(folder) in text and "\n" not in text, text


def test_another_kind_of_model(tmp_path: Path) -> None:
    """transformers' own words are a list of every language model."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    ViTForImageClassification(ViTConfig(**sizes, image_size=14, patch_size=14)).save_pretrained(tmp_path)
    refused(tmp_path, "it is a vit model, no causal language model; its own class quantizes it: from_pretrained")
    model = ViTForImageClassification.from_pretrained(tmp_path, quantization_config=W4GemmConfig())
    assert any(isinstance(module, W4Linear) for module in model.modules())


def shard(folder: Path) -> dict[str, str]:
    """Divide a folder's tensors between two files; return the index."""
    tensors, texts = load_file(folder / "model.safetensors"), metadata(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: t for name, t in tensors.items() if places[name] == file}, folder / file, texts)
    write_index(folder, places)
    return places


def write_index(folder: Path, places: Mapping[str, object]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


@every_folder
def test_shards(kind: str, tmp_path: Path) -> None:
    """In two files it is the same; then a shard is missing, cut short, of another length than it says, and both have
    one tensor; and an index names a file outside, too many tensors, and one in the other file, or is none."""
    folder = samples.FORMATS[kind](tmp_path)
    whole = read(folder)
    places = shard(folder)
    again = read(folder)
    assert again.keys() == whole.keys() and all(torch.equal(again[name], t) for name, t in whole.items())
    part = folder / "part-1.safetensors"
    data = part.read_bytes()
    part.unlink()
    refused(folder, r"holds no whole model: there is no part-1\.safetensors")
    for damaged in (data[:-1], data[: len(data) // 2], data[:4], b"", struct.pack("<Q", 2**60) + data[8:]):
        part.write_bytes(damaged)
        refused(folder, r"part-1\.safetensors is not a whole safetensors file")
    both = load_file(folder / "part-0.safetensors")
    name = min(both)
    part.write_bytes(data)
    save_file(load_file(part) | {name: both[name]}, part)
    refused(folder, f"tensor '{name}' is in part-1.safetensors and in another file")
    part.write_bytes(data)
    write_index(folder, places | {name: "part-1.safetensors"})
    refused(folder, f"says that '{name}' is in part-1.safetensors, which does not hold it")
    write_index(folder, places | {"another.weight": "part-1.safetensors"})
    refused(folder, "says that 'another.weight' is in part-1.safetensors, which does not hold it")
    for outside in ("../part-0.safetensors", 3):
        write_index(folder, places | {name: outside})
        refused(folder, "names files that are not in the folder")
    for text, error in (("{", "JSONDecodeError"), ("[" * 100_000, "RecursionError"), ("{}", "KeyError")):
        (folder / INDEX).write_text(text)
        refused(folder, f"is no index of tensors: {error}")


def test_what_an_earlier_save_left(tmp_path: Path) -> None:
    """transformers saves in one file beside the index of shards that it removes, and in shards beside a file, which it
    then reads: dense tensors of the one would stand beside packed ones of the other."""
    folder = samples.FORMATS["gptq"](tmp_path)
    whole, data = read(folder), (folder / "model.safetensors").read_bytes()
    shard(folder)
    (folder / "model.safetensors").write_bytes(data)
    refused(folder, r"holds model\.safetensors and shards of .*, two models of which one is left from an earlier save")
    for part in folder.glob("part-*"):
        part.unlink()
    again = read(folder)
    assert again.keys() == whole.keys() and all(torch.equal(again[name], t) for name, t in whole.items())
    write_index(folder, dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors"))
    assert read(folder).keys() == whole.keys()


@every_folder
@pytest.mark.parametrize("damage", ["gone", "shorter", "of another dtype"])
def test_each_tensor(kind: str, damage: str, tmp_path: Path) -> None:
    """Without a tensor, with a row less, and in float64, a folder is refused by the name of the module, or it holds the
    same numbers, since that tensor was not needed."""
    folder = samples.FORMATS[kind](tmp_path)
    whole, file = read(folder), folder / "model.safetensors"
    tensors, texts = load_file(file), metadata(file)
    for name, tensor in tensors.items():
        if name.endswith(NOT_NEEDED):
            continue
        others = {n: t for n, t in tensors.items() if n != name}
        if damage == "shorter":
            if tensor.dim() == 0 or len(tensor) < 2:
                continue
            others[name] = tensor[:-1].clone()
        elif damage == "of another dtype":
            others[name] = tensor.double()
        save_file(others, file, texts)
        owner = re.split(r"\.(experts|weight\b|\w+$)", name)[0]
        try:
            actual = read(folder)
        except FormatError as e:
            assert owner in str(e) and str(folder) in str(e) and "\n" not in str(e), (name, str(e))
        else:
            assert all(torch.equal(actual[n], t) for n, t in whole.items()), name


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed-tensors", "modelopt-integers"])
def test_a_bias_that_does_not_fit(kind: str, tmp_path: Path) -> None:
    """A conversion would write it, and a row of experts' biases would be put together of it."""
    folder = samples.FORMATS[kind](tmp_path)
    tensors = load_file(folder / "model.safetensors")
    integers = torch.zeros(32, dtype=torch.int32)
    for bias, came in ((torch.zeros(7), r"has shape \(7,\), wanted \(32,\)"), (integers, "is I32, wanted")):
        save_file(tensors | {"model.a.bias": bias}, folder / "model.safetensors")
        refused(folder, rf"model\.a: bias {came}")


def test_experts_that_are_there_twice(tmp_path: Path) -> None:
    """One by one, and all of a layer in one module, of which one would be lost."""
    folder = samples.FORMATS["gptq"](tmp_path)
    leaves = "qweight", "qzeros", "scales"
    whole = load_file(folder / "model.safetensors")
    tensors = {}
    for owner in ("experts.gate_up_proj", "experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj"):
        tensors |= {f"model.{owner}.{leaf}": whole[f"model.a.{leaf}"].clone() for leaf in leaves}
    save_file(tensors, folder / "model.safetensors")
    refused(folder, r"model\.experts\.gate_up_proj is there beside model\.experts\.0\.gate_proj and others")


def test_tensors_that_have_one_name_in_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    test_mixtures.write_gpt_oss(folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    save_file(tensors | {f"{name}.blocks": tensors[f"{name}_blocks"].clone()}, folder / "model.safetensors")
    refused(folder, rf"{name}.blocks' are both|'{name}_blocks' are both")


def configure(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    part = config.get("text_config", config)
    change(part["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


@every_folder
def test_configs(kind: str, tmp_path: Path) -> None:
    folder = samples.FORMATS[kind](tmp_path)
    whole = (folder / "config.json").read_text()
    configure(folder, lambda scheme: scheme.update(quant_method="crushed"))
    refused(
        folder, "is a model quantized by 'crushed', which cannot be loaded yet; what can be loaded: a GGUF file, .*"
    )
    for text in ("", "{", "[]", "3", '{"quantization_config": 3}', '{"quantization_config": []}', "[" * 10_000):
        (folder / "config.json").write_text(text)
        refused(folder, "config.json'")
    (folder / "config.json").unlink()
    refused(folder, "is a folder of tensors without config.json; what can be loaded")
    (folder / "config.json").write_text(whole)
    (folder / "model.safetensors").unlink()
    refused(folder, r"holds no whole model: there is no model\.safetensors$")
    (folder / "model-00002-of-00002.safetensors").touch()
    refused(
        folder, r"there is no model\.safetensors, nor model\.safetensors\.index\.json, which .* model-00002-of-00002"
    )
    (folder / "model.safetensors").mkdir()
    refused(folder, r"/model\.safetensors cannot be read: ")


GROUPED = ("gptq", "awq", "modelopt-integers", "modelopt-w4a8", "w4afp8", "compressed-tensors", "compressed-integers")


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("size", [64, 48, 17, 8, 0, -5, 2**40, "32", 1.5, [32]])
def test_groups_that_do_not_fit(kind: str, size: Any, tmp_path: Path) -> None:
    """K is 64 and the tensors have groups of 32: others straddle, or are none."""
    folder = samples.FORMATS[kind](tmp_path)

    def change(scheme: dict[str, Any]) -> None:
        part = scheme["config_groups"]["group_0"]["weights"] if "config_groups" in scheme else scheme
        part["group_size"] = size

    configure(folder, change)
    owner = "model.layers.0.mlp.experts.0.down_proj" if kind == "w4afp8" else "model.a"
    refused(folder, rf"{owner}: ")


BITS = {"gptq": "bits", "awq": "bits", "compressed-tensors": "num_bits", "compressed-integers": "num_bits"}


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("bits", [9, "four", None])
def test_bits(kind: str, bits: Any, tmp_path: Path) -> None:
    folder = samples.FORMATS[kind](tmp_path)

    def change(scheme: dict[str, Any]) -> None:
        part = scheme["config_groups"]["group_0"]["weights"] if "config_groups" in scheme else scheme
        part[BITS[kind]] = bits

    configure(folder, change)
    refused(folder, rf"model\.a: its weight has {bits!r} bits, wanted ")


MODELS: dict[str, Callable[[Path], Any]] = {
    **{
        kind: lambda folder, kind=kind: write_model(folder, *test_from_pretrained.FOLDERS[kind])
        for kind in ("gptq", "awq", "compressed-tensors", "bitsandbytes")
    },
    "modelopt": lambda folder: write_model(folder, test_modelopt.W4A8, test_modelopt.int4(w4a8=True)),
    "hqq": lambda folder: write_model(folder, test_hqq.CONFIG, test_hqq.writer()),
    "w4afp8": test_deepseek.write_w4afp8,
    "gpt-oss": test_mixtures.write_gpt_oss,
}


@pytest.fixture(scope="module", params=MODELS)
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    MODELS[request.param](folder)
    return folder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"intermediate_size": 128, "moe_intermediate_size": 128}, "its config wants"),
        ({"hidden_size": 128}, "its config wants"),
        ({"num_hidden_layers": 3}, r"no tensor for model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"no place for model\.layers\.1\."),
        ({"num_attention_heads": 8}, "its config wants"),
    ],
    ids=["intermediate", "hidden", "layer too many", "layer too few", "heads"],
)
def test_a_config_that_does_not_fit(model_folder: Path, settings: dict[str, Any], message: str) -> None:
    """A config of another model than the tensors: neither way of loading gives one that is half of it."""
    file = model_folder / "config.json"
    whole = file.read_text()
    config = json.loads(whole)
    lists = {"layer_types": ["full_attention"] * settings.get("num_hidden_layers", 2)}  # one entry a layer
    known = {key: value for key, value in (settings | lists).items() if key in config}
    file.write_text(json.dumps(config | known))
    try:
        for way in (load, by_transformers):
            with pytest.raises(FormatError, match=message):
                way(model_folder)
    finally:
        file.write_text(whole)


def by_transformers(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=W4GemmConfig(), dtype=torch.float32)
