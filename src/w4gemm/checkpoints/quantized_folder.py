"""Hugging Face folders whose packed modules are several tensors each: what GPTQ, AWQ and the other methods share.

:class:`QuantizedFolder` finds the modules. What their tensors mean is a :class:`Packing`, one for each method, and
:func:`folder_format` makes a format of it. tests/test_quantized_folder.py has a short one.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from w4gemm.checkpoints.base import CheckpointFormat, Module, Pack, Pretrained
from w4gemm.checkpoints.experts import DOWN, GATE_UP, Stack, stacks
from w4gemm.checkpoints.fp8_folder import Fp8Folder, settings_of
from w4gemm.checkpoints.hugging_face import TensorInfo, quantization_config
from w4gemm.checkpoints.numbers import Numbers, gates_before_ups
from w4gemm.checkpoints.quantization_configs import Named, check_plain_products, method_of, warn_of_missing
from w4gemm.checkpoints.stored import FP8, check_finite, check_tensor, is_packed, missing, reason_to_skip
from w4gemm.core.errors import FormatError, require_among
from w4gemm.core.formats import WeightFormat
from w4gemm.weights.checks import sorting_perm
from w4gemm.weights.weight import QuantizedWeight

_FLOATS = ("F16", "BF16", "F32", "F64")
"""safetensors' names of the dtypes of the dense tensors of a packed module."""
BESIDE = ("bias", "pre_quant_scale")
"""Last parts of the names of a module's dense tensors, which are the checkpoint's, too."""


