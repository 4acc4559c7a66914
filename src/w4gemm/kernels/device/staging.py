"""Sizes of the epilogue's staging buffer; host code uses them too, so nothing of the DSL is imported here."""

from __future__ import annotations

ROW_BYTES = 144
"""64 features of 2 bytes, and 16 bytes that keep the rows of an 8x8 matrix in different banks."""


def chunk_tokens(tokens: int) -> int:
    """Tokens that pass through the staging buffer at a time."""
    return next(c for c in (32, 16, 8) if tokens % c == 0)


def staging_bytes(tokens: int) -> int:
    """Shared memory of one warpgroup's staging buffer."""
    return chunk_tokens(tokens) * ROW_BYTES
