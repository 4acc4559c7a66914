"""Host side of the kernel for fp8 weights and activations that both come from shared memory."""

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
from w4gemm.kernels.space import Rule, Space
from w4gemm.packing.codecs import weight_operand

_TILES = {
    "64x128_1x1x1_coop": "128",
    "64x128_1x2x1_coop": "128",
    "128x128_1x1x1_coop": "64 128 256",
    "128x128_1x2x1_coop": "128 256",
    "128x128_2x1x1_coop": "128 256",
    "192x128_1x2x1_coop": "128",
    "192x128_1x1x1_coop": "128",
    "256x128_1x1x1_coop": "64 128",
    "256x128_1x2x1_coop": "128",
    "256x128_2x1x1_coop": "128",
}
"""By a config's string without tile_m, each tile_m."""
_MOST_SUMS = 192
"""Registers of a thread for all its sums."""


class Sm90Fp8BlockGemm(HopperKernel):
    """fp8 weights and e4m3 activations on SM90, many tokens: weights with scales of 128 x 128 and x with scales of 128
    columns, or a single weight with one scale a row and x with one scale a row or none."""

    name = "sm90_fp8_block_gemm"
    layout = "mma8"
    dtypes = (torch.float8_e4m3fn,)
    block_scales = True
    revision = 3
    variant = Sm90Fp8BlockVariant
    space = Space(
        _TILES,
        Path(__file__).with_name("legality.jsonl"),
        impossible=(
            mixed.GROUPED_CLUSTER,
            Rule(
                "sums of 128 columns",
                "accumulators, and sums of 128 columns beside them, take more registers than a thread has",
                lambda v: v.accumulators + v.sets_of_sums * v.own_n // 2 > _MOST_SUMS,
            ),
        ),
        held_back=(),
    )

    def entry(self) -> Callable[[Any], Callable[..., None]]:
        from w4gemm.kernels.sm90_fp8_block_gemm.kernel import Sm90Fp8BlockGemmKernel

        return Sm90Fp8BlockGemmKernel

    def supports(self, problem: GemmProblem) -> Status:
        if not (status := super().supports(problem)):
            return status
        codec = weight_operand(problem.format, problem.dtype).codec
        if problem.epilogue.block_scale:
            if not codec.rows_share_scale:
                return Status.no("takes weights with scales of 128 x 128 beside x with scales of 128 columns")
        elif problem.experts or codec.scales_on_sums or not codec.matrices:
            return Status.no(
                "takes a single fp8 weight with one scale a row, or weights with scales of 128 x 128 beside x with "
                "scales of 128 columns"
            )
        return status

    def reduction_order(self, problem: GemmProblem, config: GemmConfig) -> Hashable | None:
        """Steps of 32 columns in order, and, with scales of 128 columns, these blocks."""
        return self.name
