"""Quack's W4A16 GEMM, CuTe DSL too; its configs as its own rules choose them."""

from __future__ import annotations

import torch
from bench.peers.base import Prepared, Tensors, missing_gpu, missing_package, package_version, unsupported

from w4gemm.formats import WeightFormat
from w4gemm.weight import QuantizedWeight


class Quack:
    name = "quack"

    def version(self) -> str:
        return package_version("quack-kernels")

    def available(self) -> str:
        return missing_gpu() or missing_package("quack-kernels", "quack")

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        limits = {"groups": (32, 64, 128), "dtypes": (torch.bfloat16,), "n_multiple": 128, "k_multiple": 64}
        return unsupported(n, k, format, dtype, **limits)  # other n it pads, and then it cannot write to an ``out``

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        from quack.gemm_w4 import gemm_w4a16, prepare_w4_weight

        group = weight.format.group_size
        name = "int4" if group == 128 else f"int4_g{group}"
        codes, scales = weight.repack("canonical").tensors  # two codes a byte, the even column low: as Quack wants
        blob, strip = prepare_w4_weight(codes, scales.to(dtype), wformat=name)

        def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor, config: str) -> torch.Tensor:
            return gemm_w4a16(x, tensors[0], tensors[1], out=out, wformat=name)

        return Prepared((blob, strip), run)


PEER = Quack()
