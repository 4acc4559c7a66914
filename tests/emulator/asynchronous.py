"""mbarriers, asynchronous copies and WGMMAs of an emulated launch: :class:`AsynchronousMachine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from emulator.machine import RANK, SHARED_BYTES, Machine
from emulator.numbers import Array, operand_a, unpacked
from emulator.ptx import Address, Instruction, Program


class MBarrier:
    """An mbarrier."""

    def __init__(self, count: int):
        self.count, self.missing, self.bytes, self.phase = count, count, 0, 0
        self.copies: list[Callable[[], None]] = []

    def arrive(self, count: int = 1) -> None:
        self.missing -= count
        assert self.missing >= 0, "more threads arrive at an mbarrier than it counts"
        self.turn()

    def turn(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.missing, self.phase = self.count, self.phase ^ 1

    def complete(self) -> None:
        """Let the copies that signal it arrive."""
        copies, self.copies = self.copies, []
        for copy in copies:
            copy()
        self.turn()


class AsyncCopies(NamedTuple):
    """One ``cp.async`` of several threads."""

    threads: Array
    group: Array
    """Number of each thread's group."""
    target: Array
    source: Array
    size: Array


class BoxStore(NamedTuple):
    """A store of a box by TMA that has not read shared memory yet."""

    thread: int
    group: int
    """Number of the thread's group."""
    target: Array
    source: Array


class WgmmaReads(NamedTuple):
    """Bytes of a CTA's shared memory, and registers, that a WGMMA reads."""

    cta: int
    start: int
    end: int
    registers: tuple[str, ...]


