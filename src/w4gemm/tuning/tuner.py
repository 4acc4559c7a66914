"""Tuning: :func:`tune` measures the configs of least predicted time and keeps the fastest; :func:`autotune` does so for
every problem inside a block.

For each problem the configs of least predicted time are compiled, in several processes while others are measured. Each
is checked against a plain product and timed briefly, and the best are timed again, with more replays. Every outcome is
stored as soon as it is known.
"""

from __future__ import annotations

import datetime
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from w4gemm import choice
from w4gemm.choice import table
from w4gemm.choice.table import Record, key_of
from w4gemm.core.config import GemmConfig
from w4gemm.core.errors import require_int
from w4gemm.core.problem import GemmProblem
from w4gemm.jit import Unit, adopt, is_ready
from w4gemm.jit.pool import CompilePool
from w4gemm.kernels import Kernel, Operands, config_named, kernel_named
from w4gemm.tuning.timing import LONG_CALL_US, Timing
from w4gemm.tuning.workload import Launch, Workload

_log = logging.getLogger("w4gemm")

TOP = 10
"""Number of configs that are measured for a problem, least predicted time first. Over the points of
four layers (H200, 2026-11-21), the best of the first 8 is at most 2 % slower than the fastest, the best
of 10 at most 0.4 %."""
MAX_ERROR = 2e-2
"""Largest relative error of a result with which a config is timed."""
_LOOKS, _REPLAYS, _FEW_REPLAYS = 1, 11, 3
"""Timed replays per config: in the first pass; for a finalist; for a finalist if calls are long on a GPU (fewer,
because the timer warms up before each)."""
_FINALISTS, _NEAR, _LONG_NEAR = 4, 1.25, 1.06
"""Largest number of finalists, and their largest time over the fastest's in the first pass; lower for long calls, which
vary less."""
_AS_FAST = 1.03
"""Largest time / fastest time at the interval's last m, of a config that may be kept."""
_WORTH = 0.99
"""Largest time / first guess's time, geometric mean of two m, with which a config replaces the first guess. With less
to gain, the choice lost as often as it won when both were measured again (H200, 2026-11-21)."""
_STEADY, _TRIES = 1.5, 3
"""Largest p80 / p20 of the chosen config's repeats that is trusted, and how often a problem is timed until it is."""

Progress = Callable[[int, int, str], None]
"""A function that is called as ``progress(configs done, configs, what)``."""


@dataclass(frozen=True)
class Outcome:
    """The measurements of one problem. Configs are named ``"<kernel>/<config>"``."""

    problem: GemmProblem
    """The problem; its m is the last of its interval."""
    times: dict[str, Timing]
    """Timing of each config, about fastest first: of many replays for finalists, of few for the others."""
    ragged: dict[str, Timing]
    """Timing of each finalist at an m inside the interval that no tile divides; for long calls at the last m."""
    failed: dict[str, str]
    """Why each config that could not be compiled, or gave a wrong result, was left out."""
    first_guess: str
    """The config of least predicted time, which the heuristic would choose."""
    record: Record
    """The config that was kept."""
    steady: bool = True
    """False if the chosen config's repeats disagreed each time, as on a busy machine."""
    stored: bool = False
    """True if later processes find the record in the cache folder."""

    @property
    def gain(self) -> float:
        """The first guess's time / the kept config's time, geometric mean over both m."""
        first, choice = self.first_guess, self.record.choice
        if first not in self.ragged:
            return 1.0
        squared = [times[first].p50 / times[choice].p50 for times in (self.times, self.ragged)]
        return math.sqrt(math.prod(squared))


