"""The numbers of a weight that is not packed yet: :class:`Numbers`, its parts, and those of several matrices.

A reader gives the numbers of each module: packed_numbers.py those of tensors in a folder, gguf/blocks.py those of
blocks. ``load``, ``from_pretrained`` and the plugins of serving engines pack them once, for the kernels of a device;
``convert`` packs them in the canonical layout. Rows are packed after rows, or experts after experts, so that little
memory is needed beside the tensors and the result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.packing.layouts import WeightComponents, layout_named, layout_on
from w4gemm.packing.packed_shape import packed_shape
from w4gemm.packing.repack import ROWS, Matrix, pack_experts, pack_rows, rows_in_pairs
from w4gemm.weights.checks import Rule, check_codes, check_rules, range_rules
from w4gemm.weights.components import Shard, check_in_order, cut, in_pairs, shard_of
from w4gemm.weights.fold import with_e4m3_scales
from w4gemm.weights.weight import QuantizedWeight

_RULES = 16
"""Rules of slices of rows that are checked at once. Each holds the scales of a slice."""


class Numbers:
    """The numbers of a weight (n, k), or of one for each expert.

    Attributes:
        format: of the weight.
        n, k: its output and input features.
        device: of the tensors, and of the packed weight.
        experts: number of experts; 0 for one weight.
    """

    def __init__(self, format: WeightFormat, n: int, k: int, device: torch.device, experts: int = 0) -> None:
        self.format, self.n, self.k, self.device, self.experts = format, n, k, device, experts

    def components(self, some: slice) -> WeightComponents:
        """Return the components of some rows, with columns in packed order; of experts, all rows of some experts, an
        expert's after the other's. The first row is a multiple of 128."""
        raise NotImplementedError

    def column_order(self) -> torch.Tensor | None:
        """Return :attr:`w4gemm.QuantizedWeight.perm`: None unless the weight is in act-order."""
        return None

    def expert(self, index: int) -> Numbers:
        """Return the numbers of one expert's weight."""
        raise NotImplementedError

    def select(self, first: int, count: int) -> Numbers:
        """Return the numbers of ``count`` experts, from ``first`` on."""
        return ExpertsNumbers(self.format, self.n, self.k, self.device, count, lambda e: self.expert(first + e))

    def shard(self, dim: int, index: int, count: int) -> Numbers:
        """Return the numbers of a shard. Arguments, errors and the shard's format as of
        :meth:`w4gemm.QuantizedWeight.shard`."""
        shard = shard_of(self.format, self.n, self.k, dim, index, count)
        if self.experts:
            sizes = shard.format, shard.n, shard.k, self.device, self.experts
            return ExpertsNumbers(*sizes, lambda e: self.expert(e).shard(dim, index, count))
        if dim == 1 and count > 1:
            check_in_order(self.column_order())
        return _Part(self, shard)

    def weight(self, activations: str | None = None) -> QuantizedWeight:
        """Return the weight in the canonical layout.

        Args:
            activations: those of :class:`w4gemm.QuantizedWeight`.

        Raises:
            TypeError, ValueError: for numbers that :meth:`w4gemm.QuantizedWeight.from_codes` refuses.
        """
        return self._packed("canonical", self.format, activations)

    def packed(
        self, activations: str | None = None, format: WeightFormat | None = None, *, gated: bool = False
    ) -> QuantizedWeight:
        """Return the weight in the layout that its device's fastest kernel for these activations reads.

        Memory holds the result and a few MiB beside the tensors; of experts, a few tens.

        Args:
            format: of the weight: that of the numbers, or that with ``scale="e4m3"``, whose group scales are rounded as
                :func:`w4gemm.fold_scales` does; None for the first.
            gated: True for gates and ups, of which each expert has n / 2 rows after one another: rows are put in pairs,
                as :meth:`w4gemm.QuantizedWeight.interleave` has them.

        Raises:
            TypeError, ValueError: for numbers that :meth:`w4gemm.QuantizedWeight.from_codes` refuses.
        """
        format = format or self.format
        layout = layout_on(self.device, format, activations)
        return self._packed(layout, format, activations, gated)

    def _packed(
        self, layout: str, format: WeightFormat, activations: str | None, gated: bool = False
    ) -> QuantizedWeight:
        n, k, each = self.n, self.k, self.n if self.experts else 1
        tensors = packed_shape(format, layout, n, k, self.experts).empty(self.device)
        rules: list[Rule] = []

        def checked(some: slice) -> WeightComponents:
            parts, first_row = self.components(some), each * some.start
            check_codes(format, parts.codes, first_row)
            if format != self.format:
                parts = with_e4m3_scales(parts, format)
            rules.extend(range_rules(format, *parts[1:], first_row=first_row))
            if len(rules) > _RULES:  # a GPU packs on while the next rows are read
                check_rules(rules)
                rules.clear()
            return parts

        def tall(some: slice) -> WeightComponents:
            parts, count = checked(some), some.stop - some.start
            if not gated:
                return parts
            pairs = (None if t is None else rows_in_pairs(t.unflatten(0, (count, -1))).flatten(0, 1) for t in parts)
            return WeightComponents.of(pairs)

        target, matrix = layout_named(layout), Matrix(format, n, k)
        if self.experts:
            pack_experts(target, tensors, tall, matrix)
        else:
            pack_rows(target, tensors, lambda first, last: checked(slice(first, last)), matrix)
        check_rules(rules)
        return QuantizedWeight(format, n, k, layout, tensors, self.column_order(), self.experts, activations)


