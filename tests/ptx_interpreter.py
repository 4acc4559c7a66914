"""The PTX of decoders, run in Python: tests of arithmetic on registers need no GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from emulator.numbers import ARITHMETIC, funnel_shift, shift_left, shift_right

_BITS = 2**32 - 1


def run_ptx(text: str, outputs: int, inputs: Sequence[int]) -> list[int]:
    """The output registers $0, $1, ... of inline PTX, whose next operands are ``inputs``: words as unsigned integers.
    Instructions are separated by "; ", after declarations of registers."""
    registers = {f"${outputs + i}": word for i, word in enumerate(inputs)} | {"%lanemask_eq": 1 << 7}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    lines = (line.split(" ", 1) for line in text.strip("{} ").removesuffix(";").split("; "))
    with np.errstate(over="ignore"):
        for opcode, operands in (line for line in lines if line[0] != ".reg"):
            to, *rest = operands.split(", ")
            registers[to] = _operation(opcode)(*map(value, rest))
    return [registers[f"${i}"] for i in range(outputs)]


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


_PAIRWISE: dict[str, Callable[..., Fraction]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "fma": lambda x, y, z: x * y + z,
}


@functools.cache
def _operation(opcode: str) -> Callable[..., Any]:
    """The operation of an opcode on words: on halves of them exactly, else as tests/emulator has it."""
    name, *modifiers = opcode.split(".")
    if modifiers[-1].endswith("x2"):
        return _pairwise(modifiers[-1].removesuffix("x2"), _PAIRWISE[name])
    if name == "dp2a" and "hi" in modifiers:
        name = "dp2a.hi"
    words = {"shl": shift_left, "shr": shift_right, "shf": funnel_shift}.get(name) or ARITHMETIC[name]
    return lambda *operands: int(words(*(np.array(word & _BITS, np.uint32) for word in operands)))
