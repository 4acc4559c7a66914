"""Machete, vLLM's mixed-input GEMM for Hopper: by default as its heuristic chooses, or with a schedule asked for."""

from __future__ import annotations

import torch
from bench.peers import vllm_ops
from bench.peers.base import Prepared, Tensors, group_scales, unsupported, words_of

from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight


class Machete(vllm_ops.VllmAdapter):
    name = "machete"
    operator = "machete_mm"

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        return unsupported(n, k, format, dtype, groups=(-1, 64, 128), n_multiple=128, k_multiple=64, bits=(4, 8))

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        ops, group = vllm_ops.operators(), weight.format.group_size
        kind = vllm_ops.UINT4_MINUS_8 if weight.format.bits == 4 else vllm_ops.UINT8_MINUS_128
        packed = ops.machete_prepack_B(words_of(weight).t(), dtype, kind, dtype)
        scales = group_scales(weight, dtype).t().contiguous()

        def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            b, s = tensors
            return ops.machete_mm(x, b, kind, dtype, s, None, group, None, None, None)

        return Prepared((packed, scales), run)


PEER = Machete()
