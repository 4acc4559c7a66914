"""SGLang as an engine: whether w4gemm takes over layers here, how it hooks methods, and what is ready before it serves.
Importing this imports no SGLang."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from w4gemm.core import environment
from w4gemm.integrations.engines.engine import OFFLOADED, Capability, Engine
from w4gemm.integrations.engines.warmup import Warmup
from w4gemm.weights.weight import QuantizedWeight

SGLANG = Engine(
    name="SGLang",
    variable="W4GEMM_SGLANG",
    switch=environment.sglang,
    logger="sglang.srt.w4gemm",
    distributions=("sglang",),
    group="sglang.srt.plugins",
    plugins="SGLANG_PLUGINS",
    tested=("0.5.23", "0.5.23"),
    folds_scales=False,
)
WARMUP = Warmup(SGLANG)
QUANTIZATION = "sglang.srt.layers.quantization"
"""SGLang's package of quantization methods."""


class Hook(NamedTuple):
    """A function that runs in place of a method of SGLang's."""

    target: str
    """Dotted name of the method."""
    parameters: tuple[str, ...]
    """Names of the first parameters that the method must have."""
    around: Callable[..., Any]
    """Called with the method and what the method is called with."""


def hook(hooks: Sequence[Hook]) -> None:
    """Give hooks to SGLang, which puts them around their methods when all plugins are loaded.

    Raises:
        ImportError, AttributeError: if this SGLang lacks one of the methods, or it takes other parameters. Then none is
            given.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, parameters, _ in hooks:
        found = tuple(inspect.signature(pkgutil.resolve_name(target)).parameters)
        if found[: len(parameters)] != parameters:
            raise AttributeError(f"{target} takes ({', '.join(found)}), wanted ({', '.join(parameters)})")
    for target, _, around in hooks:
        HookRegistry.register(target, around, HookType.AROUND)


def why_not_here(capability: Capability | None, fp8: bool = False) -> str:
    """Return why no layers are taken over of the engine that makes them now, or the empty string.

    Args:
        capability, fp8: as for :meth:`w4gemm.integrations.engines.engine.Engine.why_not_here`.
    """
    return SGLANG.why_not_here(capability, fp8) or (OFFLOADED if _offloads() else "")


def _offloads() -> bool:
    from sglang.srt.runtime_context import get_exec

    settings = get_exec().offload
    return settings.cpu_offload_gb > 0 or settings.offload_group_size > 0


def capability(device: torch.device | None = None) -> Capability | None:
    """Compute capability of a GPU, None for the current one; None if there is none."""
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return None
    return torch.cuda.get_device_capability(device)


def deterministic() -> bool:
    """True if answers must not depend on the batch (``--enable-deterministic-inference``)."""
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().deterministic.enable_deterministic_inference)


def adapters() -> bool:
    """True if LoRA adapters may be loaded (``--enable-lora``)."""
    from sglang.srt.runtime_context import get_lora

    return bool(get_lora().enable_lora)


def load_model(own: Callable[..., Any], self: Any) -> Any:
    """Load a model as SGLang does; then prepare what its layers launch, before SGLang measures its memory and captures
    graphs.

    Raises:
        UnsupportedError: if a kernel cannot be compiled.
    """
    WARMUP.expect(self)
    result = own(self)
    WARMUP.settle(self)
    return result


LOADING = Hook("sglang.srt.model_executor.model_runner.ModelRunner.load_model", ("self",), load_model)


def exchange(layer: torch.nn.Module, old: Sequence[str], name: str, w: QuantizedWeight) -> QuantizedWeight:
    """Remove parameters of a layer and make a weight's tensors its parameters ``name_0``, ...; return that weight.

    Parameters, because SGLang moves, counts and rebalances what a layer's parameters are.
    """
    for each in old:
        if hasattr(layer, each):
            delattr(layer, each)
    parameters = tuple(torch.nn.Parameter(t, requires_grad=False) for t in w.tensors)
    for i, parameter in enumerate(parameters):
        layer.register_parameter(f"{name}_{i}", parameter)
    return replace(w, tensors=parameters)
