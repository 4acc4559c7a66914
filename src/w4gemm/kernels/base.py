"""The interface of a kernel to the rest of the library: :class:`Kernel`.

A kernel is one object in the registry (``w4gemm.kernels``). Everything that it says about a problem is pure and needs
no GPU; only what ``launcher`` gives touches a device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import NO_OPERANDS, EpilogueOperands
from w4gemm.core.problem import GemmProblem
from w4gemm.jit.unit import Unit
from w4gemm.kernels.arguments import NO_ROWS, ExpertRows
from w4gemm.kernels.space import Exclusion


@dataclass(frozen=True)
class Status:
    """True if a kernel can run a problem; if not, why and what would help."""

    ok: bool
    reason: str = ""

    @classmethod
    def no(cls, reason: str) -> Status:
        return cls(False, reason)

    def __bool__(self) -> bool:
        return self.ok


OK = Status(True)


class Operands(NamedTuple):
    """Tensors of one launch, already validated; m >= 1. A kernel on a GPU makes its
    :class:`w4gemm.kernels.arguments.Arguments` of them.

    If the problem is grouped, the weight's tensors and the bias have a leading dimension (experts), and rows of out
    that no expert has are not written. If it is gathered, x has any number of rows, and token_scale one for each.
    """

    x: torch.Tensor
    """(m, k), last dimension contiguous."""
    weight: tuple[torch.Tensor, ...]
    """The packed tensors, see the weight's layout."""
    out: torch.Tensor
    """(m, columns), contiguous."""
    epilogue: EpilogueOperands = NO_OPERANDS
    """Exactly the tensors that the problem's epilogue names."""
    rows: ExpertRows = NO_ROWS
    workspace: torch.Tensor | None = None
    """Buffer of ``workspace_bytes`` from the caller; None if the launch allocates it."""

    def gathered_first(self) -> Operands:
        """Return the same operands without indices: PyTorch copies the rows of x and their scales first."""
        indices = self.rows.indices
        if indices is None:
            return self
        scales = {name: getattr(self.epilogue, name) for name in ("token_scale", "block_scale")}
        own = {name: t.index_select(0, indices) for name, t in scales.items() if t is not None}
        epilogue = self.epilogue._replace(**own)
        rows = self.rows._replace(indices=None)
        return self._replace(x=selected(self.x, 0, indices), epilogue=epilogue, rows=rows)


def selected(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Return ``x.index_select(dim, index)``, for x of any fp8 dtype too."""
    if x.element_size() > 1:
        return x.index_select(dim, index)
    return x.view(torch.uint8).index_select(dim, index).view(x.dtype)


class Resources(NamedTuple):
    """Resources of a launch, for display; None if a field does not apply."""

    memory: int
    """Bytes of shared memory per CTA; on the CPU bytes of temporary memory."""
    ctas: int | None = None
    """Output tiles x split_k: the CTAs of the launch, or the tiles of a persistent one."""
    waves: float | None = None
    """CTAs / number of CTAs that the device holds at once."""
    threads: int | None = None
    """Threads per CTA."""
    registers: int | None = None
    """Registers that a consumer thread may use."""
    stages: int | None = None
    """Stages of the pipeline."""
    method: str | None = None
    """Name of the way to compute, where a kernel has several."""


class Kernel(Protocol):
    """One way to compute a :class:`GemmProblem`: which problems, with which configs, adding in which order, and the
    launch. How long it takes is for :mod:`w4gemm.choice.cost` to say."""

    name: str
    revision: int
    """Raised with a change after which earlier measured times say little of which config is fastest: tuned records of
    other revisions are passed over. ``tests/test_revisions.py`` notices a change of the sources that it stands for."""

    def supports(self, problem: GemmProblem) -> Status:
        """Return the correctness limits: what must hold for any config to give the right result."""
        ...

    def configs(self, problem: GemmProblem) -> list[GemmConfig]:
        """Return every legal config; the one statement of legality."""
        ...

    def exclusions(self, problem: GemmProblem, config: GemmConfig) -> list[Exclusion]:
        """Return every rule that excludes ``config``; none if it is one of :meth:`configs`."""
        ...

    def reduction_order(self, problem: GemmProblem, config: GemmConfig) -> Hashable | None:
        """Return the order in which a result's products are added, for ``batch_invariant``: configs of equal orders
        give equal bits, for any m and whatever the other rows hold. None if a row's bits depend on the other rows."""
        ...

    def workspace_bytes(self, problem: GemmProblem, config: GemmConfig) -> int:
        """Bytes of device memory that a launch needs besides its operands. The first ``workspace.FLAG_BYTES`` of a
        caller's buffer are zero before the first launch, and again after each."""
        ...

    def resources(self, problem: GemmProblem, config: GemmConfig) -> Resources:
        """Return the resources of a launch."""
        ...

    def unit(self, problem: GemmProblem, config: GemmConfig) -> Unit | None:
        """Return the unit that ``launcher`` launches; None if nothing is compiled. Valid for all m, n and k."""
        ...

    def launcher(self, compiled: Any, problem: GemmProblem, config: GemmConfig) -> Callable[[Operands], None]:
        """Return the launch: it computes ``operands.out`` on the current stream of its device, the current one, without
        synchronizing or allocating anything that outlives the call, but for flags (kernels/workspace.py). Made once a
        plan, so that a launch only passes on its operands."""
        ...
