"""Single PTX instructions that the DSL does not offer, or not in the form needed. Addresses of shared memory are
32-bit, of global memory 64-bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Boolean, Float32, Int16, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

_CONSTRAINT = {Int32: "r", Int64: "l", Float32: "f"}


def asm(
    text: str, outputs: Sequence[type] = (), inputs: Sequence[Any] = (), *, pure: bool = False, early: bool = False
) -> tuple[Any, ...]:
    """Inline PTX with operands $0, $1, ...: first the outputs, then the inputs.

    ``pure`` lets the compiler move, merge and drop it: arithmetic only. Everything else stays in order with the
    barrier operations around it. ``early`` marks outputs that are written before the last input is read.
    """
    constraints = [("=&" if early else "=") + _CONSTRAINT[t] for t in outputs]
    constraints += [_CONSTRAINT[type(v)] for v in inputs]
    if not pure:
        constraints.append("~{memory}")
    types = [T.f32() if t is Float32 else T.i64() if t is Int64 else T.i32() for t in outputs]
    result = None if not types else types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    r = llvm.inline_asm(
        result,
        [v.ir_value() for v in inputs],
        text,
        ",".join(constraints),
        has_side_effects=not pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if len(types) == 1:
        return (outputs[0](r),)
    return tuple(outputs[i](llvm.extractvalue(t, r, [i])) for i, t in enumerate(types))


def shared_address(pointer: Any) -> Int32:
    return Int32(pointer.toint())


def load_shared(address: Int32, words: int, constant: bool = False) -> tuple[Int32, ...]:
    """Load 1, 2 or 4 consecutive 32-bit words. constant: True if nothing writes there while the address is known."""
    if words == 1:
        return asm("ld.shared.b32 $0, [$1];", [Int32], [address], pure=constant)
    registers = ", ".join(f"${i}" for i in range(words))
    return asm(f"ld.shared.v{words}.b32 {{{registers}}}, [${words}];", [Int32] * words, [address], pure=constant)


def load_shared_cluster(address: Int32) -> tuple[Float32, ...]:
    """Load four consecutive float32 from an address of any CTA of the cluster."""
    return asm("ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [$4];", [Float32] * 4, [address])


def cluster_address(address: Int32, rank: Int32) -> Int32:
    """The address in CTA ``rank`` of the cluster of what lies at ``address`` in this CTA."""
    return asm("mapa.shared::cluster.u32 $0, $1, $2;", [Int32], [address, rank], pure=True)[0]


def store_shared_f32x4(address: Int32, values: Sequence[Float32]) -> None:
    asm("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", [], [address, *values])


def load_shared_half(address: Int32) -> Int32:
    """Load 16 bits; the upper half is zero."""
    return asm("{ .reg .b16 h; ld.shared.b16 h, [$1]; cvt.u32.u16 $0, h; }", [Int32], [address])[0]


def load_global_int32x4(address: Int64) -> tuple[Int32, ...]:
    """Load four consecutive words that nothing writes while the kernel runs."""
    return asm("ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", [Int32] * 4, [address])


def load_global_f32x4(address: Int64) -> tuple[Float32, ...]:
    """Load four consecutive float32 from L2, which another CTA may have written."""
    return asm("ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];", [Float32] * 4, [address])


def store_global_f32x4(address: Int64, values: Sequence[Float32]) -> None:
    asm("st.global.cg.v4.f32 [$0], {$1, $2, $3, $4};", [], [address, *values])


def load_acquire(address: Int64) -> Int32:
    """Load a word; writes before the ``store_release`` that stored it are then visible."""
    return asm("ld.acquire.gpu.global.b32 $0, [$1];", [Int32], [address])[0]


def store_release(address: Int64, value: Int32) -> None:
    """Store a word after all writes of this thread, and of the threads that it met at a barrier."""
    asm("fence.acq_rel.gpu; st.release.gpu.global.b32 [$0], $1;", [], [address, value])


def store_matrix_transposed(address: Int32, registers: Sequence[Int32]) -> None:
    """``stmatrix`` of two or four transposed 8x8 matrices of 16-bit elements."""
    count = len(registers)
    operands = ", ".join(f"${i + 1}" for i in range(count))
    asm(f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [$0], {{{operands}}};", [], [address, *registers])


def store_global(address: Int64, words: Sequence[Int32], exists: Boolean) -> None:
    """Store 1, 2 or 4 consecutive 32-bit words if they exist."""
    count = len(words)
    vector = "" if count == 1 else f".v{count}"
    registers = ", ".join(f"${i + 2}" for i in range(count))
    text = f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.global{vector}.b32 [$0], {{{registers}}}; }}"
    asm(text, [], [address, Int32(exists), *words])


def store_global_half(address: Int64, word: Int32, exists: Boolean) -> None:
    """Store the low 16 bits of ``word`` if they exist."""
    asm("{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.u16 [$0], $1; }", [], [address, word, Int32(exists)])


def store_global_byte(address: Int64, word: Int32, exists: Boolean) -> None:
    """Store the low 8 bits of ``word`` if they exist."""
    asm("{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.u8 [$0], $1; }", [], [address, word, Int32(exists)])


def load_global(address: Int64, count: int, exists: Boolean) -> list[Int32]:
    """Load 1, 2 or 4 consecutive 32-bit words; 0, without an access, if they do not exist."""
    vector = "" if count == 1 else f".v{count}"
    registers = [f"${i}" for i in range(count)]
    zeros = " ".join(f"mov.b32 {r}, 0;" for r in registers)
    target = registers[0] if count == 1 else f"{{{', '.join(registers)}}}"
    text = f"setp.ne.b32 p, ${count + 1}, 0; {zeros} @p ld.global{vector}.b32 {target}, [${count}];"
    return list(asm(f"{{ .reg .pred p; {text} }}", [Int32] * count, [address, Int32(exists)], early=True))


def load_global_half(address: Int64, exists: Boolean) -> Int32:
    """16 bits in the lower half of a word; 0, without an access, where they do not exist."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.u16 $0, [$1]; }"
    return asm(text, [Int32], [address, Int32(exists)], early=True)[0]


