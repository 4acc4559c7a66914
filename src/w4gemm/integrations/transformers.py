"""Hugging Face models with their linear layers behind :func:`w4gemm.linear`: :func:`load`.

The 4-bit weights of a checkpoint are taken over losslessly, and never exist as a dense matrix here. Config and
tokenizer come from transformers; the tensors are placed here instead of by ``from_pretrained``, which would dequantize
all of them first. ``tests/test_transformers.py`` holds both ways to equal bits for GGUF files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from w4gemm.api.nn import W4Linear
from w4gemm.checkpoints import Checkpoint, Module, open_checkpoint
from w4gemm.checkpoints.dense import SKIP, default_format, linear_layers
from w4gemm.checkpoints.hugging_face import transformers_errors
from w4gemm.core.errors import FormatError
from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Progress = Callable[[int, int, str], None]
"""Called as ``progress(done, total, what)``."""


@dataclass(frozen=True)
class Summary:
    """Which linear layers of a model are in 4 bits."""

    formats: dict[str, int]
    """Number of 4-bit layers by format."""
    nbytes: int
    """Bytes of all packed weights."""
    dense: tuple[str, ...]
    """Names of the linear layers that stayed dense."""

    @property
    def int4(self) -> int:
        return sum(self.formats.values())

    def __str__(self) -> str:
        formats = ", ".join(f"{count} x {name}" for name, count in self.formats.items()) or "none"
        dense = f"; dense: {', '.join(self.dense[:3])}{', ...' if len(self.dense) > 3 else ''}" if self.dense else ""
        total = self.int4 + len(self.dense)
        return f"{self.int4} of {total} linear layers in 4 bits ({formats}, {self.nbytes / 2**20:.1f} MiB){dense}"


def load(
    path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    format: WeightFormat | str | None = None,
    activations: str | None = None,
    progress: Progress | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model with its linear layers in 4 bits, and its tokenizer. Nothing is downloaded.

    Args:
        path: a checkpoint of any format that :func:`w4gemm.checkpoints.open_checkpoint` knows: a GGUF file, a folder
            that holds one, or a Hugging Face folder with a causal language model that is dense or quantized by GPTQ,
            AWQ or compressed-tensors.
        device, dtype: where the model runs, and the dtype of its activations and dense parameters.
        format: for a dense model: what to quantize to; None for group 128, or the largest smaller group that divides
            a layer's k. A checkpoint in 4 bits keeps its own formats.
        activations: "fp8" if every 4-bit layer quantizes x (W4A8); None for what the checkpoint says.
        progress: called after each tensor.

    Returns:
        The model, in evaluation mode, and the tokenizer.

    Raises:
        FileNotFoundError: if nothing is at ``path``.
        FormatError: if it is damaged, holds no model, or one of an unknown architecture; if a parameter of the model
            has no tensor, or a tensor no parameter.
        TypeError, ValueError: for a dtype or a format that there is not.
    """
    device = torch.device(device)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype: wanted a floating-point torch.dtype, got {dtype!r}")
    checkpoint = open_checkpoint(path, format)
    model, tokenizer = _empty_model(checkpoint, dtype)
    _Filling(model, checkpoint, device, dtype, activations).run(progress)
    return model.to(device).eval(), tokenizer


def summarize(model: nn.Module) -> Summary:
    """Count the linear layers of a model, by format and dense ones."""
    int4 = [m for m in model.modules() if isinstance(m, W4Linear)]
    formats = Counter(str(m.format) for m in int4)
    dense = tuple(name for name, m in model.named_modules() if isinstance(m, nn.Linear))
    return Summary(dict(formats), sum(m.weight.nbytes for m in int4), dense)


def quantize_layers(
    model: nn.Module,
    format: WeightFormat | str | None = None,
    *,
    skip: tuple[str, ...] = SKIP,
    progress: Progress | None = None,
) -> nn.Module:
    """Replace the dense linear layers of a model by 4-bit ones, in place, one at a time.

    Args:
        format: see :func:`load`.
        skip: last parts of the names of layers that stay dense.
    """
    layers = linear_layers(model, skip)
    for done, (name, layer) in enumerate(layers.items(), 1):
        model.set_submodule(name, W4Linear.from_linear(layer, format or default_format(layer.in_features)))
        if progress is not None:
            progress(done, len(layers), "quantizing")
    return model


