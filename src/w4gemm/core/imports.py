"""Packages that w4gemm does not import itself: what follows their import, and whether CuTe DSL is installed."""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DSL = "4.8.1"
"""Version of CuTe DSL that the kernels are written for, and pyproject.toml pins. Older minor versions are refused,
newer ones run after a warning."""
DSL_HELP = f"pip install '.[cuda]' in a clone of w4gemm brings {DSL}"

_log = logging.getLogger("w4gemm")


def missing_dsl() -> str:
    """Return that CuTe DSL is not installed, or the empty string. Neither PyTorch nor the DSL is imported."""
    if importlib.util.find_spec("cutlass") is not None:
        return ""
    return f"needs CuTe DSL (nvidia-cutlass-dsl), which is not installed; {DSL_HELP}"


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call ``then`` at the end of the first import of a package, at once if it was imported before. What it raises is
    logged as a warning, because the package itself works."""
    if name in sys.modules:
        _call(name, then)
    else:
        sys.meta_path.insert(0, _Finder(name, then))


def _call(name: str, then: Callable[[], None]) -> None:
    try:
        then()
    except Exception as e:
        _log.warning("%s is not adapted to quantized layers: %s: %s", name, type(e).__name__, e)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one package by the other finders, with a loader that calls ``then``."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then, self._asking = name, then, False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            _call(self._name, self._then)


class _Loader(importlib.abc.Loader):
    """Loads by another loader, which the module then has as its own."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.imported()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
