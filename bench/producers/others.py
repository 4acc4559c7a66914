"""Formats of AutoRound, GPTQ, ModelOpt, HQQ, bitsandbytes and gpt-oss."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench.producers.common import GROUP, Codes, Pairs, Weights, folder_pairs

from w4gemm.checkpoints import open_checkpoint


def auto_round(
    stored_zero: int, config: dict[str, Any], *, sym: bool = False, act_order: bool = False, bits: Sequence[int] = (4,)
) -> Callable[[Path, Weights], Pairs]:
    """GPTQ's packing, by the layers with which AutoRound writes and reads it.

    Args:
        stored_zero: what is added to a zero point before it is stored: -1 in version 1 of GPTQ, else 0.
        act_order: True for groups of columns that lie all over k.
        bits: of the modules in turn. Those that differ from the first are in ``extra_config``.
    """

    def pairs(folder: Path, weights: Weights) -> Pairs:
        from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

        module = qlinear_torch_zp if stored_zero else qlinear_torch
        stored, expected, g = {}, {}, torch.Generator().manual_seed(0)
        bits_of = dict(zip(weights, itertools.cycle(bits), strict=False))
        for name, w in weights.items():
            n, k = w.shape
            own = bits_of[name]
            if act_order and n > k:
                continue  # its layer takes the first k rows only
            layer, linear = module.QuantLinear(own, GROUP, k, n, bias=False), torch.nn.Linear(k, n, bias=False)
            codes, linear.weight.data, layer.device = Codes.of(w, own), w, "cpu"
            zeros = 2 ** (own - 1) if sym else codes.zeros.float().clamp(min=1)
            layer.pack(linear, codes.scales.half().float(), zeros, device="cpu")
            groups = torch.arange(k, dtype=torch.int32) // GROUP
            if act_order:
                layer.g_idx = groups[torch.randperm(k, generator=g)]
            elif hasattr(layer, "g_idx"):
                del layer.g_idx
            leaves = ("qweight", "qzeros", "scales")
            stored |= {f"{name}.{leaf}": getattr(layer, leaf).clone() for leaf in leaves}
            stored[f"{name}.g_idx"] = layer.g_idx if act_order else groups
            layer.scales = layer.scales.float()
            expected[name] = layer(torch.eye(k)).T.contiguous()
        settings = {"bits": bits[0], "group_size": GROUP, "sym": sym, "desc_act": act_order}
        settings["extra_config"] = {name: {"bits": own} for name, own in bits_of.items() if own != bits[0]}
        return folder_pairs(folder, settings | config, stored, expected)

    return pairs


def gptqmodel(
    folder: Path,
    weights: Weights,
    bits: int = 4,
    packing: str = "gptq",
    dynamic: dict[str, dict[str, Any]] | None = None,
) -> Pairs:
    """With zero points, as GPTQModel writes them: version 1 of GPTQ, where every eighth row has zero points of 0, or
    gptq_p, which stores them as they are. dynamic: bits of modules by expression, and modules that stay dense, as
    GPTQModel matches them."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

    settings, stored, expected = {"bits": bits, "group_size": GROUP, "sym": False, "desc_act": False}, {}, {}
    mixed, dense = QuantizeConfig(**settings, dynamic=dynamic), {}
    for name, w in weights.items():
        n, k = w.shape
        if mixed.dynamic_get(name) is False:
            stored[f"{name}.weight"] = dense[name] = w.bfloat16()
            continue
        own = mixed.dynamic_get(name, "bits", bits)
        layer = TorchLinear(own, GROUP, False, False, k, n, format=packing)
        linear = torch.nn.Linear(k, n, bias=False)
        linear.weight.data = w = torch.where(torch.arange(n)[:, None] % 8 == 3, w.abs(), w)
        codes = Codes.of(w, own)
        layer.pack_original(linear, codes.scales.half().float(), codes.zeros.float())
        if packing == "gptq":
            convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(**settings | {"bits": own}))
        stored |= {f"{name}.{leaf}": getattr(layer, leaf).clone() for leaf in ("qweight", "qzeros", "scales", "g_idx")}
        if packing == "gptq":
            convert_gptq_v1_to_v2_format_module(layer, own, torch.int32)
        layer.post_init()
        layer.scales = layer.scales.float()
        expected[name] = layer.dequantize_weight().T.contiguous()
    config = {"quant_method": "gptq", "checkpoint_format": packing, "meta": {"quantizer": ["gptqmodel:7.7.0"]}}
    packed = folder_pairs(folder, settings | config | ({"dynamic": dynamic} if dynamic else {}), stored, expected)
    checkpoint = open_checkpoint(folder)
    skipped = ((checkpoint.dense(f"{name}.weight").float(), w.float()) for name, w in dense.items())
    return itertools.chain(packed, skipped)


