"""Names and shapes of a folder's tensors in the model that transformers makes of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from w4gemm.checkpoints import Checkpoint
from w4gemm.checkpoints.quantized_folder import QuantizedFolder
from w4gemm.core.errors import FormatError
from w4gemm.integrations.transformers.places import Place, listed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Renaming:
    """Names in a model of the tensors in its folder, by transformers' own rules."""

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._prefix, self._known = model.base_model_prefix, model.state_dict()

    def __call__(self, name: str) -> str:
        return self._of(name)[0]

    def is_converted(self, name: str) -> bool:
        """True for a tensor of which, perhaps with others, transformers makes parameters by more than a new name."""
        return self._of(name)[1] is not None

    def _of(self, name: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        found: tuple[str, str | None] = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._known
        )
        return found


def of_modules(checkpoint: Checkpoint, renamed: Callable[[str], str]) -> Callable[[str], str]:
    """Return what gives the name in the model of a 4-bit module, by :class:`Renaming` of tensors."""

    def renamed_module(name: str) -> str:
        if checkpoint.modules[name].experts:  # a parameter of the model's
            return renamed(name)
        return renamed(f"{name}.weight").removesuffix(".weight")

    return renamed_module


def unneeded(model: PreTrainedModel) -> Callable[[str], bool]:
    """Return what is True for the name of a tensor or module in a folder that the model says it does without, such as
    layers that predict further tokens."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def check_files(checkpoint: Checkpoint, chosen: Sequence[str]) -> None:
    """Raise ValueError if transformers chose other files for the dense tensors than those that the packed ones are read
    from: those of a variant would make one model of two."""
    assert isinstance(checkpoint, QuantizedFolder)
    if other := sorted(set(chosen) ^ checkpoint.files):
        raise ValueError(
            f"variant, use_safetensors: wanted neither, because packed tensors of {checkpoint.path} are read from "
            f"{min(checkpoint.files)}; got files that differ by {listed(other)}; a variant in a folder of its own, "
            "under the usual names, can be loaded"
        )


def check_shapes(model: PreTrainedModel, checkpoint: Checkpoint, renamed: Renaming) -> None:
    """Raise FormatError for a dense tensor of another shape than its parameter, which transformers does not notice
    beside a quantizer."""
    known = model.state_dict()
    for name, shape in checkpoint.tensors.items():
        target = None if renamed.is_converted(name) else known.get(renamed(name))
        if target is not None and tuple(target.shape) != shape:
            raise FormatError(
                f"{checkpoint.path}: tensor {name!r} has shape {shape}, its config wants {tuple(target.shape)}"
            )


def check_whole(
    model: PreTrainedModel, checkpoint: Checkpoint, places: Mapping[str, Sequence[Place]], renamed: Renaming
) -> None:
    """Raise FormatError if layers that are in 4 bits elsewhere in the model have no tensor, which transformers would
    draw at random, or such modules and experts have no place in the model, which it would leave out."""
    placed = {_numbered(place.weight_name) for own in places.values() for place in own}
    without, called = unneeded(model), of_modules(checkpoint, renamed)
    for name in [name for name, own in places.items() if not own and not without(name)]:
        if checkpoint.modules[name].experts or _numbered(f"{called(name)}.weight") in placed:
            raise FormatError(f"{checkpoint.path}: no place for {name} in the model of its config")
    given = {renamed(name) for name in checkpoint.tensors}
    given |= {place.weight_name for own in places.values() for place in own if place.unpacked}
    missing = [name for name in model.state_dict() if _numbered(name) in placed and name not in given]
    if missing:
        raise FormatError(f"{checkpoint.path}: no tensor for {listed(missing)}")


def packed_names(checkpoint: Checkpoint, places: Mapping[str, Sequence[Place]], renamed: Renaming) -> set[str]:
    """Patterns for the names of the packed tensors that have a place, and of those that are left out, which
    transformers is to leave alone: as they are, and as it renames them."""
    assert isinstance(checkpoint, QuantizedFolder)
    names = set(checkpoint.left_out)
    for module, own in places.items():
        for name in checkpoint.stored_names(module) if own else ():
            names |= {name, *(f"{place.layer}.{name.rpartition('.')[2]}" for place in own)}
    return {f"{_numbered(name)}$" for name in names | {renamed(name) for name in names}}


def unpacked_names(places: Mapping[str, Sequence[Place]]) -> set[str]:
    """Patterns for the names of dense weights that are in 4 bits in the folder, so that transformers finds none."""
    return {f"^{re.escape(place.weight_name)}$" for own in places.values() for place in own if place.unpacked}


def dtype_of(model: PreTrainedModel, name: str, target: torch.Tensor) -> torch.dtype:
    """Dtype of a dense tensor: float32 where the model says that it needs it, such as a router's bias."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return torch.float32 if target.is_floating_point() and any(re.search(k, name) for k in kept) else target.dtype


def _numbered(name: str) -> str:
    """A pattern for a name, with any numbers in the place of its numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", r"\\d+", re.escape(name).replace("\\.", "."))
