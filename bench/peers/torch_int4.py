"""PyTorch's own 4-bit kernel (tinygemm), ``aten::_weight_int4pack_mm``."""

from __future__ import annotations

import torch
from bench.peers.base import Prepared, Tensors, missing_gpu, unsupported

from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight

INNER_K_TILES = 8


class TorchInt4:
    name = "torch_int4"

    def version(self) -> str:
        return torch.__version__

    def available(self) -> str:
        return missing_gpu()

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        return unsupported(
            n,
            k,
            format,
            dtype,
            groups=(32, 64, 128, 256),
            dtypes=(torch.bfloat16,),
            n_multiple=8,
            k_multiple=16 * INNER_K_TILES,
        )

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        codes, scales, *_ = weight.parts()
        group = weight.format.group_size
        pairs = (codes[:, 0::2] << 4) | codes[:, 1::2]
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), INNER_K_TILES)
        # w = (u - 8) * scale + zero
        scales_and_zeros = (
            torch.stack((scales, torch.zeros_like(scales)), dim=-1).to(dtype).transpose(0, 1).contiguous()
        )

        def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten._weight_int4pack_mm(x, tensors[0], group, tensors[1])

        return Prepared((packed, scales_and_zeros), run, most_tokens=16)


PEER = TorchInt4()
