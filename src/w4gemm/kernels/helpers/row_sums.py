"""Host side of the sums of x over scale groups, which float zero points meet: :func:`row_sums`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from w4gemm.core.problem import Device
from w4gemm.jit import Program
from w4gemm.kernels.helpers.base import Helper, LayerFacts, launcher
from w4gemm.kernels.stand_ins import contiguous, rows
from w4gemm.packing.codecs import weight_operand


@dataclass(frozen=True)
class RowSums(Helper):
    """The sums of e4m3 rows over groups of 32, 64 or 128 columns, on SM90."""

    group: int

    name: ClassVar[str] = "row_sums"

    @classmethod
    def of(cls, device: Device, group: int) -> RowSums | None:
        """Return the kernel; None where it does not run."""
        return cls(group) if cls.runs(device) else None

    @classmethod
    def forms(cls, layer: LayerFacts) -> Iterable[tuple[Any, ...]]:
        if not layer.fp8 or layer.format is None or layer.format.zero != "float":
            return ()
        return [(weight_operand(layer.format, torch.float8_e4m3fn).block.scale_group,)]

    def program(self) -> Program:
        import cutlass.cute as cute

        from w4gemm.kernels.helpers.device.row_sums import RowSumsKernel

        x = rows(torch.uint8, cute.sym_int(), cute.sym_int(divisibility=16), step=16)
        sums = contiguous(torch.float32, cute.sym_int(), cute.sym_int(divisibility=4), align=16)
        return Program(RowSumsKernel(self.group), (x, sums))


def row_sums(x: torch.Tensor, group: int) -> torch.Tensor:
    """Return float32 (m, groups): the sums of e4m3 x (m, k) over groups of 32, 64 or 128 columns, of which the last may
    be shorter. Tokens are contiguous, those of a group at a multiple of 16 bytes. k and the rows of x are multiples of
    16 bytes."""
    (m, k), groups = x.shape, -(-x.shape[1] // group)
    sums = torch.empty(groups, -(-m // 4) * 4, dtype=torch.float32, device=x.device)
    if x.device.type != "cuda":
        padded = torch.nn.functional.pad(x.float(), (0, groups * group - k))
        sums[:, :m] = padded.view(m, groups, group).sum(2).T
        return sums.T[:m]
    run = launcher(RowSums.of, x.device, group)
    assert run is not None, "sums of rows are asked for on SM90 alone"
    run(x.view(torch.uint8), sums)
    return sums.T[:m]
