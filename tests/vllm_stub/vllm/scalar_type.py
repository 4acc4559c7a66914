"""Types of weights."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScalarType:
    exponent: int
    mantissa: int
    signed: bool
    bias: int

    @property
    def size_bits(self):
        return self.exponent + self.mantissa + self.signed

    def is_signed(self):
        return self.signed

    def is_integer(self):
        return self.exponent == 0

    def __str__(self) -> str:
        return f"{'' if self.signed else 'u'}int{self.size_bits}{f'b{self.bias}' if self.bias else ''}"


class scalar_types:
    int4 = ScalarType(0, 3, True, 0)
    uint4 = ScalarType(0, 4, False, 0)
    uint8 = ScalarType(0, 8, False, 0)
    uint2b2 = ScalarType(0, 2, False, 2)
    uint3b4 = ScalarType(0, 3, False, 4)
    uint4b8 = ScalarType(0, 4, False, 8)
    uint5b16 = ScalarType(0, 5, False, 16)
    uint6b32 = ScalarType(0, 6, False, 32)
    uint7b64 = ScalarType(0, 7, False, 64)
    uint8b128 = ScalarType(0, 8, False, 128)
