"""The weights of a problem, made on its device: :class:`Matrices`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

import w4gemm
from fuzz import formulas
from fuzz.cases import FP8, Case
from fuzz.numbers import Source


class Matrices(NamedTuple):
    """A weight, or those of all experts, as the library has it and in exact numbers."""

    w: w4gemm.QuantizedWeight
    exact: list[formulas.Weight]

    @classmethod
    def of(cls, case: Case, device: str) -> Matrices:
        source = Source(f"{case.variant.seed} {case.weight_seed}", device)
        made = [_weight(case, source) for _ in range(max(1, case.experts))]
        fp8 = case.variant.dtype == FP8 and (device == "cuda" or case.variant.quantized)
        packed = [w.repack(activations="fp8" if fp8 else None) for w, _ in made]
        w = w4gemm.QuantizedWeight.stack(packed, len(packed), packed[0].layout) if case.experts else packed[0]
        return cls(w, [exact for _, exact in made])


class Stored(NamedTuple):
    """Scales and zero points as the library takes them, and their numbers."""

    scales: torch.Tensor
    zeros: torch.Tensor | None
    factors: torch.Tensor | None
    scale_numbers: torch.Tensor
    zero_numbers: torch.Tensor | None


def _weight(case: Case, source: Source) -> tuple[w4gemm.QuantizedWeight, formulas.Weight]:
    """One weight (n, k) in the canonical layout, and its exact numbers."""
    f, n, k = w4gemm.WeightFormat.parse(case.variant.format), case.n, case.k
    length = k if f.group_size < 0 else f.group_size
    groups, exact = -(-k // length), case.numbers == "exact"
    group = torch.arange(k, device=source.device) // length
    if case.act_order:
        group = group[torch.argsort(source.uniform(k))]
    usable = torch.tensor(_usable_codes(case, f), device=source.device)
    codes, channels = usable[source.integers(0, len(usable) - 1, n, k)], None
    stored = (_two_levels if f.scale_rule.factor_columns else _one_level)(case, f, source, n, groups)
    if f.scale_rule.per_channel:
        channels = source.powers(-2, 1, n) if exact else source.uniform(n) / 16 + 0.01
    g_idx = group if case.act_order else None
    w = w4gemm.QuantizedWeight.from_codes(f, codes, stored.scales, stored.zeros, g_idx, channels, stored.factors)
    numbers = str(case.variant.dtype).removeprefix("torch.") if case.variant.dtype.itemsize == 2 else "float32"
    scales, zeros, rounded = stored.scale_numbers, stored.zero_numbers, f.scale_rule.rounded_to is not None
    return w, formulas.weight(codes, scales, zeros, channels, group, f.zero, f.element, rounded, numbers)


def _usable_codes(case: Case, f: w4gemm.WeightFormat) -> list[int]:
    """Codes that stand for numbers; if sums are to be exact, of more than four bits, and where scales are no powers of
    two, only those whose weights have few digits."""
    numbers = list(enumerate(formulas.codebook(f.element)))
    if case.numbers != "exact" or (f.bits == 4 and not f.has_factors):
        return [u for u, number in numbers if math.isfinite(number)]
    if f.element.startswith("int"):
        if f.has_factors or f.zero == "float":
            numbers = numbers[:16] if f.has_zero else [(u, number) for u, number in numbers if -16 <= number < 16]
        return [u for u, _ in numbers]
    return [u for u, number in numbers if abs(number) <= 8 and (8.0 * number).is_integer()]


def _one_level(case: Case, f: w4gemm.WeightFormat, source: Source, n: int, groups: int) -> Stored:
    rows = torch.arange(n, device=source.device)
    if f.scale == "b128":  # a scale for the even rows of 128, one for the odd rows
        n, rows = -(-n // 128) * 2, rows // 128 * 2 + rows % 2
    scales, zeros, exact = _short(_scales(case, f, source, n, groups), f.bits), None, case.numbers == "exact"
    scales = scales.to(f.scale_dtype)
    if f.zero == "int":
        zeros = source.integers(0, 2**f.bits - 1, n, groups).to(torch.uint8)
    elif f.zero == "float":
        zeros = source.integers(-4, 4, n, groups).float() if exact else source.uniform(n, groups) * 4 - 2
        zeros = (zeros * (scales.float() if exact else 1 / case.k**0.5)).to(f.scale_dtype)
    return Stored(scales, zeros, None, scales.float()[rows], zeros)


def _two_levels(case: Case, f: w4gemm.WeightFormat, source: Source, n: int, groups: int) -> Stored:
    """Small integers of each group times fp16 factors of each superblock."""
    columns, kinds = f.scale_rule.factor_columns, 1 + f.has_zero
    of_group = torch.arange(groups, device=source.device) * f.group_size // columns
    shape = n, -(-case.k // columns), kinds
    least, most = {"s8": (-128, 127), "s6": (-32, 31), "u8": (0, 63), "u4": (0, 15)}[f.scale.partition("x")[0]]
    levels = source.integers(least, most, kinds, n, groups)
    if case.numbers == "exact":
        levels = source.integers(0, 8, kinds, n, groups)
        factors = source.powers(-5, -4, *shape)
    else:
        spread = source.powers(-6, 3, *shape) if case.numbers == "extreme" else 1
        factors = (source.uniform(*shape) + 0.1) * spread / (30 * case.k**0.5 * _size(f))
    factors = (factors * (source.integers(0, 1, *shape) * 2 - 1)).half()
    numbers = [t * factors[:, of_group, i].float() for i, t in enumerate(levels)]
    stored = levels.to(f.scale_dtype).unbind()
    return Stored(stored[0], stored[1] if f.has_zero else None, factors, numbers[0], numbers[1] if f.has_zero else None)


def _scales(case: Case, f: w4gemm.WeightFormat, source: Source, n: int, groups: int) -> torch.Tensor:
    e4m3, unsigned = f.scale_rule.per_channel, not f.scale_rule.signed
    small = torch.finfo(f.scale_rule.range_dtype).max < 2.0**17 or case.variant.dtype == torch.float16
    sign = 1 if unsigned else source.integers(0, 1, n, groups) * 2 - 1
    if case.numbers == "exact":
        scales = sign * source.powers(-2, 0, n, groups)
    elif case.numbers == "extreme":
        low, high = (-6, 4) if e4m3 else (-8, 3) if small else (-20, 12)
        low = -12 if unsigned and case.variant.dtype == FP8 else low  # beyond 28 binades e5m2 rounds
        scales = sign * (1 + source.uniform(n, groups)) * source.powers(low, high, n, groups)
    else:
        scales = sign * (source.uniform(n, groups) + 0.1) * (16 if e4m3 else 1 / case.k**0.5)
        scales *= (source.uniform(n, groups) > 0.05) | unsigned
    return scales / _size(f)


def _size(f: w4gemm.WeightFormat) -> float:
    """Power of two by which the element's numbers are larger than int4's: 16 for iq4."""
    return 2.0 ** max(0, math.ceil(math.log2(max(map(abs, formulas.finite(f.element))) / 8)))


def _short(scales: torch.Tensor, bits: int) -> torch.Tensor:
    """float32 scales cut off after 22 - bits significant bits: beside float zero points the library takes no more than
    24 - bits."""
    return (scales.contiguous().view(torch.int32) & ~(2 ** (bits + 2) - 1)).view(torch.float32)
