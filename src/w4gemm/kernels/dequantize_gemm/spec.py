"""Host side of the kernel for very many tokens: decodes the weight once, into memory, and calls cuBLAS.

A fused kernel decodes every weight anew for each 256 tokens. That takes power, and a chip at its power limit pays for
it with its clock; and where a GPU has no fused kernel for its tensor cores, cuBLAS has one. From some thousands of
tokens on it can cost less to write the dense weight out once: on an H200 where x is in fp8 and k some thousands. With
16-bit x the fused kernels, which take no memory, are as fast there (docs/measured.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch

from w4gemm.core import environment
from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import PLAIN, Epilogue
from w4gemm.core.problem import GemmProblem
from w4gemm.jit.unit import Program, Unit
from w4gemm.kernels import workspace
from w4gemm.kernels.base import OK, Operands, Resources, Status
from w4gemm.kernels.gpu import MOST_GROUP_WORDS, refused_groups
from w4gemm.kernels.requirements import TARGETS, missing_for_dsl, refusal
from w4gemm.kernels.space import Exclusion
from w4gemm.kernels.stand_ins import contiguous
from w4gemm.kernels.variant import GpuVariant
from w4gemm.packing.block import BLOCK_K, BLOCK_N
from w4gemm.packing.codecs import weight_operand
from w4gemm.packing.layouts import layout_named

_FP8 = torch.float8_e4m3fn
_LAYOUTS = {torch.float16: "mma16", torch.bfloat16: "mma16", _FP8: "mma8"}
"""By the dtype of x."""
_TOKENS, _CHUNK_K = 256, 128
"""tile_m and tile_k of its config, which stand for the tiles that cuBLAS chooses."""
_LEAST_FEATURES = 2048
_CTAS_PER_SM = 16


class DequantizeGemm:
    """Any m and k, one weight, 16-bit activations on SM80 and later, e4m3 ones with e4m3 group scales on SM90."""

    name = "dequantize_gemm"
    revision = 1

    def supports(self, problem: GemmProblem) -> Status:
        if reason := refusal(problem.device):
            return Status.no(reason)
        if problem.layout != _LAYOUTS.get(problem.dtype):
            taken = ", ".join(f"{dtype} with {layout}" for dtype, layout in _LAYOUTS.items())
            return Status.no(f"takes {taken}, got {problem.dtype} with {problem.layout}")
        if reason := layout_named(problem.layout).supports(problem.format):
            return Status.no(f"cannot take {problem.format}: {reason}")
        if reason := refused_groups(problem, MOST_GROUP_WORDS):
            return Status.no(reason)
        if problem.experts:
            return Status.no("takes a single weight; how many tokens an expert has, only the device knows")
        if reason := _refused_fp8(problem) if problem.dtype == _FP8 else "":
            return Status.no(reason)
        if problem.dtype != _FP8 and weight_operand(problem.format, problem.dtype).channels:
            return Status.no(f"cannot take {problem.format}: cuBLAS has scales of output channels with fp8 only")
        stored = Epilogue(bias=problem.epilogue.bias, token_scale=problem.epilogue.token_scale)
        if problem.epilogue != stored:
            return Status.no(f"stores {stored} alone, in {stored.result_dtype(problem.dtype)}")
        if not self.configs(problem):
            least = dense_bytes(problem, _LEAST_FEATURES) >> 20
            return Status.no(f"needs {least + 1} MiB of workspace, W4GEMM_WORKSPACE_MIB allows {_limit() >> 20}")
        reason = missing_for_dsl()
        return Status.no(reason) if reason else OK

    def configs(self, problem: GemmProblem) -> list[GemmConfig]:
        """tile_n: the features that are decoded at a time, those whose dense weight fits the workspace."""
        legal: list[GemmConfig] = []
        features = _LEAST_FEATURES
        while not problem.experts and dense_bytes(problem, features) <= _limit():
            legal.append(GemmConfig(_TOKENS, features, _CHUNK_K))
            if features >= problem.n:
                break
            features *= 2
        return legal

    def exclusions(self, problem: GemmProblem, config: GemmConfig) -> list[Exclusion]:
        if config in self.configs(problem):
            return []
        if dense_bytes(problem, config.tile_n) > _limit():
            reason = f"the dense weight of {config.tile_n} features needs more than W4GEMM_WORKSPACE_MIB allows"
            return [Exclusion("impossible", "workspace", reason)]
        sizes = f"tile_n is {_LEAST_FEATURES} times a power of two, up to n; the other sizes are cuBLAS's to choose"
        return [Exclusion("unlisted", "sizes", sizes)]

    def reduction_order(self, problem: GemmProblem, config: GemmConfig) -> Hashable | None:
        """cuBLAS chooses by m."""
        return None

    def workspace_bytes(self, problem: GemmProblem, config: GemmConfig) -> int:
        return workspace.FLAG_BYTES + dense_bytes(problem, config.tile_n)

    def resources(self, problem: GemmProblem, config: GemmConfig) -> Resources:
        return Resources(memory=self._variant(problem).decode_table_bytes)

    def _variant(self, problem: GemmProblem) -> GpuVariant:
        """Return the variant, which depends on the formats of weight and x alone."""
        v: GpuVariant = GpuVariant.of(problem, GemmConfig(_TOKENS, BLOCK_N, BLOCK_K))
        return replace(v, epilogue=PLAIN, vector=True)

    def unit(self, problem: GemmProblem, config: GemmConfig) -> Unit:
        arch = TARGETS[problem.device.capability]
        return Unit(self.name, self._variant(problem), arch, functools.partial(self._program, problem))

    def _program(self, problem: GemmProblem) -> Program:
        import cutlass.cute as cute

        from w4gemm.kernels.dequantize_gemm.kernel import DequantizeKernel

        v = self._variant(problem)
        weight = contiguous(torch.int32, cute.sym_int(), cute.sym_int(), v.block.words, align=16)
        dense = contiguous(torch.int32, cute.sym_int(), cute.sym_int(divisibility=32), align=16)
        return Program(DequantizeKernel(v, problem.device.capability >= (9, 0)), (weight, dense, 1))

    def launcher(self, compiled: Any, problem: GemmProblem, config: GemmConfig) -> Callable[[Operands], None]:
        n, k, tile_n = problem.n, problem.k, config.tile_n
        size, ctas = dense_bytes(problem, tile_n), _CTAS_PER_SM * problem.device.sms

        def launch(operands: Operands) -> None:
            x, weight, out, *_ = operands
            blocks, channels = weight[0], weight[1] if len(weight) > 1 else None
            if operands.workspace is None:
                memory = torch.empty(size, dtype=torch.uint8, device=x.device)
            else:
                memory = workspace.divided(operands.workspace).partials.view(torch.uint8)
            multiply = _multiplier(x, channels, operands.epilogue.bias, operands.epilogue.token_scale)
            for first in range(0, n, tile_n):
                part = blocks[first // BLOCK_N : (first + tile_n) // BLOCK_N]
                shape = part.shape[0] * BLOCK_N, part.shape[1] * BLOCK_K * x.itemsize
                dense = memory[: shape[0] * shape[1]].view(shape)
                compiled(part, dense.view(torch.int32), ctas)
                features = slice(first, min(first + tile_n, n))
                multiply(dense.view(x.dtype)[: features.stop - first, :k], features, out[:, features])

        return launch


def _multiplier(
    x: torch.Tensor, channels: torch.Tensor | None, bias: torch.Tensor | None, token_scale: torch.Tensor | None
) -> Callable[[torch.Tensor, slice, torch.Tensor], None]:
    """Puts what d is of some features, from their dense weight, into their columns of d."""
    if not x.is_contiguous() or x.data_ptr() % 16:  # cuBLAS adds up in an order that depends on where x lies
        x = x.clone(memory_format=torch.contiguous_format)
    rows = token_scale
    if channels is not None and rows is None:
        rows = torch.ones(x.shape[0], dtype=torch.float32, device=x.device)

    def multiply(dense: torch.Tensor, features: slice, d: torch.Tensor) -> None:
        added = None if bias is None else bias[features]
        if channels is not None and rows is not None:
            scales = rows[:, None], channels[None, features]
            torch._scaled_mm(x, dense.t(), *scales, bias=added, out_dtype=d.dtype, use_fast_accum=True, out=d)
        elif added is not None:
            torch.addmm(added, x, dense.t(), out=d)
        else:
            torch.mm(x, dense.t(), out=d)

    return multiply


def _refused_fp8(problem: GemmProblem) -> str:
    if problem.device.capability != (9, 0):
        return "e4m3 activations: seen to work on compute capability 9.0 only"
    if not problem.format.scales_in_weights:
        return f"e4m3 activations want e4m3 group scales (fold_scales), which decode to e4m3; got {problem.format}"
    if problem.n % 16 or problem.k % 16:
        return f"e4m3 activations want n and k as multiples of 16, got {problem.n} and {problem.k}"
    return ""


def _limit() -> int:
    return environment.workspace_mib() << 20


def dense_bytes(problem: GemmProblem, features: int) -> int:
    """Bytes of the dense weight of ``features`` features, at most of all, in whole blocks."""
    rows = -(-min(features, problem.n) // BLOCK_N) * BLOCK_N
    k_blocks = weight_operand(problem.format, problem.dtype).block.blocks_along(problem.k)
    return rows * k_blocks * BLOCK_K * problem.dtype.itemsize
