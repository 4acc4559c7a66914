"""A 4-bit weight: :class:`QuantizedWeight`."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from w4gemm import weight_file
from w4gemm.act_order import check_perm, in_original_order, is_permutation, sorting_perm
from w4gemm.dequantize import dequantize_parts
from w4gemm.formats import WeightFormat
from w4gemm.packing.layouts import Parts, layout_for, layout_named
from w4gemm.packing.repack import repack_rows
from w4gemm.problem import Device

_PARTS = Parts._fields
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight w (n, k) in 4 bits: packed tensors, and what they mean. Immutable; every method returns a new one.

    Make one with :meth:`from_codes`, :func:`w4gemm.quantize`, :meth:`load` or a loader in ``w4gemm.checkpoints``.

    Attributes:
        format: what the numbers mean.
        n, k: output and input features, without any padding of the layout.
        layout: the name of the order in which the bits of ``tensors`` lie.
        tensors: the packed tensors, as ``layout_named(layout).shapes(format, n, k)`` says.
        experts: 0; or the number of weights of this format, n and k that the tensors hold, each in an entry of a
            leading dimension: see :meth:`stack` and :func:`w4gemm.grouped_linear`. Such a weight has no perm.
        perm: int32 (k), the order in which w's columns are packed: packed column j is column perm[j] of w. None for
            their own order; see :mod:`w4gemm.act_order`.

    Raises:
        ValueError, TypeError: if the tensors do not fit format, layout, n and k.
    """

    format: WeightFormat
    n: int
    k: int
    layout: str
    tensors: tuple[torch.Tensor, ...]
    perm: torch.Tensor | None = None
    experts: int = 0

    def __post_init__(self) -> None:
        layout = layout_named(self.layout)
        if reason := layout.supports(self.format):
            raise ValueError(f"layout: {self.layout} cannot hold {self.format}: {reason}")
        if self.n < 1 or self.k < 1:
            raise ValueError(f"n, k: wanted both >= 1, got n {self.n}, k {self.k}")
        wanted = layout.shapes(self.format, self.n, self.k)
        if self.experts:
            if not isinstance(self.experts, int) or self.experts < 0 or self.perm is not None:
                raise ValueError(f"experts: wanted an int >= 0, and no perm beside it, got {self.experts!r}")
            wanted = tuple((dtype, (self.experts, *shape)) for dtype, shape in wanted)
        if len(wanted) != len(self.tensors):
            raise ValueError(
                f"tensors: {self.layout} {self.format} wants {len(wanted)} tensors, got {len(self.tensors)}"
            )
        for i, ((dtype, shape), t) in enumerate(zip(wanted, self.tensors, strict=True)):
            if t.dtype != dtype or tuple(t.shape) != shape or not t.is_contiguous():
                raise ValueError(
                    f"tensors[{i}]: {self.layout} {self.format} with n {self.n}, k {self.k} wants a contiguous "
                    f"{dtype} {shape}, got {'' if t.is_contiguous() else 'non-contiguous '}{t.dtype} {tuple(t.shape)}"
                )
        if len({t.device for t in self.tensors}) > 1:
            raise ValueError(f"tensors: wanted one device, got {sorted({str(t.device) for t in self.tensors})}")
        if self.perm is not None:
            check_perm(self.perm, self.k, self.device)

    @classmethod
    def from_codes(
        cls,
        format: WeightFormat | str,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        g_idx: torch.Tensor | None = None,
        channels: torch.Tensor | None = None,
    ) -> QuantizedWeight:
        """A weight in the canonical layout from its numbers.

        Args:
            format: what the numbers mean, or its string.
            codes: integers 0..15 (n, k), any integer dtype. A symmetric format's signed value v is code v + 8.
            scales: (n, groups) of ``format.scale_dtype``.
            zeros: (n, groups) of ``format.zero_dtype``; None for a format without zero points.
            g_idx: the group of each column, integers (k), as GPTQ with desc_act stores it; None where group j // g
                holds column j. Groups are full, but for the last one.
            channels: float32 (n), the scale of each output channel; None for a format without.

        Raises:
            TypeError, ValueError: naming the argument, what was wanted and what came. Scales and zero points whose
                weights would not be finite, in fp16 or beyond 2**31, are refused.
        """
        format = WeightFormat.of(format)
        if not isinstance(codes, torch.Tensor) or codes.dtype not in _INTEGERS or codes.dim() != 2:
            raise TypeError(f"codes: wanted integers (n, k), got {kind_of(codes)}")
        n, k = codes.shape
        if n < 1 or k < 1:
            raise ValueError(f"codes: wanted n >= 1 and k >= 1, got shape {(n, k)}")
        if int(codes.min()) < 0 or int(codes.max()) > 15:
            raise ValueError(f"codes: wanted 0..15, got {int(codes.min())}..{int(codes.max())}")
        _check_part("scales", scales, format.scale_dtype, (n, format.groups(k)), codes.device)
        if format.zero_dtype is None:
            if zeros is not None:
                raise ValueError(f"zeros: {format} has none, got a tensor {tuple(zeros.shape)}")
        elif zeros is None:
            raise ValueError(f"zeros: {format} wants {format.zero_dtype} {(n, format.groups(k))}, got None")
        else:
            _check_part("zeros", zeros, format.zero_dtype, (n, format.groups(k)), codes.device)
        if channels is not None and format.has_channels:
            _check_part("channels", channels, torch.float32, (n,), codes.device)
        elif format.has_channels or channels is not None:
            wanted = f"wants torch.float32 {(n,)}" if format.has_channels else "has none"
            raise ValueError(f"channels: {format} {wanted}, got {kind_of(channels)}")
        _check_range(format, scales, zeros, channels)
        perm = None if g_idx is None else sorting_perm(g_idx, format, k, codes.device)
        if perm is not None:
            codes = codes[:, perm]
        tensors = layout_named("canonical").pack(Parts(codes.to(torch.uint8), scales, zeros, channels), format)
        return cls(format, n, k, "canonical", tensors, perm)

    @classmethod
    def interleave(cls, gate: QuantizedWeight, up: QuantizedWeight) -> QuantizedWeight:
        """One weight (2 n, k) of two (n, k), bit for bit: row 2 i is gate's row i, row 2 i + 1 is up's.

        This is what ``linear(..., activation="silu_mul")`` takes. It lies in gate's layout and on its device. To split
        it, or its two halves, along n for tensor parallelism gives the same.

        Raises:
            TypeError, ValueError: if they differ in format, n, k, device or order of columns.
        """
        for name, w in (("gate", gate), ("up", up)):
            if not isinstance(w, QuantizedWeight):
                raise TypeError(f"{name}: wanted a QuantizedWeight, got {type(w).__name__}")
        perms = [w.perm for w in (gate, up) if w.perm is not None]
        if (gate.format, gate.n, gate.k, gate.device) != (up.format, up.n, up.k, up.device) or (
            len(perms) == 1 or (perms and not torch.equal(*perms))
        ):
            raise ValueError(f"up: wanted format, n, k, device and perm of gate, {gate}, got {up}")

        def rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.stack((a, b), dim=1).flatten(0, 1)

        if gate.experts or up.experts:
            if gate.experts != up.experts:
                raise ValueError(f"up: wanted {gate.experts} experts like gate, got {up.experts}")
            pairs_of_experts = (cls.interleave(gate.expert(e), up.expert(e)) for e in range(gate.experts))
            return cls.stack(pairs_of_experts, gate.experts, gate.layout)
        a, b = gate.parts(), up.parts()
        pairs = Parts.of(None if s is None or t is None else rows(s, t) for s, t in zip(a, b, strict=True))
        tensors = layout_named(gate.layout).pack(pairs, gate.format)
        return replace(gate, n=2 * gate.n, tensors=tensors)

    @classmethod
    def stack(
        cls, weights: Iterable[QuantizedWeight], count: int | None = None, layout: str | None = None
    ) -> QuantizedWeight:
        """One weight of several experts, each repacked as it comes: of a generator that makes, loads or moves one after
        the other, no more than the result and one expert need be in memory.

        Args:
            weights: of equal format, n, k and device, without perm and experts.
            count: how many; may be left out where ``len(weights)`` says it.
            layout: as for :meth:`repack`.

        Raises:
            TypeError, ValueError: if they differ, or are not as many.
        """
        if count is None:
            if not isinstance(weights, Sequence):
                raise TypeError("count: wanted the number of weights, since an iterable that is no sequence has none")
            count = len(weights)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"count: wanted a number of experts from 1, got {count!r}")
        found, first = 0, None
        tensors: tuple[torch.Tensor, ...] = ()
        for w in weights:
            if not isinstance(w, cls) or w.experts or w.perm is not None:
                came = w if isinstance(w, cls) else kind_of(w)
                raise TypeError(f"weights: wanted QuantizedWeights without experts and perm, got {came}")
            if first is None:
                target = layout_for(Device.of(w.device), w.format) if layout is None else layout_named(layout).name
                first = (w.format, w.n, w.k, w.device)
                shapes = layout_named(target).shapes(w.format, w.n, w.k)
                tensors = tuple(torch.empty((count, *s), dtype=d, device=w.device) for d, s in shapes)
            if (w.format, w.n, w.k, w.device) != first or found == count:
                raise ValueError(f"weights: wanted {count} like the first, {first}, got as number {found + 1} {w!r}")
            _repack_into(w, target, tuple(t[found] for t in tensors))
            found += 1
        if first is None or found < count:
            raise ValueError(f"weights: wanted {count}, got {found}")
        return cls(*first[:3], target, tensors, experts=count)

    def expert(self, index: int) -> QuantizedWeight:
        """One of the experts, sharing this weight's memory."""
        if not isinstance(index, numbers.Integral) or not 0 <= index < self.experts:
            raise ValueError(f"index: wanted one of {self.experts} experts, got {index!r}")
        return replace(self, tensors=tuple(t[index] for t in self.tensors), experts=0)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = self.tensors if self.perm is None else (*self.tensors, self.perm)
        return sum(t.numel() * t.element_size() for t in tensors)

    def parts(self) -> Parts:
        """Codes uint8 (n, k), scales (n, groups), zero points and scales of channels, unpacked from any layout.

        Columns are in packed order, so that group j // g holds column j: with ``perm``, that is column perm[j] of w.
        Of experts, with a leading dimension each.
        """
        if self.experts:
            each = zip(*(self.expert(e).parts() for e in range(self.experts)), strict=True)
            return Parts.of(None if ts[0] is None else torch.stack(ts) for ts in each)
        return layout_named(self.layout).unpack(self.tensors, self.format, self.n, self.k)

    def repack(self, layout: str | None = None) -> QuantizedWeight:
        """The same weight in another layout, bit for bit.

        Args:
            layout: a layout's name; None for the one that the fastest kernel on this weight's device reads.

        Raises:
            ValueError: for a name that there is not, or a layout that cannot hold the format, with the reason.
        """
        target = layout_for(Device.of(self.device), self.format) if layout is None else layout_named(layout).name
        if target == self.layout:
            return self
        if reason := layout_named(target).supports(self.format):
            raise ValueError(f"layout: {target} cannot hold {self.format}: {reason}")
        shapes = layout_named(target).shapes(self.format, self.n, self.k)
        leading = (self.experts,) if self.experts else ()
        tensors = tuple(torch.empty((*leading, *s), dtype=d, device=self.device) for d, s in shapes)
        if not self.experts:
            _repack_into(self, target, tensors)
        for e in range(self.experts):
            _repack_into(self.expert(e), target, tuple(t[e] for t in tensors))
        return replace(self, layout=target, tensors=tensors)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """w (n, k) in ``dtype``, its columns in their own order whatever ``perm`` is.

        The numbers are as :mod:`w4gemm.formats` says; 16-bit dtypes are rounded once from the exact value.

        Raises:
            TypeError: for a dtype that is not floating point, of 16 bits or more.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
            raise TypeError(f"dtype: wanted a floating-point dtype of 16 bits or more, got {dtype!r}")
        if self.experts:
            return torch.stack([self.expert(e).dequantize(dtype) for e in range(self.experts)])
        w = dequantize_parts(self.parts(), self.format, dtype)
        return w if self.perm is None else in_original_order(w, self.perm)

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same weight, in the same layout, on another device."""
        perm = None if self.perm is None else self.perm.to(device)
        return replace(self, tensors=tuple(t.to(device) for t in self.tensors), perm=perm)

    def shard(self, dim: int, index: int, count: int) -> QuantizedWeight:
        """Part ``index`` of ``count`` equal parts, for tensor parallelism, in this weight's layout.

        Args:
            dim: 0 splits the output features n (column parallel), 1 the input features k (row parallel).

        Raises:
            ValueError: if the parts would not be equal, or a group of k would straddle two parts; the message says
                which counts fit. Parts of k of a weight with ``perm``, whose groups lie all over k.
        """
        if dim not in (0, 1):
            raise ValueError(f"dim: wanted 0 (n, output features) or 1 (k, input features), got {dim!r}")
        if self.experts:
            parts = (self.expert(e).shard(dim, index, count) for e in range(self.experts))
            return QuantizedWeight.stack(parts, self.experts, self.layout)
        whole = isinstance(index, numbers.Integral) and isinstance(count, numbers.Integral)
        if not whole or count < 1 or not 0 <= index < count:
            raise ValueError(f"index, count: wanted 0 <= index < count, got index {index!r}, count {count!r}")
        if dim == 1 and count > 1 and self.perm is not None:
            raise ValueError(
                "dim: this weight is in act-order (perm is not None), so its groups have columns in every part of k; "
                "split dim 0, or let the layer before give its features in the order of w.perm and split "
                "dataclasses.replace(w, perm=None)"
            )
        size = (self.n, self.k)[dim]
        unit = 1 if dim == 0 or self.format.groups(self.k) == 1 else self.format.group_size
        if count > 1 and size % (count * unit):
            fits = [1] + [c for c in range(2, min(size // unit, 256) + 1) if size % (c * unit) == 0]
            what = "equal parts" if unit == 1 else f"equal parts of whole groups of {unit}"
            raise ValueError(f"count: {'nk'[dim]} {size} does not split into {count} {what}; counts that fit: {fits}")
        codes, scales, zeros, channels = self.parts()
        elements = slice(index * size // count, (index + 1) * size // count)
        groups = slice(None) if unit == 1 else slice(elements.start // unit, -(-elements.stop // unit))

        def cut(t: torch.Tensor, columns: slice) -> torch.Tensor:
            view = t[elements] if dim == 0 else t[:, columns]
            return view.clone(memory_format=torch.contiguous_format)  # the view would keep the whole weight's memory

        part = Parts(cut(codes, elements), cut(scales, groups), None if zeros is None else cut(zeros, groups))
        if channels is not None:
            part = part._replace(channels=channels[elements].clone() if dim == 0 else channels)
        n, k = part.codes.shape
        tensors = layout_named(self.layout).pack(part, self.format)
        return replace(self, n=n, k=k, tensors=tensors)

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """``codes``, ``scales``, ``zeros``, ``channels`` and ``perm``, as far as there are, of a weight in the
        canonical layout."""
        assert self.layout == "canonical"
        perm = {} if self.perm is None else {"perm": self.perm}
        return dict(zip(self.format.part_names, self.tensors, strict=True)) | perm

    def save(self, path: str | Path) -> None:
        """Write the weight to a safetensors file, in the canonical layout, with its format in the metadata."""
        facts = {"format": str(self.format), "n": self.n, "k": self.k}
        facts |= {"experts": self.experts} if self.experts else {}
        weight_file.write(path, self.repack("canonical").named_tensors(), facts)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> QuantizedWeight:
        """Read what :meth:`save` wrote, in the canonical layout.

        Raises:
            FileNotFoundError: if there is no such file.
            FormatError: if the file is truncated, is not such a file, or lacks or adds a tensor.
        """
        tensors, facts = weight_file.read(path, device)
        try:
            if unknown := tensors.keys() - {*_PARTS, "perm"}:
                raise ValueError(f"wanted tensors {', '.join(_PARTS)} and perm, got {', '.join(sorted(unknown))}")
            ordered = tuple(tensors[name] for name in _PARTS if name in tensors)
            perm = tensors.get("perm")
            format, experts = WeightFormat.parse(facts["format"]), facts.get("experts", 0)
            weight = cls(format, facts["n"], facts["k"], "canonical", ordered, perm, experts)
            weight.check_range()
            if perm is not None and not is_permutation(perm):
                raise ValueError(f"perm: wanted each of 0..{weight.k - 1} once")
        except (KeyError, TypeError, ValueError) as e:
            raise weight_file.unfit(path, e) from e
        return weight

    def check_range(self) -> None:
        """Raise ValueError for scales and zero points that :meth:`from_codes` refuses. Nothing is known of those on the
        meta device."""
        if self.device.type != "meta":
            for w in [self.expert(e) for e in range(self.experts)] or [self]:
                _check_range(self.format, *w.parts()[1:])

    def __repr__(self) -> str:
        experts = f"experts={self.experts}, " if self.experts else ""
        return (
            f"QuantizedWeight({self.format}, {experts}n={self.n}, k={self.k}, layout={self.layout!r}, "
            f"device={self.device}, {'' if self.perm is None else 'act-order, '}{self.nbytes / 2**20:.1f} MiB)"
        )


def _repack_into(w: QuantizedWeight, layout: str, tensors: tuple[torch.Tensor, ...]) -> None:
    """Fill ``tensors`` with a weight without experts in another layout."""
    repack_rows(layout_named(layout), tensors, layout_named(w.layout), w.tensors, (w.format, w.n, w.k))


def kind_of(value: object) -> str:
    """What came instead, for a message."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _check_part(name: str, t: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(t, torch.Tensor) or t.dtype != dtype:
        raise TypeError(f"{name}: wanted {dtype}, got {t.dtype if isinstance(t, torch.Tensor) else type(t).__name__}")
    if tuple(t.shape) != shape:
        raise ValueError(f"{name}: wanted shape {shape}, got {tuple(t.shape)}")
    if t.device != device:
        raise ValueError(f"{name}: wanted device {device} like codes, got {t.device}")


def _check_range(
    format: WeightFormat, scales: torch.Tensor, zeros: torch.Tensor | None, channels: torch.Tensor | None
) -> None:
    """Refuse numbers whose weights would be NaN, or infinite in some kernel; of e4m3 scales what would saturate."""
    if channels is not None:
        limit = torch.finfo(torch.float32).max / torch.finfo(format.scale_dtype).max
        if not (channels.abs() <= limit).all():
            raise ValueError(f"channels: wanted at most {limit:.3g} in magnitude, for finite weights, and no NaN")
        most = torch.finfo(format.scale_dtype).max / 8
        if not (scales.float().abs() <= most).all():
            raise ValueError(f"scales: wanted at most {most:g} in magnitude, so that 8 * scale is an e4m3, and no NaN")
        return
    largest = scales.float().abs() * 15
    if format.zero == "float" and zeros is not None:
        largest = largest + zeros.float().abs()
    limit = format.largest_weight
    bad = ~(largest <= limit)  # also true for NaN
    if bad.any():
        row, group = (int(i) for i in bad.nonzero()[0])
        zero = "" if zeros is None else f", zero point {zeros[row, group].item()}"
        raise ValueError(
            f"scales: the weights of {int(bad.sum())} groups would not be finite (15 * |scale| and |zero point| "
            f"together must be at most {limit:g}); "
            f"first in row {row}, group {group}: scale {scales[row, group].item()}{zero}"
        )
    if format.zero == "int" and zeros is not None and int(zeros.max()) > 15:
        raise ValueError(f"zeros: wanted 0..15, got up to {int(zeros.max())}")
