"""Kernels of linear layers in fp8."""

from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel

__all__ = ["FP8ScaledMMLinearKernel"]
