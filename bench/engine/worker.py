"""Code that runs inside vLLM's workers: which kernel each layer got, and which experts a GPU has.

vLLM mixes :class:`Inspection` into its worker (``worker_extension_cls``), and calls its methods by name from the
process that owns the engine, in that process or another, on one GPU or several.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

EXTENSION = f"{__name__}.Inspection"


def skip_router_warmup() -> None:
    """Let vLLM's engine start without kernels of routers (``ll_bf16``). Where ``import cutlass.cute`` works it compiles
    them one after the other: 0.26 64 of four other models (17 s to more than a minute), 0.33 those of the model for 1
    to 16 tokens. A model compiles what it calls when it first does, which is before CUDA graphs are captured."""
    try:
        from vllm.model_executor.kernels.linear.cute_dsl.ll_bf16 import ll_bf16_gemm_kernel
    except ImportError:
        return
    ll_bf16_gemm_kernel.warmup = lambda **unused: None


def inspect_here() -> None:
    """Let vLLM see in this process what a model's class can do. It asks another one, so that CUDA is not initialized
    here, which imports vLLM anew for each engine (17 s)."""
    from vllm.model_executor.models import registry

    def inspected(model: Any) -> Any:
        return registry._ModelInfo.from_model_cls(model.load_model_cls())

    registry._LazyRegisteredModel.inspect_model_cls = inspected


if "vllm" in sys.modules:
    skip_router_warmup()


class Inspection:
    """Methods of a worker; what they return is plain enough for JSON."""

    model_runner: Any

    def inspect_kernels(self) -> dict[str, dict[str, int]]:
        """Return the number of layers by the class that multiplies, for "linear" and "experts"."""
        return kernels_of(self.model_runner.get_model())

    def sum_experts(self) -> list[list[list[int]]]:
        """Return pairs for each layer of experts: an expert that this GPU has, by its number in the checkpoint, and a
        checksum of its weights. Empty unless vLLM moves experts."""
        import torch
        from vllm.distributed import get_ep_group

        state = getattr(self.model_runner, "eplb_state", None)
        if state is None:
            return []
        torch.cuda.synchronize()
        rank, sums = get_ep_group().rank_in_group, []
        for model in state.model_states.values():
            for layer, tensors in enumerate(model.model.expert_weights):
                tensors = list(tensors)
                count = len(tensors[0])
                numbers = model.physical_to_logical_map[layer, rank * count : (rank + 1) * count].tolist()
                sums.append([[number, checksum([t[i] for t in tensors])] for i, number in enumerate(numbers)])
        return sums


def checksum(tensors: Sequence[Any]) -> int:
    """Return a number that all bytes of tensors and their order decide."""
    import torch

    total = 0
    for t in tensors:
        values = t.detach().contiguous().view(-1).view(torch.uint8).to(torch.int64) + 1
        places = torch.arange(1, len(values) + 1, device=values.device)
        total = (total * 1_000_003 + int((values * places).sum())) % 2**61
    return total


def kernels_of(model: Any) -> dict[str, dict[str, int]]:
    """Return what :meth:`Inspection.inspect_kernels` does."""
    counts: dict[str, dict[str, int]] = {"linear": defaultdict(int), "experts": defaultdict(int)}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        dense = any(cls.__name__.startswith("Unquantized") for cls in type(method).__mro__)  # Kimi-K3 has a subclass
        if method is None or dense or "KVCache" in type(method).__name__:
            continue
        if type(module).__name__ == "VocabParallelEmbedding":  # of GGUF: its rows are looked up
            continue
        experts = type(module).__name__ == "RoutedExperts" or "MoE" in type(method).__name__
        counts["experts" if experts else "linear"][_qualified(_multiplier(module, method))] += 1
    return {kind: dict(classes) for kind, classes in counts.items()}


def _multiplier(module: Any, method: Any) -> Any:
    """Return the object that multiplies: of experts the modular kernel's, of a linear layer the scheme's or method's
    kernel; if it has none, the object whose method ``apply`` is, which is the layer's method itself by default."""
    kernel = getattr(method, "moe_kernel", None)
    if kernel is not None:
        kernel = getattr(kernel, "impl", kernel)
        return getattr(kernel, "fused_experts", kernel)
    for owner in (method, getattr(module, "scheme", None)):
        for name in ("kernel", "linear_kernel"):
            if (kernel := getattr(owner, name, None)) is not None:
                return kernel
    return getattr(getattr(method, "apply", None), "__self__", method)


def _qualified(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
