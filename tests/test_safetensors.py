"""Dense models are read from safetensors one tensor at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuzz import samples
from w4gemm import FormatError, quantize
from w4gemm.checkpoints import dense, open_checkpoint


def test_a_dense_model_is_read_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from test_bad_folders import shard
    from tiny_model import write_dense

    tensors = load_file(write_dense(tmp_path) / "model.safetensors")
    shard(tmp_path)
    monkeypatch.setattr(dense, "dense_model", None)
    checkpoint = open_checkpoint(tmp_path, "int4_g32_zint")
    for name, module in checkpoint.modules.items():
        weight = tensors[f"{name}.weight"]
        assert (module.n, module.k) == tuple(weight.shape) and str(module.format) == "int4_g32_zint"
        assert torch.equal(checkpoint.weight(name).dequantize(), quantize(weight, module.format).dequantize())
    for name in checkpoint.tensors:
        assert torch.equal(checkpoint.dense(name), tensors[name]), name


def test_a_file_that_was_saved_anew_is_not_read_as_the_model_that_was_opened(tmp_path: Path) -> None:
    """Half of the weights would be one model's, half another's, in the same shapes."""
    folder = samples._gptq(tmp_path)
    checkpoint = open_checkpoint(folder)
    name = next(iter(checkpoint.modules))
    checkpoint.weight(name)
    file = folder / "model.safetensors"
    save_file({name: t.flip(0) for name, t in load_file(file).items()}, file)
    with pytest.raises(FormatError, match=r"model\.safetensors has changed since it was opened"):
        checkpoint.weight(name)
    open_checkpoint(folder).weight(name)


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
