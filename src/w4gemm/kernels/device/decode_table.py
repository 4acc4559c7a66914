"""Sizes of the fp8 decoder's table, for the host side too."""

TABLE_BYTES = 256
"""Of 16 rows of 16 bytes: see device/decode_fp8.py."""