def dequantize_layers(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Replace the 4-bit linear layers of a model by dense ones with the same numbers, in place; for comparing."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, W4Linear):
            weight = layer.weight.dequantize(dtype)
            n, k = weight.shape
            dense = nn.Linear(k, n, bias=layer.bias is not None, device="meta")
            dense.weight = nn.Parameter(weight, requires_grad=False)
            if layer.bias is not None:
                dense.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
            model.set_submodule(name, dense)
    return model


class _ParametersOnMeta(TorchFunctionMode):
    """``torch.empty``, of which modules make their parameters, allocates nothing; computed buffers are real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "meta"} if func is torch.empty else kwargs))


def _empty_model(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the checkpoint's model with parameters that hold nothing, and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder, options = checkpoint.pretrained()
    with transformers_errors(checkpoint.path):
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, **options)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)
        with _ParametersOnMeta():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        # with options the config is that of one file, beside which another model's generation config may lie
        if not options and (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model, tokenizer


@dataclass(frozen=True)
class _Filling:
    """Places a checkpoint's tensors, one at a time, in a model whose parameters hold nothing yet."""

    model: PreTrainedModel
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    activations: str | None = None
    """"fp8", or None for those of each weight."""

    def run(self, progress: Progress | None) -> None:
        """Place every tensor: 4-bit weights as W4Linear, the others dense.

        Raises:
            FormatError: if a tensor has no place, a parameter has no tensor, or their shapes differ.
        """
        wanted = {name for name, _ in self.model.named_parameters()}  # one name of parameters that are tied
        wanted |= self.model.state_dict().keys() & {name for name, _ in self.model.named_buffers()}
        modules, tensors = self.checkpoint.modules, self.checkpoint.tensors
        placed: set[str] = set()
        strangers = []
        for done, name in enumerate((*modules, *tensors), 1):
            if name in placed:
                continue  # a bias, which came with its weight
            names = self.place_weight(name, modules[name]) if name in modules else self.place_dense(name)
            placed |= names
            if not names:
                experts = modules[name].experts if name in modules else 0
                strangers.append(f"{name} ({experts} experts)" if experts else name)
            if progress is not None:
                progress(done, len(modules) + len(tensors), "loading")
        self.model.tie_weights()
        missing = sorted(wanted - placed)
        reasons = [f"no tensor for {_listed(missing)}"] if missing else []
        reasons += [f"no place for {_listed(strangers)} in the model of its config"] if strangers else []
        if reasons:
            raise FormatError(f"{self.checkpoint.path}: {'; '.join(reasons)}")

    def place_weight(self, name: str, module: Module) -> set[str]:
        """Put the 4-bit weight and the bias of a module in the place of the dense layers that they belong to.

        Returns:
            Names of the parameters that have their numbers now, and of the bias in the checkpoint; none if the model
            has no such layers.
        """
        layers = self.layers_of(name, module)
        if not layers:
            return set()
        bias = self.bias_of(name, module, layers)
        weight, placed, start = self.checkpoint.weight(name), set(), 0
        for i, (target, layer) in enumerate(layers.items()):
            rows = slice(i, None, len(layers)) if module.interleaved else slice(start, start + layer.out_features)
            start += layer.out_features
            w = (_rows_of(weight, rows) if len(layers) > 1 else weight).to(self.device)
            if self.activations is not None:
                w = w.repack(activations=self.activations)
            b = None if bias is None else bias[rows].to(self.device)
            self.model.set_submodule(target, W4Linear.from_weight(w, b, dtype=self.dtype))
            placed |= {f"{target}.weight"} | ({f"{target}.bias", f"{name}.bias"} if module.bias else set())
        return placed

    def layers_of(self, name: str, module: Module) -> dict[str, nn.Linear]:
        """Linear layers of the model that a module is the weight of, by name: one, or those that are fused in it; none
        if the model has no such layers."""
        owner = name.rpartition(".")[0]
        names = [name] if self.module(name) is not None else [f"{owner}.{part}" for part in module.fused]
        layers = {n: layer for n in names if isinstance(layer := self.module(n), nn.Linear)}
        if module.experts or not layers or len(layers) < len(names):
            return {}
        sizes = [layer.out_features for layer in layers.values()]
        k = next(iter(layers.values())).in_features
        if (module.n, module.k) != (sum(sizes), k) or (module.interleaved and len(set(sizes)) > 1):
            raise FormatError(
                f"{self.checkpoint.path}: the weight of {name} has shape {(module.n, module.k)}, its config wants "
                f"({' + '.join(map(str, sizes))}, {k})"
            )
        embedding = getattr(self.model.get_input_embeddings(), "weight", None)
        if any(layer.weight is embedding for layer in layers.values()):
            raise FormatError(f"{self.checkpoint.path}: {name} is in 4 bits, but its config ties it to the embedding")
        return layers

    def bias_of(self, name: str, module: Module, layers: dict[str, nn.Linear]) -> torch.Tensor | None:
        """Bias (n) of a module in the dtype of the model; None if there is none, or if it is all zeros and no layer
        of the model has one: old GPTQ files have such a bias for every layer."""
        stored = f"{name}.bias"
        if others := [n for n, layer in layers.items() if (layer.bias is not None) != module.bias]:
            unused = stored in self.checkpoint.tensors and len(others) == len(layers)
            if unused and not self.checkpoint.dense(stored).any():
                return None
            has, wanted = ("a", "none") if module.bias else ("no", "one")
            raise FormatError(
                f"{self.checkpoint.path}: {name} has {has} bias, its config wants {wanted} of {_listed(others)}"
            )
        return self.checkpoint.dense(stored, self.dtype) if module.bias else None

    def place_dense(self, name: str) -> set[str]:
        """Put a dense tensor into the parameter or buffer of its name; return that name, or none if there is none."""
        owner, _, leaf = name.rpartition(".")
        module, shape = self.module(owner), self.checkpoint.tensors[name]
        target = None if module is None else module._parameters.get(leaf, module._buffers.get(leaf))
        if module is None or target is None:
            return set()
        if tuple(target.shape) != shape:
            raise FormatError(
                f"{self.checkpoint.path}: tensor {name!r} has shape {shape}, its config wants {tuple(target.shape)}"
            )
        tensor = self.checkpoint.dense(name, target.dtype).to(self.device)
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False) if leaf in module._parameters else tensor)
        return {name}

    def module(self, name: str) -> nn.Module | None:
        """A module of the model, or None if there is none of this name."""
        try:
            return self.model.get_submodule(name)
        except AttributeError:
            return None


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{f', ... ({len(names)} in all)' if len(names) > 3 else ''}"


def _rows_of(w: QuantizedWeight, rows: slice) -> QuantizedWeight:
    """Some rows (output features) of a weight in the canonical layout, where every tensor has a row for each."""
    tensors = tuple(t[rows].clone(memory_format=torch.contiguous_format) for t in w.tensors)
    return replace(w, n=len(tensors[0]), tensors=tensors)
