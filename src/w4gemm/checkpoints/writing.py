"""Folders of safetensors, written from a checkpoint one module at a time: :func:`write_folder`.

Shards are planned from the checkpoint's headers, and each is renamed into its place when it is whole. So a run that was
interrupted goes on after the last whole shard, and memory holds no more than one. config.json comes last: a folder
without it is not taken for a model.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from w4gemm.checkpoints.account import LAYER
from w4gemm.checkpoints.base import Checkpoint, Module, finite_dense, is_embedding
from w4gemm.checkpoints.gguf.fields import quick_reader, tokenizer_of
from w4gemm.checkpoints.hugging_face import AS_IT_IS, read_config, refuse_adapter, transformers_makes
from w4gemm.checkpoints.model_experts import packed_experts
from w4gemm.checkpoints.quantized_folder import QuantizedFolder
from w4gemm.checkpoints.stored import DTYPES, WIDE_SCALES
from w4gemm.core.errors import FormatError
from w4gemm.core.files import UNFINISHED, placed
from w4gemm.packing.packed_shape import packed_shape
from w4gemm.weights.file import save_tensors
from w4gemm.weights.weight import QuantizedWeight

_PLAN = "w4gemm_plan"
_INDEX, _LAST = "model.safetensors.index.json", "config.json"
"""The file of the shards' names, and the file that is written last."""
_WEIGHTS = ("*.safetensors", "*.bin")
"""Files of weights in a folder; the latter are of dense models, which transformers reads."""
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "*.md", "*.py", "LICENSE*")
"""Files beside the weights that are copied: tokenizer, generation config, licence, code that a model type names."""
_OF_THE_SOURCE = ("config.json", "hf_quant_config.json", "quant_cfg.json", "quantize_config.json", "quant_config.json")
"""Files that say how the source is quantized, which are not copied."""


