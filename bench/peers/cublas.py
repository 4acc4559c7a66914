"""cuBLAS through torch: the dequantized weight in 16 bits, the time to beat where bandwidth does not matter."""

from __future__ import annotations

import torch
from bench.peers.base import Prepared, Tensors, missing_gpu

from w4gemm.formats import WeightFormat
from w4gemm.weight import QuantizedWeight


class Cublas:
    name = "cublas"

    def version(self) -> str:
        return f"torch {torch.__version__}"

    def available(self) -> str:
        return missing_gpu()

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        return ""

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor, config: str) -> torch.Tensor:
            return torch.mm(x, tensors[0].t(), out=out)

        return Prepared((weight.dequantize(dtype),), run)


PEER = Cublas()