def tune(
    problems: Iterable[GemmProblem],
    device: torch.device | str,
    *,
    top: int | None = TOP,
    force: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Outcome]:
    """Measure problems on a device; yield each outcome when its record is in use, those of one weight consecutively.

    Args:
        problems: what to measure; each m stands for its interval. A problem that no kernel supports is skipped with a
            warning.
        top: number of configs to measure for each problem, least predicted time first; None for all.
        force: True to measure also problems that have a tuned record of this device and kernel.
        workers: number of processes that compile; None for the number of processors.
        progress: called as ``progress(configs done, configs, what)``.
    """
    device = torch.device(device)
    todo = [replace(p, m=choice.interval_end(p.m)) for p in problems]
    todo = sorted(dict.fromkeys(todo), key=lambda p: (p.n, p.k, str(p.format), str(p.dtype), str(p.epilogue), p.m))
    guesses = {p: _guesses(p, top) for p in todo if force or not is_tuned(p)}
    guesses = {p: configs for p, configs in guesses.items() if configs}
    workload: Workload | None = None
    with CompilePool(workers) as pool:
        objects = _compile(pool, guesses)
        done, total = 0, sum(map(len, guesses.values()))

        def step() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, total, f"m {problem.m}, n {problem.n}, k {problem.k}")

        for problem, configs in guesses.items():
            if workload is None or not workload.serves(problem):
                workload = None  # give its memory back first
                workload = Workload(problem, device)
            outcome = _measure(problem, configs, objects, workload, step)
            if outcome is not None:
                stored = table.add([outcome.record])
                choice.forget(problem.n, problem.k)
                yield replace(outcome, stored=stored)


def autotune(*, top: int | None = TOP) -> AbstractContextManager[None]:
    """Return a context manager; ``with w4gemm.autotune(): model(x)`` measures every product that is computed inside and
    has no tuned record yet (a shipped one does not count), and keeps the fastest config of each for this and every
    later process.

    A product, that is a weight's shape and an interval of m, takes from a tenth of a second to several, more if kernels
    are compiled, and memory for copies of its weight. Products of experts are not tuned. Nothing is tuned outside the
    block, in other threads, or while a CUDA graph is captured. ``w4gemm cache list`` prints the records.

    On a GPU other threads may multiply meanwhile, but not wait for the whole GPU (``torch.cuda.synchronize``) or draw
    from PyTorch's CUDA generator: CUDA graphs are captured, and PyTorch raises an error there.

    Args:
        top: number of configs to measure for each product, least predicted time first; None for all.

    Raises:
        TypeError, ValueError: if ``top`` is no int from 1 on.

    Examples:
        >>> w = w4gemm.quantize(torch.randn(128, 128)).repack()
        >>> with w4gemm.autotune():
        ...     d = w4gemm.linear(torch.randn(3, 128), w)
    """

    if top is not None:
        require_int("top", top)

    def see(problem: GemmProblem) -> None:
        kind = problem.device.kind
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            _log.warning("%s: not tuned, since a CUDA graph is being captured; run it once before", problem)
            return
        for outcome in tune([problem], device, top=top):
            _log.info("%s: tuned, %s, %.2f times as fast", problem, outcome.record.choice, outcome.gain)

    return choice.tuning_with(see)


def is_tuned(problem: GemmProblem) -> bool:
    """True if the choice for a problem was measured on this machine."""
    measured = choice.measured_record(problem)
    return measured is not None and measured[0] == "tuned"


def _guesses(problem: GemmProblem, top: int | None) -> list[tuple[Kernel, GemmConfig]]:
    candidates = choice.explain(problem).candidates
    if not candidates:
        _log.warning("%s: not tuned, no kernel supports it", problem)
    return [(kernel_named(candidate.kernel), candidate.config) for candidate in candidates[:top]]


Objects = dict[Unit, "Future[bytes]"]


def _compile(pool: CompilePool, guesses: dict[GemmProblem, list[tuple[Kernel, GemmConfig]]]) -> Objects:
    """Begin to compile the objects that are not ready, each once; return their futures."""
    units = dict.fromkeys(k.unit(problem, config) for problem, configs in guesses.items() for k, config in configs)
    missing = [unit for unit in units if unit is not None and not is_ready(unit)]
    return dict(zip(missing, pool.submit(missing), strict=True))


