"""The numbers that codes stand for: the named elements, and any 16 numbers as a :func:`codebook`."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from w4gemm.core.format_names import CODEBOOK_NAME


@dataclass(frozen=True)
class Element:
    """The numbers that codes of ``bits`` bits stand for, before scale and zero point."""

    name: str
    bits: int
    values: tuple[float, ...]
    """The number of each code 0 .. 2**bits - 1 if no zero point is stored, exact in float32. NaN for a code of an 8-bit
    float that stands for NaN or infinity, which no weight may have."""
    counts: bool = False
    """True if the numbers are consecutive integers, so that a format may store zero points."""
    mantissa_bits: int = 0
    """Of a float: bits of its mantissa."""

    def __post_init__(self) -> None:
        assert len(self.values) == 2**self.bits, f"{self.name}: a number for each code"

    @property
    def largest_code(self) -> int:
        """2**bits - 1, which is the largest integer zero point too."""
        return 2**self.bits - 1

    @functools.cached_property
    def refused_codes(self) -> tuple[int, ...]:
        """Codes that stand for no finite number."""
        return tuple(code for code, value in enumerate(self.values) if math.isnan(value))

    @functools.cached_property
    def _numbers(self) -> tuple[float, ...]:
        """The different values that are numbers, in ascending order."""
        return tuple(sorted({value for value in self.values if not math.isnan(value)}))

    def numbers(self, codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the number of each code, rounded to ``dtype``, as float32."""
        if self.counts:
            return codes.float() - self.padding_code
        values = torch.tensor(self.values, dtype=torch.float32, device=codes.device)
        values = values.to(dtype).float() if dtype.itemsize == 2 else values
        # on CPUs twice as fast as values[codes.int()]
        return values.index_select(0, codes.flatten().int()).view(codes.shape)

    def nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the code of the value nearest to each number, as float32; if two are as near, the even code."""
        if self.counts:
            return (numbers + self.padding_code).round().clamp(0, self.largest_code)
        values = torch.tensor(self._numbers, dtype=torch.float32, device=numbers.device)
        # of the two zeros of a float the first one counts
        codes = torch.tensor([self.values.index(value) for value in self._numbers], device=numbers.device)
        middles = (values[1:] + values[:-1]) / 2
        numbers = numbers.contiguous()  # of others PyTorch warns
        below, above = (codes[torch.bucketize(numbers, middles, right=right)] for right in (False, True))
        return torch.where(below % 2 == 0, below, above).float()

    @functools.cached_property
    def padding_code(self) -> int:
        """The code of the value nearest to 0, with which a layout pads."""
        return min(range(len(self.values)), key=lambda code: abs(self.values[code]))  # NaN is less than nothing

    @property
    def least(self) -> float:
        """The smallest value."""
        return self._numbers[0]

    @property
    def most(self) -> float:
        """The largest value."""
        return self._numbers[-1]

    @property
    def largest_value(self) -> float:
        """Largest magnitude of a value."""
        return max(-self.least, self.most)

    @property
    def symmetric(self) -> bool:
        """True if the values of largest magnitude are of both signs, so that no scale need be negative."""
        return self.most == -self.least

    @property
    def largest_factor(self) -> float:
        """Largest magnitude that a scale is multiplied by: that is a value or, with zero points, u - z or u."""
        return self.largest_code if self.counts else self.largest_value


_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _integers(bits: int) -> Element:
    half = 2 ** (bits - 1)
    return Element(f"int{bits}", bits, tuple(range(-half, half)), counts=True)


def _float(exponent_bits: int, mantissa_bits: int, no_numbers: int = 0) -> Element:
    """Return the float of a sign, an exponent and a mantissa; its ``no_numbers`` largest codes of either sign stand for
    NaN or infinity."""
    least = 2 - 2 ** (exponent_bits - 1) - mantissa_bits  # exponent of the smallest number
    mantissas = range(2**mantissa_bits)
    sizes = [math.ldexp(mantissa, least) for mantissa in mantissas]
    for exponent in range(2**exponent_bits - 1):
        sizes += [math.ldexp(2**mantissa_bits + mantissa, least + exponent) for mantissa in mantissas]
    sizes[len(sizes) - no_numbers :] = [math.nan] * no_numbers
    values = tuple(sign * size for sign in (1.0, -1.0) for size in sizes)
    return Element(
        f"e{exponent_bits}m{mantissa_bits}", 1 + exponent_bits + mantissa_bits, values, mantissa_bits=mantissa_bits
    )


ELEMENTS = {
    element.name: element
    for element in (
        _integers(4),
        Element("iq4", 4, _IQ4),
        _float(2, 1),
        Element("nf4", 4, _NF4),
        *map(_integers, (8, 6, 5, 3, 2)),
        _float(4, 3, no_numbers=1),
        _float(5, 2, no_numbers=4),
        _float(2, 3),
        _float(3, 2),
    )
}
"""By name, as in a format's string. ``int8`` to ``int2``: code u stands for u - 2**(bits - 1). ``iq4``: the codebook of
GGUF's IQ4_NL and IQ4_XS, in its order. ``nf4``: that of bitsandbytes' NF4 (QLoRA), quantiles of a normal distribution.
``e4m3``, ``e5m2``: the 8-bit floats of the OCP 8-bit Floating Point specification 1.0, PyTorch's float8_e4m3fn and
float8_e5m2. ``e2m1``, ``e2m3``, ``e3m2``: the floats of 4 and 6 bits of the OCP Microscaling Formats specification 1.0.
The upper half of a float's codes has the negatives, from -0 on. Values but those of nf4 need at most eight significant
bits, so that they are exact in bf16 and their products with a 16-bit scale in float32."""
_CODEBOOK_BITS = 4
INTEGERS = {element.bits: element for element in ELEMENTS.values() if element.counts}
"""The elements of consecutive integers, by their bits."""
_LEAST, _MOST = 2.0**-6, 2.0**15
"""Limits of a codebook's largest magnitude. Numbers beyond belong into the scales."""


