"""The position of a warp in a pipeline, the ring of stages with their mbarriers: advanced here and nowhere else."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32


class PipelineState(NamedTuple):
    """One stage, in one lap around the ring. ``phase`` is the parity that a wait on the stage's mbarrier is for."""

    stage: Int32
    phase: Int32

    @classmethod
    def consumer(cls) -> PipelineState:
        """The first stage: a wait on its full barrier ends when it has been filled for the first time."""
        return cls(Int32(0), Int32(0))

    @classmethod
    def producer(cls) -> PipelineState:
        """The first stage: a wait on its empty barrier passes at once, since nothing has been filled."""
        return cls(Int32(0), Int32(1))

    def after(self, num_stages: int) -> PipelineState:
        """The next stage, in a ring of ``num_stages``."""
        return PipelineState(*_after(self.stage, self.phase, num_stages))

    def after_several(self, count: Int32, num_stages: int) -> PipelineState:
        """The stage that is ``count`` further, in a ring of ``num_stages``."""
        laps = (self.stage + count) // num_stages
        return PipelineState(self.stage + count - laps * num_stages, self.phase ^ (laps & 1))


@cute.jit
def _after(stage: Int32, phase: Int32, num_stages: int) -> tuple[Int32, Int32]:
    stage += 1
    if stage == num_stages:
        stage = Int32(0)
        phase = phase ^ 1
    return stage, phase
