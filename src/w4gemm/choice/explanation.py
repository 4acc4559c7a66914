"""Why a problem is run as it is: :class:`Explanation`, made by :func:`explain`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from w4gemm.choice import choose
from w4gemm.choice.cost import unmeasured
from w4gemm.choice.intervals import representative_rows
from w4gemm.choice.invariance import legal_ranked, status_of
from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels import KERNELS, Resources, Status

_COLUMNS = ("#", "us", "score", "kernel/config", "CTAs", "waves", "threads", "registers", "shared", "stages")


class Candidate(NamedTuple):
    """One config that can run the problem."""

    us: float
    """Predicted microseconds."""
    kernel: str
    config: GemmConfig
    resources: Resources

    def __str__(self) -> str:
        return f"{self.kernel}/{self.config}"


@dataclass(frozen=True)
class Explanation:
    """Why a problem is run as it is. ``str`` gives it in a few lines, :meth:`table` with every config."""

    problem: GemmProblem
    """The problem as it runs, see :func:`w4gemm.choice.choose.resolve_gather`."""
    status: dict[str, Status]
    """Every kernel's answer."""
    candidates: tuple[Candidate, ...] = ()
    """Every config that can run it, best guess first."""
    chosen: tuple[str, GemmConfig] | None = None
    """(kernel, config) that runs; None if nothing can."""
    source: str = ""
    """Where the choice came from: forced, tuned, shipped or heuristic."""
    copied: bool = False
    """True if rows of x that the kernel was to gather are copied first."""

    @property
    def ranking(self) -> tuple[tuple[float, str, GemmConfig], ...]:
        """(predicted us, kernel, config) of each of the candidates."""
        return tuple((c.us, c.kernel, c.config) for c in self.candidates)

    def __str__(self) -> str:
        lines = [str(self.problem)]
        for name, status in self.status.items():
            count = sum(candidate.kernel == name for candidate in self.candidates)
            configs = f"{count} config" if count == 1 else f"{count} configs"
            lines.append(f"  {name}: {configs if status else status.reason}")
        if self.chosen is not None:
            kernel, config = self.chosen
            lines.append(f"  chosen: {kernel}/{config} ({self.source}{', of a copy of the rows' * self.copied})")
        if self.candidates and (basis := unmeasured(self.problem.device)):
            lines.append(f"  predicted by: {basis}")
        return "\n".join(lines)

    def table(self, rows: int | None = None) -> str:
        """Every config, best guess first: predicted time, score (the best prediction over this one), launch and
        resources. The chosen one is marked with ``*``.

        Args:
            rows: how many at most, besides the chosen one; None for all.
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
    """Return what each kernel says about ``problem`` and what ``linear`` runs for its m, by the plan that serves it.
    Compiles nothing.

    Args:
        config: to force one, as for :func:`w4gemm.choice.plan`.

    Raises:
        TypeError, ValueError: as :func:`configs`; and for a forced config, as :func:`w4gemm.choice.plan`.
        UnsupportedError: for a forced config, as :func:`w4gemm.choice.plan`.

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
    candidates = tuple(Candidate(us, k.name, c, k.resources(problem, c)) for us, k, c in ranked_configs)
    if config is not None:
        kernel, forced = choose.forced(problem, config)
        return Explanation(problem, status, candidates, (kernel.name, forced), "forced")
    if not candidates:
        return Explanation(problem, status)
    found = choose.chosen(replace(problem, m=plan_m))
    assert found is not None
    kernel, chosen, source = found
    return Explanation(problem, status, candidates, (kernel.name, chosen), source, asked != problem)


def _aligned(line: tuple[str, ...], widths: list[int]) -> str:
    """The name of the config to the left, numbers to the right."""
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
