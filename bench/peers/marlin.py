"""vLLM's Marlin: mma.sync with asynchronous copies, no Hopper instructions."""

from __future__ import annotations

import torch
from bench.peers import vllm_ops
from bench.peers.base import Prepared, Tensors, fp4_name, gptq_words, tensor_scale, unsupported

from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight


class Marlin(vllm_ops.VllmAdapter):
    name = "marlin"
    operator = "marlin_gemm"

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        fp4 = ("mxfp4", "nvfp4") if dtype == torch.bfloat16 else ()
        return unsupported(n, k, format, dtype, groups=(-1, 32, 64, 128), n_multiple=64, k_multiple=128, fp4=fp4)

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        ops, kind = vllm_ops.operators(), vllm_ops.UINT4_MINUS_8
        codes, scales, *_ = weight.parts()
        n, k = weight.n, weight.k
        no_perm = torch.empty(0, dtype=torch.int32, device=codes.device)
        packed = ops.gptq_marlin_repack(gptq_words(codes).t().contiguous(), no_perm, k, n, 4, False)
        sms = torch.cuda.get_device_properties(codes.device).multi_processor_count
        locks = torch.zeros(sms, dtype=torch.int32, device=codes.device)
        group_scales, factor = permuted(scales.to(dtype).t().contiguous(), scales.shape[1] > 1), None
        if name := fp4_name(weight.format):
            kind = vllm_ops.E2M1
            group_scales, power = fp4_scales(group_scales, name)
            factor = torch.full((1,), tensor_scale(weight) * power, device=codes.device) if name == "nvfp4" else None

        def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            b, s, workspace = tensors
            shape = (x.shape[0], n, k)
            # vLLM's defaults: k whole, no atomic adds, partial sums in float32
            flags = (True, False, True, False)
            return ops.marlin_gemm(x, out, b, None, s, None, factor, None, None, None, workspace, kind, *shape, *flags)

        return Prepared((packed, group_scales, locks), run, most_tokens=256)


def fp4_scales(scales: torch.Tensor, name: str) -> tuple[torch.Tensor, float]:
    """Return scales for bf16 x in 8 bits, and what the factors of NVFP4 are multiplied by. scales: bf16 (rows, n), in
    the order of :func:`permuted`. They become e8m0, or, times a power of two that makes the top bit of the least one 1,
    unsigned numbers of five bits of exponent and three of mantissa."""
    scales = scales.view(-1, 4)[:, [0, 2, 1, 3]].view(scales.shape[0], -1)  # as its threads decode bytes
    if name == "mxfp4":
        return scales.to(torch.float8_e8m0fnu), 1.0
    least = scales[scales > 0].float().min() * 2**7
    power = (2 / least).log2().ceil().exp2().clamp(min=1)
    fields = (scales.float() * power * 2**7).half().view(torch.int16) << 1
    stored = fields.view(torch.float8_e4m3fn)[:, 1::2].contiguous()
    return stored, float(2.0 ** (126 - 7) / power)


def permuted(scales: torch.Tensor, grouped: bool) -> torch.Tensor:
    """Permute scales (rows, n) to the order in which Marlin's threads read them. grouped: True if a row of the weight
    has several."""
    if grouped:
        order = [i + 8 * j for i in range(8) for j in range(8)]
    else:
        order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    return scales.reshape(-1, len(order))[:, order].reshape(scales.shape).contiguous()


PEER = Marlin()
