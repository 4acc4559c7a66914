"""Folders of safetensors: whole, sharded, damaged; dense models are read from them one tensor at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from w4gemm import FormatError, quantize
from w4gemm.checkpoints import dense, open_checkpoint
from w4gemm.checkpoints.hugging_face import SafetensorsFolder

INDEX = "model.safetensors.index.json"


def shard(folder: Path, count: int) -> dict[str, torch.Tensor]:
    """Divide model.safetensors into ``count`` files and an index; return its tensors."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"part-{i % count}.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: t for name, t in tensors.items() if places[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return tensors


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    numbers = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(1)}
    save_file(numbers, tmp_path / "model.safetensors")
    shard(tmp_path, 2)
    return tmp_path


def test_shards(sharded: Path) -> None:
    actual = SafetensorsFolder(sharded)
    assert {name: (info.dtype, info.shape) for name, info in actual.tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (4,)),
        "c": ("F32", (1,)),
    }
    assert torch.equal(actual.tensor("a"), torch.arange(6.0).view(2, 3))
    with pytest.raises(FormatError, match="no tensor 'd' among its 3"):
        actual.tensor("d")


def test_damaged_folders(sharded: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(FormatError, match=message):
            SafetensorsFolder(sharded)

    whole = (sharded / "part-1.safetensors").read_bytes()
    index = json.loads((sharded / INDEX).read_text())
    (sharded / "part-1.safetensors").write_bytes(whole[:-1])
    refused(r"part-1\.safetensors is not a whole safetensors file")
    (sharded / "part-1.safetensors").unlink()
    refused(r"holds no whole model: there is no part-1\.safetensors")
    (sharded / "part-1.safetensors").write_bytes((sharded / "part-0.safetensors").read_bytes())
    refused("is in part-1.safetensors and in another file")
    (sharded / "part-1.safetensors").write_bytes(whole)

    for text, message in (
        ("{", "is no index of tensors: JSONDecodeError"),
        ("[" * 100_000, "is no index of tensors: RecursionError"),
        ("{}", "is no index of tensors: KeyError"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "names files that are not in the folder"),
        ('{"weight_map": {"a": 3}}', "names files that are not in the folder"),
        (json.dumps({"weight_map": index["weight_map"] | {"d": "part-1.safetensors"}}), "which does not hold it"),
        (json.dumps({"weight_map": index["weight_map"] | {"a": "part-1.safetensors"}}), "which does not hold it"),
    ):
        (sharded / INDEX).write_text(text)
        refused(message)


def test_a_dense_model_is_read_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from tiny_model import write_dense

    tensors = shard(write_dense(tmp_path), 3)
    monkeypatch.setattr(dense, "_read_by_transformers", None)
    checkpoint = open_checkpoint(tmp_path, "int4_g32_zint")
    for name, module in checkpoint.modules.items():
        weight = tensors[f"{name}.weight"]
        assert (module.n, module.k) == tuple(weight.shape) and str(module.format) == "int4_g32_zint"
        assert torch.equal(checkpoint.weight(name).dequantize(), quantize(weight, module.format).dequantize())
    for name in checkpoint.tensors:
        assert torch.equal(checkpoint.dense(name), tensors[name]), name


def test_tensors_of_older_names_are_read_by_transformers(tmp_path: Path) -> None:
    """A base model's file has no ``model.`` in its names."""
    pytest.importorskip("transformers")
    from tiny_model import write_dense

    file = write_dense(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    lm_head = {name: t for name, t in tensors.items() if name.startswith("lm_head")}
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, file, metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.tensors) >= lm_head.keys()
    for name, module in checkpoint.modules.items():
        expected = quantize(tensors[f"{name}.weight"], module.format).dequantize()
        assert torch.equal(checkpoint.weight(name).dequantize(), expected), name