class WeightNumbers(Numbers):
    """The numbers of a weight in the canonical layout, which a file has in this layout or which was just quantized."""

    def __init__(self, w: QuantizedWeight) -> None:
        assert w.layout == "canonical"
        super().__init__(w.format, w.n, w.k, w.device, w.experts)
        self._weight = w

    def components(self, some: slice) -> WeightComponents:
        format, count = self.format, some.stop - some.start
        of_scales = slice(format.scale_rows(some.start), format.scale_rows(some.stop))
        named = zip(format.part_names, self._weight.tensors, strict=True)
        rows = tuple(t[of_scales if name == "scales" else some] for name, t in named)
        return layout_named("canonical").unpack(rows, format, count, self.k)

    def column_order(self) -> torch.Tensor | None:
        return self._weight.perm

    def expert(self, index: int) -> Numbers:
        return WeightNumbers(self._weight.expert(index))

    def _packed(
        self, layout: str, format: WeightFormat, activations: str | None, gated: bool = False
    ) -> QuantizedWeight:
        assert format == self.format and not gated
        return self._weight.repack(layout, activations=activations)


class ExpertsNumbers(Numbers):
    """The numbers of experts that are read one by one.

    Args:
        format, n, k, device: of each of them.
        count: number of experts.
        expert: returns the numbers of one of them. It is called once for each, when they are packed.
    """

    def __init__(
        self, format: WeightFormat, n: int, k: int, device: torch.device, count: int, expert: Callable[[int], Numbers]
    ) -> None:
        super().__init__(format, n, k, device, count)
        self._expert = expert

    def expert(self, index: int) -> Numbers:
        return self._expert(index)

    def _packed(
        self, layout: str, format: WeightFormat, activations: str | None, gated: bool = False
    ) -> QuantizedWeight:
        each = (self.expert(e)._packed(layout, format, activations, gated) for e in range(self.experts))
        return QuantizedWeight.stack(each, self.experts, layout)


class PairedNumbers(Numbers):
    """The numbers of a weight (2 n, k) with the rows of two in turn, as :meth:`w4gemm.QuantizedWeight.interleave` has
    them.

    Raises:
        ValueError: if their columns are in different orders.
    """

    def __init__(self, gate: Numbers, up: Numbers) -> None:
        super().__init__(gate.format, 2 * gate.n, gate.k, gate.device)
        self._gate, self._up = gate, up
        orders = [order for order in (gate.column_order(), up.column_order()) if order is not None]
        if len(orders) == 1 or (orders and not torch.equal(*orders)):
            raise ValueError("g_idx: wanted the columns of an expert's gate and up in the same order (act-order)")

    def components(self, some: slice) -> WeightComponents:
        first = some.start // 2 // ROWS * ROWS
        rows = slice(first, -(-some.stop // 2))
        pairs = in_pairs(self._gate.components(rows), self._up.components(rows), self.format)
        inside = slice(some.start - 2 * first, some.stop - 2 * first)
        return pairs if inside == slice(0, len(pairs.codes)) else cut(pairs, self.format, self.format, inside)

    def column_order(self) -> torch.Tensor | None:
        return self._gate.column_order()


def gates_before_ups(numbers: Numbers) -> Numbers:
    """Return the numbers of experts, each of which has all rows of gates before those of ups, with their rows in
    pairs."""

    def expert(index: int) -> Numbers:
        both = numbers.expert(index)
        return PairedNumbers(both.shard(0, 0, 2), both.shard(0, 1, 2))

    return ExpertsNumbers(numbers.format, numbers.n, numbers.k, numbers.device, numbers.experts, expert)


class FoldedNumbers(Numbers):
    """The numbers of a matrix with group scales rounded to e4m3 as :func:`w4gemm.fold_scales` does, for fp8 x.

    Args:
        exact: the numbers of the matrix.
        format: that of ``exact`` with ``scale="e4m3"``.
    """

    def __init__(self, exact: Numbers, format: WeightFormat) -> None:
        super().__init__(format, exact.n, exact.k, exact.device)
        self._exact = exact

    def components(self, some: slice) -> WeightComponents:
        return with_e4m3_scales(self._exact.components(some), self.format)

    def column_order(self) -> torch.Tensor | None:
        return self._exact.column_order()


class _Part(Numbers):
    """The numbers of a shard of a matrix."""

    def __init__(self, whole: Numbers, shard: Shard) -> None:
        super().__init__(shard.format, shard.n, shard.k, whole.device)
        self._whole, self._shard = whole, shard

    def components(self, some: slice) -> WeightComponents:
        start = self._shard.rows.start
        first = (start + some.start) // ROWS * ROWS
        rows = slice(start + some.start - first, start + some.stop - first)
        parts = self._whole.components(slice(first, start + some.stop))
        return cut(parts, self._whole.format, self.format, rows, self._shard.columns)

    def column_order(self) -> torch.Tensor | None:
        return self._whole.column_order()
