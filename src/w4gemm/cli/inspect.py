"""``w4gemm inspect``: what a checkpoint holds, in which formats, and what will run its layers."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from w4gemm import choice
from w4gemm.checkpoints import Checkpoint, Module, find_checkpoint, open_checkpoint
from w4gemm.checkpoints.base import is_embedding
from w4gemm.cli.problems import layers_of, problems
from w4gemm.console.devices import described_device, device_line
from w4gemm.console.progress import counted, progress_line
from w4gemm.console.values import chosen_dtype, parse_tokens
from w4gemm.core.files import lacks_weights
from w4gemm.core.format_names import USUAL_NAMES
from w4gemm.core.problem import Device
from w4gemm.integrations.generation import default_model
from w4gemm.kernels import runs_on
from w4gemm.kernels.helpers.embedding_rows import can_look_up
from w4gemm.packing.packed_shape import packed_shape


@dataclass(frozen=True)
class _Kind:
    """The layers of one line of the table. Only the numbers in their names differ."""

    name: str
    """Their common name, with ``*`` for each number."""
    module: Module

    @property
    def size(self) -> str:
        m = self.module
        return f"{m.experts} x {m.n} x {m.k}" if m.experts else f"{m.n} x {m.k}"

    @property
    def format(self) -> str:
        extra = [self.module.activations] if self.module.activations else []
        extra += ["x scaled"] if self.module.pre_quant_scale else []
        return " ".join((USUAL_NAMES.get(str(self.module.format), str(self.module.format)), *extra))


def run(args: argparse.Namespace) -> int:
    path = default_model() if args.path is None else args.path
    location = find_checkpoint(path)
    with progress_line() as line:
        line(0, 0, "reading the model")
        checkpoint = open_checkpoint(path, args.format)
    device = described_device(args.device)
    tokens, dtype = parse_tokens(args.m), chosen_dtype(args.dtype, device)
    kinds = Counter(_Kind(_starred(name), module) for name, module in checkpoint.modules.items())
    wide = max(dtype, torch.bfloat16, key=lambda d: d.itemsize)  # only quantized layers quantize x to fp8
    ran = {
        kind: _rows(kind.module, tokens, device, wide)
        if is_embedding(kind.name)
        else _runs(kind.module, tokens, device, dtype)
        for kind in kinds
    }
    if args.json:
        print(json.dumps(_facts(location.format.name, checkpoint, ran, device), indent=2))
        return 0
    packed = sum(_nbytes(module) for module in checkpoint.modules.values())
    embeddings = _packed_embeddings(checkpoint, device, wide)
    tensors = {name: shape for name, shape in checkpoint.tensors.items() if name not in embeddings}
    numbers = sum(math.prod(shape) for shape in tensors.values())
    matrices = Counter(
        (_starred(name), checkpoint.stored_type(name), shape) for name, shape in tensors.items() if len(shape) > 1
    )
    missing = ": a config.json without weights" * lacks_weights(checkpoint.path)
    print(f"{checkpoint.path}: {location.format.name}{missing}")
    print(
        f"{counted(len(checkpoint.modules), 'quantized module')}, {_size(packed)}; "
        f"{counted(len(tensors), 'dense tensor')}, {numbers:,} numbers"
    )
    print(device_line(device))
    runs = _columns([[ran[kind][m] for kind in kinds] for m in tokens])
    head = ("layers", "format", "n x k", "", "MiB", *(", ".join(f"m {tokens[i]}" for i in places) for places in runs))
    rows = [
        (
            kind.name,
            kind.format,
            kind.size,
            f"x {count}",
            f"{count * _nbytes(kind.module) / 2**20:.1f}",
            *(ran[kind][tokens[places[0]]] for places in runs),
        )
        for kind, count in kinds.items()
    ]
    _print_table(head, rows)
    if matrices:
        mib = wide.itemsize / 2**20
        dense = [
            (name, stored, " x ".join(map(str, shape)), f"x {count}", f"{count * math.prod(shape) * mib:.1f}")
            for (name, stored, shape), count in matrices.items()
        ]
        _print_table(("dense matrices", "stored as", "n x k", "", f"MiB in {8 * wide.itemsize} bits"), dense)
    for name, memory in embeddings.items():
        print(f"\n{name} stays packed: {memory}")
    if not missing:
        print(f"\n{_next_step(location.format.name, shlex.quote(str(path)))}")
    return 0


_SERVED = ("gptq", "awq", "auto-round", "compressed-tensors", "modelopt", "quark", "mxfp4", "fp8")
"""Formats of checkpoints that vLLM and SGLang load."""


def _next_step(format: str, path: str) -> str:
    """Return which commands run a checkpoint."""
    here = f"w4gemm generate PROMPT --model {path}"
    if format == "dense":
        return f"to serve it in 4 bits: w4gemm convert {path} OUTPUT, then vllm serve OUTPUT; to try it: {here}"
    return f"to serve it: vllm serve {path}; to try it: {here}" if format in _SERVED else f"to run it: {here}"


def _packed_embeddings(checkpoint: Checkpoint, device: Device, dtype: torch.dtype) -> dict[str, str]:
    """Return the memory of each embedding that a loaded model keeps packed, in words, by the name of its tensor, which
    other users of the checkpoint have dense."""
    embeddings, tied = {}, getattr(checkpoint, "tied", {})
    for name, module in getattr(checkpoint, "embeddings", {}).items():
        if can_look_up(device, dtype, module.format, module.k):
            head = tied.get(name)
            own = f"{module.format}, {module.n} x {module.k}, {_nbytes(module) / 2**20:.1f} MiB"
            embeddings[f"{name}.weight"] = f"it shares the weight of {head}" if head else own
    return embeddings


def _columns(columns: list[list[str]]) -> list[list[int]]:
    """Return the places of neighbouring columns that are equal, which are printed as one."""
    return [[i for i, _ in group] for _, group in itertools.groupby(enumerate(columns), key=lambda item: item[1])]


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    print()
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 10 * 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _starred(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _nbytes(module: Module) -> int:
    """Return the bytes of a module's weight in the canonical layout."""
    return packed_shape(module.format, "canonical", module.n, module.k, module.experts).nbytes


