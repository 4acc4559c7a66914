"""Kernels of linear layers in MXFP8."""

from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import Mxfp8LinearKernel

__all__ = ["Mxfp8LinearKernel"]
