"""Folders quantized by GPTQ, in either version of the format, or by AutoRound in GPTQ's packing.

A module is ``qweight`` int32 (k / 8, n), eight codes of a column a word; ``qzeros`` int32 (groups, n / 8), eight zero
points of a row a word; ``scales`` (groups, n); ``g_idx`` int32 (k), the group of each column, which is in act-order if
groups are scattered. w = (u - z) * s.

Version 1 stores z - 1. A stored 15 is refused: producers wrapped z = 0 round to it, some of them into the neighbouring
zero points as well, and readers disagree whether it means 0 or 16. Symmetric files of either version are known by their
numbers, since some are labelled with the other version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.methods import GPTQ_ZEROS, auto_round_override
from w4gemm.checkpoints.module_tensors import SCALES, SYMMETRIC, check_bits, check_symmetric, check_tensor, unpack_int4
from w4gemm.checkpoints.quantized_folder import folder_format
from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight

_STORED_ZERO = {"gptq": -1, "gptq_v2": 0}
"""The number that is added to a zero point before it is stored, by ``checkpoint_format``."""


@dataclass(frozen=True)
class GPTQPacking:
    """A :class:`w4gemm.checkpoints.quantized_folder.Packing`.

    Attributes:
        config: quantization_config.
        stored_zero: what the file's version adds to a zero point, 0 or -1.
    """

    config: Mapping[str, Any]
    stored_zero: int
    marks = ("qweight", "qzeros", "scales", "g_idx")
    others = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> GPTQPacking:
        if (added := GPTQ_ZEROS.get(config.get("packing_format", ""))) is not None:
            return cls(config, added)
        version = config.get("checkpoint_format", config.get("format")) or "gptq"
        if version not in _STORED_ZERO:
            raise ValueError(
                f"checkpoint_format is {version!r}, whose packing is not known; wanted {' or '.join(_STORED_ZERO)}: "
                "save the model again by GPTQModel in one of them"
            )
        if (word := config.get("pack_dtype", "int32")) != "int32":
            raise ValueError(f"pack_dtype is {word!r}, wanted 'int32'")
        return cls(config, _STORED_ZERO[version])

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        settings = self._settings(name)
        check_bits(settings.get("bits"))
        words, n = check_tensor(stored, "qweight", ("I32",))
        check_tensor(stored, "scales", SCALES)
        zero, scale = "none" if settings.get("sym") else "int", SCALES[stored["scales"].dtype]
        k, format = 8 * words, WeightFormat(settings.get("group_size", 128), zero, scale)
        groups = format.groups(k)
        if n % 8:
            raise ValueError(f"it has {n} output features, wanted a multiple of 8")
        check_tensor(stored, "scales", SCALES, (groups, n))
        check_tensor(stored, "qzeros", ("I32",), (groups, n // 8))
        if "g_idx" in stored:
            check_tensor(stored, "g_idx", ("I32", "I64"), (k,))
        return Module(n, k, format, "bias" in stored)

    def weight(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        codes, stored = unpack_int4(tensors["qweight"].T), unpack_int4(tensors["qzeros"])
        zeros = None
        if not module.format.has_zero:
            check_symmetric(stored + 1 if (stored == SYMMETRIC - 1).all() else stored)
        elif self.stored_zero and (stored == 15).any():
            raise ValueError(
                f"{int((stored == 15).sum())} of its zero points are stored as 15, which in version 1 of the format "
                "means 0 or 16, and 16 cannot be held; save the model as gptq_v2"
            )
        else:
            zeros = (stored - self.stored_zero).T.contiguous()
        scales = tensors["scales"].T.contiguous()
        return QuantizedWeight.from_codes(module.format, codes, scales, zeros, tensors.get("g_idx"))

    def _settings(self, name: str) -> Mapping[str, Any]:
        """Bits, group_size and sym of a module: those of the folder, with the first override that matches."""
        for pattern, override in (self.config.get("dynamic") or {}).items():
            if re.match(pattern.removeprefix("+:").removeprefix("-:"), name):
                if pattern.startswith("-:"):
                    raise ValueError(f"config.json says by {pattern!r} that it is dense, but it has GPTQ's tensors")
                return {**self.config, **override}
        return {**self.config, **auto_round_override(self.config, name)}


FORMAT = folder_format(
    "gptq", "a folder with a model quantized by GPTQ, or by AutoRound in its packing", GPTQPacking.of
)
