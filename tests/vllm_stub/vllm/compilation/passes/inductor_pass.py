"""Passes that Inductor runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import fx


class Range(NamedTuple):
    start: int
    end: int


class PassContext:
    def __init__(self, compile_range: Range) -> None:
        self.compile_range = compile_range


_pass_context: PassContext | None = None


def get_pass_context() -> PassContext:
    assert _pass_context is not None
    return _pass_context


@contextmanager
def pass_context(compile_range: Range) -> Iterator[None]:
    global _pass_context
    before, _pass_context = _pass_context, PassContext(compile_range)
    try:
        yield
    finally:
        _pass_context = before


class InductorPass:
    def uuid(self) -> str:
        return type(self).__name__


class CallableInductorPass(InductorPass):
    def __init__(self, callable: Callable[[fx.Graph], None], uuid: Any | None = None) -> None:
        self.callable = callable

    def __call__(self, graph: fx.Graph) -> None:
        self.callable(graph)
