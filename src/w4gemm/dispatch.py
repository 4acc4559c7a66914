"""From a problem to what runs it: :func:`plan` and :func:`plan_for`, which remembers; :func:`explain` says why.

A plan is chosen for an interval of m, as if m were the interval's last value, so a call with another number of tokens
rarely chooses or compiles anything.

A batch-invariant problem is served by configs of one reduction order only, the same for every m: that which costs the
least over all intervals, by the kernels' own predictions.
"""

from __future__ import annotations

import bisect
import difflib
import functools
import logging
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from w4gemm.config import GemmConfig
from w4gemm.epilogue import Epilogue
from w4gemm.errors import UnsupportedError
from w4gemm.formats import WeightFormat
from w4gemm.jit import compiled
from w4gemm.kernels import KERNELS, Kernel, Operands, Status, kernel_named, ranked
from w4gemm.layouts import native_layout
from w4gemm.problem import Device, GemmProblem

_log = logging.getLogger("w4gemm")

BOUNDS = (8, 16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
"""Last m of every interval but the last."""
_LARGEST = 16384
"""The m that stands for the last interval."""


@dataclass(frozen=True)
class Plan:
    """What runs a problem: a kernel, its config, and its compiled form (None if there is nothing to compile)."""

    kernel: Kernel
    config: GemmConfig
    compiled: Any
    problem: GemmProblem
    """Of the interval: every field but m is that of the calls it serves."""

    def launch(self, operands: Operands) -> None:
        self.kernel.launch(self.compiled, self.problem, self.config, operands)

    def __str__(self) -> str:
        return f"{self.kernel.name}/{self.config}"


@dataclass(frozen=True)
class Explanation:
    """Why a problem is run as it is. ``str`` gives it as text."""

    problem: GemmProblem
    status: dict[str, Status]
    """Every kernel's answer."""
    ranking: tuple[tuple[float, str, GemmConfig], ...]
    """(predicted microseconds, kernel, config) of all that can run it, best guess first; the first is chosen."""

    def __str__(self) -> str:
        lines = [str(self.problem)]
        for name, status in self.status.items():
            count = sum(kernel == name for _, kernel, _ in self.ranking)
            lines.append(f"  {name}: {f'{count} configs' if status else status.reason}")
        if self.ranking:
            _, kernel, config = self.ranking[0]
            lines.append(f"  chosen: {kernel}/{config}")
        return "\n".join(lines)


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


def interval(m: int) -> int:
    """The index of m's interval: 0 for m <= 8, 1 for m <= 16, ..."""
    return bisect.bisect_left(BOUNDS, m)


_plans: dict[Call, Plan] = {}


def plan_for(call: Call) -> Plan:
    """The plan for every problem that looks like ``call``; resolved once. Errors as :func:`plan`."""
    found = _plans.get(call)
    if found is None:
        interval, n, k, dtype, format, layout, epilogue, device, config, invariant = call
        m = BOUNDS[interval] if interval < len(BOUNDS) else _LARGEST
        problem = GemmProblem(m, n, k, dtype, format, layout, epilogue, Device.of(device), invariant)
        found = _plans[call] = plan(problem, config or None)
        _log.debug("%s: %s, for m up to %d", problem, found, m)
    return found


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
        _require_support(problem, KERNELS)
        _, kernel, chosen = _ranked(KERNELS, problem)[0]
    else:
        kernel, chosen = _forced(problem, config)
    return Plan(kernel, chosen, compiled(kernel, problem, chosen), problem)


def explain(problem: GemmProblem) -> Explanation:
    """What each kernel says about ``problem`` and what would be chosen; compiles nothing, raises nothing."""
    status = {kernel.name: _status(kernel, problem) for kernel in KERNELS}
    ranking = tuple((us, kernel.name, config) for us, kernel, config in _ranked(KERNELS, problem))
    return Explanation(problem, status, ranking)


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
    over all intervals of m; None if there is none."""
    times: dict[Hashable | None, list[float]] = {}
    for m in (*BOUNDS, _LARGEST):
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
