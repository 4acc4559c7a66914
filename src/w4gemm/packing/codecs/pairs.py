"""Sizes of the table in shared memory by which two codes are decoded at a time, see kernels/device/decode_pairs.py."""

from __future__ import annotations

from enum import Enum

ROW_BYTES = 128
"""Bytes of a row: one word for each lane, or two for each of sixteen."""
TABLE_BYTES = 256 * ROW_BYTES
"""Bytes of a table: a row for each byte of a code word, which is two codes."""


class Pairs(Enum):
    """Form of two numbers in a row of the table."""

    HALVES = "halves"
    """Their numbers in the dtype of x, in the halves of a word."""
    FLOATS = "floats"
    """Their numbers in float32, in two words."""
