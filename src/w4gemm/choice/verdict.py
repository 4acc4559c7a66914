"""Why a config is not legal, or where it ranks: :func:`why`."""

from __future__ import annotations

from dataclasses import dataclass

from w4gemm.choice import choose
from w4gemm.choice.invariance import legal_ranked, status_of
from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels import KERNELS, kernel_named
from w4gemm.kernels.space import Exclusion


@dataclass(frozen=True)
class Verdict:
    """One kernel's answer about a config for a problem. ``str`` gives a line per reason."""

    kernel: str
    config: GemmConfig
    exclusions: tuple[Exclusion, ...] = ()
    """The rules that exclude it, those of correctness first; none if it is legal."""
    unsupported: str = ""
    """Why the kernel cannot run the problem with any config; empty if it can."""
    rank: int = 0
    """From 1 on, by predicted time, among all legal configs of all kernels; 0 if it may not be chosen."""
    of: int = 0
    """Number of those configs."""
    us: float = 0.0
    """Predicted microseconds."""
    best_us: float = 0.0
    """Predicted microseconds of the first."""

    @property
    def legal(self) -> bool:
        return not (self.exclusions or self.unsupported)

    def __str__(self) -> str:
        name = f"{self.kernel}/{self.config}"
        if self.unsupported:
            return f"{name}: the kernel cannot run this: {self.unsupported}"
        if self.exclusions:
            return f"{name}: not legal\n" + "\n".join(f"  {exclusion}" for exclusion in self.exclusions)
        if not self.rank:
            return f"{name}: legal, but it adds up in another order than the one that serves every m"
        place = f"number {self.rank} of {self.of} by predicted time"
        return f"{name}: legal, {place}: {self.us:.1f} us, the first {self.best_us:.1f} us"


def why(problem: GemmProblem, config: GemmConfig | str) -> list[Verdict]:
    """Return each kernel's answer about ``config``: the rules that exclude it, or its rank.

    Args:
        config: a config, its string, or ``"<kernel>/<config>"`` to ask one kernel only.

    Returns:
        A verdict of the kernel that is named, or of every kernel that supports the problem (of all if none does), those
        that can run it first.

    Raises:
        TypeError, ValueError: for a problem that there is not, a config that cannot be read, or an unknown kernel.
    """
    choose.check(problem)
    name, _, text = str(config).rpartition("/")
    wanted = GemmConfig.parse(text)
    kernels = (kernel_named(name),) if name else KERNELS
    supporting = tuple(kernel for kernel in kernels if status_of(kernel, problem))
    ranking = [(us, kernel.name, c) for us, kernel, c in legal_ranked(KERNELS, problem)]
    verdicts = []
    for kernel in supporting or kernels:
        if not (status := status_of(kernel, problem)):
            verdicts.append(Verdict(kernel.name, wanted, unsupported=status.reason))
            continue
        exclusions = tuple(kernel.exclusions(problem, wanted))
        found = [(rank, us) for rank, (us, *which) in enumerate(ranking, 1) if which == [kernel.name, wanted]]
        rank, us = found[0] if found else (0, 0.0)
        verdicts.append(Verdict(kernel.name, wanted, exclusions, "", rank, len(ranking), us, ranking[0][0]))
    return sorted(verdicts, key=lambda verdict: not verdict.legal)
