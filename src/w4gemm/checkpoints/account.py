"""Which tensor of a folder goes into which parameter of a model of transformers: :class:`Account`.

Each tensor goes into one place, or is left out for a reason. Each parameter and persistent buffer is filled, or may be
missing for a reason. Anything else is a FormatError that names the tensor, raised from headers alone. transformers
itself would leave the tensor out and draw the parameter at random.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from w4gemm.checkpoints.hugging_face import AS_IT_IS
from w4gemm.checkpoints.stored import reason_to_skip
from w4gemm.core.errors import FormatError
from w4gemm.core.words import listed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_INTEGERS = ("BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")
"""safetensors' names of the dtypes that hold no weights, but codes."""
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""The number of a layer in a tensor's name."""
_AHEAD = re.compile(r"(?:^|\.)mtp\w*\.")
_AHEAD_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers")
"""Names in configs of the number of layers that predict further tokens."""


class Stored(NamedTuple):
    """A tensor of a folder, as far as headers tell."""

    shape: tuple[int, ...]
    dtype: str = ""
    """safetensors' name of its dtype; "" or another format's name if it holds floating-point numbers."""
    target: str = ""
    """The parameter that it is; "" if transformers' rules say so."""
    owner: str = ""
    """Name to call it by in messages, if it is made of a module; "" for its own."""


