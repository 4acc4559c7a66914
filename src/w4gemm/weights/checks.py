"""Checks of what a weight is made from: codes, scales, zero points, and the order of columns (act-order).

In act-order, groups have columns that are not adjacent, as GPTQ with ``desc_act`` makes them: ``g_idx`` (k,) has the
group of each column of w. In a packed weight the columns of a group are contiguous. So the columns are sorted by group
once, when the weight is made, and the weight keeps ``perm`` (k,): packed column j is column perm[j] of w. A product
gathers x's columns in the same order. No code below :func:`w4gemm.linear` depends on perm.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence

import torch

from w4gemm.core.errors import kind_of, require_dense, require_int, require_tensor
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.layouts import WeightComponents
from w4gemm.weights.components import times_factors

PERM_DTYPE = torch.int32
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_WIDE = (torch.uint16, torch.uint32, torch.uint64)
"""Integers that PyTorch only converts, as NumPy arrays of packed words become."""


def checked(format: WeightFormat, parts: WeightComponents) -> WeightComponents:
    """Return the components of a weight; codes of unsigned words as int64. Codes may be of any integer dtype.

    Raises:
        TypeError, ValueError: naming the component, what was wanted and what came.
    """
    codes, scales, zeros, _, factors = parts
    if not isinstance(codes, torch.Tensor) or codes.dtype not in _INTEGERS + _WIDE or codes.dim() != 2:
        raise TypeError(f"codes: wanted integers (n, k), got {kind_of(codes)}")
    require_dense("codes", codes)
    if codes.is_meta:
        raise ValueError("codes: wanted numbers, got a tensor on the meta device")
    if codes.dtype in _WIDE:
        codes = codes.long()
    n, k = codes.shape
    if n < 1 or k < 1:
        raise ValueError(f"codes: wanted n >= 1 and k >= 1, got shape {(n, k)}")
    largest_code = format.element_rule.largest_code
    if int(codes.min()) < 0 or int(codes.max()) > largest_code:
        raise ValueError(f"codes: wanted 0..{largest_code}, got {int(codes.min())}..{int(codes.max())}")
    check_codes(format, codes)
    stored = format.parts(n, k)
    for name, part in zip(parts._fields[1:], parts[1:], strict=True):
        if (part is None) == (name in stored):
            expected = "wants {} {}".format(*stored[name]) if name in stored else "has none"
            raise ValueError(f"{name}: {format} {expected}, got {kind_of(part)}")
        if part is not None:
            require_tensor(name, part, *stored[name], codes.device, whose="codes' device", contiguous=False)
    if factors is not None:
        for name, levels in (("scales", scales), ("zeros", zeros)):
            low, high = format.scale_rule.levels
            if levels is not None and not low <= int(levels.min()) <= int(levels.max()) <= high:
                came = f"{int(levels.min())}..{int(levels.max())}"
                raise ValueError(f"{name}: wanted {low}..{high} in {format}, got {came}")
    check_range(format, *parts[1:])
    return parts._replace(codes=codes)


def check_codes(format: WeightFormat, codes: torch.Tensor, first_row: int = 0) -> None:
    """Raise ValueError for codes (n, k) that stand for no finite number. ``first_row`` is the number in the message of
    their first row."""
    if not (refused := format.element_rule.refused_codes):
        return
    bad = functools.reduce(operator.or_, (codes == code for code in refused))
    if bad.any():
        row, column = (int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"codes: wanted finite numbers, got {int(bad.sum())} codes of NaN or infinity in {format.element}; first "
            f"{int(codes[row, column])} in row {first_row + row}, column {column}"
        )


def check_range(
    format: WeightFormat,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    channels: torch.Tensor | None,
    factors: torch.Tensor | None = None,
) -> None:
    """Raise ValueError for scales and zero points whose weights would be NaN, infinite in some kernel, or saturated
    when they are rounded."""
    check_rules(range_rules(format, scales, zeros, channels, factors))


Rule = tuple[torch.Tensor, Callable[[], str]]
"""A bool (), on the device, that is False where a message may be due, and what returns the message, or "" for none."""


def check_rules(rules: Sequence[Rule]) -> None:
    """Raise ValueError with the first message of rules. A GPU is waited for once."""
    if rules and not torch.stack([holds for holds, _ in rules]).all():
        for holds, message in rules:
            if not holds and (text := message()):
                raise ValueError(text)


def range_rules(
    format: WeightFormat,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    channels: torch.Tensor | None,
    factors: torch.Tensor | None = None,
    first_row: int = 0,
) -> list[Rule]:
    """Return what :func:`check_range` checks. ``first_row`` is the number in messages of the first row of scales."""
    scales, zeros = times_factors(scales, zeros, factors, format)
    element, largest_scale = format.element_rule, torch.finfo(format.scale_rule.range_dtype).max
    if channels is not None:
        largest_product = largest_scale * (1 if format.scales_in_weights else element.largest_factor)
        limit = torch.finfo(torch.float32).max / largest_product
        most = largest_scale / element.largest_value if format.scales_in_weights else largest_scale
        why = f", so that {element.largest_value:g} * scale is an e4m3," if format.scales_in_weights else ""
        of_channels = f"channels: wanted at most {limit:.3g} in magnitude, for finite weights, and no NaN"
        return [
            (_largest(channels) <= limit, lambda: of_channels),
            (_largest(scales) <= most, lambda: f"scales: wanted at most {most:g} in magnitude{why} and no NaN"),
        ]
    rules: list[Rule] = []
    if format.scale_dtype == torch.float32 and factors is None:
        other = (format.stored_scales(scales) != scales) & scales.isfinite()
        rules.append((~other.any(), lambda: _inexact_scale(format, scales, other, first_row)))
    offsets = zeros if format.zero == "float" else None
    together = _largest(scales) * format.largest_factor + (0.0 if offsets is None else _largest(offsets))
    # False also for NaN; else each group is within the limit
    rules.append((together <= format.largest_weight, lambda: _infinite_groups(format, scales, zeros, first_row)))
    if format.zero == "int" and zeros is not None:
        most_zero, largest = zeros.max(), element.largest_code
        rules.append((most_zero <= largest, lambda: f"zeros: wanted 0..{largest}, got up to {int(most_zero)}"))
    return rules


def _largest(t: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, float64 (); NaN if t has a NaN."""
    return (t if t.dtype.itemsize > 1 else t.float()).detach().abs().max().double()


