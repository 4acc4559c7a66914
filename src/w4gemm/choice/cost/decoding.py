"""How much longer a k-slice of a Hopper kernel takes because of the weight's format: :func:`slice_overhead`.

The times of configs are measured with bf16 x, int4 weights and bf16 scales. Other formats take more instructions to
decode, which shows if a tile has few tokens; scales on sums take some for each token. Scales of two levels (K-quants)
take more, so that other things show: how many warps decode, and whether CTAs wait for each other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from w4gemm.choice.cost.constants import Constants
from w4gemm.core.formats import WeightFormat
from w4gemm.kernels.sm90_mixed_gemm.work import WGMMA_TOKENS
from w4gemm.packing.codecs import weight_operand

_DECODE_BOUND_TOKENS = 60
"""Largest tile_m of which the time to decode a k-slice shows in full; for more tokens the tensor cores hide it."""
_MANY_TOKENS_OF_LEVELS = 96
"""Smallest tile_m of which one consumer warpgroup keeps tensor cores waiting if scales have two levels."""
_FEW_TOKENS_OF_WARPGROUPS = 128
"""Largest tile_m at which the number of consumer warpgroups leaves the time of decoding as it is; with twice as many
tokens its effect is whole."""
_FEW_BATCHES = 2
"""Batches of rows of sm90_decode, of 64 features in 5 or 6 bits, up to which scales of two levels take their time."""
_MEASURED = weight_operand(WeightFormat(), torch.bfloat16)
"""The weight that sm90_decode was timed with."""


def slice_overhead(constants: Constants, kernel: str, variant: Any, dtype: torch.dtype) -> float:
    """Return the part by which the format makes a k-slice of a variant slower than the measured format. dtype: of x."""
    model, config = constants.models["decoding"], variant.config
    shown = min(1.0, _DECODE_BOUND_TOKENS / config.tile_m)
    if variant.scales_on_sums and dtype.itemsize == 2:  # fp8's times are measured so
        times = variant.batches_per_chunk / variant.chunks_of_sums
        overhead = float(times * (model["sums"] + model["sums_token"] * config.tile_m))
        return overhead + (model["small_levels"] * shown if variant.weight.codec.factors_on_sums else 0.0)
    overhead = constants.decode_overhead(kernel, variant.weight, variant.pairs) * shown
    levels = variant.block.factors > 0
    if kernel == "sm90_decode" and levels:
        if variant.block.factors == 2:
            overhead *= replace(variant, weight=_MEASURED).warps / variant.warps  # fewer warps decode as much
        overhead += model["levels_few_registers"] if variant.few_registers else 0.0
        overhead += model["levels_many_batches"] if variant.batches > _FEW_BATCHES else 0.0
    wide = min(1.0, config.tile_m / _FEW_TOKENS_OF_WARPGROUPS - 1)
    if levels and wide > 0:
        if variant.warpgroups_n > 1:
            overhead *= model["levels_two_warpgroups"] ** wide
        # CTAs that share x wait for each other
        slower = model["levels_shared_x"] if config.cluster_n > 1 else 1.0
        slower *= model["levels_stream"] if config.schedule == "stream" else 1.0
        overhead = (1 + overhead) * slower**wide - 1
        if variant.half_block_stages and variant.warpgroups_n > 1 and config.tile_m < WGMMA_TOKENS:
            overhead = (1 + overhead) * model["levels_half_stage"] - 1
    many = (wide > 0 and variant.weight.codec.slow_alone) or (levels and config.tile_m >= _MANY_TOKENS_OF_LEVELS)
    if many and variant.warpgroups_n == 1 and config.split_k == 1:
        overhead = (1 + overhead) * model["one_warpgroup"] - 1
    if variant.block.bits > 4 and kernel != "sm90_decode" and variant.num_stages == 2:
        overhead += model["two_stages"]  # the measured format has three there
    return overhead
