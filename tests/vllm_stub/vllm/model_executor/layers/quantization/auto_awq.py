"""AWQ."""

from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig


class AutoAWQConfig(QuantizationConfig):
    def __init__(self, weight_bits, group_size, zero_point):
        self.weight_bits = weight_bits
        self.group_size = group_size
        self.zero_point = zero_point

    def get_quant_method(self, layer, prefix):
        return AutoAWQMoEMethod(self, layer.moe_config)


class AutoAWQMoEMethod(FusedMoEMethodBase):
    def __init__(self, quant_config, moe):
        super().__init__(moe)
        self.quant_config = quant_config
