"""``cpu_mixed_gemm``: quantized weights on the CPU. Up to six configs, six methods:

tile_m = 1     "sum": each token is a weighted sum of code columns, read straight from the table
               (``cpu`` layout only). Best for a few tokens, where memory traffic is the time.
tile_m = 512   "compiled": machine code that llvmlite (extra ``cpu``) makes for this processor decodes the table and
               multiplies up to tile_m tokens (``cpu`` layout only). Fastest for few tokens, and on many processors for
               all.
tile_m = 768   "pairs": the same with AVX-512's dot products of pairs, for bf16 x and groups of a multiple of 32
               columns, on processors without AMX. Fastest for bf16 x from three tokens on.
tile_m = 1024  "tiles": the same with AMX, for x of any dtype. Fastest for more tokens.
tile_m = 1536  "rounded": "tiles" or "pairs" with the weight's numbers, rounded to bf16, in place of codes, for bf16 x.
               Fastest for many tokens.
tile_m = 2048  "dense": tile_n output features at a time are dequantized and multiplied with up to tile_m tokens by
               PyTorch's matmul.

PyTorch's ``_weight_int4pack_mm_for_cpu`` was tried first: its float32 and float16 versions are scalar loops (PyTorch
2.13, AVX-512, two cores: 12.7 ms for m 1, n = k = 4096, where a dense float32 matmul takes 2.7 ms and "sum" 0.7 to
1.0 ms), its scales must have the dtype of x, which rounds s * (8 - z), and its packed order depends on the CPU.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch

from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import Epilogue, EpilogueOperands
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels.base import OK, Operands, Resources, Status
from w4gemm.kernels.cpu import compiled, kernel, machine, tile_product
from w4gemm.kernels.space import Exclusion
from w4gemm.packing.layouts import layout_named
from w4gemm.packing.layouts.cpu import TABLE_N, table_bits

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)
_LAYOUTS = ("cpu", "canonical")

COMPILED_TOKENS, PAIRS_TOKENS, TILES_TOKENS, ROUNDED_TOKENS = 512, 768, 1024, 1536
_DENSE_TOKENS = 2048
_GROUPS = f"groups of a multiple of {tile_product.STEP} columns"
_AMX = f"llvmlite and AMX, and {_GROUPS}"
METHODS = {
    1: ("sum", "a PyTorch with FBGEMM"),
    COMPILED_TOKENS: ("compiled", machine.NEEDS),
    PAIRS_TOKENS: ("pairs", f"bfloat16 x, llvmlite and AVX512_BF16 without AMX, and {_GROUPS}"),
    TILES_TOKENS: ("tiles", _AMX),
    ROUNDED_TOKENS: ("rounded", f"bfloat16 x, llvmlite and AMX or AVX512_BF16, and {_GROUPS}"),
}
"""Name of each method but "dense", and what it needs, by tile_m."""
_COMPILED = COMPILED_TOKENS, PAIRS_TOKENS, TILES_TOKENS, ROUNDED_TOKENS
_DENSE_ELEMENTS = 2**20
"""Weights dequantized at a time: 4 MiB of float32, near the size of a core's caches."""


