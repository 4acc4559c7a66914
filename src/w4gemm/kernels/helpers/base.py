"""The small kernels around the products: :class:`Helper`, :func:`launcher`.

A helper is a frozen dataclass of its compile-time parameters, and no ``Kernel``, because it computes no product.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device
from w4gemm.jit import Program, Unit, compiled
from w4gemm.kernels.requirements import hopper_refusal, missing_for_dsl

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
    format: WeightFormat | None = None
    """Of the weight; None where no helper depends on it."""


@dataclass(frozen=True)
class Helper(ABC):
    """One compiled form of a small kernel, on SM90 unless it says otherwise."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def of(cls, device: Device, *parameters: Any) -> Any:
        """Return the helper for a call, or None where the kernel does not run."""

    @classmethod
    def forms(cls, layer: LayerFacts) -> Iterable[tuple[Any, ...]]:
        """Return the parameters of :meth:`of` of every form that may be launched for a layer, whatever the number of
        tokens; none if the layer's facts do not tell."""
        return ()

    @classmethod
    def needed(cls, device: Device, layer: LayerFacts) -> list[Helper]:
        """Return those forms, as far as they run on a device."""
        return [helper for form in cls.forms(layer) if (helper := cls.of(device, *form)) is not None]

    @staticmethod
    def runs(device: Device) -> bool:
        """True if a device can run it, and the compiler is there."""
        return can_run(hopper_refusal(device))

    def target(self) -> str:
        """Return the compiler's target."""
        return "sm_90a"

    def unit(self) -> Unit:
        """Return the unit to compile."""
        values = (getattr(self, field.name) for field in fields(self))
        key = tuple(str(value) if isinstance(value, torch.dtype) else value for value in values)
        return Unit(self.name, key, self.target(), self.program)

    @abstractmethod
    def program(self) -> Program:
        """Return the kernel with stand-ins for what it is launched with."""


@functools.lru_cache(maxsize=1024)
def launcher(of: Callable[..., Helper | None], device: torch.device, *parameters: Any) -> Callable[..., Any] | None:
    """Return the compiled helper that ``of(device, *parameters)`` describes; None where it does not run. It launches
    on ``device``, which need not be the current one."""
    helper = of(Device.of(device), *parameters)
    if helper is None:
        return None
    run = compiled(helper.unit())
    return run if torch.cuda.device_count() < 2 else functools.partial(_run_on, device, run)


def _run_on(device: torch.device, run: Callable[..., Any], *arguments: Any) -> None:
    with on_device(device):
        run(*arguments)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a ``with`` in which a GPU is the current one: what is launched or captured needs that. Nothing changes
    for a device of another kind."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def can_run(refusal: str) -> bool:
    """True if the device refuses nothing and the compiler is there. refusal: what a kernel's ``refusal`` returned."""
    return not (refusal or missing_for_dsl())
