"""From packed 4-bit codes to the 16-bit elements of a matrix instruction's operand A, in registers.

The trick (Kim et al., "Who says elephants can't run", 2022): a 4-bit code OR-ed into the lowest mantissa bits of 1024.0
in fp16, or of 128.0 in bf16, *is* 1024 + u or 128 + u; subtracting 1024 + z gives u - z exactly, and one multiplication
by the scale rounds once. Folding both into one fma would round z * s too, which is an error of up to 0.27 s in bf16.

One code word (see layouts/sm90.py) becomes four registers: rows g, g + 8, g, g + 8 of the fragment.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32

from w4gemm.kernels.device.ptx import asm, broadcast_half, half_to_float, pack_half2

# 1024.0 / 128.0 in both halves, and minus the same
_BIAS = {"f16": (0x64006400, 0xE400E400), "bf16": (0x43004300, 0xC300C300)}
_MINUS_BIAS_8 = {"f16": 0xE408E408, "bf16": 0xC308C308}
_BIAS_VALUE = {"f16": 1024.0, "bf16": 128.0}


@dataclass(frozen=True)
class Decoder:
    """Decodes to ``kind`` ("f16" or "bf16") with scales of ``scale_kind`` and zero points "none", "int" or "float".

    Where the two kinds differ the product is formed in float32 and rounded once, at about twice the instructions.
    """

    kind: str
    scale_kind: str
    zero: str

    @property
    def words_per_scale(self) -> int:
        return 1 if self.zero == "none" else 2

    @property
    def mixed(self) -> bool:
        return self.kind != self.scale_kind

    def prepare(self, words: tuple[Int32, ...]) -> tuple:
        """Once per group: what :meth:`decode` needs of a scale word (and zero word), for rows g and g + 8."""
        return tuple(self._prepare_row(words, high) for high in (False, True))

    def _prepare_row(self, words: tuple[Int32, ...], high: bool) -> tuple:
        """(scale, offset, zero) of one row: offset is added to bias + u, zero after the multiplication."""
        offset = Int32(_signed(_MINUS_BIAS_8[self.kind]))
        if self.mixed:
            scale = half_to_float(self.scale_kind, words[0], high)
            if self.zero == "none":
                return scale, offset, None
            zero = half_to_float(self.scale_kind, words[1], high)
            if self.zero == "float":
                return scale, Int32(_signed(_BIAS[self.kind][1])), zero
            value = Float32(-_BIAS_VALUE[self.kind]) - zero
            return scale, pack_half2(self.kind, value, value), None
        scale = broadcast_half(words[0], high)
        if self.zero == "none":
            return scale, offset, None
        zero = broadcast_half(words[1], high)
        minus_bias = Int32(_signed(_BIAS[self.kind][1]))
        if self.zero == "float":
            return scale, minus_bias, zero
        return scale, asm(f"sub.rn.{self.kind}x2 $0, $1, $2;", [Int32], [minus_bias, zero], pure=True)[0], None

    def decode(self, word: Int32, prepared: tuple) -> tuple[Int32, ...]:
        """The four fragment registers of a code word."""
        out = []
        for i, biased in enumerate(self._biased(word)):
            scale, offset, zero = prepared[i % 2]
            exact = asm(f"add.rn.{self.kind}x2 $0, $1, $2;", [Int32], [biased, offset], pure=True)[0]
            out.append(self._scaled(exact, scale, zero))
        return tuple(out)

    def decode_unscaled(self, word: Int32) -> tuple[Int32, ...]:
        """u - 8 exactly, for a kernel that applies the scale to its accumulators; symmetric formats only."""
        offset = Int32(_signed(_MINUS_BIAS_8[self.kind]))
        add = f"add.rn.{self.kind}x2 $0, $1, $2;"
        return tuple(asm(add, [Int32], [biased, offset], pure=True)[0] for biased in self._biased(word))

    def _biased(self, word: Int32) -> tuple[Int32, ...]:
        """bias + u, two codes a register."""
        bias = _BIAS[self.kind][0]
        shifts = "".join(f"shr.u32 t{i}, $4, {4 * i}; " for i in (1, 2, 3))
        picks = "".join(
            f"lop3.b32 ${i}, {f't{i}' if i else '$4'}, 0x000F000F, {bias:#x}, 0xEA; " for i in range(4)
        )
        return asm(f"{{ .reg .b32 t1, t2, t3; {shifts}{picks}}}", [Int32] * 4, [word], pure=True, early=True)

    def _scaled(self, exact: Int32, scale: Int32 | Float32, zero: Int32 | Float32 | None) -> Int32:
        if not self.mixed:
            if zero is None:
                return asm(f"mul.rn.{self.kind}x2 $0, $1, $2;", [Int32], [exact, scale], pure=True)[0]
            return asm(f"fma.rn.{self.kind}x2 $0, $1, $2, $3;", [Int32], [exact, scale, zero], pure=True)[0]
        low, high = (half_to_float(self.kind, exact, h) for h in (False, True))
        if zero is None:
            return pack_half2(self.kind, low * scale, high * scale)
        return pack_half2(self.kind, low * scale + zero, high * scale + zero)


def _signed(bits: int) -> int:
    return bits - 2**32 if bits >= 2**31 else bits
