"""An emulator of NVIDIA GPUs: runs the PTX of compiled kernels on the CPU, so that tests of results need no GPU.

    Emulator(ptx_of(unit), grid).run(x, weight, out)

x, weight and out are tensors on the CPU, and out holds afterwards what the kernel stored.

All threads of all CTAs are resident at once, unless fewer CTAs are asked for. Every register is an array over threads.
Threads at the same instruction execute it together, those furthest behind first, so that warps converge.

What another order on a GPU may show, an emulated one shall show too. So each 128 threads run ahead of all others until
they wait. An asynchronous copy destroys its target when it is issued and writes it only when it is waited for; a store
by TMA reads its source only then. WGMMAs are executed at once, but nothing may be copied to what they read before they
are waited for. These are errors: an instruction that is not known here; a global access outside every tensor; a load
from shared memory that nothing has written (matrices aside); a wait that nothing ends; a warp that does not converge.

Not emulated: time, caches and the order of other threads' stores (they are seen at once), proxies and their fences,
registers (PTX has as many as it likes), traps. Float32 is rounded once except in ``fma`` (twice, in very few
cases) and in sums of matrix instructions, whose order is NumPy's; approximations (``ex2.approx``) are exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from emulator.asynchronous import AsynchronousMachine
from emulator.machine import DONE, RANK
from emulator.numbers import (
    ARITHMETIC,
    COMPARISONS,
    DTYPES,
    UNSIGNED,
    WIDER,
    Array,
    funnel_shift,
    operand_a,
    operand_b,
    packed,
    shift_left,
    shift_right,
    unpacked,
)
from emulator.ptx import Instruction

_NOTHING = ("griddepcontrol", "prefetch", "membar", "setmaxnreg", "wgmma.fence", "cp.async.bulk.prefetch")
"""Instructions that change no value."""
_COLLECTIVE = ("shfl", "vote", "redux", "elect", "ldmatrix", "stmatrix", "mma", "wgmma", "bar.warp")
"""Instructions that a whole warp executes together."""


class Emulator(AsynchronousMachine):
    """One launch: see :class:`Machine`."""

    # --- instructions

    def step(self, i: Instruction) -> Callable[[Array], Any]:
        """The function that executes an instruction for some threads; it returns True if their turn ends with it."""
        name = ".".join(i.opcode)
        step = self._step_of(i, name)
        if not name.startswith(_COLLECTIVE):
            return step
        lanes = 128 if name.startswith("wgmma.mma") else 32

        def together(on: Array) -> Any:
            groups, counts = np.unique(on // lanes, return_counts=True)
            if (counts == lanes).all():
                return step(on)
            partial = np.isin(on // lanes, groups[counts < lanes])
            self.pc[on[partial]] -= 1
            self.fail(on[partial])
            whole = on[~partial]
            if whole.size:
                step(whole)
            return True

        return together

    def _step_of(self, i: Instruction, name: str) -> Callable[[Array], Any]:
        if name.startswith(_NOTHING):
            return lambda on: None
        for prefix, method in _METHODS:
            if name.startswith(prefix):
                return functools.partial(method, self, i)
        if i.opcode[0] in ARITHMETIC or i.opcode[0] in ("min", "max", "shl", "shr") or name == "shf.r.wrap.b32":
            return functools.partial(Emulator._arithmetic, self, i)
        raise NotImplementedError(f"the emulator does not know {i.text}")

    def _arithmetic(self, i: Instruction, on: Array) -> None:
        head, *modifiers, kind = i.opcode
        to, *sources = i.operands
        if kind in ("f16x2", "bf16x2"):
            values = [unpacked(kind[:-2], self.get(s, "u32", on)) for s in sources]
            self.put(to, packed(kind[:-2], self._operation(head, modifiers)(*values)), on)
            return
        if head == "mov" and (isinstance(to, tuple) or isinstance(sources[0], tuple)):
            return self._move_parts(to, sources[0], kind, on)
        values = [self.get(s, kind, on) for s in sources]
        if head in ("shl", "shr"):
            values[1] = self.get(sources[1], "u32", on)
        if "wide" in modifiers:
            wider = WIDER[DTYPES[kind]]
            values = [v.astype(wider) for v in values[:2]] + [
                self.get(s, np.dtype(wider).kind.replace("i", "s") + str(8 * np.dtype(wider).itemsize), on)
                for s in sources[2:]
            ]
        if "hi" in modifiers and head != "dp2a":
            wider = WIDER[DTYPES[kind]]
            bits, (x, y) = np.array(8 * DTYPES[kind]().itemsize, wider), (np.asarray(v).astype(wider) for v in values)
            self.put(to, (x * y >> bits).astype(DTYPES[kind]), on)
            return
        self.put(to, self._operation(head, modifiers)(*values), on)

    def _operation(self, head: str, modifiers: Sequence[str]) -> Callable[..., Any]:
        if "relu" in modifiers:
            operation = self._operation(head, [m for m in modifiers if m != "relu"])
            return lambda *values: np.maximum(operation(*values), 0)
        if head == "dp2a" and "hi" in modifiers:
            return ARITHMETIC["dp2a.hi"]
        if head == "min":
            return np.minimum if "NaN" in modifiers else np.fmin
        if head == "max":
            return np.maximum if "NaN" in modifiers else np.fmax
        return {"shl": shift_left, "shr": shift_right, "shf": funnel_shift}.get(head) or ARITHMETIC[head]

    def _move_parts(self, to: Any, source: Any, kind: str, on: Array) -> None:
        """Between a register and the registers of its parts, the lowest first."""
        size = DTYPES[kind]().itemsize
        if isinstance(to, tuple):
            whole = np.broadcast_to(self.get(source, kind, on), on.shape)
            parts = np.ascontiguousarray(whole)[:, None].view(UNSIGNED[size // len(to)])
            for j, name in enumerate(to):
                self.put(name, parts[:, j], on)
            return
        part = f"u{8 * size // len(source)}"
        parts = np.stack([np.broadcast_to(self.get(name, part, on), on.shape) for name in source], -1)
        self.put(to, parts.view(UNSIGNED[size])[:, 0], on)

    def _convert(self, i: Instruction, on: Array) -> None:
        *modifiers, to_kind, kind = i.opcode[1:]
        to, *sources = i.operands
        values = [
            np.broadcast_to(
                self.get(s, {"bf16": "u16", "e4m3x2": "u16", "e5m2x2": "u16"}.get(kind, kind), on), on.shape
            )
            for s in sources
        ]
        if to_kind.endswith("x2") and kind == "f32":  # the first source is the upper half
            self.put(to, packed(to_kind[:-2], np.stack(values[::-1], -1)), on)
        elif kind.endswith("x2"):
            self.put(to, packed(to_kind[:-2], unpacked(kind[:-2], values[0])), on)
        elif kind == "bf16":
            self.put(to, (values[0].astype(np.uint32) << np.uint32(16)).view(np.float32), on)
        elif to_kind == "bf16":
            assert kind == "f32"
            self.put(to, packed("bf16", np.stack([values[0], values[0]], -1)).astype(np.uint16), on)
        else:
            assert not {"rni", "rzi", "sat"} & set(modifiers), i.text
            self.put(to, values[0].astype(DTYPES[to_kind]), on)

    def _set_predicate(self, i: Instruction, on: Array) -> None:
        comparison, kind = i.opcode[1:]
        to, x, y = i.operands
        self.put(to, COMPARISONS[comparison](self.get(x, kind, on), self.get(y, kind, on)), on)

    def _select(self, i: Instruction, on: Array) -> None:
        to, x, y, predicate = i.operands
        kind = i.opcode[1]
        self.put(to, np.where(self.get(predicate, "pred", on), self.get(x, kind, on), self.get(y, kind, on)), on)

    def _branch(self, i: Instruction, on: Array) -> bool:
        self.pc[on] = self.program.labels[i.operands[0]]
        return True

    def _exit(self, i: Instruction, on: Array) -> bool:
        assert not any(store.thread in on for store in self.stores), "a thread ends before TMA has read what it stores"
        self.state[on] = DONE
        for cta in np.unique(self.cta[on]):
            if (self.state[self.cta == cta] == DONE).all():
                self.start_another()
        return True

    def _convert_address(self, i: Instruction, on: Array) -> None:
        self.put(i.operands[0], np.broadcast_to(self.get(i.operands[1], "u64", on), on.shape), on)

    def _map_address(self, i: Instruction, on: Array) -> None:
        to, address, rank = i.operands
        self.put(to, self.get(address, "u32", on) | self.get(rank, "u32", on) + np.uint32(1) << np.uint32(RANK), on)

    # --- loads and stores

    def _space(self, i: Instruction) -> str:
        return next(space for space in ("param", "global", "shared") if any(o.startswith(space) for o in i.opcode))

    def _load(self, i: Instruction, on: Array) -> Any:
        to, source = i.operands
        space, kind = self._space(i), i.opcode[-1]
        names = to if isinstance(to, tuple) else (to,)
        address = self.address(source, on, "u32" if space == "shared" else "u64")
        size = DTYPES[kind]().itemsize
        if space == "shared":
            _, at = self.located(space, address, on, size * len(names))
            assert self.written[at[:, None] + np.arange(size * len(names))].all(), "nothing was written there"
        values = self.load(space, address, on, size, len(names))
        for j, name in enumerate(names):
            self.put(name, values[:, j].view(DTYPES[kind]), on)
        return self.fail(on) if {"acquire", "relaxed"} & set(i.opcode) else None

    def _store(self, i: Instruction, on: Array) -> None:
        target, source = i.operands
        space, kind = self._space(i), i.opcode[-1]
        names = source if isinstance(source, tuple) else (source,)
        values = [np.broadcast_to(self.get(name, kind, on), on.shape) for name in names]
        self.store(space, self.address(target, on, "u32" if space == "shared" else "u64"), on, np.stack(values, -1))
        self.idle = 0

    def _atomic(self, i: Instruction, on: Array) -> None:
        """exch and cas."""
        to, target, *sources = i.operands
        kind = i.opcode[-1]
        addresses, *values = (
            self.address(target, on, "u64"),
            *(np.broadcast_to(self.get(s, kind, on), on.shape) for s in sources),
        )
        for j in range(len(on)):  # one thread after another
            one = slice(j, j + 1)
            old = self.load("global", addresses[one], on[one], DTYPES[kind]().itemsize).view(DTYPES[kind])
            new = values[-1][one, None]
            if "cas" in i.opcode:
                new = np.where(old == values[0][one, None], new, old)
            self.store("global", addresses[one], on[one], new)
            self.put(to, old[:, 0], on[one])
        self.idle = 0

    def _load_matrices(self, i: Instruction, on: Array) -> None:
        names, source = i.operands
        rows = self.load("shared", self.address(source, on, "u32"), on, 4, 4).reshape(-1, 32, 4)  # by warp, row, word
        assert "trans" not in i.opcode, i.text
        for j, name in enumerate(names):
            self.put(name, rows[:, 8 * j : 8 * j + 8].reshape(-1), on)

    def _store_matrices(self, i: Instruction, on: Array) -> None:
        target, names = i.operands
        for j, name in enumerate(names):
            words = self.get(name, "u32", on).reshape(-1, 8, 4)
            halves = np.ascontiguousarray(words)[..., None].view(np.uint16).reshape(-1, 8, 8)
            if "trans" in i.opcode:
                halves = halves.swapaxes(1, 2)
            holders = on.reshape(-1, 32)[:, 8 * j : 8 * j + 8].reshape(-1)
            self.store("shared", self.address(target, holders, "u32"), holders, halves.reshape(-1, 8))

    # --- warps

    def _shuffle(self, i: Instruction, on: Array) -> None:
        to, source, by, clamp, _ = i.operands
        values = self.get(source, "u32", on).reshape(-1, 32)
        lane, by = np.arange(32), np.broadcast_to(self.get(by, "s32", on), on.shape).reshape(-1, 32)
        kind = i.opcode[2]
        assert clamp == ("0" if kind == "up" else "31"), i.text
        other = {"bfly": lane ^ by, "idx": by % 32, "up": np.where(lane >= by, lane - by, lane)}[kind]
        self.put(to, np.take_along_axis(values, other, 1).reshape(-1), on)

    def _ballot(self, i: Instruction, on: Array) -> None:
        assert i.opcode[2] == "ballot", i.text
        votes = self.get(i.operands[1], "pred", on).reshape(-1, 32)
        words = (votes.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32)
        self.put(i.operands[0], words.repeat(32), on)

    def _reduce(self, i: Instruction, on: Array) -> None:
        operation = {"max": np.max, "min": np.min, "add": np.sum}[i.opcode[2]]
        values = self.get(i.operands[1], i.opcode[3], on).reshape(-1, 32)
        self.put(i.operands[0], operation(values, axis=1).astype(values.dtype).repeat(32), on)

    def _elect(self, i: Instruction, on: Array) -> None:
        lane, predicate = i.operands[0]
        self.put(lane, np.zeros(on.shape, np.uint32), on)
        self.put(predicate, on % 32 == 0, on)

    # --- barriers

    def _barrier(self, i: Instruction, on: Array) -> bool:
        """bar.sync, bar.arrive and barrier.sync, of some threads of a CTA."""
        number = np.broadcast_to(self.get(i.operands[0], "u32", on), on.shape)
        count = int(np.max(self.get(i.operands[1], "u32", on))) if len(i.operands) > 1 else self.threads
        self.meet(self.cta[on].astype(np.int64) * 16 + number, count, on, blocks="arrive" not in i.opcode)
        return True

    def _cluster_barrier(self, i: Instruction, on: Array) -> bool:
        """A thread arrives, and goes on behind its wait when all threads of the cluster have arrived as often."""
        if "arrive" in i.opcode:
            self._loaded(on)
            self.cluster_arrivals[on] += 1
            self.idle = 0
            return False
        threads = self.cluster * self.threads
        arrivals = self.cluster_arrivals.reshape(-1, threads).min(1)[on // threads]
        early = on[arrivals < self.cluster_arrivals[on]]
        self.pc[early] -= 1
        return early.size > 0 and self.fail(early)

    # --- matrices

    def _mma(self, i: Instruction, on: Array) -> None:
        """mma.sync m16n8 of each warp."""
        kinds = i.opcode[-3:-1]
        d, a, b, c = i.operands
        left = operand_a([unpacked(kinds[0], self.get(r, "u32", on)) for r in a])
        right = operand_b([unpacked(kinds[1], self.get(r, "u32", on)) for r in b])
        product = np.matmul(left, right).reshape(-1, 2, 8, 4, 2)  # warp, half of the rows, g, q, column
        for j, (to, old) in enumerate(zip(d, c, strict=True)):
            self.put(to, self.get(old, "f32", on) + product[:, j // 2, :, :, j % 2].reshape(-1), on)


_METHODS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("ld.", Emulator._load),
    ("st.async", Emulator._store_async),
    ("st.", Emulator._store),
    ("atom.relaxed.gpu.global", Emulator._atomic),
    ("ldmatrix", Emulator._load_matrices),
    ("stmatrix", Emulator._store_matrices),
    ("cvta", Emulator._convert_address),
    ("cvt", Emulator._convert),
    ("setp", Emulator._set_predicate),
    ("selp", Emulator._select),
    ("bra", Emulator._branch),
    ("ret", Emulator._exit),
    ("exit", Emulator._exit),
    ("mapa", Emulator._map_address),
    ("shfl", Emulator._shuffle),
    ("vote", Emulator._ballot),
    ("redux", Emulator._reduce),
    ("elect", Emulator._elect),
    ("bar.warp", lambda *_: None),
    ("barrier.cluster", Emulator._cluster_barrier),
    ("bar", Emulator._barrier),
    ("fence.proxy.async", Emulator._fence_proxy),
    ("fence", lambda *_: None),
    ("mbarrier.init", Emulator._mbarrier_init),
    ("mbarrier.arrive", Emulator._mbarrier_arrive),
    ("mbarrier.try_wait", Emulator._mbarrier_wait),
    ("mbarrier.test_wait", Emulator._mbarrier_wait),
    ("cp.async.mbarrier.arrive.noinc", Emulator._arrive_after_copies),
    ("cp.async.bulk.tensor.2d.shared", Emulator._box_copy),
    ("cp.async.bulk.shared", Emulator._bulk_copy),
    ("cp.async.bulk.tensor.2d.global", Emulator._box_store),
    ("cp.async.bulk.commit", Emulator._bulk_commit),
    ("cp.async.bulk.wait", Emulator._bulk_wait),
    ("cp.async.cg", Emulator._copy_async),
    ("cp.async.commit", Emulator._commit),
    ("cp.async.wait", Emulator._wait_copies),
    ("mma", Emulator._mma),
    ("wgmma.mma_async", Emulator._wgmma),
    ("wgmma.commit", Emulator._wgmma_commit),
    ("wgmma.wait", Emulator._wgmma_wait),
)
"""By the beginning of the opcode; the first that fits."""
