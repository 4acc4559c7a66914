"""The formats in which engines hold packed weights. Their numbers are the checkpoint's, as w4gemm/checkpoints has them.

A layer of experts has parameters ``w13_*``, gates before ups, and ``w2_*``, with a dimension of experts in front. The
plugin of each engine has a table of the engine's methods for experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from w4gemm.checkpoints import awq, compressed_tensors, gptq, packed_floats, published
from w4gemm.checkpoints.packed_numbers import PackedNumbers
from w4gemm.checkpoints.stored import whole_groups
from w4gemm.core.activation import Activation, canonical
from w4gemm.core.elements import INTEGERS
from w4gemm.core.formats import SCALE_OF, WeightFormat
from w4gemm.integrations.engines.engine import Engine
from w4gemm.integrations.engines.loading import unloaded
from w4gemm.weights.weight import QuantizedWeight

SCALES = {dtype: rule for dtype, rule in SCALE_OF.items() if rule != "fp32"}
"""Scale rules of 16-bit scales by their dtype."""
_HELD = {**SCALES, torch.float32: "bf16"}
"""Scale rules of the scales that engines hold. float32 is rounded to bf16, as engines' own W4A8 kernels do."""


def integer_format(group_size: int, asymmetric: bool, scales: torch.dtype, bits: int = 4) -> WeightFormat:
    """Return the format of integers that an engine holds.

    Args:
        group_size: -1 for one group of all columns.

    Raises:
        TypeError, ValueError: if there is none.
    """
    if scales not in _HELD:
        raise TypeError(f"scales: wanted one of {', '.join(map(str, _HELD))}, got {scales}")
    if bits not in INTEGERS:
        raise ValueError(f"they have {bits} bits, wanted one of {', '.join(map(str, sorted(INTEGERS)))}")
    return WeightFormat(group_size, "int" if asymmetric else "none", _HELD[scales], INTEGERS[bits].name)


def check_unused_zeros(qzeros: torch.Tensor, bits: int) -> None:
    """Raise ValueError unless GPTQ's zero points of a symmetric weight are the middle of the codes, or the engine has
    loaded none."""
    if qzeros.dtype == torch.int32 and unloaded(qzeros) < 1:
        gptq.check_unused_zeros(qzeros.data, bits)


# --- experts ---------------------------------------------------------------------------------------------------------

PRODUCTS = ("w13", "w2")
Packers = dict[str, Callable[[bool], QuantizedWeight]]
"""For each product, what packs it. The argument is True if all gates lie before all ups, which become pairs. The
numbers that it holds are let go with it."""
_UNUSED = (
    *("g_idx", "weight_g_idx", "g_idx_sort_indices", "weight_shape", "qzeros", "weight_zero_point"),
    *("input_scale", "input_scale_2", "input_global_scale", "input_zero_point", "blockscale_swizzled"),
    "weight_chan_scale",
)
"""Ends of the names of parameters that the numbers do not need: of columns in order, of symmetric weights, and of how
an engine's own kernels would quantize activations and read scales."""


def activation_text(name: str, **constants: float | None) -> str:
    """Return an activation and its constants as :func:`w4gemm.linear` names it.

    Raises:
        ValueError: for constants that no activation may have.
    """
    text = str(Activation(name, tuple(constants.items())))
    return canonical(text) or text


class ExpertsSettings(NamedTuple):
    """The settings of a layer's experts, which its parameters do not say."""

    bits: int
    """0 for GGUF's, of which each product has a type of its own; its tensors say which."""
    group_size: int
    asymmetric: bool = False
    activations: str | None = None
    """As of :class:`w4gemm.QuantizedWeight`."""
    refused: str = ""
    """Why 4-bit experts with these settings cannot be taken, or the empty string."""
    named: str = ""
    """The string of a format that has one form only."""
    from_gptq: bool = False
    """True if the engine has converted the zero points from version 1 of GPTQ."""

    @property
    def why_refused(self) -> str:
        """Why these experts cannot be taken, or the empty string."""
        return self.refused if self.bits in (0, 4) else f"they have {self.bits} bits"

    def loaded(self, scales: torch.dtype) -> WeightFormat:
        """Return the format that is loaded, with scales of a dtype.

        Raises:
            TypeError, ValueError: if there is none.
        """
        return (
            WeightFormat.parse(self.named) if self.named else integer_format(self.group_size, self.asymmetric, scales)
        )


