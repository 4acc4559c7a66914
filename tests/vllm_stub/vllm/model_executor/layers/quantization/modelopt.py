"""ModelOpt."""

from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig


class ModelOptQuantConfigBase(QuantizationConfig):
    def get_quant_method(self, layer, prefix):
        return ModelOptNvFp4FusedMoE(self, layer.moe_config)


class ModelOptNvFp4Config(ModelOptQuantConfigBase):
    pass


class ModelOptNvFp4FusedMoE(FusedMoEMethodBase):
    def __init__(self, quant_config, moe_config):
        super().__init__(moe_config)
        self.quant_config = quant_config
