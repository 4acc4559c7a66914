"""A kernel of ours that leaves a layer to vLLM's own after all: :class:`Fallback`. Importing this imports no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from typing import Any

from w4gemm.integrations.engines.loading import check_loaded, mark
from w4gemm.integrations.vllm import takeover

_made: ContextVar[list[Fallback] | None] = ContextVar("w4gemm_made", default=None)
"""Kernels of the layer that vLLM is making; None where it makes none."""


class Fallback:
    """Our side of a kernel of both. vLLM chooses kernels by a layer's config; only when the weights are loaded do they
    say whether they can be packed, as scales that are not finite cannot."""

    vllm_kernel: Any = None
    """vLLM's own, for a layer that was left to it."""
    is_loaded = True
    """False if vLLM has loaded nothing of the layer."""

    def expect(self) -> None:
        """Announce a kernel that vLLM has made for a layer."""
        takeover.expect(self)
        if (made := _made.get()) is not None:
            made.append(self)

    def parameters(self, layer: Any) -> list[str]:
        """Return the names of the parameters, as vLLM's method makes them, whose numbers are packed."""
        raise NotImplementedError

    def leave(self, layer: Any, kind: str, reason: str) -> None:
        """Have vLLM's own kernel go on with a layer whose parameters are as vLLM loaded them, and log why.

        Args:
            kind: of the layer, as for :meth:`w4gemm.integrations.engines.engine.Engine.refuse`.
        """
        takeover.refuse(kind, reason)
        self.vllm_kernel = self.next_kernel()
        self.vllm_kernel.process_weights_after_loading(layer)
        takeover.WARMUP.settle(self)

    def load_anew(self, layer: Any) -> bool:
        """Have vLLM's own kernel take weights that are loaded anew (``reload_weights``) into a layer that was left to
        it, and return True; False if it was left none. It keeps the layer whatever it holds now, because vLLM copies
        what a kernel makes of new weights into the tensors that it made of the first ones."""
        if self.vllm_kernel is None:
            return False
        self.vllm_kernel.process_weights_after_loading(layer)
        return True

    def next_kernel(self) -> Any:
        """Return the kernel that vLLM would have made without ours; raises ValueError if there is none."""
        raise NotImplementedError


def kernels_made(make: Callable[[], Any]) -> tuple[Any, list[Fallback]]:
    """Return what a function of vLLM's returns, and the kernels of ours that it has made."""
    made: list[Fallback] = []
    token = _made.set(made)
    try:
        return make(), made
    finally:
        _made.reset(token)


def watch(method: Any, kernels: list[Fallback], name: str) -> None:
    """Have a method of vLLM's for a linear layer mark the parameters that a kernel of ours packs, and see afterwards
    that vLLM has loaded them, before the method brings them into another order.

    Args:
        kernels: those of ours that were made together with the method.
        name: of the layer.
    """
    make, process = method.create_weights, method.process_weights_after_loading

    def create_weights(layer: Any, *args: Any, **kwargs: Any) -> None:
        kernels.extend(kernels_made(lambda: make(layer, *args, **kwargs))[1])
        if kernels and not takeover.is_dummy():
            mark(layer, {*kernels[-1].parameters(layer), "qzeros"})

    def process_weights_after_loading(layer: Any) -> None:
        if kernels and kernels[-1].vllm_kernel is None:
            kernels[-1].is_loaded = check_loaded(layer, kernels[-1].parameters(layer), name)
        process(layer)

    method.create_weights, method.process_weights_after_loading = create_weights, process_weights_after_loading


def own_kernels(listed: Iterable[Any], disabled: Collection[str]) -> list[Any]:
    """Return vLLM's own kernels of a list, without those that ``VLLM_DISABLED_KERNELS`` names."""
    return [cls for cls in listed if not issubclass(cls, Fallback) and cls.__name__ not in disabled]
