"""4-bit checkpoints of random numbers in their producers' formats: ``write(model, packing, folder)``.

A tensor's numbers come from a random pool at an offset that its name gives, so that a model of 20 GB takes seconds, is
the same on every machine, and no two layers are equal. Codes are about uniform, with a mean of zero: with another, each
product adds the same direction to every token's activations, which soon are the same, so that all tokens go to the same
experts and have the same answers. Scales are such that a product of x keeps x's size, so that activations stay finite
through all layers and greedy answers can be compared.
"""

from __future__ import annotations

import json
import math
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
from bench.engine.gguf import write_gguf
from bench.engine.models import Model
from bench.engine.packing import DTYPE, Numbers, Packing, Tensor
from safetensors.torch import save_file

from w4gemm.console.progress import say

_SHARD_BYTES = 1 << 30
_FEW_BYTES = 1 << 28
"""A model of fewer bytes is written by this process, for which starting others would take longer."""
_WRITERS = 8


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
