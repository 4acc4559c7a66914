"""Folders quantized by GPTQ, in either version of the format, or by AutoRound in GPTQ's packing.

A module of b = 2, 3, 4 or 8 bits is ``qweight`` int32 (k b / 32, n), codes of a column one after the other, the first
in the lowest bits; ``qzeros`` int32 (groups, n b / 32), zero points of a row; ``scales`` (groups, n); ``g_idx`` int32
(k), the group of each column, which is in act-order if groups are scattered. w = (u - z) * s.

Version 1 stores z - 1, and so has no place for z = 0. GPTQModel subtracts 1 from all zero points of a word at once (of
3 bits one by one), where 0 borrows from the zero point above it; adding 1 to all of a word gives every z back, so files
that name it in ``meta`` are exact. Of other files the largest code, such as 15, is refused: AutoGPTQ wrote it for 0,
and into all zero points above that one in the word as well; and readers disagree whether it means 0 (exllamav2) or 16
(AutoGPTQ's own layers, AutoRound, vLLM). ``zero_stored_as_15`` (or 255, 7, 3) in quantization_config says which. With
16 all zero points are floats, -z * s, which is exact.

``checkpoint_format`` gptq_p, of 2 to 8 bits, stores z. Each 32 codes, and each 32 zero points, lie in planes of 4, 2
and 1 bits (:func:`w4gemm.packing.bits.unpack_planes`); those of 2, 4 and 8 bits are in order. 7 bits become int8.
Source: GPTQModel 8b1fa41, utils/planar_packing.py; models/writer.py lowers the zero points of gptq alone.

Symmetric files of either version are known by their numbers, since some are labelled with the other version.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.checkpoints.packed_numbers import PackedMatrix, PackedNumbers
from w4gemm.checkpoints.quantization_configs import (
    GPTQ_ZEROS,
    ExtraConfig,
    Named,
    Patterns,
    auto_round_packing,
)
from w4gemm.checkpoints.quantized_folder import Packing
from w4gemm.checkpoints.stored import SCALES, check_bits, check_symmetric, check_tensor
from w4gemm.core.elements import INTEGERS
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.bits import unpack, unpack_planes

_PLANES = "gptq_p"
_STORED_ZERO = {"gptq": -1, "gptq_v2": 0, _PLANES: 0}
"""The number that is added to a zero point before it is stored, by ``checkpoint_format``."""
_BITS = (2, 3, 4, 8)
_BITS_IN_PLANES = (2, 3, 4, 5, 6, 7, 8)
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""A word of ones, by their bits. Zero points of 3 bits straddle words; GPTQModel subtracts 1 from each of them."""


def numbers(
    tensors: Mapping[str, torch.Tensor],
    format: WeightFormat,
    zeros: torch.Tensor | None = None,
    bits: int = 0,
    planes: bool = False,
) -> PackedNumbers:
    """Return the numbers of ``qweight``, ``scales`` and ``g_idx``, which may have a dimension of experts in front.

    Args:
        zeros: zero points (groups, n), unpacked; None if the weight is symmetric.
        bits: of a stored code; 0 for as many as the format has.
        planes: True for the layout of gptq_p.
    """
    bits = bits or format.bits
    added = 0 if format.has_zero else (1 << format.bits - 1) - (1 << bits - 1)
    codes = PackedMatrix(tensors["qweight"], True, "k", bits=bits, planes=planes, added=added)
    scales = PackedMatrix(tensors["scales"], True)
    if zeros is not None and not zeros.is_floating_point():
        zeros = zeros.to(torch.uint8)
    z = None if zeros is None else PackedMatrix(zeros, True)
    return PackedNumbers(format, codes, scales, z, g_idx=tensors.get("g_idx"), names=("qweight", "scales", "qzeros"))


def check_unused_zeros(qzeros: torch.Tensor, bits: int, planes: bool = False) -> None:
    """Raise ValueError unless the zero points of a symmetric weight are the middle of the codes, as either version of
    the format has them."""
    stored = unpack_planes(qzeros, bits) if planes else unpack(qzeros, bits)
    check_symmetric(stored + 1 if (stored == (1 << bits - 1) - 1).all() else stored, bits)


