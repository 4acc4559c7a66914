"""``save_pretrained`` of a model with quantized layers: it writes compressed-tensors if that holds every bit, else
w4gemm's own format, as for every model with quantized experts, because transformers renames what it splits."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from w4gemm.api.nn import W4Linear
from w4gemm.api.packed_module import PackedModule
from w4gemm.checkpoints.base import Module, Pack, Pretrained
from w4gemm.checkpoints.compressed_tensors_writer import CompressedTensorsWriter, in_files, transformers_refusal
from w4gemm.checkpoints.numbers import Numbers, WeightNumbers
from w4gemm.checkpoints.w4gemm import OwnPacking
from w4gemm.checkpoints.writing import refusal
from w4gemm.weights.weight import QuantizedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("w4gemm")


class _LoadedModel:
    """A model without quantized experts as a :class:`w4gemm.checkpoints.Checkpoint`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.path = Path(model.name_or_path)
        self._layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, W4Linear)}
        self.modules = {name: _module(layer) for name, layer in self._layers.items()}
        state = model.state_dict()
        packed = {f"{name}.{leaf}" for name in self.modules for leaf in OwnPacking.marks}
        self.state = {name: t for name, t in state.items() if name not in packed}
        self.tensors = {name: tuple(t.shape) for name, t in self.state.items()}

    def stored_type(self, name: str) -> str:
        return ""

    def weight(self, name: str, device: torch.device | str = "cpu", pack: Pack = Numbers.weight) -> QuantizedWeight:
        w = self._layers[name].weight
        return pack(WeightNumbers(w.repack("canonical")), w.activations)

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.state[name].to(dtype)

    def pretrained(self) -> Pretrained:
        return Pretrained(self.path)


def _module(layer: W4Linear) -> Module:
    w, scaled = layer.weight, layer.pre_quant_scale is not None
    return Module(w.n, w.k, w.format, layer.bias is not None, activations=w.activations, pre_quant_scale=scaled)


def compressed_tensors(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """Return a model's state dict and quantization_config as compressed-tensors has them; None if that does not hold
    every bit, of which the log then has the reason."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, PackedModule)]
    if not layers:
        return None
    why = next((f"{name}: it has experts" for name, layer in layers if not isinstance(layer, W4Linear)), "")
    why = why or next((f"{name}: an adapter is beside it" for name, _ in layers if ".base_layer" in name), "")
    why = why or next((f"{name}: it is in act-order" for name, layer in layers if layer.weight.perm is not None), "")
    writer, checkpoint = CompressedTensorsWriter(), _LoadedModel(model)
    if why := why or refusal(checkpoint, writer).partition("; --to")[0]:
        _log.warning("save_pretrained writes w4gemm's own format, which w4gemm alone reads: %s", why)
        return None
    unread = transformers_refusal(checkpoint)
    readers = f"engines read too; transformers reads it with w4gemm alone: without, {unread}"
    _log.info(
        "save_pretrained writes compressed-tensors, which %s",
        readers if unread else "transformers and engines read too",
    )
    state = dict(checkpoint.state)
    for name in checkpoint.modules:
        state |= writer.tensors(checkpoint, name, checkpoint.weight(name))
    return state, writer.config(in_files(checkpoint, _outline(model)))


def _outline(model: PreTrainedModel) -> PreTrainedModel:
    """Return a dense model of the same config, without numbers: of the names that its parameters have."""
    config = copy.deepcopy(model.config)
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        return type(model)(config)
