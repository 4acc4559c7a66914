"""Folders of the method fp8: DeepSeek-V3 and Qwen as they are published, with linear layers in fp8 and scales of
blocks; and DeepSeek-V4, whose routed experts are in MXFP4.

A module of one expert is ``weight`` int8 (n, k / 2), two codes of e2m1 a byte, the even column in the low nibble, and
``scale`` e8m0 (n, k / 32). Names are those of DeepSeek's own code, ``layers.0.ffn.experts.0.w1``; transformers knows
them. config.json says the method fp8, and ``expert_dtype`` fp4.

Activations stay in 16 bits. DeepSeek's code quantizes x to e4m3 with a scale for each 128 columns;
``activations="fp8"`` does with one for each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.module_tensors import check_tensor, whole_groups
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.checkpoints.packed_floats import numbers
from w4gemm.checkpoints.quantized_folder import folder_format
from w4gemm.core.formats import WeightFormat

_FORMAT = WeightFormat.parse("mxfp4")


@dataclass(frozen=True)
class DeepSeekV4Packing:
    """A :class:`w4gemm.checkpoints.quantized_folder.Packing`; ``config`` is the quantization_config."""

    config: Mapping[str, Any]
    marks = ("scale",)
    others = ("weight",)

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        n, half = check_tensor(stored, "weight", ("I8", "U8"))
        check_tensor(stored, "scale", ("F8_E8M0", "U8"), (n, whole_groups(_FORMAT, 2 * half)))
        return Module(n, 2 * half, _FORMAT, "bias" in stored)

    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        return numbers(tensors["weight"], tensors["scale"], module.format)


FORMAT = folder_format(
    "deepseek-v4", "a folder with DeepSeek-V4 as published (experts in MXFP4, the rest in fp8)", DeepSeekV4Packing
)
FP8 = folder_format("fp8", "a folder in fp8 as DeepSeek and Qwen publish it", DeepSeekV4Packing)
