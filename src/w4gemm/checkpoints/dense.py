"""Folders with a dense Hugging Face model: each weight is quantized when it is asked for."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from w4gemm.checkpoints.account import Account, Naming, Stored
from w4gemm.checkpoints.base import CheckpointFormat, Module, Pack, Pretrained
from w4gemm.checkpoints.hugging_face import (
    AS_IT_IS,
    FILES,
    SafetensorsFolder,
    model_class,
    outline,
    part_tied,
    quantization_config,
    read_header,
    transformers_makes,
)
from w4gemm.checkpoints.model_experts import DenseProduct, dense_products
from w4gemm.checkpoints.numbers import Numbers, WeightNumbers
from w4gemm.checkpoints.stored import is_packed
from w4gemm.core.errors import FormatError, require_among
from w4gemm.core.formats import WeightFormat
from w4gemm.core.words import listed
from w4gemm.weights.quantize import quantize
from w4gemm.weights.weight import QuantizedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SKIP = ("lm_head",)
"""Names of the layers that stay dense unless asked for. This one is that of a language model's head, whatever it is
called in the model."""
_PLAIN = ("FalconLinear",)
"""Subclasses of nn.Linear with a forward of their own that computes the same."""
_MULTIPLIED_BY_MODEL = {
    "dt_proj": "MambaMixer",
    "classifier": "LongcatFlashTopkRouter",
    "output": "RwkvSelfAttention",
    "value": "RwkvFeedForward",
    "decoder": "MobileBertLMPredictionHead",
}
"""Layers whose weight, a tensor, a model multiplies or rescales by itself: the last part of their name, and the end of
the name of their owner's class."""
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names in configs of the number of experts."""
_OLD_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files in which AutoGPTQ and AutoAWQ said at first how a model is quantized, and the method that they mean."""


def default_format(k: int) -> WeightFormat:
    """Format that a dense weight (n, k) is quantized to unless another is named: groups of 128, or of the larger of 64
    and 32 that divides k (32 if none does)."""
    return WeightFormat(next((g for g in (128, 64) if k % g == 0), 32))


def checked_skip(skip: Iterable[str]) -> tuple[str, ...]:
    """Return names of layers that stay dense as a tuple.

    Raises:
        TypeError: for a string, which would be the names of its letters, and for what holds no names.
        ValueError: for a name that is no regular expression, or an empty one.
    """
    names = tuple(skip) if isinstance(skip, Iterable) and not isinstance(skip, str) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"skip: wanted names of layers, such as ('lm_head',), got {skip!r:.80}")
    for name in names:
        try:
            re.compile(name or "(")
        except re.error as e:
            raise ValueError(f"skip: wanted names or regular expressions of layers, got {name!r}") from e
    return names  # type: ignore[return-value]


def is_skipped(name: str, skip: Iterable[str]) -> bool:
    """True if ``skip`` has the name of a module, of one that it is inside, or last parts of either: "model.layers.0",
    "mlp" and "mlp.down_proj" of "model.layers.0.mlp.down_proj". Each may be a regular expression of whole parts, as in
    transformers' ``modules_to_not_convert``."""
    return any(re.fullmatch(rf"(?:.+\.)?(?:{one})(?:(?:(?<=\.)|\.).+)?", name) for one in skip)


def linear_layers(model: nn.Module, skip: tuple[str, ...] = SKIP) -> dict[str, nn.Linear]:
    """Dense linear layers by name. Left out are those that ``skip`` names; those whose weight the model reads, such as
    the output projection of nn.MultiheadAttention and Mamba's dt_proj; and those with a forward of their own, or of
    their subclass, such as the routers of some mixtures."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
        and not is_skipped(name, skip)
        and not isinstance(layer, NonDynamicallyQuantizableLinear)
        and not _is_multiplied_by_model(model, name)
        and _multiplies_alone(layer)
    }


def _multiplies_alone(layer: nn.Linear) -> bool:
    """True if a layer's forward is nn.Linear's."""
    forward = type(layer).forward
    return not has_forward_set(layer) and (forward is nn.Linear.forward or type(layer).__name__ in _PLAIN)


def has_forward_set(module: nn.Module) -> bool:
    """True if a module has another forward than its class, also where a hook of accelerate's stands in front of it."""
    set_on_it = module.__dict__.get("_old_forward" if hasattr(module, "_hf_hook") else "forward")
    return set_on_it is not None and getattr(set_on_it, "__func__", None) is not type(module).forward


