"""The numbers of a weight in a checkpoint's tensors: :class:`Numbers`.

Each packing says where its numbers lie (``numbers`` of gptq.py, awq.py, compressed_tensors.py, w4afp8.py and
packed_floats.py). ``load`` and ``convert`` make a canonical weight of them, and plugins of serving engines, which hold
the same tensors, pack them for a kernel: rows after rows, or experts after experts, so that little memory is needed
beside both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device
from w4gemm.packing.bits import unpack, unpack_planes
from w4gemm.packing.layouts import WeightComponents, layout_for, layout_named
from w4gemm.packing.packed_shape import packed_shape
from w4gemm.packing.repack import Matrix, pack_experts, pack_rows, rows_in_pairs
from w4gemm.weights.checks import check_range, sorting_perm
from w4gemm.weights.fold import with_e4m3_scales
from w4gemm.weights.weight import QuantizedWeight

_WORDS = (torch.int32, torch.uint8, torch.int8)
"""dtypes of integers that hold packed numbers."""


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix of numbers, or one for each expert, as it lies in a checkpoint's tensor.

    Attributes:
        tensor: (n, columns), or (columns, n) if ``transposed``, with a dimension of experts in front if there are some.
        along: of integers that hold packed numbers: "n" or "k", the dimension that they are packed along.
        order: as for :func:`w4gemm.packing.bits.unpack`.
        signed: True if packed numbers are q in two's complement, in place of q + 2**(bits - 1).
        bits: of a packed number. If they do not divide a word's, numbers straddle words.
        size: of the packed dimension, if the last word is filled up; 0 if all words are full.
        whole: True if no number straddles words: each has as many as fit, and the rest of its bits is not used.
        planes: True if numbers lie as :func:`w4gemm.packing.bits.unpack_planes` takes them.
        added: what is added to a packed number to make the code of an element of more bits.
    """

    tensor: torch.Tensor
    transposed: bool = False
    along: str = ""
    order: tuple[int, ...] | None = None
    signed: bool = False
    bits: int = 4
    size: int = 0
    whole: bool = False
    planes: bool = False
    added: int = 0

    @property
    def _word_bits(self) -> int:
        return 8 * self.tensor.element_size()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the numbers: (n, columns), or (experts, n, columns)."""
        *experts, n, columns = self._rows_first.shape
        n, columns = (self._count(words) if self.along == d else words for d, words in (("n", n), ("k", columns)))
        return (*experts, n, columns)

    def _count(self, words: int) -> int:
        """Return how many numbers so many words hold."""
        each = self._word_bits // self.bits
        most = words * each if self.whole else words * self._word_bits // self.bits
        least = most - each if self.whole else (words - 1) * self._word_bits // self.bits
        return self.size if least < self.size <= most else most  # words that are too many or few keep their own shape

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return the numbers of some rows of a matrix; ``start`` is a multiple of 8."""
        if self.along != "n":
            return self._unpacked(self._rows_first[start:stop])
        if self._word_bits % self.bits:
            return self._unpacked(self._rows_first)[start:stop]
        each = self._word_bits // self.bits
        first = start // each
        return self._unpacked(self._rows_first[first : -(-stop // each)])[start - first * each : stop - first * each]

    def experts(self, some: slice) -> torch.Tensor:
        """Return the numbers (experts, n, columns) of some experts."""
        return self._unpacked(self._rows_first[some])

    @property
    def _rows_first(self) -> torch.Tensor:
        return self.tensor.mT if self.transposed else self.tensor

    def _unpacked(self, part: torch.Tensor) -> torch.Tensor:
        if not self.along:
            return part
        words = part if self.along == "k" else part.mT
        if self.whole:
            shifts = torch.arange(self._word_bits // self.bits, device=words.device, dtype=words.dtype) * self.bits
            numbers = (words[..., None] >> shifts & (1 << self.bits) - 1).flatten(-2).to(torch.uint8)
        elif self.planes:
            numbers = unpack_planes(words, self.bits)
        else:
            numbers = unpack(words, self.bits, self.order)
        if self.added:
            numbers = numbers + self.added
        if self.signed:
            numbers = numbers ^ 1 << self.bits - 1
        return numbers[..., : self.shape[-1]] if self.along == "k" else numbers.mT


@dataclass(frozen=True)
class Numbers:
    """The numbers of a weight (n, k), or of one for each expert.

    Attributes:
        scales: float32 ones become ``format.scale_dtype``.
        factors: float32 (parts,), or (experts, parts), of NVFP4: what multiplies each of so many equal parts of the
            rows.
        g_idx: integers (k,), the group of each column; None if columns are in order.
        names: of codes, scales and zero points in errors.

    Raises:
        TypeError, ValueError: if tensors do not fit one another, naming one.
    """

    format: WeightFormat
    codes: PackedMatrix
    scales: PackedMatrix
    zeros: PackedMatrix | None = None
    factors: torch.Tensor | None = None
    g_idx: torch.Tensor | None = None
    names: tuple[str, str, str] = ("codes", "scales", "zeros")

    def __post_init__(self) -> None:
        format, (*_, n, k) = self.format, self.codes.shape
        for name, stored in zip(self.names, (self.codes, self.scales, self.zeros), strict=True):
            if stored is not None and stored.along and stored.tensor.dtype not in _WORDS:
                raise TypeError(f"{name}: wanted {' or '.join(map(str, _WORDS))}, got {stored.tensor.dtype}")
        experts = self.codes.shape[:-2]
        for name, stored in zip(self.names[1:], (self.scales, self.zeros), strict=True):
            if stored is None:
                continue
            shape = (*experts, n, format.groups(k))
            if stored.shape != shape:  # one group of scales would serve for all of them
                raise ValueError(f"{name}: wanted shape {shape} for {format} of k {k}, got {stored.shape}")
        if self.factors is not None and (n % self.factors.shape[-1] or self.factors.shape[:-1] != experts):
            raise ValueError(f"factor: wanted one number, or one for each of {n} rows, got {tuple(self.factors.shape)}")

    @property
    def n(self) -> int:
        return self.codes.shape[-2]

    @property
    def k(self) -> int:
        return self.codes.shape[-1]

    @property
    def experts(self) -> int:
        """Number of experts; 0 for one weight."""
        return self.codes.shape[0] if len(self.codes.shape) == 3 else 0

    @property
    def device(self) -> torch.device:
        return self.codes.tensor.device

    def weight(self, activations: str | None = None) -> QuantizedWeight:
        """Return the weight in the canonical layout.

        Args:
            activations: those of :class:`w4gemm.QuantizedWeight`.

        Raises:
            TypeError, ValueError: for numbers that :meth:`w4gemm.QuantizedWeight.from_codes` refuses.
        """
        codes, row_bits = self.codes, self.k * self.format.bits
        in_order = codes.along == "k" and not codes.transposed and codes.order is None and not codes.whole
        as_canonical = in_order and codes.bits == self.format.bits
        if self.g_idx is not None or not as_canonical or row_bits % 8:
            return self._by_rows("canonical", self.format, activations)
        packed = codes.tensor.contiguous().view(torch.uint8)[..., : row_bits // 8].contiguous()
        if codes.signed:
            packed = packed ^ {4: 0x88, 8: 0x80}[codes.bits]
        tensors = (packed, *(t.contiguous() for t in self._scales() if t is not None))
        w = QuantizedWeight(
            self.format, self.n, self.k, "canonical", tensors, experts=self.experts, activations=activations
        )
        w.check_range()
        return w

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
        layout = layout_for(Device.of(self.device), format, torch.float8_e4m3fn if activations == "fp8" else None)
        if self.experts:
            return self._by_experts(layout, format, activations, gated)
        return self._by_rows(layout, format, activations)

    def check_range(self) -> None:
        """Raise ValueError if weights would not be finite."""
        scales, zeros, channels = self._scales()
        groups = scales.shape[-1]
        check_range(self.format, scales.view(-1, groups), None if zeros is None else zeros.view(-1, groups), channels)

    def _scales(self, some: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return scales, zero points and channel scales of some rows, or of some experts."""

        def part(matrix: PackedMatrix) -> torch.Tensor:
            if self.experts:
                return matrix.experts(some)[:, : self.n].contiguous()
            return matrix.rows(*some.indices(self.n)[:2]).contiguous()

        zeros = None if self.zeros is None else part(self.zeros)
        if self.factors is None:
            return part(self.scales).to(self.format.scale_dtype), zeros, None
        channels = self.factors.repeat_interleave(self.n // self.factors.shape[-1], -1)
        return part(self.scales), zeros, channels[some].contiguous()

    def _by_rows(self, layout: str, format: WeightFormat, activations: str | None) -> QuantizedWeight:
        n, k, perm = self.n, self.k, None
        if self.g_idx is not None:
            perm = sorting_perm(self.g_idx, format, k, self.device)

        def rows(start: int, stop: int) -> WeightComponents:
            scales, zeros, channels = self._scales(slice(start, stop))
            parts = WeightComponents(self.codes.rows(start, stop).contiguous(), scales, zeros, channels)
            parts = with_e4m3_scales(parts, format) if format != self.format else parts
            check_range(format, *parts[1:])
            return parts if perm is None else parts._replace(codes=parts.codes[:, perm])

        tensors = packed_shape(format, layout, n, k).empty(self.device)
        pack_rows(layout_named(layout), tensors, rows, Matrix(format, n, k))
        return QuantizedWeight(format, n, k, layout, tensors, perm, activations=activations)

    def _by_experts(self, name: str, format: WeightFormat, activations: str | None, gated: bool) -> QuantizedWeight:
        def tall(some: slice) -> WeightComponents:
            scales, zeros, channels = self._scales(some)
            rows = (self.codes.experts(some), scales, zeros, None if channels is None else channels[..., None])
            parts = WeightComponents.of(
                None if t is None else (rows_in_pairs(t) if gated else t).flatten(0, 1) for t in rows
            )
            if parts.channels is not None:
                parts = parts._replace(channels=parts.channels.flatten())
            return with_e4m3_scales(parts, format) if format != self.format else parts

        n, k = self.n, self.k
        tensors = packed_shape(format, name, n, k, self.experts).empty(self.device)
        pack_experts(layout_named(name), tensors, tall, Matrix(format, n, k))
        return QuantizedWeight(format, n, k, name, tensors, experts=self.experts, activations=activations)
