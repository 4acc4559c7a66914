"""4-bit experts as SGLang's methods load them: :data:`METHODS`. Importing this imports no SGLang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from w4gemm.checkpoints.compressed_tensors import ACT_ORDERS
from w4gemm.core import environment
from w4gemm.core.formats import PER_COLUMN
from w4gemm.integrations.engines.formats import ExpertsFormat, ExpertsSettings, activation_text
from w4gemm.integrations.sglang.takeover import QUANTIZATION


class Method(NamedTuple):
    """A class of SGLang's for layers of experts, and how it loads them."""

    kind: str
    """Its layers, in sentences."""
    target: str
    """Dotted name of the class."""
    settings: Callable[[Any], ExpertsSettings]
    format: ExpertsFormat
    apply: str = "apply_weights"
    """Name of the method that multiplies."""
    padded: bool = False
    """True if its parameters are zeros that a checkpoint fills only in part."""
    routes: bool = False
    """True if tokens are routed in a form that only SGLang's own runner reads, unless the method names another."""

    flips: bool = False
    """True if SGLang transposes each matrix that it loads, also a dense one."""
    takes_adapters: bool = True
    """False if SGLang's start ends where LoRA adapters may come beside them, unless a runner is named."""

    def bias(self, layer: Any, product: str) -> torch.nn.Parameter | None:
        """Return the biases (experts, n) of a product, or None if there are none."""
        biases = self.format.biases
        return getattr(layer, f"{product}_{biases}") if biases and layer.with_bias else None


def _gptq(self: Any) -> ExpertsSettings:
    config = self.quant_config
    act_order = config.desc_act and config.group_size != PER_COLUMN
    refused = "they are in act-order (desc_act), each expert in its own" if act_order else ""
    return ExpertsSettings(config.weight_bits, config.group_size, refused=refused)


def _awq(self: Any) -> ExpertsSettings:
    return ExpertsSettings(self.quant_config.weight_bits, self.quant_config.group_size, True)


def _compressed_tensors(self: Any) -> ExpertsSettings:
    in_order = self.actorder not in ACT_ORDERS
    refused = "" if in_order else f"they are in act-order (actorder {self.actorder}), each expert in its own"
    group_size = PER_COLUMN if self.strategy == "channel" else self.group_size
    return ExpertsSettings(self.num_bits, group_size, not self.sym, refused=refused)


def _compressed_tensors_fp8(self: Any) -> ExpertsSettings:
    kind = self.input_quant.type
    refused = "" if kind == "float" else f"their activations are 8-bit {kind}"
    return ExpertsSettings(self.num_bits, self.group_size, activations="fp8", refused=refused)


def _w4afp8(self: Any) -> ExpertsSettings:
    """Activations get a scale for each token, where SGLang's own kernel takes one from the checkpoint for all."""
    return ExpertsSettings(4, self.quant_config.group_size, activations="fp8")


def _nvfp4(self: Any) -> ExpertsSettings:
    return _floats("nvfp4", 16)


def _floats(named: str, group_size: int, refused: str = "") -> ExpertsSettings:
    activations = "fp8" if environment.takes_fp8(named, False) else None
    return ExpertsSettings(4, group_size, activations=activations, refused=refused, named=named)


def _nvfp4_modelopt(self: Any) -> ExpertsSettings:
    refused = ""
    if not self.quant_config.is_checkpoint_nvfp4_serialized:
        refused = "they are quantized while they are loaded"
    elif not self._moe_runner_backend.is_marlin():  # others load them in other orders
        refused = f"--moe-runner-backend {self._moe_runner_backend.value} runs them"
    return _nvfp4(self)._replace(refused=refused)


def _nvfp4_minimax(self: Any) -> ExpertsSettings:
    return _nvfp4(self)._replace(refused="" if self.use_marlin else "SGLang multiplies fp4 activations")


def _mxfp4(self: Any) -> ExpertsSettings:
    refused = ""
    if self.use_marlin or self.use_flashinfer or self.use_deep_gemm or self.use_mega_moe:  # which pad them
        refused = "--moe-runner-backend names another one than triton_kernel"
    return _floats("mxfp4", 32, refused)


def _mxfp4_deepseek(self: Any) -> ExpertsSettings:
    pad = getattr(self, "hidden_pad", 0)
    return _floats("mxfp4", 32, f"their {pad} last features of a token are padding" if pad else "")


_PLAIN = {
    ("gelu", True): "gelu_mul",
    ("gelu_tanh", True): "gelu_tanh_mul",
    ("silu", False): "silu",
    ("gelu", False): "gelu",
    ("relu2", False): "relu2",
}
"""Activations without constants, by SGLang's names and whether they have gates."""


