"""Every kernel: a new one is a folder and a line here. Importing this imports no DSL."""

from __future__ import annotations

import torch

from w4gemm.formats import WeightFormat
from w4gemm.kernels.base import Kernel, Operands, Program, Resources, Status, ranked
from w4gemm.kernels.cpu.spec import CpuMixedGemm
from w4gemm.kernels.dequantize_gemm.spec import DequantizeGemm
from w4gemm.kernels.sm80_mixed_gemm.spec import Sm80MixedGemm
from w4gemm.kernels.sm89_fp8_gemm.spec import Sm89Fp8Gemm
from w4gemm.kernels.sm90_decode.spec import Sm90Decode
from w4gemm.kernels.sm90_fp8_gemm.spec import Sm90Fp8Gemm
from w4gemm.kernels.sm90_mixed_gemm.spec import Sm90MixedGemm
from w4gemm.packing.layouts import FP8_LAYOUT
from w4gemm.problem import Device, GemmProblem

KERNELS: tuple[Kernel, ...] = (
    Sm90Decode(),
    Sm90MixedGemm(),
    Sm90Fp8Gemm(),
    Sm89Fp8Gemm(),
    Sm80MixedGemm(),
    DequantizeGemm(),
    CpuMixedGemm(),
)


def kernel_named(name: str) -> Kernel:
    """The kernel called ``name``.

    Raises:
        ValueError: if there is none.
    """
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    raise ValueError(f"kernel: wanted one of {', '.join(k.name for k in KERNELS)}, got {name!r}")


def on_hopper(problem: GemmProblem) -> bool:
    """Whether the kernels for SM90 run here, and with them those small ones beside them that are compiled for it."""
    return bool(kernel_named("sm90_mixed_gemm").supports(problem))


def multiplies_fp8(device: Device) -> bool:
    """Whether the kernels for fp8 activations run on a GPU, and with them the one that quantizes what they take."""
    problem = GemmProblem(1, 128, 128, torch.float8_e4m3fn, WeightFormat(), FP8_LAYOUT, device=device)
    return bool(kernel_named("sm89_fp8_gemm").supports(problem))


__all__ = [
    "KERNELS",
    "Kernel",
    "Operands",
    "Program",
    "Resources",
    "Status",
    "kernel_named",
    "multiplies_fp8",
    "on_hopper",
    "ranked",
]
