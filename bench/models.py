"""Models of true shapes and random weights, made on the GPU without a download: :func:`drawn_model`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from w4gemm import QuantizedWeight, W4Experts, W4GroupedLinear, W4Linear, WeightFormat
from w4gemm.checkpoints.dense import SKIP, linear_layers
from w4gemm.checkpoints.gates import activation_of
from w4gemm.integrations.transformers.loading import ParametersOnMeta
from w4gemm.weights.random import random_weight

MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "tiny": {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "tiny-mixture": {
        "model_type": "qwen3_moe",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}
DENSE_ATTENTION = ("gpt_oss",)
"""Kinds of models whose checkpoints have their experts alone in 4 bits."""


def drawn_model(settings: dict[str, Any], format: str) -> Any:
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
