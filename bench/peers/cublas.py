"""cuBLAS through torch: the dequantized weight in 16 bits, or in e4m3 with one scale per row. The time to beat if
bandwidth does not bound."""

from __future__ import annotations

import torch
from bench.peers.base import FP8, Prepared, Tensors, missing_gpu, token_scales

from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight


class Cublas:
    name = "cublas"

    def version(self) -> str:
        return f"torch {torch.__version__}"

    def available(self) -> str:
        return missing_gpu()

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        if (dtype == FP8) != format.has_channels:
            return "e4m3 weights and 16-bit activations, or the other way round"
        return "wants n % 16 == 0 and k % 16 == 0" if dtype == FP8 and (n % 16 or k % 16) else ""

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        if dtype == FP8:
            return prepare_fp8(weight)

        def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, tensors[0].t(), out=out)

        return Prepared((weight.dequantize(dtype),), run)


def prepare_fp8(weight: QuantizedWeight) -> Prepared:
    channels = weight.parts().channels
    assert channels is not None
    w = (weight.dequantize() / channels[:, None]).to(FP8)

    def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        w, channels = tensors
        rows, columns = token_scales()[: len(x), None], channels[None, :]
        return torch._scaled_mm(x, w.t(), rows, columns, out_dtype=out.dtype, use_fast_accum=True, out=out)

    return Prepared((w, channels), run)


PEER = Cublas()