class GPTQPacking(Packing):
    """
    Attributes:
        stored_zero: what the file's version adds to a zero point, 0 or -1.
        planes: True for gptq_p.
    """

    method = "gptq"
    contents = "a folder with a model quantized by GPTQ, or by AutoRound in its packing"
    marks = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._dynamic, self._extra = _dynamic(config), ExtraConfig(config)
        for bits in _BITS:
            if (meaning := config.get(_largest_key(bits))) not in (None, 0, 1 << bits):
                raise ValueError(f"{_largest_key(bits)} is {meaning!r}, wanted 0 or {1 << bits}")
        added = GPTQ_ZEROS.get(auto_round_packing(config) or "")
        self.stored_zero, self.planes = added or 0, False
        if added is not None:
            return
        version = _version(config)
        if version not in _STORED_ZERO:
            raise ValueError(
                f"checkpoint_format is {version!r}, whose packing is not known; wanted {' or '.join(_STORED_ZERO)}: "
                "save the model again by GPTQModel in one of them"
            )
        if (word := config.get("pack_dtype", "int32")) != "int32":
            raise ValueError(f"pack_dtype is {word!r}, wanted 'int32'")
        self.stored_zero, self.planes = _STORED_ZERO[version], version == _PLANES

    def named(self) -> Iterable[Named]:
        for text in self._dynamic:
            if not text.startswith("-:") and self.config["dynamic"][text].get("bits", 4) == 4:
                yield Named("dynamic", text, partial(self._dynamic.match, text))
        lists = self.config.get("modules_in_block_to_quantize") or ()
        names = [name for names in lists for name in ([names] if isinstance(names, str) else names)]
        ends = Patterns("modules_in_block_to_quantize", {name: rf".*\b{re.escape(name)}\Z" for name in names})
        for name in ends:
            yield Named("modules_in_block_to_quantize", name, partial(ends.match, name))
        yield from self._extra.named()

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        settings = self._settings(name)
        bits: Any = settings.get("bits")
        if bits in _BITS_IN_PLANES and bits not in _BITS and not self.planes:
            legal = " or ".join(map(str, _BITS))
            raise ValueError(
                f"its weight has {bits} bits, which checkpoint_format {_PLANES!r} alone has, got "
                f"{_version(self.config)!r}; wanted {legal}"
            )
        check_bits(bits, _BITS_IN_PLANES if self.planes else _BITS)
        words, n = check_tensor(stored, "qweight", ("I32",))
        check_tensor(stored, "scales", SCALES)
        zero, scale = "none" if settings.get("sym") else "int", SCALES[stored["scales"].dtype]
        if zero == "int" and self.stored_zero and self.config.get(_largest_key(bits)) == 1 << bits:
            zero, scale = "float", "fp32"
        k, rest = divmod(32 * words, bits)
        if rest or (self.planes and words % bits):
            raise ValueError(f"its qweight has {words} rows, wanted a multiple of {bits}, so that no column is cut")
        element = INTEGERS[8 if bits == 7 else bits]
        format = WeightFormat(settings.get("group_size", 128), zero, scale, element.name)
        groups, unit = format.groups(k), 32 // (1 if self.planes else math.gcd(32, bits))
        if n % unit:
            raise ValueError(f"it has {n} output features, wanted a multiple of {unit}")
        check_tensor(stored, "scales", SCALES, (groups, n))
        check_tensor(stored, "qzeros", ("I32",), (groups, n * bits // 32))
        if "g_idx" in stored:
            check_tensor(stored, "g_idx", ("I32", "I64"), (k,))
        elif settings.get("desc_act") and groups > 1:
            raise ValueError("it has no g_idx, which says the group of each column where desc_act is true")
        return Module(n, k, format, "bias" in stored, activations=self._activations)

    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        zeros, bits = None, 32 * len(tensors["qweight"]) // module.k
        if module.format.has_zero:
            zeros = self.zeros(tensors["qzeros"], bits)
        else:
            check_unused_zeros(tensors["qzeros"], bits, self.planes)
        if zeros is not None and module.format.zero == "float":
            zeros = -(zeros * tensors["scales"].float())
        return numbers(tensors, module.format, zeros, bits, self.planes)

    @property
    def _activations(self) -> str | None:
        """How GPTQModel wants x: in e4m3 with a scale for each token by "w4afp8"; in 16 bits, and here also by
        "w4a_nvfp4"."""
        setting = self.config.get("activation")
        mode = setting.get("mode") if isinstance(setting, Mapping) else setting
        return "fp8" if mode == "w4afp8" else None

    def zeros(self, words: torch.Tensor, bits: int) -> torch.Tensor:
        """Return the zero points (groups, n) of an asymmetric module's ``qzeros``."""
        beyond, key = 1 << bits, _largest_key(bits)
        if self.stored_zero and self._by_gptqmodel and bits in _ONES:
            return unpack(words + _ONES[bits], bits)
        if self.planes:
            return unpack_planes(words, bits)
        zeros = unpack(words, bits).int() - self.stored_zero
        if not (zeros == beyond).any() or (meaning := self.config.get(key)) == beyond:
            return zeros
        if meaning is None and not self._by_gptqmodel:
            raise ValueError(
                f"{int((zeros == beyond).sum())} of its zero points are stored as {beyond - 1}, which in version 1 of "
                f"the format means 0 to some readers and {beyond} to others; say which by {key}: 0 or {beyond} in "
                "quantization_config of config.json, or save the model as gptq_v2"
            )
        return zeros & beyond - 1

    @property
    def _by_gptqmodel(self) -> bool:
        """True if GPTQModel wrote the folder, which it says in ``meta`` since the version that has its arithmetic."""
        meta = self.config.get("meta")
        quantizers = meta.get("quantizer") if isinstance(meta, Mapping) else None  # others may write what they like
        names = quantizers if isinstance(quantizers, list) else [quantizers]
        return any(isinstance(name, str) and name.startswith("gptqmodel:") for name in names)

    def _settings(self, name: str) -> Mapping[str, Any]:
        """Bits, group_size and sym of a module: those of the folder, with the first override that matches."""
        for text in self._dynamic:
            if self._dynamic.match(text, name):
                if text.startswith("-:"):
                    raise ValueError(f"config.json says by {text!r} that it is dense, but it has GPTQ's tensors")
                return {**self.config, **self.config["dynamic"][text]}
        return {**self.config, **self._extra.of(name)}


def _version(config: Mapping[str, Any]) -> Any:
    """Return the version of the format that a config names."""
    return config.get("checkpoint_format", config.get("format")) or "gptq"


def _largest_key(bits: int) -> str:
    """Return the setting that says what the largest code means as a zero point."""
    return f"zero_stored_as_{(1 << bits) - 1}"


def _dynamic(config: Mapping[str, Any]) -> Patterns:
    """Return the expressions of ``dynamic``, which begin with "+:" or nothing, or with "-:" for dense modules."""
    texts = config.get("dynamic") or {}
    return Patterns("dynamic", {text: text.removeprefix("+:").removeprefix("-:") for text in texts})
