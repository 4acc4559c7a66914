"""Arithmetic and conversions of registers, and mma.sync: single PTX instructions that the DSL does not offer, or not in
the form needed."""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Int32

from w4gemm.ptx.asm import HIDDEN_ZERO, asm

# --- float32


def fma(x: Float32, y: Float32, z: Float32) -> Float32:
    """x * y + z, rounded once."""
    return asm("fma.rn.f32 $0, $1, $2, $3;", [Float32], [x, y, z], pure=True)[0]


def divide(x: Float32, y: Float32) -> Float32:
    """x / y, rounded once."""
    return asm("div.rn.f32 $0, $1, $2;", [Float32], [x, y], pure=True)[0]


def square_root(x: Float32) -> Float32:
    """sqrt(x), rounded once."""
    return asm("sqrt.rn.f32 $0, $1;", [Float32], [x], pure=True)[0]


def exp2(x: Float32) -> Float32:
    """2 ** x within two units in the last place; subnormals are zeros."""
    return asm("ex2.approx.ftz.f32 $0, $1;", [Float32], [x], pure=True)[0]


def reciprocal(x: Float32) -> Float32:
    """1 / x within a unit in the last place; subnormals are zeros."""
    return asm("rcp.approx.ftz.f32 $0, $1;", [Float32], [x], pure=True)[0]


def maximum(x: Float32, y: Float32) -> Float32:
    """The larger one; NaN if either is."""
    return asm("max.NaN.f32 $0, $1, $2;", [Float32], [x, y], pure=True)[0]


def minimum(x: Float32, y: Float32) -> Float32:
    """The smaller one; NaN if either is."""
    return asm("min.NaN.f32 $0, $1, $2;", [Float32], [x, y], pure=True)[0]


def magnitude(x: Float32) -> Float32:
    """abs(x)."""
    return asm("abs.f32 $0, $1;", [Float32], [x], pure=True)[0]


def select_near(x: Float32, limit: Float32, near: Float32, far: Float32) -> Float32:
    """``near`` if abs(x) < limit, else ``far``, also for NaN."""
    text = "{ .reg .pred p; .reg .f32 a; abs.f32 a, $1; setp.lt.f32 p, a, $2; selp.f32 $0, $3, $4, p; }"
    return asm(text, [Float32], [x, limit, near, far], pure=True)[0]


def capped_magnitude(x: Float32, limit: Float32) -> Float32:
    """min(abs(x), limit), which is the limit for NaN."""
    return asm("{ .reg .f32 a; abs.f32 a, $1; min.f32 $0, a, $2; }", [Float32], [x, limit], pure=True)[0]


# --- pairs of 16-bit numbers, and bits


def multiply_halves(kind: str, x: Int32, y: Int32) -> Int32:
    """x * y of each half, of ``kind`` ("f16" or "bf16"), rounded once."""
    return asm(f"mul.rn.{kind}x2 $0, $1, $2;", [Int32], [x, y], pure=True)[0]


def maximum_halves(kind: str, x: Int32, y: Int32) -> Int32:
    """The larger one of each half, of ``kind`` ("f16" or "bf16"); a NaN without sign if either is."""
    return asm(f"max.NaN.{kind}x2 $0, $1, $2;", [Int32], [x, y], pure=True)[0]


def lane_again() -> Int32:
    """The thread's lane, read here: what follows from it is not computed in front of a loop, and holds no registers."""
    return asm("mov.u32 $0, %laneid;", [Int32], [])[0]


def again(x: Int32) -> Int32:
    """x as if it were read here: what follows from it is computed anew, and holds no registers before."""
    return asm("mov.b32 $0, $1;", [Int32], [x])[0]


def grid_again() -> tuple[Int32, Int32]:
    """The CTA's number and the number of CTAs, in the same way."""
    return asm("mov.u32 $0, %ctaid.x;", [Int32], [])[0], asm("mov.u32 $0, %nctaid.x;", [Int32], [])[0]


def warp_maximum(x: Int32) -> Int32:
    """The maximum over a warp, of unsigned integers, in every lane."""
    return asm("redux.sync.max.u32 $0, $1, 0xFFFFFFFF;", [Int32], [x])[0]


def to_float(kind: str, bits: Int32, high: bool = False) -> Float32:
    """The value with these bits, or, of a 16-bit kind, the lower or higher half of them: exactly."""
    return asm("mov.b32 $0, $1;", [Float32], [bits], pure=True)[0] if kind == "f32" else half_to_float(kind, bits, high)


def float_word(value: Float32) -> Int32:
    """The bits of a float32."""
    return asm("mov.b32 $0, $1;", [Int32], [value], pure=True)[0]


def half_to_float(kind: str, word: Int32, high: bool) -> Float32:
    """The low or high half of ``word``, exactly."""
    if kind == "bf16":
        text = "and.b32 $0, $1, 0xFFFF0000;" if high else "shl.b32 $0, $1, 16;"
        return asm(f"{{ .reg .b32 t; {text.replace('$0', 't')} mov.b32 $0, t; }}", [Float32], [word], pure=True)[0]
    half = "hi" if high else "lo"
    return asm(
        f"{{ .reg .b16 lo, hi; mov.b32 {{lo, hi}}, $1; cvt.f32.f16 $0, {half}; }}", [Float32], [word], pure=True
    )[0]


