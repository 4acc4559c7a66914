"""Quantization configs of vLLM's, and their methods for layers."""

from __future__ import annotations

import re
from copy import deepcopy
from types import SimpleNamespace
from typing import ClassVar

import torch

from vllm_stub import VLLM
from vllm_stub.experts import FusedMoEMethodBase, RoutedExperts
from vllm_stub.linear import (
    GroupQuantScaleParameter,
    LinearBase,
    LinearMethodBase,
    MPLinearLayerConfig,
    PackedvLLMParameter,
    choose_mp_linear_kernel,
    init_nvfp4_linear_kernel,
    scalar_types,
)

at, put = VLLM.at, VLLM.put
QUANTIZATION = "model_executor.layers.quantization"
COMPRESSED = f"{QUANTIZATION}.compressed_tensors"
EXPERTS = f"{COMPRESSED}.compressed_tensors_moe"

put(f"{QUANTIZATION}.utils.quant_utils", kMxfp4Static="MXFP4")


@at(f"{QUANTIZATION}.base_config")
class QuantizationConfig:
    def get_quant_method(self, layer, prefix):
        raise NotImplementedError


class _Experts(FusedMoEMethodBase):
    """A method for experts that keeps its config."""

    def __init__(self, quant_config, moe):
        super().__init__(moe)
        self.quant_config = quant_config


# --- AWQ and GPTQ ----------------------------------------------------------------------------------------------------


@at(f"{QUANTIZATION}.auto_awq")
class AutoAWQConfig(QuantizationConfig):
    def __init__(self, weight_bits, group_size, zero_point):
        self.weight_bits = weight_bits
        self.group_size = group_size
        self.zero_point = zero_point

    def get_quant_method(self, layer, prefix):
        return AutoAWQMoEMethod(self, layer.moe_config)


@at(f"{QUANTIZATION}.auto_awq")
class AutoAWQMoEMethod(_Experts):
    pass


@at(f"{QUANTIZATION}.auto_gptq")
def get_moe_quant_method(config, layer, prefix, moe_method_cls):
    return moe_method_cls(config, layer.moe_config)


@at(f"{QUANTIZATION}.utils.gptq_utils")
def override_config(config, prefix):
    for key, name in (("bits", "weight_bits"), ("sym", "is_sym")):
        setattr(config, name, get_dynamic_override(config, prefix, key, getattr(config, name)))
    if (config.weight_bits, config.is_sym) not in config.TYPE_MAP:
        raise ValueError(f"Unsupported quantization config: bits={config.weight_bits}, sym={config.is_sym}")
    config.quant_type = config.TYPE_MAP[(config.weight_bits, config.is_sym)]


@at(f"{QUANTIZATION}.utils.gptq_utils")
def get_dynamic_override(config, layer_name, key=None, default_value=None):
    for pattern, settings in config.dynamic.items():
        if re.match(pattern.removeprefix("+:"), layer_name):
            return settings if key is None else settings.get(key, default_value)
    return default_value


@at(f"{QUANTIZATION}.utils.gptq_utils", f"{QUANTIZATION}.auto_gptq")
def get_linear_quant_method(config, layer, prefix, linear_method_cls):
    cloned_config = deepcopy(config)
    if isinstance(layer, LinearBase) or prefix:
        override_config(cloned_config, prefix)
    return linear_method_cls(cloned_config)


@at(f"{QUANTIZATION}.auto_gptq")
class AutoGPTQConfig(QuantizationConfig):
    TYPE_MAP: ClassVar = {(4, True): scalar_types.uint4b8, (8, True): scalar_types.uint8b128}

    def __init__(
        self, weight_bits, group_size, desc_act, is_sym, lm_head_quantized=False, dynamic=None, full_config=None
    ):
        self.weight_bits = weight_bits
        self.group_size = group_size
        self.desc_act = desc_act
        self.is_sym = is_sym
        self.dynamic, self.full_config = dynamic or {}, full_config or {}
        if (weight_bits, is_sym) not in self.TYPE_MAP:
            raise ValueError(f"Unsupported quantization config: bits={weight_bits}, sym={is_sym}")
        self.quant_type = self.TYPE_MAP[(weight_bits, is_sym)]

    def get_quant_method(self, layer, prefix):
        from vllm.model_executor.layers.quantization import auto_gptq

        if hasattr(layer, "moe_config"):
            return auto_gptq.get_moe_quant_method(self, layer, prefix, AutoGPTQMoEMethod)
        return auto_gptq.get_linear_quant_method(self, layer, prefix, AutoGPTQLinearMethod)


