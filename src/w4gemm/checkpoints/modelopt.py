"""Folders quantized by NVIDIA's ModelOpt: NVFP4 and INT4 (W4A16_AWQ).

A module of NVFP4 is ``weight`` uint8 (n, k / 2), the even column in the low nibble, ``weight_scale`` e4m3 (n, k / 16),
and ``weight_scale_2`` float32 (), which multiplies. One of INT4 is ``weight`` uint8 (n / 2, k), two's complements of
two rows a byte, the even row in the low nibble, and ``weight_scale`` (n, groups). ``pre_quant_scale`` (k), of a model
that was smoothed by AWQ, multiplies x. Activations that the config wants in 4 bits are multiplied as they come, so
``input_scale`` is not used. Scales of a quantized KV cache are not used either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.quantized_folder import SCALES, check_tensor, folder_format, unpack_pairs
from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight

_NVFP4 = WeightFormat.parse("nvfp4")
_FLOATS = ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4")
ALGORITHMS = (*_FLOATS, "W4A16_AWQ", "INT4_AWQ")
"""Values of ``quant_algo`` that are read."""


class _Shape(NamedTuple):
    n: int
    k: int
    format: WeightFormat


@dataclass(frozen=True)
class ModelOptPacking:
    """A :class:`w4gemm.checkpoints.quantized_folder.Packing`; ``config`` is the quantization_config, or the contents of
    hf_quant_config.json."""

    config: Mapping[str, Any]
    marks = ("weight_scale", "weight_scale_2")
    others = ("weight", "input_scale", "k_scale", "v_scale")

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        settings = {**self.config, **(self.config.get("quantized_layers") or {}).get(name, {})}
        algorithm = settings.get("quant_algo")
        if algorithm not in ALGORITHMS:
            raise ValueError(
                f"it was quantized by {algorithm!r}; wanted one of {', '.join(ALGORITHMS)}: export the model again, or "
                "convert the dense one"
            )
        excluded = self.config.get("exclude_modules", self.config.get("ignore")) or ()
        if any(fnmatchcase(name, pattern) for pattern in excluded):
            raise ValueError("the config excludes it, but it has quantized tensors")
        n, k, format = _floats(stored) if algorithm in _FLOATS else _integers(stored, settings.get("group_size") or 128)
        if scaled := "pre_quant_scale" in stored:
            check_tensor(stored, "pre_quant_scale", ("F16", "BF16", "F32"), (k,))
            if ".experts." in name:
                raise ValueError("x of single experts cannot be scaled (pre_quant_scale)")
        return Module(n, k, format, "bias" in stored, pre_quant_scale=scaled)

    def weight(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        packed, scales = tensors["weight"], tensors["weight_scale"]
        if module.format == _NVFP4:
            channels = tensors["weight_scale_2"].reshape(1).expand(module.n).contiguous()
            return QuantizedWeight.from_codes(module.format, unpack_pairs(packed), scales, channels=channels)
        # a two's complement q is the code q + 8 with its highest bit turned over
        codes = torch.stack((packed & 15, packed >> 4), 1).flatten(0, 1) ^ 8
        return QuantizedWeight.from_codes(module.format, codes, scales)


def _floats(stored: Mapping[str, TensorInfo]) -> _Shape:
    n, half = check_tensor(stored, "weight", ("U8",))
    check_tensor(stored, "weight_scale", ("F8_E4M3",), (n, _NVFP4.groups(2 * half)))
    one = "weight_scale_2" in stored and stored["weight_scale_2"].shape == (1,)
    check_tensor(stored, "weight_scale_2", ("F32",), (1,) if one else ())
    return _Shape(n, 2 * half, _NVFP4)


def _integers(stored: Mapping[str, TensorInfo], group_size: int) -> _Shape:
    half, k = check_tensor(stored, "weight", ("U8",))
    if "weight_scale_2" in stored:
        raise ValueError("it has two scales (W4A8), wanted weight_scale alone")
    check_tensor(stored, "weight_scale", SCALES)
    format = WeightFormat(group_size, "none", SCALES[stored["weight_scale"].dtype])
    check_tensor(stored, "weight_scale", SCALES, (2 * half, format.groups(k)))
    return _Shape(2 * half, k, format)


FORMAT = folder_format("modelopt", "a folder with a model quantized by ModelOpt (NVFP4, INT4 AWQ)", ModelOptPacking)
