"""4-bit experts as vLLM's methods load them: which parameters there are, and which numbers they hold.

:data:`METHODS` has an entry for each of vLLM's methods, by the name of its class. A method keeps the experts of a layer
in parameters whose matrices lie as (n, k) or, if they have ``is_transposed``, as (k, n): versions of vLLM differ in
that. Importing this imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from w4gemm.checkpoints.compressed_tensors import ACT_ORDERS
from w4gemm.core import environment
from w4gemm.core.activation import is_gated
from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.integrations.engines.formats import ExpertsFormat, ExpertsSettings, activation_text
from w4gemm.integrations.engines.gguf import GGUFExperts

_IN_PAIRS = "swigluoai"
"""vLLM's name of the activation whose gates and ups it loads in pairs, as our epilogue wants them."""


def in_pairs(moe: Any) -> bool:
    """True if the rows of ``w13`` are pairs of a gate and an up; else all gates come first."""
    return moe.activation.value == _IN_PAIRS


_PLAIN = {
    "gelu": "gelu_mul",
    "gelu_tanh": "gelu_tanh_mul",
    "silu_no_mul": "silu",
    "gelu_no_mul": "gelu",
    "gelu_tanh_no_mul": "gelu_tanh",
    "relu2_no_mul": "relu2",
}
"""Activations without constants, by vLLM's names."""


def fused_activation(moe: Any) -> str:
    """Return the activation between the products of a layer, by FusedMoEConfig, as :func:`w4gemm.linear` names it; the
    empty string if it has none.

    Raises:
        ValueError: for constants that no activation may have.
    """
    name, limit = moe.activation.value, moe.swiglu_limit
    alpha, beta = (getattr(moe, f"swiglu_{constant}", None) for constant in ("alpha", "beta"))
    if name == _IN_PAIRS:  # with its own constants, whatever the layer says
        own = limit in (None, 7) and alpha in (None, 1.702) and beta in (None, 1)
        return "swiglu_oai" if own else ""
    if name == "swigluoai_uninterleave":  # MiniMax-M3
        return (
            "" if limit is None else activation_text("swiglu_oai", alpha=alpha or 1.0, beta=beta or None, limit=limit)
        )
    if name == "situ":  # Kimi-K3
        linear = moe.activation_situ_linear_beta
        linear = linear if linear is not None and linear > 0 else None  # else vLLM's kernels take the ups as they are
        return activation_text("situ_mul", beta=moe.activation_situ_beta, linear_beta=linear)
    if name == "silu":
        return "silu_mul" if limit is None else activation_text("silu_mul", limit=limit)
    return _PLAIN.get(name, "") if limit is None else ""


def _gptq(method: Any, layer: Any) -> ExpertsSettings:
    config, refused = method.quant_config, ""
    if config.desc_act and config.group_size != PER_COLUMN:
        refused = "they are in act-order (desc_act), each expert in its own"
    elif not config.is_sym:
        refused = "they are asymmetric GPTQ's"  # whose stored zero points this method of vLLM's drops
    return ExpertsSettings(config.weight_bits, config.group_size, refused=refused)


def _awq(method: Any, layer: Any) -> ExpertsSettings:
    config = method.quant_config
    refused = "" if config.zero_point else "they are AWQ's without zero points"
    return ExpertsSettings(config.weight_bits, config.group_size, True, refused=refused)


def _compressed_tensors(method: Any, layer: Any) -> ExpertsSettings:
    weights, refused = method.weight_quant, ""
    if weights.actorder in ACT_ORDERS:
        refused = f"they are in act-order (actorder {weights.actorder!s}), each expert in its own"
    group_size = PER_COLUMN if weights.strategy == "channel" else weights.group_size
    return ExpertsSettings(weights.num_bits, group_size, not weights.symmetric, refused=refused)


def _compressed_tensors_fp8(method: Any, layer: Any) -> ExpertsSettings:
    return _compressed_tensors(method, layer)._replace(activations="fp8")


def _moe_wna16(method: Any, layer: Any) -> ExpertsSettings:
    config = method.quant_config
    # a layer has smaller groups than the checkpoint where those would straddle ranks
    group_size = getattr(layer, "group_size", config.group_size)
    from_gptq, refused = config.linear_quant_method == "gptq", ""
    if from_gptq and config.has_zp and config.full_config.get("checkpoint_format") == "gptq_v2":
        refused = "their zero points are of version 2 of GPTQ, and vLLM reads them as of version 1"
    return ExpertsSettings(config.weight_bits, group_size, config.has_zp, refused=refused, from_gptq=from_gptq)


def _mxfp4(method: Any, layer: Any) -> ExpertsSettings:
    return _floats("mxfp4", layer)


def _nvfp4(method: Any, layer: Any) -> ExpertsSettings:
    return _floats("nvfp4", layer)


