"""The meaning of a weight's numbers: :class:`WeightFormat`.

A weight w (n, k) is stored as codes u in 0 .. 2**bits - 1, one scale s per output row and group of ``group_size``
elements along k, and optionally one zero point per scale. A format is an element, a scale rule and a zero rule:

* The :class:`Element` says which number v(u) a code stands for: u - 2**(bits - 1) of ``int8`` to ``int2``, one of 16
  numbers of a codebook such as ``iq4`` and ``nf4``, a float of ``e4m3``, ``e3m2`` or ``e2m1``.
* The :class:`ScaleRule` says what a scale is stored as, how many rows share it, whether a float32 factor per output
  channel multiplies all scales of the row, and whether s * v is rounded before that factor.
* The zero rule says what a group's zero point is:

============  ==========================  =========================================
``zero``      w                           found in
============  ==========================  =========================================
``"none"``    s * v(u)                    symmetric GPTQ, compressed-tensors, Q4_0, MXFP4, NVFP4
``"int"``     s * (u - z), z a code       AWQ, asymmetric GPTQ
``"float"``   s * u + z                   Q4_1, Q4_K, HQQ (after z = -zero * s)
============  ==========================  =========================================

With scales of at most 16 bits the products above are exact in float32; a kernel rounds w once to the activation dtype.
With a factor c per output channel, w = c * s * v(u), or c * e4m3(s * v(u)) where the rule rounds: to the nearest, ties
to even, saturating. With float32 scales, w is the float32 nearest to the number above, and a kernel rounds that.

For 16-bit activations a codebook's numbers are rounded to the activations' dtype before they are multiplied. ``iq4`` is
exact in bf16 and fp16. Numbers of ``nf4`` change by at most 2**-9 of their size in bf16 and 2**-12 in fp16.

GGUF's K-quants have scales of two levels: a group's s and z are small integers, times fp16 factors of the row's 256
columns around it (a superblock). Q4_K, Q5_K (a byte each) and Q2_K (four bits each): w = (f * s) * u + g * z, the
float32 nearest to the sum of these products, which are exact in float32. Q6_K and Q3_K have no zero points, and signed
bytes: w = (f * s) * v(u), the float32 nearest to it; f * s is exact.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import torch

from w4gemm.core.elements import ELEMENTS, Element, element_named
from w4gemm.core.format_names import PER_COLUMN, ZEROS, parts_of, require_group_size
from w4gemm.core.words import nearest

TensorShape = tuple[torch.dtype, tuple[int, ...]]
"""dtype and shape of a tensor."""


@dataclass(frozen=True)
class ScaleRule:
    """How scales are stored, and what is done with the product of a scale and a number."""

    name: str
    dtype: torch.dtype
    per_channel: bool = False
    """True if a float32 factor for each output channel multiplies the row's weights."""
    rounded_to: torch.dtype | None = None
    """dtype that scale * number is rounded to, before the channel's factor; None if it stays exact."""
    zeros: tuple[str, ...] = ("none",)
    """Zero rules that the scales may have beside them."""
    block_rows: int = 0
    """Rows, a multiple of 2, that share two scales, one of the even rows and one of the odd rows; 0 if each row has its
    own scales. Two, so that rows of a gate and an up projection may alternate."""
    factor_columns: int = 0
    """Columns that share an fp16 factor of scales and, with zero points, one of these; 0 if there are none."""
    level_bits: int = 0
    """Bits of a scale that has a factor, and of a zero point."""

    @property
    def signed(self) -> bool:
        """True if a scale may be negative."""
        return self.dtype not in (torch.float8_e8m0fnu, torch.uint8)

    @property
    def levels(self) -> tuple[int, int]:
        """The smallest and the largest scale that has a factor."""
        half = 2 ** (self.level_bits - 1)
        return (-half, half - 1) if self.signed else (0, 2 * half - 1)

    @property
    def range_dtype(self) -> torch.dtype:
        """Floating-point dtype that limits weights: the factors' or, without factors, the scales'."""
        return torch.float16 if self.factor_columns else self.dtype


