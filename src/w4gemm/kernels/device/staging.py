"""Sizes of the epilogue's staging buffer. Host code reads them too, so nothing of the DSL is imported here."""

TOKEN_BYTES = 128
"""Bytes of one token as 16-bit numbers: 64 features. Its eight vectors of 16 bytes lie in the order
vector ^ (token % 8), TMA's 128-byte swizzle, which keeps the rows of an 8x8 matrix in different banks."""

FLOAT32_ROW_BYTES = 80
"""Bytes of one token as float32 in a warp's buffer: 16 features, and 16 bytes that keep eight tokens in different
banks."""

FLOAT32_BYTES = 4 * 8 * FLOAT32_ROW_BYTES
"""Bytes of a warpgroup's buffer for float32: eight tokens for each of its four warps."""