def _inexact_scale(format: WeightFormat, scales: torch.Tensor, other: torch.Tensor, first_row: int) -> str:
    """Return what is wrong with the first scale that is marked in ``other`` (n, groups)."""
    row, group = (int(i) for i in other.nonzero()[0])
    return (
        f"scales: wanted at most {format.scale_bits} significant bits, so that products with codes are exact in "
        f"float32, got {scales[row, group].item()!r} in row {first_row + row}, group {group}; nearest is "
        f"{format.stored_scales(scales)[row, group].item()!r}"
    )


def _infinite_groups(format: WeightFormat, scales: torch.Tensor, zeros: torch.Tensor | None, first_row: int) -> str:
    """Return which groups have weights that would not be finite; "" if all are."""
    largest, limit = scales.float().abs() * format.largest_factor, format.largest_weight
    if zeros is not None and format.zero == "float":
        largest = largest + zeros.float().abs()
    bad = ~(largest <= limit)
    if not bad.any():
        return ""
    row, group = (int(i) for i in bad.nonzero()[0])
    scale = scales[row, group].item()
    zero = "" if zeros is None else f", zero point {zeros[row, group].item()}"
    if block := format.scale_rule.block_rows:  # the first row that has the scale
        row = row // 2 * block + row % 2
    return (
        f"scales: the weights of {int(bad.sum())} groups would not be finite ({format.largest_factor:g} * |scale| "
        f"and |zero point| together must be at most {limit:g}); "
        f"first in row {first_row + row}, group {group}: scale {scale}{zero}"
    )


