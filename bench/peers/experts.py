"""Products of several experts by other libraries, for bench.grouped."""

from __future__ import annotations

from collections.abc import Callable

import torch
from bench.peers import vllm_ops
from bench.peers.base import token_scales

Run = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""run(copy of the weight, x, m_offsets, out)."""


def cutlass_grouped(
    words: torch.Tensor, scales: torch.Tensor, channels: torch.Tensor, n: int, k: int, count: int
) -> Run:
    """Return vLLM's kernel. words: int32 (experts, n, k / 8), signed codes. scales: e4m3 (experts, k / 128, n).
    channels: float32 (experts, n)."""
    ops, experts = vllm_ops.operators(), len(words)
    encoded, strides = ops.cutlass_encode_and_reorder_int4b_grouped(words)
    first = (encoded, ops.cutlass_pack_scale_fp8(scales), channels[..., None].contiguous())
    copies = [first, *(tuple(t.clone() for t in first) for _ in range(count - 1))]
    scale_strides = torch.zeros(experts, 2, dtype=torch.int64, device="cuda")
    scale_strides[:, 0] = n
    of_x, of_out = (torch.full((experts,), size, dtype=torch.int64, device="cuda") for size in (k, n))
    last: list[torch.Tensor] = []  # offsets, and (n, rows, k) of each expert, which is not part of what is timed

    def run(copy: int, x: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        w, s, c = copies[copy % count]
        if not last or last[0] is not offsets:
            rows = offsets.diff().int()
            last[:] = offsets, torch.stack((rows * 0 + n, rows, rows * 0 + k), 1)
        problem, scale = last[1], token_scales()[: len(x), None]
        ops.cutlass_w4a8_moe_mm(
            out, x, w, scale, c, s, 128, offsets[:-1], problem, of_x, strides, of_out, scale_strides, None
        )
        return out

    return run


def humming_grouped(
    words: torch.Tensor, scales: torch.Tensor, group_size: int, n: int, k: int, count: int, quantizes: bool
) -> Run:
    """Return Humming's grouped kernel. words: int32 (experts, n, k / 8). scales: bf16 (experts, n, groups). quantizes:
    True to quantize x to e4m3 within the call."""
    from humming.forward import humming_forward
    from humming.layer import HummingLayer

    weight_config = {"dtype": "int4", "group_size": max(0, group_size)}
    inputs = {"dtype": "float8e4m3"} if quantizes else None
    layer = HummingLayer(n, k, weight_config, inputs, num_experts=len(words), torch_dtype=torch.bfloat16).to("cuda")
    layer.load_from_tensors({"weight": words, "weight_scale": scales})
    layer.transform()
    first = (layer.weight.data, layer.weight_scale.data, layer.locks)
    copies = [first, *(tuple(t.clone() for t in first) for _ in range(count - 1))]

    def run(copy: int, x: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        w, s, locks = copies[copy % count]
        grouped = {"gemm_type": "grouped_contiguous"}
        humming_forward(
            layer.humming_config, x, w, s, outputs=out, locks=locks, expert_layout=offsets, compute_config=grouped
        )
        return out

    return run
