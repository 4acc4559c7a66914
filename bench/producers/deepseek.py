"""DeepSeek's own formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from bench.producers.common import Pairs, Weights, folder_pairs
from bench.producers.compressed import compressed_float
from safetensors.torch import save_file

from w4gemm.checkpoints import open_checkpoint


class InFp8(NamedTuple):
    """A matrix in e4m3, and the scales of its blocks."""

    weight: torch.Tensor
    scales: torch.Tensor


def in_fp8(w: torch.Tensor, rows: int, columns: int) -> InFp8:
    """Scales are powers of two; the blocks divide w."""
    n, k = w.shape
    blocks = w.view(n // rows, rows, k // columns, columns)
    scales = 2 ** (blocks.abs().amax((1, 3)) / 448).log2().ceil()
    return InFp8((blocks / scales[:, None, :, None]).view(n, k).to(torch.float8_e4m3fn), scales)


def in_blocks(folder: Path, weights: Weights) -> Pairs:
    """Blocks of 128 x 128, as DeepSeek-V3 and Qwen have them, the last ones cut off."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    dequantize = Fp8Dequantize(None)._dequantize_one
    stored, expected = {}, {}
    for name, w in weights.items():
        n, k = w.shape
        padded = torch.nn.functional.pad(w, (0, -k % 128, 0, -n % 128)).view(-(-n // 128), 128, -(-k // 128), 128)
        scales = padded.abs().amax((1, 3)) / 448
        fp8 = (padded / scales[:, None, :, None]).view(n + -n % 128, k + -k % 128).to(torch.float8_e4m3fn)
        stored |= {f"{name}.weight": fp8[:n, :k].contiguous(), f"{name}.weight_scale_inv": scales}
        expected[name] = dequantize(fp8, scales, torch.float32)[:n, :k]
    return folder_pairs(folder, {"quant_method": "fp8", "weight_block_size": [128, 128]}, stored, expected)


def deepseek_v4(folder: Path, weights: Weights) -> Pairs:
    """Experts packed as compressed-tensors packs MXFP4, and other layers in fp8, as transformers dequantizes both."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    dequantize = Fp8Dequantize(None)._dequantize_one
    stored, expected, fp8_weights = {}, {}, {}
    for name, w in weights.items():
        if "down_proj" not in name:
            continue
        floats = compressed_float(w, mx=True).stored
        packed, scales = floats["weight_packed"].view(torch.int8), floats["weight_scale"].view(torch.float8_e8m0fnu)
        expert, other = f"layers.0.ffn.experts.{len(expected)}.w2", f"layers.{len(expected)}.attn.wo_b"
        stored |= {f"{expert}.weight": packed, f"{expert}.scale": scales}
        expected[expert] = dequantize(packed, scales, torch.float32)
        fp8 = in_fp8(w, 64, 128)
        stored |= {f"{other}.weight": fp8.weight, f"{other}.scale": fp8.scales.to(torch.float8_e8m0fnu)}
        fp8_weights[other] = dequantize(fp8.weight, fp8.scales, torch.float32)
    save_file({name: t.contiguous() for name, t in stored.items()}, folder / "model.safetensors")
    config = {"quant_method": "fp8", "expert_dtype": "fp4", "weight_block_size": [64, 128]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    checkpoint = open_checkpoint(folder)
    experts = checkpoint.weight("layers.0.ffn.experts.down_proj").dequantize()
    yield from zip(experts, expected.values(), strict=True)
    for name, weight in fp8_weights.items():
        yield checkpoint.weight(name).dequantize(), weight
