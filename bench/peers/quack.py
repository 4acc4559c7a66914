"""Quack's W4A16, W8A16 and W4A8 GEMMs, CuTe DSL too; its configs as its own rules choose them."""

from __future__ import annotations

from dataclasses import replace

import torch
from bench.peers.base import FP8, PackageAdapter, Prepared, Tensors, float_name, tensor_scale, token_scales, unsupported

from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight

_BYTES = {"fp8": FP8, "mxfp8": FP8}
"""dtypes of codes of 8 bits that are no integers."""


class Quack(PackageAdapter):
    name = "quack"
    package, module = "quack-kernels", "quack"

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        if dtype == FP8:  # exact (int4sm) with 16-bit scales, folded (int4smf) with e4m3 ones
            plain = replace(format, scale="bf16") if format.has_channels else format
            return unsupported(n, k, plain, dtype, groups=(128,), dtypes=(FP8,), n_multiple=128, k_multiple=128)
        limits = {"groups": (32, 64, 128), "dtypes": (torch.bfloat16,), "n_multiple": 128, "k_multiple": 64}
        limits["floats"] = ("mxfp4", "nvfp4")
        if format.bits == 8:
            limits |= {"groups": (-1,), "bits": (8,), "floats": tuple(_BYTES)}
        return unsupported(n, k, format, dtype, **limits)  # other n it pads, and then it cannot write to an ``out``

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        from quack.gemm_w4 import gemm_w4a16, prepare_w4_weight

        if dtype == FP8:
            return prepare_fp8(weight)
        group = weight.format.group_size
        name = float_name(weight.format) or ("int4" if group == 128 else f"int4_g{group}")
        codes, scales, *_ = weight.repack("canonical").tensors  # two codes a byte, the even column low: as Quack wants
        scales = scales.to(dtype) if scales.itemsize == 2 else scales
        if weight.format.element == "int8":
            name, codes = "int8", codes ^ 128
        if weight.format.bits == 8:
            codes = codes.view(_BYTES.get(name, torch.int8))
        blob, strip = prepare_w4_weight(codes, scales, wformat=name)
        factor = tensor_scale(weight)

        def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            b, *s = tensors
            return gemm_w4a16(x, b, s[0] if s else None, tensor_scale=factor, out=out, wformat=name)

        return Prepared((blob,) if strip is None else (blob, strip), run)


def prepare_fp8(weight: QuantizedWeight) -> Prepared:
    """Its codes are a sign and a magnitude up to 7, so the weight must have no -8."""
    from quack.gemm_w4 import gemm_w4a8, prepare_w4_weight

    codes, scales, _, channels, *_ = weight.parts()
    if int(codes.min()) == 0:
        raise ValueError("Quack's W4A8 codes reach from -7 to 7")
    signed = codes.int() - 8
    nibbles = (signed.abs() | ((signed < 0).int() << 3)).to(torch.uint8)
    name = "int4sm" if channels is None else "int4smf"
    all_scales = scales.bfloat16() if channels is None else (scales.bfloat16(), channels)
    blob, strip = prepare_w4_weight(nibbles[:, 0::2] | (nibbles[:, 1::2] << 4), all_scales, wformat=name)
    tensors = (blob, strip) if channels is None else (blob, strip, channels)

    def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        b, s, *chan = tensors
        scales = token_scales()[: len(x)]
        return gemm_w4a8(x, b, s, act_scale=scales, chan_scale=chan[0] if chan else None, out=out, wformat=name)

    return Prepared(tensors, run)


PEER = Quack()
