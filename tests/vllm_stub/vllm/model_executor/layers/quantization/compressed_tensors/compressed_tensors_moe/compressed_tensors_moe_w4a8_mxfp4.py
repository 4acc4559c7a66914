"""Experts of compressed-tensors."""

from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod


class CompressedTensorsW4A8Mxfp4MoEMethod(Mxfp4MoEMethod):
    pass
