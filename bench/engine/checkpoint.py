"""4-bit checkpoints of random numbers in their producers' formats: ``write(model, packing, folder)``.

A tensor's numbers come from a random pool at an offset that its name gives, so that a model of 20 GB takes seconds, is
the same on every machine, and no two layers are equal. Codes are uniform; scales are such that a product of x keeps
x's size, so that activations stay finite through all layers and greedy answers can be compared.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from bench.engine.models import Matrix, Model, Module, Stack
from safetensors.torch import save_file

_SHARD_BYTES = 1 << 30
_FEW_BYTES = 1 << 28
"""A model of fewer bytes is written by this process, for which starting others would take longer."""
_WRITERS = 8
_DTYPE = torch.bfloat16
SYMMETRIC_WORD = 0x77777777
"""GPTQ stores the zero point of symmetric codes, 8, as 7."""
_RMS = {"symmetric": 4.61, "asymmetric": 6.52, "mxfp4": 2.93}
"""Root mean square of uniform codes: u - 8; u - z; the 16 numbers of e2m1."""


class Numbers(NamedTuple):
    """Values of a tensor: random bits (codes), ``value`` times a normal or a uniform (0.5 to 1.5) number, ``value``
    everywhere, the group of each column for groups of ``value``, random exponents of about ``value``, or ``given``."""

    kind: Literal["codes", "normal", "uniform", "constant", "groups", "exponents", "given"]
    value: float = 0.0
    given: tuple[int, ...] = ()


class Tensor(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    numbers: Numbers

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Packing:
    """Format of a checkpoint."""

    method: Literal["gptq", "awq", "ct", "mxfp4", "bf16"]
    group_size: int = 0
    fp8: bool = False
    """True if the engine quantizes activations to e4m3 for each token, as compressed-tensors' W4AFP8 wants."""

    @classmethod
    def parse(cls, text: str) -> Packing:
        """Return the packing that :meth:`__str__` names.

        Raises:
            ValueError: if there is none.
        """
        if text in ("mxfp4", "bf16"):
            return cls(text)  # type: ignore[arg-type]
        found = re.fullmatch(r"(gptq|awq|ct)-int4-g(32|64|128)(-fp8)?", text)
        if not found or (found[3] and found[1] != "ct"):
            raise ValueError(
                "format: wanted gptq-int4-g128, awq-int4-g128, ct-int4-g128, ct-int4-g128-fp8 (or g32, g64), mxfp4 or "
                f"bf16, got {text!r}"
            )
        return cls(found[1], int(found[2]), bool(found[3]))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.method}-int4-g{self.group_size}{'-fp8' * self.fp8}" if self.group_size else self.method

    def refusal(self, model: Model) -> str:
        """Return why there are no such checkpoints of a model, or the empty string."""
        if self.method == "bf16" or (self.method == "mxfp4") == model.stacked:
            return ""
        return f"format: {model.name} wants {'mxfp4' if model.stacked else 'a format of int4'}, got {self}"

    def config(self, model: Model) -> dict[str, Any] | None:
        """Return quantization_config of config.json; None for dense weights."""
        inner = [m for i in range(model.layers) for m in model.layer(i) if isinstance(m, Matrix)]
        dense = list(dict.fromkeys(m.name for m in inner if not m.quantized))
        if self.method == "bf16":
            return None
        if self.method == "mxfp4":
            ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
            return {"quant_method": "mxfp4", "modules_to_not_convert": ignored}
        if self.method == "gptq":
            quantized = [re.sub(r"experts\.\d+\.", "experts.0.", m.name) for m in inner if m.quantized]
            config = {"quant_method": "gptq", "bits": 4, "group_size": self.group_size, "desc_act": False, "sym": True}
            return {**config, "lm_head": False, "modules_in_block_to_quantize": [list(dict.fromkeys(quantized))]}
        if self.method == "awq":
            config = {"quant_method": "awq", "bits": 4, "group_size": self.group_size, "zero_point": True}
            return {**config, "version": "gemm", "modules_to_not_convert": ["lm_head", *dense]}
        return self._compressed_tensors(dense)

    def _compressed_tensors(self, dense: list[str]) -> dict[str, Any]:
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": self.group_size}
        weights |= {"dynamic": False, "observer": "minmax"}
        activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": weights, "output_activations": None, "format": "pack-quantized"}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head", *(f"re:.*{re.escape(name)}$" for name in dense)],
            "config_groups": {"group_0": {**group, "input_activations": activations if self.fp8 else None}},
        }

    def tensors(self, module: Module) -> Iterator[Tensor]:
        """Tensors of a module, as the format's producers name and shape them."""
        if isinstance(module, Stack):
            yield from _mxfp4(module)
        elif isinstance(module, Matrix):
            if module.bias:
                yield Tensor(f"{module.name}.bias", _DTYPE, (module.n,), Numbers("normal", 0.1))
            if module.quantized and self.group_size:
                named = {"gptq": _gptq, "awq": _awq, "ct": _compressed}
                yield from named[self.method](module, self.group_size)
            else:
                std = module.gain * module.k**-0.5
                yield Tensor(f"{module.name}.weight", _DTYPE, (module.n, module.k), Numbers("normal", std))
        else:
            dtype = getattr(torch, module.dtype) if module.dtype else _DTYPE
            numbers = Numbers("normal", module.std) if module.std else Numbers("constant", 1.0)
            yield Tensor(module.name, dtype, module.shape, numbers)


