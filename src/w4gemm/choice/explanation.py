"""Why a config runs a problem (:func:`explain`); why another is not legal, or where it ranks (:func:`why`)."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from w4gemm.choice.cost.constants import unmeasured
from w4gemm.choice.model import plan_rows, ranked, status_of
from w4gemm.choice.plan import best, check, forced, kernels_and_config, resolve_gather
from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels import KERNELS, Resources, Status, kernel_named
from w4gemm.kernels.space import Exclusion

_COLUMNS = ("#", "us", "score", "kernel/config", "CTAs", "waves", "threads", "registers", "shared", "stages")
_CPU_COLUMNS = ("#", "kernel/config", "method", "memory")
"""Predicted times only order a CPU's configs."""


class ChosenConfig(NamedTuple):
    """A config and the name of its kernel. ``str`` is ``"<kernel>/<config>"``, as ``linear(..., config=)`` takes it."""

    kernel: str
    config: GemmConfig

    def __str__(self) -> str:
        return f"{self.kernel}/{self.config}"


class PredictedConfig(NamedTuple):
    """A config that can run the problem, with its predicted time."""

    us: float
    """Predicted microseconds per launch; inf if the config is needless: it has two launches, and the first does
    everything. Needless configs rank last."""
    kernel: str
    config: GemmConfig
    problem: GemmProblem
    """The problem as it runs."""

    @property
    def resources(self) -> Resources:
        """Resources of a launch."""
        return kernel_named(self.kernel).resources(self.problem, self.config)

    def __str__(self) -> str:
        return f"{self.kernel}/{self.config}"


@dataclass(frozen=True)
class Explanation:
    """The config that runs a problem, and why. ``str`` says it in a few lines, :meth:`table` lists every config."""

    problem: GemmProblem
    """The problem as it runs: ``gathered`` is False if the rows of x are copied first."""
    status: dict[str, Status]
    """Each kernel's answer by its name: true if it supports the problem, else its ``reason`` says why not."""
    candidates: tuple[PredictedConfig, ...] = ()
    """Every config that can run the problem, least predicted time first."""
    chosen: ChosenConfig | None = None
    """The kernel and config that run; None if no kernel supports the problem."""
    source: str = ""
    """Where the choice came from: forced, tuned, shipped or heuristic."""
    copied: bool = False
    """True if rows of x are copied first, although the problem asked the kernel to gather them."""

    def __str__(self) -> str:
        lines = [str(self.problem)]
        counts = {name: sum(candidate.kernel == name for candidate in self.candidates) for name in self.status}
        configs = {name: f"{count} config" if count == 1 else f"{count} configs" for name, count in counts.items()}
        lines += answers({name: configs[name] if status else status.reason for name, status in self.status.items()})
        if self.chosen is not None:
            lines.append(f"  chosen: {self.chosen} ({self.source}{', of a copy of the rows' * self.copied})")
        if self.candidates and (basis := unmeasured(self.problem.device)):
            lines.append(f"  predicted by: {basis}")
        return "\n".join(lines)

    def table(self, rows: int | None = None) -> str:
        """Return a table of the configs, least predicted time first; ``*`` marks the chosen one.

        The columns are the predicted microseconds ("needless" for a config of two launches of which the first does
        everything), the score (least prediction / this prediction), the config, the CTAs of a launch, the waves they
        make, threads per CTA, registers per thread of a consumer warpgroup, shared memory per CTA and stages of the
        pipeline. On a CPU they are the config, its method and its temporary memory.

        Args:
            rows: the largest number of configs, besides the chosen one; None for all.
        """
        if not self.candidates:
            return ""
        best, on_cpu = self.candidates[0].us, self.problem.device.kind == "cpu"
        columns = _CPU_COLUMNS if on_cpu else _COLUMNS
        lines: list[tuple[str, ...]] = [columns]
        for number, candidate in enumerate(self.candidates, 1):
            chosen = (candidate.kernel, candidate.config) == self.chosen
            if rows is not None and number > rows and not chosen:
                continue
            cells = _cpu_cells(candidate) if on_cpu else _cells(candidate, best)
            lines.append((f"{'*' if chosen else ''}{number}", *cells))
        widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
        return "\n".join(_aligned(line, widths, columns.index("kernel/config")) for line in lines)


def answers(by_kernel: Mapping[str, str]) -> list[str]:
    """Return a line for each answer, with the names of the neighbouring kernels that give it."""
    groups = itertools.groupby(by_kernel.items(), operator.itemgetter(1))
    return [f"  {', '.join(name for name, _ in group)}: {answer}" for answer, group in groups]


