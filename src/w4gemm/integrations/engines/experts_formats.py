"""4-bit experts as engines' methods hold them: which parameters there are, and which numbers they hold.

A layer of experts has parameters ``w13_*``, gates before ups, and ``w2_*``, with a dimension of experts in front. The
plugin of each engine has a table of the engine's methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from w4gemm.checkpoints import awq, compressed_tensors, packed_floats, w4afp8
from w4gemm.checkpoints.module_tensors import whole_groups
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations.engines.weights import int4_format

PRODUCTS = ("w13", "w2")
_UNUSED = (
    *("g_idx", "weight_g_idx", "g_idx_sort_indices", "weight_shape", "qzeros", "weight_zero_point"),
    *("input_scale", "input_scale_2", "input_global_scale", "input_zero_point", "blockscale_swizzled"),
)
"""Ends of the names of parameters that the numbers do not need: of columns in order, of symmetric weights, and of how
an engine's own kernels would quantize activations and read scales."""


class ExpertsSettings(NamedTuple):
    """The settings of a layer's experts, which its parameters do not say."""

    bits: int
    group_size: int
    asymmetric: bool = False
    activations: str | None = None
    """Those of :class:`w4gemm.QuantizedWeight`."""
    refused: str = ""
    """Why 4-bit experts with these settings cannot be taken, or the empty string."""
    named: str = ""
    """The string of a format that has one form only."""
    from_gptq: bool = False
    """True if the engine has made the zero points from those of version 1 of GPTQ."""

    @property
    def why_refused(self) -> str:
        """Why these experts cannot be taken, or the empty string."""
        return self.refused if self.bits == 4 else f"they have {self.bits} bits"

    def loaded(self, scales: torch.dtype) -> WeightFormat:
        """Return the format that is loaded, with scales of a dtype.

        Raises:
            TypeError, ValueError: if there is none.
        """
        return WeightFormat.parse(self.named) if self.named else int4_format(self.group_size, self.asymmetric, scales)


@dataclass(frozen=True)
class ExpertsFormat:
    """The parameters of a method by the ends of their names, behind ``w13_`` and ``w2_``, and how numbers lie in them.

    Attributes:
        packing: "rows" if codes lie as those of compressed-tensors, "awq", "w4afp8" or "floats".
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

    def numbers(self, layer: torch.nn.Module, product: str, settings: ExpertsSettings) -> Numbers:
        """Return the numbers of a product, "w13" or "w2", that a layer holds.

        Raises:
            TypeError, ValueError: for tensors that do not fit one another, or a format that there is not.
        """
        numbers = self._numbers(layer, product, settings)
        whole_groups(numbers.format, numbers.k)
        return numbers

    def _numbers(self, layer: torch.nn.Module, product: str, settings: ExpertsSettings) -> Numbers:

        def rows_first(leaf: str) -> torch.Tensor:
            parameter = getattr(layer, f"{product}_{leaf}")
            return parameter.data.mT if getattr(parameter, "is_transposed", self.transposed) else parameter.data

        codes, scales = rows_first(self.codes), rows_first(self.scales)
        format = settings.loaded(scales.dtype)
        if self.packing == "floats":
            return packed_floats.numbers(codes, scales, format, self._factors(layer, product))
        zeros = rows_first(self.zeros) if settings.asymmetric else None
        if zeros is not None and settings.from_gptq and any((zeros & mask == 0).any() for mask in (15, 240)):
            # 1 was added to each byte of them, which the next byte should have seen, or should not: readers disagree
            raise ValueError("qzeros: zero points are stored as 15, which in version 1 of GPTQ means 0 or 16")
        if self.packing == "awq":
            tensors = {"qweight": codes.mT, "scales": scales.mT}
            return awq.numbers(tensors if zeros is None else {**tensors, "qzeros": zeros.mT}, format)
        if self.packing == "w4afp8":
            return w4afp8.numbers({"weight": codes, "weight_scale_inv": scales}, format)
        tensors = {"weight_packed": codes, "weight_scale": scales}
        return compressed_tensors.numbers(tensors if zeros is None else {**tensors, "weight_zero_point": zeros}, format)

    def _factors(self, layer: torch.nn.Module, product: str) -> torch.Tensor | None:
        if not self.factors:
            return None
        factors = getattr(layer, f"{product}_{self.factors}").data.float()
        return 1 / factors if self.divides else factors
