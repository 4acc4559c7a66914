"""Which step starts next, and on which GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.gpu_steps.steps import Step


class Start(NamedTuple):
    step: Step
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Busy:
    """A step that runs, as far as the schedule must know."""

    step: Step
    gpus: tuple[str, ...]
    end: float
    """The latest time at which it ends."""


def next_start(
    waiting: Iterable[Step], busy: Sequence[Busy], gpus: Sequence[str], cores: int, now: float
) -> Start | None:
    """Return the step of most worth that can start now; None if none can.

    A step that must wait for GPUs keeps them: until they are free, only steps that end before start there.

    Args:
        waiting: steps in order of worth.
        gpus: names of all GPUs.
        cores: processor cores of the machine. A step that wants more starts when no other runs.
    """
    free_cores = cores - sum(one.step.cores for one in busy)
    kept = dict.fromkeys(gpus, math.inf)
    for step in waiting:
        if step.gpus > len(gpus):
            continue
        free_at = {gpu: _free_at(step, gpu, busy, now) for gpu in gpus}
        able = [gpu for gpu in gpus if free_at[gpu] <= now and now + step.seconds <= kept[gpu]]
        if len(able) >= step.gpus and (step.cores <= free_cores or not busy):
            # correctness steps together, so that another GPU stays free for times
            able.sort(key=lambda gpu: not any(gpu in one.gpus for one in busy))
            return Start(step, tuple(able[: step.gpus]))
        wanted = sorted(gpus, key=lambda gpu: free_at[gpu])[: step.gpus]
        if step.alone and all(math.isinf(kept[gpu]) for gpu in wanted):
            kept |= dict.fromkeys(wanted, max(free_at[gpu] for gpu in wanted))
    return None


def _free_at(step: Step, gpu: str, busy: Sequence[Busy], now: float) -> float:
    """Time from which a step may run on a GPU; ``now`` if it may at once."""
    in_the_way = [one.end for one in busy if gpu in one.gpus and (step.alone or one.step.alone)]
    return max(in_the_way, default=now)
