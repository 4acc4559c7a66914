"""Passes that Inductor runs."""

from collections.abc import Callable
from typing import Any

from torch import fx


class InductorPass:
    def uuid(self) -> str:
        return type(self).__name__


class CallableInductorPass(InductorPass):
    def __init__(self, callable: Callable[[fx.Graph], None], uuid: Any | None = None) -> None:
        self.callable = callable

    def __call__(self, graph: fx.Graph) -> None:
        self.callable(graph)