def _runs(module: Module, tokens: list[int], device: Device, dtype: torch.dtype) -> dict[int, str]:
    """Return ``kernel/config``, or why none runs, for each number of tokens (average of an expert)."""
    if not runs_on(device, module.format, module.n, module.k, module.experts):
        return dict.fromkeys(tokens, "dense: no kernel takes it")
    configs = {}
    for m, problem in zip(tokens, problems(layers_of([module]), tokens, device, dtype), strict=True):
        answer = choice.explain(problem)
        configs[m] = str(answer.chosen or "nothing: see w4gemm explain")
    return configs


def _rows(module: Module, tokens: list[int], device: Device, dtype: torch.dtype) -> dict[int, str]:
    """Return what becomes of an embedding's rows, for each number of tokens."""
    packed = can_look_up(device, dtype, module.format, module.k)
    return dict.fromkeys(tokens, "rows are looked up" if packed else "dense: no kernel looks up its rows")


def _facts(format: str, checkpoint: Checkpoint, ran: dict[_Kind, dict[int, str]], device: Device) -> dict[str, Any]:
    modules = {
        name: {
            "format": str(m.format),
            "n": m.n,
            "k": m.k,
            "experts": m.experts,
            "bias": m.bias,
            "activations": m.activations,
            "pre_quant_scale": m.pre_quant_scale,
            "fused": list(m.fused),
            "bytes": _nbytes(m),
            "runs": ran[_Kind(_starred(name), m)],
        }
        for name, m in checkpoint.modules.items()
    }
    tensors = {
        name: {"shape": list(shape), "stored": checkpoint.stored_type(name)}
        for name, shape in checkpoint.tensors.items()
    }
    return {
        "path": str(checkpoint.path),
        "checkpoint": format,
        "device": device_line(device),
        "modules": modules,
        "dense": tensors,
    }
