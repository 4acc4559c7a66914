"""A model and its tokenizer from a checkpoint: :func:`load`.

The 4-bit weights of a checkpoint are taken over losslessly, and never exist as a dense matrix here. Config and
tokenizer come from transformers; the tensors are placed here instead of by ``from_pretrained``, which has no place for
GGUF files' own weights. ``tests/test_transformers.py`` holds both ways to equal bits for GGUF files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from w4gemm.checkpoints.hugging_face import AS_IT_IS, is_model, model_class, transformers_errors
from w4gemm.checkpoints.text_part import PREFIX, TextPart
from w4gemm.core.errors import device_here
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations.decoder import decode_by_graph
from w4gemm.integrations.transformers.awaited import AwaitedLinear, finish
from w4gemm.integrations.transformers.layers import Progress, enable_peft
from w4gemm.integrations.transformers.places import Place, Placement

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
            has no tensor, or a tensor no parameter, before any number is read.
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
    filling = _Filling(model, checkpoint, device, activations)
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
    the checkpoint begin with :data:`PREFIX`, and transformers makes no model of the larger one."""
    inside = any(name.startswith(PREFIX) for name in (*checkpoint.modules, *checkpoint.tensors))
    alone = not inside or not hasattr(whole, "text_config") or is_model(whole)
    config = whole if alone else whole.get_text_config()
    with ParametersOnMeta():
        return model_class(config).from_config(config, dtype=dtype, trust_remote_code=False), alone


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
    activations: str | None = None
    """"fp8", or None for those of each weight."""
    unsaved: list[str] = field(default_factory=list)
    """Buffers with numbers of the checkpoint that the model does not make by itself, and does not save."""

    def run(self, progress: Progress | None) -> None:
        """Place every tensor: 4-bit weights as W4Linear, the others dense.

        Raises:
            FormatError: as from :class:`Placement`.
        """
        placement = Placement(self.model, self.checkpoint)
        recipes, total = placement.account.recipes, len(placement.packed) + len(placement.account.recipes)
        for done, (name, places) in enumerate(placement.packed.items(), 1):
            self.place_weight(name, places)
            if progress is not None:
                progress(done, total, "loading")
        for done, recipe in enumerate(recipes, len(placement.packed) + 1):
            for target, value in placement.values(recipe, self.device).items():
                self.place_dense(target, value)
            if progress is not None:
                progress(done, total, "loading")
        finish(self.model)
        self.model.tie_weights(missing_keys=placement.account.missing, recompute_mapping=False)

    def place_weight(self, name: str, places: Sequence[Place]) -> None:
        """Fill the places of a packed module with its weight, and with what belongs to several layers or experts."""
        weight, module = self.checkpoint.weight(name, self.device), self.checkpoint.modules[name]
        for place in places:
            layer = self.model.get_submodule(place.layer)
            assert isinstance(layer, AwaitedLinear)
            has_bias, w = layer.has_bias, place.weight_of(weight)
            layer.fill(w if self.activations is None else w.repack(activations=self.activations))
            if module.bias and has_bias and (module.experts or place.rows is not None):
                bias = finite_dense(self.checkpoint, f"{name}.bias", layer.dtype)
                rows = slice(None) if place.rows is None else place.rows
                layer.bias = nn.Parameter(bias[rows].to(self.device), requires_grad=False)
            if module.experts and module.pre_quant_scale:
                scale = self.checkpoint.dense(f"{name}.pre_quant_scale", layer.dtype)
                layer.pre_quant_scale = scale.to(self.device)

    def place_dense(self, name: str, value: torch.Tensor) -> None:
        """Put a dense tensor into a parameter or buffer of the model."""
        owner, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(owner)
        if leaf in module._non_persistent_buffers_set and not torch.equal(
            value, module._buffers[leaf].to(value.device)
        ):
            self.unsaved.append(name)
        setattr(module, leaf, nn.Parameter(value, requires_grad=False) if leaf in module._parameters else value)