def checked_count(weights: object, count: int | None) -> int:
    """Return the number of weights to stack. count: None for their length.

    Raises:
        TypeError, ValueError: if ``weights`` is nothing to iterate over, or if its length is not ``count``, 0, or
            unknown without a count.
    """
    if not isinstance(weights, Iterable) or isinstance(weights, torch.Tensor):
        raise TypeError(f"weights: wanted QuantizedWeights, a sequence or other iterable, got {kind_of(weights)}")
    length = len(weights) if isinstance(weights, Sequence) else None
    if count is None:
        if length is None:
            raise TypeError(f"count: wanted the number of weights, because a {kind_of(weights)} has no length")
        if not length:
            raise ValueError("weights: wanted at least one, got none")
        return length
    require_int("count", count)
    if length not in (None, count):
        raise ValueError(f"weights: wanted {count}, got {length}")
    return count


def sorting_perm(g_idx: torch.Tensor, format: WeightFormat, k: int, device: torch.device) -> torch.Tensor | None:
    """Return the stable order of columns that makes the groups contiguous, or None if they are contiguous already.

    Args:
        g_idx: integers (k,), the group of each column, 0 .. groups - 1. Every group has ``group_size`` columns; the
            last one has the remaining columns of k.
        device: device that g_idx must be on.

    Returns:
        int32 (k,), a permutation: packed column j is column perm[j].

    Raises:
        TypeError, ValueError: naming g_idx and the first bad group.
    """
    if not isinstance(g_idx, torch.Tensor) or g_idx.dtype not in _INTEGERS + _WIDE:
        came = g_idx.dtype if isinstance(g_idx, torch.Tensor) else type(g_idx).__name__
        raise TypeError(f"g_idx: wanted integers (k) or None, got {came}")
    require_dense("g_idx", g_idx)
    if tuple(g_idx.shape) != (k,):
        raise ValueError(f"g_idx: wanted shape ({k},), k of codes, got {tuple(g_idx.shape)}")
    if g_idx.device != device:
        raise ValueError(f"g_idx: wanted device {device} like codes, got {g_idx.device}")
    g_idx = g_idx.long()  # of some unsigned integers PyTorch knows no smallest
    groups, length = format.groups(k), format.group_length(k)
    columns, first, last = torch.arange(k, device=device), int(g_idx.min()), int(g_idx.max())
    if first < 0 or last >= groups:
        bad = first if first < 0 else last
        raise ValueError(f"g_idx: wanted groups 0..{groups - 1} for k {k} in {format}, got {bad}")
    sizes = torch.bincount(g_idx, minlength=groups)
    wrong = sizes != torch.bincount(columns // length, minlength=groups)
    if wrong.any():
        group = int(wrong.nonzero()[0])
        size = min(length, k - group * length)
        raise ValueError(
            f"g_idx: group {group} wants {size} columns in {format} with k {k}, got {int(sizes[group])}; "
            "groups of other sizes cannot be packed"
        )
    perm = torch.argsort(g_idx, stable=True)
    return None if torch.equal(perm, columns) else perm.to(PERM_DTYPE)


def check_perm(perm: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise ValueError if perm has a wrong dtype, shape or device. :func:`is_permutation` checks its numbers."""
    if not isinstance(perm, torch.Tensor) or perm.dtype != PERM_DTYPE or tuple(perm.shape) != shape:
        came = f"{perm.dtype} {tuple(perm.shape)}" if isinstance(perm, torch.Tensor) else type(perm).__name__
        raise ValueError(f"perm: wanted {PERM_DTYPE} {shape} or None, got {came}")
    if perm.device != device or not perm.is_contiguous():
        raise ValueError(f"perm: wanted it contiguous on {device}, got it on {perm.device}, stride {perm.stride(0)}")


def is_permutation(perm: torch.Tensor) -> bool:
    """True if each row of perm (..., k) holds each of 0 .. k - 1 once. Synchronizes on a GPU."""
    columns = torch.arange(perm.shape[-1], dtype=perm.dtype, device=perm.device)
    return torch.equal(perm.sort(-1).values, columns.expand_as(perm))
