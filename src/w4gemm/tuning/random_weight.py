"""Random weights of any format, for tests, tuning and benchmarks: :func:`random_weight`."""

from __future__ import annotations

from typing import Any

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.packing.layouts import WeightComponents
from w4gemm.weights.weight import QuantizedWeight

_SPREAD = 0.1, 1.1
"""Range of a scale's magnitude, relative to the format's unit."""
_E4M3_WEIGHT = 320
"""Unit of weights before a channel's factor: 1.1 times it, the largest, is still an e4m3."""


def random_weight(format: WeightFormat, n: int, k: int, seed: int = 0, **options: Any) -> QuantizedWeight:
    """Return a weight of :func:`random_components`, which takes the same arguments, in the canonical layout."""
    parts = random_components(format, n, k, seed, **options)
    return QuantizedWeight.from_codes(format, *parts[:3], channels=parts.channels, factors=parts.factors)


def random_components(
    format: WeightFormat,
    n: int,
    k: int,
    seed: int = 0,
    *,
    device: torch.device | str = "cpu",
    signed: bool = False,
    least_code: int = 0,
) -> WeightComponents:
    """Return uniform codes, scales for weights of about 1 / sqrt(k), and zero points over their whole range.

    The same arguments give the same numbers on every call on a kind of device. The format's element, scale rule and
    zero rule decide everything, so that a new format needs no code here.

    Args:
        signed: True to make a third of the scales negative and a third 0, as tests want them, if the scale rule has
            signs. If False all are positive, as in models.
        least_code: smallest code.
    """
    g = torch.Generator(device=device).manual_seed(seed)
    element, rule, groups = format.element_rule, format.scale_rule, (format.scale_rows(n), format.groups(k))

    def uniform(*shape: int) -> torch.Tensor:
        low, high = _SPREAD
        return torch.rand(shape, dtype=torch.float32, device=device, generator=g) * (high - low) + low

    codes = torch.randint(least_code, len(element.values), (n, k), dtype=torch.uint8, device=device, generator=g)
    for code in element.refused_codes:
        codes[codes == code] = element.padding_code
    weight = 1 / k**0.5
    largest, channels = weight, None
    if rule.per_channel:
        largest, channels = _E4M3_WEIGHT, uniform(n) * (weight / _E4M3_WEIGHT)
    if rule.factor_columns:
        most = min(63, rule.levels[1])  # of GGUF's Q4_K
        largest /= most * (element.largest_code if format.has_zero else element.largest_value)
        factors = torch.stack([uniform(n, format.superblocks(k)) for _ in range(format.factors)], dim=-1) * largest
        if signed:
            factors *= torch.randint(-1, 2, factors.shape, device=device, generator=g)
        least = -most if signed and rule.signed else 0
        levels = torch.randint(least, most + 1, (format.factors, *groups), dtype=rule.dtype, device=device, generator=g)
        if format.has_zero:
            factors *= torch.tensor([1.0, -element.largest_code / 2], device=device)
        return WeightComponents(codes, levels[0], levels[1] if format.has_zero else None, None, factors.half())
    scales = uniform(*groups) * (largest / element.largest_value)
    if signed and rule.signed:
        scales *= torch.randint(-1, 2, groups, device=device, generator=g)
    zeros = None
    if format.zero == "int":
        zeros = torch.randint(0, element.largest_code + 1, groups, dtype=torch.uint8, device=device, generator=g)
    elif format.zero == "float":
        zeros = (torch.randn(groups, device=device, generator=g) * weight).to(rule.dtype)
    return WeightComponents(codes, format.stored_scales(scales), zeros, channels)
