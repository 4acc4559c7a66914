"""A 4-bit weight: :class:`QuantizedWeight`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from w4gemm.core.autocast import without_autocast
from w4gemm.core.errors import device_here
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.layouts import WeightComponents, layout_named
from w4gemm.packing.packed_shape import PackedShape, packed_shape
from w4gemm.weights import experts as weight_experts
from w4gemm.weights import file as weight_file
from w4gemm.weights import make as weight_make
from w4gemm.weights import repack as weight_repack
from w4gemm.weights import shard as weight_shard
from w4gemm.weights.act_order import check_perm, in_original_order
from w4gemm.weights.dequantize import dequantize_parts

ACTIVATIONS = ("fp8", None)
"""Values of :attr:`QuantizedWeight.activations`."""


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A 4-bit weight w (n, k): packed tensors and what they mean. It is immutable; methods return new weights.

    :func:`w4gemm.quantize`, :meth:`from_codes`, :meth:`load` and the readers in ``w4gemm.checkpoints`` make one.

    Attributes:
        format: the meaning of the numbers, a :class:`WeightFormat`.
        n, k: output and input features, without any padding of the layout.
        layout: the order of the bits in ``tensors``: "canonical", which files have, or the one that kernels of a device
            read: "cpu", "mma16" or, for fp8 x, "mma8". :meth:`repack` changes it.
        tensors: the packed tensors, with the dtypes and shapes of ``packed.tensors``.
        experts: 0 for a single weight; else the number of weights of this format, n and k, along a leading dimension of
            each tensor, as :meth:`stack` makes them for :func:`w4gemm.grouped_linear`. Such a weight has no perm.
        perm: int32 (k,), the order in which w's columns are packed (act-order): packed column j is column perm[j] of
            w. None if they are packed in w's order.
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
            raise ValueError(f"activations: wanted one of {ACTIVATIONS}, got {self.activations!r}")
        if self.perm is not None:
            if self.experts:
                raise ValueError(f"perm: wanted None beside {self.experts} experts")
            check_perm(self.perm, self.k, self.device)
        if self.device.type == "cuda":
            _launch_behind(self.tensors)

    def __getstate__(self) -> dict[str, Any]:
        """With 8-bit floats as bytes, since plain pickle does not know PyTorch's storages of them."""
        tensors = tuple(t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in self.tensors)
        return {**self.__dict__, "tensors": tensors}

    def __setstate__(self, state: dict[str, Any]) -> None:
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
            codes: any integer dtype (n, k), of int4 0..15. A symmetric format's signed value v is code v + 8.
            scales: ``format.scale_dtype`` (n, groups).
            zeros: ``format.zero_dtype`` (n, groups); None for a format without zero points.
            g_idx: integers (k,), the group of each column, as GPTQ with desc_act stores it; None if column j is in
                group j // g. Groups are full, but for the last one.
            channels: float32 (n,), the scale of each output channel; None for a format without.
            factors: fp16 (n, superblocks, 2), the factors of scales and of zero points; None for a format without.

        Raises:
            TypeError, ValueError: naming the argument, what was wanted and what came. Scales and zero points whose
                weights would not be finite, in fp16 or beyond 2**31, are refused.
        """
        return weight_make.from_codes(cls, WeightFormat.of(format), codes, scales, zeros, g_idx, channels, factors)

    @classmethod
    @without_autocast
    def interleave(cls, gate: QuantizedWeight, up: QuantizedWeight) -> QuantizedWeight:
        """Return one weight (2 n, k) from two (n, k), bit for bit: row 2 i is gate's row i, row 2 i + 1 is up's.

        ``linear(..., activation="silu_mul")`` takes such a weight. It lies in gate's layout and on its device. To split
        it along n for tensor parallelism gives the same as to split its two halves.

        Raises:
            TypeError, ValueError: if they differ in format, n, k, device, activations or order of columns.
        """
        return weight_experts.interleave(cls, gate, up)

    @classmethod
    @without_autocast
    def stack(
        cls, weights: Iterable[QuantizedWeight], count: int | None = None, layout: str | None = None
    ) -> QuantizedWeight:
        """Return one weight of several experts. Each weight is repacked as it comes, so that with a generator, which
        makes, loads or moves one after the other, memory holds only the result and one expert.

        Args:
            weights: of equal format, n, k, device and activations, without perm and experts.
            count: number of weights; may be omitted if ``weights`` has a length.
            layout: as for :meth:`repack`.

        Raises:
            TypeError, ValueError: if weights differ, or their number is not ``count``.
        """
        return weight_experts.stack(cls, weights, count, layout)

    def expert(self, index: int) -> QuantizedWeight:
        """Return the weight of one expert, which shares this weight's memory.

        Raises:
            ValueError: if this is a single weight, or has no expert ``index``.
        """
        return weight_experts.expert(self, index)

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
        """The dtype of the scales if that has 16 bits, else bfloat16. Code that asks a layer's weight for its dtype,
        such as PEFT's, makes its own parameters in it."""
        return self.format.scale_dtype if self.format.scale_dtype.itemsize == 2 else torch.bfloat16

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
        same = isinstance(activations, str) and activations == "same"
        return weight_repack.repacked(self, layout, self.activations if same else activations)

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
            if (one := weight_experts.as_one(self)) is not None:
                return one.dequantize(dtype).view(self.shape)
            return torch.stack([self.expert(e).dequantize(dtype) for e in range(self.experts)])
        w = dequantize_parts(self.parts(), self.format, dtype)
        return w if self.perm is None else in_original_order(w, self.perm)

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """Return the same weight on another device, in the same layout; ``to(device).repack()`` gives that device's.

        Raises:
            TypeError, ValueError: for what is no device, or one that is not there.
        """
        device = device_here("device", device)
        perm = None if self.perm is None else self.perm.to(device)
        return replace(self, tensors=tuple(t.to(device) for t in self.tensors), perm=perm)

    @without_autocast
    def shard(self, dim: int, index: int, count: int) -> QuantizedWeight:
        """Return shard ``index`` of ``count`` equal shards, for tensor parallelism, in this weight's layout. It has the
        same numbers, bit for bit.

        If shards along k would divide a group, they have a smaller group size, the greatest common divisor of the group
        size and the shard's k, and scales are repeated. GPU kernels take group sizes that are multiples of 32.

        Args:
            dim: 0 splits the output features n (column parallel), 1 the input features k (row parallel).
            index, count: which of how many shards, such as the rank and the world size.

        Raises:
            ValueError: if shards would not be equal, or their k not a multiple of 16; the message says which counts
                fit. Also if dim is 1 and the weight has a ``perm``, because its groups have columns all over k.
        """
        return weight_shard.shard(self, dim, index, count)

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
        metadata. :meth:`load` reads it on any device.

        Raises:
            OSError: if the file cannot be written.
            TypeError: for what is no path.
            ValueError: for a weight on the meta device, which has no numbers.
        """
        weight_file.save(self, path)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> QuantizedWeight:
        """Return the weight of a file that :meth:`save` wrote, in the canonical layout, on ``device``; ``repack()``
        gives the layout that kernels of the device read.

        Raises:
            FileNotFoundError: if there is no such file.
            FormatError: if the file is truncated or was not written by :meth:`save`.
            TypeError, ValueError: for what is no path or no device, or a device that is not there or is meta.
        """
        return weight_file.load(cls, path, device)

    def check_range(self) -> None:
        """Raise ValueError for a layout other than the canonical one, and for scales or zero points that
        :meth:`from_codes` refuses. Rows are counted over all experts. On the meta device there are none to check."""
        if self.device.type != "meta":
            named = self.named_tensors().items()
            parts = {name: t.flatten(0, 1) if self.experts else t for name, t in named}
            components = WeightComponents.of(parts.get(name) for name in WeightComponents._fields)
            weight_make.check_range(self.format, *components[1:])

    def __repr__(self) -> str:
        experts = f"experts={self.experts}, " if self.experts else ""
        return (
            f"QuantizedWeight({self.format}, {experts}n={self.n}, k={self.k}, layout={self.layout!r}, "
            f"{'' if self.activations is None else f'activations={self.activations!r}, '}device={self.device}, "
            f"{'' if self.perm is None else 'act-order, '}{self.nbytes / 2**20:.1f} MiB)"
        )


def _launch_behind(tensors: tuple[torch.Tensor, ...]) -> None:
    """Launch something small behind what wrote the tensors of a weight, so that a product that follows at once does not
    follow their writer: on Hopper a product requests weights while the launch before it may still run, when what that
    one writes is not visible yet (programmatic dependent launch)."""
    tensors[0].new_zeros(1)
