"""Host side of the kernel for e4m3 weights and activations with scales of blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch

from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels.base import Status
from w4gemm.kernels.hopper import HopperKernel
from w4gemm.kernels.sm90_fp8_block_gemm.variant import Sm90Fp8BlockVariant
from w4gemm.kernels.sm90_mixed_gemm import space as mixed
from w4gemm.kernels.space import Space
from w4gemm.packing.codecs import weight_operand

_TILES = {
    "64x128_1x1x1_coop": "128",
    "64x128_1x2x1_coop": "128",
    "128x128_1x1x1_coop": "64 128 256",
    "128x128_1x2x1_coop": "128 256",
    "128x128_2x1x1_coop": "128 256",
    "192x128_1x1x1_coop": "128",
    "192x128_1x2x1_coop": "128",
    "256x128_1x1x1_coop": "64",
}
"""By a config's string without tile_m, each tile_m."""


class Sm90Fp8BlockGemm(HopperKernel):
    """e4m3 weights with scales of 128 x 128, and e4m3 activations with scales of 128 columns, on SM90: many tokens."""

    name = "sm90_fp8_block_gemm"
    layout = "mma8"
    dtypes = (torch.float8_e4m3fn,)
    block_scales = True
    revision = 3
    variant = Sm90Fp8BlockVariant
    space = Space(
        _TILES,
        Path(__file__).with_name("legality.jsonl"),
        impossible=(mixed.GROUPED_CLUSTER,),
        held_back=(),
    )

    def entry(self) -> Callable[[Any], Callable[..., None]]:
        from w4gemm.kernels.sm90_fp8_block_gemm.kernel import Sm90Fp8BlockGemmKernel

        return Sm90Fp8BlockGemmKernel

    def supports(self, problem: GemmProblem) -> Status:
        if not (status := super().supports(problem)):
            return status
        if not (problem.epilogue.block_scale and weight_operand(problem.format, problem.dtype).codec.rows_share_scale):
            return Status.no("takes weights with scales of 128 x 128 and x with scales of 128 columns")
        return status

    def reduction_order(self, problem: GemmProblem, config: GemmConfig) -> Hashable | None:
        """Steps of 32 columns in order, then blocks of 128."""
        return self.name