def _floats(named: str, layer: Any, fp8: bool = False) -> ExpertsSettings:
    """Return the settings of 4-bit floats. fp8: True if the checkpoint wants x in fp8."""
    width, group_size = layer.moe_config.intermediate_size_per_partition, WeightFormat.parse(named).group_size
    straddle = f"{width} features of this GPU are not whole groups of {group_size}" if width % group_size else ""
    activations = "fp8" if environment.takes_fp8(named, fp8) else None
    return ExpertsSettings(4, group_size, activations=activations, refused=straddle, named=named)


def _mxfp4_in_halves(method: Any, layer: Any, fp8: bool = False) -> ExpertsSettings:
    settings = _floats("mxfp4", layer, fp8)
    if in_pairs(layer.moe_config):
        return settings._replace(refused="the order of their gates and ups is not known")
    return settings


def _mxfp4_fp8(method: Any, layer: Any) -> ExpertsSettings:
    # scales of x for groups of columns are not those that our kernel has: then x has 16 bits, as beside DeepSeek-V4's
    return _mxfp4_in_halves(method, layer, fp8=method.activation_key.scale.group_shape.is_per_token())


def _quark_mx(method: Any, layer: Any) -> ExpertsSettings:
    settings = _mxfp4_in_halves(method, layer)
    if method.weight_dtype != "mxfp4":
        return settings._replace(refused=f"they are in {method.weight_dtype}")
    return settings


def _quark_integers(method: Any, layer: Any) -> ExpertsSettings:
    return ExpertsSettings(4, getattr(layer, "group_size", method.group_size), not method.is_symmetric)  # as _moe_wna16


def _gguf(method: Any, layer: Any) -> ExpertsSettings:
    refused = "" if is_gated(fused_activation(layer.moe_config)) else "they have no gates, which vLLM's plugin wants"
    return ExpertsSettings(0, 0, refused=refused)


_AUTO = ExpertsFormat("qweight", "scales", "qzeros")
_COMPRESSED = ExpertsFormat("weight_packed", "weight_scale", "weight_zero_point")
_FLOATS = ExpertsFormat("weight", "weight_scale", packing="floats")
_COMPRESSED_FLOATS = replace(_FLOATS, codes="weight_packed")
_TWO_SCALES = replace(_FLOATS, factors="weight_scale_2")

METHODS: Mapping[str, tuple[Callable[[Any, Any], ExpertsSettings], ExpertsFormat]] = {
    "AutoGPTQMoEMethod": (_gptq, _AUTO),
    "AutoAWQMoEMethod": (_awq, replace(_AUTO, packing="awq")),
    "MoeWNA16Method": (_moe_wna16, _AUTO),  # what vLLM makes of GPTQ and AWQ where Marlin cannot run
    "CompressedTensorsWNA16MarlinMoEMethod": (_compressed_tensors, _COMPRESSED),
    "CompressedTensorsWNA16MoEMethod": (_compressed_tensors, _COMPRESSED),
    "CompressedTensorsW4A8Fp8MoEMethod": (_compressed_tensors_fp8, _COMPRESSED),
    "GptOssMxfp4MoEMethod": (_mxfp4, replace(_FLOATS, biases="bias")),
    "CompressedTensorsW4A4Mxfp4MoEMethod": (_mxfp4, _COMPRESSED_FLOATS),
    "INCMxfp4MoEMethod": (_mxfp4_in_halves, _COMPRESSED_FLOATS),  # of AutoRound
    "Mxfp4MoEMethod": (_mxfp4_in_halves, replace(_FLOATS, biases="bias")),  # DeepSeek-V4
    "CompressedTensorsW4A8Mxfp4MoEMethod": (_mxfp4_fp8, replace(_COMPRESSED_FLOATS, biases="bias")),
    "CompressedTensorsW4A4Nvfp4MoEMethod": (
        _nvfp4,
        replace(_COMPRESSED_FLOATS, factors="weight_global_scale", divides=True),
    ),
    "ModelOptNvFp4FusedMoE": (_nvfp4, _TWO_SCALES),
    "QuarkNvfp4MoEMethod": (_nvfp4, _TWO_SCALES),
    "QuarkOCP_MX_MoEMethod": (_quark_mx, _FLOATS),
    "GGUFMoEMethod": (_gguf, GGUFExperts("qweight", "qweight_type")),
    "QuarkW4A16Int4MoEMethod": (_quark_integers, replace(_COMPRESSED, codes="weight")),
}
"""For the name of a method of vLLM's, what reads it and its layer for the settings, and how its layers hold numbers."""

_ONLINE = "vLLM quantizes them while it loads them"
LEFT = {
    "CompressedTensorsW4A8Int8MoEMethod": "their activations are 8-bit integers",
    "CompressedTensorsW8A8Int8MoEMethod": "they and their activations are 8-bit integers",
    "QuarkW4A8Fp8MoEMethod": "their integers were made of e4m3 weights, whose scales multiply them",
    "Mxfp4OnlineMoEMethod": _ONLINE,
    "Nvfp4OnlineMoEMethod": _ONLINE,
}
"""Methods of vLLM's for other experts, and why they are left to vLLM."""
