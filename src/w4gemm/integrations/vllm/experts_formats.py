"""4-bit experts as vLLM's methods load them: which parameters there are, and which numbers they hold.

:data:`FORMATS` has an entry for each of vLLM's methods, by the name of its class. A method keeps the experts of a layer
in parameters ``w13_*``, gates before ups, and ``w2_*``, with a leading dimension of experts. Behind it a matrix lies as
(n, k) or, if the parameter has ``is_transposed``, as (k, n): versions of vLLM differ in that. Importing this imports no
vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from w4gemm.checkpoints.awq import ORDER
from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.integrations.engines.stacked import Stacked, StackedNumbers
from w4gemm.integrations.engines.weights import SCALES
from w4gemm.integrations.vllm.takeover import VLLM

ACT_ORDERS = ("group", "dynamic", True)
"""Values of compressed-tensors' ``actorder`` by which columns are in another order; by others their scales fit them."""


class Settings(NamedTuple):
    """The settings of a method's experts."""

    group_size: int
    asymmetric: bool = False
    activations: str | None = None
    """That of :class:`w4gemm.QuantizedWeight`."""
    refused: str = ""
    """Why these experts cannot be taken, or the empty string."""
    named: str = ""
    """The string of a format that has one form only."""
    from_gptq: bool = False
    """True if vLLM has made the zero points from those of version 1 of GPTQ."""

    def format(self, scales: torch.dtype) -> WeightFormat:
        """Return the format that is multiplied, for weights loaded with scales of a dtype.

        Raises:
            TypeError, ValueError: if there is none.
        """
        return VLLM.multiplied(self.loaded(scales), self.activations)

    def loaded(self, scales: torch.dtype) -> WeightFormat:
        """Return the format that is loaded; raises as :meth:`format`."""
        if self.named:
            return WeightFormat.parse(self.named)
        if scales not in SCALES:
            raise TypeError(f"scales: wanted {' or '.join(map(str, SCALES))}, got {scales}")
        return WeightFormat(self.group_size, "int" if self.asymmetric else "none", SCALES[scales])


@dataclass(frozen=True)
class ExpertsFormat:
    """The parameters of a method: their names behind ``w13_`` and ``w2_``, and how numbers lie in them.

    Args:
        settings: reads a method, and its layer, for what the parameters do not say.
        scales, codes, zeros: names.
        along, order: of codes, as for :class:`Stacked`. Zero points lie along n.
        biases: True if the method may load biases too, ``w13_bias`` and ``w2_bias``.
        factors: of NVFP4, name of what multiplies an expert's weights, gates and ups each, or ``divides`` them.
    """

    settings: Callable[[Any, Any], Settings]
    codes: str
    scales: str
    zeros: str
    along: str = "k"
    order: tuple[int, ...] | None = None
    biases: bool = False
    factors: str = ""
    divides: bool = False

    def parameters(self, settings: Settings, biases: bool) -> list[str]:
        """Return the names of the parameters whose numbers are used.

        Args:
            biases: True if the layer has some.
        """
        leaves = [self.codes, self.scales, self.factors, self.zeros if settings.asymmetric else ""]
        leaves += ["bias"] if biases else []
        return [f"{product}_{leaf}" for product in ("w13", "w2") for leaf in leaves if leaf]

    def loaded(self, layer: torch.nn.Module, product: str, settings: Settings) -> StackedNumbers:
        """Return the numbers of a product, "w13" or "w2", that a layer holds.

        Raises:
            TypeError, ValueError: for scales of another dtype, or a format that there is not.
        """

        def stacked(name: str, along: str = "") -> Stacked:
            parameter = getattr(layer, f"{product}_{name}")
            return Stacked(parameter, getattr(parameter, "is_transposed", False), along, self.order)

        scales = stacked(self.scales)
        format = settings.loaded(scales.tensor.dtype)
        if settings.named:  # stored as bytes
            scales = replace(scales, tensor=scales.tensor.view(format.scale_dtype))
        zeros = stacked(self.zeros, "n") if settings.asymmetric else None
        if zeros is not None and settings.from_gptq and any((zeros.tensor & mask == 0).any() for mask in (15, 240)):
            # 1 was added to each byte of them, which the next byte should have seen, or should not: readers disagree
            raise ValueError("qzeros: zero points are stored as 15, which in version 1 of GPTQ means 0 or 16")
        codes = stacked(self.codes, self.along)
        if not self.factors:
            return StackedNumbers(format, codes, scales, zeros)
        factors = getattr(layer, f"{product}_{self.factors}").data.float()
        factors = (1 / factors if self.divides else factors).reshape(len(factors), -1)
        return StackedNumbers(format, codes, scales, factors=factors)


UNUSED = (
    *("g_idx", "weight_g_idx", "g_idx_sort_indices", "weight_shape", "qzeros", "weight_zero_point"),
    *("input_scale", "input_scale_2", "input_global_scale", "input_zero_point"),
)
"""Ends of the names of parameters that the numbers do not need: of columns in order, of symmetric weights, and of how
an engine's own kernels would quantize activations."""
_IN_PAIRS = "swigluoai"
"""vLLM's name of the activation whose gates and ups it loads in pairs, as our epilogue wants them."""


def in_pairs(moe: Any) -> bool:
    """True if the rows of ``w13`` are pairs of a gate and an up; else all gates come first."""
    return moe.activation.value == _IN_PAIRS


def fused_activation(moe: Any) -> str:
    """Return the activation between the products of a layer, by FusedMoEConfig, as :func:`w4gemm.linear` names it; the
    empty string if it has none."""
    name, limit = moe.activation.value, moe.swiglu_limit
    if name == _IN_PAIRS:  # with its own limit, whatever the layer says
        return "swiglu_oai" if limit in (None, 7) else ""
    if name == "silu":
        return "silu_mul" if limit is None else f"silu_mul(limit={limit:g})"
    return {"gelu": "gelu_mul", "gelu_tanh": "gelu_tanh_mul"}.get(name, "") if limit is None else ""


