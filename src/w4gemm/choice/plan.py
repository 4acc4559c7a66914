"""The choice of a kernel and a config for a problem, :func:`choose`, and what runs it, :class:`Plan`.

The choice is, in this order, the config that the caller forces (``forced``), the one that was measured on this machine
(``tuned``), the one that was measured before and comes with the package (``shipped``), or the one of least predicted
time (``heuristic``). A measured config counts only if it is legal today and its kernel has the revision that was
measured. Above 256 tokens the shortlist decides: the measured config is one candidate more, and its predictions are
scaled so that it is the fastest at the m that was measured.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from w4gemm.choice import table
from w4gemm.choice.cost import timers
from w4gemm.choice.cost.constants import copy_us
from w4gemm.choice.model import (
    LARGEST,
    WAVES_FROM,
    interval_end,
    interval_of,
    is_by_waves,
    plan_ms,
    ranked,
    shortlist,
    span,
    status_of,
)
from w4gemm.choice.table import Record
from w4gemm.core import environment
from w4gemm.core.config import GemmConfig
from w4gemm.core.errors import UnsupportedError
from w4gemm.core.problem import GemmProblem
from w4gemm.jit import Unit, compiled
from w4gemm.kernels import KERNELS, Kernel, Operands, kernel_named
from w4gemm.packing.layouts import layout_named, native_layout


@dataclass(frozen=True)
class Plan:
    """A kernel and a config, which run every m of an interval. Nothing is compiled before :attr:`compiled` or
    :attr:`launch` is asked for, or :meth:`ready` called."""

    problem: GemmProblem
    """The problem as it runs, at the interval's last m; ``gathered`` as :func:`resolve_gather` decides."""
    kernel: Kernel
    config: GemmConfig
    source: str = "forced"
    """Where the choice came from: forced, tuned, shipped or heuristic."""

    @property
    def unit(self) -> Unit | None:
        """The unit to compile; None if the kernel has nothing to compile."""
        return self.kernel.unit(self.problem, self.config)

    @functools.cached_property
    def compiled(self) -> Any:
        """The compiled function, loaded from the cache or compiled; None if the kernel has nothing to compile."""
        return None if self.unit is None else compiled(self.unit)

    @functools.cached_property
    def launch(self) -> Callable[[Operands], None]:
        """Launch the plan on operands. If the kernel gathers no rows of x, they are copied first. With W4GEMM_NVTX a
        launch is a range of this name in a profiler."""
        kernel = self.kernel.launcher(self.compiled, self.problem, self.config)
        launch = kernel
        if self.problem.experts and not self.problem.gathered:

            def launch(operands: Operands) -> None:
                kernel(operands.gathered_first())

        if not environment.nvtx() or self.problem.device.kind != "cuda":
            return launch

        def named(operands: Operands) -> None:
            with torch.cuda.nvtx.range(f"w4gemm {self}"):
                launch(operands)

        return named

    def ready(self) -> Plan:
        """Compile the function, or load it from the cache; return the plan."""
        _ = self.compiled
        return self

    def __str__(self) -> str:
        return f"{self.kernel.name}/{self.config}"


def choose(problem: GemmProblem, config: GemmConfig | str | None = None) -> Plan:
    """Choose a kernel and a config for ``problem``, and compile nothing.

    Args:
        config: to force one: a config, its string, or ``"<kernel>/<config>"``.

    Raises:
        UnsupportedError: if no kernel (or not the one named) supports the problem; lists each one's reason.
        ValueError: if ``config`` is malformed, names no kernel, is not legal for the problem, or adds up in another
            order than the one for a batch-invariant problem.
    """
    if config is not None:
        return Plan(problem, *forced(problem, config))
    problem = resolve_gather(problem)
    _require_support(problem, KERNELS)
    plan = best(problem)
    assert plan is not None
    return plan


