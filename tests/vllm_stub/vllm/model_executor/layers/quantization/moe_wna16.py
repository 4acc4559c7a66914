"""GPTQ and AWQ, brought to one form while they are loaded."""

from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig


class MoeWNA16Config(QuantizationConfig):
    def __init__(self, linear_quant_method, weight_bits, group_size, has_zp, full_config):
        self.full_config = full_config
        self.linear_quant_method = linear_quant_method
        self.weight_bits = weight_bits
        self.group_size = group_size
        self.has_zp = has_zp

    def get_quant_method(self, layer, prefix):
        return MoeWNA16Method(self, layer.moe_config)


class MoeWNA16Method(FusedMoEMethodBase):
    def __init__(self, quant_config, moe):
        super().__init__(moe)
        self.quant_config = quant_config
