"""Models of true shapes and random weights, made on the GPU without a download: :func:`drawn_model`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from bench.engine.models import model_named, tiny
from torch import nn

from w4gemm import QuantizedWeight, W4Experts, W4GroupedLinear, W4Linear, WeightFormat
from w4gemm.checkpoints.dense import SKIP, linear_layers
from w4gemm.checkpoints.gates import activation_of
from w4gemm.integrations.transformers.loading import ParametersOnMeta
from w4gemm.weights.random import random_weight

MODELS: dict[str, Mapping[str, Any]] = {
    name: model_named(name).config for name in ("llama-3-8b", "qwen3-30b-a3b", "gpt-oss-20b")
}
MODELS |= {"tiny": tiny(model_named("llama-3-8b")).config, "tiny-mixture": tiny(model_named("qwen3-30b-a3b")).config}
"""Settings of config.json by name."""
DENSE_ATTENTION = ("gpt_oss",)
"""Kinds of models whose checkpoints have their experts alone in 4 bits."""


def drawn_model(settings: Mapping[str, Any], format: str) -> Any:
    """A model of random weights: in bf16, or with its linear layers and experts in a 4-bit format, but for its head."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = AutoConfig.for_model(**settings)
    with ParametersOnMeta():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    if format != "bfloat16":
        _put_4_bits(model, WeightFormat.parse(format), device)
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                data = torch.empty(p.shape, dtype=p.dtype, device=device)
                data.normal_(std=p.shape[-1] ** -0.5) if p.dim() > 1 else data.fill_(1)
                module._parameters[name] = nn.Parameter(data, requires_grad=False)
    model.to(device).tie_weights()
    generation = model.generation_config
    generation.pad_token_id, generation.eos_token_id, generation.bos_token_id = 0, None, None
    return model


def _put_4_bits(model: Any, format: WeightFormat, device: str) -> None:
    drawn: dict[tuple[int, ...], QuantizedWeight] = {}

    def weight(*sizes: int) -> QuantizedWeight:
        """The same numbers for all layers of these sizes, in memory of each layer's own."""
        if sizes not in drawn:
            *experts, n, k = sizes
            w = random_weight(format, n, k, device=device).repack()
            drawn[sizes] = QuantizedWeight.stack([w] * experts[0]) if experts else w
        w = drawn[sizes]
        return replace(w, tensors=tuple(t.clone() for t in w.tensors))

    for name, module in list(model.named_modules()):
        if hasattr(module, "gate_up_proj") and hasattr(module, "_apply_gate"):
            model.set_submodule(name, _experts(module, weight, device))
    for name, linear in linear_layers(model, SKIP).items() if model.config.model_type not in DENSE_ATTENTION else ():
        w = weight(linear.out_features, linear.in_features)
        model.set_submodule(name, W4Linear.from_weight(w, dtype=torch.bfloat16))


def _experts(dense: Any, weight: Any, device: str) -> W4Experts:
    """Experts of random weights with the shapes, biases and activation of a model's own."""
    products = []
    for name in ("gate_up_proj", "down_proj"):
        experts, n, k = getattr(dense, name).shape
        if getattr(dense, "is_transposed", False):
            n, k = k, n
        bias = (
            torch.zeros(experts, n, device=device, dtype=torch.bfloat16) if getattr(dense, "has_bias", False) else None
        )
        products.append(W4GroupedLinear.from_weight(weight(experts, n, k), bias, dtype=torch.bfloat16))
    return W4Experts(*products, activation=activation_of(dense))
