"""Hugging Face models with their linear layers behind :func:`w4gemm.linear`: :func:`load`.

A GGUF file's 4-bit tensors are taken over losslessly, and never exist as a dense matrix here. The config and the
tokenizer come from transformers' own GGUF support; the tensors are placed here instead of by ``from_pretrained``, which
would dequantize all of them first. ``tests/test_transformers.py`` holds both ways to equal bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from w4gemm.checkpoints import find_checkpoint
from w4gemm.checkpoints.gguf import GGUFCheckpoint
from w4gemm.errors import FormatError
from w4gemm.formats import WeightFormat
from w4gemm.nn import W4Linear

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Progress = Callable[[int, int, str], None]
"""Called as ``progress(done, total, what)``."""

DENSE = ("lm_head",)
"""Last parts of the names of layers that stay dense unless asked for."""

_PERMUTED = {"llama": {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}, "qwen2": {}, "qwen3": {}}
"""Architectures that can be loaded from GGUF, and the tensors whose rows llama.cpp reorders, with the number of heads.

llama.cpp pairs the two halves of each rotary head: row (head, half, i) is stored at (head, i, half).
"""


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
    progress: Progress | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model with its linear layers in 4 bits, and its tokenizer. Nothing is downloaded.

    Args:
        path: a GGUF file, a folder that holds one, or a folder with a dense Hugging Face model of the Llama family.
        device, dtype: where the model runs, and the dtype of its activations and dense parameters.
        format: for a dense model: what to quantize to; None for group 128, or the largest smaller group that divides
            a layer's k. A GGUF file keeps its own formats.
        progress: told about each tensor or layer.

    Returns:
        The model, in evaluation mode, and the tokenizer.

    Raises:
        FileNotFoundError: if nothing is at ``path``.
        FormatError: if it is damaged, holds no model, or one of an unknown architecture.
        TypeError, ValueError: for a dtype or a format that there is not.
    """
    device = torch.device(device)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype: wanted a floating-point torch.dtype, got {dtype!r}")
    format = None if format is None else WeightFormat.of(format)
    found = find_checkpoint(path)
    if found is not None:
        return _load_gguf(GGUFCheckpoint(found[1]), device, dtype, progress)
    return _load_dense(_with_config(path), device, dtype, format, progress)


def summarize(model: nn.Module) -> Summary:
    """Count the linear layers of a model."""
    int4 = [m for m in model.modules() if isinstance(m, W4Linear)]
    formats = Counter(str(m.format) for m in int4)
    dense = tuple(name for name, m in model.named_modules() if isinstance(m, nn.Linear))
    return Summary(dict(formats), sum(m.weight.nbytes for m in int4), dense)


def quantize_layers(
    model: nn.Module,
    format: WeightFormat | str | None = None,
    *,
    skip: tuple[str, ...] = DENSE,
    progress: Progress | None = None,
) -> nn.Module:
    """Replace the dense linear layers of a model by 4-bit ones, in place, one at a time.

    Args:
        format: see :func:`load`.
        skip: last parts of the names of layers that stay dense.
    """
    layers = _dense_layers(model, skip)
    for done, (name, layer) in enumerate(layers, 1):
        model.set_submodule(name, W4Linear.from_linear(layer, format or _default_format(layer.in_features)))
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


def linear_shapes(folder: str | Path) -> list[tuple[int, int, WeightFormat, bool]]:
    """(n, k, format, whether it has a bias) of every layer that :func:`load` puts into 4 bits, of a folder with a dense
    Hugging Face model; only its config.json is read.

    Raises:
        FormatError: if there is none.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(_with_config(folder), local_files_only=True)
        )
    layers = [layer for _, layer in _dense_layers(model, DENSE)]
    return [(m.out_features, m.in_features, _default_format(m.in_features), m.bias is not None) for m in layers]


def _with_config(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise FormatError(f"path: {str(path)!r} is neither a GGUF file nor a folder with a GGUF file or a config.json")
    return folder


def _dense_layers(model: nn.Module, skip: tuple[str, ...]) -> list[tuple[str, nn.Linear]]:
    """Those to put into 4 bits, with their names: all but where the last part of the name is one of ``skip``."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.split(".")[-1] not in skip]


def _default_format(k: int) -> WeightFormat:
    return WeightFormat(next((g for g in (128, 64) if k % g == 0), 32))


