"""Intervals of m: one plan serves every m of an interval, chosen as if m were the interval's last value."""

from __future__ import annotations

import bisect

FEW = (1, 2, 4)
"""Last m of the intervals that sm90_decode has a compiled variant for each."""
_TILES = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
BOUNDS = (*FEW, *_TILES, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 4096, 8192)
"""Last m of each interval but the last: ``FEW``, then every tile_m of the Hopper kernels, then sizes between which the
fastest config was seen to change (H200, 2026-11-21)."""
LARGEST = 16384
"""The m that stands for the last interval, which has no end."""


def interval(m: int) -> int:
    """Index of m's interval: 0 for m = 1, 1 for m = 2, 2 for m <= 4, ..."""
    return bisect.bisect_left(BOUNDS, m)


def interval_of(m: int) -> tuple[int, int | None]:
    """First and last m of m's interval; None for no end."""
    i = interval(m)
    return (BOUNDS[i - 1] + 1 if i else 1), (BOUNDS[i] if i < len(BOUNDS) else None)


def span(first: int, last: int | None) -> str:
    """An interval in words, as :func:`interval_of` gives it."""
    return f"m {first}" if first == last else f"m {first} to {last}" if last else f"m from {first}"


def representative(m: int) -> int:
    """The m that stands for m's interval."""
    return last_of(interval(m))


def last_of(index: int) -> int:
    """Last m of the interval ``index``, or ``LARGEST`` for the one without end."""
    return BOUNDS[index] if index < len(BOUNDS) else LARGEST


def representative_rows(m: int, experts: int) -> int:
    """The rows of all experts together that stand for m of them: by the average of an expert or, if there are fewer
    rows than experts, by their number, because most experts then have none. For a single weight, experts 0, by m."""
    if m < experts:
        return min(representative(m), experts)
    weights = max(1, experts)
    return representative(-(-m // weights)) * weights


def first_rows(most: int, experts: int = 0) -> list[int]:
    """The first m of each interval of :func:`representative_rows` that begins within 1 .. most."""
    starts = [bound + 1 for bound in (0, *BOUNDS)]
    few = [start for start in starts if start < experts]
    many = [(start - 1) * experts + 1 if start > 1 else experts for start in starts] if experts else starts
    return [start for start in (*few, *many) if start <= most]
