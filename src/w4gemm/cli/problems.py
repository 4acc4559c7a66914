"""The layers that a command works on, from a model or as sizes, and the problems that they make."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable
from dataclasses import replace

import torch

from w4gemm.checkpoints import Module, open_checkpoint
from w4gemm.checkpoints.base import is_embedding
from w4gemm.console.errors import read_text
from w4gemm.console.options import listed_shapes
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.errors import FormatError
from w4gemm.core.format_names import LARGEST_SIZE
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.kernels import runs_on
from w4gemm.packing.layouts import layout_for

_FP8 = torch.float8_e4m3fn


def problems(
    layers: list[Module], tokens: list[int], device: Device, dtype: torch.dtype, batch_invariant: bool = False
) -> list[GemmProblem]:
    """Return a problem for each layer and number of tokens.

    Args:
        tokens: numbers of tokens; for a layer of experts, of each expert on average.
        dtype: dtype of the activations, except for layers that quantize them (``activations`` "fp8").
    """
    made = []
    for layer in layers:
        x = _FP8 if layer.activations == "fp8" else dtype
        # linear quantizes x with a scale for each token
        epilogue = Epilogue(bias=layer.bias, token_scale=x == _FP8)
        layout = layout_for(device, layer.format, x)
        sizes = [(m * max(1, layer.experts), layer.n, layer.k) for m in tokens]
        made += [
            GemmProblem(*size, x, layer.format, layout, epilogue, device, batch_invariant, layer.experts)
            for size in sizes
        ]
    return made


def parse_layers(args: argparse.Namespace, device: Device) -> list[Module]:
    """Return the layers of ``--model`` or ``--shapes``, each once; of a model those that stay packed on the device.

    Raises:
        FileNotFoundError, FormatError, ValueError: if they cannot be read.
    """
    format = WeightFormat() if args.format is None else WeightFormat.parse(args.format)
    if args.model is not None:
        modules = open_checkpoint(args.model, args.format).modules.items()
        linear = (m for name, m in modules if not is_embedding(name))
        layers = layers_of(m for m in linear if runs_on(device, m.format, m.n, m.k, m.experts))
    elif (shapes := listed_shapes(args.shapes)) is not None:
        sizes = [[_size(digits, "--shapes") for digits in shape] for shape in shapes]
        layers = [Module(n, k, format, experts=experts) for experts, n, k in sizes]
    else:
        layers = [
            _parse_line(line, f"{args.shapes}:{number}", format)
            for number, text in enumerate(read_text("--shapes", args.shapes).splitlines(), 1)
            if (line := text.partition("#")[0].strip())
        ]
    if not layers:
        raise FormatError(f"{args.model or args.shapes}: no layers that a kernel of the device takes")
    return list(dict.fromkeys(layers))


def embeddings_of(args: argparse.Namespace) -> list[Module]:
    """Return the embeddings of ``--model`` that a loaded model may keep packed, none of ``--shapes``."""
    if args.model is None:
        return []
    checkpoint = open_checkpoint(args.model, args.format)
    modules = {**checkpoint.modules, **getattr(checkpoint, "embeddings", {})}
    return [module for name, module in modules.items() if is_embedding(name)]


def layers_of(modules: Iterable[Module]) -> list[Module]:
    """Return modules of a checkpoint, equal if their products are."""
    return [replace(m, fused=(), pre_quant_scale=False, shared=False) for m in modules]


def _parse_line(line: str, where: str, format: WeightFormat) -> Module:
    words = line.split()
    bias = words[-1] == "bias"
    words = words[: len(words) - bias]
    sizes = [_size(word, where) for word in itertools.takewhile(str.isdecimal, words)]
    named = words[len(sizes) :]
    if len(sizes) not in (2, 3) or len(named) > 1 or 0 in sizes:
        raise FormatError(f"{where}: wanted [EXPERTS] N K [FORMAT] [bias], got {line!r}")
    experts, n, k = sizes if len(sizes) == 3 else (0, *sizes)
    return Module(n, k, WeightFormat.parse(named[0]) if named else format, bias, experts)


def _size(digits: str, where: str) -> int:
    # Python refuses to read thousands of digits, in words of its own
    if len(digits) > len(str(LARGEST_SIZE)) or int(digits) > LARGEST_SIZE:
        raise ValueError(f"{where}: wanted sizes of at most {LARGEST_SIZE}, got {digits:.40}")
    return int(digits)
