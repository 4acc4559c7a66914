"""From a problem to what runs it: :func:`plan` and :func:`plan_for`, which remembers; :func:`explain` says why.

A plan is chosen for an interval of m, as if m were the interval's last value, so a call with another number of tokens
rarely chooses or compiles anything. The choice is the config that the caller forces, else one that was measured here
(``tuned``) or that comes with the package (``shipped``), as long as it is legal and its kernel is what was measured,
else the first by predicted time (``heuristic``).

A problem whose rows are gathered is run as one of a copy of them, made before, where that is predicted to take less
time (:func:`as_run`).

A batch-invariant problem is served by configs of one reduction order only, the same for every m: that which costs the
least over all intervals, by the kernels' own predictions.
"""

from __future__ import annotations

import bisect
import difflib
import functools
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from w4gemm import environment
from w4gemm.config import GemmConfig
from w4gemm.epilogue import PLAIN, Epilogue
from w4gemm.errors import UnsupportedError
from w4gemm.explanation import Candidate, Explanation
from w4gemm.formats import WeightFormat
from w4gemm.jit import compiled
from w4gemm.kernels import KERNELS, Kernel, Operands, Status, kernel_named, ranked
from w4gemm.kernels.sm90_model import copy_us
from w4gemm.layouts import layout_named, native_layout
from w4gemm.problem import Device, GemmProblem
from w4gemm.tuning import store
from w4gemm.weight import QuantizedWeight

_log = logging.getLogger("w4gemm")

_FEW = (1, 2, 4)
_TILES = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
BOUNDS = (*_FEW, *_TILES, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 4096, 8192)
"""Last m of every interval but the last: where one tile is full, from 256 on where about so many waves of tiles are;
before the first, those that sm90_decode is compiled for besides."""
_LARGEST = 16384
"""The m that stands for the last interval."""


@dataclass(frozen=True)
class Plan:
    """What runs a problem: a kernel, its config, and its compiled form (None if there is nothing to compile)."""

    kernel: Kernel
    config: GemmConfig
    compiled: Any
    problem: GemmProblem
    """Of the interval: every field but m is that of the calls it serves, and gathered, see :func:`as_run`."""
    source: str = "forced"
    """Where the choice came from: forced, tuned, shipped or heuristic."""

    @functools.cached_property
    def launch(self) -> Callable[[Operands], None]:
        """As the kernel's ``launcher`` gives it; where the kernel gathers no rows, they are gathered first."""
        launch = self.kernel.launcher(self.compiled, self.problem, self.config)
        if self.problem.experts and not self.problem.gathered:
            return lambda operands: launch(operands.gathered_first())
        return launch

    def __str__(self) -> str:
        return f"{self.kernel.name}/{self.config}"


class _NamedPlan(Plan):
    """A plan whose launches show in a profiler as NVTX ranges, by its name."""

    @functools.cached_property
    def launch(self) -> Callable[[Operands], None]:
        launch = super().launch

        def named(operands: Operands) -> None:
            with torch.cuda.nvtx.range(f"w4gemm {self}"):
                launch(operands)

        return named


class Call(NamedTuple):
    """All that a plan depends on, cheap to build and to look up."""

    interval: int
    """Index into ``BOUNDS`` as :func:`interval` gives."""
    n: int
    k: int
    dtype: torch.dtype
    format: WeightFormat
    layout: str
    epilogue: Epilogue
    device: torch.device
    config: str
    """A forced config as :func:`plan` takes it, or the empty string."""
    batch_invariant: bool = False
    experts: int = 0
    """Of a grouped problem, whose interval is that of the tokens an expert has on average."""
    gathered: bool = False