@dataclass(frozen=True)
class ExpertsFormat:
    """The parameters of a method by the ends of their names, behind ``w13_`` and ``w2_``, and how numbers lie in them.

    Attributes:
        packing: "rows" if codes lie as in compressed-tensors, "awq", "w4afp8" or "floats".
        transposed: True if a matrix lies as (k, n), but for AWQ's, which always does; a parameter's ``is_transposed``
            goes before it.
        factors: of NVFP4, what multiplies an expert's weights, gates and ups each, or ``divides`` them.
        biases: of both products, if the method may load some.
    """

    codes: str
    scales: str
    zeros: str = ""
    packing: str = "rows"
    transposed: bool = False
    factors: str = ""
    divides: bool = False
    biases: str = ""

    def parameters(self, settings: ExpertsSettings, with_bias: bool) -> list[str]:
        """Return the names of the parameters whose numbers are used."""
        leaves = [self.codes, self.scales, self.factors, self.zeros if settings.asymmetric else ""]
        leaves += [self.biases] if with_bias else []
        return [f"{product}_{leaf}" for product in PRODUCTS for leaf in leaves if leaf]

    def known(self, settings: ExpertsSettings) -> set[str]:
        """Return the names of all parameters that may be there."""
        unused = (f"{product}_{leaf}" for product in PRODUCTS for leaf in (*_UNUSED, "bias"))
        return {*self.parameters(settings, True), *unused}

    def numbers(self, layer: torch.nn.Module, product: str, settings: ExpertsSettings) -> PackedNumbers:
        """Return the numbers of a product, "w13" or "w2", that a layer holds.

        Raises:
            TypeError, ValueError: for tensors that do not fit one another, or a format that there is not.
        """

        def rows_first(leaf: str) -> torch.Tensor:
            parameter = getattr(layer, f"{product}_{leaf}")
            return parameter.data.mT if getattr(parameter, "is_transposed", self.transposed) else parameter.data

        codes, scales = rows_first(self.codes), rows_first(self.scales)
        format = settings.loaded(scales.dtype)
        zeros = rows_first(self.zeros) if settings.asymmetric else None
        if zeros is not None and settings.from_gptq and any((zeros & mask == 0).any() for mask in (15, 240)):
            # 1 was added to each byte of them, which the next byte should have seen, or should not: readers disagree
            raise ValueError("qzeros: zero points are stored as 15, which in version 1 of GPTQ means 0 or 16")
        if self.packing == "floats":
            numbers = packed_floats.numbers(codes, scales, format, self._factors(layer, product))
        elif self.packing == "awq":
            tensors = {"qweight": codes.mT, "scales": scales.mT} | ({} if zeros is None else {"qzeros": zeros.mT})
            numbers = awq.numbers(tensors, format)
        elif self.packing == "w4afp8":
            numbers = published.w4afp8_numbers({"weight": codes, "weight_scale_inv": scales}, format)
        else:
            tensors = {"weight_packed": codes, "weight_scale": scales}
            tensors |= {} if zeros is None else {"weight_zero_point": zeros}
            numbers = compressed_tensors.numbers(tensors, format)
        whole_groups(numbers.format, numbers.k)
        return numbers

    def packers(self, layer: torch.nn.Module, settings: ExpertsSettings, engine: Engine) -> Packers:
        """Return the packers of both products, once all numbers are in range.

        Raises:
            TypeError, ValueError: as from :meth:`numbers`, and for numbers that cannot be packed.
        """
        products = {product: self.numbers(layer, product, settings) for product in PRODUCTS}
        for numbers in products.values():
            numbers.check_range()
        return {
            product: functools.partial(engine.packed, numbers, settings.activations)
            for product, numbers in products.items()
        }

    def _factors(self, layer: torch.nn.Module, product: str) -> torch.Tensor | None:
        if not self.factors:
            return None
        factors = getattr(layer, f"{product}_{self.factors}").data.float()
        return 1 / factors if self.divides else factors
