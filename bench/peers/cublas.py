"""cuBLAS through torch: the dequantized weight in 16 bits, or in e4m3 with a scale for each row or block. The time to
beat if bandwidth does not bound."""

from __future__ import annotations

import torch
from bench.peers.base import FP8, Prepared, Tensors, block_scales, float_name, missing_gpu, token_scales

from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight


class Cublas:
    name = "cublas"

    def version(self) -> str:
        return f"torch {torch.__version__}"

    def available(self) -> str:
        return missing_gpu()

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        if dtype != FP8:
            return "fp8 activations beside scales of channels" if format.has_channels else ""
        if not format.has_channels and float_name(format) not in ("fp8", "fp8_block"):
            return "16-bit activations beside weights that are not e4m3"
        return "wants n % 16 == 0 and k % 16 == 0" if n % 16 or k % 16 else ""

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        if dtype == FP8:
            return blocks_in_fp8(weight) if float_name(weight.format) == "fp8_block" else rows_in_fp8(weight)

        def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, tensors[0].t(), out=out)

        return Prepared((weight.dequantize(dtype),), run)


def rows_in_fp8(weight: QuantizedWeight) -> Prepared:
    codes, scales, _, channels, *_ = weight.parts()
    if channels is None:
        w, channels = codes.view(FP8), scales[:, 0].contiguous()
    else:
        w = (weight.dequantize() / channels[:, None]).to(FP8)

    def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        w, channels = tensors
        rows, columns = token_scales()[: len(x), None], channels[None, :]
        return torch._scaled_mm(x, w.t(), rows, columns, out_dtype=out.dtype, use_fast_accum=True, out=out)

    return Prepared((w, channels), run)


def blocks_in_fp8(weight: QuantizedWeight) -> Prepared:
    """x with a scale for each 128 columns of a row, the weight with one for each block of 128 x 128. cuBLAS wants k in
    multiples of 512 then, so that four scales of a row of blocks are aligned."""
    codes, scales, *_ = weight.parts()

    def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        w, s = tensors
        return torch._scaled_mm(x, w.t(), block_scales(*x.shape), s.t(), out_dtype=out.dtype, out=out)

    return Prepared((codes.view(FP8), scales[::2].contiguous()), run)


PEER = Cublas()
