"""The linear layers of a model: counted, quantized, and made dense again."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from w4gemm.api.experts import W4Experts, W4GroupedLinear
from w4gemm.api.nn import W4Embedding, W4Linear
from w4gemm.api.packed_module import PackedModule
from w4gemm.checkpoints.dense import (
    SKIP,
    checked_skip,
    default_format,
    has_forward_set,
    is_skipped,
    layers_to_quantize,
)
from w4gemm.checkpoints.model_experts import DenseProduct, activation_of, are_experts, dense_experts, of_llama_4
from w4gemm.core.activation import parse
from w4gemm.core.errors import kind_of
from w4gemm.core.formats import WeightFormat
from w4gemm.core.words import listed, nearest
from w4gemm.weights.quantize import quantize
from w4gemm.weights.weight import QuantizedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("w4gemm")
Progress = Callable[[int, int, str], None]
"""Called as ``progress(done, total, what)``."""
Products = Mapping[str, DenseProduct]
"""The products of dense experts by the names of their parameters; empty for :class:`DenseExperts`."""


@dataclass(frozen=True)
class Summary:
    """Which linear layers of a model are quantized."""

    formats: dict[str, int]
    """Number of quantized layers by format."""
    nbytes: int
    """Bytes of all packed weights."""
    dense: tuple[str, ...]
    """Names of the linear layers that stayed dense."""

    @property
    def quantized(self) -> int:
        """Number of quantized layers."""
        return sum(self.formats.values())

    def __str__(self) -> str:
        formats = ", ".join(f"{count} x {name}" for name, count in self.formats.items()) or "none"
        dense = f"; dense: {listed(self.dense)}" if self.dense else ""
        total = self.quantized + len(self.dense)
        return f"{self.quantized} of {total} linear layers quantized ({formats}, {self.nbytes / 2**20:.1f} MiB){dense}"


def summarize(model: nn.Module) -> Summary:
    """Count the linear layers of a model, by format and dense ones."""
    packed = [m for m in model.modules() if isinstance(m, PackedModule)]
    formats = Counter(str(m.format) for m in packed if not isinstance(m, W4Embedding))
    dense = tuple(name for name, m in model.named_modules() if isinstance(m, nn.Linear))
    return Summary(dict(formats), sum(m.weight.nbytes for m in packed), dense)


def quantize_layers(
    model: nn.Module,
    format: WeightFormat | str | None = None,
    *,
    search: bool = False,
    skip: tuple[str, ...] = SKIP,
    progress: Progress | None = None,
) -> nn.Module:
    """Replace the dense linear layers of a model by quantized ones, in place, one at a time. A layer with a forward of
    its own, set on it or by a subclass of torch.nn.Linear, stays dense, because a quantized one would not compute what
    that does. Hooks of a layer and its training mode are its successor's. A weight that PyTorch prunes or normalizes
    before each call is quantized as the next call would have it.

    Of a model that reads images or sounds too, the layers of the language model are meant. Experts of transformers'
    mixtures, and those that :func:`dequantize_layers` made, become :class:`w4gemm.W4Experts`. Experts stay dense, with
    a warning, if it does not compute them, if a forward is set on them, or if the model is split over processes.

    Args:
        format: see :func:`load`.
        search: as for :func:`w4gemm.quantize`.
        skip: names of layers and experts that stay dense, or of modules that they are in: whole ("model.layers.0"),
            last parts ("down_proj", "mlp.down_proj"), or regular expressions of these. Each has to be one of some layer
            or experts, except "lm_head". Experts stay dense as a whole if it names them ("experts") or a product
            ("down_proj").
        progress: called as ``progress(layers done, layers, "quantizing")``.

    Returns:
        The model itself.

    Raises:
        TypeError, ValueError: for a model, format or ``skip`` that is none, for a name in ``skip`` that nothing has,
            for a model without a layer to quantize or with PEFT's adapters, and for a weight that is not finite or too
            large, naming its layer; layers before it are quantized then.
    """
    names, skip = names_of(model), checked_skip(skip)
    _refuse_adapters(model)
    one_format = None if format is None else WeightFormat.of(format)
    layers, experts = to_quantize(model, skip)
    total = len(layers) + len(experts)
    if not total:
        raise ValueError(f"model: wanted one with dense linear layers to quantize, got {summarize(model)}")
    for done, name in enumerate([*layers], 1):  # nothing else holds a layer then, so that its memory is free
        layer = layers.pop(name)
        _compute_weight(layer)
        try:
            made = W4Linear.from_linear(layer, one_format or default_format(layer.in_features), search)
        except (TypeError, ValueError) as e:
            raise type(e)(f"{name}: {e}") from e
        _hand_over(layer, made)
        for place in names.pop(layer):
            model.set_submodule(place, made)
        if progress is not None:
            progress(done, total, "quantizing")
    for done, (name, products) in enumerate(experts.items(), total - len(experts) + 1):
        _quantize_experts(model, names.pop(model.get_submodule(name)), products, one_format, search)
        if progress is not None:
            progress(done, total, "quantizing")
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # else PyTorch's fused operator reads the weights of its layers
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # of tokens behind a mask of padding
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        from w4gemm.integrations.transformers.quantizer import refuse_to_save_undescribed

        refuse_to_save_undescribed(model)
    return model


def _quantize_experts(
    model: nn.Module, places: list[str], products: Products, format: WeightFormat | None, search: bool
) -> None:
    """Replace dense experts, by all of their names, by quantized ones."""
    from w4gemm.integrations.transformers.awaited import AwaitedDenseExperts, finish, put_experts

    experts = model.get_submodule(places[0])
    if isinstance(experts, DenseExperts):
        again = experts.quantized(format, search)
        _hand_over(experts, again)
        for place in places:
            model.set_submodule(place, again)
        return
    made = AwaitedDenseExperts(experts, getattr(model, "config", None), products, format)
    for leaf in products:
        try:
            made.take(leaf, experts.get_parameter(leaf).detach(), search)
        except ValueError as e:
            raise ValueError(f"{places[0]}.{leaf}: {e}") from e
    made.fill(None)
    _hand_over(experts, made)
    for place in places:
        put_experts(model, place, made)
    finish(made)


def to_quantize(model: nn.Module, skip: tuple[str, ...]) -> tuple[dict[str, nn.Linear], dict[str, Products]]:
    """Return the layers and experts of a dense model that are to be quantized. Say which experts stay dense, although
    ``skip`` does not name them.

    Raises:
        ValueError: for a name in ``skip`` that neither a linear layer nor experts have, unless it is one of
            :data:`SKIP`.
    """
    computed: dict[str, Products] = {**dense_experts(model)}
    computed |= {name: {} for name, module in model.named_modules() if isinstance(module, DenseExperts)}
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    experts: dict[str, Products] = {}
    stay = []
    for name, module in model.named_modules():
        if name not in computed and not are_experts(module):
            continue
        own = {name, *(f"{name}.{leaf}" for leaf in module._parameters)}
        names |= own
        if any(is_skipped(one, skip) for one in own):
            continue
        if name in computed and not has_forward_set(module):
            experts[name] = computed[name]
        else:
            stay.append(name)
    if wrong := [one for one in skip if one not in SKIP and not any(is_skipped(name, [one]) for name in names)]:
        parts = {name.rpartition(".")[2] for name in names}
        close = nearest(wrong[0].rpartition(".")[2], parts) or (f"; there are {listed(sorted(parts))}" if parts else "")
        raise ValueError(f"skip: wanted names of the model's linear layers and experts, got {wrong[0]!r}{close}")
    if stay:
        said = "%s: experts stay dense: w4gemm has no layer that computes the same, or they are split: %s"
        _log.warning(said, getattr(model, "name_or_path", "") or type(model).__name__, listed(stay))
    return layers_to_quantize(model, skip), experts


def _refuse_adapters(model: nn.Module) -> None:
    """Raise ValueError for a model that PEFT has wrapped: its adapters are linear layers too, and would be frozen."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, tuners.BaseTunerLayer):
            raise ValueError(
                f"model: wanted one without adapters, got PEFT's at {name!r}; quantize first and add adapters then, "
                "or merge them into their layers before (merge_and_unload)"
            )


