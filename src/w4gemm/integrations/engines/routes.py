"""Tensors that come again and again for packed layers, past an engine's own loaders: :class:`Routes`, :func:`loading`.

For each tensor an engine finds a parameter by its name, and calls a loader, which takes 20 to 100 us of Python; a model
of 128 experts a layer has 18,000 tensors. So the first time that one comes, what the loader copies is written down:
which numbers of the tensor become which rows of the layer's weight. From then on they are put there without the engine,
those of a layer together. A tensor that the model reads anywhere else too, such as for a dense parameter, is left to
the engine's loaders every time: :class:`Reads` sees it. It slows down what PyTorch does, so that calls whose tensors
are known do without.

Whether numbers are finite is asked once, at the end of a call of the model's ``load_weights``, because each question
waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch

from w4gemm.integrations.engines.copies import Reads, RowBlock, is_inside, is_wrapper


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
        is_alike = self.shape == tensor.shape and self.strides == tensor.stride()
        return is_alike and not is_codes(tensor) and not is_wrapper(tensor)


class Routes(dict[str, Route]):
    """A model's routes, by the names of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.without: set[str] = set()
        """Names of tensors that take none, and are not watched again."""
        self.are_missing = False
        """True if packed layers took tensors without a route in a call that learned none: the next call learns."""

    def clear(self) -> None:
        super().clear()
        self.without.clear()


Weights = Iterable[tuple[str, torch.Tensor]]
"""Tensors by name."""


class Loading:
    """A call of a model's ``load_weights``.

    Args:
        known: the model's routes, which are added to.
        weights: what comes.
    """

    def __init__(self, known: Routes, weights: Weights) -> None:
        self.known = known
        # what reads files may let go of a tensor, or fill its memory anew, when it is asked for the next one
        self.are_kept = isinstance(weights, (list, tuple, ItemsView))
        self.weights = iter(weights)
        self.first = next(self.weights, None)
        self.begun: dict[int, Taker] = {}
        self.checks: list[tuple[torch.Tensor, str]] = []
        """Flags on the GPU, not 0 where numbers were refused, and what the error says then."""
        self.now: torch.Tensor | None = None
        """The tensor that the engine is loading, as long as all is known of how."""
        self.name = ""
        """Of the newest tensor that the engine loads itself."""
        self.ends: list[End] | None = None
        """Where it has gone so far; None if that is not known."""
        self.reads = Reads() if self._learns() else None

    def _learns(self) -> bool:
        """Return whether routes of tensors are to be learned: those of a call, in most engines, come together again."""
        if self.first is None:
            return False
        name, tensor = self.first
        is_new = name not in self.known and name not in self.known.without and not is_codes(tensor)
        return is_new or self.known.are_missing

    def passed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Generate the tensors that the engine must load itself."""
        if self.first is None:
            return
        known, begun, are_kept = self.known, self.begun, self.are_kept
        first, self.first = self.first, None
        for name, tensor in chain((first,), self.weights):
            route = known.get(name)
            if route is not None and route.fits(tensor):
                numbers = tensor.detach() if tensor.requires_grad else tensor
                for taker, layer, blocks in route.ends:
                    if id(taker) not in begun:
                        self.begin(taker, layer)
                    taker.put(numbers, blocks)
                    if not are_kept:
                        taker.settle()
            elif is_codes(tensor):
                yield name, tensor
            else:
                yield from self._learned(name, tensor)

    def _learned(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Generate a tensor, and learn its route."""
        self.now, self.name, self.ends = None, name, None
        reads = self.reads
        if reads is None or not reads.is_here:
            yield name, tensor
        else:
            self.now = tensor
            reads.watch(tensor)
            yield name, tensor
            # only here, so that no route is made of a tensor in which the engine stopped
            reads.tensor = None
        self.now, ends = None, self.ends
        if reads is None:
            return
        if ends is None or reads.elsewhere or not reads.is_here:
            self.known.without.add(name)
        else:
            self.known[name] = Route(tensor.shape, tensor.stride(), ends)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """A packed layer takes the tensor."""
        reads = self.reads
        if reads is None or reads.is_taken or not reads.is_here:
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
        if self.reads is None and self.name not in self.known.without:
            self.known.are_missing = True
        now = self.now
        if now is None:
            return
        is_seen = self.reads is not None and self.reads.is_here
        if blocks is None or not is_seen or not is_inside(loaded, now):
            self.now = None
            self.ends = None
            return
        ahead = int(loaded.storage_offset() - now.storage_offset())
        is_now = loaded.shape == now.shape and loaded.stride() == now.stride()
        self.ends = self.ends or []
        if blocks:
            own = [each._replace(offset=each.offset + ahead, is_whole=each.is_whole and is_now) for each in blocks]
            self.ends.append((taker, layer, own))

    def end(self) -> None:
        """Wait for the GPU.

        Raises:
            ValueError: if numbers were refused.
        """
        if self.checks and any(flags := torch.cat([flag for flag, _ in self.checks]).tolist()):
            raise ValueError("; ".join(text for flag, (_, text) in zip(flags, self.checks, strict=True) if flag))


_DENSE = {torch.bfloat16, torch.float16, torch.float32, torch.float64}

_loading: ContextVar[Loading | None] = ContextVar("w4gemm_loading", default=None)


def current() -> Loading | None:
    """Return the call of ``load_weights`` that runs now; None outside of one."""
    return _loading.get()


@contextmanager
def loading(known: Routes, weights: Weights) -> Iterator[Loading]:
    """Run a call of a model's ``load_weights``, whose tensors pass :meth:`Loading.passed`."""
    now = Loading(known, weights)
    token = _loading.set(now)
    try:
        with ExitStack() as stack:
            if now.reads is not None:
                stack.enter_context(now.reads)
            yield now
    except BaseException:
        for taker in now.begun.values():
            taker.drop()
        raise
    finally:
        _loading.reset(token)
    if now.reads is not None:
        known.are_missing = False
    for taker in now.begun.values():
        taker.settle()
    now.end()


def route(own: Callable[..., Any], known: Routes, weights: Weights, *args: Any, **options: Any) -> tuple[Any, set[str]]:
    """Call a model's ``load_weights``, which takes ``weights`` first, or that of a part of a model.

    Args:
        known: the model's routes.

    Returns:
        What it returns, and the names of the weights that have got numbers.
    """
    if current() is not None:
        return own(weights, *args, **options), set()
    with loading(known, weights) as call:
        result = own(call.passed(), *args, **options)
    return result, {f"{taker.what}.{taker.name}" for taker in call.begun.values()}


def is_codes(tensor: torch.Tensor) -> bool:
    """True for quantized numbers, and for scales in 8 bits."""
    return tensor.dtype not in _DENSE
