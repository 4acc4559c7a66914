"""The fuzzer of weight files: a slice of it, and that it finds what is wrong; what it found."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from fuzz import files, gguf_samples, samples
from tiny_model import write_dense
from w4gemm import FormatError
from w4gemm.checkpoints import open_checkpoint


def test_a_slice_with_a_new_seed(new_seed: int) -> None:
    assert files.main(["--cases", "1000", "--seed", str(new_seed)]) == 0


def other_numbers(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    yield "model.norm.weight", torch.zeros(samples.K)


def other_error(path: Path) -> Any:
    raise KeyError("config_groups")


@pytest.mark.parametrize(("reader", "said"), [(other_numbers, "other numbers"), (other_error, "KeyError")])
def test_a_wrong_reader_is_found(reader: Any, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right, actual = files.prepared(tmp_path), files.Findings()
    monkeypatch.setattr(files, "read", reader)
    for seed in range(20):
        files.one("awq", seed, tmp_path, right, actual)
    assert actual.wrong and all(said in text for text in actual.wrong)


@pytest.mark.parametrize(("damage", "wrong"), [("swap", False), ("flip", True)])
def test_a_swap_of_two_names_is_no_damage(
    damage: str, wrong: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file is whole: no reader can know which name was meant."""
    right, actual = files.prepared(tmp_path), files.Findings()
    a, f = (b"%s\x02\0\0\0" % name for name in (b"a", b"f"))  # a name, and that its tensor has two dimensions
    swapped = {a: f, f: a}
    monkeypatch.setattr(files, "DAMAGES", (damage,))
    monkeypatch.setattr(files, "damaged", lambda whole, *_: re.sub(b"[af]\x02\0{3}", lambda m: swapped[m[0]], whole))
    files.one("gguf", 0, tmp_path, right, actual)
    assert bool(actual.wrong) == wrong


def test_every_damage_changes_the_file() -> None:
    whole = json.dumps({"bits": 4, "group_size": 32, "quant_method": "gptq"}).encode() + bytes(64)
    for damage in set(files.DAMAGES):
        changed = [files.damaged(whole, len(whole) - 64, damage, files.random.Random(seed)) for seed in range(20)]
        assert sum(data != whole for data in changed) >= 15, damage


@pytest.mark.parametrize("name", [name for name in samples.FORMATS if name != "weight"])
def test_no_tensor_of_a_weight_lies_on_the_default_device(name: str, tmp_path: Path) -> None:
    """A weight is unpacked where it is to lie. A tensor that is made without its device would be on meta here."""
    checkpoint = open_checkpoint(samples.FORMATS[name](tmp_path))
    for module in checkpoint.modules:
        expected = checkpoint.weight(module)
        with torch.device("meta"):
            actual = checkpoint.weight(module, "cpu")
        assert torch.equal(actual.dequantize(), expected.dequantize())


def test_a_dense_folder_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    """transformers would draw it at random."""
    from safetensors.torch import load_file, save_file

    folder = write_dense(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    checkpoint = open_checkpoint(folder)
    with pytest.raises(FormatError, match=r"no tensor for model\.layers\.0\.mlp\.up_proj\.weight"):
        checkpoint.weight("model.layers.0.mlp.down_proj")


def test_a_config_without_groups_is_refused(tmp_path: Path) -> None:
    folder = samples.FORMATS["compressed-tensors"](tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["config_groups"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="quantization_config of config.json has no 'config_groups'"):
        open_checkpoint(folder)


def test_a_gguf_file_that_names_fewer_tensors_than_it_holds_is_refused(tmp_path: Path) -> None:
    """The numbers would be looked for where the header's other entries are."""
    path = samples.FORMATS["gguf"](tmp_path)
    whole = path.read_bytes()
    assert whole[8:16] == len(gguf_samples.TYPES).to_bytes(8, "little")
    path.write_bytes(whole[:8] + (2).to_bytes(8, "little") + whole[16:])
    with pytest.raises(FormatError, match="the header does not name all"):
        open_checkpoint(path)
