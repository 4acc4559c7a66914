"""vLLM's CUTLASS kernel for experts: e4m3 x, int4 weights with scales in e4m3 and of output channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from bench.peers import vllm_ops
from bench.peers.base import FP8, Tensors, token_scales
from bench.peers.experts.base import Experts, Prepared, Run
from bench.peers.experts.rows import ends_of

from w4gemm.core.formats import WeightFormat

_SIGNS = -0x77777778  # the top bit of each of eight codes: code - 8 as a signed number


class CutlassW4A8(vllm_ops.VllmAdapter):
    name = "cutlass_w4a8"
    operator = "cutlass_w4a8_moe_mm"

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        fits = format.element == "int4" and format.has_channels and format.group_size == 128 and not format.has_zero
        return "" if fits and dtype == FP8 else "e4m3 x and int4_g128_e4m3 only"

    def prepare(self, experts: Experts, dtype: torch.dtype) -> Prepared:
        ops, n, k, count = vllm_ops.operators(), experts.n, experts.k, len(experts.words)
        assert experts.channels is not None
        encoded, strides = ops.cutlass_encode_and_reorder_int4b_grouped(experts.words ^ _SIGNS)
        packed = ops.cutlass_pack_scale_fp8(experts.scales.transpose(1, 2).contiguous())
        scale_strides = torch.zeros(count, 2, dtype=torch.int64, device="cuda")
        scale_strides[:, 0] = n
        of_x, of_out = (torch.full((count,), size, dtype=torch.int64, device="cuda") for size in (k, n))

        def routed(counts: Sequence[int]) -> Run:
            offsets = ends_of(counts, torch.int64, experts.words.device)
            rows = offsets.diff().int()
            problem = torch.stack((rows * 0 + n, rows, rows * 0 + k), 1)

            def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
                w, s, c = tensors
                scale = token_scales()[: len(x), None]
                ops.cutlass_w4a8_moe_mm(
                    out, x, w, scale, c, s, 128, offsets[:-1], problem, of_x, strides, of_out, scale_strides, None
                )
                return out

            return run

        return Prepared((encoded, packed, experts.channels[..., None].contiguous()), routed)


PEER = CutlassW4A8()
