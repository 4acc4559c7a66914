"""Folders that w4gemm writes: each packed module as its canonical tensors, in any :class:`WeightFormat`.

A module is ``codes``, ``scales``, and if there are any ``zeros``, ``channels``, ``factors`` and ``perm``, as
:meth:`w4gemm.QuantizedWeight.named_tensors` gives them, with the state that a :class:`w4gemm.W4Linear` keeps beside
them. config.json's quantization_config says which format a module has: ``modules`` by name, ``format`` for the others,
each with " fp8" behind it if x is quantized. ``modules`` has the names in the model. transformers
saves some models by other names (Mixtral); a module that is not named there then has the one of these formats that its
own state says. ``tied`` names embeddings without tensors, whose numbers are a head's, and their heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from w4gemm.checkpoints.base import Checkpoint, Module
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.numbers import Numbers, WeightNumbers
from w4gemm.checkpoints.quantization_configs import Named
from w4gemm.checkpoints.quantized_folder import BESIDE, Packing
from w4gemm.checkpoints.stored import NAMES, check_tensor
from w4gemm.packing.packed_shape import packed_shape
from w4gemm.weights.file import format_name, is_same_format, name_as_tensor, name_of_tensor, parse_format_name
from w4gemm.weights.weight import QuantizedWeight

METHOD = "w4gemm"
"""``quant_method`` of these folders."""
STATE = "_extra_state"
"""Last part of the name of the tensor with a layer's format and activations, see :mod:`w4gemm.weights.file`."""
ALARM = "weight"
"""Last part of the name of a tensor of one number beside the tensors of a linear layer; of experts that tensor has the
name of their dense parameter. It is not read. Without w4gemm, transformers would draw a weight at random, and refuses
one of another shape."""


def alarm() -> torch.Tensor:
    """Return a new tensor of name :data:`ALARM`."""
    return torch.zeros(1)


def alarm_name(name: str, experts: bool) -> str:
    """Return the name of the alarm of a module: that of its dense weight, in a model in which experts are packed
    (``gate_up``) or in a folder (``gate_up_proj``)."""
    return f"{name.removesuffix('_proj')}_proj" if experts else f"{name}.{ALARM}"


def _check_k(w: QuantizedWeight | Module, place: str = "") -> None:
    """Raise ValueError for a k that the shape of the codes does not tell, because they do not fill their last byte."""
    if w.k * w.format.bits % 8:
        multiple = 8 // math.gcd(8, w.format.bits)
        raise ValueError(
            f"{place}wanted a k of whole bytes, a multiple of {multiple} for {w.format.bits} bits, so that shapes tell "
            f"it, got {w.k}"
        )


def settings(weights: Iterable[tuple[str, QuantizedWeight | Module]]) -> dict[str, Any]:
    """Return the quantization_config of a model with these packed modules: the most common format, and the others'."""
    formats = {}
    for name, w in weights:
        _check_k(w, f"{name}: ")
        formats[name] = format_name(w.format, w.activations)
    counted = list(formats.values())
    common = max(dict.fromkeys(counted), key=counted.count, default=None)
    others = {name: format for name, format in formats.items() if format != common}
    return {"quant_method": METHOD, "format": common, "modules": others}


class OwnPacking(Packing):
    method = METHOD
    contents = "a folder with a model that w4gemm wrote"
    marks = ("codes", "scales", "zeros", "channels", "factors", "perm", STATE)
    others = (ALARM,)
    alarms = True

    def named(self) -> Iterable[Named]:
        """Return the modules that ``modules`` names, maybe in another place than in the folder."""

        def alike(name: str) -> Callable[[str], bool]:
            return lambda other: name.rpartition(".")[2] == other.rpartition(".")[2]

        return [Named("modules", name, alike(name)) for name in self.config.get("modules") or {}]

    @property
    def tied(self) -> Mapping[str, str]:
        tied = self.config.get("tied") or {}
        if not isinstance(tied, dict) or not all(isinstance(name, str) for pair in tied.items() for name in pair):
            raise ValueError(f"tied: wanted names of embeddings and of their heads, got {tied!r:.80}")
        return tied

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        others = self.config.get("modules") or {}
        text = others.get(name, self.config.get("format"))
        if name not in others and STATE in stored and (own := name_of_tensor(stored[STATE].read())) in others.values():
            text = own
        if not isinstance(text, str):
            raise ValueError(f"config.json names no format for it: {text!r}")
        format, activations = parse_format_name(text)
        experts = stored["codes"].shape[0] if "codes" in stored and len(stored["codes"].shape) == 3 else 0
        *_, n, row_bytes = check_tensor(stored, "codes", ("U8",), stored["codes"].shape if experts else None)
        k = stored["perm"].shape[-1] if "perm" in stored else 8 * row_bytes // format.bits
        packed = packed_shape(format, "canonical", n, k, experts)
        for leaf, (dtype, shape) in zip(format.part_names, packed.tensors, strict=True):
            check_tensor(stored, leaf, (NAMES[dtype],), shape)
        if ALARM in stored and stored[ALARM].shape != alarm().shape:
            raise ValueError("it has a dense weight beside its quantized one, wanted one of them")
        unknown = stored.keys() - {*format.part_names, "perm", *BESIDE, STATE, ALARM}
        if unknown:
            raise ValueError(f"{min(unknown)} is no tensor of {format}")
        scaled = "pre_quant_scale" in stored
        return Module(n, k, format, "bias" in stored, experts, activations=activations, pre_quant_scale=scaled)

    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        text = format_name(module.format, module.activations)
        if STATE in tensors and not is_same_format(stored := name_of_tensor(tensors[STATE]), text):
            raise ValueError(f"config.json says that it is {text}, {STATE} says {stored}")
        parts = tuple(tensors[name] for name in module.format.part_names)
        facts = tensors.get("perm"), module.experts, module.activations
        w = QuantizedWeight(module.format, module.n, module.k, "canonical", parts, *facts)
        w.check_range()
        return WeightNumbers(w)


class OwnWriter:
    """A :class:`w4gemm.checkpoints.writing.WeightWriter`: every format, bit for bit."""

    name = METHOD
    packs_embeddings = True
    marks = OwnPacking.marks

    def check(self, module: Module, act_order: bool) -> None:
        _check_k(module)

    def tensors(self, checkpoint: Checkpoint, name: str, w: QuantizedWeight) -> dict[str, torch.Tensor]:
        leaves = w.named_tensors() | {STATE: name_as_tensor(format_name(w.format, w.activations))}
        return {f"{name}.{leaf}": t for leaf, t in leaves.items()} | {alarm_name(name, w.experts > 0): alarm()}

    def config(self, checkpoint: Checkpoint) -> dict[str, Any]:
        tied = getattr(checkpoint, "tied", {})
        return settings(checkpoint.modules.items()) | ({"tied": dict(tied)} if tied else {})

    def named(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint
