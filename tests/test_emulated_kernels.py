"""Compiled kernels, run by an emulator of the GPU (gpu_emulator.py), beside the reference in float64: no GPU needed.

Each product is the smallest one that takes the paths of its config: several stages and more, a ragged tile, few CTAs so
that those of a persistent grid have several tiles and stream-k's share some. What the host does is run too; the size of
the grid and the parameters of the kernel, which compiled host code works out, are written here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from conformance.cases import FORMATS, FP8, WIDTHS, assert_close, random_weight
from emulator.kernel import Emulator
from emulator.machine import TensorMap
from emulator.ptx import Program, kernels, ptx_of
from emulator.races import RaceChecker, SharedRaceChecker
from w4gemm import QuantizedWeight, WeightFormat
from w4gemm.core.activation import ACTIVATIONS, is_gated, parse
from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import PLAIN, SCALE_BLOCK, Epilogue, EpilogueOperands, default_out_dtype
from w4gemm.core.problem import H200, GemmProblem
from w4gemm.kernels import config_named, kernel_named
from w4gemm.kernels.arguments import NO_ROWS, Arguments, ExpertRows, nested
from w4gemm.kernels.base import Operands
from w4gemm.kernels.helpers.activation_quantize import ActivationQuantize
from w4gemm.kernels.helpers.embedding_rows import EmbeddingRows
from w4gemm.kernels.helpers.experts import AdaptedRows, RowCombine
from w4gemm.kernels.helpers.row_sums import RowSums, row_sums
from w4gemm.kernels.helpers.rows import GateHalves, RmsNorm
from w4gemm.packing.repack import rows_in_pairs

pytest.importorskip("cutlass")


@functools.cache
def programs_of(unit: Any) -> list[Program]:
    return kernels(ptx_of(unit))


def program_of(unit: Any) -> Program:
    (program,) = programs_of(unit)
    return program


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- products --------------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """A product and the config that computes it."""

    config: str
    """With the kernel's name."""
    format: str
    epilogue: Epilogue
    m: int
    """Rows of x; if there are experts, this many that no expert has come behind each expert's rows."""
    n: int
    k: int
    ctas: int
    counts: tuple[int, ...] = ()
    """Rows of each expert; none for a single weight."""
    gathered: bool = False

    @property
    def rows(self) -> int:
        return sum(self.counts) + self.m * len(self.counts) if self.counts else self.m

    @property
    def dtype(self) -> torch.dtype:
        return FP8 if "fp8" in self.config else torch.bfloat16

    @property
    def problem(self) -> GemmProblem:
        kernel, _ = config_named(self.config)
        p = GemmProblem(self.rows, self.n, self.k, self.dtype, self.format, kernel.layout, self.epilogue, H200)
        return replace(p, experts=len(self.counts), gathered=self.gathered)

    @property
    def facts(self) -> dict[str, Any]:
        """Parameters whose every value is in a sample."""
        kernel, config = self.config.split("/")[0], GemmConfig.parse(self.config.split("/")[1])
        ways = {"schedule": config.schedule, "split": config.split_k, "experts": bool(self.counts)}
        ways |= {"cluster": (config.cluster_m, config.cluster_n), "few": self.m < 5, "tail": config.tail is not None}
        alone = {"element": WeightFormat.parse(self.format).element} | self.epilogue._asdict()
        return {name: (kernel, value) for name, value in ways.items()} | alone

    def __str__(self) -> str:
        return f"{self.config}-{self.format}"


