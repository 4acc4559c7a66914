"""The weights of all experts from an engine's stacked tensors, experts after experts: :class:`StackedNumbers`.

Experts are unpacked and packed several at a time, because a layer has hundreds and a GPU takes longer to be asked for
one than to do it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from w4gemm.checkpoints.module_tensors import SYMMETRIC
from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.core.problem import Device
from w4gemm.packing.bits import unpack
from w4gemm.packing.layouts import WeightComponents, layout_for, layout_named
from w4gemm.packing.packed_shape import packed_shape
from w4gemm.packing.repack import ROWS
from w4gemm.weights.fold import with_e4m3_scales
from w4gemm.weights.make import check_range
from w4gemm.weights.weight import QuantizedWeight

_WORDS = (torch.int32, torch.uint8, torch.int8)
"""dtypes of integers that hold several 4-bit numbers."""
_ELEMENTS = 2**24
"""Elements packed at a time: enough to keep a GPU busy, few beside a layer's experts."""


@dataclass(frozen=True)
class Stacked:
    """An engine's tensor of matrices, one for each expert, and how numbers lie in it.

    Attributes:
        tensor: (experts, n, columns), or (experts, columns, n) if ``transposed``.
        along: of a tensor of integers that hold several 4-bit numbers each: "n" or "k", the dimension of which they do.
        order: as for :func:`w4gemm.packing.bits.unpack`.
        signed: True if the 4-bit numbers are q in two's complement, in place of q + 8.
    """

    tensor: torch.Tensor
    transposed: bool
    along: str = ""
    order: tuple[int, ...] | None = None
    signed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of an expert's numbers."""
        sizes = list(self.tensor.shape[1:])
        if self.along:
            sizes[self._packed] *= 2 * self.tensor.element_size()
        return (sizes[1], sizes[0]) if self.transposed else (sizes[0], sizes[1])

    @property
    def _packed(self) -> int:
        """Dimension of which integers hold several numbers, not counting that of experts."""
        return int((self.along == "k") != self.transposed)

    def of(self, experts: slice) -> torch.Tensor:
        """Return the numbers (experts, n, columns) of some experts."""
        tensor = self.tensor[experts]
        if not self.along:
            return tensor.transpose(1, 2) if self.transposed else tensor
        numbers = unpack(tensor.movedim(1 + self._packed, -1), 4, self.order)
        if self.signed:
            numbers = numbers ^ SYMMETRIC
        return numbers if self.along == "k" else numbers.transpose(1, 2)


@dataclass(frozen=True)
class StackedNumbers:
    """The numbers of a weight (n, k) of each expert in an engine's tensors.

    Attributes:
        factors: float32 (experts, parts), of NVFP4: what multiplies each of so many equal parts of an expert's rows.
    """

    format: WeightFormat
    codes: Stacked
    scales: Stacked
    zeros: Stacked | None = None
    factors: torch.Tensor | None = None

    @property
    def experts(self) -> int:
        return self.codes.tensor.shape[0]

    def check(self) -> None:
        """Raise ValueError if tensors do not fit one another, or weights would not be finite."""
        n, k = self.codes.shape
        for name, packed in (("codes", self.codes), ("zeros", self.zeros)):
            if packed is not None and packed.tensor.dtype not in _WORDS:
                raise TypeError(f"{name}: wanted {' or '.join(map(str, _WORDS))}, got {packed.tensor.dtype}")
        if self.format.group_size != PER_COLUMN and k % self.format.group_size:
            raise ValueError(f"groups of {self.format.group_size} do not divide {k} input features")
        wanted = (n, self.format.groups(k))
        for name, stacked in (("scales", self.scales), ("zeros", self.zeros)):
            if stacked is not None and (stacked.shape != wanted or len(stacked.tensor) != self.experts):
                came = (len(stacked.tensor), *stacked.shape)
                raise ValueError(f"{name}: wanted {(self.experts, *wanted)} for {self.format} of k {k}, got {came}")
        parts = self._parts(slice(None), codes=False)
        scales, zeros, channels = (None if t is None else t.flatten(0, 1) for t in parts)
        assert scales is not None
        check_range(self.format, scales, zeros, channels)

    def packed(
        self, activations: str | None = None, format: WeightFormat | None = None, *, gated: bool = False
    ) -> QuantizedWeight:
        """Return the weight in the layout that its device's fastest kernel for these activations reads.

        Args:
            format: as for :func:`w4gemm.integrations.engines.weights.packed`.
            gated: True for gates and ups, of which each expert has n / 2 rows after one another: rows are put in pairs,
                as :meth:`w4gemm.QuantizedWeight.interleave` has them.
        """
        (n, k), device = self.codes.shape, self.codes.tensor.device
        format = format or self.format
        folded = format != self.format
        dtype = torch.float8_e4m3fn if activations == "fp8" else None
        shape = packed_shape(format, layout_for(Device.of(device), format, dtype), n, k, self.experts)
        layout, tensors = layout_named(shape.layout), shape.empty(device)
        # experts that are a whole number of a layout's entries are packed as one tall matrix
        step = max(1, _ELEMENTS // (n * k)) if n % ROWS == 0 else 1
        for first in range(0, self.experts, step):
            some = slice(first, min(first + step, self.experts))
            rows = (None if t is None else _tall(t, gated) for t in self._parts(some))
            parts = WeightComponents.of(rows)
            if parts.channels is not None:
                parts = parts._replace(channels=parts.channels.flatten())
            parts = with_e4m3_scales(parts, format) if folded else parts
            for into, packed in zip(tensors, layout.pack(parts, format), strict=True):
                into[some] = packed.view(into[some].shape)
        return QuantizedWeight(format, n, k, shape.layout, tensors, experts=self.experts, activations=activations)

    def _parts(self, experts: slice, codes: bool = True) -> tuple[torch.Tensor | None, ...]:
        """Return codes, unless they are not asked for, scales, zero points and factors (experts, n, 1) of some
        experts."""
        wanted = (*((self.codes,) if codes else ()), self.scales, self.zeros)
        parts = [None if stacked is None else stacked.of(experts) for stacked in wanted]
        if self.factors is None:
            return (*parts, None)
        each = self.codes.shape[0] // self.factors.shape[1]
        return (*parts, self.factors[experts].repeat_interleave(each, dim=1)[..., None])


def _tall(t: torch.Tensor, gated: bool) -> torch.Tensor:
    """Return (experts, n, columns) as (experts * n, columns), with its rows in pairs if ``gated``."""
    if gated:
        t = t.unflatten(1, (2, -1)).transpose(1, 2)
    return t.reshape(-1, t.shape[-1])
