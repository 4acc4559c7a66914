"""How much longer a format takes to decode than the measured one, int4 with bf16 scales and bf16 x."""

from __future__ import annotations

from typing import Any

from w4gemm.packing.codecs import Pairs, WeightOperand


def decode_overhead(model: dict[str, Any], kernel: str, weight: WeightOperand, pairs: Pairs | None) -> float:
    """Return the part by which decoding a weight takes longer.

    Args:
        model: constants of the model "decoding".
        kernel: name of a kernel.
        pairs: what its table of pairs holds; None if it decodes without one. Codes take about as long either way.
    """
    return float(sum(model[name] for name in weight.codec.costs(weight, pairs, kernel == "sm90_decode")))


def sums_overhead(model: dict[str, Any], tile_m: int, batches_per_chunk: int) -> float:
    """Return the part by which a codebook's scales make a k-slice longer if they multiply sums.

    Args:
        model: constants of the model "decoding".
        tile_m: tokens of a tile.
        batches_per_chunk: MMA batches of a k chunk, whose sums are scaled.
    """
    return float(batches_per_chunk * (model["sums"] + model["sums_token"] * tile_m))
