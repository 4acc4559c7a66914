"""Tensors that come again and again for packed layers, past an engine's own loaders: :class:`Routes`, :func:`loading`.

For each tensor an engine finds a parameter by its name, and calls a loader, which takes 20 to 100 us of Python; a model
of 128 experts a layer has 18,000 tensors. So the first time that one comes, what the loader copies is written down:
which numbers of the tensor become which rows of the layer's weight. From then on they are put there without the engine,
those of a layer together. A tensor that the model reads anywhere else too, such as for a dense parameter, is left to
the engine's loaders every time: :class:`Reads` sees it.

Whether numbers are finite is asked once, at the end of a call of the model's ``load_weights``, because each question
waits for the GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

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
    """

    row: int
    rows: int
    strides: tuple[int, int]
    offset: int

    def numbers(self, tensor: torch.Tensor, k: int) -> torch.Tensor:
        """Return the rows (rows, k), a view of the tensor."""
        if tensor.shape == (self.rows, k) and tensor.stride() == self.strides:
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
        return isinstance(leaf, torch.Tensor) and any(_shares(leaf, each) for each in both)

    def _block(self, target: torch.Tensor, source: torch.Tensor) -> RowBlock | None:
        """Return the rows that ``target`` is, of the numbers of ``source``; None if they are no block."""
        k = self.parameter.shape[-1]
        whole_rows = target.is_contiguous() and target.shape[-1:] == (k,) and target.shape == source.shape
        if not whole_rows or not (_shares(target, self.parameter) and _shares(source, self.tensor)):
            return None
        try:
            rows = source.view(-1, k)
        except RuntimeError:  # of several experts, with gaps between them
            return None
        row = (target.storage_offset() - self.parameter.storage_offset()) // k
        strides = (rows.stride(0), rows.stride(1))
        return RowBlock(row, len(rows), strides, int(rows.storage_offset() - self.tensor.storage_offset()))


class Reads(TorchDispatchMode):
    """Sees whether anything but a packed layer reads a tensor that an engine is loading. The versions of dense
    parameters would not tell, because loaders copy into ``parameter.data``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self.thread = threading.get_ident()
        """Whose operations it sees."""
        self.is_taken = False
        """True while a packed layer takes it."""
        self.elsewhere = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (self.is_taken or self.elsewhere or func.is_view):
            tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            self.elsewhere = any(_shares(one, self.tensor) for one in tensors)
        return func(*args, **(kwargs or {}))


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class Taker(Protocol):
    """What takes the numbers of a layer: an update of it."""

    what: str
    name: str

    def begin(self, layer: Any) -> None:
        """Called before the first numbers of a call of ``load_weights``."""

    def put(self, tensor: torch.Tensor, blocks: Iterable[RowBlock]) -> None:
        """Take rows; quantize the layer's weight if they are the last ones."""

    def settle(self) -> None:
        """Copy what is not quantized yet, because senders may use the memory of their tensors again."""

    def drop(self) -> None:
        """Let go of what has come in a call that ends with an error."""


End = tuple[Taker, Any, list[RowBlock]]
"""An update, its layer, and what it takes of a tensor."""


class Route(NamedTuple):
    """Where the numbers of a tensor of this shape and these strides go: nowhere, if other GPUs have their experts."""

    shape: torch.Size
    strides: tuple[int, ...]
    ends: list[End]

    def fits(self, tensor: torch.Tensor) -> bool:
        return self.shape == tensor.shape and self.strides == tensor.stride() and not is_codes(tensor)


Routes = dict[str, Route]
"""By the names of tensors."""
Weights = Iterable[tuple[str, torch.Tensor]]
"""Tensors by name."""