def _is_multiplied_by_model(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    owner_class = type(model.get_submodule(owner)).__name__
    return leaf in _MULTIPLIED_BY_MODEL and owner_class.endswith(_MULTIPLIED_BY_MODEL[leaf])


def layers_to_quantize(model: nn.Module, skip: tuple[str, ...] = SKIP) -> dict[str, nn.Linear]:
    """Return those of :func:`linear_layers` that a dense model is quantized in: without routers, which decide more
    than they compute, and without heads of a task, such as a classifier: both lose more in 4 bits than they save; and
    without what its class keeps in float32. A language model's head is left out, whatever its name, if ``skip`` has
    "lm_head", or if the model computes something else once it is not tied to the embedding. Of a model that reads
    images or sounds too, they are the language model's."""
    config = getattr(model, "config", None)
    layers = {name: layer for name, layer in linear_layers(model, skip).items() if not _is_router(name, layer, config)}
    if not hasattr(model, "base_model"):
        return layers
    pretrained: Any = model
    language = pretrained.get_decoder() if hasattr(config, "text_config") else pretrained.base_model
    head = pretrained.get_output_embeddings()
    inside = {id(module) for module in (*language.modules(), head)}
    if set(SKIP) <= set(skip) or _has_to_be_tied(pretrained):
        inside.remove(id(head))
    in_float32 = [re.escape(name) for name in pretrained._keep_in_fp32_modules or ()]
    return {name: layer for name, layer in layers.items() if id(layer) in inside and not is_skipped(name, in_float32)}


def _has_to_be_tied(model: PreTrainedModel) -> bool:
    """True for a model whose head gets its input scaled if the config ties it (Switch Transformers, UDOP)."""
    forward = inspect.unwrap(type(model).forward)
    return getattr(model.config, "tie_word_embeddings", False) and "tie_word_embeddings" in forward.__code__.co_names


def _is_router(name: str, layer: nn.Linear, config: Any) -> bool:
    """True for a layer that says which experts a token has, or how much of the shared ones."""
    parts, text = name.split("."), getattr(config, "text_config", config)
    counts = {getattr(text, count, None) for count in _EXPERT_COUNTS}
    return parts[-1] == "shared_expert_gate" or (
        layer.out_features in counts and not {"gate", "router"}.isdisjoint(parts)
    )


class DenseCheckpoint:
    """A folder with a dense model as a :class:`w4gemm.checkpoints.base.Checkpoint`.

    Its modules are known from config.json alone. Tensors in safetensors are read one at a time, and renamed and merged
    by transformers' rules; transformers reads pickled ones, all when the first is asked for. Experts are modules too,
    all of a layer's together.

    Args:
        format: what to quantize to; None for :func:`default_format`.

    Attributes:
        search: as for :func:`w4gemm.quantize`.
        device: where weights are quantized.

    Raises:
        FormatError: as :func:`check_dense`, and if the folder lacks a file that its index of tensors names.
    """

    def __init__(self, path: Path, format: WeightFormat | None = None) -> None:
        check_dense(path)
        self.path, self._format = path, format
        self.search, self.device = False, torch.device("cpu")
        _ = self._safetensors  # a shard that is missing is named now, not when its first tensor is asked for

    @functools.cached_property
    def modules(self) -> dict[str, Module]:
        layers = layers_to_quantize(self._outline)
        linear = {
            name: Module(
                m.out_features, m.in_features, self._format or default_format(m.in_features), m.bias is not None
            )
            for name, m in layers.items()
        }
        products = self._products.items()
        return linear | {name: p.module(self._format, default_format(p.sizes[2])) for name, p in products}

    @functools.cached_property
    def _products(self) -> dict[str, DenseProduct]:
        return dense_products(self._outline)

    @functools.cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        kept = self._outline.state_dict().keys()  # without buffers that no file holds
        outline = dict(self._outline.named_parameters()) | dict(self._outline.named_buffers())
        weights = {name if module.experts else f"{name}.weight" for name, module in self.modules.items()}
        renamed: dict[str, str] = {f"{name}_bias": f"{name}.bias" for name in self._products}
        names = [name for name in outline if name in kept and name not in weights]
        return {renamed.get(name, name): tuple(outline[name].shape) for name in names}

    def stored_type(self, name: str) -> str:
        require_among(self.path, "tensor", name, self.tensors)
        stored = None if self._safetensors is None else self._safetensors.tensors.get(name)
        return "" if stored is None else stored.dtype  # "": transformers reads it by another name

    @functools.cached_property
    def _safetensors(self) -> SafetensorsFolder | None:
        return SafetensorsFolder(self.path) if any((self.path / file).is_file() for file in FILES) else None

    def weight(self, name: str, device: torch.device | str = "cpu", pack: Pack = Numbers.weight) -> QuantizedWeight:
        require_among(self.path, "linear layer", name, self.modules)
        product = self._products.get(name)
        if product is None:
            w = self._quantized(name, self._read(f"{name}.weight"), device)
        else:
            each = (self._quantized(name, weight, device) for weight in product.weights(self._read(name)))
            w = QuantizedWeight.stack(each, product.shape[0], "canonical")
        return pack(WeightNumbers(w), None)

    def _quantized(self, name: str, weight: torch.Tensor, device: torch.device | str) -> QuantizedWeight:
        return quantize(weight.to(self.device), self.modules[name].format, search=self.search).to(device)

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        require_among(self.path, "tensor", name, self.tensors)
        product = self._products.get(name.removesuffix(".bias"))
        if product is not None:
            return product.biases(self._read(f"{product.name}_bias")).to(dtype)
        t = self._read(name)
        return t.to(dtype) if t.is_floating_point() else t

    def pretrained(self) -> Pretrained:
        return Pretrained(self.path)

    @functools.cached_property
    def _outline(self) -> PreTrainedModel:
        """The model without numbers. Of parameters that its config ties, each is one of its own for which the folder
        has other numbers, as in transformers."""
        model = outline(self.path)
        if (stored := self._safetensors) is not None and model.all_tied_weights_keys:
            naming = Naming(model)
            names = {naming(name): name for name in stored.tensors}
            for target, source in [*model.all_tied_weights_keys.items()]:
                both = [stored.tensor(names[name]) for name in (target, source) if name in names]
                if len(both) == 2 and not (both[0].dtype == both[1].dtype and torch.equal(*both)):
                    part_tied(model, target)
        return model

    @functools.cached_property
    def _read(self) -> Callable[[str], torch.Tensor]:
        """Reader of a parameter by its name in the model, in the dtype that it is stored in.

        Raises:
            FormatError: if the folder's tensors are not those of the model.
        """
        if (stored := self._safetensors) is None:
            whole = dense_model(self.path)
            for target in self._outline.all_tied_weights_keys.keys() - whole.all_tied_weights_keys.keys():
                source = self._outline.all_tied_weights_keys[target]
                raise FormatError(
                    f"{self.path}: {target} and {source} differ, but config.json ties them; wanted "
                    '"tie_word_embeddings": false, which keeps both'
                )
            return whole.state_dict().__getitem__
        model = self._outline
        known = {name: Stored(info.shape, info.dtype) for name, info in stored.tensors.items()}
        account = Account(self.path, model, Naming(model), known)
        recipes = {target: recipe for recipe in account.recipes for target in recipe.targets}

        def read(name: str) -> torch.Tensor:
            here = name if name in recipes else next(n for n in account.tied_to(name) if n in recipes)
            return recipes[here].values(model, stored.tensor)[here]

        return read


def dense_model(folder: Path, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """Return transformers' model of a dense folder.

    Raises:
        FormatError: if a file is missing or cut short, or the folder lacks a tensor, which transformers would draw at
            random.
    """
    with transformers_makes("model", folder):
        from transformers import AutoConfig

        model: PreTrainedModel
        maker = model_class(AutoConfig.from_pretrained(folder, **AS_IT_IS))
        try:
            model, info = maker.from_pretrained(folder, dtype=dtype, output_loading_info=True, **AS_IT_IS)
        except (OSError, SafetensorError) as e:  # a file that is missing, or cut short
            raise FormatError(f"path: {str(folder)!r} holds no whole model: {str(e).splitlines()[0]}") from e
    if missing := sorted(info["missing_keys"]):
        raise FormatError(f"{folder}: holds no whole model: no tensors {listed(missing)}{_hint(folder)}")
    return model


def _hint(folder: Path) -> str:
    """Return the end of a message about a folder that is no whole dense model: what its config.json lacks, if one of
    ``_OLD_CONFIGS`` says that it is a quantized one."""
    for file, method in _OLD_CONFIGS.items():
        if (folder / file).is_file():
            return (
                f"; its {file} is of a quantized model, which config.json has to say: add the contents of that file as "
                f'quantization_config, with "quant_method": "{method}"'
            )
    return ""


def check_dense(folder: Path) -> None:
    """Raise FormatError for a folder with a quantized model, of which config.json does not say so. Its files may have
    any names: AutoGPTQ's and AutoAWQ's own are not model.safetensors."""
    for file in sorted(folder.glob("*.safetensors")):
        for name, info in read_header(file).items():
            if is_packed(name, info.dtype):
                lacks = _hint(folder) or ": config.json lacks a quantization_config, which says what they mean"
                raise FormatError(
                    f"{folder}: its weights are packed, {name} for example ({info.dtype}), which no dense model's "
                    f"are{lacks}"
                )


def _find(path: Path) -> Path | None:
    return path if (path / "config.json").is_file() and quantization_config(path) is None else None


FORMAT = CheckpointFormat("dense", "a folder with a dense Hugging Face model (config.json)", _find, DenseCheckpoint)
