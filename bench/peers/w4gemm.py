"""This library, through ``w4gemm.linear``."""

from __future__ import annotations

from dataclasses import replace

import torch
from bench.peers.base import Prepared, Tensors, block_scales, epilogue_of, missing_gpu, token_scales

import w4gemm
from w4gemm import choice
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.packing.layouts import layout_for
from w4gemm.weights.weight import QuantizedWeight


class W4gemm:
    def __init__(self, name: str = "w4gemm", kernel: str = "") -> None:
        """With ``kernel``, the best-ranked config of this kernel is forced."""
        self.name, self._kernel = name, kernel

    def version(self) -> str:
        return w4gemm.__version__

    def available(self) -> str:
        return missing_gpu()

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        device = Device.of(torch.device("cuda"))
        problem = GemmProblem(1, n, k, dtype, format, layout_for(device, format, dtype), device=device)
        status = choice.explain(problem).status
        return "" if any(status.values()) else "; ".join(f"{name}: {s.reason}" for name, s in status.items())

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        device = Device.of(weight.device)
        packed = weight.repack(layout_for(device, weight.format, dtype))
        epilogue = epilogue_of(weight.format, dtype)

        def weight_of(tensors: Tensors) -> QuantizedWeight:
            return replace(packed, tensors=tensors)  # launches something small on a GPU, which a call must not

        def run(w: QuantizedWeight, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            scales = block_scales(*x.shape, 4) if epilogue.block_scale else None  # it copies others
            scales = token_scales()[: len(x)] if epilogue.token_scale else scales
            config = chosen(len(x)) if self._kernel else None
            return w4gemm.linear(x, w, token_scale=scales, out=out, config=config)

        def chosen(m: int) -> str:
            if self._kernel:
                problem = GemmProblem(m, packed.n, packed.k, dtype, packed.format, packed.layout, epilogue, device)
                return next(str(c) for c in choice.explain(problem).candidates if c.kernel == self._kernel)
            return str(choice.plan_for(choice.PlanKey.of(packed.packed, m, dtype, packed.device, epilogue)))

        return Prepared(packed.tensors, run, chosen, weight_of=weight_of)


PEER = W4gemm()