def modelopt(folder: Path, weights: Weights) -> Pairs:
    """NVFP4, as ModelOpt packs it and dequantizes it."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    stored, expected = {}, {}
    for name, w in weights.items():
        packed, scales, factor = NVFP4QTensor.quantize(w, 16)
        stored |= {f"{name}.weight": packed._quantized_data, f"{name}.weight_scale": scales}
        stored[f"{name}.weight_scale_2"] = factor
        expected[name] = packed.dequantize(torch.float32, scale=scales, double_scale=factor, block_sizes={-1: 16})
    return folder_pairs(folder, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, stored, expected)


def modelopt_mxfp4(folder: Path, weights: Weights) -> Pairs:
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    stored, expected = {}, {}
    for name, w in weights.items():
        packed, scales = MXFP4QTensor.quantize(w, 32)
        stored |= {f"{name}.weight": packed._quantized_data, f"{name}.weight_scale": scales.reshape(len(w), -1)}
        expected[name] = packed.dequantize(torch.float32, scale=scales, block_sizes={-1: 32})
    return folder_pairs(folder, {"quant_method": "modelopt", "quant_algo": "mxfp4"}, stored, expected)


def modelopt_fp8(scales_of: str) -> Callable[[Path, Weights], Pairs]:
    """``scales_of``: "tensor", "rows" or "blocks", as FP8, FP8_PER_CHANNEL_PER_TOKEN and FP8_PB_WO have them."""
    names = {"tensor": "FP8", "rows": "FP8_PER_CHANNEL_PER_TOKEN", "blocks": "FP8_PB_WO"}
    blocks = {-1: 128, -2: 128} if scales_of == "blocks" else None

    def pairs(folder: Path, weights: Weights) -> Pairs:
        from modelopt.torch.quantization.qtensor import FP8QTensor

        stored, expected = {}, {}
        for name, w in weights.items():
            packed, scales = FP8QTensor.quantize(w, axis=0 if scales_of == "rows" else None, block_sizes=blocks)
            data = packed._quantized_data[: len(w), : w.shape[1]]
            shape = {"tensor": (), "rows": (len(w),), "blocks": (-1, 1, -(-w.shape[1] // 128), 1)}[scales_of]
            stored |= {f"{name}.weight": data, f"{name}.weight_scale": scales.reshape(shape)}
            expected[name] = packed.dequantize(torch.float32, scale=scales, block_sizes=blocks)
        return folder_pairs(folder, {"quant_method": "modelopt", "quant_algo": names[scales_of]}, stored, expected)

    return pairs


def gpt_oss(folder: Path, weights: Weights) -> Pairs:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, expected = {}, {}
    rng = torch.Generator().manual_seed(0)
    for layer in range(4):
        for role, n, k in (("gate_up_proj", 192, 96), ("down_proj", 96, 96)):
            name = f"model.layers.{layer}.mlp.experts.{role}"
            blocks = torch.randint(0, 256, (8, n, k // 32, 16), dtype=torch.uint8, generator=rng)
            scales = torch.randint(100, 130, (8, n, k // 32), dtype=torch.uint8, generator=rng)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    return folder_pairs(folder, {"quant_method": "mxfp4"}, stored, expected)


def hqq(folder: Path, weights: Weights, bits: int = 4) -> Pairs:
    """In float32, of the scales and zero points in fp16 that are saved."""
    os.environ.setdefault("DISABLE_CUDA", "1")
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

    stored, expected = {}, {}
    for name, w in weights.items():
        linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
        linear.weight.data = w
        config = BaseQuantizeConfig(nbits=bits, group_size=64, axis=1)
        layer = HQQLinear(linear, config, compute_dtype=torch.float16, device="cpu")
        stored |= {f"{name}.{leaf}": t for leaf, t in layer.state_dict().items()}
        expected[name] = Quantizer.dequantize(layer.W_q, layer.meta | {"compute_dtype": torch.float32})
    return folder_pairs(folder, {"quant_method": "hqq"}, stored, expected)


def bitsandbytes(kind: str, nested: bool) -> Callable[[Path, Weights], Pairs]:
    def pairs(folder: Path, weights: Weights) -> Pairs:
        from bitsandbytes import functional

        stored, expected = {}, {}
        for name, w in weights.items():
            packed, state = functional.quantize_4bit(w, compress_statistics=nested, quant_type=kind)
            stored |= {f"{name}.weight.{leaf}": t for leaf, t in state.as_dict(packed=True).items()}
            stored[f"{name}.weight"] = packed
            expected[name] = functional.dequantize_4bit(packed, state)
        return folder_pairs(folder, {"quant_method": "bitsandbytes", "load_in_4bit": True}, stored, expected)

    return pairs


def llm_int8(folder: Path, weights: Weights) -> Pairs:
    from bitsandbytes import functional

    stored, expected = {}, {}
    for name, w in weights.items():
        codes, most, _ = functional.int8_vectorwise_quant(w.half())
        stored |= {f"{name}.weight": codes, f"{name}.SCB": most}
        stored[f"{name}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
        expected[name] = functional.int8_vectorwise_dequant(codes, most)
    return folder_pairs(folder, {"quant_method": "bitsandbytes", "load_in_8bit": True}, stored, expected)
