"""Loads, stores, copies and fences: single PTX instructions that the DSL does not offer, or not in the form needed.

Addresses of shared memory are Int32, of global memory Int64. ``exists`` is the predicate of an instruction: if it is
false, a load gives the stated value without an access, and a store or prefetch does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Boolean, Float32, Int16, Int32, Int64
from cutlass._mlir.dialects import nvvm

from w4gemm.ptx.asm import HIDDEN_ZERO, asm

# --- shared memory


def shared_address(pointer: Any) -> Int32:
    return Int32(pointer.toint())


def wait_barrier(pointer: Any, phase: Int32) -> None:
    """Wait for a phase of an mbarrier, as ``cute.arch.mbarrier_wait`` but without a hint of the time to suspend."""
    again = "TRY: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @!done bra TRY;"
    asm(f"{{ .reg .pred done; {again} }}", [], [shared_address(pointer), phase])


def arrive_and_expect(barrier: Int32, size: int) -> Int32:
    """One lane of a warp arrives at an mbarrier, which then expects ``size`` bytes more.

    Returns 0, computed from the barrier's answer so that the compiler does not know it. The arrival queues up behind
    the warp's loads from shared memory, and bulk copies do not: with 0 added to an address or a coordinate they come
    after them.
    """
    arrival = "elect.sync m|one, 0xFFFFFFFF; mov.b64 s, 0; @one mbarrier.arrive.expect_tx.shared::cta.b64 s, [$1], $2; "
    answer = "cvt.u32.u64 m, s; and.b32 $0, m, z; "
    text = f"{{ .reg .pred one; .reg .b64 s; .reg .b32 m, z; {HIDDEN_ZERO}{arrival}{answer}}}"
    return asm(text, [Int32], [barrier, Int32(size)])[0]


def load_shared(address: Int32, words: int, constant: bool = False) -> tuple[Int32, ...]:
    """Load 1, 2 or 4 consecutive 32-bit words. constant: True if nothing writes there while the address is known."""
    if words == 1:
        return asm("ld.shared.b32 $0, [$1];", [Int32], [address], pure=constant)
    registers = ", ".join(f"${i}" for i in range(words))
    return asm(f"ld.shared.v{words}.b32 {{{registers}}}, [${words}];", [Int32] * words, [address], pure=constant)


def load_shared_half(address: Int32) -> Int32:
    """Load 16 bits; the upper half is zero."""
    return asm("{ .reg .b16 h; ld.shared.b16 h, [$1]; cvt.u32.u16 $0, h; }", [Int32], [address])[0]


def load_shared_byte(address: Int32) -> Int32:
    """Load a byte; the upper bits are zero."""
    return asm("ld.shared.u8 $0, [$1];", [Int32], [address])[0]


def load_shared_f32x4(address: Int32) -> tuple[Float32, ...]:
    """Load four consecutive float32."""
    return asm("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", [Float32] * 4, [address])


def store_shared(address: Int32, word: Int32) -> None:
    asm("st.shared.b32 [$0], $1;", [], [address, word])


def store_shared_x4(address: Int32, words: Sequence[Int32]) -> None:
    asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", [], [address, *words])


def store_shared_f32(address: Int32, value: Float32) -> None:
    asm("st.shared.f32 [$0], $1;", [], [address, value])


def store_shared_f32x2(address: Int32, values: Sequence[Float32]) -> None:
    asm("st.shared.v2.f32 [$0], {$1, $2};", [], [address, *values])


def store_shared_f32x4(address: Int32, values: Sequence[Float32]) -> None:
    asm("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", [], [address, *values])


def load_matrix(address: Int32) -> tuple[Int32, ...]:
    """``ldmatrix``: four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8."""
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
    return asm(text, [Int32] * 4, [address])


def store_matrix(address: Int32, registers: Sequence[Int32]) -> None:
    """``stmatrix`` of four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8."""
    asm("stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", [], [address, *registers])


def store_matrix_transposed(address: Int32, registers: Sequence[Int32]) -> None:
    """``stmatrix`` of two or four transposed 8x8 matrices of 16-bit elements."""
    count = len(registers)
    operands = ", ".join(f"${i + 1}" for i in range(count))
    asm(f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [$0], {{{operands}}};", [], [address, *registers])


# --- shared memory of the CTAs of a cluster


def cluster_address(address: Int32, rank: Int32) -> Int32:
    """The address in CTA ``rank`` of the cluster of what lies at ``address`` in this CTA."""
    return asm("mapa.shared::cluster.u32 $0, $1, $2;", [Int32], [address, rank], pure=True)[0]


def store_async_f32x4(address: Int32, values: Sequence[Float32], barrier: Int32) -> None:
    """Store four consecutive float32 in a CTA of the cluster, completing 16 bytes on an mbarrier of that CTA."""
    text = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$1, $2, $3, $4}, [$5];"
    asm(text, [], [address, *values, barrier])


def load_shared_cluster(address: Int32) -> tuple[Float32, ...]:
    """Load four consecutive float32 from an address of any CTA of the cluster: by a generic load, which takes longer
    than one of the own memory."""
    return asm("ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [$4];", [Float32] * 4, [address])


def load_shared_cluster_f32(address: Int32) -> Float32:
    """Load one float32 from an address of any CTA of the cluster."""
    return asm("ld.shared::cluster.f32 $0, [$1];", [Float32], [address])[0]


def load_shared_cluster_i32(address: Int32) -> Int32:
    """Load one int32 from an address of any CTA of the cluster."""
    return asm("ld.shared::cluster.b32 $0, [$1];", [Int32], [address])[0]


# --- global memory


def load_global(address: Int64, count: int, exists: Boolean, cache: str = "") -> list[Int32]:
    """Load 1, 2 or 4 consecutive 32-bit words; 0, without an access, if they do not exist."""
    vector = "" if count == 1 else f".v{count}"
    registers = [f"${i}" for i in range(count)]
    zeros = " ".join(f"mov.b32 {r}, 0;" for r in registers)
    target = registers[0] if count == 1 else f"{{{', '.join(registers)}}}"
    text = f"setp.ne.b32 p, ${count + 1}, 0; {zeros} @p ld.global{cache}{vector}.b32 {target}, [${count}];"
    return list(asm(f"{{ .reg .pred p; {text} }}", [Int32] * count, [address, Int32(exists)], early=True))


def load_l2(address: Int64, count: int, exists: Boolean) -> list[Int32]:
    """The same from L2, because another CTA or an earlier launch may have written there."""
    return load_global(address, count, exists, ".cg")


def load_global_half(address: Int64, exists: Boolean) -> Int32:
    """Load 16 bits into the lower half of a word; 0, without an access, if they do not exist."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.u16 $0, [$1]; }"
    return asm(text, [Int32], [address, Int32(exists)], early=True)[0]


