"""Weights that AMD's Quark quantizes and packs, and as its own layer dequantizes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from bench.producers.common import Pairs, Weights, folder_pairs

_LEAVES = {
    "weight": "weight",
    "weight_quantizer.scale": "weight_scale",
    "weight_quantizer.0.scale": "weight_scale",
    "weight_quantizer.1.scale": "weight_scale_2",
    "weight_quantizer.zero_point": "weight_zero_point",
}
"""Names of the layer's tensors, and what an export calls them."""


def quark(scheme: str, method: str = "reorder") -> Callable[[Path, Weights], Pairs]:
    """``scheme``: one of Quark's names, such as "uint4_wo_32"; ``method``: its ``pack_method``."""

    def pairs(folder: Path, weights: Weights) -> Pairs:
        from quark.torch import ModelQuantizer
        from quark.torch.export.nn.modules.qparamslinear import QParamsLinear
        from quark.torch.quantization.config.config import QConfig
        from quark.torch.quantization.config.template import QuantizationSchemeCollection

        settings = QuantizationSchemeCollection().get_scheme(scheme).config
        settings.input_tensors = None  # or its layers quantize the identity, too
        config = QConfig(global_quant_config=settings)
        stored, expected = {}, {}
        for name, w in weights.items():
            model = torch.nn.Sequential(torch.nn.Linear(w.shape[1], w.shape[0], bias=False))
            model[0].weight.data = w.clone()
            quantizer = ModelQuantizer(config)
            model = quantizer.freeze(quantizer.quantize_model(model, [torch.zeros(1, w.shape[1])]))
            layer = QParamsLinear.from_module(model[0], "quark", method)
            stored |= {f"{name}.{_LEAVES[leaf]}": t.clone() for leaf, t in layer.state_dict().items()}
            with torch.no_grad():
                expected[name] = layer(torch.eye(w.shape[1])).T.contiguous()
        export = {"pack_method": method, "weight_format": "real_quantized", "kv_cache_group": []}
        return folder_pairs(folder, config.to_dict() | {"export": export}, stored, expected)

    return pairs