def _gptq(method: Any, layer: Any) -> Settings:
    config = method.quant_config
    refused = _other_bits(config.weight_bits)
    if config.desc_act and config.group_size != PER_COLUMN:
        refused = "they are in act-order (desc_act), each expert in its own"
    elif not config.is_sym:
        refused = "they are asymmetric GPTQ's"  # whose stored zero points this method of vLLM's drops
    return Settings(config.group_size, refused=refused)


def _awq(method: Any, layer: Any) -> Settings:
    config = method.quant_config
    refused = _other_bits(config.weight_bits)
    if not config.zero_point:
        refused = "they are AWQ's without zero points"
    return Settings(config.group_size, True, refused=refused)


def _compressed_tensors(method: Any, layer: Any) -> Settings:
    weights = method.weight_quant
    refused = _other_bits(weights.num_bits)
    if weights.actorder in ACT_ORDERS:
        refused = f"they are in act-order (actorder {weights.actorder!s}), each expert in its own"
    group_size = PER_COLUMN if weights.strategy == "channel" else weights.group_size
    return Settings(group_size, not weights.symmetric, refused=refused)


def _compressed_tensors_fp8(method: Any, layer: Any) -> Settings:
    return _compressed_tensors(method, layer)._replace(activations="fp8")


def _moe_wna16(method: Any, layer: Any) -> Settings:
    config = method.quant_config
    # a layer has smaller groups than the checkpoint where those would straddle ranks
    group_size = getattr(layer, "group_size", config.group_size)
    from_gptq, refused = config.linear_quant_method == "gptq", _other_bits(config.weight_bits)
    if from_gptq and config.has_zp and config.full_config.get("checkpoint_format") == "gptq_v2":
        refused = "their zero points are of version 2 of GPTQ, and vLLM reads them as of version 1"
    return Settings(group_size, config.has_zp, refused=refused, from_gptq=from_gptq)


def _mxfp4(method: Any, layer: Any) -> Settings:
    return _floats("mxfp4", layer)


def _nvfp4(method: Any, layer: Any) -> Settings:
    return _floats("nvfp4", layer)


def _floats(named: str, layer: Any) -> Settings:
    width, group_size = layer.moe_config.intermediate_size_per_partition, WeightFormat.parse(named).group_size
    straddle = f"{width} features of this GPU are not whole groups of {group_size}" if width % group_size else ""
    return Settings(group_size, refused=straddle, named=named)


def _mxfp4_in_halves(method: Any, layer: Any) -> Settings:
    settings = _mxfp4(method, layer)
    if in_pairs(layer.moe_config):
        return settings._replace(refused="the order of their gates and ups is not known")
    return settings


def _quark_mx(method: Any, layer: Any) -> Settings:
    settings = _mxfp4_in_halves(method, layer)
    if method.weight_dtype != "mxfp4":
        return settings._replace(refused=f"they are in {method.weight_dtype}")
    return settings


def _quark_integers(method: Any, layer: Any) -> Settings:
    return Settings(getattr(layer, "group_size", method.group_size), not method.is_symmetric)  # as of _moe_wna16


def _other_bits(bits: int) -> str:
    return "" if bits == 4 else f"they have {bits} bits"


_AUTO = ("qweight", "scales", "qzeros")
_COMPRESSED = ("weight_packed", "weight_scale", "weight_zero_point")

FORMATS: Mapping[str, ExpertsFormat] = {
    "AutoGPTQMoEMethod": ExpertsFormat(_gptq, *_AUTO),
    "AutoAWQMoEMethod": ExpertsFormat(_awq, *_AUTO, along="n", order=ORDER),
    "MoeWNA16Method": ExpertsFormat(_moe_wna16, *_AUTO),  # what vLLM makes of GPTQ and AWQ where Marlin cannot run
    "CompressedTensorsWNA16MarlinMoEMethod": ExpertsFormat(_compressed_tensors, *_COMPRESSED),
    "CompressedTensorsWNA16MoEMethod": ExpertsFormat(_compressed_tensors, *_COMPRESSED),
    "CompressedTensorsW4A8Fp8MoEMethod": ExpertsFormat(_compressed_tensors_fp8, *_COMPRESSED),
    "GptOssMxfp4MoEMethod": ExpertsFormat(_mxfp4, "weight", "weight_scale", "", biases=True),
    "CompressedTensorsW4A4Mxfp4MoEMethod": ExpertsFormat(_mxfp4, "weight_packed", "weight_scale", ""),
    "INCMxfp4MoEMethod": ExpertsFormat(_mxfp4_in_halves, "weight_packed", "weight_scale", ""),  # of AutoRound
    "CompressedTensorsW4A4Nvfp4MoEMethod": ExpertsFormat(
        _nvfp4, "weight_packed", "weight_scale", "", factors="weight_global_scale", divides=True
    ),
    "ModelOptNvFp4FusedMoE": ExpertsFormat(_nvfp4, "weight", "weight_scale", "", factors="weight_scale_2"),
    "QuarkNvfp4MoEMethod": ExpertsFormat(_nvfp4, "weight", "weight_scale", "", factors="weight_scale_2"),
    "QuarkOCP_MX_MoEMethod": ExpertsFormat(_quark_mx, "weight", "weight_scale", ""),
    "QuarkW4A16Int4MoEMethod": ExpertsFormat(_quark_integers, "weight", "weight_scale", "weight_zero_point"),
}
"""By the name of vLLM's method."""
