"""This library, through ``w4gemm.linear``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from bench.peers.base import Prepared, Tensors, missing_gpu

import w4gemm
from w4gemm import dispatch
from w4gemm.epilogue import PLAIN
from w4gemm.formats import WeightFormat
from w4gemm.layouts import native_layout
from w4gemm.problem import Device, GemmProblem
from w4gemm.weight import QuantizedWeight


class W4gemm:
    name = "w4gemm"

    def version(self) -> str:
        return w4gemm.__version__

    def available(self) -> str:
        return missing_gpu()

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        device = Device.of(torch.device("cuda"))
        problem = GemmProblem(1, n, k, dtype, format, native_layout(device), device=device)
        status = dispatch.explain(problem).status
        return "" if any(status.values()) else "; ".join(f"{name}: {s.reason}" for name, s in status.items())

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        packed = weight.repack()
        device = Device.of(packed.device)

        def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor, config: str) -> torch.Tensor:
            return w4gemm.linear(x, replace(packed, tensors=tensors), out=out, config=config or None)

        def chosen(m: int) -> str:
            interval = dispatch.interval(m)
            call = dispatch.Call(
                interval, packed.n, packed.k, dtype, packed.format, packed.layout, PLAIN, packed.device, ""
            )
            return str(dispatch.plan_for(call))

        def configs(m: int) -> Sequence[str]:
            problem = GemmProblem(m, packed.n, packed.k, dtype, packed.format, packed.layout, device=device)
            return [f"{kernel}/{config}" for _, kernel, config in dispatch.explain(problem).ranking]

        return Prepared(packed.tensors, run, chosen, configs)


PEER = W4gemm()