def call_of(
    w: QuantizedWeight,
    m: int,
    dtype: torch.dtype,
    epilogue: Epilogue = PLAIN,
    batch_invariant: bool = False,
    gathered: bool = False,
) -> Call:
    """What the plan for m rows of x, of all experts together, beside a weight is looked up by; nothing is forced."""
    each = interval(-(-m // max(1, w.experts)))
    rest = (epilogue, w.device, "", batch_invariant, w.experts, gathered)
    return Call(each, w.n, w.k, dtype, w.format, w.layout, *rest)


def interval(m: int) -> int:
    """The index of m's interval: 0 for m = 1, 1 for m = 2, 2 for m <= 4, ..."""
    return bisect.bisect_left(BOUNDS, m)


def interval_of(m: int) -> tuple[int, int | None]:
    """First and last m of m's interval; None for no end."""
    i = interval(m)
    return (BOUNDS[i - 1] + 1 if i else 1), (BOUNDS[i] if i < len(BOUNDS) else None)


def span(first: int, last: int | None) -> str:
    """An interval in words, as :func:`interval_of` gives it."""
    return f"m {first}" if first == last else f"m {first} to {last}" if last else f"m from {first}"


def representative(m: int) -> int:
    """The m that stands for m's interval."""
    return _last(interval(m))


def _last(index: int) -> int:
    """The last m of an interval, or what stands for one without end."""
    return BOUNDS[index] if index < len(BOUNDS) else _LARGEST


_plans: dict[Call, Plan] = {}
_tuner: Callable[[GemmProblem], None] | None = None


def plan_for(call: Call) -> Plan:
    """The plan for every problem that looks like ``call``; resolved once. Errors as :func:`plan`."""
    found = _plans.get(call)
    if found is None:
        interval, n, k, dtype, format, layout, epilogue, device, config, invariant, experts, gathered = call
        m = _last(interval) * max(1, experts)
        of = (Device.of(device), invariant, experts, gathered)
        problem = GemmProblem(m, n, k, dtype, format, layout, epilogue, *of)
        if _tuner is not None and not config and not experts:
            _tuner(problem)
        started = time.perf_counter()
        found = _plans[call] = plan(problem, config or None)
        ms = 1e3 * (time.perf_counter() - started)
        _log.debug("%s: %s (%s), for m up to %d, ready in %.0f ms", problem, found, found.source, m, ms)
    return found


def forget(n: int | None = None, k: int | None = None) -> None:
    """Choose anew from now on, for weights (n, k) or for all: the tables have changed."""
    for call in list(_plans):
        if n is None or (call.n, call.k) == (n, k):
            _plans.pop(call, None)


@contextmanager
def tuning_with(tuner: Callable[[GemmProblem], None]) -> Iterator[None]:
    """Inside, ``tuner`` sees every problem that a plan is chosen for, before; plans so far are chosen anew."""
    global _tuner
    before, _tuner = _tuner, tuner
    forget()
    try:
        yield
    finally:
        _tuner = before


def plan(problem: GemmProblem, config: GemmConfig | str | None = None) -> Plan:
    """Choose a kernel and a config for ``problem`` and compile them.

    Args:
        config: to force one: a config, its string, or ``"<kernel>/<config>"``.

    Raises:
        UnsupportedError: if no kernel (or not the one named) supports the problem; lists each one's reason.
        ValueError: if ``config`` is malformed, names no kernel, is not legal for the problem, or adds up in another
            order than the one for a batch-invariant problem.
    """
    if config is None:
        problem = as_run(problem)
        _require_support(problem, KERNELS)
        kernel, chosen, source = _chosen(problem, _ranked(KERNELS, problem))
    else:
        kernel, chosen = _forced(problem, config)
        source = "forced"
    made = _NamedPlan if environment.nvtx() and problem.device.kind == "cuda" else Plan
    return made(kernel, chosen, compiled(kernel, problem, chosen), problem, source)


def as_run(problem: GemmProblem) -> GemmProblem:
    """``problem``; one whose rows are gathered without that, if it costs less, or is all that can be done, to gather
    them before."""
    if not problem.gathered:
        return problem
    before = replace(problem, gathered=False)
    best = [min((us for us, _, _ in _ranked(KERNELS, p)), default=math.inf) for p in (problem, before)]
    return before if best[1] + copy_us(problem) < best[0] else problem


def configs(problem: GemmProblem) -> list[str]:
    """Every legal config of every kernel that supports ``problem`` as ``"<kernel>/<config>"``, best guess first.

    Raises:
        TypeError, ValueError: for sizes, dtypes, formats and layouts that there are not.
    """
    _check(problem)
    return [f"{kernel.name}/{config}" for _, kernel, config in _ranked(KERNELS, problem)]


def explain(problem: GemmProblem, config: GemmConfig | str | None = None) -> Explanation:
    """What each kernel says about ``problem`` and what would be chosen for its m; compiles nothing.

    Args:
        config: to force one, as for :func:`plan`.

    Raises:
        TypeError, ValueError: as :func:`configs`; and for a forced config, as :func:`plan`.
        UnsupportedError: for a forced config, as :func:`plan`.
    """
    _check(problem)
    asked, problem = problem, as_run(problem) if config is None else problem
    status = {kernel.name: _status(kernel, problem) for kernel in KERNELS}
    ranked_configs = _ranked(KERNELS, problem)
    candidates = tuple(Candidate(us, k.name, c, k.resources(problem, c)) for us, k, c in ranked_configs)
    ranking = tuple((us, k.name, c) for us, k, c in ranked_configs)
    if config is not None:
        kernel, forced = _forced(problem, config)
        return Explanation(problem, status, ranking, candidates, (kernel.name, forced), "forced")
    if not ranking:
        return Explanation(problem, status, ranking, candidates)
    kernel, chosen, source = _chosen(problem, ranked_configs)
    return Explanation(problem, status, ranking, candidates, (kernel.name, chosen), source, asked != problem)


def _check(problem: GemmProblem) -> None:
    problem.check()
    layout_named(problem.layout)


def recorded(problem: GemmProblem) -> tuple[str, store.Record] | None:
    """(``"tuned"`` or ``"shipped"``, record) that decides ``problem``; None if it is left to the heuristic."""
    return _recorded(problem, configs(problem))


def _recorded(problem: GemmProblem, legal: list[str]) -> tuple[str, store.Record] | None:
    last = interval_of(problem.m)[1]
    for source, record in store.find(problem):
        if record.m[1] != last:  # an interval was longer once, and its end says little about tiles for fewer tokens
            continue
        if record.choice in legal and record.revision == kernel_named(record.kernel).revision:
            return source, record
    return None


def _chosen(
    problem: GemmProblem, ranked_configs: list[tuple[float, Kernel, GemmConfig]]
) -> tuple[Kernel, GemmConfig, str]:
    """The kernel, the config, and where the choice came from."""
    named = {f"{kernel.name}/{config}": (kernel, config) for _, kernel, config in ranked_configs}
    found = _recorded(problem, list(named))
    if found is not None:
        source, record = found
        return *named[record.choice], source
    _, kernel, config = ranked_configs[0]
    return kernel, config, "heuristic"


def _ranked(kernels: Iterable[Kernel], problem: GemmProblem) -> list[tuple[float, Kernel, GemmConfig]]:
    """As ``ranked``; for a batch-invariant problem only configs of the one order."""
    found = ranked(kernels, problem)
    if not problem.batch_invariant:
        return found
    order = _invariant_order(replace(problem, m=0))
    return [(us, k, c) for us, k, c in found if order is not None and k.reduction_order(problem, c) == order]


@functools.cache
def _invariant_order(problem: GemmProblem) -> Hashable | None:
    """Of the reduction orders that do not depend on other rows, that with the least geometric mean of predicted times
    over the intervals of m; None if there is none. The intervals up to 8 tokens count as one, as they share tiles."""
    times: dict[Hashable | None, list[float]] = {}
    for m in (*BOUNDS[len(_FEW) :], _LARGEST):
        best: dict[Hashable | None, float] = {}
        for us, kernel, config in ranked(KERNELS, replace(problem, m=m)):
            best.setdefault(kernel.reduction_order(problem, config), us)
        for order, us in best.items():
            times.setdefault(order, []).append(us)
    times.pop(None, None)
    return min(times, key=lambda order: (math.fsum(map(math.log, times[order])), str(order)), default=None)


def _status(kernel: Kernel, problem: GemmProblem) -> Status:
    status = kernel.supports(problem)
    if not status or not problem.batch_invariant:
        return status
    orders = (kernel.reduction_order(problem, config) for config in kernel.configs(problem))
    if any(order is not None for order in orders):
        return status
    return Status.no("the bits of a row depend on the other rows here, whatever the config")


def _require_support(problem: GemmProblem, kernels: tuple[Kernel, ...]) -> None:
    status = [(kernel, _status(kernel, problem)) for kernel in kernels]
    if any(answer for _, answer in status):
        return
    reasons = "".join(f"\n  {kernel.name}: {answer.reason}" for kernel, answer in status)
    native = native_layout(problem.device)
    hint = ""
    if native != problem.layout and any(_status(k, replace(problem, layout=native)) for k in KERNELS):
        hint = f"\nThe weight lies in the {problem.layout} layout; w.repack() gives {native}, which can be run here."
    raise UnsupportedError(
        f"no kernel can run {problem} on {problem.device.name or problem.device.kind}:{reasons}{hint}"
    )


def _forced(problem: GemmProblem, config: GemmConfig | str) -> tuple[Kernel, GemmConfig]:
    """The kernel named in ``config``, or the first that supports the problem and has the config."""
    name, _, text = str(config).rpartition("/")
    wanted = GemmConfig.parse(text)
    candidates = (kernel_named(name),) if name else KERNELS
    _require_support(problem, candidates)
    legal = {f"{k.name}/{c}": (k, c) for _, k, c in _ranked(candidates, problem)}
    for kernel, legal_config in legal.values():
        if legal_config == wanted:
            return kernel, wanted
    nearest = difflib.get_close_matches(str(config), legal, n=4, cutoff=0)
    raise ValueError(f"config: {config} is not legal for {problem}; nearest are {', '.join(nearest)}")
