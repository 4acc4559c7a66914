"""A model and its tokenizer from a checkpoint: :func:`load`.

The quantized weights of a checkpoint are taken over losslessly, and never exist as a dense matrix here. Config and
tokenizer come from transformers; the tensors are placed here instead of by ``from_pretrained``, which has no place for
GGUF files' own weights. ``tests/test_transformers.py`` holds both ways to equal bits for GGUF files.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from w4gemm.api.packed_module import check_dtype
from w4gemm.checkpoints import Checkpoint, open_checkpoint
from w4gemm.checkpoints.account import Recipe, folder_model
from w4gemm.checkpoints.base import Renamed
from w4gemm.checkpoints.gguf.fields import quick_reader, tokenizer_of
from w4gemm.checkpoints.hugging_face import (
    AS_IT_IS,
    is_model,
    model_class,
    refuse_adapter,
    require_transformers,
    transformers_makes,
)
from w4gemm.core.errors import FormatError, device_here, require_progress
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device
from w4gemm.integrations.decoder import decode_by_graph
from w4gemm.integrations.transformers.awaited import finish
from w4gemm.integrations.transformers.layers import PROGRESS_ARGUMENTS, Progress
from w4gemm.integrations.transformers.places import Placement
from w4gemm.weights.weight import ACTIVATIONS

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
    """Load a causal language model, or one that reads images too, with its linear layers quantized, and its tokenizer.
    Nothing is downloaded.

    Args:
        path: a checkpoint of any format that :func:`w4gemm.checkpoints.open_checkpoint` knows: a GGUF file, a folder
            that holds one, or a Hugging Face folder with such a model, dense or quantized by any method of the table in
            docs/formats.md.
        device, dtype: where the model runs, and the dtype of its activations and dense parameters.
        format: for a dense model: what to quantize to; None for group 128, or the largest smaller group that divides
            a layer's k. A quantized checkpoint keeps its own formats.
        activations: "fp8" if every quantized layer quantizes x (W4A8); None for what the checkpoint says.
        progress: called after each tensor.

    Returns:
        The model, in evaluation mode, and the tokenizer. ``model.save_pretrained`` writes a folder that this function
        and ``from_pretrained`` read; it raises ValueError if a GGUF file has a rotary table that no config makes.

    Raises:
        FileNotFoundError: if nothing is at ``path``.
        FormatError: if it is damaged, holds no model, or one of an unknown architecture; if a parameter of the model
            has no tensor, or a tensor no parameter, before any number is read.
        TypeError, ValueError: for a device, dtype, format or progress that is none.
        ImportError: if transformers is not installed.
    """
    require_transformers()
    from w4gemm.integrations.transformers.quantizer import describe

    device = device_here(device)
    if device.type == "meta":
        raise ValueError("device: wanted one that holds numbers, such as cpu, got meta")
    check_dtype(dtype)
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations: wanted 'fp8' or None, got {activations!r}")
    require_progress(progress, PROGRESS_ARGUMENTS)
    checkpoint = open_checkpoint(path, format)
    refuse_adapter(checkpoint.path)
    model, tokenizer, alone = _empty_model(checkpoint, dtype)
    placement = Placement(model, _named(checkpoint, alone), Device.of(device), fp8=activations == "fp8")
    placement.log()
    unsaved = _fill(model, placement, device, activations, progress)
    with transformers_makes("model", checkpoint.path):
        model.tie_weights(missing_keys=placement.account.missing, recompute_mapping=False)
    describe(model).unsaved = tuple(unsaved)
    return decode_by_graph(model.to(device).eval()), tokenizer


def require_whole(checkpoint: Checkpoint) -> None:
    """Raise FormatError if a checkpoint lacks a part of its model, as :func:`load` does; for nothing of a kind of model
    that transformers does not know. A folder of a model without a head needs none. Tensors that only the code of an
    engine reads may be there."""
    folder, options, settings, file = checkpoint.pretrained()
    try:
        with transformers_makes("model", checkpoint.path), nullcontext() if file is None else quick_reader(file):
            model, alone = _model_of(_config(folder, options, settings), checkpoint, torch.float32)
    except FormatError:
        return
    own_class = partial(folder_model, folder) if not options else lambda: None
    device = Device.of(torch.device("cpu"))
    Placement(model, _named(checkpoint, alone), device, folder_model=own_class, strangers_refused=False)


class ParametersOnMeta(TorchFunctionMode):
    """``torch.empty``, which modules call for their parameters, allocates nothing; computed buffers are real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "meta"} if func is torch.empty else kwargs))