def _measure(
    problem: GemmProblem,
    configs: list[tuple[Kernel, GemmConfig]],
    objects: Objects,
    workload: Workload,
    step: Callable[[], None],
) -> Outcome | None:
    """Time the configs of one problem, and call ``step`` for each. Return None if none works; the log says why."""
    operands = workload.operands(problem.m)
    launches: dict[str, Launch] = {}
    failed: dict[str, str] = {}
    for kernel, config in configs:
        name = f"{kernel.name}/{config}"
        step()
        try:
            launch = _launcher(kernel, problem, config, objects)
            error = workload.error(launch, operands[0])
        except RuntimeError as e:  # of the compiler or of CUDA
            failed[name] = str(e)
            continue
        if error < MAX_ERROR:
            launches[name] = launch
        else:
            failed[name] = f"relative error {error:.3g}"
    for name, reason in failed.items():
        _log.warning("%s: %s is left out: %s", problem, name, reason)
    if not launches:
        return None
    first = f"{configs[0][0].name}/{configs[0][1]}"
    for _ in range(_TRIES):
        times, ragged = _times(launches, operands, workload, first)
        best = _best(times, ragged, first)
        if steady := all(time.p80 <= _STEADY * time.p20 for time in (times[best], ragged[best])):
            break
    else:
        said = "%s: the repeats of %s disagree, %.0f to %.0f us: the machine is busy; tune it again with --force"
        _log.warning(said, problem, best, times[best].p20, times[best].p80)
    return Outcome(problem, times, ragged, failed, first, record_of(problem, best, times[best].p50), steady)


def record_of(problem: GemmProblem, name: str, us: float) -> Record:
    """Return the record of the config ``"<kernel>/<config>"``, measured today for the interval of the problem's m."""
    (kernel, config), interval = config_named(name), choice.interval_of(problem.m)
    day = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    return Record(key_of(problem), interval, kernel.name, str(config), round(us, 3), kernel.revision, day)


class _Times(NamedTuple):
    last: dict[str, Timing]
    """Timing of each config at the interval's last m, fastest first."""
    ragged: dict[str, Timing]
    """Timing of each finalist at an m inside that no tile divides: tiles that reach past m cost some configs up to half
    as much again (m 96, n = k = 5120: 24.7 us where another takes 16.6, 16.0 and 16.3 at m 128; H200, 2026-11-21). Long
    calls have many tiles, of which few reach past m, so their times at the last m are used."""


def _best(times: dict[str, Timing], ragged: dict[str, Timing], first: str) -> str:
    """Return the finalist of least time, geometric mean over both m, among those nearly as fast as the fastest at the
    last m. Return the first guess if that one gains too little."""

    def both(name: str) -> float:
        return math.sqrt(times[name].p50 * ragged[name].p50)

    fastest = min(times[name].p50 for name in ragged)
    best = min((name for name in ragged if times[name].p50 <= _AS_FAST * fastest), key=both)
    return first if first in ragged and both(best) > _WORTH * both(first) else best


def _launcher(kernel: Kernel, problem: GemmProblem, config: GemmConfig, objects: Objects) -> Launch:
    unit = kernel.unit(problem, config)
    if unit is not None and unit in objects:
        adopt(unit, objects[unit].result())
    return choice.Plan(problem, kernel, config).launch


def _times(launches: dict[str, Launch], operands: list[Operands], workload: Workload, first: str) -> _Times:
    """Time all configs briefly at the interval's last m, then the best of them and the first guess with more replays,
    at the last m and at a ragged one. Fastest at the last m first."""
    names, m = list(launches), operands[0].x.shape[0]
    times = dict(zip(names, workload.time(list(launches.values()), operands, _LOOKS), strict=True))
    names.sort(key=lambda name: times[name].p50)
    long = workload.device.type == "cuda" and times[names[0]].p50 > LONG_CALL_US
    limit = (_LONG_NEAR if long else _NEAR) * times[names[0]].p50
    finalists = [n for i, n in enumerate(names) if n == first or (i < _FINALISTS and times[n].p50 <= limit)]
    again, replays = [launches[name] for name in finalists], _FEW_REPLAYS if long else _REPLAYS
    times |= dict(zip(finalists, workload.time(again, operands, replays), strict=True))
    ragged = {name: times[name] for name in finalists}
    if not long:
        inside = workload.time(again, workload.operands(choice.ragged(m)), replays)
        ragged = dict(zip(finalists, inside, strict=True))
    finalists.sort(key=lambda name: times[name].p50)
    ordered = (*finalists, *(n for n in names if n not in finalists))
    return _Times({name: times[name] for name in ordered}, ragged)
