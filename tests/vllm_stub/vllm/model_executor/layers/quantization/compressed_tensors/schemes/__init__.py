"""Schemes of linear layers."""

from vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4 import (
    CompressedTensorsW4A4Fp4,
)

__all__ = ["CompressedTensorsW4A4Fp4"]
