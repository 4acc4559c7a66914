"""A second checkpoint format, for tests: a folder with toy.json and toy.safetensors, which fuses projections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from w4gemm import FormatError, QuantizedWeight, WeightFormat, quantize
from w4gemm.checkpoints import CheckpointFormat, Module, Pretrained
from w4gemm.checkpoints.base import Pack
from w4gemm.checkpoints.numbers import Numbers, WeightNumbers

FORMAT_NAME = "int4_g32_zint"


class ToyCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        facts = json.loads((path / "toy.json").read_text())
        self.modules = {name: _module(fact) for name, fact in facts.items()}
        self._file: Any = safe_open(path / "toy.safetensors", "pt")
        shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118
        self.tensors = {name: s for name, s in shapes.items() if name.rpartition(".")[2] in ("weight", "bias")}
        self.read: list[str] = []
        """Names of the tensors that were asked for."""

    def stored_type(self, name: str) -> str:
        return self._file.get_slice(name).get_dtype()

    def weight(self, name: str, device: torch.device | str = "cpu", pack: Pack = Numbers.weight) -> QuantizedWeight:
        self.read.append(name)
        module = self.modules[name]
        parts = [self._file.get_tensor(f"{name}.{part}") for part in module.format.part_names]
        tensors = tuple(part.to(device) for part in parts)
        w = QuantizedWeight(module.format, module.n, module.k, "canonical", tensors)
        return pack(WeightNumbers(w), module.activations)

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if name not in self.tensors:
            raise FormatError(f"{self.path}: no tensor {name!r}")
        self.read.append(name)
        return self._file.get_tensor(name).to(dtype)

    def pretrained(self) -> Pretrained:
        return Pretrained(self.path)


def _module(fact: dict[str, Any]) -> Module:
    return Module(**(fact | {"format": WeightFormat.parse(fact["format"])}))


FORMAT = CheckpointFormat(
    "toy",
    "a folder with toy.json",
    lambda path: path if (path / "toy.json").is_file() else None,
    lambda path, format: ToyCheckpoint(path),
)


def convert(folder: Path) -> dict[str, torch.Tensor]:
    """Make a toy checkpoint of a folder with a dense Llama or Qwen2, in place.

    Returns:
        The numbers that its linear layers now stand for, by the model's names.
    """
    dense = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "toy"}}))
    facts: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}

    def add(name: str) -> None:
        w = quantize(dense.pop(f"{name}.weight"), FORMAT_NAME)
        expected[f"{name}.weight"] = w.dequantize()
        tensors.update({f"{name}.{part}": t for part, t in w.named_tensors().items()})
        if has_bias := f"{name}.bias" in dense:
            tensors[f"{name}.bias"] = dense.pop(f"{name}.bias")
        facts[name] = {"n": w.n, "k": w.k, "format": FORMAT_NAME, "bias": has_bias}

    for i in range(config["num_hidden_layers"]):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            add(f"model.layers.{i}.self_attn.{part}")
        for part in ("gate_proj", "up_proj", "down_proj"):
            add(f"model.layers.{i}.mlp.{part}")
    save_file(tensors | dense, folder / "toy.safetensors")
    (folder / "toy.json").write_text(json.dumps(facts))
    return expected
