"""Every kernel: a new one is a folder and a line here. Importing this imports no DSL."""

from __future__ import annotations

import functools

import torch

from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.core.words import nearest
from w4gemm.kernels.base import Kernel, Operands, Resources, Status
from w4gemm.kernels.cpu.spec import CpuMixedGemm
from w4gemm.kernels.dequantize_gemm.spec import DequantizeGemm
from w4gemm.kernels.expert_layer.spec import ExpertLayer
from w4gemm.kernels.helpers.activation_quantize import ActivationQuantize
from w4gemm.kernels.helpers.base import Helper, launcher
from w4gemm.kernels.helpers.embedding_rows import EmbeddingRows
from w4gemm.kernels.helpers.experts import AdaptedRows, ExpertChoice, ExpertRoute, RowCombine
from w4gemm.kernels.helpers.row_sums import RowSums
from w4gemm.kernels.helpers.rows import ColumnGather, GateHalves, RmsNorm
from w4gemm.kernels.helpers.step_attention import StepAttention
from w4gemm.kernels.sm80_mixed_gemm.spec import Sm80MixedGemm, Sm89Fp8Gemm
from w4gemm.kernels.sm90_decode.spec import Sm90Decode
from w4gemm.kernels.sm90_fp8_block_gemm.spec import Sm90Fp8BlockGemm
from w4gemm.kernels.sm90_fp8_gemm.spec import Sm90Fp8Gemm
from w4gemm.kernels.sm90_mixed_gemm.spec import Sm90MixedGemm
from w4gemm.packing.layouts import layout_for

KERNELS: tuple[Kernel, ...] = (
    Sm90Decode(),
    Sm90MixedGemm(),
    Sm90Fp8Gemm(),
    Sm90Fp8BlockGemm(),
    Sm89Fp8Gemm(),
    Sm80MixedGemm(),
    DequantizeGemm(),
    CpuMixedGemm(),
)

HELPERS: tuple[type[Helper], ...] = (
    *(ColumnGather, ExpertRoute, RowCombine, ActivationQuantize),
    *(RmsNorm, GateHalves, StepAttention, ExpertLayer, ExpertChoice, AdaptedRows, RowSums, EmbeddingRows),
)
"""The small kernels beside the products."""


@functools.cache
def runs_on(device: Device, format: WeightFormat, n: int, k: int, experts: int) -> bool:
    """True if a kernel for ``device`` multiplies a weight (n, k), or (experts, n, k), by x of 16 bits or e4m3."""
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        epilogue = Epilogue(token_scale=dtype == torch.float8_e4m3fn)
        layout = layout_for(device, format, dtype)
        problem = GemmProblem(max(1, experts), n, k, dtype, format, layout, epilogue, device, experts=experts)
        if any(kernel.supports(problem) for kernel in KERNELS):
            return True
    return False


def kernel_named(name: str) -> Kernel:
    """The kernel called ``name``.

    Raises:
        ValueError: if there is none.
    """
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    names = [kernel.name for kernel in KERNELS]
    raise ValueError(f"kernel: wanted one of {', '.join(names)}, got {name!r}{nearest(name, names)}")


def config_named(name: str) -> tuple[Kernel, GemmConfig]:
    """The kernel and the config of ``"<kernel>/<config>"``.

    Raises:
        ValueError: for another string, or if there is no such kernel.
    """
    kernel, _, config = name.partition("/")
    return kernel_named(kernel), GemmConfig.parse(config)


__all__ = [
    "HELPERS",
    "KERNELS",
    "Helper",
    "Kernel",
    "Operands",
    "Resources",
    "Status",
    "config_named",
    "kernel_named",
    "launcher",
    "runs_on",
]
