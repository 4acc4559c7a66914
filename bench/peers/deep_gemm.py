"""DeepGEMM, just-in-time compiled CUDA C++: e4m3 by e4m3 with scales of blocks, as DeepSeek's checkpoints have them."""

from __future__ import annotations

import torch
from bench.peers.base import FP8, PackageAdapter, Prepared, Tensors, block_scales, float_name

from w4gemm.core.formats import WeightFormat
from w4gemm.jit.toolchain import installed_version
from w4gemm.weights.weight import QuantizedWeight


class DeepGemm(PackageAdapter):
    name = "deep_gemm"
    package, module = "deep-gemm", "deep_gemm"

    def version(self) -> str:
        return installed_version(self.package) or installed_version("sgl-deep-gemm")  # SGLang's build of it

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        if dtype != FP8 or float_name(format) != "fp8_block":
            return "e4m3 by e4m3 with scales of blocks only"
        return "wants n % 64 == 0 and k % 128 == 0" if n % 64 or k % 128 else ""

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        from deep_gemm import fp8_gemm_nt

        codes, scales, *_ = weight.parts()

        def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            fp8_gemm_nt((x, block_scales(*x.shape, 4)), tensors, out)  # aligned to 16 bytes: it copies others
            return out

        return Prepared((codes.view(FP8), scales[::2].contiguous()), run)


PEER = DeepGemm()
