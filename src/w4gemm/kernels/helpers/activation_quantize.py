"""Host side of the quantization of activations; called by ``w4gemm.api.activations`` and ``w4gemm.api.step``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from w4gemm.core.problem import Device
from w4gemm.jit import Program
from w4gemm.kernels.helpers.base import HALF_KINDS, Helper, LayerFacts, can_run
from w4gemm.kernels.requirements import TARGETS, refusal
from w4gemm.kernels.stand_ins import contiguous, rows

LARGEST = 448.0
"""Largest number of float8_e4m3fn."""
SMALLEST = 2.0**-100
"""Smallest top that a row is scaled by: 448 over it is finite."""
FRONTS = ("", "rms", "silu_mul")
"""Operations on x before it is quantized: none, an RMSNorm, or silu(gate) * up."""
ADD_RMS = "add_rms"
"""A further one: an RMSNorm of x + residual, which is stored too."""
NORMS = ("rms", ADD_RMS)
"""Fronts with an RMSNorm."""

_VECTOR = 8
_MOST_THREADS = 1024
_MOST_CHUNKS = 8
"""Chunks of eight columns that fit the registers of a thread; half as many if the norm's weight or single columns need
registers too."""
_REDUCTION_BYTES = 256
"""Shared memory of the reductions over warps."""


class RowShape(NamedTuple):
    """How a row is divided among threads."""

    threads: int
    """Threads of a CTA, in whole warps."""
    chunks: int
    """Chunks of eight columns of each thread."""


def shape_of(k: int, chunks: int = 4) -> RowShape:
    """Return the shape for rows of k columns, with at least ``chunks`` chunks per thread if the row has as many."""
    vectors = -(-k // _VECTOR)
    threads = min(_MOST_THREADS, 32 * -(-vectors // (32 * chunks)))
    return RowShape(threads, -(-vectors // threads))


@dataclass(frozen=True)
class ActivationQuantize(Helper):
    """Rows of 16-bit x to e4m3 from SM89 on. A row's bits depend neither on m nor on the other rows.

    Args:
        front: one of ``FRONTS`` or ``ADD_RMS``, the latter only if wide.
        wide: True if eight columns are loaded and stored at a time, see :meth:`aligned`.
        arch: the compiler's target.
    """

    dtype: torch.dtype
    front: str
    wide: bool
    shape: RowShape
    arch: str
    dependent_launch: bool
    """True if the device has programmatic dependent launch."""

    name: ClassVar[str] = "activation_quantize"

    @classmethod
    def of(
        cls, device: Device, dtype: torch.dtype, k: int, front: str, wide: bool, chunks: int = 4
    ) -> ActivationQuantize | None:
        """Return the kernel for rows of k columns; None where it does not run, or if a row does not fit the
        registers of a CTA or the shared memory in which silu_mul stages gates and ups. ``chunks``: see
        :func:`shape_of`."""
        if dtype not in HALF_KINDS or not can_run(refusal(device, (8, 9))) or (front == ADD_RMS and not wide):
            return None
        helper = cls(dtype, front, wide, shape_of(k, chunks), TARGETS[device.capability], device.capability >= (9, 0))
        most = _MOST_CHUNKS if wide and front not in NORMS else _MOST_CHUNKS // 2
        fits = helper.shape.chunks <= most and helper.staged_bytes + _REDUCTION_BYTES <= device.shared_memory
        return helper if fits else None

    @classmethod
    def forms(cls, layer: LayerFacts) -> Iterable[tuple[Any, ...]]:
        wide = layer.k % _VECTOR == 0
        return [(layer.dtype, layer.k, front, wide) for front in FRONTS if layer.fp8]

    @staticmethod
    def aligned(x: torch.Tensor, weight: torch.Tensor | None, k: int) -> bool:
        """True if 16 bytes of a row of x and of the weight can be loaded, and 8 bytes of a row of x8 stored, at a
        time."""
        address = x.data_ptr() | (0 if weight is None else weight.data_ptr())
        return k % _VECTOR == 0 and x.stride(0) % _VECTOR == 0 and address % 16 == 0

    @property
    def staged_bytes(self) -> int:
        """Shared memory for a row of x."""
        staged = self.front == "silu_mul" and self.wide
        return 2 * self.shape.threads * self.shape.chunks * _VECTOR * 2 if staged else 0

    def target(self) -> str:
        return self.arch

    def program(self) -> Program:
        import cutlass.cute as cute

        from w4gemm.kernels.helpers.device.activation_quantize import ActivationQuantizeKernel

        vector = _VECTOR if self.wide else 1
        m, k = cute.sym_int(), cute.sym_int(divisibility=vector)
        x = rows(self.dtype, m, cute.sym_int(), step=vector)
        weight = contiguous(self.dtype, k, align=2 * vector) if self.front in NORMS else None
        adds = self.front == ADD_RMS
        residual, total = (contiguous(self.dtype, m, k, align=16) if adds else None for _ in range(2))
        x8, scales = contiguous(torch.uint8, m, k, align=vector), contiguous(torch.float32, m)
        kernel = ActivationQuantizeKernel(
            HALF_KINDS[self.dtype],
            self.front == "silu_mul",
            self.wide,
            *self.shape,
            self.staged_bytes,
            LARGEST,
            SMALLEST,
            self.dependent_launch,
        )
        return Program(kernel, (x, residual, weight, x8, scales, total, 0.0))
