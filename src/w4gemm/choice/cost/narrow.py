"""Model of sm90_decode for narrow layers and few tokens, whose launches do not fill the GPU (``decode_alone``).

The warps of a CTA tell its time: each k block is a wait and instructions, and a split of k what its CTAs hand over.
"""

from __future__ import annotations

from w4gemm.choice.cost.constants import Constants, Timer
from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.packing.block import STRIP_N

NARROW_TOKENS = 8
"""Most tokens for which this holds. With 16, choices would change to 1.2 times the time at worst (H200, 2026-11-30)."""
_TOKENS_OF_MMA = 8
"""Tokens of a matrix instruction of sm90_decode."""


def is_narrow(problem: GemmProblem, config: GemmConfig) -> bool:
    """True if each multiprocessor has one CTA at most, and the layer is dense and has so few features that a third of
    the multiprocessors would have none even with the smallest tiles."""
    ctas, sms = -(-problem.n // config.tile_n) * config.split_k, problem.device.sms
    return not problem.experts and ctas <= sms and 3 * problem.n <= 2 * STRIP_N * sms


def narrow_timer(constants: Constants, problem: GemmProblem, config: GemmConfig, warps: int, overhead: float) -> Timer:
    """The time that a launch keeps multiprocessors of the measured clock busy: a k block costs one of the CTA's
    ``warps`` a wait, and all of them instructions.

    Args:
        overhead: part by which the format takes longer to decode. A warp waits twice as much longer.
    """
    model, token_blocks = constants.models["decode_alone"], config.tile_m // _TOKENS_OF_MMA
    k_blocks = -(-problem.k // (config.tile_k * config.split_k))
    waits = -(-k_blocks // warps) * (model["wait_us"] + model["wait_block_us"] * token_blocks) * (1 + 2 * overhead)
    row_us = (model["row_us"] + model["row_block_us"] * token_blocks) * (1 + overhead)
    us = waits + k_blocks * config.tile_n * row_us
    split_us, token_us = (model["split_us"], model["split_token_us"]) if config.split_k > 1 else (0.0, 0.0)
    return lambda m: float(us + split_us + token_us * m)
