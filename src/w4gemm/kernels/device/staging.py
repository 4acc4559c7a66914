"""The epilogue's staging buffer; host code uses this too, so nothing of the DSL is imported here."""

ROW_BYTES = 144
"""Of one token: 64 features of 2 bytes, and 16 bytes that keep the rows of an 8x8 matrix in different banks."""
