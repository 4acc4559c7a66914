"""What the main loop passes on: where a consumer thread is, a stage, and the registers that it works on."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32

from w4gemm.kernels.device.block import LaneOffsets
from w4gemm.kernels.device.pipeline import PipelineState
from w4gemm.kernels.sm90_mixed_gemm.shared_levels import LevelLane


class ConsumerCoord(NamedTuple):
    """A consumer thread."""

    warpgroup: Int32
    """Number of its warpgroup along the features of a tile."""
    k_set: Int32
    thread: Int32
    """0 .. 127 in the warpgroup."""
    cta_rank: Int32
    """Rank of the CTA in its cluster."""


class StageState(NamedTuple):
    """A stage that is multiplied, and its neighbours."""

    stage: Int32
    next: PipelineState
    previous: Int32
    has_previous: Boolean
    """True if ``previous`` is of the same work tile, and not yet released."""
    has_next: Boolean
    """True if ``next`` is of the same work tile."""
    next_begins: bool
    """False if ``next`` has the factors of this stage."""


class MmaOperands(NamedTuple):
    """Registers and shared memory of a consumer thread that the main loop works on."""

    accumulators: Any
    """One operand per 64-row block or range of tokens or, if scales are applied to sums, flat."""
    fragment: cute.Tensor
    """Two buffers of decoded weights, operand A."""
    x: list[cute.Tensor]
    """x of all stages as operand B, by range of tokens."""
    packed: cute.Tensor
    """A packed block or a part of one in registers, see :class:`Mainloop`."""
    register: Int32
    """What the decoder prepares from: the address of its table, of a table of pairs the thread's own copies, or its
    ``held_word``."""
    offsets: LaneOffsets | None
    """The thread's in a packed block, beside ``held_word``."""
    lane: LevelLane | None
    """None unless lanes prepare scales for one another."""


class GroupSums(NamedTuple):
    """Registers besides, if scales are applied to sums."""

    sets: list[tuple[cute.Tensor, cute.Tensor]]
    """One or two sets: the float32 sums of an MMA batch, and their scales of rows g and g + 8, and zero points if the
    sums of x meet them."""
    scales: cute.Tensor
    """Scales of the k chunk that was decoded last: those of a set for each group."""

    @property
    def factors(self) -> int:
        """Numbers of a group in ``scales``."""
        return cute.size(self.sets[0][1])

    def batch(self, index: int) -> tuple[cute.Tensor, cute.Tensor]:
        """The set that an MMA batch adds into; batches alternate if there are two sets."""
        return self.sets[index % len(self.sets)]


def flattened(registers: cute.Tensor) -> cute.Tensor:
    """``registers`` with one index, in the order in which WGMMA has them."""
    return cute.make_tensor(registers.iterator, cute.make_layout(cute.size(registers)))
