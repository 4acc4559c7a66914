"""Quantized layers, embeddings and experts of a model become dense again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from w4gemm.api.experts import W4Experts, W4GroupedLinear
from w4gemm.api.nn import W4Linear
from w4gemm.api.packed_module import PackedModule
from w4gemm.checkpoints.dense import default_format, has_forward_set
from w4gemm.checkpoints.model_experts import DenseProduct, activation_of, dense_experts, of_llama_4
from w4gemm.core.activation import parse
from w4gemm.core.errors import require_pretrained
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations.transformers.embeddings import Packed, TiedEmbedding, dense_embedding, tied_to_heads
from w4gemm.integrations.transformers.replace import hand_over, names_of, replace
from w4gemm.weights.quantize import quantize
from w4gemm.weights.weight import QuantizedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Products = Mapping[str, DenseProduct]
"""The products of dense experts by the names of their parameters; empty for :class:`DenseExperts`."""


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
        ValueError: for a linear layer with an activation, which a dense one has not, and for a layer or experts with a
            forward set on them, as transformers' tensor parallelism does; nothing is replaced then.
    """
    layers = names_of(model)
    for layer, names in layers.items():
        if isinstance(layer, (PackedModule, W4Experts)) and has_forward_set(layer):
            raise ValueError(
                f"{names[0]}: wanted a layer without a forward set on it, which a dense one would not have; "
                "transformers sets one where processes share a model: load it in one process"
            )
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
            dense = _dense_linear(layer, dtype)
        elif isinstance(layer, Packed):
            dense = dense_embedding(layer, dtype)
        else:
            continue
        replace(model, names, layer, dense)
    return model


def dequantize_embedding(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Put a dense embedding with the same rows in the place of a model's packed one, as training or resizing it needs.

    Args:
        dtype: of the rows; None for the packed embedding's.

    Returns:
        The model itself, which stays as it is if its embedding is dense.

    Raises:
        TypeError: for what is no model of transformers.
    """
    require_pretrained(model)
    from w4gemm.integrations.transformers.quantizer import describe

    packed = model.get_input_embeddings()
    if isinstance(packed, Packed):
        dense = dense_embedding(packed, packed.dtype if dtype is None else dtype)
        hand_over(packed, dense)
        model.set_input_embeddings(dense)
        describe(model)
    return model


def part_embeddings(model: PreTrainedModel, is_meant: Callable[[str], object]) -> None:
    """Give the embeddings that read a head's packed weight one of their own, if the head's name is meant."""
    from w4gemm.integrations.transformers.quantizer import describe

    for name, head in tied_to_heads(model).items():
        if is_meant(head):
            tied = model.get_submodule(name)
            assert isinstance(tied, TiedEmbedding)
            own = tied.apart()
            replace(model, [name], tied, own)
            describe(model)


def _dense_linear(layer: W4Linear, dtype: torch.dtype) -> nn.Linear:
    weight = layer.weight.dequantize(dtype)
    if layer.pre_quant_scale is not None:
        weight = (layer.weight.dequantize() * layer.pre_quant_scale.float()).to(dtype)
    n, k = weight.shape
    dense = nn.Linear(k, n, bias=layer.bias is not None, device="meta")
    dense.weight = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        dense.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
    return dense


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
