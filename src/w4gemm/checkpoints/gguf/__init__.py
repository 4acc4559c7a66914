"""GGUF files (llama.cpp): matrices of most quantized types become :class:`QuantizedWeight` bit for bit, others stay
dense.

What only GGUF knows is in this folder: llama.cpp's names (architectures.py), and its order of the rows of attn_q and
attn_k. It pairs the two halves of each rotary head, so row (head, half, i) of the model is stored as row (head, i,
half). Whole rows move, so nothing is quantized again.

Experts of a block are three tensors, gates, ups and downs, (experts, n, k) each. If gates and ups are of one type, they
become the two modules that other checkpoints' experts become. Otherwise, or if one of the types stays dense, they
become the model's dense parameters, because transformers has no experts that are both.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from w4gemm.checkpoints.base import CheckpointFormat, Module, Pack, Pretrained
from w4gemm.checkpoints.gguf.architectures import (
    ARCHITECTURES,
    BLOCK_NAMES,
    NAMES,
    check,
    count,
    llama3_parameters,
    rope_base,
)
from w4gemm.checkpoints.gguf.experts import BlockExperts
from w4gemm.checkpoints.gguf.file import GGUFFile, name_of_whole
from w4gemm.checkpoints.gguf.header import MAGIC
from w4gemm.checkpoints.hugging_face import FILES
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.checkpoints.stored import check_finite
from w4gemm.core.errors import FormatError, require_among
from w4gemm.weights.weight import QuantizedWeight

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)")
_EMBEDDING = "token_embd.weight"
_HEAD = "lm_head"
_KEYS = "blk.0.attn_k.weight"
_ROPE_FACTORS = "rope_freqs.weight"
_ROPE_TABLES = ("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq")
"""Buffers of the model that a file with factors changes, unless they are Llama 3's, which a config can say."""


