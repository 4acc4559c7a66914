"""vLLM's CUTLASS W4A8 GEMM for Hopper: e4m3 group scales as part of e4m3 weights; its heuristic chooses."""

from __future__ import annotations

from dataclasses import replace

import torch
from bench.peers import vllm_ops
from bench.peers.base import FP8, Prepared, Tensors, token_scales, unsupported, words_of

from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight


class CutlassW4A8(vllm_ops.VllmAdapter):
    name = "cutlass_w4a8"
    operator = "cutlass_w4a8_mm"

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        if not format.has_channels:
            return "e4m3 scales only"
        plain = replace(format, scale="bf16")
        return unsupported(n, k, plain, dtype, groups=(128,), dtypes=(FP8,), n_multiple=128, k_multiple=256)

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        ops = vllm_ops.operators()
        _, scales, _, channels, *_ = weight.parts()
        assert channels is not None
        words = words_of(weight) ^ -0x77777778  # of each code the highest bit: two's complements
        encoded = ops.cutlass_encode_and_reorder_int4b(words.t())  # (k / 8, n), its columns contiguous
        group_scales = ops.cutlass_pack_scale_fp8(scales.t().contiguous())

        def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            w, s, c = tensors
            return ops.cutlass_w4a8_mm(x, w, s, 128, c, token_scales()[: len(x)], None, None)

        return Prepared((encoded, group_scales, channels), run)


PEER = CutlassW4A8()
