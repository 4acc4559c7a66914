"""compressed-tensors."""

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    CompressedTensorsMoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A4Fp4


class CompressedTensorsConfig(QuantizationConfig):
    def __init__(self, target_scheme_map):
        self.target_scheme_map = target_scheme_map

    def get_quant_method(self, layer, prefix):
        if isinstance(layer, RoutedExperts):
            return CompressedTensorsMoEMethod.get_moe_method(self, layer, layer_name=prefix)
        weights_only = self.target_scheme_map["Linear"]["input_activations"] is None
        layer.scheme = CompressedTensorsW4A4Fp4(use_a16=weights_only)
        return CompressedTensorsLinearMethod(self)


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