def load_global_int32x4(address: Int64) -> tuple[Int32, ...]:
    """Load four consecutive words that nothing writes while the kernel runs."""
    return asm("ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", [Int32] * 4, [address])


def load_global_f32x4(address: Int64) -> tuple[Float32, ...]:
    """Load four consecutive float32 from L2, which another CTA may have written."""
    return asm("ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];", [Float32] * 4, [address])


def load_int32(address: Int64, coherent: Boolean) -> Int32:
    """Load a word; if ``coherent``, from L2, because L1 may still hold the word of an earlier launch."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p ld.global.cg.b32 $0, [$1]; @!p ld.global.b32 $0, [$1]; }"
    return asm(text, [Int32], [address, Int32(coherent)], early=True)[0]


def load_row_index(address: Int64, exists: Boolean) -> Int32:
    """Load a word; -1, without an access, if it does not exist."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, -1; @p ld.global.b32 $0, [$1]; }"
    return asm(text, [Int32], [address, Int32(exists)], early=True)[0]


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


def store_global_f32x4(address: Int64, values: Sequence[Float32]) -> None:
    asm("st.global.cg.v4.f32 [$0], {$1, $2, $3, $4};", [], [address, *values])


def load_acquire(address: Int64) -> Int32:
    """Load a word; writes before the ``store_release`` that stored it are then visible."""
    return asm("ld.acquire.gpu.global.b32 $0, [$1];", [Int32], [address])[0]


def store_release(address: Int64, value: Int32) -> None:
    """Store a word after all writes of this thread, and of the threads that it met at a barrier."""
    asm("st.release.gpu.global.b32 [$0], $1;", [], [address, value])


