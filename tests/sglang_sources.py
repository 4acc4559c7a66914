"""SGLang's own sources for the tests of its plugin, on a machine without its GPU packages.

    pip download --no-deps sglang==0.5.23 && unzip sglang-*.whl -d SOURCES    # and others that it imports, by --target
    SGLANG_SOURCES=SOURCES python -m pytest tests/test_sglang_plugin.py

Modules that SGLang's files import and that are not installed are mocks.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from unittest.mock import MagicMock


def install(folders: Sequence[str]) -> None:
    """Make ``sglang`` importable from the first of ``folders``, and what it imports from the others."""
    sys.path[:0] = folders
    import transformers  # noqa: F401

    sys.meta_path.append(_Mocks(os.path.abspath(folders[0])))


class _Mock(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value: object = MagicMock(name=f"{self.__name__}.{name}")
        if self.__name__.startswith("xgrammar"):  # a field of a pydantic model
            from pydantic import BaseModel

            value = type(name, (BaseModel,), {})
        setattr(self, name, value)
        return value


class _Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what a file below ``folder`` imports and nothing else has found."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ("sglang", "w4gemm", "torch"):
            return None
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename and frame.f_back is not None:
            frame = frame.f_back
        inside = frame.f_code.co_filename.startswith(self.folder)
        if not inside and not isinstance(sys.modules.get(name.rpartition(".")[0]), _Mock):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Mock(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
