"""The 4-bit layers of a model, made dense again: :func:`dequantize_layers`."""

from __future__ import annotations

import torch
from torch import nn

from w4gemm.api.experts import W4Experts
from w4gemm.api.nn import W4Linear
from w4gemm.api.packed_module import PackedModule
from w4gemm.core.activation import parse
from w4gemm.core.errors import kind_of


def dequantize_layers(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Replace the 4-bit linear layers and experts of a model by dense ones with the same numbers, in place; for
    comparing.

    Raises:
        ValueError: for a linear layer with an activation, which a dense one has not; nothing is replaced then.
    """
    layers = names_of(model)
    for layer, names in layers.items():
        if isinstance(layer, W4Linear) and layer.activation is not None:
            raise ValueError(
                f"{names[0]}.activation: wanted None, since a torch.nn.Linear has none, got {layer.activation!r}; set "
                "it to None and let the model apply it"
            )
    for layer, names in layers.items():
        dense: nn.Module
        if isinstance(layer, W4Experts):
            dense = _DenseExperts(layer, dtype)
        elif isinstance(layer, W4Linear):
            weight = layer.weight.dequantize(dtype)
            if layer.pre_quant_scale is not None:
                weight = (layer.weight.dequantize() * layer.pre_quant_scale.float()).to(dtype)
            n, k = weight.shape
            dense = nn.Linear(k, n, bias=layer.bias is not None, device="meta")
            dense.weight = nn.Parameter(weight, requires_grad=False)
            if layer.bias is not None:
                dense.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
        else:
            continue
        for name in names:
            model.set_submodule(name, dense)
    return model


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
            "makes a 4-bit one of a layer"
        )
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


class _DenseExperts(nn.Module):
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