def store_relaxed(address: Int64, value: Int32) -> None:
    """Store a word that other CTAs read, in no order with other words."""
    asm("st.relaxed.gpu.global.b32 [$0], $1;", [], [address, value])


def compare_and_store(address: Int64, expected: Int32, value: Int32) -> Int32:
    """Store a word if it is ``expected``, in no order with other words, and return what it was."""
    text = "atom.relaxed.gpu.global.cas.b32 $0, [$1], $2, $3;"
    return asm(text, [Int32], [address, expected, value])[0]


def exchange(address: Int64, words: Sequence[Int32], exists: Boolean) -> list[Int32]:
    """Store two consecutive words as one, in no order with others, and return what was there; zeros, without an access,
    if they do not exist."""
    text = "setp.ne.b32 p, $5, 0; mov.b64 own, {$3, $4}; mov.b64 other, 0; @p atom.relaxed.gpu.global.exch.b64 other, "
    text = f"{{ .reg .pred p; .reg .b64 own, other; {text}[$2], own; mov.b64 {{$0, $1}}, other; }}"
    return list(asm(text, [Int32] * 2, [address, *words, Int32(exists)], early=True))


def fence_acquire() -> None:
    """Order later reads of this thread behind writes that it knows of by other means: L1 forgets older words."""
    asm("fence.acq_rel.gpu;")


def fence_release_shared() -> None:
    """Release this thread's accesses to its CTA's shared memory to the threads of its cluster, in front of a relaxed
    arrive: one that releases waits 0.4 us for global memory too."""
    asm("fence.release.sync_restrict::shared::cta.cluster;")


def barrier_of_roles(barrier: Int32, threads: int) -> None:
    """Wait at a named barrier whose ``threads`` come from several places of the code. ``bar.sync`` promises that all
    that wait execute the same instruction; this is ``barrier.sync``, which does not."""
    nvvm.barrier_cta_sync(barrier.ir_value(), thread_count=Int32(threads).ir_value(), aligned=False)


def prefetch_global(address: Int64, exists: Boolean) -> None:
    """Bring the 128 bytes around an address into L2."""
    text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p prefetch.global.L2 [$0]; }"
    asm(text, [], [address, Int32(exists)])


# --- copies from global to shared memory


def copy_async(destination: Int32, source: Int64, size: Int32) -> None:
    """``cp.async`` of 16 bytes from global to shared memory: ``size`` bytes are read, the others are zeros."""
    asm("cp.async.cg.shared.global [$0], [$1], 16, $2;", [], [destination, source, size])


def copy_async_if(destination: Int32, source: Int64, exists: Boolean) -> None:
    """``cp.async`` of 16 bytes from global to shared memory, of zeros if they do not exist; see ``copies_wait``."""
    text = "{ .reg .b32 n; selp.b32 n, 16, 0, p; cp.async.cg.shared.global [$0], [$1], 16, n; }"
    asm(f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; {text} }}", [], [destination, source, Int32(exists)])


def copies_wait() -> None:
    """Wait until this thread's ``cp.async`` are done, as this thread sees it."""
    asm("cp.async.wait_all;")


def bulk_copy(destination: Int32, source: Int64, size: Int32, barrier: Int32) -> None:
    """Copy ``size`` bytes from global to shared memory, completing on an mbarrier; issued by one thread."""
    asm(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        [],
        [destination, source, size, barrier],
    )


def bulk_copy_multicast(destination: Int32, source: Int64, size: Int32, barrier: Int32, mask: Int16) -> None:
    """``bulk_copy`` to the same address in every CTA of the cluster whose bit is set, each with its own barrier."""
    asm(
        "{ .reg .b16 m; cvt.u16.u32 m, $4; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [$0], [$1], $2, [$3], m; }",
        [],
        [destination, source, size, barrier, Int32(mask)],
    )


def bulk_prefetch(source: Int64, size: Int32) -> None:
    """Bring ``size`` bytes of global memory into L2; issued by one thread."""
    asm("cp.async.bulk.prefetch.L2.global [$0], $1;", [], [source, size])


def fence_proxy_async() -> None:
    """Make shared memory that ordinary stores or cp.async wrote visible to the async proxy (WGMMA, bulk copies)."""
    asm("fence.proxy.async.shared::cta;")
