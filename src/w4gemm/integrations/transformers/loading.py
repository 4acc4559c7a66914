"""A model and its tokenizer from a checkpoint: :func:`load`.

The 4-bit weights of a checkpoint are taken over losslessly, and never exist as a dense matrix here. Config and
tokenizer come from transformers; the tensors are placed here instead of by ``from_pretrained``, which has no place for
GGUF files' own weights. ``tests/test_transformers.py`` holds both ways to equal bits for GGUF files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from w4gemm.checkpoints import Checkpoint, open_checkpoint
from w4gemm.checkpoints.base import finite_dense
from w4gemm.checkpoints.gguf_fields import quick_reader, tokenizer_of
from w4gemm.checkpoints.hugging_face import AS_IT_IS, is_language_model, is_model, model_class, transformers_errors
from w4gemm.checkpoints.text_part import PREFIX, TextPart
from w4gemm.core.errors import FormatError, device_here
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations.transformers.decoding import decode_by_graph
from w4gemm.integrations.transformers.layers import Progress, enable_peft
from w4gemm.integrations.transformers.names import Renaming, dtype_of, of_modules, unneeded
from w4gemm.integrations.transformers.places import AwaitedLinear, Place, finish, listed, reserve, submodule, unpacked

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def load(
    path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    format: WeightFormat | str | None = None,
    activations: str | None = None,
    progress: Progress | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, or one that reads images too, with its linear layers in 4 bits, and its tokenizer.
    Nothing is downloaded.

    Args:
        path: a checkpoint of any format that :func:`w4gemm.checkpoints.open_checkpoint` knows: a GGUF file, a folder
            that holds one, or a Hugging Face folder with such a model, dense or quantized by any method of the table in
            docs/formats.md.
        device, dtype: where the model runs, and the dtype of its activations and dense parameters.
        format: for a dense model: what to quantize to; None for group 128, or the largest smaller group that divides
            a layer's k. A checkpoint in 4 bits keeps its own formats.
        activations: "fp8" if every 4-bit layer quantizes x (W4A8); None for what the checkpoint says.
        progress: called after each tensor.

    Returns:
        The model, in evaluation mode, and the tokenizer. ``model.save_pretrained`` writes a folder that this function
        and ``from_pretrained`` read; it raises ValueError if a GGUF file has a rotary table that no config makes.

    Raises:
        FileNotFoundError: if nothing is at ``path``.
        FormatError: if it is damaged, holds no model, or one of an unknown architecture; if a parameter of the model
            has no tensor, or a tensor no parameter.
        TypeError, ValueError: for a dtype or a format that there is not.
    """
    from w4gemm.integrations.transformers.quantizer import describe

    device = device_here("device", device)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype: wanted a floating-point torch.dtype, got {dtype!r}")
    checkpoint = open_checkpoint(path, format)
    model, tokenizer, alone = _empty_model(checkpoint, dtype)
    if not alone:
        checkpoint = TextPart(checkpoint)
    filling = _Filling(model, checkpoint, device, dtype, activations)
    filling.run(progress)
    describe(model).unsaved = tuple(filling.unsaved)
    enable_peft()
    return decode_by_graph(model.to(device).eval()), tokenizer


