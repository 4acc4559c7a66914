"""What an engine's loaders do with a tensor that comes: :class:`Copies` into a packed layer, :class:`Reads` elsewhere.

Both see PyTorch's operators. What reads a tensor's memory without them, such as NumPy, is not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RowBlock(NamedTuple):
    """Whole rows of a weight, and where a tensor has their numbers.

    Attributes:
        row: the first one, of all experts' rows.
        rows: how many.
        strides: of the tensor's storage, from row to row and from column to column.
        offset: in the storage, from the tensor's first number.
        is_whole: True if the tensor is these rows.
    """

    row: int
    rows: int
    strides: tuple[int, int]
    offset: int
    is_whole: bool = False

    def numbers(self, tensor: torch.Tensor, k: int) -> torch.Tensor:
        """Return the rows (rows, k), a view of the tensor."""
        if self.is_whole:
            return tensor
        start = tensor.storage_offset() + self.offset
        return tensor.as_strided((self.rows, k), self.strides, start)


def cover(rows: Mapping[int, int], count: int) -> bool:
    """Return whether blocks, by their first rows, are all of ``count`` rows, each once."""
    end = 0
    for row in sorted(rows):
        if row != end:
            return False
        end += rows[row]
    return end == count


class Copies(TorchDispatchMode):
    """Sees what a loader copies of one tensor into a parameter (..., k). ``blocks`` is None once it has done anything
    else with them, or copied parts of rows."""

    def __init__(self, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        super().__init__()
        self.parameter, self.tensor = parameter, tensor
        self.blocks: list[RowBlock] | None = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            block = self._block(*args[:2])
            self.blocks = None if block is None or self.blocks is None else [*self.blocks, block]
        elif not func.is_view and any(self._is_one_of_both(leaf) for leaf in tree_leaves((args, kwargs))):
            self.blocks = None
        return func(*args, **(kwargs or {}))

    def _is_one_of_both(self, leaf: Any) -> bool:
        both = self.parameter, self.tensor
        return isinstance(leaf, torch.Tensor) and any(may_share(leaf, each) for each in both)

    def _block(self, target: torch.Tensor, source: torch.Tensor) -> RowBlock | None:
        """Return the rows that ``target`` is, of the numbers of ``source``; None if they are no block."""
        k = self.parameter.shape[-1]
        whole_rows = target.is_contiguous() and target.shape[-1:] == (k,) and target.shape == source.shape
        if not whole_rows or not (may_share(target, self.parameter) and may_share(source, self.tensor)):
            return None
        try:
            rows = source.view(-1, k)
        except RuntimeError:  # of several experts, with gaps between them
            return None
        row = (target.storage_offset() - self.parameter.storage_offset()) // k
        strides, offset = (rows.stride(0), rows.stride(1)), int(rows.storage_offset() - self.tensor.storage_offset())
        is_whole = self.tensor.shape == rows.shape and self.tensor.stride() == strides
        return RowBlock(row, len(rows), strides, offset, is_whole)


class Reads(TorchDispatchMode):
    """Sees whether anything but a packed layer reads a tensor that an engine is loading. The versions of dense
    parameters would not tell, because loaders copy into ``parameter.data``. It sees operations of the thread that is in
    it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.tensor: torch.Tensor | None = None
        self.is_taken = False
        """True while a packed layer takes it."""
        self.elsewhere = False

    def watch(self, tensor: torch.Tensor) -> None:
        """Look at this tensor from now on."""
        self.tensor, self.elsewhere = tensor, False

    @property
    def is_here(self) -> bool:
        """True if it sees what is done now."""
        return self.thread == threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = self.tensor
        if not (tensor is None or self.is_taken or self.elsewhere or getattr(func, "is_view", False)):
            tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            self.elsewhere = any(may_share(one, tensor) for one in tensors)
        return func(*args, **(kwargs or {}))


def is_wrapper(tensor: torch.Tensor) -> bool:
    """True for a tensor that does not say which memory it has, such as a DTensor."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def may_share(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether tensors have the same memory, or may have."""
    if is_wrapper(a) or is_wrapper(b):
        return True
    if any(one.layout is not torch.strided for one in (a, b)):
        return a is b
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def is_inside(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return whether all numbers of one tensor lie between the first and the last one of another."""
    if not may_share(part, whole):
        return False
    ahead = int(part.storage_offset() - whole.storage_offset())
    return ahead >= 0 and ahead + _span(part) <= _span(whole)


def _span(tensor: torch.Tensor) -> int:
    """Return from the first to the last number of a tensor in its storage."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
