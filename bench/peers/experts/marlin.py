"""vLLM's Marlin for experts: mma.sync with asynchronous copies, no Hopper instructions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from bench.peers import vllm_ops
from bench.peers.base import Tensors, float_name, unsupported
from bench.peers.experts.base import Experts, Prepared, Run
from bench.peers.experts.rows import block_size, blocks_of
from bench.peers.marlin import microscales, permuted
from torch.nn.functional import pad

from w4gemm.core.formats import WeightFormat

_LOCKS = 4 * 256
"""At least four for each multiprocessor."""


class Marlin(vllm_ops.VllmAdapter):
    name = "marlin"
    operator, library = "moe_wna16_marlin_gemm", vllm_ops.EXPERTS

    def available(self) -> str:
        return vllm_ops.missing("gptq_marlin_repack") or super().available()

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        limits = {"groups": (-1, 32, 64, 128), "n_multiple": 64, "k_multiple": 64}
        return unsupported(n, k, format, dtype, dtypes=(torch.bfloat16,), floats=("mxfp4", "nvfp4"), **limits)

    def prepare(self, experts: Experts, dtype: torch.dtype) -> Prepared:
        device, k, kind = experts.words.device, experts.k, vllm_ops.UINT4_MINUS_8
        n = padded_n(experts.n, k)
        scales, factors = marlin_scales(experts, dtype)
        if factors is not None or float_name(experts.format):
            kind = vllm_ops.E2M1
        locks = torch.zeros(_LOCKS, dtype=torch.int32, device=device)
        gemm = vllm_ops.operators(vllm_ops.EXPERTS).moe_wna16_marlin_gemm

        def routed(counts: Sequence[int]) -> Run:
            total, blocks = sum(counts), blocks_of(counts, block_size(counts), device)
            sizes, weights = (total, n, k), torch.ones(total, device=device)
            wide = None if n == experts.n else torch.full((total, n), torch.nan, dtype=dtype, device=device)

            def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
                b, s, workspace = tensors
                d = out if wide is None else wide
                operands = (x, d, b, None, s, None, factors, None, None, None, workspace)
                rows = (blocks.ids, blocks.experts, blocks.used, weights, blocks.size, 1, False)
                # as vLLM calls it: k whole, no atomic adds, partial sums in float32, its own choice of a config
                gemm(*operands, *rows, kind, *sizes, True, False, True, False, -1, -1, -1)
                return d[:, : experts.n]

            return run

        note = "" if n == experts.n else f"n {n}"
        return Prepared((repacked(experts, n), scales, locks), routed, note=note)


def padded_n(n: int, k: int) -> int:
    """Return the least n that the kernel takes: its tiles are 64 features by 128 columns, or 128 by 64."""
    return n if k % 128 == 0 else -(-n // 128) * 128


def repacked(experts: Experts, n: int) -> torch.Tensor:
    """Return codes in the kernel's order, int32 (experts, k / 16, 2 n)."""
    repack, k = vllm_ops.operators().gptq_marlin_repack, experts.k
    no_perm = torch.empty(0, dtype=torch.int32, device=experts.words.device)
    packed = torch.empty((len(experts.words), k // 16, 2 * n), dtype=torch.int32, device=experts.words.device)
    for words, to in zip(experts.words, packed, strict=True):
        to.copy_(repack(pad(words.t(), (0, n - experts.n)).contiguous(), no_perm, k, n, 4, False))
    return packed


def marlin_scales(experts: Experts, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scales in the kernel's order and dtype (experts, groups, padded n), and the experts' factors, float32
    (experts), for NVFP4."""
    count, _, groups = experts.scales.shape
    n = padded_n(experts.n, experts.k)
    wide = pad(experts.scales.to(dtype).transpose(1, 2), (0, n - experts.n), value=1.0)
    scales, factors = permuted(wide.reshape(count * groups, n), groups > 1), None
    if name := float_name(experts.format):
        scales, power = microscales(scales, name)
        factors = experts.factors() * power if name == "nvfp4" else None
    return scales.view(count, groups, n), factors


PEER = Marlin()
