"""Intervals of m: one plan serves every m of an interval, chosen as if m were the interval's last value.

Of a single weight, more than :data:`WAVES_FROM` tokens are planned for as they come, rounded up by at most 1/64: how
many waves of tiles they fill decides, and the ends of wide intervals say little about it. Intervals of so many tokens
are what is tuned.
"""

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
WAVES_FROM = 256
"""Largest m of a single weight that is planned for by its interval."""
_STEP = 16
"""Least step of the m that are planned for beyond."""


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
    """The m that stands for m's interval: its last, ``LARGEST`` for the one without end."""
    index = interval(m)
    return BOUNDS[index] if index < len(BOUNDS) else LARGEST


def ragged(m: int) -> int:
    """An odd number near the middle of m's interval; m if the interval has no other."""
    first, last = interval_of(m)
    return m if first == last else (first + (last or m)) // 2 // 2 * 2 + 1


def planned(m: int) -> int:
    """The m that a plan of a single weight is chosen for."""
    if m <= WAVES_FROM:
        return BOUNDS[bisect.bisect_left(BOUNDS, m)]
    step = max(_STEP, 1 << ((m - 1).bit_length() - 7))
    return min(-(-m // step) * step, LARGEST)


def all_planned(first: int, last: int) -> list[int]:
    """Every m that :func:`planned` gives for first .. last."""
    found = [planned(first)]
    while found[-1] < planned(last):
        found.append(planned(found[-1] + 1))
    return found


def representative_rows(m: int, experts: int) -> int:
    """The rows of all experts together that stand for m of them: by the average of an expert or, if there are fewer
    rows than experts, by their number, because most experts then have none. For a single weight, experts 0, the m that
    is planned for."""
    if not experts:
        return planned(m)
    if m < experts:
        return min(representative(m), experts)
    return representative(-(-m // experts)) * experts


def first_rows(most: int, experts: int = 0) -> list[int]:
    """The first m of each interval of :func:`representative_rows` that begins within 1 .. most."""
    if not experts:
        return [1, *(m + 1 for m in all_planned(1, most) if m < min(most, LARGEST))]
    starts = [bound + 1 for bound in (0, *BOUNDS)]
    few = [start for start in starts if start < experts]
    many = [(start - 1) * experts + 1 if start > 1 else experts for start in starts]
    return [start for start in (*few, *many) if start <= most]
