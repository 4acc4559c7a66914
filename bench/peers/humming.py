"""Humming, just-in-time compiled CUDA C++; its configs as its heuristic chooses them."""

from __future__ import annotations

import functools
import json

import torch
from bench.peers.base import (
    FLOATS,
    FP8,
    PackageAdapter,
    Prepared,
    Tensors,
    float_name,
    group_scales,
    tensor_scale,
    token_scales,
    unsupported,
    words_of,
)

from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight

_SCALES = {"mxfp4": "float8e8m0", "nvfp4": "float8e4m3", "mxfp8": "float8e8m0"}
"""dtypes of scales of fewer than 16 bits."""


class Humming(PackageAdapter):
    name = "humming"
    package, module = "humming-kernels", "humming"

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        dtypes, limits = (torch.bfloat16, torch.float16, FP8), {"n_multiple": 64, "k_multiple": 64}
        bits, floats = (
            ((2, 3, 4), ("mxfp4", "fp8", "fp8_block")) if dtype == FP8 else ((2, 3, 4, 5, 6, 8), tuple(FLOATS))
        )
        limits |= {"groups": (-1, 32, 64, 128, 256)}
        return unsupported(n, k, format, dtype, dtypes=dtypes, bits=bits, floats=floats, **limits)

    def prepare(self, weight: QuantizedWeight, dtype: torch.dtype) -> Prepared:
        from humming.forward import humming_forward
        from humming.layer import HummingLayer
        from humming.tune import get_heuristics_config

        name, in_fp8, in_blocks = float_name(weight.format), dtype == FP8, weight.format.scale_rule.block_rows > 0
        weights: dict[str, object] = {"dtype": weight.format.element, "group_size": max(0, weight.format.group_size)}
        if name:
            weights["dtype"] = f"float{weight.format.bits}{weight.format.element}"
        inputs: dict[str, object] | None = {"dtype": "float8e4m3"} if in_fp8 else None
        dtype = torch.bfloat16 if in_fp8 else dtype
        tensors = {"weight": words_of(weight), "weight_scale": group_scales(weight, dtype)}
        if name in _SCALES:
            weights["scale_dtype"], tensors["weight_scale"] = _SCALES[name], weight.parts().scales
        if name == "nvfp4":
            weights["scale_2_type"] = "tensor"
            tensors["weight_scale_2"] = torch.full((1,), tensor_scale(weight), device=weight.device)
        if in_blocks:
            weights["group_size_n"] = weight.format.scale_rule.block_rows
            tensors["weight_scale"] = weight.parts().scales[::2].contiguous()
        if inputs and in_blocks:
            inputs["group_size"] = weight.format.group_size
        layer = HummingLayer(weight.n, weight.k, weights, inputs, torch_dtype=dtype).to(weight.device)
        layer.load_from_tensors(tensors)
        layer.transform()
        config, zero_point = layer.humming_config, getattr(layer, "zero_point", None)
        second = getattr(layer, "weight_scale_2", None)

        @functools.cache
        def tuning(m: int) -> str:
            """The config of m tokens alone, because Humming compiles all of the table that it is passed."""
            return json.dumps(next(each for after, last, each in get_heuristics_config(config) if after < m <= last))

        def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            w, s, locks = tensors
            blocks = x.shape[1] // weight.format.group_size if in_blocks else 1
            scales = token_scales()[: len(x) * blocks].view(len(x), blocks) if in_fp8 else None
            options = {"input_scale": scales, "weight_scale_2": second, "outputs": out, "locks": locks}
            humming_forward(config, x, w, s, zero_point, tuning_config=tuning(len(x)), **options)
            return out

        return Prepared((layer.weight.data, layer.weight_scale.data, layer.locks), run)


PEER = Humming()
