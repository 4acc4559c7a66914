"""Folders of AutoRound in 4-bit floats (MXFP4, NVFP4) or MXINT4; its integers are read as GPTQ's or AWQ's.

A module of floats lies as compressed-tensors packs it. One of MXINT4 is ``weight_packed`` uint8 (n, k / 2), the even
column in the low nibble, with a sign in the highest bit and a number of quarters in the others, and ``weight_scale``
uint8 (n, k / 32), e8m0: w = +-quarters / 4 * 2**(scale - 127). It becomes int4 with bf16 scales, which is exact.
config.json says which by ``data_type``, of all modules and in ``extra_config`` of some.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch

from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.compressed_tensors import CompressedTensors
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.checkpoints.packed_numbers import PackedMatrix, PackedNumbers
from w4gemm.checkpoints.quantization_configs import GPTQ_ZEROS, ExtraConfig, Named, auto_round_packing
from w4gemm.checkpoints.stored import SYMMETRIC, check_bits, check_tensor, whole_groups
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.bits import unpack

_PACKINGS = {"mx_fp": "mxfp4-pack-quantized", "nv_fp": "nvfp4-pack-quantized"}
"""Formats of compressed-tensors, by the begin of ``data_type``."""
_FP8 = ("auto_round:fp8", "auto_round:fp8_static")
"""Packings of fp8 weights with scales, which lie as those of other methods."""
_MXINT4 = WeightFormat(32)


class AutoRoundPacking(CompressedTensors):
    method = "auto-round"
    contents = (
        "a folder with a model quantized by AutoRound (MXFP4, NVFP4, MXINT4, and its integers as GPTQ and AWQ pack "
        "them)"
    )

    @staticmethod
    def check(config: Mapping[str, Any]) -> None:
        if auto_round_packing(config) not in ("auto_round:llm_compressor", "auto_round", *_FP8):
            key = "packing_format" if config.get("packing_format") else "backend"
            legal = ", ".join((*GPTQ_ZEROS, "auto_round:auto_awq", "auto_round:llm_compressor", *_FP8))
            raise ValueError(f"{key} is {config.get(key)!r}, wanted one of {legal}: export the model again in one")

    def named(self) -> Iterable[Named]:
        return self._extra.named()

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        if not self._data_type(name).startswith("mx_int"):
            return super().module(name, stored)
        check_bits(self._settings(name).get("bits"), (_MXINT4.bits,))
        n, half = check_tensor(stored, "weight_packed", ("U8",))
        check_tensor(stored, "weight_scale", ("U8",), (n, whole_groups(_MXINT4, 2 * half)))
        return Module(n, 2 * half, _MXINT4, "bias" in stored)

    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        if module.format != _MXINT4:
            return super().numbers(module, tensors)
        codes, exponents = unpack(tensors["weight_packed"], module.format.bits), tensors["weight_scale"].float() - 127
        quarters = (codes & 7).to(torch.int8)
        signed = torch.where(codes < SYMMETRIC, quarters, -quarters)
        numbers = PackedMatrix((signed + SYMMETRIC).to(torch.uint8)), PackedMatrix(torch.exp2(exponents) / 4)
        return PackedNumbers(_MXINT4, *numbers)

    def _scheme(self, name: str) -> Mapping[str, Any]:
        settings, data_type = self._settings(name), self._data_type(name)
        packing = next((packing for begin, packing in _PACKINGS.items() if data_type.startswith(begin)), data_type)
        bits = settings.get("act_bits") or 16
        activations = {"num_bits": bits, "type": "float"} if bits < 16 else None
        weights = {"num_bits": settings.get("bits"), "type": "float"}
        return {"format": packing, "weights": weights, "input_activations": activations}

    def _settings(self, name: str) -> Mapping[str, Any]:
        return {**self.config, **self._extra.of(name)}

    @cached_property
    def _extra(self) -> ExtraConfig:
        return ExtraConfig(self.config)

    def _data_type(self, name: str) -> str:
        return str(self._settings(name).get("data_type"))
