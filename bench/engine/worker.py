"""Code that runs inside vLLM's workers: which kernel each layer got, and a profile of the GPU.

vLLM mixes :class:`Inspection` into its worker (``worker_extension_cls``), and calls its methods by name from the
process that owns the engine, in that process or another, on one GPU or several. Of vLLM it imports one module, to
shorten its start: :func:`skip_router_warmup`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from typing import Any

from bench.engine import trace

EXTENSION = f"{__name__}.Inspection"


def skip_router_warmup() -> None:
    """Let vLLM's engine start without the kernels of four other models' routers. Where ``import cutlass.cute`` works it
    compiles 64 of them, one after the other (``ll_bf16``, vLLM 0.26: 17 s to more than a minute). A model that has one
    of these routers compiles its own kernels when it first calls them, which is before CUDA graphs are captured."""
    try:
        from vllm.model_executor.kernels.linear.cute_dsl.ll_bf16 import ll_bf16_gemm_kernel
    except ImportError:
        return
    ll_bf16_gemm_kernel.warmup = lambda **unused: None


if "vllm" in sys.modules:
    skip_router_warmup()


class Inspection:
    """Methods of a worker; what they return is plain enough for JSON."""

    model_runner: Any

    def inspect_kernels(self) -> dict[str, dict[str, int]]:
        """Return the number of layers by the class that multiplies, for "linear" and "experts"."""
        return kernels_of(self.model_runner.get_model())

    def start_gpu_profile(self) -> None:
        """Record every GPU kernel from now on."""
        from torch.profiler import ProfilerActivity, profile

        self._gpu_profile = profile(activities=[ProfilerActivity.CUDA])
        self._gpu_profile.__enter__()

    def stop_gpu_profile(self, steps: int = 0) -> dict[str, Any]:
        """Return microseconds and launches by kernel, and the microseconds from the first to the end of the last.

        Args:
            steps: count only the last ``steps`` steps; 0 for all.
        """
        import torch

        torch.cuda.synchronize()
        self._gpu_profile.__exit__(None, None, None)
        file = os.path.join(tempfile.mkdtemp(), "trace.json")
        self._gpu_profile.export_chrome_trace(file)
        found = trace.summary(file, steps)
        os.remove(file)
        return found


def kernels_of(model: Any) -> dict[str, dict[str, int]]:
    """Return what :meth:`Inspection.inspect_kernels` does."""
    found: dict[str, dict[str, int]] = {"linear": defaultdict(int), "experts": defaultdict(int)}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is None or type(method).__name__.startswith("Unquantized") or "KVCache" in type(method).__name__:
            continue
        experts = type(module).__name__ == "RoutedExperts" or "MoE" in type(method).__name__
        found["experts" if experts else "linear"][_qualified(_multiplier(module, method))] += 1
    return {kind: dict(classes) for kind, classes in found.items()}


def _multiplier(module: Any, method: Any) -> Any:
    """Return the object that multiplies: of experts the modular kernel's, of a linear layer the scheme's or method's
    kernel; the method itself if it has none."""
    kernel = getattr(method, "moe_kernel", None)
    if kernel is not None:
        kernel = getattr(kernel, "impl", kernel)
        return getattr(kernel, "fused_experts", kernel)
    for owner in (method, getattr(module, "scheme", None)):
        if (kernel := getattr(owner, "kernel", None)) is not None:
            return kernel
    return method


def _qualified(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
