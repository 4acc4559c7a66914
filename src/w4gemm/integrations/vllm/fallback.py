"""A kernel of ours that leaves a layer to vLLM's own after all: :class:`Fallback`. Importing this imports no vLLM."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from w4gemm.integrations.vllm import takeover


class Fallback:
    """Our side of a kernel of both. vLLM chooses kernels by a layer's config; only when the weights are loaded do they
    say whether they can be packed, as scales that are not finite cannot."""

    vllm_kernel: Any = None
    """vLLM's own, for a layer that was left to it."""

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


def own_kernels(listed: Iterable[Any], disabled: Collection[str]) -> list[Any]:
    """Return vLLM's own kernels of a list, without those that ``VLLM_DISABLED_KERNELS`` names."""
    return [cls for cls in listed if not issubclass(cls, Fallback) and cls.__name__ not in disabled]
