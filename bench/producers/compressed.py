"""Formats that compressed-tensors packs, or whose numbers its code gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench.producers.common import GROUP, Codes, Pairs, Weights, folder_pairs, in_words

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that each nibble of a word of AWQ holds."""


def scheme_of(**weights: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def packer(name: str) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(name)


def compressed_integers(packing: str, symmetric: bool, bits: int = 4) -> Callable[[Path, Weights], Pairs]:
    facts = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": symmetric}

    def pairs(folder: Path, weights: Weights) -> Pairs:
        scheme, stored, expected = scheme_of(**facts), {}, {}
        for name, w in weights.items():
            codes = Codes.of(w, bits)
            middle = codes.zeros.int() if symmetric else 2 ** (bits - 1)
            zeros = (codes.zeros.int() - middle).to(torch.int8)
            tensors = {"weight": w.bfloat16(), "weight_scale": codes.scales, "weight_zero_point": zeros}
            packed = packer(packing).compress(tensors, scheme)
            stored |= {f"{name}.{leaf}": t for leaf, t in packed.items()}
            unpacked = packer(packing).decompress(packed | {"weight_scale": codes.scales.float()}, scheme)
            expected[name] = unpacked["weight"]
        return folder_pairs(folder, compressed_config(packing, facts), stored, expected)

    return pairs


def compressed_config(packing: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": packing, "config_groups": {"group_0": group}}


class Floats(NamedTuple):
    """A weight in 4-bit floats as compressed-tensors packs it, and as it dequantizes it in float32."""

    stored: Weights
    expected: torch.Tensor


def compressed_float(w: torch.Tensor, mx: bool) -> Floats:
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    scheme, group = scheme_of(**float_facts(mx)), 32 if mx else 16
    largest = w.view(len(w), -1, group).abs().amax(-1)
    factor = {} if mx else {"weight_global_scale": (448 * 6 / w.abs().max()).reshape(1)}
    scales = 2 ** (largest / 6).clamp(min=2**-60).log2().ceil() if mx else largest / 6 * factor["weight_global_scale"]
    compressor = packer("mxfp4-pack-quantized" if mx else "nvfp4-pack-quantized")
    stored = compressor.compress({"weight": w, "weight_scale": scales} | factor, scheme)
    numbers = unpack_fp4_from_uint8(stored["weight_packed"], *w.shape).float()
    scales = compressor._decompress_scale(stored["weight_scale"], torch.float32)
    options = {} if mx else {"global_scale": factor["weight_global_scale"]}
    return Floats(stored, dequantize(numbers, scales, args=scheme.weights, dtype=torch.float32, **options))


def float_facts(mx: bool) -> dict[str, Any]:
    kind = {"strategy": "group", "group_size": 32} if mx else {"strategy": "tensor_group", "group_size": 16}
    dtype = {"scale_dtype": "torch.uint8" if mx else "torch.float8_e4m3fn"}
    return {"num_bits": 4, "type": "float", "symmetric": True, **kind, **dtype}


def compressed_floats(mx: bool) -> Callable[[Path, Weights], Pairs]:
    def pairs(folder: Path, weights: Weights) -> Pairs:
        made = {name: compressed_float(w, mx) for name, w in weights.items()}
        stored = {f"{name}.{leaf}": t for name, floats in made.items() for leaf, t in floats.stored.items()}
        config = compressed_config("mxfp4-pack-quantized" if mx else "nvfp4-pack-quantized", float_facts(mx))
        return folder_pairs(folder, config, stored, {name: floats.expected for name, floats in made.items()})

    return pairs


def compressed_bytes(strategy: str) -> Callable[[Path, Weights], Pairs]:
    """float-quantized, e4m3 with scales of the "tensor", of each "channel" or "block"; "mxfp8" or "mxfp6"."""
    mx, blocks = strategy.startswith("mx"), {"block_structure": [128, 128]} if strategy == "block" else {}
    bits, largest = (6, 7.5) if strategy == "mxfp6" else (8, 448)
    facts = {"num_bits": bits, "type": "float", "strategy": "group" if mx else strategy, "symmetric": True} | blocks
    facts |= {"group_size": 32, "scale_dtype": "torch.uint8"} if mx else {}
    packing = {"mxfp8": "mxfp8-quantized", "mxfp6": "mxfp6-pack-quantized"}.get(strategy, "float-quantized")

    def scales_of(w: torch.Tensor) -> torch.Tensor:
        if strategy == "tensor":
            return (w.abs().max() / 448).reshape(1)
        if strategy == "channel":
            return w.abs().amax(1, keepdim=True) / 448
        if mx:
            return torch.exp2((w.view(len(w), -1, 32).abs().amax(-1) / largest).clamp(min=2.0**-60).log2().ceil())
        n, k = w.shape
        padded = torch.nn.functional.pad(w, (0, -k % 128, 0, -n % 128)).abs()
        return padded.view(-(-n // 128), 128, -(-k // 128), 128).amax((1, 3)) / 448

    def pairs(folder: Path, weights: Weights) -> Pairs:
        scheme, stored, expected = scheme_of(**facts), {}, {}
        for name, w in weights.items():
            packed = packer(packing).compress({"weight": w, "weight_scale": scales_of(w)}, scheme)
            stored |= {f"{name}.{leaf}": t for leaf, t in packed.items()}
            expected[name] = packer(packing).decompress(dict(packed), scheme)["weight"].float()
        return folder_pairs(folder, compressed_config(packing, facts), stored, expected)

    return pairs


def awq(folder: Path, weights: Weights) -> Pairs:
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

    facts = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
    scheme, stored, expected = scheme_of(**facts), {}, {}
    for name, w in weights.items():
        codes = Codes.of(w)
        own = {
            f"{name}.qweight": in_words(codes.codes.T.contiguous(), AWQ_ORDER),
            f"{name}.qzeros": in_words(codes.zeros.T.contiguous(), AWQ_ORDER),
            f"{name}.scales": codes.scales.half().T.contiguous(),
        }
        stored |= own
        converted = AutoAWQConverter(group_size=GROUP, targets=["re:.*"]).process(dict(own))
        leaves = {key.removeprefix(f"{name}."): t for key, t in converted.items()}
        leaves["weight_scale"] = leaves["weight_scale"].float()
        expected[name] = packer("pack-quantized").decompress(leaves, scheme)["weight"]
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return folder_pairs(folder, config, stored, expected)


def nibbles(method: str) -> Callable[[Path, Weights], Pairs]:
    """Two's complements, two a byte, packed by the definition: ModelOpt's of adjacent rows, W4AFP8's of columns."""
    facts = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
    rows = method == "modelopt"

    def pairs(folder: Path, weights: Weights) -> Pairs:
        scheme, stored, expected = scheme_of(**facts), {}, {}
        for name, w in weights.items():
            codes = Codes.of(w)
            q = codes.codes.to(torch.int8) - 8
            low, high = (q[0::2], q[1::2]) if rows else (q[:, 0::2], q[:, 1::2])
            packed = (low & 15) | (high << 4)
            stored[f"{name}.weight"] = packed.view(torch.uint8) if rows else packed
            stored[f"{name}.{'weight_scale' if rows else 'weight_scale_inv'}"] = codes.scales
            whole = {"weight": q, "weight_scale": codes.scales.float()}
            expected[name] = packer("int-quantized").decompress(whole, scheme)["weight"]
        algorithm = {"quant_algo": "W4A16_AWQ"} if rows else {}
        return folder_pairs(folder, {"quant_method": method, "group_size": GROUP} | algorithm, stored, expected)

    return pairs
