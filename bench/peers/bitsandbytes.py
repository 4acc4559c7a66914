"""bitsandbytes' product by an NF4 weight, ``matmul_4bit``, as its ``Linear4bit`` calls it for inference.

Up to a number of tokens that depends on the GPU and the layer's shape it has a kernel of its own; for more it
dequantizes the weight to 16 bits and calls torch's linear.
"""

from __future__ import annotations

import torch
from bench.peers.base import PackageAdapter, Prepared, Tensors

from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight

_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


class BitsAndBytes(PackageAdapter):
    name = "bitsandbytes"
    package = module = "bitsandbytes"

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        if dtype not in (torch.bfloat16, torch.float16):
            return f"no activations of {dtype}"
        if format.element != "nf4" or format.scale != "fp32":
            return "NF4 with float32 scales only"
        if format.group_size not in _BLOCKS or k % format.group_size:
            return f"groups of {', '.join(map(str, _BLOCKS))} that divide k only"
        return ""

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        from bitsandbytes import matmul_4bit
        from bitsandbytes.functional import QuantState, get_4bit_type

        codes, scales, *_ = weight.parts()
        packed = (codes[:, 0::2] << 4 | codes[:, 1::2]).reshape(-1, 1)  # (n * k / 2, 1), as quantize_4bit gives it
        shape, group, numbers = (
            torch.Size((weight.n, weight.k)),
            weight.format.group_size,
            get_4bit_type("nf4", codes.device),
        )

        def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            packed, absmax = tensors
            return matmul_4bit(x, packed, QuantState(absmax, shape, numbers, group, "nf4", dtype))

        return Prepared((packed, scales.flatten()), run)


PEER = BitsAndBytes()