@at(f"{QUANTIZATION}.auto_gptq")
class AutoGPTQLinearMethod(LinearMethodBase):
    def __init__(self, quant_config):
        self.quant_config = quant_config

    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        **extra_weight_attrs,
    ):
        k, n, group = input_size_per_partition, sum(output_partition_sizes), self.quant_config.group_size
        whole, here = (input_size, output_size), (k, n)
        bits = self.quant_config.weight_bits
        config = MPLinearLayerConfig(whole, here, self.quant_config.quant_type, params_dtype, group, False, False)
        dims = {"output_dim": 1, "input_dim": 0, "weight_loader": None}
        words = {"packed_factor": 32 // bits, **dims}
        groups = 1 if group == -1 else k // group
        layer.qweight = PackedvLLMParameter(data=torch.empty(k * bits // 32, n).int(), packed_dim=0, **words)
        layer.scales = GroupQuantScaleParameter(data=torch.empty(groups, n).to(params_dtype), **dims)
        layer.qzeros = PackedvLLMParameter(data=torch.empty(groups, n * bits // 32).int(), packed_dim=1, **words)
        kernel = choose_mp_linear_kernel(config)
        self.kernel = kernel(config, w_q_param_name="qweight", w_s_param_name="scales", w_zp_param_name="qzeros")

    def process_weights_after_loading(self, layer):
        self.kernel.process_weights_after_loading(layer)

    def apply(self, layer, x, bias=None):
        return self.kernel.apply_weights(layer, x, bias)


@at(f"{QUANTIZATION}.auto_gptq")
class AutoGPTQMoEMethod(_Experts):
    pass


@at(f"{QUANTIZATION}.moe_wna16")
class MoeWNA16Config(QuantizationConfig):
    def __init__(self, linear_quant_method, weight_bits, group_size, has_zp, full_config):
        self.full_config = full_config
        self.linear_quant_method = linear_quant_method
        self.weight_bits = weight_bits
        self.group_size = group_size
        self.has_zp = has_zp

    def get_quant_method(self, layer, prefix):
        return MoeWNA16Method(self, layer.moe_config)


@at(f"{QUANTIZATION}.moe_wna16")
class MoeWNA16Method(_Experts):
    pass


@at(f"{QUANTIZATION}.inc.schemes.inc_wna16_scheme")
class INCWna16Scheme:
    def get_linear_method(self, config, layer, prefix, layer_config):
        return "vLLM's own"


# --- 4-bit floats ----------------------------------------------------------------------------------------------------


@at(f"{QUANTIZATION}.modelopt")
class ModelOptQuantConfigBase(QuantizationConfig):
    def get_quant_method(self, layer, prefix):
        return ModelOptNvFp4FusedMoE(self, layer.moe_config)


@at(f"{QUANTIZATION}.modelopt")
class ModelOptNvFp4Config(ModelOptQuantConfigBase):
    pass


@at(f"{QUANTIZATION}.modelopt")
class ModelOptNvFp4FusedMoE(_Experts):
    pass


@at(f"{QUANTIZATION}.mxfp4")
class Mxfp4Config(QuantizationConfig):
    def get_quant_method(self, layer, prefix):
        cls = GptOssMxfp4MoEMethod if isinstance(self, GptOssMxfp4Config) else Mxfp4MoEMethod
        return cls(layer.moe_config)


@at(f"{QUANTIZATION}.mxfp4")
class GptOssMxfp4Config(Mxfp4Config):
    pass


class _Mxfp4Experts(FusedMoEMethodBase):
    def maybe_roundup_sizes(
        self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
    ) -> tuple[int, int]:
        return -(-hidden_size // 256) * 256, -(-intermediate_size_per_partition // 256) * 256


@at(f"{QUANTIZATION}.mxfp4")
class Mxfp4MoEMethod(_Mxfp4Experts):
    pass


@at(f"{QUANTIZATION}.mxfp4")
class GptOssMxfp4MoEMethod(_Mxfp4Experts):
    pass


# --- compressed-tensors ----------------------------------------------------------------------------------------------


@at(f"{COMPRESSED}.schemes.compressed_tensors_w4a4_nvfp4", f"{COMPRESSED}.schemes")
class CompressedTensorsW4A4Fp4:
    def __init__(self, use_a16=False):
        self.kernel = init_nvfp4_linear_kernel(use_a16=use_a16)

    def create_weights(self, layer, params_dtype, **others):
        layer.params_dtype = params_dtype


@at(f"{COMPRESSED}.compressed_tensors")
class CompressedTensorsConfig(QuantizationConfig):
    def __init__(self, target_scheme_map):
        self.target_scheme_map = target_scheme_map

    def get_quant_method(self, layer, prefix):
        if isinstance(layer, RoutedExperts):
            return CompressedTensorsMoEMethod.get_moe_method(self, layer, layer_name=prefix)
        if hasattr(layer, "k_scale"):  # of attention
            return CompressedTensorsKVCacheMethod()
        weights_only = self.target_scheme_map["Linear"]["input_activations"] is None
        layer.scheme = CompressedTensorsW4A4Fp4(use_a16=weights_only)
        return CompressedTensorsLinearMethod(self)


@at(f"{COMPRESSED}.compressed_tensors")
class CompressedTensorsKVCacheMethod:
    def process_weights_after_loading(self, layer):
        layer._k_scale = layer.k_scale
        del layer.k_scale


@at(f"{COMPRESSED}.compressed_tensors")
class CompressedTensorsLinearMethod(LinearMethodBase):
    def __init__(self, quantization_config):
        self.quantization_config = quantization_config

    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        **extra_weight_attrs,
    ):
        layer.scheme.create_weights(layer=layer, params_dtype=params_dtype)


@at(f"{EXPERTS}.compressed_tensors_moe", EXPERTS)
class CompressedTensorsMoEMethod(FusedMoEMethodBase):
    @staticmethod
    def get_moe_method(quant_config, layer, layer_name):
        scheme = quant_config.target_scheme_map["Linear"]
        weights, activations = scheme["weights"], scheme["input_activations"]
        if weights.type == "float" and activations is not None:
            method = CompressedTensorsW4A8Mxfp4MoEMethod(layer.moe_config)
            group_shape = SimpleNamespace(is_per_token=lambda: activations.strategy == "token")
            method.activation_key = SimpleNamespace(scale=SimpleNamespace(group_shape=group_shape))
            return method
        if weights.type == "float":
            floats = {16: CompressedTensorsW4A4Nvfp4MoEMethod, 32: CompressedTensorsW4A4Mxfp4MoEMethod}
            return floats[weights.group_size](layer.moe_config)
        cls = CompressedTensorsWNA16MoEMethod if activations is None else CompressedTensorsW4A8Fp8MoEMethod
        return cls(weights, activations, layer.moe_config)


class _Integers(CompressedTensorsMoEMethod):
    def __init__(self, weight_quant, input_quant, moe, layer_name=None):
        super().__init__(moe)
        self.weight_quant = weight_quant
        self.input_quant = input_quant


@at(f"{EXPERTS}.compressed_tensors_moe_wna16")
class CompressedTensorsWNA16MoEMethod(_Integers):
    pass


@at(f"{EXPERTS}.compressed_tensors_moe_w4a8_fp8")
class CompressedTensorsW4A8Fp8MoEMethod(_Integers):
    pass


@at(f"{EXPERTS}.compressed_tensors_moe_w4a4_nvfp4")
class CompressedTensorsW4A4Nvfp4MoEMethod(CompressedTensorsMoEMethod):
    pass


@at(f"{EXPERTS}.compressed_tensors_moe_w4a4_mxfp4")
class CompressedTensorsW4A4Mxfp4MoEMethod(CompressedTensorsMoEMethod):
    pass


@at(f"{EXPERTS}.compressed_tensors_moe_w4a8_mxfp4")
class CompressedTensorsW4A8Mxfp4MoEMethod(Mxfp4MoEMethod):
    pass


# --- configs by their names ------------------------------------------------------------------------------------------

_configs: dict[str, type] = {
    "awq": AutoAWQConfig,
    "gptq": AutoGPTQConfig,
    "compressed-tensors": CompressedTensorsConfig,
    "modelopt_fp4": ModelOptNvFp4Config,
    "moe_wna16": MoeWNA16Config,
    "mxfp4": Mxfp4Config,
    "gpt_oss_mxfp4": GptOssMxfp4Config,
}


@at(QUANTIZATION)
def register_quantization_config(quantization: str):
    def _wrapper(quant_config_cls):
        _configs[quantization] = quant_config_cls
        return quant_config_cls

    return _wrapper


@at(QUANTIZATION)
def get_quantization_config(quantization: str) -> type:
    if quantization not in _configs:
        raise ValueError(f"Invalid quantization method: {quantization}")
    return _configs[quantization]