_PREFIX = "language_model."
"""Begin of the names of a language model inside another model, in Kimi-K2.5's folders and other ones of their time."""


class _Empty(NamedTuple):
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    alone: bool
    """False if this is the language model inside the checkpoint's larger model."""


def _empty_model(checkpoint: Checkpoint, dtype: torch.dtype) -> _Empty:
    """Return the checkpoint's model with parameters that hold nothing, and its tokenizer."""
    from transformers import GenerationConfig

    folder, options, settings, file = checkpoint.pretrained()
    with transformers_makes("model", checkpoint.path), nullcontext() if file is None else quick_reader(file):
        whole = _config(folder, options, settings)
        tokenizer = tokenizer_of(folder, {"config": whole, **AS_IT_IS, **options}, file)
        model, alone = _model_of(whole, checkpoint, dtype)
        # with options the config is one file's, and the generation config beside it may be another model's
        if not options and (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return _Empty(model, tokenizer, alone)


def _model_of(whole: PretrainedConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[PreTrainedModel, bool]:
    """Return the model of a config, and :attr:`_Empty.alone`. It is the language model inside a larger one if names of
    the checkpoint begin with :data:`_PREFIX`, and transformers makes no model of the larger one."""
    inside = any(name.startswith(_PREFIX) for name in (*checkpoint.modules, *checkpoint.tensors))
    alone = not inside or not hasattr(whole, "text_config") or is_model(whole)
    config = whole if alone else whole.get_text_config()
    with ParametersOnMeta():
        return model_class(config).from_config(config, dtype=dtype, trust_remote_code=False), alone


def _named(checkpoint: Checkpoint, alone: bool) -> Checkpoint:
    """Return a checkpoint by the names of the model that :func:`_model_of` has made."""
    if alone:
        return checkpoint
    inside = (name for name in (*checkpoint.modules, *checkpoint.tensors) if name.startswith(_PREFIX))
    return Renamed(checkpoint, {name.removeprefix(_PREFIX): name for name in inside})


def _config(folder: Path, options: Mapping[str, Any], settings: Mapping[str, Any]) -> PretrainedConfig:
    """The config of a :class:`Pretrained`. Where it names a model type that transformers does not know, but the class
    of a model that it does (Kimi-K2, a DeepSeek-V3), that class's."""
    config = _stated_config(folder, options)
    for key, value in settings.items():
        setattr(config, key, value)
    return config


def _stated_config(folder: Path, options: Mapping[str, Any]) -> PretrainedConfig:
    import transformers
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not options:
        stated, _ = PretrainedConfig.get_config_dict(folder, local_files_only=True)
        known = getattr(transformers, (stated.get("architectures") or [""])[0], None)
        if stated.get("model_type") not in CONFIG_MAPPING and known is not None:
            return known.config_class.from_pretrained(folder, local_files_only=True)
    return AutoConfig.from_pretrained(folder, **AS_IT_IS, **options)


def _fill(
    model: PreTrainedModel,
    placement: Placement,
    device: torch.device,
    activations: str | None,
    progress: Progress | None,
) -> list[str]:
    """Fill the quantized layers and dense parameters of a model, one at a time. Return the names of the buffers with
    numbers that the model does not make by itself, and does not save."""
    unsaved: list[str] = []
    steps: list[str | Recipe] = [*placement.packed, *placement.account.recipes]
    for done, step in enumerate(steps, 1):
        if isinstance(step, str):
            placement.fill(step, device, activations)
        else:
            for name, value in placement.values(step, device).items():
                module, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
                if leaf in module._non_persistent_buffers_set:
                    unsaved += [] if torch.equal(value, module._buffers[leaf].to(device)) else [name]
                setattr(module, leaf, nn.Parameter(value, requires_grad=False) if leaf in module._parameters else value)
        if progress is not None:
            progress(done, len(steps), "loading")
    finish(model)
    return unsaved
