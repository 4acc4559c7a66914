"""4-bit checkpoints of random numbers in their producers' formats: ``write(model, packing, folder)``; their copies in
bf16, and LoRA adapters for them.

A tensor's numbers come from a random pool at an offset that its name gives, so that a model of 20 GB takes seconds, is
the same on every machine, and no two layers are equal. Codes are about uniform, with a mean of zero: with another, each
product adds the same direction to every token's activations, which soon are the same, so that all tokens go to the same
experts and have the same answers. Scales are such that a product of x keeps x's size, so that activations stay finite
through all layers and greedy answers can be compared.
"""

from __future__ import annotations

import json
import math
import shutil
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache, cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.engine.gguf import FILE, write_gguf
from bench.engine.models import Model
from bench.engine.modules import Matrix, Stack
from bench.engine.packing import DTYPE, Numbers, Packing, Tensor
from safetensors.torch import save_file

from w4gemm.checkpoints import open_checkpoint
from w4gemm.checkpoints.hugging_face import SafetensorsFolder
from w4gemm.console.progress import say

_SHARD_BYTES = 1 << 30
_FEW_BYTES = 1 << 28
"""A model of fewer bytes is written by this process, for which starting others would take longer."""
_WRITERS = 8
RANK = 8
"""Of LoRA adapters."""
_SHORT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Names that some models, such as Mixtral, have for the matrices of an expert."""


class Pool:
    """Random numbers to take tensors from. Lengths are prime, so that rows of a matrix begin at different ones."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._bytes = torch.from_numpy(np.frombuffer(rng.bytes(67108859), np.uint8).copy())
        self._normal = torch.from_numpy(rng.standard_normal(4194301, np.float32))
        self._uniform = torch.from_numpy(rng.uniform(0.5, 1.5, 4194301).astype(np.float32))
        self._exponents = torch.from_numpy(rng.integers(-1, 2, 4194301, np.int16))
        self._scaled: dict[tuple[Numbers, torch.dtype], torch.Tensor] = {}

    @cached_property
    def _balanced(self) -> torch.Tensor:
        low, high = self._bytes & 15, self._bytes & 240
        return low.masked_fill_(low == 0, 8) | high.masked_fill_(high == 0, 128)

    def fill(self, tensor: Tensor) -> torch.Tensor:
        """Return the numbers of a tensor."""
        kind, value, words = tensor.numbers
        count, start = math.prod(tensor.shape), zlib.crc32(tensor.name.encode())
        if kind in ("codes", "balanced"):
            pool = self._bytes if kind == "codes" else self._balanced
            return _window(pool, start, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        if kind == "constant":
            return torch.full(tensor.shape, value, dtype=tensor.dtype)
        if kind == "numbers":
            return torch.tensor(words, dtype=tensor.dtype)
        if kind in ("groups", "shuffled"):
            columns = torch.arange(count)
            if kind == "shuffled":  # modules that an engine fuses share it
                columns = torch.randperm(count, generator=torch.Generator().manual_seed(count))
            return (columns // int(value)).to(tensor.dtype)
        key = tensor.numbers, tensor.dtype
        if key not in self._scaled:
            if kind == "exponents":
                self._scaled[key] = (self._exponents + int(value)).to(torch.uint8).view(tensor.dtype)
            else:
                self._scaled[key] = ((self._normal if kind == "normal" else self._uniform) * value).to(tensor.dtype)
        return _window(self._scaled[key], start, count).view(tensor.shape)


def _window(pool: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Return ``count`` numbers of a pool from ``start`` on, beginning again at its end."""
    out = torch.empty(count, dtype=pool.dtype)
    done, start = 0, start % len(pool)
    while done < count:
        piece = pool[start : start + count - done]
        out[done : done + len(piece)] = piece
        done, start = done + len(piece), 0
    return out


def tensors_of(model: Model, packing: Packing) -> list[Tensor]:
    """Return all tensors of a checkpoint."""
    tensors = [t for module in model.outer() for t in packing.tensors(module)]
    for index in range(model.layers):
        for module in model.layer(index):
            tensors += [t._replace(name=f"{model.prefix}{index}.{t.name}") for t in packing.tensors(module)]
    return tensors


def write(model: Model, packing: Packing, folder: Path) -> int:
    """Write config.json, a tokenizer of words t0, t1, ... and the weights, in shards.

    Returns:
        Bytes of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**model.config, "dtype": str(DTYPE).removeprefix("torch.")}
    if (quantization := packing.config(model)) is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_tokenizer(folder, model)
    tensors = tensors_of(model, packing)
    shards = _shards(tensors)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    size = sum(t.nbytes for t in tensors)
    index = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    if size < _FEW_BYTES:
        for name, shard in zip(names, shards, strict=True):
            _write_shard(folder / name, shard)
        return size
    with ProcessPoolExecutor(min(_WRITERS, len(shards)), get_context("spawn"), _start_writer) as writers:
        for _ in writers.map(_write_shard, (folder / name for name in names), shards):
            pass
    return size


def _shards(tensors: list[Tensor]) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.nbytes > _SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.nbytes
    return shards


@cache
def _pool() -> Pool:
    """This process's."""
    return Pool()


def _start_writer() -> None:
    torch.set_num_threads(2)
    _pool()


def _write_shard(file: Path, tensors: list[Tensor]) -> None:
    save_file({t.name: _pool().fill(t) for t in tensors}, file, metadata={"format": "pt"})


def _write_tokenizer(folder: Path, model: Model) -> None:
    from tokenizers import Tokenizer as Words
    from tokenizers import models, pre_tokenizers

    words = Words(models.WordLevel({f"t{i}": i for i in range(model.vocabulary)}, unk_token="t3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    named: Mapping[str, Any] = {"bos_token": "t1", "eos_token": "t2", "pad_token": "t0", "unk_token": "t3"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32768, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_once(model: Model, packing: Packing, folder: Path) -> None:
    """Write a checkpoint, if it is not there."""
    done = folder / "complete"
    if done.exists():
        return
    if packing.method.startswith("gguf"):
        write_gguf(model, folder, packing.method.removeprefix("gguf-")[:4].upper())
        done.touch()
        return
    start, size = time.monotonic(), sum(tensor.nbytes for tensor in tensors_of(model, packing))
    write(model, packing, folder)
    done.touch()
    say(f"{model.name}-{packing}: {size / 1e9:.1f} GB written in {time.monotonic() - start:.1f} s")


def write_adapter(base: str, matrices: Mapping[str, Matrix | Stack], folder: Path, number: int) -> None:
    """Write a LoRA adapter of random numbers, of which each ``number`` has others, for matrices of a model."""
    tensors = {}
    for name, m in matrices.items():
        halves = {"A": ((RANK, m.k), m.k**-0.5), "B": ((m.n, RANK), 0.3 * m.gain * RANK**-0.5)}
        for half, (shape, std) in halves.items():
            drawn = Tensor(f"{number}.{name}.{half}", DTYPE, shape, Numbers("normal", std))
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = _pool().fill(drawn)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    leaves = sorted({name.rpartition(".")[2] for name in matrices})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "bias": "none"}
    config |= {"r": RANK, "lora_alpha": RANK, "target_modules": leaves}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def served(folder: Path) -> Path:
    """Return the file or folder that an engine loads."""
    return file if (file := folder / FILE).exists() else folder


def dense_folder(folder: Path) -> Path:
    """Write a checkpoint's numbers in bf16, and return the folder."""
    dense = folder.with_name(f"{folder.name}-dense")
    if dense.exists():
        return dense
    checkpoint, stored, tensors = open_checkpoint(folder), SafetensorsFolder(folder), dict[str, torch.Tensor]()
    modules = {name.rpartition(".")[0] for name in stored.tensors}
    for name, module in checkpoint.modules.items():
        w = checkpoint.weight(name).dequantize(torch.bfloat16)
        parent, _, last = name.rpartition(".")
        halves = {"gate_proj": w[..., ::2, :], "up_proj": w[..., 1::2, :]} if module.fused else {last: w}
        for leaf, each in halves.items():
            places = [f"{parent}.{e}" for e in range(module.experts)] or [parent]
            for place, rows in zip(places, each.view(-1, *each.shape[-2:]), strict=True):
                named = leaf if f"{place}.{leaf}" in modules else _SHORT[leaf]
                tensors[f"{place}.{named}.weight"] = rows.contiguous()
    own = {name.rpartition(".")[0] for name in tensors}
    kept = (n for n in stored.tensors if n.endswith(".bias") or n.rpartition(".")[0] not in own)
    tensors |= {name: stored.tensor(name) for name in kept}
    shutil.copytree(folder, dense, ignore=shutil.ignore_patterns("*.safetensors*", "complete", "config.json"))
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (dense / "config.json").write_text(json.dumps(config))
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    return dense
