"""Kernels of linear layers with 4-bit weights."""

from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig

__all__ = ["MPLinearKernel", "MPLinearLayerConfig"]