def prefetch_global(address: Int64, exists: Boolean) -> None:
    """Bring the 128 bytes around an address into L2."""
    text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p prefetch.global.L2 [$0]; }"
    asm(text, [], [address, Int32(exists)])


def fma(x: Float32, y: Float32, z: Float32) -> Float32:
    """x * y + z, rounded once."""
    return asm("fma.rn.f32 $0, $1, $2, $3;", [Float32], [x, y, z], pure=True)[0]


def exp2(x: Float32) -> Float32:
    """2 ** x within two units in the last place; subnormals are zeros."""
    return asm("ex2.approx.ftz.f32 $0, $1;", [Float32], [x], pure=True)[0]


def reciprocal(x: Float32) -> Float32:
    """1 / x within a unit in the last place; subnormals are zeros."""
    return asm("rcp.approx.ftz.f32 $0, $1;", [Float32], [x], pure=True)[0]


def divide(x: Float32, y: Float32) -> Float32:
    """x / y, rounded once."""
    return asm("div.rn.f32 $0, $1, $2;", [Float32], [x, y], pure=True)[0]


def square_root(x: Float32) -> Float32:
    """sqrt(x), rounded once."""
    return asm("sqrt.rn.f32 $0, $1;", [Float32], [x], pure=True)[0]


def maximum_halves(kind: str, x: Int32, y: Int32) -> Int32:
    """The larger one of each half, of ``kind`` ("f16" or "bf16"); a NaN without sign if either is."""
    return asm(f"max.NaN.{kind}x2 $0, $1, $2;", [Int32], [x, y], pure=True)[0]


def warp_maximum(x: Int32) -> Int32:
    """The maximum over a warp, of unsigned integers, in every lane."""
    return asm("redux.sync.max.u32 $0, $1, 0xFFFFFFFF;", [Int32], [x])[0]


def maximum(x: Float32, y: Float32) -> Float32:
    """The larger one; NaN if either is."""
    return asm("max.NaN.f32 $0, $1, $2;", [Float32], [x, y], pure=True)[0]


def minimum(x: Float32, y: Float32) -> Float32:
    """The smaller one; NaN if either is."""
    return asm("min.NaN.f32 $0, $1, $2;", [Float32], [x, y], pure=True)[0]


def select_near(x: Float32, limit: Float32, near: Float32, far: Float32) -> Float32:
    """``near`` if abs(x) < limit, else ``far``, also for NaN."""
    text = "{ .reg .pred p; .reg .f32 a; abs.f32 a, $1; setp.lt.f32 p, a, $2; selp.f32 $0, $3, $4, p; }"
    return asm(text, [Float32], [x, limit, near, far], pure=True)[0]


def capped_magnitude(x: Float32, limit: Float32) -> Float32:
    """min(abs(x), limit), which is the limit for NaN."""
    return asm("{ .reg .f32 a; abs.f32 a, $1; min.f32 $0, a, $2; }", [Float32], [x, limit], pure=True)[0]


def copy_async(destination: Int32, source: Int64, size: Int32) -> None:
    """``cp.async`` of 16 bytes from global to shared memory: ``size`` bytes are read, the others are zeros."""
    asm("cp.async.cg.shared.global [$0], [$1], 16, $2;", [], [destination, source, size])


def bulk_copy(destination: Int32, source: Int64, size: Int32, barrier: Int32) -> None:
    """Copy ``size`` bytes from global to shared memory, completing on an mbarrier; issued by one thread."""
    asm(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        [],
        [destination, source, size, barrier],
    )


def bulk_prefetch(source: Int64, size: Int32) -> None:
    """Bring ``size`` bytes of global memory into L2; issued by one thread."""
    asm("cp.async.bulk.prefetch.L2.global [$0], $1;", [], [source, size])


def bulk_copy_multicast(destination: Int32, source: Int64, size: Int32, barrier: Int32, mask: Int16) -> None:
    """``bulk_copy`` to the same address in every CTA of the cluster whose bit is set, each with its own barrier."""
    asm(
        "{ .reg .b16 m; cvt.u16.u32 m, $4; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [$0], [$1], $2, [$3], m; }",
        [],
        [destination, source, size, barrier, Int32(mask)],
    )