_WEIGHT_HOOKS = (BasePruningMethod, WeightNorm, SpectralNorm)
"""PyTorch's hooks that compute a layer's weight from other tensors before each call."""


def _compute_weight(layer: nn.Module) -> None:
    """Run these hooks: since the last call the tensors may have changed."""
    with torch.no_grad():
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, _WEIGHT_HOOKS):
                hook(layer, ())


def _hand_over(layer: nn.Module, made: nn.Module) -> None:
    """Give a layer's hooks, but those that compute its weight, and its training mode to what takes its place."""
    for key, pre_hook in layer._forward_pre_hooks.items():
        if isinstance(pre_hook, _WEIGHT_HOOKS):
            continue
        made.register_forward_pre_hook(pre_hook, with_kwargs=key in layer._forward_pre_hooks_with_kwargs)
    for key, hook in layer._forward_hooks.items():
        made.register_forward_hook(
            hook,
            with_kwargs=key in layer._forward_hooks_with_kwargs,
            always_call=key in layer._forward_hooks_always_called,
        )
    for backward_pre_hook in layer._backward_pre_hooks.values():
        made.register_full_backward_pre_hook(backward_pre_hook)
    for backward_hook in layer._backward_hooks.values():
        is_full = layer._is_full_backward_hook
        (made.register_full_backward_hook if is_full else made.register_backward_hook)(backward_hook)
    if hasattr(layer, "_hf_hook"):  # moves x to the layer's GPU, of a model with a device_map
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(made, layer._hf_hook)
    made.train(layer.training)