def resolve_gather(problem: GemmProblem) -> GemmProblem:
    """Return ``problem``, or a gathered problem with ``gathered=False`` if copying the rows first is predicted to be
    faster, in configs of one launch, or is the only supported way."""
    if not problem.gathered:
        return problem
    before = replace(problem, gathered=False)
    read, copied = (
        min((r.us for r in ranked(KERNELS, p) if r.config.tail is None), default=math.inf) for p in (problem, before)
    )
    return before if copied + copy_us(problem) < read else problem


def configs(problem: GemmProblem) -> list[str]:
    """Return every legal config of every kernel that supports ``problem``, as ``"<kernel>/<config>"``, least predicted
    time first. ``linear(..., config=)`` takes such a string. The list is empty if no kernel supports the problem.

    Raises:
        TypeError, ValueError: if a field of the problem is wrong, naming it.

    Examples:
        >>> problem = w4gemm.GemmProblem(16, 4096, 4096, torch.bfloat16, w4gemm.WeightFormat(), "mma16")
        >>> "sm90_decode/16x32x128_1x1x1_coop" in w4gemm.configs(problem)  # needs CuTe DSL, and no GPU
        True
    """
    check(problem)
    return [str(candidate) for candidate in ranked(KERNELS, problem)]


def check(problem: GemmProblem) -> None:
    """Raise TypeError or ValueError, naming the field, unless ``problem`` is one that a kernel could be asked about."""
    if not isinstance(problem, GemmProblem):
        raise TypeError(f"problem: wanted a GemmProblem, got {type(problem).__name__}")
    problem.check()
    layout_named(problem.layout)


def measured_record(problem: GemmProblem) -> tuple[str, Record] | None:
    """Return ``"tuned"`` or ``"shipped"`` and the record that was measured for the interval of ``problem``; None if
    nothing was measured, so that the heuristic decides."""
    return _usable(table.find(problem), problem)


def _usable(records: Iterable[tuple[str, Record]], problem: GemmProblem) -> tuple[str, Record] | None:
    """Return the first of a layer's records that may be used for the problem's m."""
    last = interval_of(problem.m)[1]
    for source, record in records:
        # an interval was longer once, and its end says little about tiles for fewer tokens
        if record.m[1] != last or not record.holds_for(problem.m):
            continue
        legal = _is_legal(replace(problem, m=last or LARGEST), record.choice)
        if legal and record.revision == kernel_named(record.kernel).revision:
            return source, record
    return None


@functools.lru_cache(maxsize=4096)
def _is_legal(problem: GemmProblem, choice: str) -> bool:
    if problem.batch_invariant:
        return choice in configs(problem)
    name, _, text = choice.partition("/")
    kernels = (kernel for kernel in KERNELS if kernel.name == name and kernel.supports(problem))
    return any(not kernel.exclusions(problem, GemmConfig.parse(text)) for kernel in kernels)


def best(problem: GemmProblem) -> Plan | None:
    """Return the plan for ``problem`` as it is, whether or not rows are gathered; None if no kernel supports it."""
    measured = _measured(problem, table.find(problem))
    if is_by_waves(problem):
        return _ranking(problem, measured)(problem.m)
    if measured is not None:
        return measured
    ranking = ranked(KERNELS, problem)
    return Plan(problem, ranking[0].kernel, ranking[0].config, "heuristic") if ranking else None


def _measured(problem: GemmProblem, records: Iterable[tuple[str, Record]]) -> Plan | None:
    first = _usable(records, problem)
    if first is None:
        return None
    source, record = first
    return Plan(problem, kernel_named(record.kernel), GemmConfig.parse(record.config), source)


def _ranking(problem: GemmProblem, measured: Plan | None) -> Callable[[int], Plan | None]:
    """Return the ranking function of the problem's interval: m -> the shortlist's config of least predicted time.

    ``measured``, the fastest at the interval's last m, is a candidate too. If the prediction contradicts the
    measurement, predictions of ``measured`` are scaled so that it is the fastest at the last m. If it is predicted to
    be needless there, it serves no other m.
    """
    candidates = shortlist(problem)
    if not candidates:
        return lambda m: None
    scale, us, last = 1.0, None, interval_end(problem.m)
    if measured is not None:
        us = timers(measured.kernel, problem)(measured.config)
        scale = min(1.0, min(candidate.us(last) for candidate in candidates) / us(last))

    def choice(m: int) -> Plan | None:
        times = [candidate.us(m) for candidate in candidates]
        least = min(times)
        if us is not None and measured is not None and (m == last or 0 < scale * us(m) <= least):
            return replace(measured, problem=replace(problem, m=m))
        fastest = candidates[times.index(least)]
        return Plan(replace(problem, m=m), fastest.kernel, fastest.config, "heuristic")

    return choice


