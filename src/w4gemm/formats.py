"""What the numbers of a 4-bit weight mean: :class:`WeightFormat`.

A weight w (n, k) is stored as 4-bit codes u in 0..15, one scale s per output row and group of ``group_size`` elements
along k, and optionally one zero point per scale:

============  ==========================  =========================================
``zero``      w                           found in
============  ==========================  =========================================
``"none"``    s * (u - 8)                 symmetric GPTQ, compressed-tensors, Q4_0
``"int"``     s * (u - z), z in 0..15     AWQ, asymmetric GPTQ
``"float"``   s * u + z                   Q4_1, HQQ (after z = -zero * s)
============  ==========================  =========================================

The products above are exact in float32; a kernel rounds w once to the activation dtype.

With e4m3 scales, for fp8 activations, there is a float32 scale c for each output channel too, and what a matrix
instruction takes is rounded to e4m3: w = c * e4m3(s * (u - 8)), to the nearest, ties to even, saturating.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch

PER_COLUMN = -1
"""``group_size`` of a format with one scale per output channel (per row of w, all of k)."""

SYMMETRIC_ZERO = 8
"""The code that stands for 0 in a symmetric format."""

_SCALE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
_ZERO_KINDS = ("none", "int", "float")
_NAME = re.compile(r"int4_(g(?P<group>\d+)|col)(_z(?P<zero>int|float))?(_(?P<scale>fp16|bf16|e4m3))?")


@dataclass(frozen=True)
class WeightFormat:
    """The meaning of a 4-bit weight's numbers; data, not code.

    Args:
        group_size: elements of k that share a scale: a positive multiple of 32, or -1 for one scale per output channel.
        zero: ``"none"``, ``"int"`` or ``"float"``; see the table in the module's docstring.
        scale: dtype of the scales and of float zero points, ``"bf16"`` or ``"fp16"``; or ``"e4m3"``, without zero
            points and with a float32 scale for each output channel besides.

    Raises:
        ValueError: for any other value, naming the nearest legal one.
    """

    group_size: int = 128
    zero: str = "none"
    scale: str = "bf16"
    name: str = field(init=False, repr=False, compare=False)
    """The string form."""

    def __post_init__(self) -> None:
        g = self.group_size
        if not isinstance(g, int) or isinstance(g, bool):
            raise TypeError(f"group_size: wanted an int, got {type(g).__name__} {g!r}")
        if g != PER_COLUMN and (g <= 0 or g % 32):
            nearest = max(32, round(g / 32) * 32)
            raise ValueError(
                f"group_size: wanted a positive multiple of 32, or -1 for per column, got {g}; nearest is {nearest}"
            )
        if self.zero not in _ZERO_KINDS:
            raise ValueError(f"zero: wanted one of {', '.join(_ZERO_KINDS)}, got {self.zero!r}")
        if not isinstance(self.scale, str) or self.scale not in _SCALE_DTYPES:
            raise ValueError(f"scale: wanted one of {', '.join(_SCALE_DTYPES)}, got {self.scale!r}")
        if self.scale == "e4m3" and self.zero != "none":
            raise ValueError(f"zero: wanted 'none' beside e4m3 scales, got {self.zero!r}; bf16 scales take it")
        group = "col" if g == PER_COLUMN else f"g{g}"
        zero = f"_z{self.zero}" if self.has_zero else ""
        scale = "" if self.scale == "bf16" else f"_{self.scale}"
        # plans are looked up by it; of small integers, so that it is the same in every process
        kinds = _ZERO_KINDS.index(self.zero), tuple(_SCALE_DTYPES).index(self.scale)
        object.__setattr__(self, "_hash", hash((g, *kinds)))
        # kept, since torch.compile cannot always build a string from g, which it may take for a symbol
        object.__setattr__(self, "name", f"int4_{group}{zero}{scale}")

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @property
    def scale_dtype(self) -> torch.dtype:
        return _SCALE_DTYPES[self.scale]

    @property
    def largest_weight(self) -> float:
        """The magnitude up to which weights are finite in every kernel beside bf16 activations: SubnormalDecoder of
        kernels/device/decode.py multiplies scales of bf16 by 2**100. Beside fp16 activations it is 65504 in kernels
        that decode to fp16; whether such a one runs depends on m."""
        return min(2.0**31, torch.finfo(self.scale_dtype).max)

    @property
    def has_channels(self) -> bool:
        """Whether there is a float32 scale for each output channel."""
        return self.scale == "e4m3"

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of the :class:`w4gemm.packing.layouts.Parts` that there are."""
        zeros, channels = ("zeros",) if self.has_zero else (), ("channels",) if self.has_channels else ()
        return ("codes", "scales", *zeros, *channels)

    @property
    def has_zero(self) -> bool:
        """Whether zero points are stored."""
        return self.zero != "none"

    @property
    def zero_dtype(self) -> torch.dtype | None:
        """dtype of the stored zero points: uint8 codes, the scale dtype, or None without zero points."""
        return {"none": None, "int": torch.uint8, "float": self.scale_dtype}[self.zero]

    def groups(self, k: int) -> int:
        """Number of groups along k; the last one may be shorter."""
        return 1 if self.group_size == PER_COLUMN else -(-k // self.group_size)

    def group_length(self, k: int) -> int:
        """``group_size``, or k for a per-column format."""
        return k if self.group_size == PER_COLUMN else self.group_size

    def __str__(self) -> str:
        return self.name

    @classmethod
    def of(cls, value: WeightFormat | str) -> WeightFormat:
        """A format as it is, or from its string.

        Raises:
            TypeError, ValueError: if it is neither.
        """
        if isinstance(value, str):
            return cls.parse(value)
        if not isinstance(value, cls):
            raise TypeError(f"format: wanted a WeightFormat or its string, got {type(value).__name__}")
        return value

    @classmethod
    def parse(cls, name: str) -> WeightFormat:
        """Inverse of ``str``: ``int4_g128``, ``int4_col_zint``, ``int4_g32_zfloat_fp16``, ...

        Raises:
            ValueError: if ``name`` is not such a string.
        """
        found = _NAME.fullmatch(name) if isinstance(name, str) else None
        if found is None:
            raise ValueError(
                f"format: wanted int4_g<group size> or int4_col, then optionally _zint or _zfloat, then optionally "
                f"_fp16, _bf16 or _e4m3 (for example int4_g128, int4_col_zint, int4_g32_zfloat_fp16), got {name!r}"
            )
        group = int(found["group"]) if found["group"] else PER_COLUMN
        return cls(group, found["zero"] or "none", found["scale"] or "bf16")
