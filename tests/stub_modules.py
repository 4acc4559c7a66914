"""Modules of an engine that is not installed, which hold the classes and functions of a stub: :class:`StubModules`."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class StubModules:
    """The modules of a package.

    Args:
        root: the package, below which modules are named.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.values: dict[str, dict[str, Any]] = defaultdict(dict)
        """What is in each module, by the whole names of the modules."""

    def at(self, *modules: str) -> Callable[[T], T]:
        """Put a class or function into modules; the first is the one that defines it."""

        def put(value: Any) -> Any:
            own = vars(value).values() if isinstance(value, type) else ()
            for each in (value, *(function for function in own if isinstance(function, types.FunctionType))):
                each.__module__ = f"{self.root}.{modules[0]}"
            for module in modules:
                self.put(module, **{value.__name__: value})
            return value

        return put

    def put(self, module: str, **values: Any) -> None:
        """Put values into a module. A function of a stub that must see what a test puts in their place reads them from
        there."""
        self.values[f"{self.root}.{module}"] |= values

    def install(self) -> None:
        """Put the modules into sys.modules."""
        for name, values in self.values.items():
            parts = name.split(".")
            for i in range(1, len(parts) + 1):
                each = ".".join(parts[:i])
                if each not in sys.modules:
                    module: Any = types.ModuleType(each)
                    module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(each, None)
                    sys.modules[each] = module
                    if i > 1:
                        setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module)
            vars(sys.modules[name]).update(values)
