"""Numbers as they lie in a module's tensors: :class:`PackedMatrix`, and a weight of several, :class:`PackedNumbers`.

Each packing says where its numbers lie (``numbers`` of gptq.py, awq.py, compressed_tensors.py, ...), in a folder and in
a layer of a serving engine, which holds the same tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from w4gemm.checkpoints.numbers import Numbers
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.bits import unpack, unpack_planes
from w4gemm.packing.layouts import WeightComponents
from w4gemm.weights.checks import check_range, sorting_perm
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
        bits: of a packed number; 0 if none is packed. If they do not divide a word's, numbers straddle words.
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
    bits: int = 0
    size: int = 0
    whole: bool = False
    planes: bool = False
    added: int = 0

    @classmethod
    def of_integers(cls, name: str, q: torch.Tensor, bits: int) -> PackedMatrix:
        """Return the codes of int8 numbers q.

        Raises:
            ValueError: naming the tensor, for numbers that have more than ``bits`` bits.
        """
        middle = 1 << bits - 1
        if int(q.min()) < -middle or int(q.max()) >= middle:
            raise ValueError(f"{name}: wanted {-middle} to {middle - 1}, got {int(q.min())} to {int(q.max())}")
        return cls(q.view(torch.uint8) + middle)  # modulo 256

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
        """Return the numbers of some rows of a matrix."""
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

    def expert(self, index: int) -> PackedMatrix:
        """Return the matrix of one expert."""
        return replace(self, tensor=self.tensor[index])

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


class PackedNumbers(Numbers):
    """The numbers of a weight (n, k), or of one for each expert, in a module's tensors.

    Args:
        scales: of any dtype; they become ``format.scale_dtype``. If blocks of rows share scales, they have
            ``format.scale_rows(n)`` rows.
        factors: float32 (parts,), or (experts, parts), of NVFP4: what multiplies each of so many equal parts of the
            rows.
        g_idx: integers (k,), the group of each column; None if columns are in order.
        names: of codes, scales and zero points in errors.

    Raises:
        TypeError, ValueError: if tensors do not fit one another, naming one.
    """

    def __init__(
        self,
        format: WeightFormat,
        codes: PackedMatrix,
        scales: PackedMatrix,
        zeros: PackedMatrix | None = None,
        *,
        factors: torch.Tensor | None = None,
        g_idx: torch.Tensor | None = None,
        names: tuple[str, str, str] = ("codes", "scales", "zeros"),
    ) -> None:
        for name, stored in zip(names, (codes, scales, zeros), strict=True):
            if stored is not None and stored.along and stored.tensor.dtype not in _WORDS:
                raise TypeError(f"{name}: wanted {' or '.join(map(str, _WORDS))}, got {stored.tensor.dtype}")
        *experts, n, k = codes.shape
        parts = format.parts(n, k)
        for name, part, stored in zip(names[1:], ("scales", "zeros"), (scales, zeros), strict=True):
            if stored is not None and stored.shape != (shape := (*experts, *parts[part][1])):
                # one group of scales would serve for all of them
                raise ValueError(f"{name}: wanted shape {shape} for {format} of k {k}, got {stored.shape}")
        if factors is not None and (n % factors.shape[-1] or [*factors.shape[:-1]] != experts):
            raise ValueError(f"factor: wanted one number, or one for each of {n} rows, got {tuple(factors.shape)}")
        super().__init__(format, n, k, codes.tensor.device, experts[0] if experts else 0)
        self.codes, self.scales, self.zeros, self.factors, self.g_idx = codes, scales, zeros, factors, g_idx
        self.names = names

    def components(self, some: slice) -> WeightComponents:
        if self.experts:
            scales, zeros, channels = self._scales(some)
            rows = self.codes.experts(some), scales, zeros, channels
            return WeightComponents.of(None if t is None else t.flatten(0, 1) for t in rows)
        perm = self.column_order()
        codes = self.codes.rows(some.start, some.stop)
        return WeightComponents(codes.contiguous() if perm is None else codes[:, perm], *self._scales(some))

    def column_order(self) -> torch.Tensor | None:
        return self._perm

    @functools.cached_property
    def _perm(self) -> torch.Tensor | None:
        return None if self.g_idx is None else sorting_perm(self.g_idx, self.format, self.k, self.device)

    def expert(self, index: int) -> Numbers:
        zeros = None if self.zeros is None else self.zeros.expert(index)
        factors = None if self.factors is None else self.factors[index]
        codes, scales = self.codes.expert(index), self.scales.expert(index)
        return PackedNumbers(self.format, codes, scales, zeros, factors=factors, names=self.names)

    def weight(self, activations: str | None = None) -> QuantizedWeight:
        codes, row_bits = self.codes, self.k * self.format.bits
        in_order = codes.along == "k" and not codes.transposed and codes.order is None and not codes.whole
        as_canonical = in_order and codes.bits == self.format.bits
        if self.g_idx is not None or not as_canonical or row_bits % 8:
            return super().weight(activations)
        packed = codes.tensor.contiguous().view(torch.uint8)[..., : row_bits // 8].contiguous()
        if codes.signed:
            packed = packed ^ sum(1 << bit for bit in range(codes.bits - 1, 8, codes.bits))  # the top of each
        tensors = (packed, *(t.contiguous() for t in self._scales() if t is not None))
        w = QuantizedWeight(
            self.format, self.n, self.k, "canonical", tensors, experts=self.experts, activations=activations
        )
        w.check_range()
        return w

    def check_range(self) -> None:
        """Raise ValueError if weights would not be finite."""
        scales, zeros, channels = self._scales()
        groups = scales.shape[-1]
        check_range(self.format, scales.view(-1, groups), None if zeros is None else zeros.view(-1, groups), channels)

    def _scales(self, some: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return scales, zero points and channel scales of some rows, or of some experts."""

        def part(matrix: PackedMatrix, rows: Callable[[int], int] = int) -> torch.Tensor:
            if self.experts:
                return matrix.experts(some)[:, : rows(self.n)].contiguous()
            first, last, _ = some.indices(self.n)
            return matrix.rows(rows(first), rows(last)).contiguous()

        scales = part(self.scales, self.format.scale_rows)
        zeros = None if self.zeros is None else part(self.zeros)
        if self.factors is None:
            return scales.to(self.format.scale_dtype), zeros, None
        channels = self.factors.repeat_interleave(self.n // self.factors.shape[-1], -1)
        return scales, zeros, channels[some].contiguous()