class Packing(ABC):
    """The meaning of a quantized module's tensors, by the quantization_config of their folder.

    All raise ValueError for what they refuse; the caller adds folder and name. A KeyError of ``config`` or ``stored``
    is refused as a setting, or a tensor, that is not there.

    Attributes:
        config: the quantization_config.
    """

    method: ClassVar[str]
    """``quant_method`` of the folders."""
    contents: ClassVar[str]
    """See :class:`CheckpointFormat`."""
    marks: ClassVar[tuple[str, ...]]
    """Last parts of names: a module with any of these tensors is a quantized one. So no dense module has them, and
    ``weight`` cannot be one."""
    others: ClassVar[tuple[str, ...]] = ()
    """Last parts of the names of a quantized module's other tensors, without those of :data:`BESIDE`."""
    alarms: ClassVar[bool] = False
    """True if a tensor of one number may have the name of a module of experts, or of its parameter. A dense tensor that
    the packing does not know is refused when the model is loaded or written."""
    named_as_module: ClassVar[bool] = False
    """True if the ``weight`` of experts in one tensor has their module's name, as the model's parameter has."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        check_plain_products(config)
        self.config = config

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Packing:
        """Return the packing of a folder."""
        return cls(config)

    @property
    def tied(self) -> Mapping[str, str]:
        """Names of embeddings that have no tensors of their own, and of the packed modules that hold their numbers."""
        return {}

    @staticmethod
    def renamed(name: str) -> str:
        """Return ``module.part`` for the name of a tensor in a folder."""
        return name

    def named(self) -> Iterable[Named]:
        """Return the packed modules that ``config`` names."""
        return ()

    @abstractmethod
    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        """Return what headers say of a module: ``stored`` holds its tensors by the last parts of their names."""

    @abstractmethod
    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        """Return the numbers of what :meth:`module` returned."""


class QuantizedFolder:
    """A folder with a quantized model as a :class:`w4gemm.checkpoints.base.Checkpoint`.

    Args:
        stored: the folder's tensors.

    Attributes:
        left_out: why a stored tensor is neither part of a module nor among ``tensors``, by its name in the folder. Each
            stored tensor is one of the three.

    Raises:
        FormatError: if a file is missing or cut short, or a module lacks a tensor of its packing, or has a dense weight
            as well; if a tensor of codes or in fp8 is none of a module and has no scale.
    """

    def __init__(self, stored: Fp8Folder, packing: Packing) -> None:
        self.path, self._stored, self._packing = stored.path, stored, packing
        scaled = self._stored.scales.items()
        self.left_out = {scale.name: f"the scale of {weight}, which is read with it" for weight, scale in scaled}
        self._files: dict[str, str] = {}
        self._parts: dict[str, dict[str, TensorInfo]] = {}
        self._fp8: dict[str, WeightFormat] = {}
        self.tensors: dict[str, tuple[int, ...]] = {}
        self._sort()
        whole = {name: m for name, m in self._stored.experts().items() if self._files.get(name) == name}
        if not self._parts and not whole:
            held = "all its weights are dense"
            if self._stored.scales:
                sizes = " and ".join(sorted({str(stored.block(name)) for name in stored.scales}))
                held = f"all its quantized weights are in fp8 with blocks of {sizes}, which no format has"
            raise FormatError(
                f"{self.path}: {held}, wanted some of them quantized, with {' or '.join(packing.marks)}, as its "
                "quantization_config says; a dense model has no quantization_config in config.json"
            )
        self._own = {name: self._module(name, parts) for name, parts in sorted(self._parts.items())}
        self._stacks = self._stacked()
        shared = {name: m for name, m in self._own.items() if m.shared}  # experts in one tensor, as the model has them
        self.tensors |= {name: (m.experts, m.n, m.k) for name, m in shared.items()}
        self.modules = {name: m for name, m in self._own.items() if name not in shared or self._packs(name)} | whole
        for name, stack in self._stacks.items():
            for source in (source for expert in stack.sources for source in expert):
                del self.modules[source]
                for leaf in BESIDE:
                    self.tensors.pop(f"{source}.{leaf}", None)
            self.modules[name] = stack.module
            if stack.module.bias:
                self.tensors[f"{name}.bias"] = stack.module.experts, stack.module.n
            if stack.module.pre_quant_scale:
                self.tensors[f"{name}.pre_quant_scale"] = (stack.module.k,)
        self.tied = self._tied()

    def _tied(self) -> dict[str, str]:
        """Add the embeddings without tensors to the dense tensors, and return their modules' names."""
        try:
            tied = dict(self._packing.tied)
        except ValueError as e:
            raise FormatError(f"{self.path}: {e}") from e
        for name, head in tied.items():
            module = self.modules.get(head)
            if module is None or module.experts or name in self.own_names or f"{name}.weight" in self.tensors:
                raise FormatError(
                    f"{self.path}: tied: wanted an embedding without tensors of a packed head, got {name}"
                )
            self.tensors[f"{name}.weight"] = module.n, module.k
        return tied

    @property
    def embeddings(self) -> dict[str, Module]:
        """Those of ``tensors`` that :meth:`weight` gives as packed embeddings too, by the names of their modules."""
        return {name: self.modules[head] for name, head in self.tied.items()}

    def _sort(self) -> None:
        """Put each stored tensor into ``_parts``, ``tensors`` or ``left_out``; those of :data:`BESIDE` are parts and
        tensors."""
        names = {stored: _Name.of(self._packing.renamed(stored)) for stored in self._stored.tensors}
        marks, known = self._packing.marks, {*self._packing.marks, *self._packing.others}
        self._parts |= {name.owner: {} for name in names.values() if name.leaf in marks}
        if self._packing.named_as_module:
            names |= {stored: _Name(str(n), "weight") for stored, n in names.items() if str(n) in self._parts}
        infos = self._stored.tensors
        biases = {name.owner: infos[stored].shape for stored, name in names.items() if name.leaf == "bias"}
        for stored, name in names.items():
            if name.leaf != "weight" or name.owner in self._parts or (format := self._stored.format(stored)) is None:
                continue
            rows = infos[stored].shape[:1]
            if biases.get(name.owner, rows) == rows:  # GPT-2's weights are (k, n)
                self._fp8[name.owner] = format
        self._parts |= {owner: {} for owner in self._fp8}
        for stored, name in names.items():
            if (other := self._files.setdefault(str(name), stored)) != stored:
                raise FormatError(f"{self.path}: {other!r} and {stored!r} are both {str(name)!r}, wanted one of them")
            info, parts = self._stored.tensors[stored], self._parts.get(name.owner)
            own = ("weight",) if name.owner in self._fp8 else known
            if parts is not None and (name.leaf in own or name.leaf in BESIDE):
                parts[name.leaf] = info
                if name.leaf in BESIDE:
                    self.tensors[str(name)] = info.shape
            elif parts is not None and name.leaf == "weight":  # one of both would be left out without a word
                raise FormatError(
                    f"{self.path}: {name.owner}: it has a dense weight beside its quantized one, wanted one of them"
                )
            elif self._is_alarm(str(name), info):
                self.left_out[stored] = "an alarm for programs that do not know the format"
            elif reason := reason_to_skip(stored):
                self.left_out[stored] = reason
            elif stored not in self._stored.scales and is_packed(stored, info.dtype):
                lacks = "one scale" if info.dtype in FP8 else f"{' or '.join(marks)}, as a packed module has,"
                raise FormatError(
                    f"{self.path}: {stored} is {info.dtype} of shape {info.shape}, wanted {lacks} beside it, got none"
                )
            else:
                self.tensors[str(name)] = info.shape

    def _is_alarm(self, name: str, info: TensorInfo) -> bool:
        """True for the tensor of one number that keeps other programs from taking experts for missing ones."""
        return self._packing.alarms and info.shape in ((1,), ()) and not self._parts.keys().isdisjoint(alarmed(name))

    @property
    def files(self) -> set[str]:
        """Names of the files in the folder that tensors are read from."""
        return {info.file.name for info in self._stored.tensors.values()}

    def stored_type(self, name: str) -> str:
        require_among(self.path, "dense tensor", name, self.tensors)
        owner, leaf = _Name.of(name)
        if owner in self.tied:
            return ""
        stack = self._stacks.get(owner)
        source = name if stack is None else f"{stack.sources[0][0]}.{leaf}"
        if name in self._own:  # experts in one tensor
            return self._parts[name][next(leaf for leaf in self._packing.marks if leaf in self._parts[name])].dtype
        return self._stored.tensors[self._files[source]].dtype

    def weight(self, name: str, device: torch.device | str = "cpu", pack: Pack = Numbers.weight) -> QuantizedWeight:
        name = self.tied.get(name, name)
        require_among(self.path, "packed module", name, self.modules)
        device, stack = torch.device(device), self._stacks.get(name)
        try:
            self._check_finite_beside(name)
            if stack is not None:
                numbers = stack.numbers(lambda source: self._numbers(source, device), device)
            else:
                numbers = self._numbers(name, device)
                if name in self._own and self._own[name].shared and self._own[name].fused:
                    numbers = gates_before_ups(numbers)
            return pack(numbers, self.modules[name].activations)
        except FormatError:
            raise
        except (TypeError, ValueError) as e:
            raise FormatError(f"{self.path}: {name}: {e}") from e

    def _check_finite_beside(self, name: str) -> None:
        """Raise ValueError for a bias, or factors of x, that are not finite."""
        for owner in self._owners(name):
            for part in (*(f"{owner}.{leaf}" for leaf in BESIDE), f"{owner}_bias"):
                if part in self._files:
                    check_finite(part.removeprefix(f"{name}."), self._tensor(part))

    def _owners(self, name: str) -> list[str]:
        """Names of the modules in the folder of which one of ``modules`` is made."""
        stack = self._stacks.get(name)
        return [name] if stack is None else [source for expert in stack.sources for source in expert]

    def _numbers(self, name: str, device: torch.device) -> Numbers:
        if name in self._stored.scales:
            return self._stored.expert_numbers(name, device)
        if name in self._fp8:
            return self._stored.numbers(self._files[f"{name}.weight"], device)
        leaves = (leaf for leaf in self._parts[name] if leaf not in BESIDE)
        tensors = {leaf: self._tensor(f"{name}.{leaf}").to(device) for leaf in leaves}
        return self._packing.numbers(self._own[name], tensors)

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        require_among(self.path, "dense tensor", name, self.tensors)
        owner, leaf = _Name.of(name)
        if owner in self.tied:
            return self.weight(owner).dequantize(dtype)
        if (stack := self._stacks.get(owner)) is not None:
            together = stack.bias if leaf == "bias" else stack.pre_quant_scale
            try:
                return together(lambda source: self._tensor(f"{source}.{leaf}")).to(dtype)
            except ValueError as e:
                raise FormatError(f"{self.path}: {e}") from e
        if name in self._own:
            try:
                return self._numbers(name, torch.device("cpu")).weight().dequantize().to(dtype)
            except ValueError as e:
                raise FormatError(f"{self.path}: {name}: {e}") from e
        t = self._tensor(name)
        return t.to(dtype) if t.is_floating_point() else t

    @property
    def own_names(self) -> Collection[str]:
        """Names of the packed modules, those of single experts and of all of a layer."""
        return self._own.keys() | self.modules.keys()

    @property
    def in_fp8(self) -> list[str]:
        """Names of ``tensors`` that the folder holds in 8-bit floats, with scales."""
        return [name for name in self.tensors if self._files.get(name) in self._stored.scales]

    def stored_names(self, name: str) -> list[str]:
        """Names in the folder's files of the tensors of a module, its bias too, or of one of ``tensors``."""
        owner, _, leaf = name.rpartition(".")
        if owner in self.tied:
            return self.stored_names(self.tied[owner])
        leaves = None
        if name not in self._own and (name not in self.modules or self.modules[name].shared):
            name, leaves = owner, [leaf]
        owners = self._owners(name)
        return [self._files[str(_Name(owner, leaf))] for owner in owners for leaf in leaves or self._parts[owner]]

    def in_act_order(self, name: str) -> bool:
        """True if a module's columns are in act-order. Only its index tensor is read."""
        if stack := self._stacks.get(name):
            return any(self.in_act_order(source) for expert in stack.sources for source in expert)
        parts = self._parts.get(name, {})
        index = next((leaf for leaf in ("g_idx", "weight_g_idx") if leaf in parts), None)
        if index is None:
            return "perm" in parts
        module, groups = self._own[name], self._tensor(f"{name}.{index}")
        return sorting_perm(groups, module.format, module.k, groups.device) is not None

    def _tensor(self, name: str) -> torch.Tensor:
        return self._stored.tensor(self._files[name])

    def _packs(self, name: str) -> bool:
        """True if experts in one tensor can stay packed: both products are there, their matrices are (n, k), they have
        no biases (whose models have gates and ups in pairs), and gates and ups share no scale of a block of rows."""
        owner = name.rpartition(".")[0]
        gate_up, down = (self._own.get(f"{owner}.{leaf}") for leaf in (GATE_UP, DOWN))
        if gate_up is None or down is None or gate_up.experts != down.experts or not gate_up.experts:
            return False
        if (gate_up.n, gate_up.k) != (2 * down.k, down.n) or f"{owner}.{GATE_UP}_bias" in self.tensors:
            return False
        rows = gate_up.format.scale_rule.block_rows
        return not rows or down.k % rows == 0

    def _stacked(self) -> dict[str, Stack]:
        try:
            stacked = stacks(self._own)
        except ValueError as e:
            raise FormatError(f"{self.path}: {e}") from e
        if twice := stacked.keys() & self._own.keys():
            single = stacked[min(twice)].sources[0][0]
            raise FormatError(f"{self.path}: {min(twice)} is there beside {single} and others that make it, wanted one")
        return stacked

    def pretrained(self) -> Pretrained:
        return Pretrained(self.path)

    def _module(self, name: str, parts: Mapping[str, TensorInfo]) -> Module:
        try:
            if (format := self._fp8.get(name)) is not None:
                n, k = parts["weight"].shape
                module = Module(n, k, format, "bias" in parts, pre_quant_scale="pre_quant_scale" in parts)
            else:
                module = self._packing.module(name, parts)
            _check_beside(module, parts)
            return module
        except KeyError as e:
            key = e.args[0]
            reason = f"quantization_config of config.json has no {e}"
            if not isinstance(key, str):  # no name of anything in a folder, but of a line that a table lacks
                reason = f"its reader does not know {e}"
            elif key in {*self._packing.marks, *self._packing.others}:
                reason = missing(key, parts)
            raise FormatError(f"{self.path}: {name}: {reason}") from e
        except (TypeError, ValueError, AttributeError, re.error) as e:
            raise FormatError(f"{self.path}: {name}: {e}") from e