class AsynchronousMachine(Machine):
    """Adds what goes on while its thread goes on."""

    def __init__(self, ptx: str | Program, grid: int, cluster: int = 1, **options: Any):
        super().__init__(ptx, grid, cluster, **options)
        self.mbarriers: dict[tuple[int, int], MBarrier] = {}
        """By CTA and address."""
        self.copies: list[AsyncCopies] = []
        self.copied = np.zeros(len(self.shared) // 16, np.bool_)
        """By 16 bytes of shared memory, True while cp.async writes there."""
        self.brought = np.zeros(len(self.shared) // 16, np.int64)
        """By 16 bytes of shared memory, the place of the mbarrier whose bulk copies write there, 0 if none do."""
        self.commits = np.zeros(len(self.pc), np.int64)
        """By thread, the groups of cp.async that it has committed."""
        self.stores: list[BoxStore] = []
        self.bulk_commits = np.zeros(len(self.pc), np.int64)
        """By thread, the groups of stores by TMA that it has committed."""
        self.loading: dict[int, list[Array]] | None = None
        """By warp, the words of shared memory that its loads may still read; None if no bulk copy can overtake them."""
        if any(i.opcode[:3] == ("cp", "async", "bulk") for i in self.program.code):
            self.loading = {}
        self.in_front: dict[int, int] = {}
        """By warp, how many of these loads are in front of its last arrival at an mbarrier."""
        self.answers = self.program.computed_from("mbarrier.arrive")
        """Registers that depend on what an mbarrier answers to an arrival."""
        self.reads: dict[int, list[list[WgmmaReads]]] = {}
        """By a warpgroup's first thread, what its WGMMAs in flight read, by group; the last group is not committed."""
        self.held: dict[int, set[str]] = {}
        """By a warpgroup's first thread, the registers that they read."""

    # --- loads from shared memory

    def load(self, space: str, address: Array, on: Array, size: int, count: int = 1) -> Array:
        if space == "shared" and self.loading is not None:
            _, at = self.located(space, address, on, size * count)
            words = at[:, None] // 4 + np.arange(-(-size * count // 4))
            for warp in np.unique(on // 32).tolist():
                self.loading.setdefault(warp, []).append(words[on // 32 == warp])
        return super().load(space, address, on, size, count)

    def store(self, space: str, address: Array, on: Array, values: Array) -> None:
        if space == "shared":
            _, at = self.located(space, address, on, values.itemsize * values.shape[1])
            ends = at[:, None] + np.array([0, values.itemsize * values.shape[1] - 1])
            assert not self.brought[ends // 16].any(), "a store writes where a bulk copy still writes"
        super().store(space, address, on, values)

    def meet(self, keys: Array, count: int, on: Array, blocks: bool) -> None:
        self._loaded(on)
        super().meet(keys, count, on, blocks)

    def _fence_proxy(self, i: Instruction, on: Array) -> None:
        self._loaded(on)

    def _loaded(self, on: Array) -> None:
        """What these warps load is in registers."""
        for warp in np.unique(on // 32).tolist() if self.loading else ():
            self.loading.pop(warp, None)
            self.in_front.pop(warp, None)

    def _refuse_to_overtake(self, i: Instruction, thread: int, at: Array) -> None:
        """Refuse a copy to these bytes of a CTA's shared memory that loads may still read. Those in front of a warp's
        last arrival are done for others, which wait for it, and for its own copies if they need the barrier's answer.
        """
        cta, warps = int(at[0]) // SHARED_BYTES, self.threads // 32
        written = np.zeros(SHARED_BYTES, np.bool_)
        written[at % SHARED_BYTES] = True
        behind = not self.answers.isdisjoint(i.names())
        for warp in range(cta * warps, (cta + 1) * warps):
            done = self.in_front.get(warp, 0) if behind or warp != thread // 32 else 0
            for words in self.loading.get(warp, ())[done:]:
                assert not written[words * 4 % SHARED_BYTES].any(), "a copy may overtake a load of what it writes over"

    # --- mbarriers

    def _mbarriers(self, operand: Address, on: Array) -> Iterator[tuple[MBarrier, Array]]:
        """The mbarriers that threads name, each with its threads."""
        cta, offset = self.owner(self.address(operand, on, "u32"), on)
        for key in np.unique(cta * SHARED_BYTES + offset):
            own = on[cta * SHARED_BYTES + offset == key]
            yield self.mbarriers[divmod(int(key), SHARED_BYTES)], own

    def _mbarrier_init(self, i: Instruction, on: Array) -> None:
        cta, offset = self.owner(self.address(i.operands[0], on, "u32"), on)
        counts = np.broadcast_to(self.get(i.operands[1], "u32", on), on.shape)
        for key in zip(cta.tolist(), offset.tolist(), counts.tolist(), strict=True):
            self.mbarriers[key[:2]] = MBarrier(key[2])

    def _mbarrier_arrive(self, i: Instruction, on: Array) -> bool:
        """Arrive. Who gives memory back lets those run who wait for it, before it goes on."""
        self.idle = 0
        expects = "expect_tx" in i.opcode
        at = next(j for j, o in enumerate(i.operands) if isinstance(o, Address))
        for barrier, own in self._mbarriers(i.operands[at], on):
            if expects:
                barrier.bytes += int(np.broadcast_to(self.get(i.operands[at + 1], "u32", own), own.shape).sum())
            barrier.arrive(len(own))
        for warp in np.unique(on // 32).tolist() if self.loading else ():
            self.in_front[warp] = len(self.loading.get(warp, ()))
        if at:  # the answer is any number
            self.put(i.operands[0], np.uint64(0x5A5A5A5A5A5A5A5A), on)
        return not expects and self.let_others_run(on)

    def _mbarrier_wait(self, i: Instruction, on: Array) -> Any:
        to, at, parity, *_ = i.operands
        failed = False
        for barrier, own in self._mbarriers(at, on):
            barrier.complete()
            done = barrier.phase != np.broadcast_to(self.get(parity, "u32", own), own.shape)
            self.put(to, done, own)
            failed |= not done.all()
        if failed:
            return self.fail(on)
        self.idle = 0
        return None

    # --- asynchronous copies

    def _copy_async(self, i: Instruction, on: Array) -> None:
        """cp.async: the target is destroyed now, and written when it is waited for."""
        target = self.address(i.operands[0], on, "u32")
        source, size = self.address(i.operands[1], on), np.full(on.shape, 16)
        if len(i.operands) > 3:
            size = np.broadcast_to(self.get(i.operands[3], "s32", on), on.shape)
        assert i.operands[2] == "16" and ((size == 16) | (size == 0) | (size % 2 == 0)).all(), i.text
        cta, offset = self.owner(target, on)
        at = cta * SHARED_BYTES + offset
        assert not self.copied[at // 16].any(), "cp.async writes where an earlier one still writes"
        self.copied[at // 16] = True
        self._destroy(cta, offset, offset[:, None] + np.arange(16))
        self.copies.append(AsyncCopies(on, self.commits[on], target, source, size))

    def _commit(self, i: Instruction, on: Array) -> None:
        self.commits[on] += 1

    def _wait_copies(self, i: Instruction, on: Array) -> None:
        """Write what the copies bring, of each thread's groups but the newest ones."""
        if "wait_group" in i.opcode:
            self._finish(on, self.commits[on] - int(i.operands[0]))
        else:
            self._finish(on, self.commits[on] + 1)

    def _finish(self, on: Array, before: Array) -> None:
        end = np.zeros(len(self.pc), np.int64)
        end[on] = before
        left = []
        for copy in self.copies:
            due = copy.group < end[copy.threads]
            for threads, _, target, source, size in (copy,) if due.any() else ():
                for bytes in np.unique(size[due]):
                    chosen = due & (size == bytes)
                    words = np.zeros((int(chosen.sum()), 16), np.uint8)
                    if bytes:
                        unit = next(u for u in (16, 8, 4, 2, 1) if bytes % u == 0)
                        parts = [
                            self.load("global", source[chosen] + j, threads[chosen], 1, unit)
                            for j in range(0, bytes, unit)
                        ]
                        words[:, :bytes] = np.concatenate(parts, 1)
                    self.store("shared", target[chosen], threads[chosen], words)
                    self.copied[self.located("shared", target[chosen], threads[chosen], 16)[1] // 16] = False
            if not due.all():
                left.append(AsyncCopies(*(field[~due] for field in copy)))
        self.copies = left

    def _arrive_after_copies(self, i: Instruction, on: Array) -> None:
        self._finish(on, self.commits[on] + 1)
        for barrier, own in self._mbarriers(i.operands[0], on):
            barrier.arrive(len(own))

    def _bulk_copy(self, i: Instruction, on: Array) -> None:
        """Copy contiguous bytes, for each thread that executes it."""
        target, source, size = i.operands[:3]
        for t in on:
            one = np.array([t])
            bytes = int(np.broadcast_to(self.get(size, "u32", one), 1)[0])
            to, start = self.address(target, one, "u32"), self.address(source, one)
            assert bytes % 16 == 0 and start % 16 == 0 and to % 16 == 0, i.text
            _, begin = self.located("global", start, one, 16)
            assert self.mapped[begin[0] : begin[0] + bytes].all(), f"outside every tensor: {start[0]:#x}, {bytes} bytes"
            self._bring(i, one, to + np.arange(bytes), self.memory[begin[0] : begin[0] + bytes])

    def _box_copy(self, i: Instruction, on: Array) -> None:
        """Copy a box of a matrix by TMA, from global to shared memory, with zeros past the matrix."""
        target, source = i.operands[:2]
        for t in on:
            one = np.array([t])
            bytes, exists = self._box(source, one)
            values = np.where(exists, self.memory[np.where(exists, bytes, 0)], np.uint8(0))
            to = self.address(target, one, "u32") + np.arange(values.size)
            box = self.maps[int(self.address(source, one)[0])]
            self._bring(i, one, _swizzled(to) if box.swizzled else to, values.reshape(-1))

    def _box(self, source: Address, one: Array) -> tuple[Array, Array]:
        """The bytes in global memory of a box, by row, and whether the matrix has them."""
        box = self.maps[int(self.address(source, one)[0])]
        column, row = (int(np.broadcast_to(self.get(c, "s32", one), 1)[0]) for c in source.coordinates)
        (height, width), size = box.tensor.shape, box.tensor.itemsize
        rows, columns = np.ogrid[row : row + box.rows, column * size : (column + box.columns) * size]
        start = next(start for start, tensor in self.tensors if tensor.data_ptr() == box.tensor.data_ptr())
        exists = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width * size)
        return start + rows * width * size + columns, exists

    def _box_store(self, i: Instruction, on: Array) -> None:
        """Store a box by TMA: it is read when it is waited for, so as late as possible."""
        target, source = i.operands[:2]
        for t in on:
            one = np.array([t])
            bytes, exists = self._box(target, one)
            cta, offset = self.owner(self.address(source, one, "u32"), one)
            at = cta * SHARED_BYTES + _swizzled(offset + np.arange(bytes.size)).reshape(bytes.shape)
            self.stores.append(BoxStore(int(t), int(self.bulk_commits[t]), bytes[exists], at[exists]))

    def _bulk_commit(self, i: Instruction, on: Array) -> None:
        self.bulk_commits[on] += 1

    def _bulk_wait(self, i: Instruction, on: Array) -> None:
        left = []
        for store in self.stores:
            if store.thread in on and store.group < self.bulk_commits[store.thread] - int(i.operands[0]):
                self.memory[store.target] = self.shared[store.source]
            else:
                left.append(store)
        self.stores = left

    def _bring(self, i: Instruction, one: Array, to: Array, values: Array) -> None:
        """Destroy the target, and write it when its mbarrier is waited for. A multicast does so at the same places in
        each CTA of its mask."""
        at = next(j for j, o in enumerate(i.operands) if j > 1 and isinstance(o, Address))
        barrier = self.address(i.operands[at], one, "u32")
        if "multicast::cluster" not in i.opcode:
            return self._bring_to(i, barrier, one, to, values.copy())
        mask = int(np.broadcast_to(self.get(i.operands[at + 1], "u16", one), 1)[0])
        assert 0 < mask < 1 << self.cluster, i.text
        for rank in range(self.cluster):
            if mask >> rank & 1:
                of_cta, inside = 1 + rank << RANK, (1 << RANK) - 1
                self._bring_to(i, barrier & inside | of_cta, one, to & inside | of_cta, values.copy())

    def _bring_to(self, i: Instruction, barrier: Array, one: Array, to: Array, values: Array) -> None:
        (cta,), (offset,) = self.owner(barrier, one)
        mbarrier, place = self.mbarriers[int(cta), int(offset)], int(cta) * SHARED_BYTES + int(offset)
        cta, offset = self.owner(to, np.broadcast_to(one, to.shape))
        at = cta * SHARED_BYTES + offset
        self._refuse_to_overtake(i, int(one[0]), at)
        assert np.isin(self.brought[at // 16], (0, place)).all(), "a copy writes where one before it still writes"
        self.brought[at // 16] = place
        self._destroy(cta[:1], np.array([offset.min()]), offset[None])

        def arrive() -> None:
            self.shared[at], self.written[at], self.brought[at // 16] = values, True, 0
            mbarrier.bytes -= len(values)

        mbarrier.copies.append(arrive)

    def _destroy(self, cta: Array, start: Array, offsets: Array) -> None:
        """Destroy what a copy will write, (copies, bytes), each copy from ``start`` on in a CTA. No WGMMA in flight may
        read it."""
        bytes = cta[:, None] * SHARED_BYTES + offsets
        self.shared[bytes], self.written[bytes] = 0xFF, False
        for read in (read for groups in self.reads.values() for group in groups for read in group):
            meets = (cta == read.cta) & (start < read.end) & (start + offsets.shape[1] > read.start)
            assert not meets.any(), "a copy writes what WGMMAs may still read"

    def _store_async(self, i: Instruction, on: Array) -> None:
        """st.async of 16 bytes, to any CTA of the cluster."""
        target, source, at = i.operands
        for barrier, own in self._mbarriers(at, on):
            to = self.address(target, own, "u32")
            cta, offset = self.owner(to, own)
            self._destroy(cta, offset, offset[:, None] + np.arange(16))
            values = np.stack([np.broadcast_to(self.get(name, "f32", own), own.shape) for name in source], -1)

            def arrive(barrier=barrier, to=to, own=own, values=values) -> None:
                self.store("shared", to, own, values)
                barrier.bytes -= values.nbytes

            barrier.copies.append(arrive)

    # --- wgmma

    def _wgmma(self, i: Instruction, on: Array) -> None:
        """wgmma m64nN of each warpgroup: 32 bytes along k, A in registers or shared memory, B in shared memory."""
        shape, _, *kinds = i.opcode[-4:]
        d, a, descriptor, keep = i.operands[:4]
        n, size = int(shape[4:].split("k")[0]), 1 if kinds[1] in ("e4m3", "e5m2") else 2
        registers = a if isinstance(a, tuple) else ()
        if registers:
            left = operand_a([unpacked(kinds[0], self.get(r, "u32", on)) for r in registers])  # by warp
        for group in range(len(on) // 128):
            own = on[128 * group : 128 * group + 128]
            cta = int(self.cta[own[0]])
            matrix, at = self._operand(descriptor, own, n)
            reads = [WgmmaReads(cta, int(at.min()), int(at.max()) + 1, registers)]
            right = unpacked(kinds[1], matrix).reshape(n, 32 // size)
            if registers:
                rows = left[4 * group : 4 * group + 4]
            else:
                matrix, at = self._operand(a, own, 64)
                reads.append(WgmmaReads(cta, int(at.min()), int(at.max()) + 1, ()))
                rows = unpacked(kinds[0], matrix).reshape(4, 16, 32 // size)
            self.reads.setdefault(int(own[0]), [[]])[-1] += reads
            self.held.setdefault(int(own[0]), set()).update(registers)
            product = np.matmul(rows, right.T).reshape(4, 2, 8, n // 8, 4, 2)
            kept = self.get(keep, "pred", own) if not keep.isdigit() else np.bool_(int(keep))
            for j, name in enumerate(d):
                block, half, column = j // 4, j % 4 // 2, j % 2
                old = np.where(kept, self.get(name, "f32", own), np.float32(0))
                self.put(name, old + product[:, half, :, block, :, column].reshape(-1), own)

    def _operand(self, descriptor: str, own: Array, rows: int) -> tuple[Array, Array]:
        """The words of ``rows`` rows of 32 bytes that a descriptor of a warpgroup means, and the addresses of their
        bytes in its CTA: with the swizzle of 128 bytes, or of core matrices."""
        word = int(np.broadcast_to(self.get(descriptor, "u64", own), own.shape)[0])
        start, leading, stride = ((word >> first & 0x3FFF) << 4 for first in (0, 16, 32))
        row, byte = np.arange(rows)[:, None], np.arange(32)
        if word >> 62 == 1:
            at = _swizzled(start + row // 8 * stride + row % 8 * 128 + byte)
        else:
            assert word >> 62 == 0, "wanted the swizzle of 128 bytes, or none"
            at = start + row // 8 * stride + byte // 16 * leading + row % 8 * 16 + byte % 16
        raw = self.shared[int(self.cta[own[0]]) * SHARED_BYTES + at]
        return np.ascontiguousarray(raw).view(np.uint32), at

    def _wgmma_commit(self, i: Instruction, on: Array) -> None:
        for first in np.unique(on // 128) * 128:
            self.reads.setdefault(int(first), [[]]).append([])

    def _wgmma_wait(self, i: Instruction, on: Array) -> None:
        for first in np.unique(on // 128) * 128:
            groups = self.reads.setdefault(int(first), [[]])
            self.reads[int(first)] = left = groups[max(0, len(groups) - 1 - int(i.operands[0])) :]
            self.held[int(first)] = {register for group in left for read in group for register in read.registers}

    def put(self, operand: str, values: Any, on: Array) -> None:
        for first, held in self.held.items():
            if operand in held:
                other = (on < first) | (on >= first + 128)
                assert other.all(), f"{operand} is written while WGMMAs may still read it"
        super().put(operand, values, on)


def _swizzled(address: Array) -> Array:
    return address ^ (address >> 7 & 7) << 4
