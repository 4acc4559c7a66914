"""Numbers that follow from the compile-time parameters of the kernel: warps, stages, buffers for d."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from w4gemm.core.config import GemmConfig
from w4gemm.kernels.sm90_mixed_gemm.variant import Sm90MixedVariant
from w4gemm.packing.block import BLOCK_N

SCALE_BYTES = 16
"""The least that a bulk copy brings: of a block's scales, which are all alike, the first four."""
BOX_TOKENS = 64
"""Tokens of a box of x, and of d: those of a WGMMA."""
_MOST_SCALES = 256
"""Tokens of a TMA box at most, and so of its scales."""
_SCALE_BOX = 160
"""Tokens of each of two boxes of scales: half of an expert's 256 and the four more that it may begin at, in multiples
of 128 bytes."""


@dataclass(frozen=True)
class Sm90Fp8BlockVariant(Sm90MixedVariant):
    """All compile-time parameters of the kernel. Its pipeline, scheduler and producer are sm90_mixed_gemm's."""

    # --- warps

    @staticmethod
    def ctas_per_sm(config: GemmConfig) -> int:
        return 1

    @property
    def m64_atoms(self) -> int:
        return 1

    @property
    def warpgroups_m(self) -> int:
        """Consumer warpgroups along the tokens of a tile."""
        return self.warpgroups_n if self.config.tile_m > BOX_TOKENS else 1

    @property
    def warpgroups_n(self) -> int:
        """All consumer warpgroups, each of which reads a stage."""
        return 2

    @property
    def row_blocks(self) -> int:
        """64-token blocks of a warpgroup."""
        return self.config.tile_m // (BOX_TOKENS * self.warpgroups_m)

    @property
    def own_n(self) -> int:
        """Features of a warpgroup."""
        return self.config.tile_n * self.warpgroups_m // self.warpgroups_n

    @property
    def accumulators(self) -> int:
        """Registers of a thread for the sums of its tile."""
        return self.row_blocks * self.own_n // 2

    @property
    def sets_of_sums(self) -> int:
        """Sets of registers for sums: two, if there are enough, so that a stage is multiplied while the sums of the one
        before are added; none without scales of 128 columns."""
        if not self.promotes:
            return 0
        return 2 if self.row_blocks == 1 and self.own_n <= 128 else 1

    @property
    def stages_per_iteration(self) -> int:
        return 1

    # --- stages

    @property
    def blocks_per_scale(self) -> int:
        """Weight blocks along n of which a stage holds one scale: two, if tiles begin where the scales' blocks do."""
        return 2 if self.own_n % (2 * BLOCK_N) == 0 else 1

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a stage."""
        return self.blocks_n * self.block.code_bytes

    @property
    def copied_bytes(self) -> int:
        scales = self.blocks_n // self.blocks_per_scale if self.promotes else 0
        return self.code_bytes + scales * SCALE_BYTES

    @property
    def weight_bytes(self) -> int:
        return -(-self.copied_bytes // 128) * 128

    @property
    def scale_tokens(self) -> int:
        return super().scale_tokens if self.scale_boxes == 1 else self.scale_boxes * _SCALE_BOX

    @property
    def scale_boxes(self) -> int:
        return 1 if super().scale_tokens <= _MOST_SCALES else 2

    @property
    def box_tokens(self) -> int:
        return BOX_TOKENS

    # --- epilogue

    @property
    def boxed(self) -> bool:
        return self.vector and not self.float32_staging

    @functools.cached_property
    def staging_tokens(self) -> int:
        return 0 if self.float32_staging else 2 * BOX_TOKENS

    @property
    def tokens_per_round(self) -> int:
        return BOX_TOKENS
