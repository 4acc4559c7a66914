"""Why a config is not legal, or where it ranks: :func:`why`."""

from __future__ import annotations

from dataclasses import dataclass

from w4gemm.choice import choose
from w4gemm.choice.invariance import legal_ranked, status_of
from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels import KERNELS
from w4gemm.kernels.space import Exclusion


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
    """Predicted microseconds per launch."""
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
    choose.check(problem)
    kernels, wanted = choose.kernels_and_config(config)
    supporting = tuple(kernel for kernel in kernels if status_of(kernel, problem))
    ranking = legal_ranked(KERNELS, problem)
    verdicts = []
    for kernel in supporting or kernels:
        if not (status := status_of(kernel, problem)):
            verdicts.append(Verdict(kernel.name, wanted, unsupported=status.reason))
            continue
        exclusions = tuple(kernel.exclusions(problem, wanted))
        places = enumerate(ranking, 1)
        found = [(rank, r.us) for rank, r in places if (r.kernel, r.config) == (kernel, wanted)]
        rank, us = found[0] if found else (0, 0.0)
        verdicts.append(Verdict(kernel.name, wanted, exclusions, "", rank, len(ranking), us, ranking[0].us))
    return sorted(verdicts, key=lambda verdict: not verdict.legal)
