"""How much longer a format's codes take to decode than those of the format that the kernels were measured with: int4
with scales of x's dtype, bf16."""

from __future__ import annotations

from typing import Any

import torch

from w4gemm.core.problem import GemmProblem
from w4gemm.packing.codecs.pairs import Pairs


def decode_overhead(model: dict[str, Any], kernel: str, problem: GemmProblem, pairs: Pairs | None) -> float:
    """Return the part by which decoding the problem's format takes longer.

    Args:
        model: constants of the model "decoding".
        kernel: name of a kernel.
        pairs: what its table of pairs holds; None if it decodes without one. Codes take about as long either way.
    """
    few, format = "_few" if kernel == "sm90_decode" else "", problem.format
    if format.has_factors and problem.dtype.itemsize == 2:
        return model[f"two_levels{few}"]
    if pairs is not None and not format.element_rule.counts:
        return model[pairs.value + few]
    if format.element == "e2m1" and problem.dtype.itemsize == 2:
        return model["e2m1_half"] if problem.dtype == torch.float16 else model[f"e2m1_{format.scale}{few}"]
    if few or problem.dtype.itemsize == 1:
        return 0.0
    found = 0.0 if format.element_rule.counts else model["codebook"]
    same = problem.dtype == format.scale_dtype
    if problem.dtype == torch.float16:
        return found + model["half" if same else "half_other_scales"]
    if not same:
        return found + model["other_scales"]
    return found + (model["integer_zeros"] if format.zero == "int" else 0.0)


def sums_overhead(model: dict[str, Any], tile_m: int, batches_per_chunk: int) -> float:
    """Return the part by which a codebook's scales make a k-slice longer if they multiply sums.

    Args:
        model: constants of the model "decoding".
        tile_m: tokens of a tile.
        batches_per_chunk: MMA batches of a k chunk, whose sums are scaled.
    """
    return float(batches_per_chunk * (model["sums"] + model["sums_token"] * tile_m))
