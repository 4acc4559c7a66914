"""Types of weights."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScalarType:
    exponent: int
    mantissa: int
    signed: bool
    bias: int

    def __str__(self) -> str:
        bits = self.mantissa + self.signed
        return f"{'' if self.signed else 'u'}int{bits}{f'b{self.bias}' if self.bias else ''}"


class scalar_types:
    int4 = ScalarType(0, 3, True, 0)
    uint4 = ScalarType(0, 4, False, 0)
    uint4b8 = ScalarType(0, 4, False, 8)
    uint8b128 = ScalarType(0, 8, False, 128)