def codebook(values: Iterable[float]) -> str:
    """Return the name of the element whose code u stands for the number values[u].

    The name has the bits of the numbers, so that a format's string is complete: in files, caches and commands.

    Args:
        values: 16 numbers of both signs, with a largest magnitude within 2**-6 .. 2**15. They are rounded to
            float32.

    Returns:
        The name, for ``WeightFormat(..., element=name)``. The numbers of int4, iq4, nf4 and e2m1 have these names.

    Raises:
        TypeError, ValueError: for other values.

    Examples:
        >>> element = w4gemm.codebook(range(-120, 136, 16))
        >>> w = w4gemm.quantize(torch.randn(512, 1024), w4gemm.WeightFormat(64, element=element))
        >>> w4gemm.linear(torch.randn(3, 1024), w.repack()).shape
        torch.Size([3, 512])
    """
    try:
        words = [struct.pack(">f", value) for value in values]
    except (TypeError, struct.error, ValueError) as e:
        shape = getattr(values, "shape", None)
        got = repr(values) if shape is None else f"{type(values).__name__} of shape {tuple(shape)}"
        raise TypeError(f"values: wanted 16 numbers, got {got}") from e
    except OverflowError as e:
        raise ValueError(f"values: wanted a largest magnitude of {_LEAST:g} to {_MOST:g}, got {values!r}") from e
    if len(words) != 16:
        raise ValueError(f"values: wanted 16 numbers, got {len(words)}")
    numbers = tuple(struct.unpack(">f", word)[0] for word in words)
    largest = max(map(abs, numbers)) if all(map(math.isfinite, numbers)) else math.nan
    if not _LEAST <= largest <= _MOST:  # also true for NaN
        raise ValueError(f"values: wanted a largest magnitude of {_LEAST:g} to {_MOST:g}, got {largest:g}")
    if not min(numbers) < 0 < max(numbers):
        raise ValueError(f"values: wanted numbers of both signs, got {list(numbers)}")
    name = next((e.name for e in ELEMENTS.values() if e.values == numbers), None)
    digits = 4 if all(word.endswith(bytes(2)) for word in words) else 8
    return name or "codebook" + "".join(word.hex()[:digits] for word in words)


def element_named(name: str) -> Element | None:
    """Return the element that :data:`ELEMENTS` or :func:`codebook` calls ``name``; None if neither does.

    A codebook that got a name of its own since is that element: files that were written before hold its numbers.
    """
    return ELEMENTS.get(name) or _codebook_named(name)


@functools.cache
def _codebook_named(name: str) -> Element | None:
    match = CODEBOOK_NAME.fullmatch(name)
    if match is None:
        return None
    digits = len(match[1]) // 16
    words = [match[1][i : i + digits].ljust(8, "0") for i in range(0, len(match[1]), digits)]
    values = tuple(struct.unpack(">f", bytes.fromhex(word))[0] for word in words)
    try:
        own_name = codebook(values)
    except ValueError:
        return None
    return ELEMENTS.get(own_name) or (Element(name, _CODEBOOK_BITS, values) if own_name == name else None)
