"""The PTX of decoders, run in Python: tests of arithmetic on registers need no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

_BITS = 2**32 - 1


def run_ptx(text: str, outputs: int, inputs: Sequence[int]) -> list[int]:
    """The output registers $0, $1, ... of inline PTX, whose next operands are ``inputs``: words as unsigned integers.
    Instructions are separated by "; ", after declarations of registers."""
    registers = {f"${outputs + i}": word for i, word in enumerate(inputs)} | {"%lanemask_eq": 1 << 7}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for line in text.strip("{} ").removesuffix(";").split("; "):
        opcode, operands = line.split(" ", 1)
        if opcode != ".reg":
            to, *rest = operands.split(", ")
            registers[to] = _OPERATIONS[opcode](*map(value, rest)) & _BITS
    return [registers[f"${i}"] for i in range(outputs)]


def prmt(a: int, b: int, selector: int) -> int:
    """Four bytes of eight, by the low bits of four nibbles, or eight times their sign if the high bit is set."""
    both, actual = (a | b << 32).to_bytes(8, "little"), []
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = both[nibble & 7]
        actual.append((byte >> 7) * 255 if nibble >= 8 else byte)
    return int.from_bytes(bytes(actual), "little")


def lop3(a: int, b: int, c: int, table: int) -> int:
    """Each bit is the table's at the index that the operands' bits make."""
    chosen = (table >> i & 1 and (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8))
    return sum(chosen)


def _dp2a_low(a: int, b: int, c: int) -> int:
    return (a & 0xFFFF) * (b & 0xFF) + (a >> 16) * (b >> 8 & 0xFF) + c


def _dp4a(a: int, b: int, c: int) -> int:
    return sum((a >> i & 0xFF) * (b >> i & 0xFF) for i in range(0, 32, 8)) + c


class Half(NamedTuple):
    """A 16-bit floating-point type."""

    digits: int
    """Digits of the significand."""
    least: int
    """Exponent of a subnormal's last digit."""

    def number(self, bits: int) -> Fraction:
        """The finite number with these bits."""
        size, stored = bits & 0x7FFF, self.digits - 1
        exponent, mantissa = size >> stored, size & (1 << stored) - 1
        significand = mantissa + (1 << stored if exponent else 0)
        return Fraction(2) ** (max(exponent, 1) - 1 + self.least) * (-significand if bits >> 15 else significand)

    def bits(self, value: Fraction) -> int:
        """The bits of the nearest number, ties to even. 0 has no sign.

        Raises:
            OverflowError: if that is infinite.
        """
        if value == 0:
            return 0
        top = abs(value).numerator.bit_length() - value.denominator.bit_length()
        top -= abs(value) < Fraction(2) ** top
        step = max(top - self.digits + 1, self.least)
        significand = round(abs(value) / Fraction(2) ** step)
        # a significand that was rounded up to the next power of two carries into the exponent
        size = ((step - self.least) << self.digits - 1) + significand
        if size >> self.digits - 1 >= (1 << 16 - self.digits) - 1:
            raise OverflowError(f"{float(value):g} is infinite")
        return (value < 0) << 15 | size


HALVES = {"f16": Half(11, -24), "bf16": Half(8, -133)}


def _pairwise(kind: str, operation: Callable[..., Fraction]) -> Callable[..., int]:
    """An operation on both halves of words, rounded once."""
    half = HALVES[kind]

    def of_words(*words: int) -> int:
        low, high = (half.bits(operation(*(half.number(w >> shift & 0xFFFF) for w in words))) for shift in (0, 16))
        return low | high << 16

    return of_words


_OPERATIONS: dict[str, Callable[..., int]] = {
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "shf.r.wrap.b32": lambda low, high, by: (low | high << 32) >> by,
    "or.b32": lambda a, b: a | b,
    "sub.u32": lambda a, b: a - b,
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "dp2a.lo.u32.u32": _dp2a_low,
    "dp4a.u32.u32": _dp4a,
    **{
        f"{name}.rn.{kind}x2": _pairwise(kind, operation)
        for kind in HALVES
        for name, operation in {
            "add": lambda x, y: x + y,
            "sub": lambda x, y: x - y,
            "mul": lambda x, y: x * y,
            "fma": lambda x, y, z: x * y + z,
        }.items()
    },
}
