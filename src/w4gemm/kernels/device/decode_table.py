"""Sizes of the fp8 decoder's table, for the host side too."""

ROW_BYTES = 16
"""Of a row: the e4m3 of each of the 16 codes. See device/decode_fp8.py."""


def table_rows(scale_kind: str, zero: str) -> int:
    """One for each e4m3 scale, or for each zero point; 0 where no table is needed."""
    return 256 if scale_kind == "e4m3" else 16 if zero == "int" else 0