def _check_beside(module: Module, parts: Mapping[str, TensorInfo]) -> None:
    """Raise ValueError if a module's dense tensors, those of :data:`BESIDE`, do not fit its weight."""
    shapes = (module.experts, module.n) if module.experts else (module.n,), (module.k,)
    for leaf, shape in zip(BESIDE, shapes, strict=True):
        if leaf in parts:
            check_tensor(parts, leaf, _FLOATS, shape)


class _Name(NamedTuple):
    owner: str
    leaf: str

    @classmethod
    def of(cls, name: str) -> _Name:
        owner, _, leaf = name.rpartition(".")
        return cls(owner, leaf)

    def __str__(self) -> str:
        return f"{self.owner}.{self.leaf}" if self.owner else self.leaf


def folder_format(packing: type[Packing]) -> CheckpointFormat:
    """Return the format of folders that say they are quantized by the packing's method."""

    def find(path: Path) -> Path | None:
        return path if method_of(quantization_config(path) or {}) == packing.method else None

    def open(path: Path, format: WeightFormat | None) -> QuantizedFolder:
        config = quantization_config(path) or {}
        try:
            own, settings = packing.of(config), settings_of(config)
            names = [*own.named()]
        except KeyError as e:
            raise FormatError(f"{path}: quantization_config of config.json has no {e}") from e
        except (TypeError, ValueError, AttributeError) as e:
            raise FormatError(f"{path}: quantization_config of config.json: {e}") from e
        stored = Fp8Folder(path, settings)
        folder = QuantizedFolder(stored, own)
        warn_of_missing(path, names, folder.own_names)
        return folder

    return CheckpointFormat(packing.method, packing.contents, find, open)


def alarmed(name: str) -> tuple[str, ...]:
    """Return the names of the modules of experts whose alarm a tensor may be, by its own name."""
    # of experts without gates transformers may save it as the first one's
    return name, name.removesuffix("_proj"), re.sub(r"(?:\.\d+)?\.up_proj(?:\.weight)?$", ".gate_up", name)
