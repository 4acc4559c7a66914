"""A small model of a launch's time, in microseconds: only the order that it gives to configs matters."""

from __future__ import annotations

from w4gemm.config import GemmConfig
from w4gemm.kernels.sm90_mixed_gemm.variant import Variant
from w4gemm.problem import GemmProblem

# Measured on an H200, 2026-11-21 (docs/measured.md)
_DRAM_BYTES_PER_US = 4.3e6
_L2_BYTES_PER_US_PER_SM = 45e3
_WGMMA_FLOP_PER_US_PER_SM = 6.1e6  # 800 TFLOP/s over 132
_DECODE_BLOCK_US = 0.19  # a 64 x 128 block by one warpgroup, when four share an SM's issue slots
_FIXED_US = 2.6
_TILE_US = 0.9  # pipeline fill and epilogue that nothing hides
_CLUSTER_SUM_US = 0.9


def predicted_us(problem: GemmProblem, config: GemmConfig) -> float:
    """Microseconds: waves of tiles, each bound by its tensor operations, its decoding or its bytes."""
    variant = Variant.of(problem, config)
    m_tiles = -(-problem.m // config.tile_m)
    n_tiles = -(-problem.n // (config.tile_n * config.cluster_n)) * config.cluster_n
    ctas = m_tiles * n_tiles * config.split_k
    waves = -(-ctas // problem.device.sms)
    slots = -(-problem.k // (config.tile_k * config.split_k))
    flop = 2 * config.tile_m * config.tile_n * config.tile_k
    tensor = max(flop, 2 * 16 * config.tile_n * config.tile_k) / _WGMMA_FLOP_PER_US_PER_SM
    x_share = variant.x_bytes / (1 if config.cluster_n == 1 else 1.5)
    load = (variant.weight_bytes + x_share) / _L2_BYTES_PER_US_PER_SM
    decode = variant.blocks * max(1, variant.warpgroups / 2) * _DECODE_BLOCK_US
    slot = max(tensor, load, decode)
    busy = waves * (slots * slot + _TILE_US)
    weight_bytes = problem.n * problem.k / 4096 / 2 * variant.block_bytes
    dram = (weight_bytes + 2 * problem.m * (problem.k + problem.n)) / _DRAM_BYTES_PER_US
    return max(busy, dram) + _FIXED_US + (_CLUSTER_SUM_US if config.split_k > 1 else 0.0)
