"""``cpu_mixed_gemm``: quantized weights on the CPU with PyTorch's own operators. Two configs, two methods:

tile_m = 1     "sum": each token is a weighted sum of code columns, read straight from the table
               (``cpu`` layout only). Best for a few tokens, where memory traffic is the time.
tile_m > 1     "dense": tile_n output features at a time are dequantized and multiplied with up to tile_m tokens.

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
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels.base import OK, Operands, Resources, Status
from w4gemm.kernels.cpu import kernel
from w4gemm.kernels.space import Exclusion
from w4gemm.packing.layouts import layout_named
from w4gemm.packing.layouts.cpu import TABLE_N, table_bits

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)
_LAYOUTS = ("cpu", "canonical")

_DENSE_TOKENS = 2048
_DENSE_ELEMENTS = 2**20
"""Weights dequantized at a time: 4 MiB of float32, near the size of a core's caches."""


class CpuMixedGemm:
    name = "cpu_mixed_gemm"
    revision = 2

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
        return configs

    def exclusions(self, problem: GemmProblem, config: GemmConfig) -> list[Exclusion]:
        legal = self.configs(problem)
        if config in legal:
            return []
        if config.tile_m == 1 and len(legal) == 1:
            reason = "sums of code columns need a weight in the cpu layout, and a PyTorch with FBGEMM"
            return [Exclusion("impossible", "sum", reason)]
        sizes = f"not one of the two methods' own sizes, {', '.join(map(str, legal))}"
        return [Exclusion("unlisted", "sizes", sizes)]

    def reduction_order(self, problem: GemmProblem, config: GemmConfig) -> Hashable | None:
        """The method "sum" takes token by token; in a matmul a row's bits depend on where among how many it is."""
        return (self.name, config.tile_k) if config.tile_m == 1 else None

    def workspace_bytes(self, problem: GemmProblem, config: GemmConfig) -> int:
        if config.tile_m == 1:
            return 4 * problem.n * -(-problem.k // config.tile_k) + 8 * problem.k * -(-problem.n // TABLE_N)
        return 8 * min(problem.n, config.tile_n) * problem.k

    def resources(self, problem: GemmProblem, config: GemmConfig) -> Resources:
        return Resources(self.workspace_bytes(problem, config))

    def unit(self, problem: GemmProblem, config: GemmConfig) -> None:
        return None

    def launcher(self, compiled: Any, problem: GemmProblem, config: GemmConfig) -> Callable[[Operands], None]:
        return functools.partial(self._launch, problem, config)

    def _launch(self, problem: GemmProblem, config: GemmConfig, operands: Operands) -> None:
        if torch.is_autocast_enabled("cpu"):  # which would cast what is computed in float32 here
            with torch.autocast("cpu", enabled=False):
                return self._launch(problem, config, operands)
        x, weight, out, epilogue, rows, _ = operands.gathered_first()
        if rows.starts is None:
            return self._multiply(problem, config, operands)
        bounds = zip(rows.starts.tolist(), rows.ends.tolist(), strict=True)
        for e, (first, last) in enumerate(bounds):
            r = slice(first, last)
            own = epilogue.of_rows(r).of_expert(operator.itemgetter(e))
            self._multiply(problem, config, Operands(x[r], tuple(t[e] for t in weight), out[r], own))

    def _multiply(self, problem: GemmProblem, config: GemmConfig, operands: Operands) -> None:
        method = kernel.sum_linear if config.tile_m == 1 else kernel.dense_linear
        for first in range(0, operands.x.shape[0], config.tile_m):
            tokens = slice(first, first + config.tile_m)
            x = operands.x[tokens]
            epilogue = operands.epilogue.of_rows(tokens)
            if x.dtype == torch.float8_e4m3fn:
                x = epilogue.scaled_blocks(x.float())
            d = method(x, operands.weight, problem, config)
            if config.tile_m == 1 and not d.isfinite().all():  # its sums may be infinite where no result is
                d = kernel.dense_linear(x, operands.weight, problem, config)
            operands.out[tokens] = problem.epilogue.apply(d, epilogue)


def _summed_together(format: WeightFormat, k: int) -> int:
    """Columns whose codes are summed before the scale is applied: a group, or a part of a long one, since short sums
    run in parallel and round less."""
    length = format.group_length(k)
    if length <= 256:
        return length
    return 256 if format.groups(k) == 1 else kernel.common_part(length)
