"""Folders in compressed-tensors (llm-compressor): integers of b = 2 to 8 bits in the formats pack-quantized and
int-quantized, floats of 4 and 6 bits in mxfp4-, mxfp6- and nvfp4-pack-quantized. Integers of 7 bits become int8.

A module of pack-quantized is ``weight_packed`` int32 (n, ceil(k b / 32)), the codes of a row one after the other, with
q + 2**(b - 1) as code of q; one of int-quantized is ``weight`` int8 (n, k), which holds q itself. Both have
``weight_scale`` (n, groups), or (1) of the whole matrix. Asymmetric ones have ``weight_zero_point``, q's zero point,
int32 (ceil(n b / 32), groups) packed along n, or int8 (n, groups). Older files in act-order have ``weight_g_idx`` int32
(k), the group of each column. w = (q - z) * s. Until 2026-06 a word held 32 // b whole codes of 3, 5 and 6 bits: words
(n, ceil(k / (32 // b))). Its number of words says which of both a file has; of 7 bits only the newer packing is read,
because the older one has as many words as 8 bits.

A module of 4-bit floats is ``weight_packed`` uint8 (n, k / 2), the even column in the low nibble, and ``weight_scale``
(n, groups): the exponents of powers of two as uint8 (mxfp4), or e4m3 with a float32 ``weight_global_scale`` (1) that
divides (nvfp4). compressed-tensors up to 0.13.0 wrote exponents of mxfp4 that are 2 too small. mxfp6 is the same, but
``weight_packed`` uint8 (n, k * 3 / 4), four codes of e2m3 in three bytes, the first one in the lowest bits.

Activations that the config wants in e4m3 get a scale for each token, whatever it says of their scales; those that it
wants in int8 or 4 bits, and those of nvfp4 and mxfp6, are multiplied as they come, in 16 bits. ``input_scale`` is
not used.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property, partial
from typing import Any

import torch

from w4gemm.checkpoints import packed_floats
from w4gemm.checkpoints.base import Module, is_embedding
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.checkpoints.packed_floats import MXFP4, MXFP6, NVFP4
from w4gemm.checkpoints.packed_numbers import PackedMatrix, PackedNumbers
from w4gemm.checkpoints.quantization_configs import Named, Patterns
from w4gemm.checkpoints.quantized_folder import Packing
from w4gemm.checkpoints.stored import (
    WIDE_SCALES,
    check_bits,
    check_finite,
    check_symmetric,
    check_tensor,
    whole_groups,
)
from w4gemm.core.elements import INTEGERS
from w4gemm.core.formats import PER_COLUMN, WeightFormat

FLOATS = {
    "mxfp4-pack-quantized": MXFP4,
    "mxfp6-pack-quantized": MXFP6,
    "nvfp4-pack-quantized": NVFP4,
}
PACKINGS = ("pack-quantized", "int-quantized", *FLOATS)
ACT_ORDERS = ("group", "dynamic", True)
"""Values of ``actorder`` by which columns are in another order; by others their scales fit them."""
_FLOAT_SCALES = {"e8m0": ("U8", "F8_E8M0"), "e4m3_row": ("F8_E4M3",)}
"""safetensors' names of the dtypes of scales of 4-bit floats, by scale rule."""
_FIRST_OF_BIAS_127, _FIRST_NIGHTLY = (0, 13, 1), "20260109"
"""First version whose exponents of mxfp4 count from 127 instead of 125, and the date of the first nightly build of it
that does."""


