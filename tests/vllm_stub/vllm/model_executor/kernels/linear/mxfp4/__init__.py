"""Kernels of linear layers in MXFP4."""

from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel, MxFp4LinearLayerConfig

__all__ = ["MxFp4LinearKernel", "MxFp4LinearLayerConfig"]
