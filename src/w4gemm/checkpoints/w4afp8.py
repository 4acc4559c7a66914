"""DeepSeek models in W4AFP8, as TensorRT-LLM's script writes them and SGLang serves them: the routed experts in 4-bit
integers beside e4m3 activations, all other linear layers in fp8 with scales of blocks, which are read as dense.

A module of one expert is ``weight`` int8 (n, k / 2), two's complements of two columns a byte, the even one in the low
nibble; ``weight_scale_inv`` float32 (n, k / 128), which multiplies; and ``input_scale``, also under the expert's name
w1, w2 or w3 for gate_proj, down_proj or up_proj. config.json names the method "w4afp8", or hf_quant_config.json says
MIXED_PRECISION.

x is quantized with a scale for each token instead of ``input_scale`` for all. Scales become bf16, as both engines round
them: by at most 2**-8 of themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.module_tensors import check_tensor, whole_groups
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.checkpoints.packed_numbers import PackedMatrix, PackedNumbers
from w4gemm.checkpoints.quantized_folder import folder_format
from w4gemm.core.formats import WeightFormat

_SCALES = ("F32", "BF16")
_ROLES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_EXPERT = re.compile(rf"(.*\bexperts\.\d+)\.({'|'.join(_ROLES)})\.(\w+)")


def numbers(tensors: Mapping[str, torch.Tensor], format: WeightFormat) -> PackedNumbers:
    """Return the numbers of ``weight`` and ``weight_scale_inv``, which may have a dimension of experts in front."""
    codes, scales = PackedMatrix(tensors["weight"], along="k", signed=True), PackedMatrix(tensors["weight_scale_inv"])
    return PackedNumbers(format, codes, scales, names=("weight", "weight_scale_inv", ""))


@dataclass(frozen=True)
class W4AFP8Packing:
    """A :class:`w4gemm.checkpoints.quantized_folder.Packing`; ``config`` is the quantization_config."""

    config: Mapping[str, Any]
    marks = ("weight_scale_inv",)
    others = ("weight", "input_scale")

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        n, half = check_tensor(stored, "weight", ("I8",))
        format = WeightFormat(self.config.get("group_size") or 128)
        check_tensor(stored, "weight_scale_inv", _SCALES, (n, whole_groups(format, 2 * half)))
        return Module(n, 2 * half, format, "bias" in stored, activations="fp8")

    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        return numbers(tensors, module.format)


def _renamed(name: str) -> str:
    return f"{match[1]}.{_ROLES[match[2]]}.{match[3]}" if (match := _EXPERT.fullmatch(name)) else name


FORMAT = folder_format(
    "w4afp8", "a folder with a DeepSeek model in W4AFP8 (experts in int4, the rest in fp8)", W4AFP8Packing, _renamed
)
