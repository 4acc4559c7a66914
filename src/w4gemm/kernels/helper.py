"""The small kernels beside the products: :class:`Helper`, :func:`launcher`.

A helper is a frozen dataclass of its compile-time parameters, and no ``Kernel``, because it computes no product. Its
classmethod ``of(device, ...)`` gives the one for a call, or None where the kernel does not run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from w4gemm.core.problem import Device
from w4gemm.jit import Unit, compiled
from w4gemm.kernels.gpu import MIN_DRIVER, GpuKernel
from w4gemm.kernels.requirements import missing_for_dsl

HALF_KINDS = {torch.float16: "f16", torch.bfloat16: "bf16"}
"""Names in device code of the dtypes that helpers take."""


class LayerFacts(NamedTuple):
    """Facts of a layer that tell a helper all that it may launch for it, so that it can be compiled ahead of time."""

    k: int
    """Input features."""
    dtype: torch.dtype
    """16-bit dtype of the model's activations."""
    fp8: bool = False
    """True if x is quantized."""
    act_order: bool = False
    """True if the weight may have a perm."""
    top_k: int = 0
    """Experts of a token whose results are added up behind the layer; 0 for none."""
    experts: int = 0
    """Experts of the layer."""


class Helper(Protocol):
    """One compiled form of a small kernel."""

    name: ClassVar[str]

    def unit(self) -> Unit:
        """Return what is compiled."""
        ...

    @classmethod
    def needed(cls, device: Device, layer: LayerFacts) -> Iterable[Helper]:
        """Every form that may be launched for a layer on a device, whatever the number of tokens."""
        ...


@functools.lru_cache(maxsize=1024)
def launcher(of: Callable[..., Helper | None], device: torch.device, *parameters: Any) -> Callable[..., Any] | None:
    """Return the compiled helper that ``of(device, *parameters)`` describes; None where it does not run."""
    helper = of(Device.of(device), *parameters)
    return None if helper is None else compiled(helper.unit())


def runs_on(kernel: GpuKernel, device: Device) -> bool:
    """True if a device can run code for the targets of ``kernel``, and the compiler is there."""
    return not (kernel.refusal(device) or missing_for_dsl(MIN_DRIVER))


def half_dtype(kind: str) -> Any:
    """The DSL's dtype of a kind in ``HALF_KINDS``."""
    import cutlass

    return {"f16": cutlass.Float16, "bf16": cutlass.BFloat16}[kind]
