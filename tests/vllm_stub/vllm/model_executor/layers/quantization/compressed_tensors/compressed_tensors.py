"""compressed-tensors."""

from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    CompressedTensorsMoEMethod,
)


class CompressedTensorsConfig(QuantizationConfig):
    def __init__(self, target_scheme_map):
        self.target_scheme_map = target_scheme_map

    def get_quant_method(self, layer, prefix):
        return CompressedTensorsMoEMethod.get_moe_method(self, layer, layer_name=prefix)
