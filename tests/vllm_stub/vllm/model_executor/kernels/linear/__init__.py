"""Kernels of linear layers, and their choice."""

import vllm.envs as envs
from vllm.model_executor.kernels.linear.mixed_precision import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.kernels.linear.mxfp4 import MxFp4LinearKernel, MxFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.mxfp8 import Mxfp8LinearKernel
from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm import FP8ScaledMMLinearKernel
from vllm.platforms import PlatformEnum

_POSSIBLE_KERNELS: dict[PlatformEnum, list[type[MPLinearKernel]]] = {PlatformEnum.CUDA: []}
_POSSIBLE_NVFP4_KERNELS: dict[PlatformEnum, list[type[NvFp4LinearKernel]]] = {PlatformEnum.CUDA: []}
_POSSIBLE_MXFP4_KERNELS: dict[PlatformEnum, list[type[MxFp4LinearKernel]]] = {PlatformEnum.CUDA: []}
_POSSIBLE_MXFP8_KERNELS: dict[PlatformEnum, list[type[Mxfp8LinearKernel]]] = {PlatformEnum.CUDA: []}
_POSSIBLE_WFP8A16_KERNELS: dict[PlatformEnum, list[type[FP8ScaledMMLinearKernel]]] = {PlatformEnum.CUDA: []}


def choose_mp_linear_kernel(config: MPLinearLayerConfig, compute_capability: int | None = None) -> type[MPLinearKernel]:
    reasons = []
    for kernel in _POSSIBLE_KERNELS[PlatformEnum.CUDA]:
        can_implement, reason = kernel.can_implement(config)
        if can_implement:
            return kernel
        reasons.append(reason)
    raise ValueError(f"no kernel: {reasons}")


def init_nvfp4_linear_kernel(use_a16: bool = False) -> NvFp4LinearKernel:
    if use_a16:
        return MarlinNvFp4LinearKernel(NvFp4LinearLayerConfig())
    for kernel in _POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA]:
        if kernel.__name__ not in envs.VLLM_DISABLED_KERNELS and kernel.is_supported()[0]:
            return kernel(NvFp4LinearLayerConfig())
    raise ValueError("no kernel")


def init_mxfp4_linear_kernel() -> MxFp4LinearKernel:
    for kernel in _POSSIBLE_MXFP4_KERNELS[PlatformEnum.CUDA]:
        if kernel.__name__ not in envs.VLLM_DISABLED_KERNELS and kernel.is_supported()[0]:
            return kernel(MxFp4LinearLayerConfig())
    raise ValueError("no kernel")