ALL = Epilogue("gelu", "device", bias=True, residual=True)
GATES = Epilogue("silu_mul", bias=True, block_scale=True)
ROWS_OF_BLOCKS = Epilogue("relu", "device", bias=True, block_scale=True)
BIASED, BOTH, UNEVEN = Epilogue("relu", bias=True), (5, 0, 70, 33, 32), (5, 70, 0, 65)
GATED, WIDE = Epilogue("silu_mul", residual=True), (1, 512, 512, 2, (20, 70, 5))
RAGGED = 1, 500, 144, 2, (5, 0, 70, 1, 20)
SCALED, BLOCKS = Epilogue(token_scale=True), Epilogue(residual=True, block_scale=True)
ROWS, QUADS = Epilogue("relu", "device", bias=True, token_scale=True), Epilogue(residual=True, token_scale=True)
PRODUCTS = [
    Product("sm80_mixed_gemm/8x64x128_1x1x1_coop", "int4_g64_zfloat", ALL, 5, 130, 1504, 3),
    Product("sm80_mixed_gemm/16x64x128_1x1x1_stream", "int4_g128", Epilogue("silu", bias=True), 11, 256, 1536, 5),
    Product("sm89_fp8_gemm/16x64x256_1x1x1_pingpong", "int4_g128", SCALED, 8, 64, 2432, 8, (3, 0, 41), True),
    # codebooks with scales of two levels: on sums, in weights by a table, and in weights without one
    Product("sm90_mixed_gemm/24x64x256_1x1x1_coop_k2", "iq4_g32_s8x256", PLAIN, 27, 64, 640, 4),
    Product("sm90_mixed_gemm/16x64x128_1x1x1_coop", "nf4_g16_s8x128", BIASED, 9, 130, 640, 3),
    Product("sm90_mixed_gemm/72x128x128_1x1x1_coop", "iq4_g16_s8x256", BIASED, 70, 130, 512, 2),
    Product("sm90_decode/8x64x128_1x1x1_coop", "nf4_g16_s8x256", BIASED, 3, 70, 640, 2),
    Product("sm80_mixed_gemm/16x64x128_1x1x1_pingpong", "iq4_g32_s8x128", BIASED, 16, 70, 640, 2),
    Product("sm90_decode/8x32x128_1x1x1_coop_k2", "int4_g16_zint", Epilogue("relu", bias=True), 5, 160, 2432, 4),
    Product("sm90_mixed_gemm/16x128x128_1x1x1_stream", "int4_g32", ALL, 11, 256, 2048, 5),
    Product("sm90_mixed_gemm/16x128x128_1x1x1_stream", "int4_g128", PLAIN, 3, 896, 384, 3),
    Product("sm90_mixed_gemm/24x64x256_1x1x1_coop_k2", "int4_g128", Epilogue("gelu_tanh"), 27, 64, 512, 4),
    Product("sm90_mixed_gemm/24x64x128_1x1x1_coop_k4", "int4_g128", PLAIN, 27, 64, 768, 8),
    Product("sm90_mixed_gemm/64x192x128_1x1x1_coop_k4", "int4_g128", BIASED, 50, 184, 768, 4),
    Product("sm90_mixed_gemm/64x128x128_1x1x1_coop_k3", "int4_g128", PLAIN, 60, 128, 640, 3),
    Product("sm90_mixed_gemm/64x128x128_1x1x1_coop_k5", "int4_g128", PLAIN, 60, 128, 1280, 5),
    Product("sm90_mixed_gemm/40x192x128_1x1x1_coop_k4", "int4_g128", PLAIN, 37, 192, 1024, 4),
    # chains: two and three tiles, the last of which may lie past n; fewer k-slices than CTAs
    Product("sm90_mixed_gemm/72x64x128_1x1x1_chain_k3", "int4_g128", BIASED, 70, 184, 1152, 6),
    Product("sm90_mixed_gemm/24x64x256_1x1x1_chain_k4", "int4_g128", ALL, 27, 250, 1664, 16),
    Product("sm90_mixed_gemm/40x128x128_1x1x1_chain_k3", "int4_g64_zint", PLAIN, 33, 512, 256, 6),
    Product("sm90_mixed_gemm/24x64x256_1x1x1_chain_k3", "nvfp4", BIASED, 27, 130, 1280, 12),
    Product("sm90_mixed_gemm/32x128x128_1x1x1_chain_k3", "int8_g128", PLAIN, 30, 256, 640, 3),
    Product("sm90_fp8_gemm/72x64x256_1x1x1_chain_k3", "int4_g64", ROWS, 70, 184, 1152, 6),
    Product("sm90_fp8_gemm/136x64x128_1x1x1_chain_k4", "int4_g128", SCALED, 130, 184, 640, 4),
    Product("sm90_fp8_gemm/72x64x256_1x1x1_chain_k4", "int4_g128_e4m3", QUADS, 70, 250, 1664, 8),
    Product("sm90_fp8_gemm/24x128x256_1x1x1_chain_k3", "int4_g128_e4m3", ROWS, 20, 512, 512, 6),
    Product("sm90_mixed_gemm/128x64x128_1x1x1_pingpong_k2", "int4_g128", PLAIN, 50, 64, 896, 2),
    Product("sm90_mixed_gemm/128x64x128_1x1x1_coop", "int4_g16", PLAIN, 3, 128, 256, 2, (5, 130, 0, 37)),
    Product("sm90_mixed_gemm/256x64x64_1x1x1_coop_k3", "q4_k", BIASED, 200, 64, 768, 3),
    # boxes of x that do not divide the tile, the last of them moved back; a short round of the epilogue
    Product("sm90_mixed_gemm/104x64x128_1x1x1_coop", "int4_g128", PLAIN, 206, 64, 1152, 1),
    Product("sm90_mixed_gemm/152x64x128_1x1x1_coop", "int4_g128", BIASED, 170, 64, 896, 1),
    Product("sm90_fp8_gemm/88x64x256_1x1x1_coop_k2", "int4_g128", SCALED, 70, 64, 1024, 2),
    Product("sm90_fp8_gemm/136x64x128_1x1x1_coop_k2", "int4_g128", SCALED, 130, 64, 512, 2),
    Product("sm90_fp8_gemm/16x64x256_1x1x1_pingpong", "int4_g128", BLOCKS, 1, 64, 1152, 2, (5, 0, 17)),
    # by the rows of an expert in two launches, or in tiles of two widths
    Product("sm90_mixed_gemm/8x128x128_1x1x1_coop+32x128x128_1x1x1_coop", "int4_g128", BIASED, 3, 130, 640, 2, UNEVEN),
    Product("sm90_mixed_gemm/8x256x128_1x1x1_coop+64x128x256_1x1x1_coop", "nf4", PLAIN, 1, 256, 512, 2, (0, 70, 5)),
    Product("sm90_mixed_gemm/8x128x128_1x1x1_coop+16x128x128_1x1x1_coop", "mxfp4", PLAIN, 1, 128, 512, 2, UNEVEN, True),
    Product("sm90_mixed_gemm/16x128x128_1x1x1_coop+64x64x128_1x1x1_coop", "int4_g128", BIASED, 3, 128, 384, 2, BOTH),
    # a step's words in two segments; copies of cp.async that cover parts of several blocks; scales that lie elsewhere
    Product("sm80_mixed_gemm/64x128x128_1x1x1_coop", "int6_g64_zint", PLAIN, 9, 128, 384, 1),
    Product("sm80_mixed_gemm/8x64x128_1x1x1_coop", "q2_k", PLAIN, 5, 64, 768, 1),
    Product("sm90_decode/8x32x128_1x1x1_coop_k2", "q6_k", PLAIN, 5, 96, 1280, 4),
    Product("sm90_decode/8x64x128_1x1x1_coop", "q3_k", PLAIN, 5, 128, 1280, 2),
    # factors between two blocks; of one block that is alone along k, too
    Product("sm90_mixed_gemm/16x64x256_1x1x1_coop", "q4_k", PLAIN, 11, 64, 1152, 1),
    Product("sm90_mixed_gemm/16x64x256_1x1x1_coop", "int4_g64_zfloat_u8x128", PLAIN, 11, 64, 1152, 1),
    Product("sm90_mixed_gemm/128x64x64_1x1x1_coop", "q6_k", PLAIN, 3, 64, 384, 1),
    Product("sm90_mixed_gemm/16x64x64_1x1x1_coop", "q6_k", PLAIN, 3, 64, 384, 1),
    Product("sm90_mixed_gemm/16x128x128_1x1x1_coop", "q5_k", PLAIN, 3, 128, 512, 2, (5, 0, 18)),
    Product("sm90_mixed_gemm/144x64x128_1x1x1_coop", "q3_k", PLAIN, 3, 64, 512, 1),
    Product("sm90_mixed_gemm/128x64x128_1x1x1_coop", "q2_k", PLAIN, 3, 64, 512, 1),
    Product("sm90_mixed_gemm/128x64x64_1x1x1_coop", "q4_k", PLAIN, 3, 64, 512, 1),
    # codes times scales of six bits, factors on the sums of a block: of one range of tokens, and of two
    Product("sm90_mixed_gemm/32x64x256_1x1x1_coop_k2", "q3_k", BIASED, 27, 130, 1280, 6),
    Product("sm90_mixed_gemm/96x128x128_1x1x1_coop", "q3_k", PLAIN, 70, 130, 512, 2),
    Product("sm90_mixed_gemm/32x128x256_1x1x1_coop", "q3_k", PLAIN, 27, 128, 768, 1),
    Product("sm90_mixed_gemm/16x64x128_1x1x1_pingpong", "q3_k", PLAIN, 3, 64, 768, 2, (5, 0, 18)),
    Product("sm90_mixed_gemm/128x64x128_1x1x1_coop", "q3_k", PLAIN, 70, 136, 512, 1),
    # scales that lanes prepare for one another, in the staging buffer of tile after tile
    Product("sm90_mixed_gemm/128x64x128_1x1x1_coop", "q2_k", PLAIN, 3, 136, 768, 1),
    Product("sm90_mixed_gemm/128x128x64_1x1x1_coop", "q6_k", BIASED, 3, 264, 256, 1),
    # factors that are loaded once for several stages
    Product("sm90_mixed_gemm/256x128x64_1x1x1_coop", "q3_k", PLAIN, 3, 136, 640, 1),
    Product("sm80_mixed_gemm/64x128x64_1x1x1_coop", "q6_k", PLAIN, 9, 128, 384, 1),
    Product("sm90_decode/8x48x128_1x1x1_coop", "q4_k", PLAIN, 5, 96, 896, 4),
    # up to four tokens: groups in columns
    Product("sm90_decode/8x32x128_1x1x1_coop", "q6_k", PLAIN, 2, 96, 1280, 2),
    Product("sm90_decode/8x64x128_1x1x1_coop", "q2_k", PLAIN, 3, 128, 768, 2),
    Product("sm90_decode/8x32x128_1x1x1_coop", "q5_k", PLAIN, 4, 64, 768, 2),
    Product("sm90_decode/8x48x128_1x1x1_coop_k2", "q3_k", PLAIN, 1, 96, 1280, 4),
    Product("sm90_decode/8x64x128_1x1x1_coop", "q5_k", PLAIN, 1, 128, 1280, 2),
    Product("sm90_decode/8x32x128_1x1x1_coop", "int4_g64_zfloat_u8x256", PLAIN, 1, 96, 896, 2),
    # scales that lanes prepare for one another, where warps hand sums over
    Product("sm90_decode/8x128x128_1x1x1_coop", "q5_k", PLAIN, 6, 128, 1280, 1),
    Product("sm90_decode/16x80x128_1x1x1_coop", "q6_k", PLAIN, 11, 160, 640, 1),
    Product("sm90_decode/8x64x128_1x1x1_coop", "int8_g32_zfloat_fp16", PLAIN, 5, 128, 1280, 2),
    Product("sm90_mixed_gemm/16x64x256_1x1x1_coop", "int5_g128", PLAIN, 11, 64, 768, 1),
    Product("sm90_mixed_gemm/128x64x128_1x1x1_coop", "int8_g128", PLAIN, 3, 64, 256, 2, (5, 130)),
    Product("sm90_decode/8x64x128_1x1x1_coop", "e4m3_col_fp32", PLAIN, 5, 128, 1280, 2),
    Product("sm90_decode/8x64x128_1x1x1_coop", "mxfp6", PLAIN, 5, 128, 1280, 2),
    # codes that are multiplied as they are stored
    Product("sm90_fp8_gemm/128x64x128_1x1x1_coop", "e4m3_col_fp32", SCALED, 3, 64, 256, 2, (5, 130)),
    Product("sm90_fp8_gemm/24x64x256_1x1x1_coop_k2", "e4m3_col_fp32", BLOCKS, 27, 64, 768, 4),
    Product("sm90_fp8_gemm/16x64x256_1x1x1_pingpong", "e4m3_g128_b128", BLOCKS, 1, 192, 768, 2, (5, 0, 17)),
    Product("sm90_fp8_gemm/64x192x256_1x1x1_coop", "e4m3_g128_b128", BLOCKS, 40, 192, 512, 1),
    Product("sm90_fp8_gemm/128x64x128_1x1x1_coop", "e4m3_g128_b128", BLOCKS, 3, 64, 384, 2, (5, 130)),
    Product("sm90_fp8_gemm/160x128x128_1x1x1_stream", "e4m3_g128_b128", BLOCKS, 150, 256, 512, 3),
    # both operands in shared memory
    Product("sm90_fp8_block_gemm/128x128x128_1x1x1_coop", "e4m3_g128_b128", ROWS_OF_BLOCKS, 200, 320, 640, 2),
    Product("sm90_fp8_block_gemm/128x128x128_1x1x1_coop", "e5m2_g128_b128", ROWS_OF_BLOCKS, 70, 130, 384, 2),
    Product("sm90_fp8_block_gemm/128x128x128_1x1x1_coop", "e4m3_g128_b128", ROWS_OF_BLOCKS, 3, 130, 640, 2, (5, 200)),
    Product("sm90_fp8_block_gemm/64x128x128_1x1x1_coop", "e4m3_g128_b128", GATES, 3, 264, 640, 2, (5, 70)),
    Product("sm90_fp8_block_gemm/256x128x128_1x1x1_coop", "e4m3_g128_b128", BLOCKS, 250, 130, 640, 1),
    Product("sm90_fp8_block_gemm/256x128x128_1x1x1_coop", "e4m3_g128_b128", BLOCKS, 2, 130, 384, 1, (5, 270)),
    Product("sm90_fp8_block_gemm/128x256x128_1x1x1_coop", "e4m3_col_fp32", ROWS, 200, 320, 640, 2),
    Product("sm90_fp8_block_gemm/256x128x128_1x1x1_coop", "e4m3_col_fp32", QUADS, 250, 130, 640, 1),
    Product("sm90_fp8_block_gemm/64x256x128_1x1x1_coop", "e5m2_col_fp32", SCALED, 70, 264, 128, 2),
    # multicast in a cluster, of x and of weights
    Product("sm90_fp8_block_gemm/128x64x128_1x2x1_coop", "e4m3_g128_b128", ROWS_OF_BLOCKS, 63, 130, 1100, 2),
    Product("sm90_fp8_block_gemm/128x128x128_2x1x1_coop", "e4m3_g128_b128", ROWS_OF_BLOCKS, 300, 130, 1100, 2),
    Product("sm89_fp8_gemm/16x64x256_1x1x1_pingpong", "e4m3_col_fp32", SCALED, 8, 64, 768, 8, (3, 0, 41), True),
    # float zero points: the sums of x come with the launch, or from one more instruction
    Product("sm90_fp8_gemm/16x64x256_1x1x1_coop", "int4_g64_zfloat", SCALED, 11, 64, 600, 1),
    Product("sm90_fp8_gemm/64x64x256_1x1x1_coop_k2", "int4_g128_zfloat_fp16", SCALED, 50, 64, 1024, 2),
    Product("sm90_fp8_gemm/64x128x256_1x1x1_stream", "int4_g32_zfloat", SCALED, 40, 256, 1024, 3),
    Product("sm90_fp8_gemm/128x128x128_1x1x1_coop", "int4_g128_zfloat", SCALED, 3, 128, 384, 2, (5, 130)),
    Product("sm89_fp8_gemm/16x64x256_1x1x1_pingpong", "int4_g32_zfloat", SCALED, 8, 64, 768, 8, (3, 0, 41), True),
    Product("sm90_fp8_gemm/16x64x256_1x1x1_coop", "e2m1_g16_e4m3", SCALED, 11, 64, 512, 1),
    Product("sm89_fp8_gemm/16x64x256_1x1x1_pingpong", "e2m1_g32_e4m3", SCALED, 8, 64, 512, 1),
]


