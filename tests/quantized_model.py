"""Tiny models in the 4-bit formats of Hugging Face folders, packed here by the formats' definitions."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_tensors import words
from tiny_model import write_dense
from w4gemm import FormatError
from w4gemm.checkpoints import open_checkpoint
from w4gemm.integrations.transformers import dequantize_layers, load, summarize

VOCABULARY = 264
"""Tokens of the model: those of tiny_model, padded to a multiple of 8, so that lm_head can be quantized."""


@dataclass(frozen=True)
class Numbers:
    """Random numbers of a module: codes (n, k), scales and zeros (n, groups), and the group of each column."""

    codes: np.ndarray
    scales: torch.Tensor
    zeros: np.ndarray
    groups: np.ndarray

    @classmethod
    def random(
        cls,
        n: int,
        k: int,
        group_size: int,
        zeros: tuple[int, int] = (8, 8),
        act_order: bool = False,
        dtype: torch.dtype = torch.float16,
        bits: int = 4,
    ) -> Numbers:
        """``zeros`` is the range of the zero points, both ends included."""
        rng = np.random.default_rng(n + k)
        length = k if group_size == -1 else group_size
        groups = np.arange(k) // length
        shape = n, -(-k // length)
        scales = torch.from_numpy(rng.uniform(0.005, 0.02, shape)).to(dtype)
        z = rng.integers(zeros[0], zeros[1] + 1, shape)
        return cls(rng.integers(0, 2**bits, (n, k)), scales, z, rng.permutation(groups) if act_order else groups)

    @property
    def weight(self) -> torch.Tensor:
        """float32 (n, k): (u - z) * s."""
        difference = torch.from_numpy(self.codes - self.zeros[:, self.groups]).float()
        return difference * self.scales[:, self.groups].float()


def stream(numbers: np.ndarray, axis: int, bits: int = 4, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32: numbers of ``bits`` bits along ``axis`` one after the other, the first in the lowest bits of the first
    word. Of 4 bits, nibble i of a word is its number order[i]."""
    places = tuple(order.index(i) for i in range(8))
    return words(torch.from_numpy(numbers).movedim(axis, -1), places, bits).movedim(-1, axis).contiguous()


Writer = Callable[[str, int, int], tuple[Mapping[str, torch.Tensor], torch.Tensor]]
"""Given a module's name, n and k: its tensors by the last parts of their names, and its weight in float32."""


def convert(
    folder: Path, config: Mapping[str, Any], write: Writer, dense: tuple[str, ...] = ("lm_head",)
) -> dict[str, torch.Tensor]:
    """Give a dense folder of tiny_model random quantized weights, in place.

    Args:
        config: its quantization_config.
        dense: ends of the names of linear modules that stay as they are.

    Returns:
        The weights that its packed modules now have, by module.
    """
    tensors = load_file(folder / "model.safetensors")
    model = json.loads((folder / "config.json").read_text())
    model |= {"quantization_config": dict(config), "vocab_size": VOCABULARY}
    (folder / "config.json").write_text(json.dumps(model))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padding = torch.zeros(VOCABULARY - len(tensors[name]), tensors[name].shape[1])
        tensors[name] = torch.cat((tensors[name], padding))
    expected = {}
    for key in list(tensors):
        name = key.removesuffix(".weight")
        if tensors[key].dim() == 2 and "embed" not in key and not name.endswith(dense):
            n, k = tensors.pop(key).shape
            parts, expected[name] = write(name, n, k)
            tensors |= {f"{name}.{leaf}": tensor for leaf, tensor in parts.items()}
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return expected


def write_model(
    folder: Path,
    config: Mapping[str, Any],
    write: Writer,
    dense: tuple[str, ...] = ("lm_head",),
    architecture: str = "qwen2",
) -> dict[str, torch.Tensor]:
    """Write a tiny model to ``folder``; see :func:`convert`."""
    return convert(write_dense(folder, architecture), config, write, dense)


def change(folder: Path, tensors: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Let a function change the tensors of a folder, in place."""
    stored = load_file(folder / "model.safetensors")
    tensors(stored)
    save_file(stored, folder / "model.safetensors")


def refusals(folder: Path) -> Callable[[str, Callable[[dict[str, torch.Tensor]], Any]], None]:
    """Return a function that changes tensors of the folder as it is now, and wants loading to be refused with a
    message."""
    whole = (folder / "model.safetensors").read_bytes()

    def refused(message: str, changed: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        (folder / "model.safetensors").write_bytes(whole)
        change(folder, changed)
        with pytest.raises(FormatError, match=message):
            load(folder)

    return refused


def put(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Let another tensor stand for one of a folder, or none."""
    change(folder, lambda tensors: tensors.pop(name) if tensor is None else tensors.update({name: tensor}))


def configure(folder: Path, **settings: Any) -> None:
    """Change settings of a folder's quantization_config."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))


def assert_loads(folder: Path, expected: Mapping[str, torch.Tensor], formats: Mapping[str, int]) -> torch.nn.Module:
    """Load the folder; its weights must be ``wanted`` bit for bit, and its logits those of the same dense model.

    Returns:
        The model, before its quantized layers were made dense for comparing.
    """
    checkpoint = open_checkpoint(folder)
    assert checkpoint.modules.keys() == expected.keys()
    for name, weight in expected.items():
        with torch.device("meta"):  # where a tensor lands that is made without its device
            w = checkpoint.weight(name, "cpu")
        if torch.cuda.is_available():
            assert torch.equal(checkpoint.weight(name, "cuda").dequantize().cpu(), weight), name
        module = checkpoint.modules[name]
        assert (w.n, w.k, w.format, w.activations) == (module.n, module.k, module.format, module.activations)
        assert torch.equal(w.dequantize(), weight), name
    model, tokenizer = load(folder)
    assert summarize(model).formats == formats
    ids = tokenizer("hello there", return_tensors="pt").input_ids
    dense = dequantize_layers(copy.deepcopy(model), torch.float32)
    with torch.inference_mode():
        for name, weight in expected.items():
            assert torch.equal(dense.get_submodule(name).weight, weight), name
        torch.testing.assert_close(model(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-5)
        assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] > ids.shape[1]
    return model
