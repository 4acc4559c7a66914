"""Folders quantized by AWQ in its "gemm" packing, or by AutoRound or Quark (its custom mode awq) in that packing.

A module is ``qweight`` int32 (k, n / 8) and ``qzeros`` int32 (groups, n / 8), with the numbers of eight output features
a word, in the order that :data:`ORDER` undoes, or as they come where Quark says ``pack_method`` order; and ``scales``
(groups, n). w = (u - z) * s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.checkpoints.packed_numbers import PackedMatrix, PackedNumbers
from w4gemm.checkpoints.quantization_configs import ExtraConfig, Named
from w4gemm.checkpoints.quantized_folder import Packing
from w4gemm.checkpoints.stored import (
    SCALES,
    check_bits,
    check_symmetric,
    check_tensor,
    whole_groups,
)
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.bits import unpack

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds its first, second, ... number."""
_ORDERS = {"reorder": ORDER, "order": None}


def order_of(pack_method: object) -> tuple[int, ...] | None:
    """Return the order of the numbers in a word by Quark's ``pack_method``; None if they are in order."""
    if pack_method not in _ORDERS:
        raise ValueError(f"pack_method is {pack_method!r}, wanted {' or '.join(map(repr, _ORDERS))}")
    return _ORDERS[str(pack_method)]


def numbers(
    tensors: Mapping[str, torch.Tensor], format: WeightFormat, order: tuple[int, ...] | None = ORDER
) -> PackedNumbers:
    """Return the numbers of ``qweight``, ``scales`` and, if the format has zero points, ``qzeros``, which may have a
    dimension of experts in front. ``order`` is None if the numbers of a word are in order."""
    codes = PackedMatrix(tensors["qweight"], True, "n", order, bits=format.bits)
    zeros = replace(codes, tensor=tensors["qzeros"]) if format.has_zero else None
    return PackedNumbers(
        format, codes, PackedMatrix(tensors["scales"], True), zeros, names=("qweight", "scales", "qzeros")
    )


class AWQPacking(Packing):
    method = "awq"
    contents = "a folder with a model quantized by AWQ (gemm packing)"
    marks = ("qweight", "qzeros", "scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        keys = ("version", "checkpoint_format", "format")  # AutoAWQ's, and GPTQModel's
        if other := next((key for key in keys if str(config.get(key) or "gemm").lower() != "gemm"), None):
            raise ValueError(
                f"{other} is {config[other]!r}, which packs in another order; wanted 'gemm': quantize the dense model "
                "again with it"
            )
        self._order, self._extra = order_of(config.get("pack_method", "reorder")), ExtraConfig(config)

    def named(self) -> Iterable[Named]:
        return self._extra.named()

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        override = self._extra.of(name)
        settings = {**self.config, **override}
        check_bits(settings.get("bits", settings.get("w_bit")), (4,))
        k, words = check_tensor(stored, "qweight", ("I32",))
        check_tensor(stored, "scales", SCALES)
        zero_point = settings.get("zero_point")  # decides, because transformers 5 writes "sym" beside it, always true
        n, symmetric = 8 * words, override.get("sym", settings.get("sym") if zero_point is None else not zero_point)
        group_size = settings.get("group_size", settings.get("q_group_size", 128))
        format = WeightFormat(group_size, "none" if symmetric else "int", SCALES[stored["scales"].dtype])
        groups = whole_groups(format, k)
        check_tensor(stored, "scales", SCALES, (groups, n))
        if "qzeros" in stored or not symmetric:
            check_tensor(stored, "qzeros", ("I32",), (groups, words))
        return Module(n, k, format, "bias" in stored)

    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        if not module.format.has_zero and "qzeros" in tensors:
            check_symmetric(unpack(tensors["qzeros"], module.format.bits), module.format.bits)
        return numbers(tensors, module.format, self._order)
