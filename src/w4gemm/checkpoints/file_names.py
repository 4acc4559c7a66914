"""A checkpoint under the names of its model's published files: :func:`in_files`.

transformers gives some modules other names than these files have, such as ``mlp.experts.gate_up_proj`` to what Mixtral
has as ``block_sparse_moe.experts.0.w1`` and ``w3``. It renames them when it loads and saves a model; other programs,
vLLM among them, know only the names in the files.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import nn

from w4gemm.checkpoints.base import Checkpoint, Module, Renamed
from w4gemm.checkpoints.experts import GATE_UP
from w4gemm.checkpoints.hugging_face import outline
from w4gemm.core.errors import FormatError

_EXPERT = re.compile(r"(?P<owner>.+)\.\d+\.(?P<role>\w+)\.weight")
"""Name in a file of the weight of a single expert's module."""


def in_files(source: Checkpoint, model: nn.Module | None = None) -> Renamed:
    """Return a checkpoint whose modules and tensors have the names of its model's published files.

    Args:
        source: the checkpoint, whose names may be those of the model in transformers.
        model: the checkpoint's model, without numbers; None to make it of the checkpoint's config.
    """
    model = _model(source) if model is None else model
    state = {} if model is None else model.state_dict()

    def saved_as(name: str) -> list[str]:
        return _saved_as(model, name, state[name]) if name in state else [name]

    own: dict[str, str] = {}
    modules: dict[str, Module] = {}
    for name, module in source.modules.items():
        if module.experts:
            file_name, module = _experts(name, module, saved_as(name))
        else:
            names = saved_as(f"{name}.weight")  # else its weight is no tensor of its own in the files
            own_tensor = len(names) == 1 and names[0].endswith(".weight")
            file_name = names[0].removesuffix(".weight") if own_tensor else name
        own[file_name], modules[file_name] = name, module
    for name in source.tensors:
        names = saved_as(name)
        own[names[0] if len(names) == 1 else name] = name
    return Renamed(source, own, modules)


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


def _saved_as(model: nn.Module | None, name: str, parameter: torch.Tensor) -> list[str]:
    """Return the names that transformers saves a parameter under."""
    from transformers.core_model_loading import revert_weight_conversion

    return list(revert_weight_conversion(model, {name: parameter}))


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
