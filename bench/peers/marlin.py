"""vLLM's Marlin: mma.sync with asynchronous copies, no Hopper instructions."""

from __future__ import annotations

import torch
from bench.peers import vllm_ops
from bench.peers.base import Prepared, Tensors, float_name, group_scales, tensor_scale, unsupported, words_of

from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight

_FP8_POWER = {torch.bfloat16: 2.0**120, torch.float16: 2.0**8}
"""By dtype of x, what scales of e4m3 are multiplied by: its threads put a code's bits into that dtype's exponent."""


class Marlin(vllm_ops.VllmAdapter):
    name = "marlin"
    operator = "marlin_gemm"

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        micro = ("mxfp4", "nvfp4", "mxfp8") if dtype == torch.bfloat16 else ()
        limits = {"groups": (-1, 32, 64, 128), "n_multiple": 64, "k_multiple": 128}
        return unsupported(n, k, format, dtype, bits=(4, 8), floats=("fp8", "fp8_block", *micro), **limits)

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        ops, bits, name = vllm_ops.operators(), weight.format.bits, float_name(weight.format)
        n, k, device = weight.n, weight.k, weight.device
        no_perm = torch.empty(0, dtype=torch.int32, device=device)
        packed = ops.gptq_marlin_repack(words_of(weight).t().contiguous(), no_perm, k, n, bits, False)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        locks = torch.zeros(sms, dtype=torch.int32, device=device)
        scales, factor = group_scales(weight, dtype), None
        scales = permuted(scales.t().contiguous(), scales.shape[1] > 1)
        if name:
            kind = vllm_ops.E2M1 if bits == 4 else vllm_ops.E4M3
        else:
            kind = vllm_ops.UINT4_MINUS_8 if bits == 4 else vllm_ops.UINT8_MINUS_128
        if name in ("mxfp4", "nvfp4", "mxfp8"):
            scales, power = microscales(scales, name)
            factor = torch.full((1,), tensor_scale(weight) * power, device=device) if name == "nvfp4" else None
        elif name:
            scales *= _FP8_POWER[dtype]

        def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            b, s, workspace = tensors
            shape = (x.shape[0], n, k)
            # vLLM's defaults: k whole, no atomic adds, partial sums in float32
            flags = (True, False, True, False)
            return ops.marlin_gemm(x, out, b, None, s, None, factor, None, None, None, workspace, kind, *shape, *flags)

        return Prepared((packed, scales, locks), run, most_tokens=256)


def microscales(scales: torch.Tensor, name: str) -> tuple[torch.Tensor, float]:
    """Return scales for bf16 x in 8 bits, and what the factors of NVFP4 are multiplied by. scales: bf16 (rows, n), in
    the order of :func:`permuted`. Those of MXFP4 and MXFP8 become e8m0. Those of NVFP4, times a power of two that makes
    the top bit of the least one 1, become unsigned numbers of five bits of exponent and three of mantissa."""
    scales = scales.view(-1, 4)[:, [0, 2, 1, 3]].view(scales.shape[0], -1)  # as its threads decode bytes
    if name != "nvfp4":
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
