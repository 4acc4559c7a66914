"""Methods of experts."""

from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe import (
    CompressedTensorsMoEMethod,
)

__all__ = ["CompressedTensorsMoEMethod"]
