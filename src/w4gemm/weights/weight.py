"""A quantized weight: :class:`QuantizedWeight`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from w4gemm.core.autocast import without_autocast
from w4gemm.core.errors import device_here, is_int, kind_of
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.layouts import BIT_ORDER, CanonicalLayout, WeightComponents, layout_named, layout_on
from w4gemm.packing.packed_shape import PackedShape, packed_shape
from w4gemm.packing.repack import Matrix, repack_rows
from w4gemm.weights.checks import (
    PERM_DTYPE,
    check_codes,
    check_perm,
    check_range,
    checked,
    checked_count,
    is_permutation,
    sorting_perm,
)
from w4gemm.weights.components import check_in_order, cut, dequantize_parts, in_pairs, shard_of
from w4gemm.weights.file import check_path, read, unfit, write

ACTIVATIONS = ("fp8", None)
"""Values of :attr:`QuantizedWeight.activations`."""


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A quantized weight w (n, k): packed tensors and what they mean. It is immutable; methods return new weights.

    :func:`w4gemm.quantize`, :meth:`from_codes`, :meth:`load` and the readers in ``w4gemm.checkpoints`` make one.

    Attributes:
        format: the meaning of the numbers, a :class:`WeightFormat`.
        n, k: output and input features, without any padding of the layout.
        layout: the order of the bits in ``tensors``: "canonical", which files have, or the one that kernels of a device
            read: "cpu", "mma16" or, for fp8 x, "mma8". :meth:`repack` changes it.
        tensors: the packed tensors, with the dtypes and shapes of ``packed.tensors``.
        experts: 0 for a single weight; else the number of weights of this format, n and k, along a leading dimension of
            each tensor, as :meth:`stack` makes them for :func:`w4gemm.grouped_linear`.
        perm: int32 (k,) or (experts, k), the order in which w's columns are packed (act-order): packed column j is
            column perm[j] of w. None if they are packed in w's order.
        activations: "fp8" if :func:`w4gemm.linear` first quantizes x to float8_e4m3fn, with a scale for each token
            (W4A8), on every device; None if it multiplies x as it is. :meth:`repack` sets it. A file and a layer's
            state dict keep it.
        packed: format, layout, n, k and experts as one value, see :mod:`w4gemm.packing.packed_shape`.

    On a GPU each new weight launches a small kernel behind what wrote its tensors, about 2.6 us: make a weight once,
    not in every call, where it would keep products from starting early.

    Raises:
        ValueError, TypeError: if the tensors do not fit format, layout, n and k.

    Examples:
        >>> codes, scales = torch.randint(16, (512, 1024)), torch.rand(512, 8).bfloat16() + 0.5
        >>> w = w4gemm.QuantizedWeight.from_codes("int4_g128", codes, scales)
        >>> torch.equal(w.dequantize(), (codes - 8) * scales.float().repeat_interleave(128, 1))
        True
        >>> w.repack().layout, w.shard(dim=0, index=1, count=2).shape
        ('cpu', torch.Size([256, 1024]))
    """

    format: WeightFormat
    n: int
    k: int
    layout: str
    tensors: tuple[torch.Tensor, ...]
    perm: torch.Tensor | None = None
    experts: int = 0
    activations: str | None = None
    packed: PackedShape = field(init=False, repr=False)
    _bound: ClassVar[Any] = None
    """What :func:`w4gemm.linear` bound to its newest call with this weight."""
    _layer_dtype: ClassVar[torch.dtype | None] = None
    """``dtype`` of the layer that holds this weight, and no other one; None outside of layers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", WeightFormat.of(self.format))
        packed = packed_shape(self.format, self.layout, self.n, self.k, self.experts)
        object.__setattr__(self, "packed", packed)
        packed.check(self.tensors)
        if any(t.requires_grad for t in self.tensors):  # scales may be parameters; a weight is frozen
            object.__setattr__(self, "tensors", tuple(t.detach() for t in self.tensors))
        if (
            self.activations is not None and not isinstance(self.activations, str)
        ) or self.activations not in ACTIVATIONS:
            raise ValueError(f"activations: wanted 'fp8' or None, got {self.activations!r}")
        if self.perm is not None:
            check_perm(self.perm, (self.experts, self.k) if self.experts else (self.k,), self.device)
        if self.device.type == "cuda":
            # A launch behind the one that wrote the tensors: a product requests weights while the launch before it may
            # still run (programmatic dependent launch on Hopper), when what that one writes is not visible yet.
            self.tensors[0].new_zeros(1)

    def __getstate__(self) -> dict[str, Any]:
        """With 8-bit floats as bytes, since plain pickle does not know PyTorch's storages of them, and the number of
        the order of bits."""
        tensors = tuple(t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in self.tensors)
        state = {**self.__dict__, "tensors": tensors, "bit_order": BIT_ORDER}
        state.pop("_bound", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.pop("bit_order", 1) != BIT_ORDER and state["layout"] != "canonical":
            raise ValueError(
                f"weight: another version of w4gemm pickled it in the layout {state['layout']}, whose bits have "
                "another order here; wanted a file of QuantizedWeight.save or a folder of save_pretrained"
            )
        stored = zip(state["tensors"], state["packed"].tensors, strict=True)
        self.__dict__.update(state, tensors=tuple(t.view(dtype) for t, (dtype, _) in stored))

    @classmethod
    def from_codes(
        cls,
        format: WeightFormat | str,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        g_idx: torch.Tensor | None = None,
        channels: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
    ) -> QuantizedWeight:
        """Return a weight in the canonical layout, made from codes, scales and zero points.

        Args:
            format: format of the weight, or its string.
            codes: any integer dtype (n, k), 0 .. 2**bits - 1. A symmetric format's signed integer v is code
                v + 2**(bits - 1), so of int4 v + 8; a float's code is its bits.
            scales: ``format.scale_dtype`` (n, groups); of ``b128`` (2 * ceil(n / 128), groups): for each 128 rows the
                scales of the even rows, then those of the odd rows, which are the same unless rows of a gate and an up
                projection alternate.
            zeros: ``format.zero_dtype`` (n, groups); None for a format without zero points.
            g_idx: integers (k,), the group of each column, as GPTQ with desc_act stores it; None if column j is in
                group j // g. Groups are full, but for the last one.
            channels: float32 (n,), the scale of each output channel; None for a format without.
            factors: fp16 (n, superblocks, ``format.factors``), the factors of scales and, with zero points, of these;
                None for a format without.

        Raises:
            TypeError, ValueError: naming the argument, what was wanted and what came. Refused are scales and zero
                points whose weights would not be finite, in fp16 or beyond 2**31, and codes of NaN and infinity.
        """
        format = WeightFormat.of(format)
        parts = checked(format, WeightComponents(codes, scales, zeros, channels, factors))
        n, k = parts.codes.shape
        perm = None if g_idx is None else sorting_perm(g_idx, format, k, codes.device)
        stored = (parts.codes if perm is None else parts.codes[:, perm]).to(torch.uint8)
        tensors = layout_named("canonical").pack(parts._replace(codes=stored), format)
        return cls(format, n, k, "canonical", tensors, perm)

    @classmethod
    @without_autocast
    def interleave(cls, gate: QuantizedWeight, up: QuantizedWeight) -> QuantizedWeight:
        """Return one weight (2 n, k) from two (n, k), bit for bit: row 2 i is gate's row i, row 2 i + 1 is up's.

        ``linear(..., activation="silu_mul")`` takes such a weight. It lies in gate's layout and on its device. To split
        it along n for tensor parallelism gives the same as to split its two halves.

        Raises:
            TypeError, ValueError: if they differ in format, n, k, device, activations or order of columns.
        """
        for name, w in (("gate", gate), ("up", up)):
            if not isinstance(w, cls):
                raise TypeError(f"{name}: wanted a QuantizedWeight, got {type(w).__name__}")
        perms = [w.perm for w in (gate, up) if w.perm is not None]
        if _differing(gate, up) or len(perms) == 1 or (perms and not torch.equal(*perms)):
            raise ValueError(f"up: wanted format, n, k, device, activations and perm of gate, {gate}, got {up}")
        if gate.experts or up.experts:
            if gate.experts != up.experts:
                raise ValueError(f"up: wanted {gate.experts} experts like gate, got {up.experts}")
            each = (cls.interleave(gate.expert(e), up.expert(e)) for e in range(gate.experts))
            return cls.stack(each, gate.experts, gate.layout)
        up, names = up.repack(gate.layout), WeightComponents._fields
        if gate.layout == "canonical":  # whose rows are w's, so that codes stay packed
            first, second = (WeightComponents.of(map(w.named_tensors().get, names)) for w in (gate, up))
            tensors = tuple(t for t in in_pairs(first, second, gate.format) if t is not None)
        else:
            pairs = in_pairs(gate.parts(), up.parts(), gate.format)
            tensors = layout_named(gate.layout).pack(pairs, gate.format)
        return replace(gate, n=2 * gate.n, tensors=tensors)

    @classmethod
    @without_autocast
    def stack(
        cls, weights: Iterable[QuantizedWeight], count: int | None = None, layout: str | None = None
    ) -> QuantizedWeight:
        """Return one weight of several experts. Each weight is repacked as it comes, so that with a generator, which
        makes, loads or moves one after the other, memory holds only the result and one expert.

        Args:
            weights: of equal format, n, k, device and activations, without experts. Each may be in act-order.
            count: number of weights; may be omitted if ``weights`` has a length.
            layout: as for :meth:`repack`.

        Raises:
            TypeError, ValueError: if weights differ, or their number is not ``count``.
        """
        count = checked_count(weights, count)
        stacked, first, perm = 0, None, None
        for w in weights:
            if not isinstance(w, cls) or w.experts:
                came = w if isinstance(w, cls) else kind_of(w)
                raise TypeError(f"weights: wanted QuantizedWeights without experts, got {came}")
            if stacked == count:
                raise ValueError(f"weights: wanted {count}, got more")
            if first is None:
                first = w
                layout = layout_on(w.device, w.format, w.activations) if layout is None else layout
                target = packed_shape(w.format, layout, w.n, w.k, count)
                tensors = target.empty(w.device)
            if other := _differing(first, w):
                expected, got = (", ".join(f"{name} {getattr(of, name)}" for name in other) for of in (first, w))
                number = f"number {stacked + 1} of {count}"
                raise ValueError(f"weights: wanted {expected} like the first, got {got} as {number}")
            w._repack_into(target.layout, tuple(t[stacked] for t in tensors))
            if w.perm is not None:
                if perm is None:  # the others' columns are in order
                    perm = torch.arange(w.k, dtype=PERM_DTYPE, device=w.device).repeat(count, 1)
                perm[stacked] = w.perm
            stacked += 1
        if first is None or stacked < count:
            raise ValueError(f"weights: wanted {count}, got {stacked}")
        return replace(first, layout=target.layout, tensors=tensors, perm=perm, experts=count)

    def expert(self, index: int) -> QuantizedWeight:
        """Return the weight of one expert, which shares this weight's memory.

        Raises:
            ValueError: if this is a single weight, or has no expert ``index``.
        """
        if not self.experts:
            raise ValueError(f"expert: wanted a weight of several experts, got a single one, {self!r}")
        if not is_int(index) or not 0 <= index < self.experts:
            raise ValueError(f"index: wanted an expert 0 .. {self.experts - 1}, got {index!r}")
        perm = None if self.perm is None else self.perm[index]
        return replace(self, tensors=tuple(t[index] for t in self.tensors), perm=perm, experts=0)

    def as_one(self, first: int = 0, last: int | None = None) -> QuantizedWeight | None:
        """Return the weight (count * n, k) of the experts first .. last - 1, one below the other, sharing this weight's
        memory; None if the layout pads n, because the padding lies between the experts, or if they are in act-order,
        each in its own."""
        if self.packed.has_room or self.perm is not None:
            return None
        tensors = tuple(t[first:last].flatten(0, 1) for t in self.tensors)
        return replace(self, n=self.n * len(self.tensors[0][first:last]), tensors=tensors, experts=0)

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.tensors[0].device

    @property
    def shape(self) -> torch.Size:
        """(n, k), or (experts, n, k)."""
        return torch.Size((self.experts, self.n, self.k) if self.experts else (self.n, self.k))

    @property
    def dtype(self) -> torch.dtype:
        """The ``dtype`` of the layer that holds this weight, because models cast x to it in front of some layers
        (Mamba's head, DeepSeek's indexer), and PEFT makes its parameters in it. Without a layer that of the scales if
        it has 16 bits, else bfloat16."""
        if self._layer_dtype is not None:
            return self._layer_dtype
        return self.format.scale_dtype if self.format.scale_dtype.itemsize == 2 else torch.bfloat16

    def of_layer(self, dtype: torch.dtype) -> QuantizedWeight:
        """Return this weight for a layer of ``dtype``, with the same tensors."""
        w = replace(self)
        object.__setattr__(w, "_layer_dtype", dtype)
        return w

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = self.tensors if self.perm is None else (*self.tensors, self.perm)
        return sum(t.numel() * t.element_size() for t in tensors)

    @without_autocast
    def parts(self) -> WeightComponents:
        """Unpack codes uint8 (n, k), scales (n, groups), zero points, channel scales and factors from any layout.

        Columns are in packed order: packed column j is in group j // format.group_length(k) and, if ``perm`` is set, is
        column perm[j] of w. If ``experts`` > 0, each tensor has a leading dimension (experts).
        """
        if self.experts:
            each = zip(*(self.expert(e).parts() for e in range(self.experts)), strict=True)
            return WeightComponents.of(None if ts[0] is None else torch.stack(ts) for ts in each)
        return layout_named(self.layout).unpack(self.tensors, self.format, self.n, self.k)

    @without_autocast
    def repack(self, layout: str | None = None, *, activations: str | None = "same") -> QuantizedWeight:
        """Return the same weight in another layout, bit for bit.

        Args:
            layout: a layout's name; None for the one that the fastest kernel for these activations reads on this
                weight's device.
            activations: "fp8" to quantize x, None to multiply x as it comes, "same" to keep this weight's.

        Raises:
            ValueError: for an unknown name, or a layout that cannot hold the format, with the reason.
        """
        if activations is not None and not isinstance(activations, str):
            raise TypeError(f"activations: wanted 'fp8' or None, got {kind_of(activations)}")
        activations = self.activations if activations == "same" else activations
        target = layout_on(self.device, self.format, activations) if layout is None else layout_named(layout).name
        if target == self.layout:
            return self if activations == self.activations else replace(self, activations=activations)
        tensors = packed_shape(self.format, target, self.n, self.k, self.experts).empty(self.device)
        if not self.experts:
            self._repack_into(target, tensors)
        for e in range(self.experts):
            self.expert(e)._repack_into(target, tuple(t[e] for t in tensors))
        return replace(self, layout=target, tensors=tensors, activations=activations)

    def _repack_into(self, layout: str, tensors: tuple[torch.Tensor, ...]) -> None:
        """Write a weight without experts to ``tensors`` of a layout."""
        matrix = Matrix(self.format, self.n, self.k)
        repack_rows(layout_named(layout), tensors, layout_named(self.layout), self.tensors, matrix)

    @without_autocast
    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return w (n, k) in ``dtype``, with its columns in their original order whatever ``perm`` is.

        :mod:`w4gemm.core.formats` defines the numbers; 16-bit dtypes are rounded once from the exact value.

        Raises:
            TypeError: for a dtype that is not floating point, of 16 bits or more.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
            raise TypeError(f"dtype: wanted a floating-point dtype of 16 bits or more, got {dtype!r}")
        if self.experts:
            if (one := self.as_one()) is not None:
                return one.dequantize(dtype).view(self.shape)
            return torch.stack([self.expert(e).dequantize(dtype) for e in range(self.experts)])
        w = dequantize_parts(self.parts(), self.format, dtype)
        return w if self.perm is None else w.index_select(1, torch.argsort(self.perm))

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """Return the same weight on another device, in the same layout; ``to(device).repack()`` gives that device's.

        Raises:
            TypeError, ValueError: for what is no device, or one that is not there.
        """
        device = device_here(device)
        perm = None if self.perm is None else self.perm.to(device)
        return replace(self, tensors=tuple(t.to(device) for t in self.tensors), perm=perm)

    @without_autocast
    def shard(self, dim: int, index: int, count: int) -> QuantizedWeight:
        """Return shard ``index`` of ``count`` equal shards, for tensor parallelism, in this weight's layout. It has the
        same numbers, bit for bit.

        If shards along k would divide a group, they have a smaller group size, the greatest common divisor of the group
        size and the shard's k, and scales are repeated. :class:`WeightFormat` says which sizes GPU kernels take. Where
        shards would divide columns that share factors, or rows that share scales, they get another scale rule, such as
        float32 scales.

        Args:
            dim: 0 splits the output features n (column parallel), 1 the input features k (row parallel).
            index, count: which of how many shards, such as the rank and the world size.

        Raises:
            ValueError: if shards would not be equal, or their k not a multiple of 16; the message says which counts
                fit. Also if dim is 1 and the weight has a ``perm``, because its groups have columns all over k.
        """
        if self.experts:
            return self.stack(
                (self.expert(e).shard(dim, index, count) for e in range(self.experts)), self.experts, self.layout
            )
        rows, columns, format = shard_of(self.format, self.n, self.k, dim, index, count)
        if dim == 1 and count > 1:
            check_in_order(self.perm)
        part = cut(self.parts(), self.format, format, rows, columns)
        n, k = part.codes.shape
        layout = "canonical" if layout_named(self.layout).supports(format) else self.layout
        return replace(self, format=format, n=n, k=k, layout=layout, tensors=layout_named(layout).pack(part, format))

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a weight in the canonical layout by name: ``codes``, ``scales`` and, if it has them,
        ``zeros``, ``channels``, ``factors`` and ``perm``.

        Raises:
            ValueError: for another layout, whose tensors have no such meaning.
        """
        if self.layout != "canonical":
            raise ValueError(f"layout: wanted canonical, got {self.layout}; w.repack('canonical') gives that")
        perm = {} if self.perm is None else {"perm": self.perm}
        return dict(zip(self.format.part_names, self.tensors, strict=True)) | perm

    def save(self, path: str | Path) -> None:
        """Write the weight to a safetensors file, in the canonical layout, with format, sizes and activations in the
        metadata. :meth:`load` reads it on any device. A symbolic link at ``path`` stays, and its target is written.

        Raises:
            OSError: if the file cannot be written.
            TypeError: for what is no path.
            ValueError: for a weight on the meta device, which has no numbers.
        """
        check_path(path)
        if self.device.type == "meta":
            raise ValueError(f"weight: wanted one with numbers, got one on the meta device, {self!r}")
        facts: dict[str, Any] = {"format": str(self.format), "n": self.n, "k": self.k}
        facts |= {"experts": self.experts} if self.experts else {}
        facts |= {"activations": self.activations} if self.activations else {}
        write(path, self.repack("canonical").named_tensors(), facts)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> QuantizedWeight:
        """Return the weight of a file that :meth:`save` wrote, in the canonical layout, on ``device``; ``repack()``
        gives the layout that kernels of the device read.

        Raises:
            FileNotFoundError: if there is no such file.
            FormatError: if the file is truncated or was not written by :meth:`save`.
            TypeError, ValueError: for what is no path or no device, or a device that is not there or is meta.
        """
        tensors, facts = read(path, device)
        try:
            format = WeightFormat.parse(facts["format"])
            if tensors.keys() - {"perm"} != set(format.part_names):
                names = ", ".join(format.part_names)
                raise ValueError(f"{format} wants tensors {names}, and perm in act-order, got {', '.join(tensors)}")
            ordered, perm = tuple(tensors[name] for name in format.part_names), tensors.get("perm")
            rest = facts.get("experts", 0), facts.get("activations")
            weight = cls(format, facts["n"], facts["k"], "canonical", ordered, perm, *rest)
            weight.check_range()
            if perm is not None and not is_permutation(perm):
                raise ValueError(f"perm: wanted each of 0..{weight.k - 1} once")
        except (KeyError, TypeError, ValueError) as e:
            raise unfit(path, e) from e
        return weight

    def check_range(self) -> None:
        """Raise ValueError for a layout other than the canonical one, and for codes, scales or zero points that
        :meth:`from_codes` refuses. Rows are counted over all experts. On the meta device there are none to check."""
        if self.device.type != "meta":
            named = self.named_tensors()
            tensors = tuple(
                named[name].flatten(0, 1) if self.experts else named[name] for name in self.format.part_names
            )
            parts = CanonicalLayout().unpack_scales(tensors, self.format, self.k)
            check_range(self.format, *parts[1:])
            if self.format.element_rule.refused_codes:
                assert self.format.bits == 8, "codes that are not bytes"
                check_codes(self.format, parts.codes)

    if not TYPE_CHECKING:  # type checkers would take any attribute then

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # Python asks here too if a property raised AttributeError: say which
                return object.__getattribute__(self, name)
            hint = "; it is no tensor, and dequantize() returns one" if hasattr(torch.Tensor, name) else ""
            if name in ("cpu", "cuda"):
                hint = f"; to({name!r}) moves it"
            raise AttributeError(f"a QuantizedWeight has no attribute {name!r}{hint}")

    def __repr__(self) -> str:
        experts = f"experts={self.experts}, " if self.experts else ""
        return (
            f"QuantizedWeight({self.format}, {experts}n={self.n}, k={self.k}, layout={self.layout!r}, "
            f"{'' if self.activations is None else f'activations={self.activations!r}, '}device={self.device}, "
            f"{'' if self.perm is None else 'act-order, '}{self.nbytes / 2**20:.1f} MiB)"
        )


def _differing(w: QuantizedWeight, other: QuantizedWeight) -> list[str]:
    """Return the names of what two weights differ in, of all that must be the same in weights that become one."""
    same = ("format", "n", "k", "device", "activations")
    return [name for name in same if getattr(w, name) != getattr(other, name)]
