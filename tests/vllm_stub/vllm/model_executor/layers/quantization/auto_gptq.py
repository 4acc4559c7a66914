"""GPTQ."""

from typing import ClassVar

import torch

from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_linear_quant_method
from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
from vllm.scalar_type import scalar_types


def get_moe_quant_method(config, layer, prefix, moe_method_cls):
    return moe_method_cls(config, layer.moe_config)


class AutoGPTQConfig(QuantizationConfig):
    TYPE_MAP: ClassVar = {(4, True): scalar_types.uint4b8, (8, True): scalar_types.uint8b128}

    def __init__(
        self,
        weight_bits,
        group_size,
        desc_act,
        is_sym,
        lm_head_quantized=False,
        dynamic=None,
        full_config=None,
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
        if hasattr(layer, "moe_config"):
            return get_moe_quant_method(self, layer, prefix, AutoGPTQMoEMethod)
        return get_linear_quant_method(self, layer, prefix, AutoGPTQLinearMethod)


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


class AutoGPTQMoEMethod(FusedMoEMethodBase):
    def __init__(self, quant_config, moe):
        super().__init__(moe)
        self.quant_config = quant_config
