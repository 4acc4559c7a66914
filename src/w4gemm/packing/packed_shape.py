"""Shape of a weight's packed tensors: :class:`PackedShape`, a value without tensors."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch

from w4gemm.core.errors import kind_of, require_int
from w4gemm.core.format_names import LARGEST_SIZE
from w4gemm.core.formats import TensorShape, WeightFormat
from w4gemm.packing.layouts import layout_named


@dataclass(frozen=True, eq=False)
class PackedShape:
    """Format, layout and size of a weight, and so dtype and shape of each of its tensors.

    Made with :func:`packed_shape`, which gives the same object for equal values: it is compared and hashed by identity,
    because every call of a product looks something up by it.
    """

    format: WeightFormat
    layout: str
    n: int
    k: int
    experts: int = 0
    """0 for a single weight; else the leading dimension of every tensor."""
    tensors: tuple[TensorShape, ...] = field(init=False, repr=False)
    """dtype and shape of each tensor; all are contiguous."""

    def __post_init__(self) -> None:
        layout = layout_named(self.layout)
        if reason := layout.supports(self.format):
            raise ValueError(f"layout: {self.layout} cannot hold {self.format}: {reason}")
        leading = (self.experts,) if self.experts else ()
        shapes = layout.shapes(self.format, self.n, self.k)
        object.__setattr__(self, "tensors", tuple((dtype, (*leading, *shape)) for dtype, shape in shapes))

    def __reduce__(self) -> tuple[object, ...]:
        return packed_shape, (self.format, self.layout, self.n, self.k, self.experts)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.tensors)

    @functools.cached_property
    def padded(self) -> bool:
        """True if a weight of one more row has tensors of the same shapes, which therefore do not tell n."""
        return self._shapes(self.n) == self._shapes(self.n + 1)

    @functools.cached_property
    def has_room(self) -> bool:
        """True if a tensor has room for another row, so that another weight's rows cannot follow at once."""
        return any(own == more for own, more in zip(self._shapes(self.n), self._shapes(self.n + 1), strict=True))

    def _shapes(self, n: int) -> tuple[TensorShape, ...]:
        return layout_named(self.layout).shapes(self.format, n, self.k)

    def check(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Raise ValueError if ``tensors`` are not contiguous tensors of these dtypes and shapes on one device."""
        if not isinstance(tensors, tuple) or not all(isinstance(t, torch.Tensor) for t in tensors):
            came = ", ".join(map(kind_of, tensors)) if isinstance(tensors, (tuple, list)) else kind_of(tensors)
            raise TypeError(f"tensors: wanted a tuple of tensors, got {type(tensors).__name__} {came:.120}")
        if len(self.tensors) != len(tensors):
            raise ValueError(
                f"tensors: {self.layout} {self.format} wants {len(self.tensors)} tensors, got {len(tensors)}"
            )
        for i, ((dtype, shape), t) in enumerate(zip(self.tensors, tensors, strict=True)):
            if t.dtype != dtype or tuple(t.shape) != shape or not t.is_contiguous():
                raise ValueError(
                    f"tensors[{i}]: {self.layout} {self.format} with n {self.n}, k {self.k} wants a contiguous "
                    f"{dtype} {shape}, got {'' if t.is_contiguous() else 'non-contiguous '}{t.dtype} {tuple(t.shape)}"
                )
        if len({t.device for t in tensors}) > 1:
            raise ValueError(f"tensors: wanted one device, got {sorted({str(t.device) for t in tensors})}")

    def empty(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return uninitialized tensors of these dtypes and shapes."""
        return tuple(torch.empty(shape, dtype=dtype, device=device) for dtype, shape in self.tensors)


def packed_shape(format: WeightFormat, layout: str, n: int, k: int, experts: int = 0) -> PackedShape:
    """Return the one :class:`PackedShape` of these values.

    Raises:
        TypeError, ValueError: for a layout that there is not or that cannot hold the format, and for bad sizes.
    """
    if not isinstance(layout, str):
        layout_named(layout)
    are_ints = type(n) is type(k) is type(experts) is int
    if not are_ints or min(n, k) < 1 or experts < 0 or max(n, k, experts) > LARGEST_SIZE:
        for name, size, least in (("n", n, 1), ("k", k, 1), ("experts", experts, 0)):
            require_int(name, size, least)
    return _packed_shape(format, layout, n, k, experts)


_packed_shape = functools.cache(PackedShape)
