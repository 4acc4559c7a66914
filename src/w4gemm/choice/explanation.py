"""The config that runs a problem, and why: :func:`explain`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from w4gemm.choice import choose
from w4gemm.choice.cost import unmeasured
from w4gemm.choice.intervals import representative_rows
from w4gemm.choice.invariance import legal_ranked, status_of
from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels import KERNELS, Resources, Status, kernel_named

_COLUMNS = ("#", "us", "score", "kernel/config", "CTAs", "waves", "threads", "registers", "shared", "stages")


class ChosenConfig(NamedTuple):
    """A config and the name of its kernel. ``str`` is ``"<kernel>/<config>"``, as ``linear(..., config=)`` takes it."""

    kernel: str
    config: GemmConfig

    def __str__(self) -> str:
        return f"{self.kernel}/{self.config}"


class Candidate(NamedTuple):
    """A config that can run the problem."""

    us: float
    """Predicted microseconds per launch."""
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
    candidates: tuple[Candidate, ...] = ()
    """Every config that can run the problem, least predicted time first."""
    chosen: ChosenConfig | None = None
    """The kernel and config that run; None if no kernel supports the problem."""
    source: str = ""
    """Where the choice came from: forced, tuned, shipped or heuristic."""
    copied: bool = False
    """True if rows of x are copied first, although the problem asked the kernel to gather them."""

    def __str__(self) -> str:
        lines = [str(self.problem)]
        for name, status in self.status.items():
            count = sum(candidate.kernel == name for candidate in self.candidates)
            configs = f"{count} config" if count == 1 else f"{count} configs"
            lines.append(f"  {name}: {configs if status else status.reason}")
        if self.chosen is not None:
            lines.append(f"  chosen: {self.chosen} ({self.source}{', of a copy of the rows' * self.copied})")
        if self.candidates and (basis := unmeasured(self.problem.device)):
            lines.append(f"  predicted by: {basis}")
        return "\n".join(lines)

    def table(self, rows: int | None = None) -> str:
        """Return a table of the configs, least predicted time first; ``*`` marks the chosen one.

        The columns are the predicted microseconds, the score (least prediction / this prediction), the config, the
        CTAs of a launch, the waves they make, threads per CTA, registers per thread of a consumer warpgroup, shared
        memory per CTA and stages of the pipeline.

        Args:
            rows: the largest number of configs, besides the chosen one; None for all.
        """
        if not self.candidates:
            return ""
        best = self.candidates[0].us
        lines: list[tuple[str, ...]] = [_COLUMNS]
        for number, candidate in enumerate(self.candidates, 1):
            chosen = (candidate.kernel, candidate.config) == self.chosen
            if rows is not None and number > rows and not chosen:
                continue
            lines.append((f"{'*' if chosen else ''}{number}", *_cells(candidate, best)))
        widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
        return "\n".join(_aligned(line, widths) for line in lines)


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
    choose.check(problem)
    asked, plan_m = problem, representative_rows(problem.m, problem.experts)
    if config is None:
        problem = replace(choose.resolve_gather(replace(problem, m=plan_m)), m=problem.m)
    status = {kernel.name: status_of(kernel, problem) for kernel in KERNELS}
    ranked_configs = legal_ranked(KERNELS, problem)
    candidates = tuple(Candidate(r.us, r.kernel.name, r.config, problem) for r in ranked_configs)
    if config is not None:
        kernel, forced = choose.forced(problem, config)
        return Explanation(problem, status, candidates, ChosenConfig(kernel.name, forced), "forced")
    if not candidates:
        return Explanation(problem, status)
    found = choose.chosen(replace(problem, m=plan_m))
    assert found is not None
    runs = ChosenConfig(found.kernel.name, found.config)
    return Explanation(problem, status, candidates, runs, found.source, asked != problem)


def _aligned(line: tuple[str, ...], widths: list[int]) -> str:
    """Return a line of the table: the config flush left, numbers flush right."""
    left = _COLUMNS.index("kernel/config")
    cells = (c.ljust(w) if i == left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
    return "  ".join(cells)


def _cells(candidate: Candidate, best: float) -> tuple[str, ...]:
    found = candidate.resources
    return (
        f"{candidate.us:.1f}",
        f"{best / candidate.us:.2f}",
        str(candidate),
        *("-" if value is None else str(value) for value in (found.ctas, found.waves, found.threads, found.registers)),
        f"{found.memory / 1024:.0f} KiB",
        "-" if found.stages is None else str(found.stages),
    )
