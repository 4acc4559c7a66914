"""Kernels of linear layers, and their choice."""

from vllm.model_executor.kernels.linear.mixed_precision import MPLinearKernel, MPLinearLayerConfig
from vllm.platforms import PlatformEnum

_POSSIBLE_KERNELS: dict[PlatformEnum, list[type[MPLinearKernel]]] = {PlatformEnum.CUDA: []}


def choose_mp_linear_kernel(config: MPLinearLayerConfig, compute_capability: int | None = None) -> type[MPLinearKernel]:
    reasons = []
    for kernel in _POSSIBLE_KERNELS[PlatformEnum.CUDA]:
        can_implement, reason = kernel.can_implement(config)
        if can_implement:
            return kernel
        reasons.append(reason)
    raise ValueError(f"no kernel: {reasons}")
