"""SGLang's schemes of linear layers: :data:`SCHEMES` says which parameters each makes, and reads what they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from w4gemm.checkpoints import awq, compressed_tensors, gptq, packed_floats
from w4gemm.checkpoints.fp8_folder import ScaleBlock
from w4gemm.checkpoints.fp8_folder import numbers as fp8_numbers
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations.engines.formats import integer_format
from w4gemm.integrations.sglang.takeover import QUANTIZATION
from w4gemm.packing.bits import unpack

_DIVIDED = "they are in act-order (desc_act), and their input features are divided among GPUs"
_FP8, _MXFP8 = WeightFormat.parse("e4m3_col_fp32"), WeightFormat.parse("mxfp8")
FP8 = f"{QUANTIZATION}.fp8"
"""SGLang's module of 8-bit floats."""


class Scheme(NamedTuple):
    """A scheme of SGLang's for linear layers."""

    kind: str
    """Its layers, in sentences."""
    target: str
    """Dotted name of the class."""
    read: tuple[str, ...]
    """Parameters whose numbers are packed, as far as it makes them; the first holds the codes."""
    others: tuple[str, ...]
    """Other parameters that it may make."""
    numbers: Callable[[Any, Any], Numbers]
    """Reads the scheme and a layer that it has loaded. A ValueError says why the layer cannot be taken."""
    apply: str = "apply_weights"
    """Name of the method that multiplies."""
    takes: Callable[[Any], bool] = lambda self: True
    """Says of an instance whether its layers are of this kind; others are SGLang's without a word."""
    alone: bool = False
    """True if SGLang itself has no kernel for them."""
    floats: str = ""
    """Name of a format that may multiply fp8 x."""

    def parameters(self, layer: torch.nn.Module) -> list[str]:
        """Return the names of a layer's parameters whose numbers are packed."""
        return [name for name in self.read if name in layer._parameters]


def _check_order(act_order: bool, shapes: Any) -> None:
    """Raise ValueError if other GPUs have other columns of a weight in act-order."""
    if act_order and shapes.partition_weight_shape[0] != shapes.full_weight_shape[0]:
        raise ValueError(_DIVIDED)


def _gptq(self: Any, layer: Any) -> Numbers:
    config = self.quant_config
    _check_order(config.desc_act, self.kernel.kernel_config)  # symmetric, as Marlin wants it
    format = integer_format(config.group_size, False, layer.scales.dtype, config.weight_bits)
    return gptq.numbers(_gptq_tensors(config, layer), format)


def _gptq_tensors(config: Any, layer: Any) -> dict[str, torch.Tensor]:
    return {name: getattr(layer, name).data for name in ("qweight", "scales", *(["g_idx"] * config.desc_act))}


def _gptq_without_marlin(self: Any, layer: Any) -> Numbers:
    """SGLang does not keep whether a model is symmetric. It is if its zero points say so in either version of the
    format, as for ``load``."""
    config, zeros = self.quant_config, layer.qzeros.data
    k = layer.g_idx.shape[0]
    if config.desc_act and getattr(layer, "input_size", k) != k:
        raise ValueError(_DIVIDED)
    stored = unpack(zeros, config.weight_bits)
    middle = 1 << config.weight_bits - 1
    symmetric = bool((stored == stored[0, 0]).all()) and int(stored[0, 0]) in (middle - 1, middle)
    packing = gptq.GPTQPacking({"checkpoint_format": "gptq_v2" if self.use_v2_format else "gptq"})
    format = integer_format(config.group_size, not symmetric, layer.scales.dtype, config.weight_bits)
    return gptq.numbers(
        _gptq_tensors(config, layer), format, None if symmetric else packing.zeros(zeros, config.weight_bits)
    )


def _awq(self: Any, layer: Any) -> Numbers:
    config = self.quant_config
    if config.weight_bits != 4:
        raise ValueError(f"they have {config.weight_bits} bits, wanted 4")
    tensors = {name: getattr(layer, name).data for name in ("qweight", "scales", "qzeros")}
    return awq.numbers(tensors, integer_format(config.group_size, True, layer.scales.dtype))


