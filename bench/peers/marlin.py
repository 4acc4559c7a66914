"""vLLM's Marlin: mma.sync with asynchronous copies, no Hopper instructions."""

from __future__ import annotations

import torch
from bench.peers import vllm_ops
from bench.peers.base import Prepared, Tensors, gptq_words, unsupported

from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight


class Marlin:
    name = "marlin"

    def version(self) -> str:
        return vllm_ops.version()

    def available(self) -> str:
        return vllm_ops.missing("marlin_gemm")

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        return unsupported(n, k, format, dtype, groups=(-1, 32, 64, 128), n_multiple=64, k_multiple=128)

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        ops, kind = vllm_ops.operators(), vllm_ops.UINT4_MINUS_8
        codes, scales, *_ = weight.parts()
        n, k = weight.n, weight.k
        no_perm = torch.empty(0, dtype=torch.int32, device=codes.device)
        packed = ops.gptq_marlin_repack(gptq_words(codes).t().contiguous(), no_perm, k, n, 4, False)
        sms = torch.cuda.get_device_properties(codes.device).multi_processor_count
        locks = torch.zeros(sms, dtype=torch.int32, device=codes.device)
        group_scales = _permuted(scales.to(dtype).t().contiguous())

        def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            b, s, workspace = tensors
            shape = (x.shape[0], n, k)
            # vLLM's defaults: k whole, no atomic adds, partial sums in float32
            flags = (True, False, True, False)
            return ops.marlin_gemm(x, out, b, None, s, None, None, None, None, None, workspace, kind, *shape, *flags)

        return Prepared((packed, group_scales, locks), run, most_tokens=256)


def _permuted(scales: torch.Tensor) -> torch.Tensor:
    """Permute scales (groups, n) to the order in which Marlin's threads read them."""
    if scales.shape[0] > 1:
        order = [i + 8 * j for i in range(8) for j in range(8)]
    else:
        order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    return scales.reshape(-1, len(order))[:, order].reshape(scales.shape).contiguous()


PEER = Marlin()