def explain(problem: GemmProblem, config: GemmConfig | str | None = None) -> Explanation:
    """Return which config ``linear`` runs for ``problem`` and why, what each kernel says about it, and every other
    config with its predicted time. Nothing is compiled, and the problem's device need not be there.

    Args:
        problem: the product; its ``device`` is an H200 unless it says another.
        config: explain the call in which this config is forced: a :class:`GemmConfig`, its string, or
            ``"<kernel>/<config>"``. None explains the call without one.

    Raises:
        TypeError, ValueError: if a field of the problem is wrong, or the config malformed or not legal.
        UnsupportedError: if a config is given and no kernel, or not the one named, supports the problem.

    Examples:
        >>> cpu = w4gemm.Device("cpu")
        >>> problem = w4gemm.GemmProblem(4, 512, 1024, torch.float32, w4gemm.WeightFormat(), "cpu", device=cpu)
        >>> kernel, config = w4gemm.explain(problem).chosen
        >>> kernel
        'cpu_mixed_gemm'
    """
    check(problem)
    original, m = problem, plan_rows(problem.m, problem.experts)
    if config is None:
        problem = replace(resolve_gather(replace(problem, m=m)), m=problem.m)
    status = {kernel.name: status_of(kernel, problem) for kernel in KERNELS}
    candidates = tuple(PredictedConfig(r.us, r.kernel.name, r.config, problem) for r in ranked(KERNELS, problem))
    if config is not None:
        kernel, parsed = forced(problem, config)
        return Explanation(problem, status, candidates, ChosenConfig(kernel.name, parsed), "forced")
    if not candidates:
        return Explanation(problem, status)
    choice = best(replace(problem, m=m))
    assert choice is not None
    runs = ChosenConfig(choice.kernel.name, choice.config)
    return Explanation(problem, status, candidates, runs, choice.source, original != problem)


def _aligned(line: tuple[str, ...], widths: list[int], name_column: int) -> str:
    """Return a line of the table: the config flush left, numbers flush right."""
    cells = (c.ljust(w) if i == name_column else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
    return "  ".join(cells)


def _cpu_cells(candidate: PredictedConfig) -> tuple[str, ...]:
    use = candidate.resources
    return str(candidate), use.method or "-", f"{use.memory / 1024:.0f} KiB"


def _cells(candidate: PredictedConfig, best: float) -> tuple[str, ...]:
    use = candidate.resources
    return (
        *((f"{candidate.us:.1f}", f"{best / candidate.us:.2f}") if math.isfinite(candidate.us) else ("needless", "-")),
        str(candidate),
        *("-" if value is None else str(value) for value in (use.ctas, use.waves, use.threads, use.registers)),
        f"{use.memory / 1024:.0f} KiB",
        "-" if use.stages is None else str(use.stages),
    )


# --- one config -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One kernel's answer about a config for a problem. ``str`` says it, a line for each reason."""

    kernel: str
    config: GemmConfig
    exclusions: tuple[Exclusion, ...] = ()
    """The rules that exclude the config, those of correctness first; empty if it is legal."""
    unsupported: str = ""
    """Why the kernel cannot run the problem with any config; the empty string if it can."""
    rank: int = 0
    """Rank by predicted time among all legal configs of all kernels, from 1 on; 0 if the config may not be chosen."""
    of: int = 0
    """Number of legal configs of all kernels."""
    us: float = 0.0
    """Predicted microseconds per launch; inf if the config is needless, see :attr:`PredictedConfig.us`."""
    best_us: float = 0.0
    """Predicted microseconds of the config of rank 1."""

    @property
    def legal(self) -> bool:
        """True if the kernel can run the problem and no rule excludes the config."""
        return not (self.exclusions or self.unsupported)

    def __str__(self) -> str:
        name = f"{self.kernel}/{self.config}"
        if self.unsupported:
            return f"{name}: the kernel cannot run this: {self.unsupported}"
        if self.exclusions:
            return f"{name}: not legal\n" + "\n".join(f"  {exclusion}" for exclusion in self.exclusions)
        if not self.rank:
            return f"{name}: legal, but it adds up in another order than the one that serves every m"
        if math.isinf(self.us):
            return f"{name}: legal, but needless: its first launch computes all features"
        place = f"number {self.rank} of {self.of} by predicted time"
        return f"{name}: legal, {place}: {self.us:.1f} us, the first {self.best_us:.1f} us"


def why(problem: GemmProblem, config: GemmConfig | str) -> list[Verdict]:
    """Return each kernel's answer about ``config`` for ``problem``: the rules that exclude it, or its rank.

    Args:
        config: a config, its string, or ``"<kernel>/<config>"`` to ask one kernel only.

    Returns:
        The verdict of the kernel that is named, or one verdict of each kernel that supports the problem (of every
        kernel if none does). Verdicts of kernels that can run the config come first.

    Raises:
        TypeError, ValueError: if a field of the problem is wrong, the config malformed, or the kernel unknown.
    """
    check(problem)
    kernels, parsed = kernels_and_config(config)
    supporting = tuple(kernel for kernel in kernels if status_of(kernel, problem))
    ranking = ranked(KERNELS, problem)
    verdicts = []
    for kernel in supporting or kernels:
        if not (status := status_of(kernel, problem)):
            verdicts.append(Verdict(kernel.name, parsed, unsupported=status.reason))
            continue
        exclusions = tuple(kernel.exclusions(problem, parsed))
        places = ((rank, r.us) for rank, r in enumerate(ranking, 1) if (r.kernel, r.config) == (kernel, parsed))
        rank, us = next(places, (0, 0.0))
        verdicts.append(Verdict(kernel.name, parsed, exclusions, "", rank, len(ranking), us, ranking[0].us))
    return sorted(verdicts, key=lambda verdict: not verdict.legal)
