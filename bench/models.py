"""Models of true shapes and random weights, made on the GPU without a download: :func:`drawn_model`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from bench.engine.gguf import has_more_bits
from bench.engine.models import model_named, tiny
from torch import nn

from w4gemm import QuantizedWeight, W4Experts, W4GroupedLinear, W4Linear, WeightFormat
from w4gemm.checkpoints.dense import SKIP, linear_layers
from w4gemm.checkpoints.model_experts import activation_of
from w4gemm.integrations.transformers.loading import ParametersOnMeta
from w4gemm.tuning.random_weight import random_weight

MODELS: dict[str, Mapping[str, Any]] = {
    name: model_named(name).config for name in ("llama-3-8b", "qwen3-30b-a3b", "gpt-oss-20b")
}
MODELS |= {"tiny": tiny(model_named("llama-3-8b")).config, "tiny-mixture": tiny(model_named("qwen3-30b-a3b")).config}
"""Settings of config.json by name."""
MIXES = {"q4_k_m": ("q4_k", "q6_k"), "q5_k_m": ("q5_k", "q6_k"), "int4_g32_head": ("int4_g32", "int4_g32")}
"""Formats of models with a quantized head by name: of most layers; of the head and, in half of the decoder layers, of
v_proj and down_proj, as llama.cpp mixes them."""
DENSE_ATTENTION = ("gpt_oss",)
"""Kinds of models whose checkpoints have their experts alone in 4 bits."""


def drawn_model(settings: Mapping[str, Any], kind: str) -> Any:
    """A model of random weights.

    Args:
        kind: "bfloat16"; a format, that of all linear layers and experts, but not of the head; or one of :data:`MIXES`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = AutoConfig.for_model(**settings)
    with ParametersOnMeta():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    if kind != "bfloat16":
        _pack(model, kind, device)
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


def _pack(model: Any, kind: str, device: str) -> None:
    drawn: dict[tuple[str, tuple[int, ...]], QuantizedWeight] = {}

    def weight(format: str, *sizes: int) -> QuantizedWeight:
        """The same numbers for all layers of this format and these sizes, in memory of each layer's own."""
        if (format, sizes) not in drawn:
            *experts, n, k = sizes
            w = random_weight(WeightFormat.parse(format), n, k, device=device).repack()
            drawn[format, sizes] = QuantizedWeight.stack([w] * experts[0]) if experts else w
        w = drawn[format, sizes]
        return replace(w, tensors=tuple(t.clone() for t in w.tensors))

    for name, module in list(model.named_modules()):
        if hasattr(module, "gate_up_proj") and hasattr(module, "_apply_gate"):
            model.set_submodule(name, _experts(module, functools.partial(weight, kind), device))
    layers = linear_layers(model, () if kind in MIXES else SKIP)
    for name, linear in layers.items() if model.config.model_type not in DENSE_ATTENTION else ():
        w = weight(_format_of(name, kind, model), linear.out_features, linear.in_features)
        model.set_submodule(name, W4Linear.from_weight(w, dtype=torch.bfloat16))


def _format_of(name: str, kind: str, model: Any) -> str:
    """The format of a linear layer of a kind of model."""
    if kind not in MIXES:
        return kind
    most, larger = MIXES[kind]
    leaf, numbers = name.split(".")[-1], [int(part) for part in name.split(".") if part.isdecimal()]
    if leaf not in ("v_proj", "down_proj"):
        return larger if leaf == "lm_head" else most
    return larger if has_more_bits(numbers[0], model.config.num_hidden_layers) else most


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