def numbers(tensors: Mapping[str, torch.Tensor], format: WeightFormat, k: int = 0, bits: int = 0) -> PackedNumbers:
    """Return the numbers of integers, ``weight_packed`` or ``weight`` and what is beside it, which may have a dimension
    of experts in front. Words may be of any integers but int8, which holds one number each.

    Args:
        k: input features; 0 if they fill all words.
        bits: of a packed number; 0 for as many as the format has.
    """
    zeros, z, g_idx = tensors.get("weight_zero_point"), None, tensors.get("weight_g_idx")
    packed, bits = tensors.get("weight_packed"), bits or format.bits
    added = 0 if format.has_zero else (1 << format.bits - 1) - (1 << bits - 1)
    if packed is None:
        codes, whole = PackedMatrix.of_integers("weight", tensors["weight"], bits), False
    else:
        k = k or packed.shape[-1] * packed.element_size() * 8 // bits
        whole = packed.shape[-1] != -(-k * bits // (8 * packed.element_size()))
        codes = PackedMatrix(packed, along="k", bits=bits, size=k, whole=whole, added=added)
    n, scales = codes.shape[-2], tensors["weight_scale"]
    if scales.numel() == 1:  # of the whole matrix
        scales = scales.expand(n, 1)
    if zeros is not None:
        signed = zeros.dtype == torch.int8
        z = (
            PackedMatrix.of_integers("weight_zero_point", zeros, bits)
            if signed
            else PackedMatrix(zeros, along="n", bits=bits, size=n, whole=whole)
        )
    if z is not None and not format.has_zero:
        check_symmetric(z.rows(0, n), bits)
        z = None
    if g_idx is not None and (g_idx == -1).any():
        g_idx = None  # it was allocated, and not used
    names = "weight" if packed is None else "weight_packed", "weight_scale", "weight_zero_point"
    return PackedNumbers(format, codes, PackedMatrix(scales), z, g_idx=g_idx, names=names)


class CompressedTensors(Packing):
    method = "compressed-tensors"
    contents = "a folder with a model in compressed-tensors (pack-, int-, mxfp4-pack- or nvfp4-pack-quantized)"
    marks = (
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_g_idx",
        "weight_shape",
        "weight_global_scale",
    )
    others = ("weight", "input_global_scale", "input_scale", "input_zero_point")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.check(config)

    @staticmethod
    def check(config: Mapping[str, Any]) -> None:
        """Raise ValueError for what this packing does not read."""
        if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise ValueError("sparsity_config says that weights are sparse, wanted dense ones")
        if preset := next((key for key, g in config["config_groups"].items() if not isinstance(g, Mapping)), None):
            raise ValueError(
                f"config_groups.{preset} is the name of a preset, wanted its targets and weights, which "
                "compressed-tensors writes when it saves the model"
            )

    def named(self) -> Iterable[Named]:
        """Give the names and patterns among ``targets``, which may also be names of classes, such as Linear."""
        groups = self.config["config_groups"].items()
        targets = {key: g["targets"] for key, g in groups if (g.get("weights") or {}).get("num_bits") == 4}
        patterns = _expressions("targets", {*itertools.chain(*targets.values())})
        for key, names in targets.items():
            argument = f"config_groups.{key}.targets"
            for target in names:
                if target.startswith("re:"):
                    yield Named(argument, target, partial(patterns.match, target))
                elif not target[:1].isupper():
                    yield Named(argument, target)

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        scheme = self._scheme(name)
        weights, packing = scheme["weights"], scheme.get("format") or self.config.get("format")
        if packing not in PACKINGS:
            raise ValueError(f"its format is {packing!r}, wanted {' or '.join(PACKINGS)}")
        bits = weights.get("num_bits")
        if packing in FLOATS:
            check_bits(bits, (FLOATS[packing].bits,))
            return _float_module(FLOATS[packing], scheme, stored)
        strategy = weights.get("strategy")
        if weights.get("type", "int") != "int" or strategy not in ("group", "channel", "tensor"):
            kind = f"{weights.get('type')} with a scale for each {strategy}"
            raise ValueError(f"its weight is {kind}, wanted int with a scale for each group, channel or tensor")
        check_bits(bits, (*INTEGERS, 7))
        if packing == "pack-quantized":
            n, words = check_tensor(stored, "weight_packed", ("I32",))
            k = _columns(stored, words, bits, strategy != "group")
            if bits == 7 and words != -(-k * bits // 32):
                raise ValueError("its weight has four codes of 7 bits a word, as before 2026-06; save the model anew")
        else:
            n, k = check_tensor(stored, "weight", ("I8",))
        if more := stored.keys() & {
            "weight_global_scale",
            "input_global_scale",
            "weight" if packing == "pack-quantized" else "weight_packed",
        }:
            raise ValueError(f"{min(more)} is no tensor of {packing}")
        check_tensor(stored, "weight_scale", WIDE_SCALES, (1,) if strategy == "tensor" else None)
        zero = "none" if weights.get("symmetric", True) else "int"
        group_size = weights["group_size"] if strategy == "group" else PER_COLUMN
        scale = WIDE_SCALES[stored["weight_scale"].dtype]
        format = WeightFormat(group_size, zero, scale, f"int{8 if bits == 7 else bits}")
        groups = whole_groups(format, k)
        if strategy != "tensor":
            check_tensor(stored, "weight_scale", WIDE_SCALES, (n, groups))
        elif zero == "int":
            raise ValueError("it has a zero point of the whole tensor, wanted symmetric true")
        if "weight_zero_point" in stored or format.has_zero:
            rows = n
            if "weight_zero_point" in stored and stored["weight_zero_point"].dtype == "I32":
                whole = packing == "pack-quantized" and words != -(-k * bits // 32)
                rows = -(-n // (32 // bits)) if whole else -(-n * bits // 32)
            check_tensor(stored, "weight_zero_point", ("I32", "I8"), (rows, groups))
        if "weight_g_idx" in stored:
            check_tensor(stored, "weight_g_idx", ("I32", "I64"), (k,))
        elif strategy == "group" and weights.get("actorder") in ACT_ORDERS:
            raise ValueError(
                f"it has no weight_g_idx, which says the group of each column where actorder is {weights['actorder']}"
            )
        return Module(n, k, format, "bias" in stored, activations=_activations(scheme))

    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        expected = [module.n, module.k]
        if "weight_shape" in tensors and (shape := tensors["weight_shape"].tolist()) != expected:
            raise ValueError(f"weight_shape is {shape}, but its tensors have shape {expected}")
        if module.format in FLOATS.values():
            return _float_numbers(tensors, module.format, 2 if self._bias_125 else 0)
        return numbers(tensors, module.format, module.k, self._stored_bits(module, tensors))

    @staticmethod
    def _stored_bits(module: Module, tensors: Mapping[str, torch.Tensor]) -> int:
        """Return 7 for packed codes of 7 bits in int8; else 0."""
        if module.format.bits != 8 or "weight_packed" not in tensors:
            return 0
        return 7 if tensors["weight_packed"].shape[-1] < -(-module.k // 4) else 0

    @property
    def _bias_125(self) -> bool:
        version = str(self.config.get("version") or "")
        match = re.match(r"(\d+)\.(\d+)\.(\d+)(?:\.?a(\d{8}))?", version)
        if match is None:
            return False
        *numbers, date = match.groups()
        release = tuple(map(int, numbers))
        older_build = date is not None and date < _FIRST_NIGHTLY
        return release < _FIRST_OF_BIAS_127 or (release == _FIRST_OF_BIAS_127 and older_build)

    def _scheme(self, name: str) -> Mapping[str, Any]:
        """The config group of a module: the one that names it, else with the first pattern for it by the alphabet, else
        that of its class."""
        matching = sorted(text for text in self._patterns if self._patterns.match(text, name))
        if not self._ignored.isdisjoint({name, *matching}):
            raise ValueError("config.json ignores it, but it has quantized tensors")
        classes = ("Embedding", "Linear") if is_embedding(name) else ("Linear",)
        for target in (name, *matching, *classes):
            if target in self._groups:
                return self._groups[target]
        raise ValueError(f"no config group has it, or {' or '.join(classes)}, among its targets")

    @cached_property
    def _ignored(self) -> frozenset[str]:
        return frozenset(self.config.get("ignore") or ())

    @cached_property
    def _groups(self) -> dict[str, Mapping[str, Any]]:
        """The config group, one that has weights, of each target: of several with one target the last."""
        groups = self.config["config_groups"].values()
        return {target: group for group in groups if group.get("weights") for target in group["targets"]}

    @cached_property
    def _patterns(self) -> Patterns:
        return _expressions("ignore, targets", self._ignored.union(self._groups))


def _expressions(argument: str, names: Collection[str]) -> Patterns:
    """Return the expressions among names and ``re:`` expressions."""
    return Patterns(argument, {name: name[3:] for name in names if name.startswith("re:")})


def _float_module(format: WeightFormat, scheme: Mapping[str, Any], stored: Mapping[str, TensorInfo]) -> Module:
    """Return a module of floats of 4 or 6 bits."""
    if (kind := scheme["weights"].get("type")) != "float":
        raise ValueError(f"its weight is of type {kind!r}, wanted 'float'")
    n, columns = check_tensor(stored, "weight_packed", ("U8",))
    k = packed_floats.codes_in(columns, format)
    check_tensor(stored, "weight_scale", _FLOAT_SCALES[format.scale], (n, whole_groups(format, k)))
    known = {"weight_packed", "weight_scale", "weight_shape", "bias", "input_global_scale", "input_scale"}
    if format.has_channels:
        check_tensor(stored, "weight_global_scale", ("F32",), (1,))
        known.add("weight_global_scale")
    if more := stored.keys() - known:
        raise ValueError(f"{min(more)} is no tensor of {format}")
    activations = _activations(scheme) if format == FLOATS["mxfp4-pack-quantized"] else None
    return Module(n, k, format, "bias" in stored, activations=activations)


def _float_numbers(tensors: Mapping[str, torch.Tensor], format: WeightFormat, shift: int) -> Numbers:
    """``shift`` is added to exponents."""
    scales = tensors["weight_scale"]
    if shift and not format.has_channels:
        stored = scales.view(torch.uint8)
        if int(stored.max()) > 255 - shift:
            raise ValueError(f"weight_scale: wanted exponents up to {255 - shift}, got {int(stored.max())}")
        scales = stored + shift
    factor = None
    if format.has_channels:
        check_finite("weight_global_scale", divisor := tensors["weight_global_scale"])
        factor = 1 / divisor
    return packed_floats.numbers(tensors["weight_packed"], scales, format, factor)


def _activations(scheme: Mapping[str, Any]) -> str | None:
    """Return :attr:`Module.activations` of a config group."""
    settings = scheme.get("input_activations")
    if not settings:
        return None
    bits, kind = settings.get("num_bits"), settings.get("type", "int")
    if bits not in (4, 8) or kind not in ("int", "float"):
        raise ValueError(f"its activations are {bits!r}-bit {kind}; wanted none, or int or float of 4 or 8 bits")
    return "fp8" if (bits, kind) == (8, "float") else None


def _columns(stored: Mapping[str, TensorInfo], words: int, bits: int, channels: bool) -> int:
    """Return the input features of a row of words: those of ``weight_shape`` or, in groups, which are multiples of 16,
    as many as fill the words if no code straddles them."""
    filled = 32 // bits * words
    if 32 % bits == 0 and (not channels or "weight_shape" not in stored):
        return filled
    check_tensor(stored, "weight_shape", ("I64", "I32"), (2,))
    _, k = stored["weight_shape"].read().tolist()
    dense, whole = -(-k * bits // 32), -(-k // (32 // bits))
    if k < 1 or words not in (dense, whole):
        other = "" if 32 % bits == 0 else f", or {whole} if no code straddles words"
        raise ValueError(f"weight_packed has {words} words a row, wanted {dense} of {k} codes of {bits} bits{other}")
    if 32 % bits and dense == whole > 1:
        raise ValueError(
            f"weight_packed has {words} words a row for {k} codes of {bits} bits, as many if codes straddle words as "
            "if none does (before 2026-06), so that nothing tells which; wanted another number of input features"
        )
    return k