def pack_half2(kind: str, low: Float32, high: Float32) -> Int32:
    """Two float32 rounded to ``kind`` ("f16" or "bf16") in the halves of one word."""
    return asm(f"cvt.rn.{kind}x2.f32 $0, $1, $2;", [Int32], [high, low], pure=True)[0]


def halves_to_floats(kind: str, words: Sequence[Int32]) -> list[Float32]:
    """The two numbers of ``kind`` in each word, exactly."""
    return [to_float(kind, word, high) for word in words for high in (False, True)]


def floats_to_halves(kind: str, values: Sequence[Float32]) -> list[Int32]:
    """An even number of float32 rounded to ``kind``, two per word."""
    return [pack_half2(kind, low, high) for low, high in zip(values[::2], values[1::2], strict=True)]


def broadcast_half(word: Int32, high: bool) -> Int32:
    """The low or high half of ``word`` in both halves."""
    return asm(f"prmt.b32 $0, $1, $1, {'0x3232' if high else '0x1010'};", [Int32], [word], pure=True)[0]


def repeat_half(word: Int32, high: bool) -> Int32:
    """Like ``broadcast_half``, for a factor or addend of HMUL2 and HFMA2, because ptxas makes it a modifier of that."""
    half = "{h, h}" if high else "{l, l}"
    text = f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; mov.b32 $0, {half}; }}"
    return asm(text, [Int32], [word], pure=True)[0]


def rotated(word: Int32, by: Int32 | int) -> Int32:
    """A word rotated to the right, by the low five bits of ``by``."""
    return asm("shf.r.wrap.b32 $0, $1, $1, $2;", [Int32], [word, Int32(by)], pure=True)[0]


# --- 8-bit floats


def pack_e4m3(values: Sequence[Float32]) -> Int32:
    """Four float32 rounded to e4m3 in the bytes of one word, the first in the lowest; beyond 448 it is 448, and NaN
    stays NaN."""
    convert = "cvt.rn.satfinite.e4m3x2.f32"
    text = f"{{ .reg .b16 l, h; {convert} l, $2, $1; {convert} h, $4, $3; mov.b32 $0, {{l, h}}; }}"
    return asm(text, [Int32], list(values), pure=True)[0]


def pack_e5m2(values: Sequence[Float32]) -> Int32:
    """Four float32 rounded to e5m2 in the bytes of one word, the first in the lowest; beyond 57344 it is that."""
    convert = "cvt.rn.satfinite.e5m2x2.f32"
    text = f"{{ .reg .b16 l, h; {convert} l, $2, $1; {convert} h, $4, $3; mov.b32 $0, {{l, h}}; }}"
    return asm(text, [Int32], list(values), pure=True)[0]


def e4m3_to_halves(word: Int32) -> tuple[Int32, ...]:
    """Four e4m3 as fp16, exactly: two in each of two words, in order."""
    text = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
    return asm(text, [Int32] * 2, [word], pure=True, early=True)


def e5m2_to_halves(word: Int32) -> tuple[Int32, ...]:
    """Four e5m2 as fp16, which has the same exponents: two in each of two words, in order."""
    text = "prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;"
    return asm(text, [Int32] * 2, [word], pure=True, early=True)


# --- other


def signed(bits: int) -> int:
    """The number whose two's complement 32 bits are, since an Int32 takes no larger one."""
    return bits - 2**32 if bits >= 2**31 else bits


def row_address(table: Int32, row_bytes: int, word: Int32, byte: int) -> Int32:
    """Address of the row of a table whose number is a byte of a word."""
    return asm(f"dp4a.u32.u32 $0, $1, {row_bytes << 8 * byte:#x}, $2;", [Int32], [word, table], pure=True)[0]


def hidden_constant(word: int) -> Int32:
    """A word. prmt takes one constant, and ptxas copies another one into a register for each prmt; unless the word is
    computed from what only the lane knows."""
    return asm(f"{{ .reg .b32 m, z; {HIDDEN_ZERO}or.b32 $0, z, {word:#x}; }}", [Int32], [], pure=True)[0]


def kept(word: Int32) -> Int32:
    """The word, which ptxas then keeps in a register: it does not compute a shuffled one anew in each round of a loop.
    All lanes of the warp must call this."""
    text = "{ .reg .b32 l; mov.u32 l, %laneid; shfl.sync.idx.b32 $0, $1, l, 31, 0xFFFFFFFF; }"
    return asm(text, [Int32], [word])[0]


def mma_sync(
    kind: str, acc: Sequence[Float32], a: Sequence[Int32], b: Sequence[Int32], a_kind: str = ""
) -> tuple[Float32, ...]:
    """acc + a @ b, with float32 accumulators, on one warp: 32 bytes along k of 16 rows of a and eight columns of b,
    16 elements of a 16-bit kind or, from SM89 on, 32 of "e4m3". a_kind: of a, "e5m2", if that is not the kind of b."""
    shape = "m16n8k32" if kind == "e4m3" else "m16n8k16"
    text = (
        f"mma.sync.aligned.{shape}.row.col.f32.{a_kind or kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return asm(text, [Float32] * 4, [*a, *b, *acc], pure=True)
