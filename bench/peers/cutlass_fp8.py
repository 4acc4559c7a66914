"""vLLM's CUTLASS GEMM of e4m3 by e4m3, with scales of rows or of blocks; its heuristic chooses."""

from __future__ import annotations

import torch
from bench.peers import vllm_ops
from bench.peers.base import FP8, Prepared, Tensors, block_scales, float_name, token_scales

from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight


class CutlassFp8(vllm_ops.VllmAdapter):
    name = "cutlass_fp8"
    operator = "cutlass_scaled_mm"

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        if dtype != FP8 or float_name(format) not in ("fp8", "fp8_block"):
            return "e4m3 by e4m3 only"
        return "wants n % 128 == 0 and k % 128 == 0" if n % 128 or k % 128 else ""

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        ops, in_blocks = vllm_ops.operators(), float_name(weight.format) == "fp8_block"
        codes, scales, *_ = weight.parts()
        scales = scales[::2].contiguous() if in_blocks else scales.contiguous()

        def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            w, s = tensors
            x_scales = block_scales(*x.shape) if in_blocks else token_scales()[: len(x), None]
            ops.cutlass_scaled_mm(out, x, w.t(), x_scales, s.t(), None)
            return out

        return Prepared((codes.view(FP8), scales), run)


PEER = CutlassFp8()
