"""Humming, just-in-time compiled CUDA C++; its configs as its heuristic chooses them."""

from __future__ import annotations

import torch
from bench.peers.base import (
    FP8,
    PackageAdapter,
    Prepared,
    Tensors,
    fp4_name,
    gptq_words,
    tensor_scale,
    unsupported,
)

from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight


class Humming(PackageAdapter):
    name = "humming"
    package, module = "humming-kernels", "humming"

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        dtypes, fp4 = (torch.bfloat16, torch.float16, FP8), ("mxfp4",) if dtype == FP8 else ("mxfp4", "nvfp4")
        limits = {"groups": (-1, 32, 64, 128, 256), "n_multiple": 64, "k_multiple": 64}
        return unsupported(n, k, format, dtype, dtypes=dtypes, fp4=fp4, **limits)

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        from humming.forward import humming_forward
        from humming.layer import HummingLayer

        codes, scales, *_ = weight.parts()
        group = max(0, weight.format.group_size)
        # W4A8: x is bf16, and quantized within the call
        inputs, dtype = ({"dtype": "float8e4m3"}, torch.bfloat16) if dtype == FP8 else (None, dtype)
        weights: dict[str, object] = {"dtype": "int4", "group_size": group}
        tensors = {"weight": gptq_words(codes), "weight_scale": scales.to(dtype)}
        if name := fp4_name(weight.format):
            weights |= {"dtype": "float4e2m1", "scale_dtype": "float8e8m0" if name == "mxfp4" else "float8e4m3"}
            tensors["weight_scale"] = scales
            if name == "nvfp4":
                weights["scale_2_type"] = "tensor"
                tensors["weight_scale_2"] = torch.full((1,), tensor_scale(weight), device=codes.device)
        layer = HummingLayer(weight.n, weight.k, weights, inputs, torch_dtype=dtype).to(codes.device)
        layer.load_from_tensors(tensors)
        layer.transform()
        config, zero_point = layer.humming_config, getattr(layer, "zero_point", None)
        second = getattr(layer, "weight_scale_2", None)

        def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            w, s, locks = tensors
            humming_forward(config, x, w, s, zero_point, weight_scale_2=second, outputs=out, locks=locks)
            return out

        tensors = (layer.weight.data, layer.weight_scale.data, layer.locks)
        return Prepared(tensors, run, activations=dtype if inputs else None)


PEER = Humming()
