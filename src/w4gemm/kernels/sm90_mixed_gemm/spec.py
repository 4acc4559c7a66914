"""Host side of the Hopper kernel: what it supports, its configs, their order, its compiled form, its launch."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch

from w4gemm.config import GemmConfig
from w4gemm.kernels.base import OK, Operands, Program, Status
from w4gemm.kernels.device.requirements import missing_for_dsl
from w4gemm.kernels.sm90_mixed_gemm.heuristic import predicted_time
from w4gemm.kernels.sm90_mixed_gemm.variant import SHARED_MEMORY, Variant
from w4gemm.layouts.sm90 import BLOCK_K, scale_group
from w4gemm.problem import GemmProblem

_KIND = {torch.float16: "f16", torch.bfloat16: "bf16"}
_SCALE_KIND = {"fp16": "f16", "bf16": "bf16"}

_TILE_M = (8, 16, 32, 64, 128, 256)
_TILE_N = (64, 128, 256)
_TILE_K = (128, 256)
_SPLIT_K = (1, 2, 4)
_CLUSTER_N = (1, 2)
_MAX_ACCUMULATORS = {64: 128, 128: 128, 256: 32}
"""Accumulator registers of a thread that leave room for the rest, by tile_n (which fixes the warpgroups)."""


class Sm90MixedGemm:
    """W4A16 on SM90 with TMA and register-sourced WGMMA: any m, n, k, every :class:`WeightFormat`, fp16 and bf16."""

    name = "sm90_mixed_gemm"

    def supports(self, problem: GemmProblem) -> Status:
        device = problem.device
        if device.kind != "cuda" or device.rocm:
            return Status.no(f"needs an NVIDIA GPU of compute capability 9.0, the device is {device.kind}")
        if device.capability != (9, 0):
            have = ".".join(map(str, device.capability))
            return Status.no(
                f"needs compute capability 9.0 (H100, H200, H800, H20) for WGMMA, {device.name or 'this GPU'} has {have}"
            )
        if device.shared_memory < SHARED_MEMORY:
            return Status.no(f"needs {SHARED_MEMORY} bytes of shared memory a CTA, the GPU has {device.shared_memory}")
        if problem.dtype not in _KIND:
            return Status.no(f"needs fp16 or bf16 activations, got {problem.dtype}")
        if problem.layout != "sm90":
            return Status.no(f"reads the sm90 layout, the weight lies in {problem.layout}; call w.repack('sm90')")
        reason = missing_for_dsl(min_driver=(12, 0))
        return Status.no(reason) if reason else OK

    def configs(self, problem: GemmProblem) -> list[GemmConfig]:
        k_blocks = -(-problem.k // BLOCK_K)
        group = scale_group(problem.format)
        return [c for c in _all_configs(problem.format.zero, group) if k_blocks % (c.tile_k // BLOCK_K) == 0]

    def rank(self, problem: GemmProblem, configs: list[GemmConfig]) -> list[GemmConfig]:
        return sorted(configs, key=lambda c: (predicted_time(problem, c), str(c)))

    def workspace_bytes(self, problem: GemmProblem, config: GemmConfig) -> int:
        return 0

    def compile_key(self, problem: GemmProblem, config: GemmConfig) -> Hashable:
        return _variant(problem, config)

    def program(self, problem: GemmProblem, config: GemmConfig) -> Program:
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

        from w4gemm.kernels.sm90_mixed_gemm.kernel import MixedGemm

        variant = _variant(problem, config)
        dtype = {"f16": cutlass.Float16, "bf16": cutlass.BFloat16}[variant.kind]
        m, n, k = cute.sym_int(), cute.sym_int(), cute.sym_int()
        wide = 8 if variant.vector else 1
        x = make_fake_tensor(dtype, (m, k), (cute.sym_int64(divisibility=8), 1), assumed_align=16)
        words = variant.block_bytes // 4
        weight = make_fake_compact_tensor(
            cutlass.Int32, (cute.sym_int(), cute.sym_int(), words), stride_order=(2, 1, 0), assumed_align=128
        )
        out = make_fake_tensor(dtype, (m, n), (cute.sym_int64(divisibility=wide), 1), assumed_align=2 * wide)
        bias = make_fake_compact_tensor(dtype, (n,), assumed_align=2) if variant.bias else None
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return Program(MixedGemm(variant), (x, weight, out, bias, 1, stream), "sm_90a")

    def launch(self, compiled: Any, problem: GemmProblem, config: GemmConfig, operands: Operands) -> None:
        x = _tma_readable(operands.x)
        max_clusters = problem.device.sms // (config.cluster_m * config.cluster_n * config.split_k)
        compiled(x, operands.weight[0], operands.out, operands.bias, max_clusters)


@functools.cache
def _all_configs(zero: str, group: int) -> tuple[GemmConfig, ...]:
    """Every config whose accumulators fit the registers and whose pipeline fits shared memory, at least two deep."""
    found = []
    for tile_n in _TILE_N:
        for tile_m in _TILE_M:
            for tile_k in _TILE_K:
                for cluster_n, split_k in ((1, 1), (2, 1), (1, 2), (1, 4)):
                    config = GemmConfig(tile_m, tile_n, tile_k, cluster_n=cluster_n, split_k=split_k)
                    variant = Variant(config, "bf16", "bf16", zero, group, bias=True, vector=True)
                    if tile_m // 2 > _MAX_ACCUMULATORS[tile_n] or variant.stages < 2:
                        continue
                    if variant.reduction_bytes > variant.stages * variant.stage_bytes:
                        continue
                    found.append(config)
    return tuple(found)


def _variant(problem: GemmProblem, config: GemmConfig) -> Variant:
    return Variant(
        config,
        _KIND[problem.dtype],
        _SCALE_KIND[problem.format.scale],
        problem.format.zero,
        scale_group(problem.format),
        bias=problem.bias,
        vector=problem.n % 8 == 0,
    )


def _tma_readable(x: torch.Tensor) -> torch.Tensor:
    """x itself where TMA can read it (rows at multiples of 16 bytes), else a copy, k padded with zeros."""
    if x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and x.stride(1) == 1:
        return x
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 8)).contiguous()