class CpuMixedGemm:
    name = "cpu_mixed_gemm"
    revision = 5

    def supports(self, problem: GemmProblem) -> Status:
        if problem.device.kind != "cpu":
            return Status.no(f"runs on the cpu, not on {problem.device.kind}")
        if problem.dtype not in _DTYPES:
            return Status.no(f"wants {', '.join(map(str, _DTYPES))} activations, not {problem.dtype}")
        if problem.layout not in _LAYOUTS:
            return Status.no(f"reads weights in the layouts {', '.join(_LAYOUTS)}, not {problem.layout}")
        if reason := layout_named(problem.layout).supports(problem.format):
            return Status.no(f"cannot take {problem.format}: {reason}")
        return OK

    def configs(self, problem: GemmProblem) -> list[GemmConfig]:
        dense_n = max(TABLE_N, _DENSE_ELEMENTS // problem.k // TABLE_N * TABLE_N)
        configs = [GemmConfig(_DENSE_TOKENS, dense_n, problem.k)]
        if problem.layout == "cpu" and kernel.has_code_sums(table_bits(problem.format)):
            configs.append(GemmConfig(1, TABLE_N, _summed_together(problem.format, problem.k)))
        if problem.layout == "cpu" and machine.is_available():
            group, k = problem.format.group_length(problem.k), problem.k
            panels: dict[int, compiled.PanelLimits] = {}
            if tile_product.holds(problem.format, problem.k):
                if tile_product.is_available():
                    panels[TILES_TOKENS], panels[ROUNDED_TOKENS] = tile_product.panel_limits(True, k)
                elif tile_product.has_pairs():
                    panels[PAIRS_TOKENS], panels[ROUNDED_TOKENS] = tile_product.panel_limits(False, k)
            panels[COMPILED_TOKENS] = compiled.PanelLimits()
            for tokens, most in panels.items():
                if problem.dtype == torch.bfloat16 or tokens not in (PAIRS_TOKENS, ROUNDED_TOKENS):
                    configs.append(GemmConfig(tokens, TABLE_N, compiled.panel_columns(group, k, most)))
        return configs

    def exclusions(self, problem: GemmProblem, config: GemmConfig) -> list[Exclusion]:
        legal = self.configs(problem)
        if config in legal:
            return []
        if config.tile_m in METHODS and config.tile_m not in (c.tile_m for c in legal):
            method, needs = METHODS[config.tile_m]
            return [Exclusion("impossible", method, f"needs a weight in the cpu layout, and {needs}")]
        sizes = f"not one of the methods' own sizes, {', '.join(map(str, legal))}"
        return [Exclusion("unlisted", "sizes", sizes)]

    def reduction_order(self, problem: GemmProblem, config: GemmConfig) -> Hashable | None:
        """Each method but "dense" has an order of its own, "compiled" if it adds up numbers; in a matmul a row's bits
        depend on where among how many it is."""
        return (self.name, config.tile_m, config.tile_k) if config.tile_m in METHODS else None

    def workspace_bytes(self, problem: GemmProblem, config: GemmConfig) -> int:
        if config.tile_m == 1:
            return 4 * problem.n * -(-problem.k // config.tile_k) + 8 * problem.k * -(-problem.n // TABLE_N)
        if config.tile_m in METHODS:
            return 4 * min(problem.m, config.tile_m) * (problem.n + 2 * problem.k)
        return 8 * min(problem.n, config.tile_n) * problem.k

    def resources(self, problem: GemmProblem, config: GemmConfig) -> Resources:
        method = METHODS[config.tile_m][0] if config.tile_m in METHODS else "dense"
        return Resources(self.workspace_bytes(problem, config), method=method)

    def unit(self, problem: GemmProblem, config: GemmConfig) -> None:
        return None

    def launcher(self, _: Any, problem: GemmProblem, config: GemmConfig) -> Callable[[Operands], None]:
        is_bare = problem.epilogue.is_plain and not problem.experts and problem.dtype is not torch.float8_e4m3fn
        return (_BareLaunch if is_bare and config.tile_m in _COMPILED else _Launch)(problem, config)


class _Launch:
    """The launch of a problem by one method."""

    def __init__(self, problem: GemmProblem, config: GemmConfig) -> None:
        self.config, self.tokens, self.epilogue = config, config.tile_m, problem.epilogue
        self.is_plain = self.epilogue.is_plain
        self.is_bias = self.epilogue == Epilogue(bias=True, out_dtype=self.epilogue.out_dtype)
        self.is_invariant = problem.batch_invariant
        self.method: Callable[[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor | None], torch.Tensor]
        if config.tile_m == COMPILED_TOKENS:
            sums_codes = not problem.batch_invariant
            self.method = compiled.CompiledProduct(problem.format, problem.n, problem.k, sums_codes=sums_codes)
        elif config.tile_m in METHODS and config.tile_m > 1:
            kind = tile_product.TileProduct if tile_product.is_available() else tile_product.PairProduct
            self.method = kind(problem.format, problem.n, problem.k, config.tile_m == ROUNDED_TOKENS)
        else:
            self.method = functools.partial(_by_pytorch, problem, config)

    def __call__(self, operands: Operands) -> None:
        if torch.is_autocast_enabled("cpu"):  # which would cast what is computed in float32 here
            with torch.autocast("cpu", enabled=False):
                return self(operands)
        x, weight, out, epilogue, rows, _ = operands
        if rows.starts is None:
            return self.multiply(x, weight, out, epilogue)
        x, weight, out, epilogue, rows, _ = operands.gathered_first()
        bounds = zip(rows.starts.tolist(), rows.ends.tolist(), strict=True)
        for e, (first, last) in enumerate(bounds):
            r = slice(first, last)
            own = epilogue.of_rows(r).of_expert(operator.itemgetter(e))
            self.multiply(x[r], tuple(t[e] for t in weight), out[r], own)

    def multiply(
        self, x: torch.Tensor, weight: tuple[torch.Tensor, ...], out: torch.Tensor, epilogue: EpilogueOperands
    ) -> None:
        """Compute one weight's product, at most ``tokens`` tokens at a time."""
        m = x.shape[0]
        if m == 0:
            return
        if m > self.tokens:
            for first in range(0, m, self.tokens):
                tokens = slice(first, first + self.tokens)
                self.multiply(x[tokens], weight, out[tokens], epilogue.of_rows(tokens))
            return
        if not (x.data_ptr() and weight[0].data_ptr() and weight[1].data_ptr() and out.data_ptr()):
            compiled.refuse_freed(x=x, w=weight, out=out)
        if x.dtype is torch.float8_e4m3fn:
            x = epilogue.scaled_blocks(x.float())
        # no sums in out where a residual may share its memory, or gates halve its columns
        is_sum = self.is_plain or (self.is_bias and out.dtype is torch.float32)
        d = self.method(x, weight, out if is_sum else None)
        if self.is_bias:  # in one operation of PyTorch's, which takes no parameter of an engine's layer as it is
            torch.add(d, epilogue.bias.detach(), out=out)
        elif not self.is_plain:
            # of numbers behind the last whole vector PyTorch computes exp with other bits: each row ends alone then
            step = 1 if self.is_invariant and self.epilogue.activation else m
            for rows in (slice(first, first + step) for first in range(0, m, step)):
                out[rows].copy_(self.epilogue.apply(d[rows], epilogue.of_rows(rows)))
        elif d is not out:
            out.copy_(d)


class _BareLaunch(_Launch):
    """The launch of one weight's product without an epilogue by compiled code, which autocast leaves alone."""

    def __init__(self, problem: GemmProblem, config: GemmConfig) -> None:
        super().__init__(problem, config)
        self.dtype = problem.dtype

    def __call__(self, operands: Operands) -> None:
        self.multiply(operands.x, operands.weight, operands.out, operands.epilogue)

    def direct(self, m: int) -> compiled.Direct | None:
        """Return the launch on contiguous x (..., k) of m rows, the weight's tensors and the result; None if it is no
        single run of compiled code."""
        assert isinstance(self.method, compiled.CompiledProduct)
        return self.method.direct(m, self.dtype)


def _by_pytorch(
    problem: GemmProblem,
    config: GemmConfig,
    x: torch.Tensor,
    weight: tuple[torch.Tensor, ...],
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Return x @ w.T by "dense", or by "sum", unless its sums are infinite, which they may be where no result is."""
    if config.tile_m == 1 and (d := kernel.sum_linear(x, weight, problem, config)).isfinite().all():
        return d
    return kernel.dense_linear(x, weight, problem, config)


def _summed_together(format: WeightFormat, k: int) -> int:
    """Columns whose codes are summed before the scale is applied: a group, or a part of a long one, since short sums
    run in parallel and round less."""
    length = format.group_length(k)
    if length <= 256:
        return length
    return 256 if format.groups(k) == 1 else kernel.common_part(length)
