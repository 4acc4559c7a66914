"""A checkpoint under the names of its model's published files: :class:`FileNames`.

transformers gives some modules other names than these files have, such as ``mlp.experts.gate_up_proj`` to what Mixtral
has as ``block_sparse_moe.experts.0.w1`` and ``w3``. It renames them when it loads and saves a model; other programs,
vLLM among them, know only the names in the files.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import nn

from w4gemm.checkpoints.base import Checkpoint, Module, Pack, Pretrained
from w4gemm.checkpoints.experts import GATE_UP
from w4gemm.checkpoints.hugging_face import outline
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.core.errors import FormatError
from w4gemm.weights.weight import QuantizedWeight

_EXPERT = re.compile(r"(?P<owner>.+)\.\d+\.(?P<role>\w+)\.weight")
"""Name in a file of the weight of a single expert's module."""


class FileNames:
    """A checkpoint whose modules and tensors have the names of its model's published files.

    Args:
        model: the checkpoint's model, without numbers; None to make it of the checkpoint's config.

    Attributes:
        source: the checkpoint, whose names may be those of the model in transformers.
        own: name in ``source`` of each module and tensor.
    """

    def __init__(self, source: Checkpoint, model: nn.Module | None = None) -> None:
        self.path, self.source = source.path, source
        model = _model(source) if model is None else model
        state = {} if model is None else model.state_dict()

        def in_files(name: str) -> list[str]:
            return _in_files(model, name, state[name]) if name in state else [name]

        self.own: dict[str, str] = {}
        self.modules: dict[str, Module] = {}
        self.tensors: dict[str, tuple[int, ...]] = {}
        for name, module in source.modules.items():
            if module.experts:
                file_name, module = _experts(name, module, in_files(name))
            else:
                file_name = _owner(name, in_files(f"{name}.weight"))
            self.own[file_name], self.modules[file_name] = name, module
        for name, shape in source.tensors.items():
            names = in_files(name)
            file_name = names[0] if len(names) == 1 else name
            self.own[file_name], self.tensors[file_name] = name, shape

    def stored_type(self, name: str) -> str:
        return self.source.stored_type(self.own.get(name, name))

    def weight(self, name: str, device: torch.device | str = "cpu", pack: Pack = Numbers.weight) -> QuantizedWeight:
        return self.source.weight(self.own.get(name, name), device, pack)

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.source.dense(self.own.get(name, name), dtype)

    def pretrained(self) -> Pretrained:
        return self.source.pretrained()


def _model(checkpoint: Checkpoint) -> nn.Module | None:
    """Return the checkpoint's model without numbers; None if transformers is not installed or makes none. None for a
    GGUF file, too, because its models have the same names everywhere."""
    folder, options, _ = checkpoint.pretrained()
    if options:
        return None
    try:
        return outline(folder)
    except (ImportError, FormatError):
        return None


def _in_files(model: nn.Module | None, name: str, parameter: torch.Tensor) -> list[str]:
    """Return the names that transformers saves a parameter under."""
    from transformers.core_model_loading import revert_weight_conversion

    return list(revert_weight_conversion(model, {name: parameter}))


def _owner(name: str, names: list[str]) -> str:
    """Return the name in the files of a linear module: ``name`` if its weight is no tensor of its own there."""
    return names[0].removesuffix(".weight") if len(names) == 1 and names[0].endswith(".weight") else name


def _experts(name: str, module: Module, names: list[str]) -> tuple[str, Module]:
    """Return the name and module of all experts of a layer, whose tensors have ``names`` in the files. If these are not
    names of single experts, both stay."""
    matches = [_EXPERT.fullmatch(each) for each in names]
    owner_roles = {(match["owner"], match["role"]) for match in matches if match is not None}
    owners, product = {owner for owner, _ in owner_roles}, name.rpartition(".")[2]
    if None in matches or len(owners) != 1:
        return name, module
    if product == GATE_UP:
        roles = tuple(dict.fromkeys(match["role"] for match in matches if match is not None))
        module = replace(module, fused=roles if len(roles) == 2 else module.fused)
    return f"{owners.pop()}.{product}", module
