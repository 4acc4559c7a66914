"""Intervals of m, the number of tokens: one plan serves every m of an interval, chosen for the interval's last m.

For a single weight, a plan for more than :data:`WAVES_FROM` tokens is chosen for m itself, rounded up to a multiple of
16, above 2048 by at most 1/64: which config is the fastest depends on how many waves of tiles m fills, and the end of a
wide interval says little about that. Tuning goes by intervals for every m.
"""

from __future__ import annotations

import bisect

FEW = (1, 2, 4)
"""Last m of each interval with a compiled variant of sm90_decode of its own."""
_TILES = (8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 120, 128, 144, 160, 168, 192, 200, 224, 240, 256)
BOUNDS = (*FEW, *_TILES, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 4096, 8192)
"""Last m of each interval, in ascending order, except for the last interval, which has no end: ``FEW``, then every
tile_m of the Hopper kernels, then sizes between which the fastest config was seen to change (H200, 2026-11-21)."""
LARGEST = 16384
"""The m that stands for the last interval, which has no end."""
WAVES_FROM = 256
"""Largest m for which the plan of a single weight is chosen by interval."""
_PLAN_OF_FEW = tuple(BOUNDS[bisect.bisect_left(BOUNDS, m)] for m in range(WAVES_FROM + 1))
"""The last m of m's interval, which every warm call asks for."""
_STEP = 16
"""Smallest difference between two m above :data:`WAVES_FROM` that plans are chosen for."""


def interval(m: int) -> int:
    """Return the index of m's interval: 0 for m = 1, 1 for m = 2, 2 for m <= 4, ..."""
    return bisect.bisect_left(BOUNDS, m)


def interval_of(m: int) -> tuple[int, int | None]:
    """Return the first and the last m of m's interval; the last is None if the interval has no end."""
    i = interval(m)
    return (BOUNDS[i - 1] + 1 if i else 1), (BOUNDS[i] if i < len(BOUNDS) else None)


def span(first: int, last: int | None) -> str:
    """Return the interval from ``first`` to ``last`` in words; ``last`` is None if it has no end."""
    return f"m {first}" if first == last else f"m {first} to {last}" if last else f"m from {first}"


def interval_end(m: int) -> int:
    """Return the last m of m's interval, which stands for it; ``LARGEST`` if it has no end."""
    index = interval(m)
    return BOUNDS[index] if index < len(BOUNDS) else LARGEST


def ragged(m: int) -> int:
    """Return an odd number near the middle of m's interval; m itself if the interval has one m only."""
    first, last = interval_of(m)
    return m if first == last else (first + (last or m)) // 2 // 2 * 2 + 1


def plan_m(m: int) -> int:
    """Return the m that the plan of a single weight is chosen for when it is called with m tokens."""
    if m <= WAVES_FROM:
        return _PLAN_OF_FEW[m]
    step = max(_STEP, 1 << ((m - 1).bit_length() - 7))
    return min(-(-m // step) * step, LARGEST)


def plan_ms(first: int, last: int) -> list[int]:
    """Return every m that :func:`plan_m` gives for ``first`` to ``last``, in ascending order."""
    ms = [plan_m(first)]
    while ms[-1] < plan_m(last):
        ms.append(plan_m(ms[-1] + 1))
    return ms


def plan_rows(m: int, experts: int) -> int:
    """Return the m that a plan is chosen for when it is called with m rows of all experts together.

    If m >= experts, the plan is chosen for the interval of the average rows of an expert. If m < experts, it is chosen
    for the interval of m, because most experts then have no rows. For a single weight, experts 0, this is
    :func:`plan_m`.
    """
    if not experts:
        return plan_m(m)
    if m < experts:
        return min(interval_end(m), experts)
    return interval_end(-(-m // experts)) * experts


def first_rows(most: int, experts: int = 0) -> list[int]:
    """Return the first m, within 1 .. most, of each range of m that has one :func:`plan_rows`."""
    if not experts:
        return [1, *(m + 1 for m in plan_ms(1, most) if m < min(most, LARGEST))]
    starts = [bound + 1 for bound in (0, *BOUNDS)]
    few = [start for start in starts if start < experts]
    many = [(start - 1) * experts + 1 if start > 1 else experts for start in starts]
    return [start for start in (*few, *many) if start <= most]
