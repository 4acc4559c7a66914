"""The epilogue's staging buffer; host code uses this too, so nothing of the DSL is imported here."""

TOKEN_BYTES = 128
"""Of one token as halves: 64 features of 2 bytes. Its eight 16-byte parts lie in the order part ^ (token % 8), TMA's
128-byte swizzle, which keeps an 8x8 matrix's rows in different banks."""

QUAD_ROW_BYTES = 80
"""Of one token as quads, in a warp's own part: 16 features of 4 bytes, and 16 bytes that keep eight tokens apart."""

QUADS_BYTES = 4 * 8 * QUAD_ROW_BYTES
"""Of a warpgroup's buffer for quads."""
