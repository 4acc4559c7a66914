"""GPTQ."""

import torch

from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
from vllm.scalar_type import scalar_types


class AutoGPTQConfig(QuantizationConfig):
    def __init__(self, weight_bits, group_size, desc_act, is_sym):
        self.weight_bits = weight_bits
        self.group_size = group_size
        self.desc_act = desc_act
        self.is_sym = is_sym

    def get_quant_method(self, layer, prefix):
        if hasattr(layer, "moe_config"):
            return AutoGPTQMoEMethod(self, layer.moe_config)
        return AutoGPTQLinearMethod(self)


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
        config = MPLinearLayerConfig(whole, here, scalar_types.uint4b8, params_dtype, group, False, False)
        dims = {"output_dim": 1, "input_dim": 0, "weight_loader": None}
        words = {"packed_factor": 8, **dims}
        groups = 1 if group == -1 else k // group
        layer.qweight = PackedvLLMParameter(data=torch.empty(k // 8, n).int(), packed_dim=0, **words)
        layer.scales = GroupQuantScaleParameter(data=torch.empty(groups, n).to(params_dtype), **dims)
        layer.qzeros = PackedvLLMParameter(data=torch.empty(groups, n // 8).int(), packed_dim=1, **words)
        kernel = choose_mp_linear_kernel(config)
        self.kernel = kernel(config, w_q_param_name="qweight", w_s_param_name="scales", w_zp_param_name="qzeros")

    def process_weights_after_loading(self, layer):
        self.kernel.process_weights_after_loading(layer)


class AutoGPTQMoEMethod(FusedMoEMethodBase):
    def __init__(self, quant_config, moe):
        super().__init__(moe)
        self.quant_config = quant_config