class ParametersOnMeta(TorchFunctionMode):
    """``torch.empty``, of which modules make their parameters, allocates nothing; computed buffers are real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "meta"} if func is torch.empty else kwargs))


class _Empty(NamedTuple):
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    alone: bool
    """False if the checkpoint has a larger model, of which this one is the language model."""


def _empty_model(checkpoint: Checkpoint, dtype: torch.dtype) -> _Empty:
    """Return the checkpoint's model with parameters that hold nothing, and its tokenizer."""
    from transformers import GenerationConfig

    folder, options, settings = checkpoint.pretrained()
    with transformers_errors(checkpoint.path), quick_reader() if "gguf_file" in options else nullcontext():
        whole = _config(folder, options)
        for key, value in settings.items():
            setattr(whole, key, value)
        tokenizer = tokenizer_of(folder, {"config": whole, **AS_IT_IS, **options})
        model, alone = _model_of(whole, checkpoint, dtype)
        # with options the config is that of one file, beside which another model's generation config may lie
        if not options and (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return _Empty(model, tokenizer, alone)


def _model_of(whole: PretrainedConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[PreTrainedModel, bool]:
    """Return the model of a config, and :attr:`_Empty.alone`. It is the language model inside a larger one if names of
    the checkpoint begin with :data:`PREFIX`, and transformers makes no model of the larger one or would have to convert
    tensors of it, which :func:`load` does not (Kimi-K2.5's vision tower)."""

    def made(config: PretrainedConfig) -> PreTrainedModel:
        with ParametersOnMeta():
            return model_class(config).from_config(config, dtype=dtype, trust_remote_code=False)

    inside = any(name.startswith(PREFIX) for name in (*checkpoint.modules, *checkpoint.tensors))
    if not inside or not hasattr(whole, "text_config"):
        return made(whole), True
    text = whole.get_text_config()
    if is_model(whole):
        model = made(whole)
        renamed = Renaming(model)
        if not is_language_model(text) or not any(map(renamed.is_converted, checkpoint.tensors)):
            return model, True
    return made(text), False


def _config(folder: Path, options: Mapping[str, Any]) -> PretrainedConfig:
    """The config of a folder. Where it names a model type that transformers does not know, but the class of a model
    that it does (Kimi-K2, a DeepSeek-V3), that class's."""
    import transformers
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not options:
        stated, _ = PretrainedConfig.get_config_dict(folder, local_files_only=True)
        known = getattr(transformers, (stated.get("architectures") or [""])[0], None)
        if stated.get("model_type") not in CONFIG_MAPPING and known is not None:
            return known.config_class.from_pretrained(folder, local_files_only=True)
    return AutoConfig.from_pretrained(folder, **AS_IT_IS, **options)


@dataclass(frozen=True)
class _Filling:
    """Places a checkpoint's tensors, one at a time, in a model whose parameters hold nothing yet."""

    model: PreTrainedModel
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    activations: str | None = None
    """"fp8", or None for those of each weight."""
    unsaved: list[str] = field(default_factory=list)
    """Buffers with numbers of the checkpoint that the model does not make by itself, and does not save."""

    def run(self, progress: Progress | None) -> None:
        """Place every tensor: 4-bit weights as W4Linear, the others dense.

        Raises:
            FormatError: if a tensor has no place, a parameter has no tensor, or their shapes differ.
        """
        wanted = {name for name, _ in self.model.named_parameters()}  # one name of parameters that are tied
        wanted |= self.model.state_dict().keys() & {name for name, _ in self.model.named_buffers()}
        modules, tensors = self.checkpoint.modules, self.checkpoint.tensors
        renamed = Renaming(self.model)
        reserved = reserve(self.model, self.checkpoint, of_modules(self.checkpoint, renamed))
        ignored = unneeded(self.model)
        self._check_converted(renamed, ignored)
        placed: set[str] = set()
        strangers = []
        for done, name in enumerate((*modules, *tensors), 1):
            if name in placed:
                continue  # a bias, which came with its weight
            is_module = name in modules
            names = self.place_weight(name, reserved[name]) if is_module else self.place_dense(name, renamed(name))
            placed |= names
            if not names and not ignored(name):
                experts = modules[name].experts if is_module else 0
                strangers.append(f"{name} ({experts} experts)" if experts else name)
            if progress is not None:
                progress(done, len(modules) + len(tensors), "loading")
        finish(self.model)
        self.model.tie_weights()
        missing = sorted(wanted - placed)
        reasons = [f"no tensor for {listed(missing)}"] if missing else []
        reasons += [f"no place for {listed(strangers)} in the model of its config"] if strangers else []
        if reasons:
            raise FormatError(f"{self.checkpoint.path}: {'; '.join(reasons)}")

    def _check_converted(self, renamed: Renaming, ignored: Callable[[str], bool]) -> None:
        """Raise FormatError for a dense tensor of which transformers would make parameters by more than a new name."""
        for name in self.checkpoint.tensors:
            if renamed.is_converted(name) and renamed(name) in self.model.state_dict() and not ignored(name):
                raise FormatError(
                    f"{self.checkpoint.path}: {name} becomes a parameter only together with others, or in another "
                    "order, which transformers does: from_pretrained(..., quantization_config=W4GemmConfig())"
                )

    def place_weight(self, name: str, places: Sequence[Place]) -> set[str]:
        """Fill the places of a 4-bit module with its weight and its bias.

        Returns:
            Names of the parameters that have their numbers now, and of the bias in the checkpoint; none if the module
            has no place.
        """
        if not places:
            return set()
        weight, placed = self.checkpoint.weight(name, self.device), set()
        stored = f"{name}.bias"
        module, scale = self.checkpoint.modules[name], f"{name}.pre_quant_scale"
        bias = finite_dense(self.checkpoint, stored, self.dtype) if module.bias else None
        for place in places:
            w = place.weight_of(weight)
            if self.activations is not None:
                w = w.repack(activations=self.activations)
            layer = self.model.get_submodule(place.layer)
            has_bias = layer.has_bias if isinstance(layer, AwaitedLinear) else getattr(layer, "bias", None) is not None
            if isinstance(layer, AwaitedLinear):
                layer.fill(w)
            else:
                dtype = dtype_of(self.model, place.weight_name, layer.get_parameter("weight"))
                layer.weight = nn.Parameter(unpacked(layer, w, dtype), requires_grad=False)
            if bias is not None and has_bias:
                rows = slice(None) if place.rows is None else place.rows
                layer.bias = nn.Parameter(bias[rows].to(self.device), requires_grad=False)
            if module.experts and module.pre_quant_scale:  # that of a linear layer is placed as a dense tensor
                layer.pre_quant_scale = self.checkpoint.dense(scale, self.dtype).to(self.device)
                placed.add(scale)
            placed |= {place.weight_name} | (set() if bias is None else {place.bias_name, stored})
        return placed

    def place_dense(self, name: str, renamed: str) -> set[str]:
        """Put a dense tensor into the parameter or buffer that the model has by another name or the same; return that
        name, or none if there is none."""
        owner, _, leaf = renamed.rpartition(".")
        module, shape = submodule(self.model, owner), self.checkpoint.tensors[name]
        target = None if module is None else module._parameters.get(leaf, module._buffers.get(leaf))
        if module is None or target is None:
            return set()
        if tuple(target.shape) != shape:
            raise FormatError(
                f"{self.checkpoint.path}: tensor {name!r} has shape {shape}, its config wants {tuple(target.shape)}"
            )
        tensor = finite_dense(self.checkpoint, name, dtype_of(self.model, renamed, target)).to(self.device)
        if leaf in module._non_persistent_buffers_set and not torch.equal(tensor, target.to(tensor.device)):
            self.unsaved.append(renamed)
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False) if leaf in module._parameters else tensor)
        return {renamed}
