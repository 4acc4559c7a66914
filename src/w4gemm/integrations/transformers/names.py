"""Names and shapes of a folder's tensors in the model that transformers makes of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from w4gemm.checkpoints import Checkpoint
from w4gemm.checkpoints.quantized_folder import QuantizedFolder
from w4gemm.core.errors import FormatError
from w4gemm.integrations.transformers.places import Place

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def renaming(model: PreTrainedModel) -> Callable[[str], str]:
    """Return what gives the name in the model of a tensor in its folder, by transformers' own rules."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules, known = get_model_conversion_mapping(model), model.state_dict()
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def renamed(name: str) -> str:
        return rename_source_key(name, renamings, converters, model.base_model_prefix, known)[0]

    return renamed


def of_modules(checkpoint: Checkpoint, renamed: Callable[[str], str]) -> Callable[[str], str]:
    """Return what gives the name in the model of a 4-bit module, by :func:`renaming`'s of tensors."""

    def renamed_module(name: str) -> str:
        if checkpoint.modules[name].experts:  # a parameter of the model's
            return renamed(name)
        return renamed(f"{name}.weight").removesuffix(".weight")

    return renamed_module


def check_shapes(model: PreTrainedModel, checkpoint: Checkpoint, renamed: Callable[[str], str]) -> None:
    """Raise FormatError for a dense tensor of another shape than its parameter, which transformers does not notice
    beside a quantizer."""
    known = model.state_dict()
    for name, shape in checkpoint.tensors.items():
        target = known.get(renamed(name))
        if target is not None and tuple(target.shape) != shape:
            raise FormatError(
                f"{checkpoint.path}: tensor {name!r} has shape {shape}, its config wants {tuple(target.shape)}"
            )


def packed_names(checkpoint: Checkpoint, places: Mapping[str, Sequence[Place]]) -> set[str]:
    """Patterns for the names of the packed tensors that have a place, which transformers is to leave alone."""
    assert isinstance(checkpoint, QuantizedFolder)
    found = set()
    for module, own in places.items():
        for name in checkpoint.stored_names(module) if own else ():
            owner, _, leaf = name.rpartition(".")
            for layer in (owner, *(place.layer for place in own)):
                found.add(re.sub(r"(?<=\.)\d+(?=\.)", r"\\d+", re.escape(layer).replace("\\.", ".")) + f".{leaf}$")
    return found