@dataclass(frozen=True)
class Recipe:
    """What is made of some tensors: one parameter by a new name, or some by one of transformers' converters."""

    sources: Mapping[str, list[str]]
    """Names of the tensors, by the converter's patterns."""
    targets: tuple[str, ...]
    """Names of the parameters. The first is that by which transformers knows the others."""
    converter: Any = None
    """transformers' WeightConverter; None for a tensor that is a parameter as it is."""

    @property
    def names(self) -> list[str]:
        return [name for group in self.sources.values() for name in group]

    def values(self, model: PreTrainedModel, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters by name; ``read`` gives the tensor of a name."""
        if self.converter is None:
            return {self.targets[0]: read(self.names[0])}
        converter = copy.deepcopy(self.converter)
        for pattern, group in self.sources.items():
            converter.collected_tensors[pattern] = [read(name) for name in group]
        made = converter.convert(self.targets[0], model=model, config=model.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}


class Naming:
    """Names in a model of the tensors in its folder, by transformers' own rules.

    Args:
        rules: the rules; None for those that transformers has for the model.

    Attributes:
        known: shape and kind of the model's parameters and persistent buffers, as tensors on the meta device.
    """

    def __init__(self, model: PreTrainedModel, rules: Sequence[Any] | None = None) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        # copies, because a rule keeps what it was used for
        rules = get_model_conversion_mapping(model) if rules is None else copy.deepcopy(rules)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._of_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._prefix, self.known = model.base_model_prefix, dict(model.state_dict())
        self._unused = model._keys_to_ignore_on_load_unexpected or ()
        text = model.config.get_text_config()
        counts = [getattr(text, key, None) for key in ("num_hidden_layers", *_AHEAD_COUNTS)]
        self._layers, *ahead = (count if isinstance(count, int) else 0 for count in counts)
        self._layers_ahead = max(ahead)

    def __call__(self, name: str) -> str:
        return self.of(name)[0]

    def of(self, name: str) -> tuple[str, str | None]:
        """Return the name in the model, and the pattern of the converter that makes the parameter, if one does."""
        from transformers.core_model_loading import rename_source_key

        renamed: tuple[str, str | None] = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self.known
        )
        if renamed[0] not in self.known and name in self.known:
            return name, None
        return renamed

    def is_unused(self, name: str) -> bool:
        """True for a tensor that the model's code says it does without."""
        # a pattern with a number means a layer behind the last one of the published model, maybe one of this model's
        layer = LAYER.search(name)
        inside = layer is not None and int(layer[1]) < self._layers
        fitting = [p for p in self._unused if not inside or not re.search(r"layers\W+\d", p)]
        return _matches(fitting, name) or _matches(fitting, self(name))

    def reason(self, name: str, ordinary: Collection[str] = ()) -> str:
        """Why a tensor may be left out, whatever the class of the model; "" if there is no reason.

        Args:
            ordinary: numbers of the folder's layers that predict the next token.
        """
        layer = LAYER.search(name)
        ahead = layer is not None and self._layers <= int(layer[1]) < self._layers + self._layers_ahead
        ahead = ahead and layer is not None and layer[1] not in ordinary
        if self._layers_ahead and (ahead or _AHEAD.search(name)):
            return "predicts further tokens, which generate does not use"
        if name.endswith("position_ids"):
            return "the model computes it from its config"
        return reason_to_skip(name) or ("not used by the model's code" if self.is_unused(name) else "")

    def recipes(self, stored: Mapping[str, Stored]) -> tuple[list[Recipe], list[str]]:
        """Return what transformers makes of tensors, and the names of those that it has no place for."""
        from transformers.core_model_loading import dot_natural_key

        groups: dict[str, dict[str, list[str]]] = {}
        converted: set[str] = set()
        strangers = []
        for name in sorted(stored, key=dot_natural_key):
            target, pattern = (stored[name].target, None) if stored[name].target else self.of(name)
            if target not in self.known:
                strangers.append(name)
                continue
            groups.setdefault(target, {}).setdefault(pattern or "", []).append(name)
            if pattern is not None:
                converted.add(target)
        made = []
        for target, sources in groups.items():
            converter = self._of_pattern[next(filter(None, sources))] if target in converted else None
            made.append(Recipe(sources, (target,), converter))
        return made, strangers


@dataclass
class Account:
    """Where the tensors of a folder go in a model.

    Args:
        stored: the tensors by name, without those of modules that stay packed.
        packed: names of the model's parameters that these modules fill.
        folder_model: makes the model of the class that config.json names, if it is another one than the model's:
            a head that only one of them has may be missing, or left out.
        strangers_refused: False to say nothing of tensors without a place.

    Raises:
        FormatError: if a tensor has no place, a parameter has no tensor, or their shapes or dtypes differ.
    """

    path: Path
    model: PreTrainedModel
    naming: Naming
    stored: Mapping[str, Stored]
    packed: Collection[str] = ()
    strangers: Mapping[str, str] = field(default_factory=dict)
    """Packed modules without a place: words for them by name."""
    folder_model: Callable[[], PreTrainedModel | None] = lambda: None
    strangers_refused: bool = True
    recipes: list[Recipe] = field(init=False)
    filled: set[str] = field(init=False)
    left_out: dict[str, str] = field(init=False)
    """Why a tensor has no place, by its name."""
    new: set[str] = field(init=False)
    """Parameters that the folder's class does not have: heads, which transformers draws at random."""

    def __post_init__(self) -> None:
        recipes, strangers = self.naming.recipes(self.stored)
        self.recipes = [self._checked(recipe) for recipe in recipes]
        filled = [*self.packed, *(target for recipe in self.recipes for target in recipe.targets)]
        self.filled = set(filled)
        if len(self.filled) < len(filled):
            twice = next(name for name in filled if filled.count(name) > 1)
            raise FormatError(f"{self.path}: {twice} is there twice, under different names")
        missing = [name for name in self.naming.known if self.filled.isdisjoint(self.tied_to(name))]
        missing = [name for name in missing if not _matches(self.model._keys_to_ignore_on_load_missing, name)]
        self.left_out = {}
        # a config may count a layer less: one that predicts further tokens joins a state and an embedding first
        norms, joins = (_layers_with(leaf, (*self.stored, *self.strangers)) for leaf in ("input_layernorm", "eh_proj"))
        ordinary = norms - joins
        heads = _Heads(self.model, self.folder_model) if missing or strangers else None
        self.new = {name for name in missing if heads is not None and heads.is_new(name)}
        for name in (*strangers, *self.strangers):
            if reason := self.naming.reason(name, ordinary) or (heads.reason(name) if heads is not None else ""):
                self.left_out[name] = reason
        without = [name for name in (*strangers, *self.strangers) if name not in self.left_out]
        self._refuse([name for name in missing if name not in self.new], without if self.strangers_refused else [])

    def _refuse(self, missing: list[str], strangers: list[str]) -> None:
        reasons = [f"no tensor for {listed(sorted(missing))}"] if missing else []
        words = dict.fromkeys(self.strangers.get(name) or self.stored[name].owner or name for name in strangers)
        reasons += [f"no place for {listed(words)} in the model of its config"] if words else []
        if reasons:
            raise FormatError(f"{self.path}: {'; '.join(reasons)}")

    def _checked(self, recipe: Recipe) -> Recipe:
        """Return the recipe with all of its targets, which a converter is asked for without numbers."""
        self._check_sources(recipe)
        with torch.device("meta"):
            try:
                made = recipe.values(self.model, lambda name: torch.empty(self.stored[name].shape))
            except Exception as e:  # whatever an operation of transformers raises for tensors that do not fit
                reason = f"{type(e).__name__}: {' '.join(str(e).split()):.200}"
                message = f"transformers makes no {recipe.targets[0]} of {listed(recipe.names)}: {reason}"
                raise FormatError(f"{self.path}: {message}") from e
        for target, tensor in made.items():
            if target not in self.naming.known:
                raise FormatError(f"{self.path}: no place for {target}, made of {listed(recipe.names)}, in the model")
            expected, shape = tuple(self.naming.known[target].shape), tuple(tensor.shape)
            if shape != expected:
                what = f"tensor {recipe.names[0]!r} has shape {shape}"
                if recipe.converter is not None:
                    what = f"{target}, made of {listed(recipe.names)}, has shape {shape}"
                raise FormatError(f"{self.path}: {what}, its config wants {expected}")
        return Recipe(recipe.sources, tuple(made), recipe.converter)

    def _check_sources(self, recipe: Recipe) -> None:
        names, target = recipe.names, recipe.targets[0]
        if "" in recipe.sources and len(names) > 1:
            raise FormatError(f"{self.path}: {listed(names)} are all {target!r}, wanted one of them")
        floats = self.naming.known[target].is_floating_point()
        for name in names:
            dtype = self.stored[name].dtype
            if dtype and (dtype in _INTEGERS) == floats:
                kind = "floating-point numbers" if floats else "integers"
                raise FormatError(f"{self.path}: tensor {name!r} is {dtype}, wanted {kind} for {target}")
        for pattern, group in recipe.sources.items():
            if "*" in pattern and (wrong := _out_of_turn(group)):
                raise FormatError(
                    f"{self.path}: {target} is made of {listed(group)}: wanted one for each expert, {wrong}"
                )

    @property
    def missing(self) -> set[str]:
        """Parameters without a tensor: tied to others, new, or of no use."""
        return self.naming.known.keys() - self.filled

    def tied_to(self, name: str) -> set[str]:
        """Names of the parameters that have the numbers of this one."""
        group, pairs = {name}, self.model.all_tied_weights_keys
        for _ in range(2):  # all targets of a source
            group |= {n for pair in pairs.items() if not group.isdisjoint(pair) for n in pair}
        return group


class _Heads:
    """The parts that only one of two models has: the model to fill, and the model of the folder's class."""

    def __init__(self, model: PreTrainedModel, folder_model: Callable[[], PreTrainedModel | None]) -> None:
        self._theirs = folder_model()
        if self._theirs is None or type(self._theirs) is type(model):
            self._theirs = None
            return
        self._model, self._naming = model, Naming(self._theirs)
        self._own = {_inner(model, name) for name in model.state_dict()}
        parts = (_inner(self._theirs, name).split(".") for name in self._naming.known)
        self._ends = {".".join(part[i:]) for part in parts for i in range(len(part))}

    def is_new(self, name: str) -> bool:
        return self._theirs is not None and _inner(self._model, name) not in self._ends

    def reason(self, name: str) -> str:
        if self._theirs is None:
            return ""
        for target in map(self._naming, (name, f"{name}.weight")):
            if target in self._naming.known and _inner(self._theirs, target) not in self._own:
                return f"a part of {type(self._theirs).__name__}"
        return ""


def folder_model(folder: Path) -> PreTrainedModel | None:
    """Return the model of the class that a folder's config.json names, without numbers; None if transformers has no
    such class."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, **AS_IT_IS)
        with torch.device("meta"):
            model: PreTrainedModel = getattr(transformers, config.architectures[0])(config)
    except Exception:  # whatever a config raises that is not made for the class
        return None
    return model


def _inner(model: PreTrainedModel, name: str) -> str:
    """A parameter's name inside the model without its heads, and inside the language model of a larger one."""
    if hasattr(model, model.base_model_prefix):
        name = name.removeprefix(f"{model.base_model_prefix}.")
    return name.removeprefix("language_model.")


def _out_of_turn(names: list[str]) -> str:
    """Return what is wrong with the numbers of the experts in names that are sorted by them; "" if nothing is."""
    columns = list(zip(*(name.split(".") for name in names), strict=False))
    numbers = [column for column in columns if len({*column}) > 1]
    if len({name.count(".") for name in names}) > 1 or len(numbers) > 1:
        return "whose names differ by nothing else"
    if numbers and (gap := next((i for i, number in enumerate(numbers[0]) if number != str(i)), None)) is not None:
        return f"but there is none for expert {gap}"
    return ""


def _layers_with(leaf: str, names: Collection[str]) -> set[str]:
    """Numbers of the layers that have a module of this name."""
    return {match[1] for name in names if leaf in name and (match := LAYER.search(name))}


def _matches(patterns: Collection[str] | None, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())
