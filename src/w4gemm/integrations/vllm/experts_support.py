"""Whether our products run a layer of vLLM's experts: :func:`why_not`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from w4gemm.core.activation import is_gated
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations.engines.engine import layer_product, why_no_kernel
from w4gemm.integrations.engines.formats import ExpertsFormat, ExpertsSettings
from w4gemm.integrations.vllm import takeover
from w4gemm.integrations.vllm.experts_formats import METHODS, fused_activation

_OTHER_EXCHANGES = (
    *("fi_nvl_two_sided_kernels", "fi_nvl_one_sided_kernels", "nixl_ep_kernels"),
    *("moonep_kernels", "passthrough_all2all"),  # from 0.33 on
)
"""Ways to exchange tokens in forms of their own."""


def why_not(method: Any, layer: Any) -> str:
    """Return why a layer's experts cannot be taken over, or the empty string."""
    settings, format = read(method, layer)
    moe = layer.moe_config
    fp8 = settings.activations == "fp8"
    if reason := takeover.why_not_here(fp8):
        return reason
    if reason := settings.why_refused:
        return reason
    if moe.moe_backend != "auto":
        return f"--moe-backend {moe.moe_backend} was asked for"
    if asked := takeover.activations_asked_for("moe"):
        return f"{asked} says how x is quantized"
    if not fused_activation(moe):
        limit = "" if moe.swiglu_limit is None else f" with limit {moe.swiglu_limit:g}"
        return f"their activation is {moe.activation.value}{limit}"
    if moe.is_lora_enabled and (reason := _no_lora(moe, layer, fp8)):
        return reason
    if moe.has_bias and not format.biases:
        return "they have biases"
    parallel = moe.moe_parallel_config
    if any(getattr(parallel, f"use_{exchange}", False) for exchange in _OTHER_EXCHANGES):
        return f"tokens come in the form of {parallel.all2all_backend}"
    sizes = layer.hidden_size, moe.intermediate_size_per_partition
    padded = FusedMoEMethodBase.maybe_roundup_sizes(method, *sizes, moe.in_dtype, parallel)
    if padded != sizes:
        return f"their sizes {sizes} are padded to {padded}"
    if not settings.bits:  # their formats are looked at when they are loaded
        return ""
    return no_kernel(moe, *sizes, multiplied(settings, layer), fp8)


def _no_lora(moe: Any, layer: Any, fp8: bool) -> str:
    """Return why experts with LoRA adapters cannot be taken over, or the empty string."""
    parallel = moe.moe_parallel_config
    if takeover.VLLM.switch() != "on":
        return f"LoRA is on, with which w4gemm was not seen to be faster; {takeover.VLLM.variable}=on takes over"
    if envs.VLLM_BATCH_INVARIANT:
        return "LoRA is on, whose sums may depend on the batch, and VLLM_BATCH_INVARIANT"
    if layer.apply_router_weight_on_input:
        return "LoRA is on, and the router's weights are applied on the input"
    if parallel.use_deepep_ll_kernels or (fp8 and (parallel.dp_size > 1 or parallel.use_all2all_kernels)):
        return "LoRA is on, and tokens come in fp8 or in rows of experts"
    return ""


def read(method: Any, layer: Any) -> tuple[ExpertsSettings, ExpertsFormat]:
    """Return the settings of a layer's experts, and how it holds their numbers."""
    settings, format = METHODS[type(method).__name__]
    return settings(method, layer), format


def multiplied(settings: ExpertsSettings, layer: Any) -> WeightFormat:
    """Return the format in which experts that have scales of the model's dtype are multiplied."""
    return takeover.VLLM.multiplied(settings.loaded(layer.params_dtype), settings.activations)


def no_kernel(moe: Any, hidden: int, width: int, format: WeightFormat, fp8: bool, block_scale: bool = False) -> str:
    """Return why no kernel runs the products of a layer, or the empty string. block_scale: True if the rows of the
    first one, which then lie as it reads them, have a scale for each 128 columns."""
    activation = fused_activation(moe)
    sizes = (2 * width if is_gated(activation) else width, hidden), (hidden, width)
    facts, device = (moe.in_dtype, fp8, moe.num_local_experts), torch.get_default_device()
    gate_up, down = (layer_product(device, format, *size, *facts) for size in sizes)
    plain = down.epilogue._replace(bias=moe.has_bias)
    fused = plain._replace(activation=activation)
    if block_scale:
        fused = fused._replace(token_scale=False, block_scale=True)
    gate_up = replace(gate_up, epilogue=fused, gathered=not block_scale)
    return why_no_kernel(gate_up) or why_no_kernel(replace(down, epilogue=plain))
