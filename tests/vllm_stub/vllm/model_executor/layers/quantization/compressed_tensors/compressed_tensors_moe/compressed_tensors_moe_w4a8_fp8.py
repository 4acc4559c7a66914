"""Experts of compressed-tensors."""

from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    CompressedTensorsMoEMethod,
)


class CompressedTensorsW4A8Fp8MoEMethod(CompressedTensorsMoEMethod):
    def __init__(self, weight_quant, input_quant, moe, layer_name=None):
        super().__init__(moe)
        self.weight_quant = weight_quant
        self.input_quant = input_quant