class GGUFCheckpoint:
    """An open GGUF file as a :class:`w4gemm.checkpoints.base.Checkpoint`.

    Tensors of an architecture that is not known have llama.cpp's names, and their rows are in the file's order: enough
    to list, tune and compile, while :meth:`pretrained` refuses.

    Attributes:
        path: the file.
        file: its metadata and tensors, under llama.cpp's names.

    Raises:
        FileNotFoundError: if there is no such file.
        FormatError: if it is no GGUF file, is cut short, contradicts itself, holds something unknown or lacks a part.
    """

    def __init__(self, path: str | Path) -> None:
        self.file = GGUFFile(path)
        self.path = self.file.path
        self.architecture = str(self.file.metadata.get("general.architecture", ""))
        self._known = ARCHITECTURES.get(self.architecture)
        self._experts = BlockExperts.of(self.file, self._known)
        elsewhere = {stored for experts in self._experts.values() for stored in experts.stored}
        elsewhere |= {name for stored in self.file.tensors for name in self.file.companions(stored)}
        self._stored: dict[str, str] = {}
        for stored in (stored for stored in self.file.tensors if stored not in elsewhere):
            name = self._model_name(stored)
            if (other := self._stored.setdefault(name, stored)) != stored:
                raise FormatError(f"{self.path}: {other!r} and {stored!r} are both {name!r}, wanted one of them")

    @functools.cached_property
    def modules(self) -> dict[str, Module]:
        by_name = {}
        for name, stored in self._stored.items():
            format = self.file.format(stored)
            owner, _, leaf = name.rpartition(".")
            if leaf == "weight" and format is not None and stored != _EMBEDDING:
                n, k = self.file.info(stored).shape
                by_name[owner] = Module(n, k, format, bias=f"{owner}.bias" in self._stored)
        is_tied = self._known and f"{_HEAD}.weight" not in self._stored and _EMBEDDING in self.file.tensors
        if is_tied and (format := self.file.format(_EMBEDDING)) is not None:
            n, k = self.file.info(_EMBEDDING).shape
            by_name[_HEAD] = Module(n, k, format, shared=True)
        return by_name | {
            name: module for experts in self._experts.values() for name, module in experts.modules.items()
        }

    @functools.cached_property
    def embeddings(self) -> dict[str, Module]:
        """Those of ``tensors`` that :meth:`weight` gives as packed embeddings too, by the names of their modules."""
        if self._known is None or _EMBEDDING not in self.file.tensors:
            return {}
        if (format := self.file.format(_EMBEDDING)) is None:
            return {}
        n, k = self.file.info(_EMBEDDING).shape
        return {NAMES["token_embd"]: Module(n, k, format)}

    @property
    def tied(self) -> dict[str, str]:
        """Names of embeddings whose numbers an output layer among ``modules`` has, and of that layer."""
        head = self.modules.get(_HEAD)
        return dict.fromkeys(self.embeddings, _HEAD) if head is not None and head.shared else {}

    @functools.cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: self.file.info(stored).shape for name, stored in self._stored.items()}
        if _ROPE_FACTORS in self._stored:
            factors = shapes.pop(_ROPE_FACTORS)
            shapes |= {} if self._llama3 else dict.fromkeys(_ROPE_TABLES, factors)
        dense = {name: shape for name, shape in shapes.items() if name.removesuffix(".weight") not in self.modules}
        return dense | {name: shape for experts in self._experts.values() for name, shape in experts.tensors.items()}

    @functools.cached_property
    def left_out(self) -> dict[str, str]:
        """The reason why a tensor is neither of a module nor among ``tensors``, by its name in the file. Each tensor of
        the file is one of the three."""
        companions = {name: stored for stored in self.file.tensors for name in self.file.companions(stored)}
        reasons = {name: f"beside {stored}, whose factor is read with it" for name, stored in companions.items()}
        if _ROPE_FACTORS in self._stored and self._llama3:
            reasons[_ROPE_FACTORS] = "Llama 3's, which the config says"
        return reasons

    def stored_names(self, name: str) -> list[str]:
        """Return the names in the file of a module's weight and bias, or of one of ``tensors``."""
        if (experts := self._experts_with(name)) is not None:
            return experts.stored_names(name)
        if name in _ROPE_TABLES:
            return [_ROPE_FACTORS]
        if name in self.modules and self.modules[name].shared:
            return [_EMBEDDING]
        names = [f"{name}.weight", f"{name}.bias"] if name in self.modules else [name]
        return [self._stored[each] for each in names if each in self._stored]

    def stored_type(self, name: str) -> str:
        require_among(self.path, "dense tensor", name, self.tensors)
        if (experts := self._experts_with(name)) is not None:
            return experts.stored_type(name)
        return self.file.info(_ROPE_FACTORS if name in _ROPE_TABLES else self._stored[name]).type

    def weight(self, name: str, device: torch.device | str = "cpu", pack: Pack = Numbers.weight) -> QuantizedWeight:
        if name in self.embeddings:
            return self.file.weight(_EMBEDDING, None, device, pack)
        require_among(self.path, "packed module", name, self.modules)
        if self.modules[name].bias:
            try:
                check_finite("bias", self.dense(f"{name}.bias"))
            except ValueError as e:
                raise FormatError(f"{self.path}: {name}: {e}") from e
        if (experts := self._experts_with(name)) is not None:
            return experts.weight(name, torch.device(device), pack)
        stored = _EMBEDDING if self.modules[name].shared else self._stored[f"{name}.weight"]
        return self.file.weight(stored, self._rows(stored), device, pack)

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        require_among(self.path, "dense tensor", name, self.tensors)
        if name in _ROPE_TABLES:
            return self._rope_table().to(dtype)
        if (experts := self._experts_with(name)) is not None:
            return experts.dense(name, dtype)
        stored = self._stored[name]
        if self._known and self._known.added_to_norms and name.endswith("norm.weight"):
            return (self.file.dense(stored) - self._known.added_to_norms).to(dtype)
        return self.file.dense(stored, dtype, self._rows(stored))

    def pretrained(self) -> Pretrained:
        if self._known is None:
            legal = ", ".join(ARCHITECTURES)
            raise FormatError(
                f"{self.path}: architecture {self.architecture!r} cannot be loaded; wanted one of {legal}"
            )
        self._check_config()
        release = tuple(int(part) for part in version("transformers").split(".")[:2])
        if self.architecture.startswith("gemma") and release < _GEMMA_TOKENS:
            raise FormatError(
                f"{self.path}: transformers {version('transformers')} splits text into other tokens than a GGUF file "
                "of Gemma says; wanted 5.18 or newer"
            )
        with self._setting_errors():
            settings = {key: value for key, value in self._known.settings(self._value).items() if value is not None}
        if _ROPE_FACTORS in self._stored and settings["rope_parameters"].get("rope_type", "default") != "default":
            raise FormatError(
                f"{self.path}: {self.architecture}.rope.scaling.factor: wanted no such key beside {_ROPE_FACTORS}, got "
                f"{settings['rope_parameters']['factor']}"
            )
        if self._llama3:
            settings["rope_parameters"] = self._llama3
        return Pretrained(self.path.parent, {"gguf_file": self.path.name}, settings, self.file)

    def _model_name(self, stored: str) -> str:
        """Name of a tensor in the model; its own name if no module of a known architecture holds it."""
        base, _, leaf = stored.rpartition(".")
        if self._known is None:
            return stored
        if base in NAMES:
            return f"{NAMES[base]}.{leaf}"
        match, names = _BLOCK.fullmatch(base), {**BLOCK_NAMES, **self._known.names}
        if match is None:
            return stored
        whole = f"{match[2]}.{leaf}"
        name = names.get(whole) or (f"{names[match[2]]}.{leaf}" if match[2] in names else None)
        return stored if name is None else f"model.layers.{int(match[1])}.{name}"

    def _experts_with(self, name: str) -> BlockExperts | None:
        """Return the experts that a module or dense tensor belongs to."""
        return self._experts.get(name.partition(".experts.")[0])

    def _rows(self, stored: str) -> torch.Tensor | None:
        """Return the index in the file of each row of the model; None if the order is the same."""
        match = _BLOCK.match(stored)
        permuted = self._known.permuted if self._known else {}
        if match is None or match[2] not in permuted:
            return None
        heads, n = self._count(permuted[match[2]]), self.file.info(stored).shape[0]
        if n % (2 * heads):
            raise FormatError(f"{self.path}: tensor {stored!r} has {n} rows, which are not {heads} heads of even size")
        return torch.arange(n, device="cpu").view(heads, -1, 2).transpose(1, 2).reshape(n)

    @functools.cached_property
    def _llama3(self) -> dict[str, Any] | None:
        """Parameters of the rotary embedding of Llama 3, if the file's factors are made of them."""
        if self.architecture != "llama" or _ROPE_FACTORS not in self._stored:
            return None
        factors = self.file.dense(_ROPE_FACTORS)
        head_size = self.file.info(_KEYS).shape[0] // self._count("head_count_kv")
        if factors.shape != (head_size // 2,):
            return None  # a table that does not fit, which is refused where it is placed
        with self._setting_errors():
            return llama3_parameters(factors, rope_base(self._value))

    def _rope_table(self) -> torch.Tensor:
        """float32 (head size / 2,): the inverse frequencies of the rotary embedding, divided by the file's factors."""
        factors = self.file.dense(_ROPE_FACTORS)
        with self._setting_errors():
            base = rope_base(self._value)
        size = 2 * len(factors)
        exponents = torch.arange(0, size, 2, dtype=torch.float32, device=factors.device) / size
        return 1.0 / base**exponents / factors

    @contextmanager
    def _setting_errors(self) -> Iterator[None]:
        """Turn errors of code that reads settings into FormatErrors that name the file."""
        try:
            yield
        except TypeError as e:
            raise FormatError(f"{self.path}: a setting of {self.architecture} is no number: {e}") from e
        except ValueError as e:
            raise FormatError(f"{self.path}: {self.architecture}.{e}") from e

    def _value(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def _count(self, key: str) -> int:
        """A count of the model's attention."""
        if key == "head_count_kv" and self._value(f"attention.{key}") is None:
            key = "head_count"
        with self._setting_errors():
            return count(self._value, f"attention.{key}")

    def _check_config(self) -> None:
        """Raise FormatError for metadata that contradict the tensors, or of which a part is missing, before
        transformers makes a config of them."""
        blocks = {int(match[1]) for name in self.file.tensors if (match := _BLOCK.match(name))}
        if blocks != set(range(len(blocks))) or self._value("block_count") != len(blocks):
            raise FormatError(
                f"{self.path}: {self.architecture}.block_count is {self._value('block_count')!r}, but its tensors are "
                f"of {len(blocks)} blocks, up to blk.{max(blocks, default=-1)}"
            )
        if self._count("head_count") % self._count("head_count_kv"):
            raise FormatError(
                f"{self.path}: {self.architecture}.attention: {self._count('head_count')} heads cannot share "
                f"{self._count('head_count_kv')} heads of keys and values equally"
            )
        shape = self.file.info(_EMBEDDING).shape
        if len(shape) != 2 or self._value("embedding_length") != shape[1]:
            raise FormatError(
                f"{self.path}: {self.architecture}.embedding_length is {self._value('embedding_length')!r}, but "
                f"{_EMBEDDING} has shape {shape}"
            )
        with self._setting_errors():
            check(self._value)
        for key, value in self.file.metadata.items():
            if key.endswith("_token_id") and not (isinstance(value, int) and 0 <= value < shape[0]):
                raise FormatError(f"{self.path}: {key}: wanted a token id below {shape[0]}, got {value!r}")


_GEMMA_TOKENS = (5, 18)
"""First version of transformers whose tokenizer of a Gemma file merges as the file says (seen with 5.17 and 5.18)."""


def _find(path: Path) -> Path | None:
    """A GGUF file is known by its suffix or its first bytes; in a folder, the only one, or the parts of one. One beside
    config.json and safetensors is of the same model in other numbers, and has to be named."""
    if path.is_file():
        with path.open("rb") as f:
            return path if path.suffix == ".gguf" or f.read(len(MAGIC)) == MAGIC else None
    if (path / "config.json").is_file() and any((path / file).is_file() for file in FILES):
        return None
    files = sorted(path.glob("*.gguf"))
    if len({name_of_whole(file) for file in files}) > 1:
        raise FormatError(
            f"path: {str(path)!r} holds {len(files)} GGUF files ({', '.join(f.name for f in files)}); name one"
        )
    return files[0] if files else None


FORMAT = CheckpointFormat("gguf", "a GGUF file, or a folder with one", _find, lambda path, format: GGUFCheckpoint(path))