def fused_activation(config: Any) -> str:
    """Return the activation between the products, by MoeRunnerConfig, as :func:`w4gemm.linear` names it; the empty
    string if it has none.

    Raises:
        ValueError: for constants that no activation may have.
    """
    name, limit = config.activation, config.swiglu_limit
    alpha, beta, clamp = config.gemm1_alpha, getattr(config, "gemm1_beta", None), config.gemm1_clamp_limit
    if name == "situ" and config.is_gated:  # Kimi-K3
        return activation_text("situ_mul", beta=4.0 if alpha is None else alpha, linear_beta=clamp)
    if name == "silu" and config.is_gated and alpha is not None:  # gpt-oss, MiniMax-M3
        known = clamp is not None and beta in (None, 1)
        return activation_text("swiglu_oai", alpha=alpha, beta=1.0, limit=clamp) if known else ""
    if alpha is not None or clamp is not None:  # without an alpha SGLang cuts silu(gate), not the gate
        return ""
    if name == "silu" and config.is_gated:
        return "silu_mul" if limit is None else activation_text("silu_mul", limit=limit)
    return _PLAIN.get((name, config.is_gated), "") if limit is None else ""


def in_pairs(config: Any) -> bool:
    """True if rows of ``w13_*`` are pairs of a gate and an up, as our epilogue wants them; else all gates come
    first."""
    return bool(config.activation == "silu" and config.gemm1_alpha is not None and config.gate_up_interleaved)


_COMPRESSED = ExpertsFormat("weight_packed", "weight_scale", "weight_zero_point")
_FLOATS = ExpertsFormat("weight", "weight_scale", packing="floats")
_COMPRESSED_NVFP4 = replace(_FLOATS, codes="weight_packed", factors="weight_global_scale", divides=True)

METHODS = (
    Method(
        "GPTQ's experts",
        f"{QUANTIZATION}.gptq.schemes.GPTQMarlinMoEScheme",
        _gptq,
        ExpertsFormat("qweight", "scales", transposed=True),
        takes_adapters=False,
    ),
    Method(
        "AWQ's experts",
        f"{QUANTIZATION}.awq.schemes.AWQMoEScheme",
        _awq,
        ExpertsFormat("qweight", "scales", "qzeros", packing="awq", transposed=True),
        takes_adapters=False,
    ),
    Method(
        "compressed-tensors' experts",
        f"{QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsWNA16MoE",
        _compressed_tensors,
        replace(_COMPRESSED, transposed=True),
        flips=True,
        takes_adapters=False,
    ),
    Method(
        "compressed-tensors' experts with fp8 activations",
        f"{QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsW4AFP8MoE",
        _compressed_tensors_fp8,
        _COMPRESSED,
        takes_adapters=False,
    ),
    Method(
        "W4AFP8's experts",
        f"{QUANTIZATION}.w4afp8.W4AFp8MoEMethod",
        _w4afp8,
        ExpertsFormat("weight", "weight_scale_inv", packing="w4afp8"),
        apply="apply",
        takes_adapters=False,
    ),
    Method(
        "compressed-tensors' experts of NVFP4",
        f"{QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsW4A16Nvfp4MoE",
        _nvfp4,
        _COMPRESSED_NVFP4,
    ),
    Method(
        "MiniMax-M3.1's experts of NVFP4",
        f"{QUANTIZATION}.minimax_m3_nvfp4.MiniMaxM3Nvfp4MoE",
        _nvfp4_minimax,
        _COMPRESSED_NVFP4,
    ),
    Method(
        "ModelOpt's experts of NVFP4",
        f"{QUANTIZATION}.modelopt_quant.ModelOptNvFp4FusedMoEMethod",
        _nvfp4_modelopt,
        replace(_FLOATS, factors="weight_scale_2"),
        apply="apply",
    ),
    Method(
        "experts of MXFP4",  # gpt-oss, Kimi-K3
        f"{QUANTIZATION}.mxfp4.Mxfp4MoEMethod",
        _mxfp4,
        replace(_FLOATS, biases="weight_bias"),
        apply="apply",
        padded=True,
        routes=True,
    ),
    Method(
        "DeepSeek-V4's experts of MXFP4",
        f"{QUANTIZATION}.mxfp4_marlin_moe.Mxfp4MarlinMoEMethod",
        _mxfp4_deepseek,
        replace(_FLOATS, scales="weight_scale_inv"),
        apply="apply",
    ),
)