def copy_async_if(destination: Int32, source: Int64, exists: Boolean) -> None:
    """``cp.async`` of 16 bytes from global to shared memory, of zeros if they do not exist; see ``copies_wait``."""
    text = "{ .reg .b32 n; selp.b32 n, 16, 0, p; cp.async.cg.shared.global [$0], [$1], 16, n; }"
    asm(f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; {text} }}", [], [destination, source, Int32(exists)])


def load_row_index(address: Int64, exists: Boolean) -> Int32:
    """Load a word; -1, without an access, if it does not exist."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, -1; @p ld.global.b32 $0, [$1]; }"
    return asm(text, [Int32], [address, Int32(exists)], early=True)[0]


def load_int32(address: Int64, coherent: Boolean) -> Int32:
    """A word of global memory; ``coherent``: from L2, whatever L1 still holds of an earlier launch."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p ld.global.cg.b32 $0, [$1]; @!p ld.global.b32 $0, [$1]; }"
    return asm(text, [Int32], [address, Int32(coherent)], early=True)[0]


def fence_proxy_async() -> None:
    """Make shared memory that ordinary stores or cp.async wrote visible to the async proxy (WGMMA, bulk copies)."""
    asm("fence.proxy.async.shared::cta;")


def copies_wait() -> None:
    """Wait until this thread's ``cp.async`` are done, as this thread sees it."""
    asm("cp.async.wait_all;")


def pack_half2(kind: str, low: Float32, high: Float32) -> Int32:
    """Two float32 rounded to ``kind`` ("f16" or "bf16") in the halves of one word."""
    return asm(f"cvt.rn.{kind}x2.f32 $0, $1, $2;", [Int32], [high, low], pure=True)[0]


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


def e5m2_to_halves(word: Int32) -> tuple[Int32, ...]:
    """Four e5m2 as fp16, which has the same exponents: two in each of two words, in order."""
    text = "prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;"
    return asm(text, [Int32] * 2, [word], pure=True, early=True)


def e4m3_to_halves(word: Int32) -> tuple[Int32, ...]:
    """Four e4m3 as fp16, exactly: two in each of two words, in order."""
    text = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
    return asm(text, [Int32] * 2, [word], pure=True, early=True)


def float_word(value: Float32) -> Int32:
    """The bits of a float32."""
    return asm("mov.b32 $0, $1;", [Int32], [value], pure=True)[0]


def to_float(kind: str, bits: Int32, high: bool = False) -> Float32:
    """The value with these bits, or, of a 16-bit kind, the lower or higher half of them: exactly."""
    return asm("mov.b32 $0, $1;", [Float32], [bits], pure=True)[0] if kind == "f32" else half_to_float(kind, bits, high)


def half_to_float(kind: str, word: Int32, high: bool) -> Float32:
    """The low or high half of ``word``, exactly."""
    if kind == "bf16":
        text = "and.b32 $0, $1, 0xFFFF0000;" if high else "shl.b32 $0, $1, 16;"
        return asm(f"{{ .reg .b32 t; {text.replace('$0', 't')} mov.b32 $0, t; }}", [Float32], [word], pure=True)[0]
    half = "hi" if high else "lo"
    return asm(
        f"{{ .reg .b16 lo, hi; mov.b32 {{lo, hi}}, $1; cvt.f32.f16 $0, {half}; }}", [Float32], [word], pure=True
    )[0]


def broadcast_half(word: Int32, high: bool) -> Int32:
    """The low or high half of ``word`` in both halves."""
    return asm(f"prmt.b32 $0, $1, $1, {'0x3232' if high else '0x1010'};", [Int32], [word], pure=True)[0]


def repeat_half(word: Int32, high: bool) -> Int32:
    """The same as ``broadcast_half``, for the second factor of HMUL2 alone: ptxas makes it a modifier of that."""
    half = "{h, h}" if high else "{l, l}"
    text = f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; mov.b32 $0, {half}; }}"
    return asm(text, [Int32], [word], pure=True)[0]


def hidden_constant(word: int) -> Int32:
    """A word. prmt takes one constant, and ptxas copies another one into a register for each prmt; unless the word is
    computed from what only the lane knows, here the one bit of its mask less that bit: 0."""
    nothing = "mov.u32 m, %lanemask_eq; sub.u32 z, m, 1; and.b32 z, z, m; "
    return asm(f"{{ .reg .b32 m, z; {nothing}or.b32 $0, z, {word:#x}; }}", [Int32], [], pure=True)[0]


def load_matrix(address: Int32) -> tuple[Int32, ...]:
    """``ldmatrix``: four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8."""
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
    return asm(text, [Int32] * 4, [address])


def store_shared(address: Int32, word: Int32) -> None:
    asm("st.shared.b32 [$0], $1;", [], [address, word])


def store_shared_f32(address: Int32, value: Float32) -> None:
    asm("st.shared.f32 [$0], $1;", [], [address, value])


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
