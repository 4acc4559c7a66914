"""4-bit floats and MXINT4, packed by the layers with which AutoRound writes them, and dequantized by those it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from bench.producers.common import Pairs, Weights, folder_pairs

_LARGEST = {"mx_fp": 6.0, "nv_fp": 6.0, "mx_int": 1.75}
"""Largest number of a code, by ``data_type``."""


def auto_round_floats(data_type: str) -> Callable[[Path, Weights], Pairs]:
    group = 16 if data_type == "nv_fp" else 32
    packing = "auto_round" if data_type == "mx_int" else "auto_round:llm_compressor"
    config = {"quant_method": "auto-round", "packing_format": packing, "data_type": data_type, "act_bits": 4}

    def pairs(folder: Path, weights: Weights) -> Pairs:
        from auto_round.experimental.qmodules import mx, nvfp4
        from auto_round.export.export_to_autoround import qlinear_fp, qlinear_int

        module = qlinear_int if data_type == "mx_int" else qlinear_fp
        reader = {"mx_fp": mx.MXFP4QuantLinear, "mx_int": mx.MXINT4QuantLinear, "nv_fp": nvfp4.NVFP4QuantLinear}
        stored, expected = {}, {}
        for name, w in weights.items():
            n, k = w.shape
            linear = torch.nn.Linear(k, n, bias=False)
            linear.weight.data = w
            largest = w.view(n, -1, group).abs().amax(-1) / _LARGEST[data_type]
            factor = 448 * 6 / w.abs().max() if data_type == "nv_fp" else None
            scales = largest.clamp(min=2**-60).log2().ceil() if factor is None else largest * factor
            layer = module.QuantLinear(4, group, k, n, False, data_type=data_type, act_bits=4)
            layer.pack(linear, scales, global_scale=factor, device="cpu")
            leaves = ["weight_packed", "weight_scale"] + (["weight_global_scale"] if factor is not None else [])
            stored |= {f"{name}.{leaf}": getattr(layer, leaf) for leaf in leaves}
            again = reader[data_type](
                k, n, SimpleNamespace(group_size=group, act_group_size=group), dtype=torch.float32
            )
            for leaf in leaves:
                setattr(again, leaf, getattr(layer, leaf))
            expected[name] = again.dequant_weight_online().float()
        return folder_pairs(folder, config | {"bits": 4, "group_size": group}, stored, expected)

    return pairs
