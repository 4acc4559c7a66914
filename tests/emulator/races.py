"""An emulated launch that looks for data races: :class:`RaceChecker`, :class:`SharedRaceChecker`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from emulator.asynchronous import MBarrier
from emulator.kernel import Emulator
from emulator.machine import SHARED_BYTES
from emulator.numbers import Array
from emulator.ptx import Address, Instruction, Program

_STRONG = {"acquire", "release", "acq_rel", "relaxed"}
"""Qualifiers of loads, stores and atomic operations that may meet others without being ordered."""


class Accesses(NamedTuple):
    """The last accesses of each warp to each 4-byte word of a space. A clock is the warp's, see :class:`RaceChecker`,
    and 0 without an access."""

    writer: Array
    """(words, warps): the thread that wrote what the word holds."""
    written: Array
    """(words, warps): the clock of that."""
    reader: Array
    """(words, warps): the thread that read it last, -1 for several at once."""
    read: Array
    """(words, warps): the clock of that."""
    stale: Array
    """(words,): True if no thread may read it before one writes it."""


class Phase(NamedTuple):
    """What an mbarrier passes on."""

    parity: int
    arrived: Array
    """The rows of all warps that have arrived."""
    complete: Array
    """Those of the phases that are complete."""


class RaceChecker(Emulator):
    """Refuses an access that another thread's access to the same word is not ordered before, unless both read.

    A warp's clock goes on where its lanes meet, and at a barrier. ``known[w, v]`` is the clock of warp v before which
    all accesses of v's threads are ordered before those that w makes now. Barriers pass it on between the warps that
    meet. A store with release publishes its warp's row at its address. A load with acquire fetches the row of the store
    that it reads, and it counts from the next meeting of the warp's lanes on. An atomic operation does both, and adds
    to what is published there. An mbarrier passes on, when its phase is complete, the rows of those that have arrived.
    Lanes that arrive or wait all together meet there. Accesses that are relaxed, acquire or release may race; all
    others are weak. Two CTAs may write the same to a word of global memory, and who reads it must be behind one of
    them. What a bulk copy writes over must be behind its thread. No WGMMAs, clusters and stores below four bytes.

    Args:
        scratch: tensors of which a launch may read only what it wrote itself.
    """

    def __init__(self, ptx: str | Program, grid: int, scratch: Sequence[torch.Tensor] = (), **options: Any):
        super().__init__(ptx, grid, **options)
        self.warps = len(self.pc) // 32
        self.known = np.ones((self.warps, self.warps), int)
        self.fetched = np.zeros_like(self.known)
        """By warp, what its lanes have acquired and not shared yet."""
        self.published: dict[int, Array] = {}
        """By address, the row of the store with release that lies there."""
        self.meeting: dict[int, list[int]] = {}
        """By barrier, the warps that wait there."""
        self.phases: dict[MBarrier, Phase] = {}
        self.strong = False
        self.scratch = scratch

    def _place(self, arguments: Sequence[Any]) -> None:
        super()._place(arguments)
        words = {"global": len(self.memory) // 4 + 1, "shared": len(self.shared) // 4}
        self.accesses = {
            space: Accesses(*(np.zeros((n, self.warps), np.int32) for _ in range(4)), np.zeros(n, np.bool_))
            for space, n in words.items()
        }
        for start, tensor in self.tensors:
            if any(tensor is other for other in self.scratch):
                self.accesses["global"].stale[start // 4 : (start + tensor.nbytes) // 4] = True

    def _step_of(self, i: Instruction, name: str) -> Callable[[Array], Any]:
        step = super()._step_of(i, name)
        if name.startswith("bar.warp"):
            return self._lanes_meet
        if name.startswith("cp.async.cg"):
            return functools.partial(self._issue, i, step)
        if name.startswith(("mbarrier.arrive", "cp.async.mbarrier.arrive")):
            return functools.partial(self._arrive, i, step)
        if name.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
            return functools.partial(self._pass, i, step)
        return functools.partial(self._strong, i, step) if _STRONG & set(i.opcode) else step

    # --- order

    def _lanes_meet(self, on: Array) -> None:
        for warp in np.unique(on // 32):
            self._go_on(warp)

    def _go_on(self, warp: int) -> None:
        self.known[warp] = np.maximum(self.known[warp], self.fetched[warp])
        self.known[warp, warp] += 1

    def meet(self, keys: Array, count: int, on: Array, blocks: bool) -> None:
        assert blocks, "threads that arrive at a barrier and do not wait are not known here"
        for key in np.unique(keys):
            here = np.unique(on[keys == key] // 32).tolist()
            self.meeting.setdefault(key, []).extend(here)
            for warp in here:
                self._go_on(warp)
        super().meet(keys, count, on, blocks)
        for key in np.unique(keys):
            if self.arrived[key] == 0:
                together = self.meeting.pop(key)
                self.known[together] = self.known[together].max(0)

    def _phase(self, barrier: MBarrier) -> Phase:
        """An mbarrier's phase, brought up to date."""
        none = np.zeros(self.warps, int)
        phase = self.phases.get(barrier, Phase(0, none, none))
        if phase.parity != barrier.phase:
            phase = Phase(barrier.phase, phase.arrived, phase.arrived)
        self.phases[barrier] = phase
        return phase

    def _arrive(self, i: Instruction, step: Callable[[Array], Any], on: Array) -> Any:
        operand = next(o for o in i.operands if isinstance(o, Address))
        for barrier, own in self._mbarriers(operand, on):
            phase = self._phase(barrier)
            for warp, lanes in zip(*np.unique(own // 32, return_counts=True), strict=True):
                if lanes == 32:
                    self._go_on(warp)
                phase = phase._replace(arrived=np.maximum(phase.arrived, self.known[warp]))
            self.phases[barrier] = phase
        return step(on)

    def _pass(self, i: Instruction, step: Callable[[Array], Any], on: Array) -> Any:
        """Wait, and fetch what an mbarrier passes on to threads whose phase is complete."""
        turn_ends, (passes, operand, *_) = step(on), i.operands
        for barrier, own in self._mbarriers(operand, on):
            phase, through = self._phase(barrier), own[self.get(passes, "pred", own)]
            for warp, lanes in zip(*np.unique(through // 32, return_counts=True), strict=True):
                self.fetched[warp] = np.maximum(self.fetched[warp], phase.complete)
                if lanes == 32:
                    self._go_on(warp)
        return turn_ends

    def _strong(self, i: Instruction, step: Callable[[Array], Any], on: Array) -> Any:
        both = "acq_rel" in i.opcode
        acquires = both or "acquire" in i.opcode
        addresses = self.address(i.operands[0 if i.opcode[0] == "st" else 1], on)
        for thread, address in zip(on.tolist(), addresses.tolist(), strict=True):
            if acquires and address in self.published:
                self.fetched[thread // 32] = np.maximum(self.fetched[thread // 32], self.published[address])
            if both:
                known = self.known[thread // 32]
                self.published[address] = np.maximum(known, self.published.get(address, known))
            elif i.opcode[0] == "st":
                self.published.pop(address, None)
                if "release" in i.opcode:
                    self.published[address] = self.known[thread // 32].copy()
        self.strong = True
        try:
            return step(on)
        finally:
            self.strong = False

    # --- accesses

    def _issue(self, i: Instruction, step: Callable[[Array], Any], on: Array) -> Any:
        """cp.async writes from here on."""
        cta, offset = self.owner(self.address(i.operands[0], on, "u32"), on)
        words = (cta * SHARED_BYTES + offset)[:, None] // 4 + np.arange(4)
        self._check("shared", words, on, True)
        self._note_writes(self.accesses["shared"], words.reshape(-1), on.repeat(4))
        return step(on)

    def _bring(self, i: Instruction, one: Array, to: Array, values: Array) -> None:
        cta, offset = self.owner(to, np.broadcast_to(one, to.shape))
        words = np.unique((cta * SHARED_BYTES + offset) // 4)
        self._check("shared", words[None], one, True)
        self.accesses["shared"].written[words] = 0
        super()._bring(i, one, to, values)

    def load(self, space: str, address: Array, on: Array, size: int, count: int = 1) -> Array:
        if space != "param":
            self._check(space, self._words(space, address, on, size * count), on, False)
        return super().load(space, address, on, size, count)

    def store(self, space: str, address: Array, on: Array, values: Array) -> None:
        parts = np.ascontiguousarray(values).view(np.uint8)
        words = self._words(space, address, on, parts.shape[1])
        memory, at = self.located(space, address, on, parts.shape[1])
        bytes = at[:, None] + np.arange(parts.shape[1])
        changed = (memory[bytes] != parts).any(1) if space == "global" else np.ones(len(on), np.bool_)
        self._check(space, words[changed], on[changed], True)
        self._note_writes(self.accesses[space], words.reshape(-1), on.repeat(words.shape[1]))
        super().store(space, address, on, values)
        assert self.strong or (memory[bytes] == parts).all(), "a race: threads write different numbers to one word"

    def _words(self, space: str, address: Array, on: Array, size: int) -> Array:
        """(threads, n): indices of the words that accesses of ``size`` bytes reach."""
        _, at = self.located(space, address, on, size)
        return at[:, None] // 4 + np.arange(-(-size // 4))

    def _check(self, space: str, words: Array, on: Array, writes: bool) -> None:
        """Refuse accesses (threads, words) that race with earlier ones, and note the reads."""
        past, threads, words = self.accesses[space], on.repeat(words.shape[1]), words.reshape(-1)
        warps = threads // 32
        known, mine = self.known[warps], np.arange(self.warps) == warps[:, None]
        written, read = past.written[words], past.read[words]
        before = (written < known) | (mine & (past.writer[words] == threads[:, None]))
        if writes:
            ordered = (before & ((read < known) | (mine & (past.reader[words] == threads[:, None])))).all(1)
        else:
            assert self.strong or not past.stale[words].any(), "this launch has not written what it reads"
            ordered = (before & (written > 0)).any(1) | (written == 0).all(1)
        if not self.strong and not ordered.all():
            at = int(np.argmin(ordered))
            by = [np.flatnonzero(clocks[at]).tolist() for clocks in (written, read)]
            raise AssertionError(
                f"a race: thread {threads[at]} {'writes' if writes else 'reads'} word {words[at]}, which warps {by[0]} "
                f"wrote and warps {by[1]} read, and nothing orders them"
            )
        if writes:
            past.written[words] = 0
        else:
            clock = self.known[warps, warps]
            others = (past.read[words, warps] == clock) & (past.reader[words, warps] != threads)
            past.reader[words, warps], past.read[words, warps] = np.where(others, -1, threads), clock

    def _note_writes(self, past: Accesses, words: Array, threads: Array) -> None:
        warps = threads // 32
        past.writer[words, warps], past.written[words, warps] = threads, self.known[warps, warps]
        past.stale[words] = False


class SharedRaceChecker(RaceChecker):
    """Looks at shared memory alone. What bulk copies bring and matrix instructions read is checked as the launch runs,
    see kernel.py."""

    def load(self, space: str, address: Array, on: Array, size: int, count: int = 1) -> Array:
        checker = RaceChecker if space == "shared" else Emulator
        return checker.load(self, space, address, on, size, count)

    def store(self, space: str, address: Array, on: Array, values: Array) -> None:
        checker = RaceChecker if space == "shared" else Emulator
        checker.store(self, space, address, on, values)

    def _strong(self, i: Instruction, step: Callable[[Array], Any], on: Array) -> Any:
        return step(on)
