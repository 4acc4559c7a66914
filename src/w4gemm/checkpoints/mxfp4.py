"""Folders in MXFP4 as OpenAI ships gpt-oss: the experts' weights, every other one dense.

A module of all experts is ``<name>_blocks`` uint8 (experts, n, k / 32, 16), two codes a byte, the first one in the low
bits; ``<name>_scales`` uint8 (experts, n, k / 32), e8m0; and perhaps ``<name>_bias`` (experts, n). Rows of gate_up_proj
are gate 0, up 0, gate 1, up 1, ... w = 2**(scale - 127) * e2m1(code).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.experts import GATE_UP
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.checkpoints.packed_floats import numbers
from w4gemm.checkpoints.quantized_folder import folder_format
from w4gemm.core.formats import WeightFormat

_FORMAT = WeightFormat.parse("mxfp4")
_BLOCK_BYTES = _FORMAT.group_size // 2
_LEAF = re.compile(r"(.*\bexperts\.\w+)_(blocks|scales|bias)")


@dataclass(frozen=True)
class MXFP4Packing:
    """A :class:`w4gemm.checkpoints.quantized_folder.Packing`; ``config`` is the quantization_config."""

    config: Mapping[str, Any]
    marks = ("blocks", "scales")
    others = ()

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        for leaf in self.marks:
            if leaf not in stored or stored[leaf].dtype != "U8":
                came = stored[leaf].dtype if leaf in stored else "none"
                raise ValueError(f"wanted {leaf} of uint8 (U8), got {came}")
        shape, scales = stored["blocks"].shape, stored["scales"].shape
        if len(shape) != 4 or shape[3] != _BLOCK_BYTES or 0 in shape or scales != shape[:3]:
            raise ValueError(
                f"blocks have shape {shape} and scales {scales}, wanted (experts, n, k / 32, {_BLOCK_BYTES}) and "
                "(experts, n, k / 32)"
            )
        experts, n, groups = scales
        pairs, k = name.endswith(GATE_UP), groups * _FORMAT.group_size
        fused = ("gate_proj", "up_proj") if pairs else ()
        return Module(n, k, _FORMAT, "bias" in stored, experts, fused, interleaved=pairs)

    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        return numbers(tensors["blocks"].flatten(2), tensors["scales"], module.format)


def _renamed(name: str) -> str:
    return f"{match[1]}.{match[2]}" if (match := _LEAF.fullmatch(name)) else name


FORMAT = folder_format("mxfp4", "a folder with gpt-oss in MXFP4", MXFP4Packing, _renamed)