class Loading:
    """A call of a model's ``load_weights``.

    Args:
        routes: of the model, which are added to.
    """

    def __init__(self, routes: Routes) -> None:
        self.routes = routes
        self.begun: dict[int, Taker] = {}
        self.checks: list[tuple[torch.Tensor, str]] = []
        """Flags on the GPU, not 0 where numbers were refused, and what the error says then."""
        self.now: torch.Tensor | None = None
        """The tensor that the engine is loading, as long as all is known of how."""
        self.ends: list[End] | None = None
        """Where it has gone so far; None if that is not known."""
        self.reads: Reads | None = None

    def passed(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Generate those that the engine must load itself."""
        # what reads files may let go of a tensor, or fill its memory anew, when it is asked for the next one
        are_kept = isinstance(weights, (list, tuple, ItemsView))
        for name, tensor in weights:
            route = self.routes.get(name)
            if route is not None and route.fits(tensor):
                for taker, layer, blocks in route.ends:
                    self.begin(taker, layer)
                    taker.put(tensor.detach(), blocks)
                    if not are_kept:
                        taker.settle()
                continue
            if is_codes(tensor):
                yield name, tensor
                continue
            self.now, self.ends = tensor, None
            self.reads = Reads(tensor)
            self.reads.__enter__()
            yield name, tensor
            # only here, so that no route is made of a tensor in which the engine stopped
            elsewhere = self.stop_reads()
            self.now, ends = None, self.ends
            if ends is not None and not elsewhere:
                self.routes[name] = Route(tensor.shape, tensor.stride(), ends)

    def stop_reads(self) -> bool:
        """Look no longer at what reads the tensor; return whether something but a packed layer has, or may have."""
        reads, self.reads = self.reads, None
        if reads is None or reads.thread != threading.get_ident():
            return reads is not None
        reads.__exit__(None, None, None)
        return reads.elsewhere

    @contextmanager
    def taking(self) -> Iterator[None]:
        """A packed layer takes the tensor."""
        reads = self.reads
        if reads is None or reads.is_taken:
            yield
            return
        reads.is_taken = True
        try:
            yield
        finally:
            reads.is_taken = False

    def begin(self, taker: Taker, layer: Any) -> None:
        if id(taker) not in self.begun:
            self.begun[id(taker)] = taker
            taker.begin(layer)

    def learn(self, taker: Taker, layer: Any, loaded: torch.Tensor, blocks: list[RowBlock] | None) -> None:
        """Note what an update has taken of the tensor that the engine is loading: ``blocks`` of ``loaded``, a view of
        it; None if that is not known."""
        if self.now is None:
            return
        ahead = int(loaded.storage_offset() - self.now.storage_offset())
        inside = _shares(loaded, self.now) and ahead >= 0 and ahead + _span(loaded) <= _span(self.now)
        is_seen = self.reads is not None and self.reads.thread == threading.get_ident()
        if blocks is None or not inside or not is_seen:
            self.now = None
            self.ends = None
            return
        self.ends = self.ends or []
        if blocks:
            self.ends.append((taker, layer, [block._replace(offset=block.offset + ahead) for block in blocks]))

    def end(self) -> None:
        """Wait for the GPU.

        Raises:
            ValueError: if numbers were refused.
        """
        if self.checks and any(flags := torch.cat([flag for flag, _ in self.checks]).tolist()):
            raise ValueError("; ".join(text for flag, (_, text) in zip(flags, self.checks, strict=True) if flag))


_loading: ContextVar[Loading | None] = ContextVar("w4gemm_loading", default=None)


def current() -> Loading | None:
    """Return the call of ``load_weights`` that runs now; None outside of one."""
    return _loading.get()


@contextmanager
def loading(routes: Routes) -> Iterator[Loading]:
    """Run a call of a model's ``load_weights``, whose tensors pass :meth:`Loading.passed`."""
    now = Loading(routes)
    token = _loading.set(now)
    try:
        yield now
    except BaseException:
        for taker in now.begun.values():
            taker.drop()
        raise
    finally:
        now.stop_reads()
        _loading.reset(token)
    for taker in now.begun.values():
        taker.settle()
    now.end()


def _span(tensor: torch.Tensor) -> int:
    """Return from the first to the last number of a tensor in its storage."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def route(own: Callable[..., Any], known: Routes, weights: Weights, *args: Any, **options: Any) -> tuple[Any, set[str]]:
    """Call a model's ``load_weights``, which takes ``weights`` first, or that of a part of a model.

    Args:
        known: the model's routes.

    Returns:
        What it returns, and the names of the weights that have got numbers.
    """
    if current() is not None:
        return own(weights, *args, **options), set()
    with loading(known) as call:
        result = own(call.passed(weights), *args, **options)
    return result, {f"{taker.what}.{taker.name}" for taker in call.begun.values()}


def is_codes(tensor: torch.Tensor) -> bool:
    """True for quantized numbers, and for scales in 8 bits."""
    return not tensor.is_floating_point() or tensor.element_size() == 1