def _load_dense(
    folder: Path, device: torch.device, dtype: torch.dtype, format: WeightFormat | str | None, progress: Progress | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if scheme := getattr(config, "quantization_config", None):
        method = scheme.get("quant_method") if isinstance(scheme, dict) else scheme
        raise FormatError(
            f"path: {str(folder)!r} is quantized already ({method}), which cannot be loaded yet; wanted dense"
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    try:  # on the CPU first: then the device never holds the dense model
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, SafetensorError) as e:  # of a file that is missing, or cut short
        raise FormatError(f"path: {str(folder)!r} holds no whole model: {str(e).splitlines()[0]}") from e
    quantize_layers(model, format, progress=progress)
    return model.to(device).eval(), tokenizer


def _load_gguf(
    checkpoint: GGUFCheckpoint, device: torch.device, dtype: torch.dtype, progress: Progress | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    architecture = checkpoint.metadata.get("general.architecture")
    if architecture not in _PERMUTED:
        wanted = ", ".join(_PERMUTED)
        raise FormatError(f"{checkpoint.path}: architecture {architecture!r} cannot be loaded; wanted one of {wanted}")
    where: dict[str, Any] = {"gguf_file": checkpoint.path.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.path.parent, **where)
    config = AutoConfig.from_pretrained(checkpoint.path.parent, **where)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _fill(model, checkpoint, _gguf_names(model, architecture), device, dtype, progress)
    _restore_rotary(model, checkpoint, device)
    model.tie_weights()
    missing = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if missing:
        raise FormatError(f"{checkpoint.path}: no tensor for {', '.join(missing[:3])} ({len(missing)} missing)")
    return model.eval(), tokenizer


def _gguf_names(model: PreTrainedModel, architecture: str) -> dict[str, str]:
    """The name in the file of each parameter of the model."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(a for a, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(arch, model.config.num_hidden_layers)
    names = {}
    for parameter in model.state_dict():
        base, _, suffix = parameter.rpartition(".")
        if (name := table.get_name(base)) is not None:
            names[parameter] = f"{name}.{suffix}"
    return names


def _fill(
    model: PreTrainedModel,
    checkpoint: GGUFCheckpoint,
    names: dict[str, str],
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
) -> None:
    """Put every tensor of the file into the model: 4-bit ones as W4Linear, the others dense."""
    architecture = checkpoint.metadata["general.architecture"]
    for done, (parameter, name) in enumerate(names.items(), 1):
        if name not in checkpoint.tensors:
            continue  # tied, or reported as missing
        owner, _, leaf = parameter.rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(module, W4Linear):
            continue  # its bias, which came with its weight
        shape, wanted = checkpoint.tensors[name].shape, tuple(getattr(module, leaf).shape)
        if shape != wanted:
            raise FormatError(f"{checkpoint.path}: tensor {name!r} has shape {shape}, its config wants {wanted}")
        rows = _stored_rows(model.config, architecture, name, shape[0])
        if leaf == "weight" and isinstance(module, nn.Linear) and checkpoint.is_int4(name):
            bias = _bias(checkpoint, names.get(f"{owner}.bias"), rows, device, dtype)
            weight = checkpoint.weight(name, rows).to(device)
            model.set_submodule(owner, W4Linear.from_weight(weight, bias, dtype=dtype))
        else:
            tensor = checkpoint.dense(name, dtype)
            tensor = tensor if rows is None else tensor[rows]
            setattr(module, leaf, nn.Parameter(tensor.to(device), requires_grad=False))
        if progress is not None:
            progress(done, len(names), "loading")


def _bias(
    checkpoint: GGUFCheckpoint, name: str | None, rows: torch.Tensor | None, device: torch.device, dtype: torch.dtype
) -> torch.Tensor | None:
    if name is None or name not in checkpoint.tensors:
        return None
    bias = checkpoint.dense(name, dtype)
    return (bias if rows is None else bias[rows]).to(device)


def _stored_rows(config: PretrainedConfig, architecture: str, name: str, n: int) -> torch.Tensor | None:
    """Where the file keeps each row that the model wants, or None for the same order."""
    for part, heads in _PERMUTED[architecture].items():
        if f".{part}." in name:
            rows = torch.arange(n).view(getattr(config, heads), -1, 2)
            return rows.transpose(1, 2).reshape(n)
    return None


def _restore_rotary(model: PreTrainedModel, checkpoint: GGUFCheckpoint, device: torch.device) -> None:
    """Make the rotary tables, which no file holds; a Llama 3.1 file holds factors that stretch them."""
    for name, module in list(model.named_modules()):
        if any(b.is_meta for b in module.buffers(recurse=False)):
            fresh = type(module)(model.config).to(device)
            if "rope_freqs.weight" in checkpoint.tensors:
                factors = checkpoint.dense("rope_freqs.weight").to(device)
                fresh.inv_freq = fresh.inv_freq / factors
                fresh.original_inv_freq = fresh.inv_freq.clone()
            model.set_submodule(name, fresh)
