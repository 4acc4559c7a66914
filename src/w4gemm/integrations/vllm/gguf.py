"""Layers, heads and experts of GGUF files: the blocks that vLLM's GGUF plugin loads, packed by w4gemm's own codecs.

That plugin, the package ``vllm_gguf_plugin``, reads the file. A table of token embeddings stays as it is, because its
rows are looked up, also where the model has no other head.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm_gguf_plugin.quantization import GGUFConfig, GGUFLinearMethod

from w4gemm.integrations.engines.gguf import PARAMETERS, gguf_weights
from w4gemm.integrations.vllm import takeover
from w4gemm.integrations.vllm.experts import taken_over
from w4gemm.integrations.vllm.linear_kernel import LinearKernel
from w4gemm.integrations.wrapping import wrap
from w4gemm.weights.weight import QuantizedWeight


def install() -> None:
    """Have the config of vLLM's GGUF plugin give each linear layer and head its method with our kernel, and experts
    ours."""
    wrap(GGUFConfig, "get_quant_method", _method)


def _method(own: Callable[..., Any], config: Any, layer: torch.nn.Module, prefix: str) -> Any:
    method = own(config, layer, prefix)
    embedding = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
    ours = isinstance(method, GGUFLinearMethod) and not embedding
    if ours and not takeover.VLLM.asked(GGUFKernel.kind, takeover.why_not_here):
        GGUFKernel(method, prefix)
    return taken_over(method, layer)


class GGUFKernel(LinearKernel):
    """x @ w.T + bias of a layer, in the place of the methods of vLLM's that load and multiply."""

    kind = "linear layers of GGUF"

    def __init__(self, method: Any, prefix: str) -> None:
        self.method, self.prefix = method, prefix
        self.own = SimpleNamespace(
            process_weights_after_loading=method.process_weights_after_loading, apply_weights=method.apply
        )
        method.process_weights_after_loading, method.apply = self.process_weights_after_loading, self.apply_weights
        self.expect()

    def model_dtype(self, layer: torch.nn.Module) -> torch.dtype:
        dtype: torch.dtype = self.method.params_dtype
        return dtype

    def weight_names(self, layer: torch.nn.Module) -> list[str]:
        return [*PARAMETERS]

    def next_kernel(self) -> Any:
        return self.own

    def weights(self, layer: torch.nn.Module) -> list[QuantizedWeight]:
        return gguf_weights(layer, self.model_dtype(layer), self.prefix)
