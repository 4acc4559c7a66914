"""The strings of weight formats, :func:`parts_of`. Importing this does without PyTorch, so that a command answers a
mistyped --format at once; ``formats.py`` says what the names mean."""

from __future__ import annotations

import re
from typing import NamedTuple

from w4gemm.core.words import closest

ZEROS = ("none", "int", "float")
"""Names of the zero rules."""
PER_COLUMN = -1
"""``group_size`` of a format with one scale per output channel (per row of w, all of k)."""
SMALLEST_GROUP = 16
"""Group sizes are multiples of it."""
LARGEST_SIZE = 2**31 - 1
"""Largest m, n or k, because kernels count rows and columns in 32 bits."""
LARGEST_GROUP = 2**31 - 32
"""The largest group size: a weight has less than 2**31 columns. A group longer than k is one of k columns."""
INTEGER_NAMES = ("int4", "int8", "int6", "int5", "int3", "int2")
ELEMENT_NAMES = ("int4", "iq4", "e2m1", "nf4", *INTEGER_NAMES[1:], "e4m3", "e5m2", "e2m3", "e3m2")
"""Keys of ``ELEMENTS``, in their order."""
SCALE_NAMES = (
    *("fp16", "bf16", "fp32", "e4m3", "e4m3_row", "e8m0"),
    *("u8x256", "u8x128", "s8x256", "s8x128", "s6x256", "s6x128", "u4x256", "b128"),
)
"""Keys of ``SCALES``, in their order."""
CODEBOOK_NAME = re.compile(r"codebook([0-9a-f]{64}|[0-9a-f]{128})", re.ASCII)
ALIASES = {
    "mxfp4": "e2m1_g32_e8m0",
    "nvfp4": "e2m1_g16_e4m3_row",
    "nf4": "nf4_g64",
    "q4_k": "int4_g32_zfloat_u8x256",
    "mxfp8": "e4m3_g32_e8m0",
    "mxfp6": "e2m3_g32_e8m0",
    "q6_k": "int6_g16_s8x256",
    "q5_k": "int5_g32_zfloat_u8x256",
    "q3_k": "int3_g16_s6x256",
    "q2_k": "int2_g16_zfloat_u4x256",
}
"""Names that are in use for formats, and their strings."""
USUAL_NAMES = {text: name for name, text in ALIASES.items()}
_OTHER_NAMES = {
    "awq": "int4_g128_zint",
    "gptq": "int4_g128",
    "w4a16": "int4_g128",
    "w4a8": "int4_g128_e4m3",
    "fp4": "mxfp4",
    "q4_0": "int4_g32_fp16",
    "q4_1": "int4_g32_zfloat_fp16",
    "iq4_nl": "iq4_g32_fp16",
    "q8_0": "int8_g32_fp16",
    "q5_0": "int5_g32_fp16",
    "q5_1": "int5_g32_zfloat_fp16",
    **dict.fromkeys(("w8a16", "w8a8"), "int8_g128"),
    "fp8": "e4m3_col_fp32",
    "fp8_block": "e4m3_g128_b128",
    **{name: f"{name[-4:]}_col_fp32" for name in ("e4m3", "e5m2", "fp8_e4m3", "fp8_e5m2", "float8_e5m2")},
    "float8_e4m3fn": "e4m3_col_fp32",
    "mxfp8_e5m2": "e5m2_g32_e8m0",
    **dict.fromkeys(("fp6", "e2m3", "mxfp6_e2m3"), "mxfp6"),
    **dict.fromkeys(("e3m2", "mxfp6_e3m2"), "e3m2_g32_e8m0"),
    "w4a8_nvfp4_fp8": "e2m1_g16_e4m3",
    **{element: f"{element}_g128" for element in INTEGER_NAMES},
}
"""Formats by the names that checkpoints and engines give their most common weights."""
_EXAMPLES = (
    *ALIASES,
    *(
        f"{element}_{group}{zero}"
        for element in INTEGER_NAMES
        for group in ("g32", "g64", "g128", "col")
        for zero in ("", "_zint")
    ),
)
"""Formats that a message may propose as the nearest."""
_NAME = re.compile(
    rf"(?P<element>{'|'.join(ELEMENT_NAMES)}|{CODEBOOK_NAME.pattern})_(g(?P<group>\d+)|col)(_z(?P<zero>int|float))?(_(?P<scale>{'|'.join(SCALE_NAMES)}))?",
    re.ASCII,
)


class NameParts(NamedTuple):
    """The arguments of :class:`w4gemm.WeightFormat`."""

    group_size: int
    zero: str
    scale: str
    element: str


def parts_of(name: str) -> NameParts:
    """Return what a format's string says.

    Raises:
        ValueError: if it is not such a string. Whether the parts fit one another is not checked.
    """
    match = _NAME.fullmatch(ALIASES.get(name, name)) if isinstance(name, str) else None
    if match is None:
        raise ValueError(
            f"format: wanted int4_g<group size>, for example int4_g128, or one of {', '.join(ALIASES)}, or another of "
            f"<element>_g<group size>[_zint|_zfloat][_<scale>], which docs/formats.md lists; got "
            f"{name!r:.200}{_meant(name)}"
        )
    group = int(match["group"]) if match["group"] else PER_COLUMN
    require_group_size(group)
    return NameParts(group, match["zero"] or "none", match["scale"] or "bf16", match["element"])


def require_group_size(size: int) -> None:
    """Raise ValueError unless a format may have groups of ``size`` columns."""
    if size != PER_COLUMN and (size <= 0 or size % SMALLEST_GROUP or size > LARGEST_GROUP):
        rounded = (size + SMALLEST_GROUP // 2) // SMALLEST_GROUP * SMALLEST_GROUP
        raise ValueError(
            "group_size: wanted a positive multiple of 16 (of 32, for GPUs to take most with fp8 x) up to "
            f"{LARGEST_GROUP}, or -1 for one scale per output channel, got {size}; nearest is "
            f"{min(max(SMALLEST_GROUP, rounded), LARGEST_GROUP)}"
        )


def _meant(name: object) -> str:
    """Return the end of a message about a name that is no format's: the nearest format, if there is one."""
    exact = name.lower() if isinstance(name, str) else ""
    close = exact if exact in _OTHER_NAMES else closest(name, (*_EXAMPLES, *_OTHER_NAMES))
    return f"; nearest is {_OTHER_NAMES.get(close, close)!r}" if close else ""
