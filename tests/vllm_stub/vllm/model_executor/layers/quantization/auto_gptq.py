"""GPTQ."""

from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig


class AutoGPTQConfig(QuantizationConfig):
    def __init__(self, weight_bits, group_size, desc_act, is_sym):
        self.weight_bits = weight_bits
        self.group_size = group_size
        self.desc_act = desc_act
        self.is_sym = is_sym

    def get_quant_method(self, layer, prefix):
        return AutoGPTQMoEMethod(self, layer.moe_config)


class AutoGPTQMoEMethod(FusedMoEMethodBase):
    def __init__(self, quant_config, moe):
        super().__init__(moe)
        self.quant_config = quant_config