def experts_of(case: Product) -> QuantizedWeight:
    format, layout = WeightFormat.parse(case.format), case.problem.layout
    if not case.counts:
        return random_weight(format, case.n, case.k).repack(layout)
    weights = (random_weight(format, case.n, case.k, seed) for seed in range(len(case.counts)))
    return QuantizedWeight.stack(weights, len(case.counts), layout)


def rows_of(case: Product) -> ExpertRows:
    """The rows of each expert, and of the tokens that they are gathered from."""
    if not case.counts:
        return NO_ROWS
    starts = [sum(case.counts[:e]) + e * case.m for e in range(len(case.counts))]
    ends = [start + count for start, count in zip(starts, case.counts, strict=True)]
    indices = torch.randint(0, 40, (case.rows,), dtype=torch.int32) if case.gathered else None
    return ExpertRows(torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32), indices, 0)


def operands_of(case: Product, tokens: int, w: QuantizedWeight) -> EpilogueOperands:
    asked, out_dtype = case.epilogue, default_out_dtype(case.dtype)
    blocks = -(-case.k // SCALE_BLOCK)
    return EpilogueOperands(
        alpha=torch.tensor([0.7]) if asked.alpha else None,
        bias=randn(*(case.counts and (len(case.counts),)), case.n, seed=5) if asked.bias else None,
        residual=randn(case.rows, asked.columns(case.n), seed=6, dtype=out_dtype) if asked.residual else None,
        token_scale=randn(tokens, seed=7, dtype=torch.float32).abs() if asked.token_scale else None,
        block_scale=randn(tokens, blocks, seed=8, dtype=torch.float32).abs() if asked.block_scale else None,
    )


def parameters(case: Product, config: GemmConfig, arguments: Arguments) -> list[Any]:
    """The parameters of the kernel of a launch with ``config``, without those that it does not have."""
    name, (kernel, _) = case.config.split("/")[0], config_named(case.config)
    if name in ("sm80_mixed_gemm", "sm89_fp8_gemm"):
        flat = (*arguments[:3], *arguments.epilogue, *arguments.rows, *arguments.workspace, arguments.max_clusters)
        return [value for value in flat if value is not None]
    inner = arguments.behind_tma()
    flat = (inner.weight, inner.out, *inner.epilogue, *inner.rows, *inner.workspace)
    behind = [value for value in flat if value is not None]
    variants: list[Any] = [kernel.variant.of(case.problem, own) for own in launches_of(config)]  # type: ignore[attr-defined]
    if name == "sm90_decode":
        return [TensorMap(arguments.x, variants[0].tokens, 64), None, *behind]
    return [value for variant in variants for value in prepared(variant, arguments)] + behind


def launches_of(config: GemmConfig) -> list[GemmConfig]:
    """The config, or the two that it consists of."""
    return [replace(config, tail=None), *([config.tail] if config.tail else [])]


def prepared(variant: Any, arguments: Arguments) -> list[Any]:
    """Parameters of x and its scales, of the matrix instruction, and of d."""
    config, x, scales = variant.config, arguments.x, []
    if variant.row_numbers:
        by_column = (arguments.x_sums if variant.takes_x_sums else arguments.epilogue.block_scale).T
        whole = by_column.as_strided((len(by_column), by_column.stride(0)), (by_column.stride(0), 1))
        box = variant.scale_tokens // variant.scale_boxes
        scales = [TensorMap(whole, variant.blocks_k * variant.row_numbers, box, swizzled=False), None]
    target = [TensorMap(arguments.out, variant.tokens_per_round, 64), None] if variant.boxed else [arguments.out]
    shared = 1 if config.split_k > 1 else config.cluster_n  # each CTA brings a part of a box to all that share x
    boxes = [x] if variant.gathered else [TensorMap(x, variant.box_tokens // shared, 128 // x.itemsize), None]
    return [*boxes, *scales, None, *target]


def computed(
    case: Product,
    x: torch.Tensor,
    w: QuantizedWeight,
    operands: EpilogueOperands,
    rows: ExpertRows,
    emulator: Callable[..., Emulator] = Emulator,
) -> torch.Tensor:
    """d, NaN where nothing was stored. Flags of stream-k must be 0 afterwards."""
    kernel, config = config_named(case.config)
    programs = programs_of(kernel.unit(case.problem, config))
    cluster = config.cluster_m * config.cluster_n * config.split_k
    launches = launches_of(config) if len(programs) > 1 else [config]

    def launch(*values: Any) -> None:
        arguments = nested(values)
        for program, own in zip(programs, launches, strict=True):
            emulator(program, case.ctas, cluster=cluster).run(*parameters(case, own, arguments))
            arguments = arguments._replace(rows=arguments.rows._replace(settled=1))
        assert arguments.workspace.flags is None or not arguments.workspace.flags.any(), "flags stay set"

    out = torch.full((case.rows, case.epilogue.columns(case.n)), torch.nan, dtype=case.problem.out_dtype)
    workspace = torch.zeros(
        kernel.workspace_bytes(replace(case.problem, device=replace(H200, sms=case.ctas)), config), dtype=torch.uint8
    )
    kernel.launcher(launch, case.problem, config)(Operands(x, w.tensors, out, operands, rows, workspace))
    return out


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_products(case: Product) -> None:
    w, rows = experts_of(case), rows_of(case)
    x = randn(40 if case.gathered else case.rows, case.k, seed=3, dtype=case.dtype)
    operands = operands_of(case, len(x), w)
    d = computed(case, x, w, operands, rows)
    fused = {"activation": case.epilogue.activation, "alpha": operands.alpha}
    scales = operands.token_scale
    if operands.block_scale is not None:
        x, fused["out_dtype"] = operands.scaled_blocks(x.float()), d.dtype
    if not case.counts:
        check(d, x, w, operands.bias, residual=operands.residual, token_scale=scales, **fused)
        return
    for e, (first, last) in enumerate(zip(rows.starts.tolist(), rows.ends.tolist(), strict=True)):
        own = torch.arange(first, last)
        sources = own if rows.indices is None else rows.indices[own]
        bias, residual = (None if t is None else t[i] for t, i in ((operands.bias, e), (operands.residual, own)))
        token_scale = None if scales is None else scales[sources]
        check(d[own], x[sources], w.expert(e), bias, residual=residual, token_scale=token_scale, **fused)
        d[own] = torch.nan
    assert d.isnan().all(), "rows that no expert has were written"


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize(
    "case",
    [
        # several tiles of a CTA, which add up k sets, decode by a table, share scales, or have two launches
        Product("sm90_mixed_gemm/16x64x256_1x1x1_coop", "int4_g128", PLAIN, 1, 128, 512, 1, (5, 20)),
        Product("sm90_mixed_gemm/64x128x256_1x1x1_coop", "iq4_g32_fp16", BIASED, 1, 128, 512, 1, (70, 0, 5)),
        Product("sm90_mixed_gemm/16x256x128_1x1x1_coop", "q4_k", PLAIN, 1, 512, 512, 1, (20, 5)),
        Product("sm90_mixed_gemm/16x128x128_1x1x1_coop+64x64x128_1x1x1_coop", "nf4", BIASED, 3, 128, 384, 2, BOTH),
        # both widths in one launch: nothing of the first is read or written once its memory is free
        Product("sm90_mixed_gemm/8x256x128_1x1x1_coop+64x128x256_1x1x1_coop", "nf4", PLAIN, 1, 256, 512, 2, (0, 70, 5)),
        Product("sm90_mixed_gemm/16x256x128_1x1x1_coop+64x128x256_1x1x1_coop", "iq4_g32_s8x256", GATED, *RAGGED, True),
        Product("sm90_mixed_gemm/16x256x128_1x1x1_coop+64x128x256_1x1x1_coop", "iq4_g32_fp16", PLAIN, *WIDE, True),
        Product("sm90_mixed_gemm/16x256x128_1x1x1_coop+64x128x256_1x1x1_coop", "q4_k", BIASED, *WIDE),
        Product("sm90_decode/8x64x128_1x1x1_coop", "q3_k", PLAIN, 5, 128, 1280, 2),
        Product("sm80_mixed_gemm/64x128x128_1x1x1_coop", "int6_g64_zint", PLAIN, 9, 128, 384, 1),
    ],
    ids=str,
)
def test_no_race_in_shared_memory(case: Product) -> None:
    w, rows = experts_of(case), rows_of(case)
    x = randn(40 if case.gathered else case.rows, case.k, seed=3, dtype=case.dtype)
    computed(case, x, w, operands_of(case, len(x), w), rows, SharedRaceChecker)


@pytest.mark.sampled(0.35)
@pytest.mark.parametrize(
    "config, name",
    [
        *itertools.product(
            ["sm90_fp8_gemm/64x64x256_1x1x1_coop", "sm89_fp8_gemm/16x64x256_1x1x1_pingpong"],
            [
                *("e4m3_col_fp32", "e4m3_g128_b128", "int5_g64", "int3_g32", "int3_g64_zint", "int2_g128_fp16"),
                *("int2_g32_zint", "e5m2_col_fp32", "e5m2_g128_b128", "int4_g32_zfloat", "int3_g64_zfloat_fp32"),
            ],
        ),
        ("sm90_decode/16x64x128_1x1x1_coop", "q3_k"),
        ("sm90_mixed_gemm/32x64x128_1x1x1_coop", "q3_k"),
    ],
)
def test_one_hot_x_gives_the_dequantized_weight_where_scales_multiply_sums(config: str, name: str) -> None:
    """Every bit: a code is multiplied exactly, and the sum of one product by its scale in float32."""
    case = Product(config, name, Epilogue(out_dtype=torch.float32), 256, 64, 256, 2 if "sm90" in config else 16)
    w = experts_of(case)
    d = computed(case, torch.eye(case.k).to(case.dtype), w, operands_of(case, case.k, w), NO_ROWS)
    assert torch.equal(d.T, w.dequantize())


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize(
    "format",
    [
        WeightFormat.parse(name)
        for name in ("int4_g32_zint", "iq4_g32_s8x256", *WIDTHS)
        if name not in ("e4m3_col_fp32", "e5m2_col_fp32")
    ],
    ids=str,
)
def test_dequantized_weights(format: WeightFormat) -> None:
    """Every bit is that of dequantize. A lane decodes one step of a half, so it turns words by what a register says."""
    kernel, dtype, w = kernel_named("dequantize_gemm"), torch.bfloat16, random_weight(format, 64, 256)
    problem = GemmProblem(4096, 2048, 256, dtype, w.format, "mma16", device=H200)
    dense = torch.full((64, 256), torch.nan, dtype=dtype)
    program = program_of(kernel.unit(problem, kernel.configs(problem)[0]))
    Emulator(program, 1).run(w.repack("mma16").tensors[0], dense.view(torch.int32))
    assert torch.equal(dense, w.dequantize(dtype))


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("wide", [True, False], ids=["int64", "int32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", [f for f in FORMATS if EmbeddingRows.of(H200, torch.float16, f, 200)], ids=str)
def test_embedding_rows(format: WeightFormat, dtype: torch.dtype, wide: bool) -> None:
    """Every bit is that of dequantize; ids outside give NaN and read nothing elsewhere. Two CTAs of several turns."""
    w, ids = random_weight(format, 130, 200), torch.tensor([129, 0, 64, -1, 7, 7, 130, 63, 15, 24])
    out = torch.full((len(ids) * 5, 200), torch.nan, dtype=dtype)
    program = program_of(EmbeddingRows.of(H200, dtype, format, 200, wide).unit())
    many = ids.repeat(5).to(torch.int64 if wide else torch.int32)
    Emulator(program, 2).run(w.repack("mma16").tensors[0], many, out, w.n)
    inside = (many >= 0) & (many < w.n)
    assert torch.equal(out[inside], w.dequantize(dtype)[many[inside]]) and out[~inside].isnan().all()


def test_configs_of_one_order_give_equal_bits_with_zero_points_of_two_levels() -> None:
    """Tiles of one strip add them up for each group, others for a block."""
    by_order: dict[Any, list[torch.Tensor]] = {}
    for tile_n in (16, 32, 48):
        config = f"sm90_decode/8x{tile_n}x128_1x1x1_coop"
        case = Product(config, "q4_k", Epilogue(out_dtype=torch.float32), 5, 96, 896, 2)
        w = experts_of(case)
        d = computed(case, randn(5, 896), w, operands_of(case, 5, w), rows_of(case))
        kernel, own = config_named(config)
        by_order.setdefault(kernel.reduction_order(case.problem, own), []).append(d)
    assert len(by_order) == 2
    assert all(torch.equal(d, equal[0]) for equal in by_order.values() for d in equal)


class Invariant(Product):
    """A product whose bits must not depend on the number of tokens."""

    @property
    def problem(self) -> GemmProblem:
        return replace(super().problem, batch_invariant=True)


@pytest.mark.parametrize("name", ["iq4_g32_fp16", "nf4_g64_fp32", "q3_k"])
def test_configs_of_one_order_give_equal_bits_where_few_tokens_would_scale_sums(name: str) -> None:
    results, orders = [], set()
    for tile_m in (32, 128):
        config = f"sm90_mixed_gemm/{tile_m}x64x128_1x1x1_coop"
        case = Invariant(config, name, Epilogue(out_dtype=torch.float32), 5, 64, 384, 1)
        w = experts_of(case)
        results.append(computed(case, randn(5, 384), w, operands_of(case, 5, w), rows_of(case)))
        kernel, own = config_named(config)
        orders.add(kernel.reduction_order(case.problem, own))
    assert len(orders) == 1 and torch.equal(*results)


def check(d: torch.Tensor, x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None, **fused: Any) -> None:
    assert_close(d, x, w, bias, **{name: value for name, value in fused.items() if value is not None})


def test_a_nan_stays_one() -> None:
    """In its row alone, and behind a relu too."""
    case = next(case for case in PRODUCTS if case.epilogue.activation == "relu")
    w, x = experts_of(case), randn(case.rows, case.k, seed=3)
    x[2] = torch.nan
    is_nan = computed(case, x, w, operands_of(case, len(x), w), NO_ROWS).isnan().all(1)
    assert is_nan.tolist() == [row == 2 for row in range(len(x))]


# --- helpers ---------------------------------------------------------------------------------------------------------

ROUNDED_ONCE = 1.01 * 2.0**-8
"""Relative error of a bfloat16."""


def close(d: torch.Tensor, expected: torch.Tensor, roundings: int = 1, least: float = 1e-30) -> None:
    torch.testing.assert_close(d.double(), expected, rtol=roundings * ROUNDED_ONCE, atol=least)


@pytest.mark.parametrize("k, add", [(264, False), (520, True)])
def test_rms_norm(k: int, add: bool) -> None:
    """The epsilon is as large as the mean square."""
    eps, x, weight = 0.01, randn(3, k, seed=1) / 10, randn(k, seed=2)
    residual = randn(3, k, seed=3) / 20 if add else None
    out, total = (torch.full_like(x, torch.nan) for _ in range(2))
    tensors = (x, residual, weight, out, total if add else None)
    program = program_of(RmsNorm.of(H200, x.dtype, k, add).unit())
    Emulator(program, len(x)).run(*(t for t in tensors if t is not None), eps)
    if residual is not None:
        x = (x.float() + residual.float()).to(x.dtype)
        assert torch.equal(total, x)
    y = x.double()
    close(out, y / (y.square().mean(1, keepdim=True) + eps).sqrt() * weight.double(), roundings=2)


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if is_gated(name)])
def test_gate_halves(activation: str) -> None:
    """Tails too: a bfloat16 has the same relative error everywhere."""
    gates = torch.linspace(-9, 9, 1032).bfloat16()
    x = torch.stack((torch.cat((gates, gates.flip(0) / 3)), torch.cat((gates.flip(0), gates / 3 + 1))))
    out = torch.full((2, 1032), torch.nan, dtype=x.dtype)
    program = program_of(GateHalves.of(H200, x.dtype, activation).unit())
    ctas = -(-1032 // (8 * program.threads))
    Emulator(program, 2 * ctas).run(x, out, ctas)
    close(out, parse(activation).apply(torch.stack(x.double().chunk(2, 1), -1).flatten(1)), least=1e-14)


@pytest.mark.parametrize("front, k", [("", 515), ("rms", 520), ("add_rms", 520), ("silu_mul", 264)])
def test_activation_quantize(front: str, k: int) -> None:
    """Rows whose top lies anywhere, in front of the last warp and in it."""
    m, eps, wide = 4, 0.01, k % 8 == 0
    x = randn(m, k * (2 if front == "silu_mul" else 1), seed=1) / 10
    for row, column in enumerate((0, 200, k - 1, k // 2)):
        x[row, column] = 3.0
        x[row, k:] = 1.0
    weight = torch.ones(k, dtype=x.dtype) if "rms" in front else None
    residual = randn(m, k, seed=3) / 20 if front == "add_rms" else None
    x8, scales = torch.zeros(m, k, dtype=torch.uint8), torch.full((m,), torch.nan)
    total = torch.full_like(x, torch.nan) if front == "add_rms" else None
    program = program_of(ActivationQuantize.of(H200, x.dtype, k, front, wide, chunks=1).unit())
    tensors = [t for t in (x, residual, weight, x8, scales, total) if t is not None]
    Emulator(program, m).run(*tensors, eps)
    if residual is not None:
        x = (x.float() + residual.float()).to(x.dtype)
        assert total is not None and torch.equal(total, x)
    y = x.double()
    if front == "silu_mul":
        y = torch.nn.functional.silu(y[:, :k]) * y[:, k:]
    elif front:
        y = y / (y.square().mean(1, keepdim=True) + eps).sqrt()
    tops = y.abs().amax(1)
    close(scales, tops / 448)
    least = tops[:, None] / 448 * 2.0**-10
    error = (x8.view(FP8).double() * scales.double()[:, None] - y).abs()
    assert (error <= 1.01 * (y.abs() * (2.0**-4 + 3 * ROUNDED_ONCE) + least)).all()


@pytest.mark.parametrize("group, k", [(32, 4112), (64, 528), (128, 272)])
def test_row_sums(group: int, k: int) -> None:
    """Exact, as sums of so few numbers are in any order. The last group may be shorter."""
    x, groups, parts = randn(3, k, seed=1, dtype=FP8), -(-k // group), -(-k // 4096)
    sums = torch.full((groups, 4), torch.nan)
    Emulator(program_of(RowSums.of(H200, group).unit()), 3 * parts).run(x.view(torch.uint8), sums, parts)
    padded = torch.nn.functional.pad(x.double(), (0, groups * group - k))
    assert torch.equal(sums[:, :3].T.double(), padded.view(3, groups, group).sum(2))
    assert torch.equal(sums[:, :3].T, row_sums(x, group)) and sums[:, 3].isnan().all()


@pytest.mark.parametrize("added", [False, True])
def test_row_combine(added: bool) -> None:
    d, weights = randn(9, 136, seed=1), randn(5, 4, seed=2, dtype=torch.float32)
    more = randn(20, 136, seed=3) if added else None
    rows = torch.tensor([[0, 8, -1, 3], [1, 1, 1, 1], [-1, -1, -1, -1], [2, 5, 7, -1], [4, 6, 0, 8]], dtype=torch.int32)
    out = torch.full((5, 136), torch.nan, dtype=d.dtype)
    program = program_of(RowCombine.of(H200, d.dtype, 4, added).unit())
    ctas = -(-136 // (8 * program.threads))
    Emulator(program, 5 * ctas).run(*(t for t in (d, rows, weights, more, out) if t is not None), 1, ctas)
    terms = torch.where(rows[..., None] >= 0, d.double()[rows.clamp(min=0)], 0.0) * weights.double()[..., None]
    expected = terms.sum(1)
    close(out, expected if more is None else expected + more.view(5, 4, -1).double().sum(1), least=1e-6)


@pytest.mark.parametrize("activation, halves", [("silu_mul", True), ("swiglu_oai", False), ("relu2", False)])
def test_adapted_rows(activation: str, halves: bool) -> None:
    """Choices of experts elsewhere too, of which there is no row to read or to write."""
    n, parts = 1032, 1 + is_gated(activation)
    rows, added = randn(4, n * parts, seed=1), randn(5, n * parts, seed=2)
    places = torch.tensor([2, -1, 0, 3, -1], dtype=torch.int32)
    hidden, moved = (torch.full((size, n), torch.nan, dtype=rows.dtype) for size in (5, 4))
    program = program_of(AdaptedRows.of(H200, rows.dtype, activation, halves).unit())
    ctas = -(-n // (8 * program.threads))
    Emulator(program, 5 * ctas).run(rows, added, places, hidden, moved, ctas)
    pairs = (rows_in_pairs(added) if halves else added).double()
    y = pairs + torch.where(places[:, None] >= 0, rows.double()[places.clamp(min=0)], 0.0)
    close(hidden, parse(activation).apply(y), least=1e-6)
    assert torch.equal(moved[[2, 0, 3]], hidden[[0, 2, 3]]) and moved[1].isnan().all()


# --- what the emulator refuses ---------------------------------------------------------------------------------------

PTX = """
.visible .entry kernel(.param .align 8 .b8 kernel_param_0[8])
.reqntid 64, 1, 1
{{
	.reg .pred %p<2>;
	.reg .b32 %r<3>;
	.reg .b64 %rd<3>;
	ld.param.b64 %rd0, [kernel_param_0];
	mov.u32 %r0, %tid.x;
	mul.wide.u32 %rd1, %r0, 4;
	add.s64 %rd2, %rd0, %rd1;
	{body};
	st.global.b32 [%rd2], %r0;
	ret;
}}
"""
"""out[i] = i for 64 numbers."""


@pytest.mark.parametrize(
    "body, error",
    [
        ("mov.b32 %r1, 0", ""),
        ("sin.approx.f32 %r1, %r0", "does not know sin.approx.f32"),
        ("add.s64 %rd2, %rd2, 4", "outside every tensor"),
        ("add.s64 %rd2, %rd2, 2", "not aligned to 4 bytes"),
        ("ld.shared.b32 %r1, [__dynamic_shmem__0]", "nothing was written there"),
        ("bar.sync 0, 96", "threads wait for ever at bar.sync 0, 96"),
        ("bar.sync 0, 32", "64 threads at a barrier of 32"),
        (
            "$L__1: ld.acquire.gpu.global.b32 %r1, [%rd0]; setp.eq.b32 %p0, %r1, 0; @%p0 bra $L__1",
            "nothing ends the wait",
        ),
        ("setp.lt.u32 %p0, %r0, 8; @%p0 ret; shfl.sync.idx.b32 %r1, %r0, 0, 31, -1", "nothing ends"),
    ],
)
def test_what_the_emulator_refuses(body: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emulator.machine._MOST_IDLE", 50)
    out = torch.zeros(64, dtype=torch.int32)
    if not error:
        Emulator(PTX.format(body=body), 1).run(out)
        assert out.tolist() == list(range(64))
        return
    with pytest.raises((RuntimeError, AssertionError, NotImplementedError), match=error):
        Emulator(PTX.format(body=body), 1).run(out)


def test_copies_arrive_when_they_are_waited_for() -> None:
    copy = "cp.async.cg.shared.global [__dynamic_shmem__0], [%rd0], 16; cp.async.commit_group; {wait}; "
    body = copy + "bar.sync 0; ld.shared.b32 %r0, [__dynamic_shmem__0]"
    out = torch.full((64,), 7, dtype=torch.int32)
    Emulator(PTX.format(body=body.format(wait="cp.async.wait_group 0")), 1).run(out)
    assert out.tolist() == [7] * 64
    with pytest.raises(RuntimeError, match="nothing was written there"):
        Emulator(PTX.format(body=body.format(wait="cp.async.wait_group 1")), 1).run(out)


@pytest.mark.parametrize(
    "body, error",
    [
        ("ld.global.b32 %r1, [%rd0]; bar.sync 0", ""),
        ("ld.global.b32 %r1, [%rd0]; bar.warp.sync -1", "a race: thread 0 writes"),
        ("st.relaxed.gpu.global.b32 [%rd0], %r0; bar.sync 0", ""),
        ("st.global.b32 [%rd2], 7; bar.warp.sync -1; ld.global.b32 %r1, [%rd0]", "a race: thread 32 reads"),
        ("st.global.b32 [%rd2], 7; bar.sync 0; ld.global.b32 %r1, [%rd0]; bar.sync 0", ""),
        ("st.global.b32 [%rd0], %r0", "a race: threads write different numbers"),
        ("st.global.b32 [%rd0], 7; bar.sync 0", ""),
        ("ld.global.b32 %r1, [%rd2]; bar.sync 0", "has not written what it reads"),
    ],
)
def test_what_races(body: str, error: str) -> None:
    out = torch.full((64,), 9, dtype=torch.int32)
    launch = RaceChecker(PTX.format(body=body), 1, [out] if "has not" in error else [])
    if error:
        with pytest.raises(RuntimeError, match=error):
            launch.run(out)
    else:
        launch.run(out)


@pytest.mark.parametrize("stored", ["release", "relaxed"])
def test_a_release_publishes_what_lies_before_it(stored: str) -> None:
    """Warp 0 writes word 1, and warp 1 reads it once word 0 is 7. What is acquired counts where lanes meet."""
    body = (
        "setp.lt.u32 %p0, %r0, 32; @%p0 bra $L__1; $L__2: ld.acquire.gpu.global.b32 %r1, [%rd0]; "
        "setp.ne.b32 %p0, %r1, 7; @%p0 bra $L__2; bar.warp.sync -1; ld.global.b32 %r1, [%rd0+4]; ret; "
        f"$L__1: st.global.b32 [%rd0+4], 5; bar.warp.sync -1; st.{stored}.gpu.global.b32 [%rd0], 7; ret"
    )
    launch = RaceChecker(PTX.format(body=body), 1)
    if stored == "release":
        launch.run(torch.zeros(64, dtype=torch.int32))
        return
    with pytest.raises(RuntimeError, match="a race: thread 32 reads word"):
        launch.run(torch.zeros(64, dtype=torch.int32))


@pytest.mark.parametrize("first", ["store", "arrive"])
def test_an_mbarrier_passes_on_what_lies_before_arrivals(first: str) -> None:
    """Warp 0 writes word 1, and warp 1 reads it behind an mbarrier."""
    steps = {"store": "st.global.b32 [%rd0+4], 5", "arrive": "mbarrier.arrive.shared.b64 _, [%r2]"}
    ordered = "; ".join(sorted(steps.values(), reverse=first == "store"))
    body = (
        "mov.b32 %r2, __dynamic_shmem__0; mbarrier.init.shared.b64 [%r2], 32; bar.sync 0; setp.lt.u32 %p0, %r0, 32; "
        "@%p0 bra $L__1; $L__2: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra $L__2; "
        f"ld.global.b32 %r1, [%rd0+4]; ret; $L__1: {ordered}; ret"
    )
    launch = RaceChecker(PTX.format(body=body), 1)
    if first == "store":
        launch.run(torch.zeros(64, dtype=torch.int32))
        return
    with pytest.raises(RuntimeError, match="a race: thread 0 writes word"):
        launch.run(torch.zeros(64, dtype=torch.int32))


@pytest.mark.parametrize(
    "case", [case for case in PRODUCTS if case.config.endswith("stream") and case.dtype == torch.bfloat16], ids=str
)
def test_streams_want_no_two_ctas_at_once(case: Product) -> None:
    """CTAs that others wait for begin first: another program may leave a launch one multiprocessor."""
    w, rows = experts_of(case), rows_of(case)
    x = randn(case.rows, case.k, seed=3, dtype=case.dtype)
    operands = operands_of(case, len(x), w)
    at_once = computed(case, x, w, operands, rows)
    one_by_one = computed(case, x, w, operands, rows, functools.partial(Emulator, resident=1))
    assert torch.equal(one_by_one, at_once)