def _scale(module: Matrix, codes: str) -> Numbers:
    return Numbers("uniform", module.gain * module.k**-0.5 / _RMS[codes])


def _gptq(module: Matrix, group_size: int) -> Iterator[Tensor]:
    name, n, k = module.name, module.n, module.k
    yield Tensor(f"{name}.qweight", torch.int32, (k // 8, n), Numbers("codes"))
    yield Tensor(f"{name}.qzeros", torch.int32, (k // group_size, n // 8), Numbers("constant", SYMMETRIC_WORD))
    yield Tensor(f"{name}.scales", _DTYPE, (k // group_size, n), _scale(module, "symmetric"))
    yield Tensor(f"{name}.g_idx", torch.int32, (k,), Numbers("groups", group_size))


def _awq(module: Matrix, group_size: int) -> Iterator[Tensor]:
    name, n, k = module.name, module.n, module.k
    yield Tensor(f"{name}.qweight", torch.int32, (k, n // 8), Numbers("codes"))
    yield Tensor(f"{name}.qzeros", torch.int32, (k // group_size, n // 8), Numbers("codes"))
    yield Tensor(f"{name}.scales", _DTYPE, (k // group_size, n), _scale(module, "asymmetric"))


def _compressed(module: Matrix, group_size: int) -> Iterator[Tensor]:
    name, n, k = module.name, module.n, module.k
    yield Tensor(f"{name}.weight_packed", torch.int32, (n, k // 8), Numbers("codes"))
    yield Tensor(f"{name}.weight_scale", _DTYPE, (n, k // group_size), _scale(module, "symmetric"))
    yield Tensor(f"{name}.weight_shape", torch.int64, (2,), Numbers("given", given=(n, k)))


def _mxfp4(stack: Stack) -> Iterator[Tensor]:
    """gpt-oss's layout: blocks of 32 numbers along k, two a byte, with an e8m0 scale each."""
    shape = stack.experts, stack.n, stack.k // 32
    exponent = 127 + round(math.log2(stack.gain * stack.k**-0.5 / _RMS["mxfp4"]))
    yield Tensor(f"{stack.name}_blocks", torch.uint8, (*shape, 16), Numbers("codes"))
    yield Tensor(f"{stack.name}_scales", torch.uint8, shape, Numbers("exponents", exponent))
    yield Tensor(f"{stack.name}_bias", _DTYPE, shape[:2], Numbers("normal", 0.1))


# --- numbers and files ----------------------------------------------------------------------------------------------


def pack_words(numbers: torch.Tensor, dim: int, nibbles: Sequence[int] = range(8)) -> torch.Tensor:
    """Return int32 words of eight numbers 0 to 15 along ``dim`` each; the first goes into nibble ``nibbles[0]``, ..."""
    eights = numbers.movedim(dim, -1).to(torch.int64).unflatten(-1, (-1, 8))
    words = sum(eights[..., i] << 4 * nibble for i, nibble in enumerate(nibbles))
    assert isinstance(words, torch.Tensor)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


class Pool:
    """Random numbers to take tensors from. Lengths are prime, so that rows of a matrix begin at different ones."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._bytes = torch.from_numpy(np.frombuffer(rng.bytes(67108859), np.uint8).copy())
        self._normal = torch.from_numpy(rng.standard_normal(4194301, np.float32))
        self._uniform = torch.from_numpy(rng.uniform(0.5, 1.5, 4194301).astype(np.float32))
        self._exponents = torch.from_numpy(rng.integers(-1, 2, 4194301, np.int16))
        self._scaled: dict[tuple[Numbers, torch.dtype], torch.Tensor] = {}

    def fill(self, tensor: Tensor) -> torch.Tensor:
        """Return the numbers of a tensor."""
        kind, value, given = tensor.numbers
        count, start = math.prod(tensor.shape), zlib.crc32(tensor.name.encode())
        if kind == "codes":
            return _window(self._bytes, start, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        if kind == "constant":
            return torch.full(tensor.shape, value, dtype=tensor.dtype)
        if kind == "given":
            return torch.tensor(given, dtype=tensor.dtype)
        if kind == "groups":
            return (torch.arange(count) // int(value)).to(tensor.dtype)
        key = tensor.numbers, tensor.dtype
        if key not in self._scaled:
            if kind == "exponents":
                self._scaled[key] = (self._exponents + int(value)).to(tensor.dtype)
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
    found = [t for module in model.outer() for t in packing.tensors(module)]
    for index in range(model.layers):
        for module in model.layer(index):
            found += [t._replace(name=f"model.layers.{index}.{t.name}") for t in packing.tensors(module)]
    return found


def write(model: Model, packing: Packing, folder: Path) -> int:
    """Write config.json, a tokenizer of words t0, t1, ... and the weights, in shards.

    Returns:
        Bytes of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**model.config, "dtype": str(_DTYPE).removeprefix("torch.")}
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