SCALES = {
    rule.name: rule
    for rule in (
        ScaleRule("fp16", torch.float16, zeros=ZEROS),
        ScaleRule("bf16", torch.bfloat16, zeros=ZEROS),
        ScaleRule("fp32", torch.float32, zeros=ZEROS),
        ScaleRule("e4m3", torch.float8_e4m3fn, per_channel=True, rounded_to=torch.float8_e4m3fn),
        ScaleRule("e4m3_row", torch.float8_e4m3fn, per_channel=True),
        ScaleRule("e8m0", torch.float8_e8m0fnu),
        ScaleRule("u8x256", torch.uint8, zeros=("float",), factor_columns=256, level_bits=8),
        ScaleRule("u8x128", torch.uint8, zeros=("float",), factor_columns=128, level_bits=8),
        ScaleRule("s8x256", torch.int8, factor_columns=256, level_bits=8),
        ScaleRule("s8x128", torch.int8, factor_columns=128, level_bits=8),
        ScaleRule("s6x256", torch.int8, factor_columns=256, level_bits=6),
        ScaleRule("s6x128", torch.int8, factor_columns=128, level_bits=6),
        ScaleRule("u4x256", torch.uint8, zeros=("float",), factor_columns=256, level_bits=4),
        ScaleRule("b128", torch.float32, block_rows=128),
    )
}
"""By name, as in a format's string. ``e4m3``: for fp8 activations, W4A8 with group scales inside the e4m3 weights.
``fp32``: with float zero points, a scale has at most :attr:`WeightFormat.scale_bits` significant bits. One float32
scale for each row is ``_col_fp32``; a tensor's single scale is that of each row. ``b128``: float32, for the columns of
a group of 128 rows. ``u8x256``, ``s8x256``, ``s6x256``, ``u4x256``: two levels, unsigned bytes, signed bytes, signed
ones of six bits, and four bits, and factors for each 256 columns; the unsigned ones have float zero points. ``u8x128``,
``s8x128``, ``s6x128``: the same for each 128 columns, for shards along k."""
SCALE_OF = {SCALES[name].dtype: name for name in ("fp16", "bf16", "fp32")}
"""The plain scale rule of each dtype: one scale for each row and group, which multiplies as it is."""
_FLOAT32_BITS, _FACTOR_BITS = 24, 11
"""Significant bits of a float32, and of a factor, which is an fp16."""