def problems_of_interval(problem: GemmProblem, most: int | None = None) -> list[GemmProblem]:
    """Return one problem for each config that runs some m of the problem's interval, up to ``most``. These configs are
    compiled for the interval. Up to 256 tokens, and for experts, the problem itself is the only one."""
    if not is_by_waves(problem):
        return [problem]
    first, end = interval_of(problem.m)
    end = min(end or LARGEST, most or LARGEST)
    records = table.find(problem)
    rankings: dict[str | None, Callable[[int], Plan | None]] = {}
    problems: dict[str | None, GemmProblem] = {}
    for m in plan_ms(first, max(first, end)):
        there = replace(problem, m=m)
        measured = _measured(there, records)
        name = None if measured is None else f"{measured.source} {measured}"
        if name not in rankings:
            rankings[name] = _ranking(there, measured)
        choice = rankings[name](m)
        problems[None if choice is None else f"{choice.source} {choice}"] = there
    return list(problems.values())


def _require_support(problem: GemmProblem, kernels: tuple[Kernel, ...]) -> None:
    status = [(kernel, status_of(kernel, problem)) for kernel in kernels]
    if any(answer for _, answer in status):
        return
    reasons = "".join(f"\n  {kernel.name}: {answer.reason}" for kernel, answer in status)
    native = native_layout(problem.device)
    hint = ""
    if native != problem.layout and any(status_of(k, replace(problem, layout=native)) for k in KERNELS):
        hint = f"\nThe weight lies in the {problem.layout} layout; w.repack() gives {native}, which can be run here."
    raise UnsupportedError(
        f"no kernel can run {_named(problem)} on {problem.device.name or problem.device.kind}:{reasons}{hint}"
    )


def _named(problem: GemmProblem) -> str:
    """Return the problem in words, with every m that its plan serves, because the caller's m is not known here."""
    if problem.experts or problem.m > WAVES_FROM:
        return str(problem)
    return str(problem).replace(f"m {problem.m},", f"{span(*interval_of(problem.m))},", 1)


def kernels_and_config(config: GemmConfig | str) -> tuple[tuple[Kernel, ...], GemmConfig]:
    """Return the kernel that the config's string names, or all kernels, and the config."""
    name, _, text = str(config).rpartition("/")
    parsed = GemmConfig.parse(text)
    return (kernel_named(name),) if name else KERNELS, parsed


def forced(problem: GemmProblem, config: GemmConfig | str) -> tuple[Kernel, GemmConfig]:
    """Return the kernel named in ``config``, or the first that supports the problem and has the config; and the config.
    Errors are those of :func:`choose`."""
    kernels, parsed = kernels_and_config(config)
    _require_support(problem, kernels)
    legal = ranked(kernels, problem)
    for candidate in legal:
        if candidate.config == parsed:
            return candidate.kernel, parsed
    nearest = difflib.get_close_matches(str(config), list(map(str, legal)), n=4, cutoff=0)
    reasons = [e for k in kernels if status_of(k, problem) for e in k.exclusions(problem, parsed)[:1]]
    reason = f" ({reasons[0]})" if len(reasons) == 1 else ""
    if problem.experts and not problem.gathered:
        in_place = any(r.config == parsed for r in ranked(kernels, replace(problem, gathered=True)))
        reason += ", only where rows of x can be gathered in place" if in_place else ""
    raise ValueError(f"config: {config} is not legal for {_named(problem)}{reason}; nearest are {', '.join(nearest)}")