class WeightWriter(Protocol):
    """How packed modules are stored in a folder. Methods raise ValueError; the caller adds the module's name."""

    name: str
    packs_embeddings: bool
    """True if packed embeddings are stored, alone or as a head's numbers."""

    @property
    def marks(self) -> Collection[str]:
        """Last parts of the names of the tensors that a packed module is stored as."""
        ...

    def check(self, module: Module, act_order: bool) -> None:
        """Raise ValueError for a module that cannot be stored; ``act_order`` is True if its columns are."""
        ...

    def tensors(self, checkpoint: Checkpoint, name: str, w: QuantizedWeight) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a module's weight, which is in the canonical layout, by their names in the folder."""
        ...

    def config(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return the quantization_config of a folder with the checkpoint's modules."""
        ...

    def named(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint with the names that its modules and tensors are to have in the folder."""
        ...


@dataclass(frozen=True)
class FolderPlan:
    """Modules and dense tensors of each shard."""

    shards: tuple[tuple[str, ...], ...]
    key: str
    """Digest of everything that decides what is written."""

    def file(self, index: int) -> str:
        count = len(self.shards)
        return "model.safetensors" if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"


def write_folder(
    checkpoint: Checkpoint,
    folder: Path,
    writer: WeightWriter,
    *,
    dtype: torch.dtype,
    convert_floats: bool = True,
    shard_bytes: int = 4 * 2**30,
    how: str = "",
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> int:
    """Write a checkpoint as a folder; return how many shards an earlier run had written. After a complete run nothing
    is left to do.

    Args:
        dtype: dtype of dense tensors.
        convert_floats: False to keep the dtype of a quantized folder's dense tensors, if it is a 16- or 32-bit float.
        how: name of the way to quantize dense weights. A run with another one does not continue this one.
        progress: called as ``progress(done, total, name)`` after each module and dense tensor.

    Raises:
        FileExistsError: if the folder holds what the same run did not write.
        FormatError: if a module cannot be stored, or no model can be made of the checkpoint.
    """
    checkpoint = one_of_each(checkpoint, writer)
    _require_writable(checkpoint, writer)
    keeps_floats = isinstance(checkpoint, QuantizedFolder) and not convert_floats
    checkpoint = writer.named(checkpoint)
    dtypes = {name: _dtype_of(checkpoint, name, dtype, keeps_floats) for name in checkpoint.tensors}
    plan = _plan(checkpoint, writer, dtypes, shard_bytes, how)
    with _made(folder):
        _check_folder(folder, plan)
        total, done, whole = sum(map(len, plan.shards)), 0, 0
        places: dict[str, str] = {}
        for index, names in enumerate(plan.shards):
            file = folder / plan.file(index)
            if file.exists():
                whole, done = whole + 1, done + len(names)
                progress(done, total, f"{file.name} is there")
            else:
                tensors: dict[str, torch.Tensor] = {}
                for name in names:
                    stored = _stored(checkpoint, name, writer, dtypes.get(name, dtype))
                    assert tensors.keys().isdisjoint(stored), f"{name} is stored by the names of another module"
                    tensors |= stored
                    done += 1
                    progress(done, total, name)
                progress(done, total, f"writing {file.name}")
                _save(file, tensors, plan.key)
            places |= dict.fromkeys(_names(file), file.name)
        if len(plan.shards) > 1 and not (folder / _INDEX).exists():
            _write_json(folder / _INDEX, {"metadata": {}, "weight_map": dict(sorted(places.items()))})
        _write_config(checkpoint, folder, writer.config(checkpoint), dtype)
    return whole


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder that only this process writes, and remove it if the block fails before anything is written.

    Raises:
        FileExistsError: if another process writes it at this time.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder):
            yield
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):  # it holds what the next run goes on from
                folder.rmdir()
        raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder, in which two writers would replace each other's files."""
    try:
        import fcntl
    except ImportError:  # not POSIX
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise FileExistsError(f"{folder} is being written by another process") from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def one_of_each(checkpoint: Checkpoint, writer: WeightWriter) -> Checkpoint:
    """Return a checkpoint without what is among its modules and among its dense tensors, in one of both, because a
    folder has one. Embeddings stay packed, and heads that share their numbers, if the writer packs embeddings; experts
    in fp8, if the model's code lets them be packed; others are dense."""
    shared = {
        name for name, m in checkpoint.modules.items() if m.shared and (not m.experts or name in checkpoint.tensors)
    }
    packed, more = packed_experts(checkpoint) & shared, dict[str, Module]()
    dropped = set(packed)
    if writer.packs_embeddings:
        tied: Mapping[str, str] = getattr(checkpoint, "tied", {})
        more = {name: m for name, m in getattr(checkpoint, "embeddings", {}).items() if name not in tied}
        packed |= set(tied.values())
        dropped |= {f"{name}.weight" for name in (*tied, *more)}
    if not (shared - packed or dropped):
        return checkpoint
    same = copy.copy(checkpoint)
    vars(same)["modules"] = {name: m for name, m in checkpoint.modules.items() if name not in shared - packed} | more
    vars(same)["tensors"] = {name: shape for name, shape in checkpoint.tensors.items() if name not in dropped}
    return same


def _require_writable(checkpoint: Checkpoint, writer: WeightWriter) -> None:
    """Raise FormatError for what no folder of the writer can hold, before hours of writing."""
    source, options, *_ = checkpoint.pretrained()  # refuses what has no config
    if not options:
        refuse_adapter(source)
        _copied_files(source)
    if reason := refusal(checkpoint, writer):
        raise FormatError(f"{checkpoint.path}: {reason}")
    _require_layers(checkpoint)
    if table := next((name for name in checkpoint.tensors if name.endswith("rotary_emb.inv_freq")), None):
        raise FormatError(f"{checkpoint.path}: {table} is of its own, and config.json has no place for it")
    if other := next((name for name in checkpoint.tensors if name.rpartition(".")[2] in writer.marks), None):
        raise FormatError(
            f"{checkpoint.path}: {other} belongs to no packed module, but a reader would take it for part of one"
        )


def refusal(checkpoint: Checkpoint, writer: WeightWriter) -> str:
    """Return why a writer cannot store a checkpoint's modules, naming the first that it cannot; the empty string if it
    can store all, bit for bit."""
    for name, module in checkpoint.modules.items():
        try:
            writer.check(module, isinstance(checkpoint, QuantizedFolder) and checkpoint.in_act_order(name))
        except ValueError as e:
            return f"{name}: {e}"
    return ""


def _require_layers(checkpoint: Checkpoint) -> None:
    """Raise FormatError if a folder has no tensors of a layer that its config.json counts."""
    if not (checkpoint.path / "config.json").is_file():
        return
    config = read_config(checkpoint.path)
    count = (config.get("text_config") or config).get("num_hidden_layers")
    there = {int(match[1]) for name in (*checkpoint.modules, *checkpoint.tensors) if (match := LAYER.search(name))}
    missing = next(i for i in itertools.count() if i not in there)
    if there and isinstance(count, int) and missing < count:
        raise FormatError(
            f"{checkpoint.path}: config.json says num_hidden_layers {count}, but there are no tensors of layer "
            f"{missing}"
        )


def _dtype_of(checkpoint: Checkpoint, name: str, dtype: torch.dtype, kept: bool) -> torch.dtype:
    """Return the dtype that a dense tensor is written in. If ``kept``, it is the tensor's own, because a router with a
    bias in float32 decides in float32."""
    stored = checkpoint.stored_type(name)
    return DTYPES[stored] if kept and stored in WIDE_SCALES else dtype


def _plan(
    checkpoint: Checkpoint, writer: WeightWriter, dtypes: Mapping[str, torch.dtype], shard_bytes: int, how: str
) -> FolderPlan:
    modules = checkpoint.modules
    sizes = {name: packed_shape(m.format, "canonical", m.n, m.k, m.experts).nbytes for name, m in modules.items()}
    sizes |= {name: math.prod(shape) * dtypes[name].itemsize for name, shape in checkpoint.tensors.items()}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    facts = {
        "source": _source(checkpoint),
        "formats": {name: f"{m.format} {m.activations}" for name, m in modules.items()},
        "to": [writer.name, [str(dtype) for dtype in dtypes.values()], how],
        "shards": shards,
    }
    return FolderPlan(tuple(map(tuple, shards)), hashlib.sha256(json.dumps(facts).encode()).hexdigest())


def _source(checkpoint: Checkpoint) -> list[tuple[str | int, ...]]:
    """Return facts that change with a checkpoint: size and time of its large files of weights, and digests of its
    configs."""
    path, split = checkpoint.path.resolve(), checkpoint.pretrained().file
    files = [path] if path.is_file() else sorted(file for pattern in _WEIGHTS for file in path.glob(pattern))
    if split is not None:
        files = [part.resolve() for part in split.parts]
    weights: list[tuple[str | int, ...]] = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    configs = [path / name for name in _OF_THE_SOURCE if (path / name).is_file()]
    return weights + [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in configs]


def _check_folder(folder: Path, plan: FolderPlan) -> None:
    """Raise FileExistsError for links, and for files that are no shards of this plan. If all of its shards are there,
    other files may be, because they are written last."""
    if link := next((file for file in folder.iterdir() if file.is_symlink()), None):
        raise FileExistsError(f"{folder} holds {link.name}, a link; wanted an empty folder")
    expected = [folder / plan.file(i) for i in range(len(plan.shards))]
    ours = {file for file in expected if file.exists() and _key_of(file) == plan.key}
    if len(ours) == len(expected):
        return
    for file in (*expected, *sorted(folder.iterdir())):
        if file.exists() and file not in ours and not file.name.endswith(UNFINISHED):
            raise FileExistsError(
                f"{folder} holds {file.name}, which is damaged, or not of an interrupted run of the same conversion; "
                "wanted an empty folder"
            )


def _key_of(file: Path) -> str | None:
    """Return the key of a shard's plan; None for another file."""
    try:
        with safe_open(file, "pt") as f:
            return (f.metadata() or {}).get(_PLAN)
    except (SafetensorError, OSError):  # OSError: of a folder
        return None


def _stored(checkpoint: Checkpoint, name: str, writer: WeightWriter, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if name not in checkpoint.modules:
        return {name: finite_dense(checkpoint, name, dtype)}
    try:
        return dict(writer.tensors(checkpoint, name, checkpoint.weight(name)))
    except FormatError:
        raise  # the checkpoint's own, which names file and module
    except ValueError as e:
        raise FormatError(f"{checkpoint.path}: {name}: {e}") from e


def _save(file: Path, tensors: Mapping[str, torch.Tensor], key: str) -> None:
    whole: dict[str, torch.Tensor] = {}
    memory: set[int] = set()
    for name, t in tensors.items():  # no two may share their memory
        t = t.cpu().contiguous()
        whole[name] = t.clone() if t.untyped_storage().data_ptr() in memory else t
        memory.add(whole[name].untyped_storage().data_ptr())
    save_tensors(file, whole, {"format": "pt", _PLAN: key})


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as f:
        return list(f.keys())


def _write_json(file: Path, value: dict[str, Any]) -> None:
    with placed(file) as unfinished:
        unfinished.write_text(json.dumps(value, indent=2, default=str) + "\n")


def _copied_files(source: Path) -> list[Path]:
    """Return the files that are copied with the weights of a folder.

    Raises:
        FormatError: for a link to a file outside of the folder and of the blobs of the hub's cache, because nobody may
            have meant to publish that file.
    """
    whole = source.resolve()
    caches = [parent.parent / "blobs" for parent in (whole, *whole.parents) if parent.name == "snapshots"]
    files = {file for pattern in _COPIED for file in source.glob(pattern) if file.is_file()}
    for file in sorted(files):
        if not any(file.resolve().is_relative_to(root) for root in (whole, *caches)):
            raise FormatError(f"{source}: {file.name} is a link to {str(file.resolve())!r}, wanted files in the folder")
    return sorted(f for f in files if f.name not in _OF_THE_SOURCE and not f.name.endswith(".index.json"))


def _write_config(checkpoint: Checkpoint, folder: Path, quantization: dict[str, Any], dtype: torch.dtype) -> None:
    """Write the files beside the shards that are not there."""
    source, options, settings, file = checkpoint.pretrained()
    if not options:  # no GGUF file, which holds them in its own way
        for copied in _copied_files(source):
            if not (folder / copied.name).exists():
                with placed(folder / copied.name) as unfinished:
                    shutil.copy(copied, unfinished)
    if (folder / _LAST).exists():
        return
    if file is not None:
        from transformers import AutoConfig

        with transformers_makes("model", checkpoint.path), quick_reader(file):
            config = AutoConfig.from_pretrained(source, **AS_IT_IS, **options).to_dict() | settings
            tokenizer = tokenizer_of(source, {**AS_IT_IS, **options}, file)
        try:
            tokenizer.save_pretrained(folder)
        except Exception as e:  # one of the library in Rust has no class of its own
            raise OSError(f"{folder}: the tokenizer cannot be written: {e}") from e
        config["architectures"] = config.get("architectures") or _architecture(config)
    else:
        config = read_config(source)
    config.pop("torch_dtype", None)
    for part in (config, config.get("text_config") or {}):  # what says how the source is quantized
        part.pop("quantization_config", None)
        part.pop("expert_dtype", None)
        if part.get("tie_word_embeddings") and _has_head_and_embedding(checkpoint):
            part["tie_word_embeddings"] = False  # else some readers would take one for both
    config |= {"dtype": str(dtype).removeprefix("torch."), "quantization_config": quantization}
    _write_json(folder / _LAST, config)


def _has_head_and_embedding(checkpoint: Checkpoint) -> bool:
    """True if a checkpoint has a dense head and a dense embedding of the same shape."""
    heads = {shape for name, shape in checkpoint.tensors.items() if name.endswith("lm_head.weight")}
    return any(
        shape in heads and is_embedding(name.removesuffix(".weight")) for name, shape in checkpoint.tensors.items()
    )


def _architecture(config: Mapping[str, Any]) -> list[str]:
    """Class of the causal language model of a config, as a folder names it."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = AutoConfig.for_model(config["model_type"]).model_type
    return [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
