"""Threads, registers and memory of an emulated launch: :class:`Machine`."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from emulator.numbers import DTYPES, UNSIGNED, Array, constant
from emulator.ptx import Address, Instruction, Program, parse

_GLOBAL = 0x7F_0000_0000
"""Address of the first tensor: 32 bits do not hold it."""
_GAP = 4096
"""Bytes around tensors that no kernel may touch."""
_PARAMETERS = 1 << 60
_SHARED = 1024
"""Address of dynamic shared memory."""
SHARED_BYTES = 233472
"""Shared memory of each CTA: as much as a Hopper GPU has, with the 1,024 bytes that the driver takes."""
RANK = 20
"""Bits of a shared address above this one are 1 + the rank in the cluster, or 0 for the own CTA."""
_MOST_IDLE = 20000
"""Waits in a row that fail, and then nothing will end them."""


class TensorMap(NamedTuple):
    """The content of a TMA descriptor: boxes of a matrix."""

    tensor: torch.Tensor
    """(rows, columns), the columns contiguous."""
    rows: int
    """Rows of a box."""
    columns: int
    """Columns of a box."""
    swizzled: bool = True
    """True if a box lies in shared memory with the swizzle of 128 bytes, the bytes of its rows."""


RUNNING, BLOCKED, DONE = range(3)
"""States of a thread."""


class Machine:
    """One launch, whose instructions a subclass adds.

    Args:
        ptx: a file with one kernel.
        grid: the number of CTAs.
        cluster: CTAs of a cluster.
        resident: CTAs that run at once; each of the others begins when one ends. 0 for all.
        order: the order in which CTAs begin; that of their numbers if it is empty.
        seed: if not None, whose turn it is is drawn at random.
        together: neighbouring threads that may execute together, and run ahead of all others: those of a WGMMA, or
            fewer.
    """

    def __init__(
        self,
        ptx: str | Program,
        grid: int,
        cluster: int = 1,
        resident: int = 0,
        order: Sequence[int] = (),
        seed: int | None = None,
        together: int = 128,
    ):
        self.program = parse(ptx) if isinstance(ptx, str) else ptx
        self.grid, self.cluster, self.threads, self.together = grid, cluster, self.program.threads, together
        count = grid * self.threads
        self.thread = np.arange(count) % self.threads
        self.cta = np.arange(count) // self.threads
        self.registers: dict[str, Array] = {}
        self.special = self._special_registers()
        self.pc = np.zeros(count, np.int64)
        """By thread, the index of its next instruction."""
        self.age = np.zeros(count, np.int64)
        """By thread, its place in the queue: the lowest runs first."""
        self.state = np.full(count, RUNNING)
        self.random = None if seed is None else random.Random(seed)
        self.waiting = [*(order or range(grid))]
        """CTAs that have not begun, in order."""
        self.state[:] = BLOCKED
        for _ in range(resident or grid):
            self.start_another()
        self.shared = np.full(grid * SHARED_BYTES, 0xFF, np.uint8)
        self.written = np.zeros(len(self.shared), np.bool_)
        """By byte of shared memory, True if something was written there."""
        self.maps: dict[int, TensorMap] = {}
        """By the parameter's address."""
        self.tensors: list[tuple[int, torch.Tensor]] = []
        """With the index of each one's first byte in global memory."""
        self.arrived: dict[int, int] = {}
        self.blocked: dict[int, list[Array]] = {}
        """By barrier, the number of threads that are there, and those of them that wait."""
        self.cluster_arrivals = np.zeros(count, np.int64)
        """By thread, how often it has arrived at its cluster's barrier."""
        self.idle = 0
        self.steps = [self.step(i) for i in self.program.code]

    def _special_registers(self) -> dict[str, Array]:
        lane = (self.thread % 32).astype(np.uint32)
        values = {
            "%tid.x": self.thread,
            "%ntid.x": np.full_like(self.thread, self.threads),
            "%ctaid.x": self.cta,
            "%smid": self.cta,
            "%nctaid.x": np.full_like(self.thread, self.grid),
            "%laneid": lane,
            "%lanemask_eq": np.uint32(1) << lane,
            "%lanemask_lt": (np.uint32(1) << lane) - np.uint32(1),
            "%cluster_ctarank": self.cta % self.cluster,
            "%cluster_ctaid.x": self.cta % self.cluster,
            "%clusterid.x": self.cta // self.cluster,
            "%nclusterid.x": np.full_like(self.thread, self.grid // self.cluster),
        }
        zeros = np.zeros(len(lane), np.uint32)
        ones = zeros + np.uint32(1)
        values |= {f"%{name}.{axis}": zeros for name in ("tid", "ctaid") for axis in "yz"}
        values |= {f"%{name}.{axis}": ones for name in ("ntid", "nctaid") for axis in "yz"}
        return {name: np.asarray(value).astype(np.uint32) for name, value in values.items()}

    # --- a launch

    def run(self, *arguments: Any) -> None:
        """Run the kernel. arguments: by parameter a tensor, a number, a :class:`TensorMap`, or None for what is not
        read. Tensors hold afterwards what was stored."""
        self._place(arguments)
        with np.errstate(all="ignore"):
            while (live := np.flatnonzero(self.state == RUNNING)).size:
                self._advance(live)
        assert (self.state == DONE).all(), f"threads wait for ever at {self._where()}"
        for start, tensor in self.tensors:
            flat = tensor.reshape(-1).view(torch.uint8)
            flat.copy_(torch.from_numpy(self.memory[start : start + flat.numel()]))

    def _place(self, arguments: Sequence[Any]) -> None:
        """Copy tensors into global memory, and fill the parameters."""
        assert len(arguments) == len(self.program.parameters), self.program.parameters
        end, parameters = _GAP, b""
        self.at: dict[str, int] = {}
        for (name, size), value in zip(self.program.parameters.items(), arguments, strict=True):
            parameters += bytes(-len(parameters) % (64 if size == 128 else 8))
            self.at[name] = len(parameters)
            tensor = value.tensor if isinstance(value, TensorMap) else value
            if isinstance(value, TensorMap):
                self.maps[_PARAMETERS + self.at[name]] = value
            if isinstance(tensor, torch.Tensor):
                assert tensor.is_contiguous()
                start = next((at for at, other in self.tensors if other.data_ptr() == tensor.data_ptr()), end)
                if start == end:
                    self.tensors.append((start, tensor))
                    end += -(-tensor.nbytes // 256) * 256 + _GAP
                value = _struct(tensor, start + _GLOBAL, size)
            elif isinstance(value, float):
                value = struct.pack("<f", value)
            elif isinstance(value, int):
                value = struct.pack("<i", value)
            parameters += (value or b"").ljust(size, b"\xee")
        self.parameters = np.frombuffer(parameters.ljust(-(-len(parameters) // 64) * 64), np.uint8)
        self.memory, self.mapped = np.zeros(end, np.uint8), np.zeros(end, np.bool_)
        for start, tensor in self.tensors:
            self.memory[start : start + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8).numpy()
            self.mapped[start : start + tensor.nbytes] = True

    def _advance(self, live: Array) -> None:
        """Run the threads whose turn it is until they wait, branch, or meet others."""
        group = live // self.together
        at = int(np.argmin(self.age[live])) if self.random is None else self.random.randrange(len(live))
        live = live[group == group[at]]
        ages, pcs = self.age[live], self.pc[live]
        pc = int(pcs[ages == ages.min()].min())
        threads, others = live[pcs == pc], pcs[pcs > pc]
        limit = int(others.min()) if others.size else len(self.steps)
        while True:
            instruction, step = self.program.code[pc], self.steps[pc]
            self.pc[threads] = pc + 1
            on = threads
            if instruction.guard:
                on = threads[self.registers[instruction.guard][threads] == instruction.if_true]
            try:
                stop = on.size and step(on)
            except Exception as e:
                raise RuntimeError(f"{instruction.text}: {type(e).__name__}: {e}") from e
            if stop:
                return
            pc += 1
            if pc >= limit:
                return

    def start_another(self) -> None:
        """Let the next CTA begin."""
        if self.waiting:
            self.state[self.cta == self.waiting.pop(0)] = RUNNING

    def _where(self) -> str:
        waiting = np.unique(self.pc[self.state != DONE])
        return "; ".join(self.program.code[max(0, pc - 1)].text for pc in waiting[:8])

    def let_others_run(self, threads: Array) -> bool:
        """Let all others run first. True, as a step says that ends its threads' turn."""
        self.age[threads] = self.age.max() + 1
        return True

    def fail(self, threads: Array) -> bool:
        self.idle += 1
        assert self.idle < _MOST_IDLE, f"nothing ends the wait; threads are at {self._where()}"
        return self.let_others_run(threads)

    def step(self, i: Instruction) -> Callable[[Array], Any]:
        """The function that executes an instruction for some threads; it returns True if their turn ends with it."""
        raise NotImplementedError

    # --- operands

    def get(self, operand: str, kind: str, on: Array) -> Any:
        """The values of an operand as numbers of a kind: an array over ``on``, or one number."""
        dtype = DTYPES[kind]
        register = self._register(operand)
        if register is None:
            if operand in self.at:
                return dtype(_PARAMETERS + self.at[operand])
            if operand.startswith("__dynamic_shmem"):
                return dtype(_SHARED)
            return constant(operand, dtype)
        bits = register[on]
        size = dtype().itemsize
        if bits.dtype.itemsize > size:
            bits = bits.astype(UNSIGNED[size])
        assert bits.dtype.itemsize == size, f"{operand} has {bits.dtype}, wanted {kind}"
        return bits.view(dtype)

    def _register(self, name: str) -> Array | None:
        if name in self.registers:
            return self.registers[name]
        if name in self.special:
            return self.special[name]
        if name not in self.program.registers:
            return None
        kind = {"f32": "b32", "f64": "b64"}.get(self.program.registers[name], self.program.registers[name])
        dtype = DTYPES[kind if kind == "pred" else "u" + kind[1:]]
        fill = False if kind == "pred" else np.iinfo(dtype).max
        self.registers[name] = np.full(len(self.pc), fill, dtype)
        return self.registers[name]

    def put(self, operand: str, values: Any, on: Array) -> None:
        """Write a register; what is narrower than it is extended by its sign, if it has one."""
        if operand == "_":
            return
        register = self._register(operand)
        assert register is not None, f"{operand} is no register"
        values = np.asarray(values)
        if values.dtype.kind == "f":
            values = values.view(UNSIGNED[values.dtype.itemsize])
        register[on] = values.astype(register.dtype)

    def address(self, operand: Address, on: Array, kind: str = "u64") -> Array:
        base = self.get(operand.base, kind, on)
        return np.broadcast_to(base.astype(np.int64) + operand.offset, on.shape)

    # --- memory

    def located(self, space: str, address: Array, on: Array, size: int) -> tuple[Array, Array]:
        """The bytes of a space and indices into them."""
        assert (address % size == 0).all(), f"not aligned to {size} bytes: {address[address % size != 0][0]:#x}"
        if space == "param":
            return self.parameters, address - _PARAMETERS
        if space == "shared":
            cta, offset = self.owner(address, on)
            return self.shared, cta * SHARED_BYTES + offset
        at = address - _GLOBAL
        inside = (at >= 0) & (at + size <= len(self.mapped))
        inside &= self.mapped[np.where(inside, at, 0)] & self.mapped[np.where(inside, at + size - 1, 0)]
        assert inside.all(), f"outside every tensor: {address[~inside][0]:#x}"
        return self.memory, at

    def owner(self, address: Array, on: Array) -> tuple[Array, Array]:
        """(CTA, offset) of shared addresses."""
        rank, offset = (address >> RANK) - 1, address & (1 << RANK) - 1
        assert (offset < SHARED_BYTES).all() and (rank < self.cluster).all(), (
            f"outside shared memory: {address.max():#x}"
        )
        own = self.cta[on]
        return np.where(rank < 0, own, own // self.cluster * self.cluster + rank), offset

    def load(self, space: str, address: Array, on: Array, size: int, count: int = 1) -> Array:
        """(threads, count) unsigned numbers of ``size`` bytes."""
        memory, at = self.located(space, address, on, size * count)
        return memory[at[:, None] + np.arange(size * count)].view(UNSIGNED[size])

    def store(self, space: str, address: Array, on: Array, values: Array) -> None:
        """Store (threads, count) numbers."""
        values = np.ascontiguousarray(values)
        parts = values.view(np.uint8)
        memory, at = self.located(space, address, on, parts.shape[1])
        bytes = at[:, None] + np.arange(parts.shape[1])
        memory[bytes] = parts
        if space == "shared":
            self.written[bytes] = True

    # --- barriers

    def meet(self, keys: Array, count: int, on: Array, blocks: bool) -> None:
        self.idle = 0
        for key in np.unique(keys):
            own = on[keys == key]
            self.arrived[key] = self.arrived.get(key, 0) + len(own)
            waiting = self.blocked.setdefault(key, [])
            if blocks:
                self.state[own] = BLOCKED
                waiting.append(own)
            assert self.arrived[key] <= count, f"{self.arrived[key]} threads at a barrier of {count}"
            if self.arrived[key] == count:
                everyone = np.concatenate(waiting) if waiting else own
                self.state[everyone] = RUNNING
                self.age[everyone] = self.age[everyone].max()
                self.arrived[key], self.blocked[key] = 0, []


def _struct(tensor: torch.Tensor, start: int, size: int) -> bytes:
    """A tensor as the DSL passes it: its address, int32 sizes and, of two and more, int64 strides but the last. Of a
    tensor map, which has 128 bytes, only the place matters."""
    dimensions = min(tensor.dim(), (size - 8) // 4 if size <= 16 else {40: 3}.get(size, 2))
    words = struct.pack(f"<q{dimensions}i", start, *tensor.shape[:dimensions])
    strides = tensor.stride()[: dimensions - 1] if size > 16 else ()
    words = words.ljust(-(-len(words) // 8) * 8, b"\xee") + struct.pack(f"<{len(strides)}q", *strides)
    return words.ljust(size, b"\xee")[:size]