def _compressed_tensors(self: Any, layer: Any) -> Numbers:
    _check_order(self.has_g_idx, self.kernel_config)
    names = ["weight_packed", "weight_scale"] + ["weight_g_idx"] * self.has_g_idx
    names += [] if self.symmetric else ["weight_zero_point"]
    format = integer_format(self.group_size, not self.symmetric, layer.weight_scale.dtype, 32 // self.pack_factor)
    return compressed_tensors.numbers({name: getattr(layer, name).data for name in names}, format)


def _nvfp4_compressed_tensors(self: Any, layer: Any) -> Numbers:
    return _nvfp4(layer, layer.weight_packed, 1 / layer.weight_global_scale.data)


def _nvfp4_modelopt(self: Any, layer: Any) -> Numbers:
    from sglang.srt.layers.quantization.fp4_utils import get_fp4_gemm_runner_backend

    backend = get_fp4_gemm_runner_backend()
    if not backend.is_marlin():
        raise ValueError(f"--fp4-gemm-backend is {backend.value}, wanted marlin or auto on Hopper")
    if self.quant_config.is_awq:
        raise ValueError("they scale activations first (NVFP4_AWQ)")
    return _nvfp4(layer, layer.weight, layer.weight_scale_2.data)


def _nvfp4_modelopt_16_bit(self: Any, layer: Any) -> Numbers:
    return _nvfp4(layer, layer.weight, layer.weight_scale_2.data)


def _nvfp4(layer: Any, codes: torch.Tensor, factors: torch.Tensor) -> Numbers:
    """Return the numbers of a layer with a factor for each of its fused parts."""
    widths = torch.tensor(layer.logical_widths, device=factors.device)
    each_row = factors.repeat_interleave(widths)
    return packed_floats.numbers(codes.data, layer.weight_scale.data, packed_floats.NVFP4, each_row)


def _fp8(self: Any, layer: Any) -> Numbers:
    codes, scales = layer.weight.data, layer.weight_scale.data
    if self.strategy == "tensor":  # one for each of the parts
        scales = scales.repeat_interleave(torch.tensor(layer.logical_widths, device=scales.device))
    return fp8_numbers(_FP8, codes, scales, ScaleBlock())


def _is_mxfp8(self: Any) -> bool:
    """True for a checkpoint in MXFP8 on a GPU that has no products of it, unless SGLang makes blocks of fp8 of it."""
    if not self.use_mxfp8 or self.convert_mxfp8_to_block or not self.is_checkpoint_fp8_serialized:
        return False
    return bool(self.mxfp8_dense_backend.is_unsupported())


def _mxfp8(self: Any, layer: Any) -> Numbers:
    return fp8_numbers(_MXFP8, layer.weight.data, layer.weight_scale_inv.data, ScaleBlock())


SCHEMES = (
    Scheme(
        "GPTQ's linear layers",
        f"{QUANTIZATION}.gptq.schemes.GPTQMarlinLinearScheme",
        ("qweight", "scales"),
        ("qzeros", "g_idx"),
        _gptq,
    ),
    Scheme(
        "GPTQ's linear layers that Marlin does not take",
        f"{QUANTIZATION}.gptq.schemes.GPTQLinearScheme",
        ("qweight", "scales", "qzeros"),
        ("g_idx",),
        _gptq_without_marlin,
    ),
    Scheme(
        "AWQ's linear layers",
        f"{QUANTIZATION}.awq.schemes.AWQMarlinLinearScheme",
        ("qweight", "scales", "qzeros"),
        (),
        _awq,
    ),
    Scheme(
        "AWQ's linear layers that Marlin does not take",
        f"{QUANTIZATION}.awq.schemes.AWQLinearScheme",
        ("qweight", "scales", "qzeros"),
        (),
        _awq,
    ),
    Scheme(
        "compressed-tensors' linear layers",
        f"{QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsWNA16",
        ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
        ("weight_shape",),
        _compressed_tensors,
    ),
    Scheme(
        "compressed-tensors' linear layers of NVFP4",
        f"{QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsW4A16Fp4",
        ("weight_packed", "weight_scale", "weight_global_scale"),
        ("input_global_scale",),
        _nvfp4_compressed_tensors,
        floats="nvfp4",
    ),
    Scheme(
        "ModelOpt's linear layers of NVFP4",
        f"{QUANTIZATION}.modelopt_quant.ModelOptFp4LinearMethod",
        ("weight", "weight_scale", "weight_scale_2"),
        ("input_scale",),
        _nvfp4_modelopt,
        apply="apply",
        floats="nvfp4",
    ),
    Scheme(
        "ModelOpt's linear layers of NVFP4 with 16-bit activations",
        f"{QUANTIZATION}.modelopt_quant.ModelOptNvFp4A16LinearMethod",
        ("weight", "weight_scale", "weight_scale_2"),
        ("input_scale",),
        _nvfp4_modelopt_16_bit,
        apply="apply",
        floats="nvfp4",
    ),
    Scheme(
        "compressed-tensors' linear layers of fp8 with 16-bit activations",
        f"{QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsW8A16Fp8",
        ("weight", "weight_scale"),
        ("input_scale",),
        _fp8,
    ),
    Scheme(
        "linear layers in MXFP8",
        f"{FP8}.Fp8LinearMethod",
        ("weight", "weight_scale_inv"),
        ("input_scale",),
        _mxfp8,
        apply="apply",
        takes=_is_mxfp8,
        alone=True,
    ),
)