def dequantize_layers(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Replace the quantized layers, embeddings and experts of a model by dense ones with the same numbers and hooks, in
    place. Call :func:`describe` before such a model is saved. Experts become transformers' own again, but those of
    Llama 4 and of other models, and those that are split, with which a model is not saved.

    Args:
        dtype: of the dense weights and biases: floating point, of 16 bits or more.

    Returns:
        The model itself.

    Raises:
        TypeError: for another dtype.
        ValueError: for a linear layer with an activation, which a dense one has not; nothing is replaced then.
    """
    from w4gemm.integrations.transformers.embeddings import Packed, dense_embedding

    layers = names_of(model)
    for layer, names in layers.items():
        if isinstance(layer, W4Linear) and layer.activation is not None:
            raise ValueError(
                f"{names[0]}.activation: wanted None, since a torch.nn.Linear has none, got {layer.activation!r}; set "
                "it to None and let the model apply it"
            )
    own = _own_experts(model)
    for layer, names in layers.items():
        dense: nn.Module
        if isinstance(layer, W4Experts):
            dense = DenseExperts(layer, dtype)
            if names[0] in own:
                dense = _restored(dense, *own[names[0]])
        elif isinstance(layer, W4Linear):
            weight = layer.weight.dequantize(dtype)
            if layer.pre_quant_scale is not None:
                weight = (layer.weight.dequantize() * layer.pre_quant_scale.float()).to(dtype)
            n, k = weight.shape
            dense = nn.Linear(k, n, bias=layer.bias is not None, device="meta")
            dense.weight = nn.Parameter(weight, requires_grad=False)
            if layer.bias is not None:
                dense.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
        elif isinstance(layer, Packed):
            dense = dense_embedding(layer, dtype)
        else:
            continue
        _hand_over(layer, dense)
        for name in names:
            model.set_submodule(name, dense)
    return model


def dequantize_embedding(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Put a dense embedding with the same rows in the place of a model's packed one, as training or resizing it needs.

    Args:
        dtype: of the rows; None for the packed embedding's.

    Returns:
        The model itself, which stays as it is if its embedding is dense.
    """
    from w4gemm.integrations.transformers.embeddings import Packed, dense_embedding
    from w4gemm.integrations.transformers.quantizer import describe

    packed = model.get_input_embeddings()
    if isinstance(packed, Packed):
        dense = dense_embedding(packed, packed.dtype if dtype is None else dtype)
        _hand_over(packed, dense)
        model.set_input_embeddings(dense)
        describe(model)
    return model


def part_embeddings(model: PreTrainedModel, is_meant: Callable[[str], object]) -> None:
    """Give the embeddings that read a head's packed weight one of their own, if the head's name is meant."""
    from w4gemm.integrations.transformers.embeddings import TiedEmbedding, tied_to_heads
    from w4gemm.integrations.transformers.quantizer import describe

    for name, head in tied_to_heads(model).items():
        if is_meant(head):
            tied = model.get_submodule(name)
            assert isinstance(tied, TiedEmbedding)
            own = tied.apart()
            _hand_over(tied, own)
            model.set_submodule(name, own)
            describe(model)


def _own_experts(model: nn.Module) -> dict[str, tuple[nn.Module, Products]]:
    """Return the experts without numbers that a model of transformers had in place of its quantized ones of the same
    sizes, biases and activation, by their names, and their products."""
    quantized = {name: module for name, module in model.named_modules() if isinstance(module, W4Experts)}
    transformers = sys.modules.get("transformers")
    if not quantized or transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return {}
    from w4gemm.integrations.transformers.saving import outline_of

    outline = outline_of(model)
    own: dict[str, tuple[nn.Module, Products]] = {}
    for name, products in dense_experts(outline).items():
        experts, layer = outline.get_submodule(name), quantized.get(name)
        if layer is None or of_llama_4(experts) or activation_of(experts) != layer.activation:
            continue
        expected = [(torch.Size(p.weight.shape), p.bias is not None) for p in (layer.gate_up, layer.down)]
        if [(torch.Size(p.sizes), p.has_bias) for p in products.values()] == expected:
            own[name] = experts, products
    return own


def _restored(dense: DenseExperts, own: nn.Module, products: Products) -> nn.Module:
    """Fill transformers' experts with the numbers of dense ones."""
    for (leaf, product), name in zip(products.items(), ("gate_up", "down"), strict=True):
        parameters = {leaf: product.parameter(dense.get_parameter(name).detach())}
        if product.has_bias:
            parameters[f"{leaf}_bias"] = product.parameter_of_biases(dense.get_parameter(f"{name}_bias").detach())
        for of_own, t in parameters.items():
            setattr(own, of_own, nn.Parameter(t, requires_grad=False))
    return own


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return every name of each module inside a model: some have several.

    Raises:
        TypeError: for what is no module, and for a layer alone, which has no place that another could take.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: wanted a torch.nn.Module, got {kind_of(model)}")
    if isinstance(model, (nn.Linear, PackedModule, W4Experts)):
        raise TypeError(
            f"model: wanted a module with layers inside, got a {type(model).__name__} itself; W4Linear.from_linear "
            "makes a quantized one of a layer"
        )
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


class DenseExperts(nn.Module):
    """The sum that :class:`W4Experts` computes, by PyTorch's operators, one expert after the other."""

    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(self, experts: W4Experts, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = experts.activation
        for name, product in (("gate_up", experts.gate_up), ("down", experts.down)):
            weight, bias, scale = product.weight.dequantize(dtype), product.bias, product.expert_scale
            weight = weight if scale is None else weight * scale[:, None, None].to(dtype)
            if (factors := product.pre_quant_scale) is not None:
                weight = (weight.float() * factors.float()).to(dtype)
            bias = None if bias is None else nn.Parameter(bias.detach().to(dtype), requires_grad=False)
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))
            self.register_parameter(f"{name}_bias", bias)

    def quantized(self, format: WeightFormat | None, search: bool) -> W4Experts:
        """Return the same experts with their weights rounded."""
        products = []
        for name in ("gate_up", "down"):
            weight = self.get_parameter(name).detach()
            each = (quantize(w, format or default_format(w.shape[1]), search=search) for w in weight)
            products.append(W4GroupedLinear(QuantizedWeight.stack(each, len(weight)), getattr(self, f"{name}_bias")))
        return W4Experts(*products, activation=self.activation)

    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
        total, apply = torch.zeros_like(x), parse(self.activation).apply
        gate_up, down = self.get_parameter("gate_up"), self.get_parameter("down")
        for e in range(len(gate_up)):
            first, second = (None if b is None else b[e] for b in (self.gate_up_bias, self.down_bias))
            tokens, choices = torch.where(expert_ids == e)
            hidden = apply(nn.functional.linear(x[tokens], gate_up[e], first))
            d = nn.functional.linear(hidden, down[e], second)
            total.index_add_(0, tokens, (d * expert_weights[tokens, choices, None]).to(x.dtype))
        return total