@dataclass(frozen=True)
class WeightFormat:
    """The meaning of a weight's numbers; data, not code.

    Args:
        group_size: elements of k that share a scale: a positive multiple of 16, or -1 for one scale per output channel.
            GPU kernels take multiples of 32 and, with 16-bit x, 8-bit or 16-bit scales and no zero points, of 16.
        zero: ``"none"``, ``"int"`` or ``"float"``; see the table in the module's docstring.
        scale: name of the scale rule, one of :data:`SCALES`; a float zero point has the dtype of the scales.
        element: name of the element, one of :data:`ELEMENTS` or what :func:`codebook` returns; only int8 to int2 take
            zero points.

    Raises:
        ValueError: for any other value, naming the nearest legal one.

    Examples:
        >>> w4gemm.WeightFormat(64, "int") == w4gemm.WeightFormat.parse("int4_g64_zint")
        True
        >>> str(w4gemm.WeightFormat.parse("mxfp4")), w4gemm.WeightFormat(64).groups(1024)
        ('e2m1_g32_e8m0', 16)
    """

    group_size: int = 128
    zero: str = "none"
    scale: str = "bf16"
    element: str = "int4"
    name: str = field(init=False, repr=False, compare=False)
    """The string form."""

    def __post_init__(self) -> None:
        self._check_fields()
        object.__setattr__(self, "element", self.element_rule.name)  # one name for one set of numbers
        self._check_combination()
        group = "col" if self.group_size == PER_COLUMN else f"g{self.group_size}"
        zero = f"_z{self.zero}" if self.has_zero else ""
        scale = "" if self.scale == "bf16" else f"_{self.scale}"
        # plans are looked up by it; of small integers, so that it is the same in every process
        element = tuple(ELEMENTS).index(self.element) if self.element in ELEMENTS else zlib.crc32(self.element.encode())
        kinds = ZEROS.index(self.zero), tuple(SCALES).index(self.scale), element
        object.__setattr__(self, "_hash", hash((self.group_size, *kinds)))
        # kept, since torch.compile cannot always build a string from g, which it may take for a symbol
        object.__setattr__(self, "name", f"{self.element}_{group}{zero}{scale}")

    def _check_fields(self) -> None:
        g = self.group_size
        if not isinstance(g, int) or isinstance(g, bool):
            raise TypeError(f"group_size: wanted an int, got {type(g).__name__} {g!r}")
        require_group_size(g)
        for argument, value, legal in (
            ("zero", self.zero, ZEROS),
            ("scale", self.scale, SCALES),
        ):
            if not isinstance(value, str) or value not in legal:
                raise ValueError(f"{argument}: wanted one of {', '.join(legal)}, got {value!r}{nearest(value, legal)}")
        if not isinstance(self.element, str) or element_named(self.element) is None:
            raise ValueError(f"element: wanted one of {', '.join(ELEMENTS)} or a codebook's, got {self.element!r}")

    def _check_combination(self) -> None:
        """Raise ValueError unless the element, the scale rule, the zero rule and the group size fit one another."""
        rule, g = self.scale_rule, self.group_size
        if self.has_zero and not self.element_rule.counts:
            raise ValueError(f"zero: wanted 'none' with {self.element} elements, got {self.zero!r}")
        if (columns := rule.factor_columns) and (self.zero not in rule.zeros or g < 1 or columns % g):
            raise ValueError(
                f"scale: {self.scale} has factors of {columns} columns: wanted zero {rule.zeros[0]!r} and a group_size "
                f"that divides {columns}, got {self.zero!r} and {g}"
            )
        if self.has_factors and self.has_zero and _FACTOR_BITS + rule.level_bits + self.bits > _FLOAT32_BITS:
            most = _FLOAT32_BITS - _FACTOR_BITS - rule.level_bits
            raise ValueError(
                f"element: wanted at most {most} bits with {self.scale} scales, so that products of a factor, a "
                f"scale and a code are exact in float32, got {self.element}"
            )
        if self.zero not in rule.zeros:
            raise ValueError(f"zero: wanted 'none' with {self.scale} scales, got {self.zero!r}; bf16 scales take it")

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @property
    def element_rule(self) -> Element:
        """The numbers that codes stand for."""
        element = element_named(self.element)
        assert element is not None
        return element

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.element_rule.bits

    @property
    def scale_rule(self) -> ScaleRule:
        """How scales are stored and applied."""
        return SCALES[self.scale]

    @property
    def scale_dtype(self) -> torch.dtype:
        """dtype of the stored scales."""
        return SCALES[self.scale].dtype

    def stored_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales (float32) rounded to what is stored."""
        if self.has_factors:
            return scales.round().clamp(*self.scale_rule.levels).to(self.scale_dtype)
        if self.zero != "float" or self.scale_dtype.itemsize < 4:
            return scales.to(self.scale_dtype)
        mantissa, exponent = torch.frexp(scales)
        return torch.ldexp((mantissa * 2**self.scale_bits).round(), exponent - self.scale_bits)

    @property
    def scale_bits(self) -> int:
        """Significant bits of a float32 scale in a format with float zero points. Its products with codes are exact."""
        return _FLOAT32_BITS - self.bits

    @property
    def largest_weight(self) -> float:
        """Magnitude up to which weights are finite in every kernel that takes bf16 activations: SubnormalDecoder of
        packing/codecs/integers_decode.py multiplies bf16 scales by up to 2**100. In kernels that decode to fp16 the
        limit is 65504; whether one of those runs depends on m."""
        return min(2.0**31, torch.finfo(self.scale_rule.range_dtype).max)

    @property
    def largest_factor(self) -> float:
        """Largest magnitude that a scale is multiplied by: that of a value or, with zero points, of u - z or u. Scales
        of bf16 without zero points keep to that of u, because SubnormalDecoder multiplies them by up to 2**100."""
        element = self.element_rule
        alone = self.zero == "none" and self.scale_rule.range_dtype == torch.float16
        return element.largest_value if alone else element.largest_factor

    @property
    def has_channels(self) -> bool:
        """True if there is a float32 scale for each output channel."""
        return self.scale_rule.per_channel

    @property
    def has_factors(self) -> bool:
        """True if scales, and zero points if any, have two levels: small integers, and fp16 factors of superblocks."""
        return self.scale_rule.factor_columns > 0

    @property
    def factors(self) -> int:
        """Factors of a superblock: 1 of its scales and, with zero points, 1 of these; 0 without factors."""
        return (1 + self.has_zero) * self.has_factors

    @property
    def scales_in_weights(self) -> bool:
        """True if scale * number is rounded to e4m3: group scales are part of the weights that are multiplied."""
        return self.scale_rule.rounded_to is not None

    def parts(self, n: int, k: int) -> dict[str, TensorShape]:
        """dtype and shape of the :class:`w4gemm.packing.layouts.WeightComponents` of a weight (n, k) that there are, by
        name."""
        groups = self.groups(k)
        parts: dict[str, TensorShape] = {
            "codes": (torch.uint8, (n, k)),
            "scales": (self.scale_dtype, (self.scale_rows(n), groups)),
        }
        if self.zero_dtype is not None:
            parts["zeros"] = self.zero_dtype, (n, groups)
        if self.has_channels:
            parts["channels"] = torch.float32, (n,)
        if self.has_factors:
            parts["factors"] = torch.float16, (n, self.superblocks(k), self.factors)
        return parts

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of :meth:`parts`."""
        return tuple(self.parts(1, 1))

    @property
    def has_zero(self) -> bool:
        """True if zero points are stored."""
        return self.zero != "none"

    @property
    def zero_dtype(self) -> torch.dtype | None:
        """dtype of the stored zero points: uint8 codes, the scale dtype, or None without zero points."""
        return {"none": None, "int": torch.uint8, "float": self.scale_dtype}[self.zero]

    def groups(self, k: int) -> int:
        """Number of groups along k; the last one may be shorter."""
        return 1 if self.group_size == PER_COLUMN else -(-k // self.group_size)

    def scale_rows(self, n: int) -> int:
        """Number of rows of the scales: n or, if blocks of rows share them, two for each block."""
        rows = self.scale_rule.block_rows
        return 2 * -(-n // rows) if rows else n

    def scales_of_rows(self, scales: torch.Tensor, n: int) -> torch.Tensor:
        """Return stored scales (scale_rows(n), groups) as those of each row: (n, groups)."""
        if not self.scale_rule.block_rows:
            return scales
        pairs = scales.unflatten(0, (-1, 1, 2))
        return pairs.expand(-1, self.scale_rule.block_rows // 2, -1, -1).flatten(0, 2)[:n]

    def scales_of_blocks(self, scales: torch.Tensor) -> torch.Tensor:
        """Return the scales of each row, of an even number of rows, as they are stored: the inverse of
        :meth:`scales_of_rows`."""
        if not (rows := self.scale_rule.block_rows):
            return scales
        return torch.stack((scales[::rows], scales[1::rows]), 1).flatten(0, 1)

    def spread(self, of_groups: torch.Tensor, k: int) -> torch.Tensor:
        """Return a tensor (n, groups) with each number repeated for the columns of its group: (n, k)."""
        return of_groups.repeat_interleave(min(self.group_length(k), k), dim=1)[:, :k]

    def superblocks(self, k: int) -> int:
        """Number of superblocks along k; the last one may be shorter."""
        return -(-k // self.scale_rule.factor_columns)

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
        """Inverse of ``str``: ``int4_g128``, ``int4_col_zint``, ``int4_g32_zfloat_fp16``, ``iq4_g32_fp16``, ...

        It also takes the names of :data:`w4gemm.core.format_names.ALIASES`.

        Raises:
            ValueError: if ``name`` is not such a string.
        """
        return cls(*parts_of(name))
