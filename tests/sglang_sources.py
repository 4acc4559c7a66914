"""SGLang's own sources for the tests of its plugin, on a machine without its GPU packages.

    pip download --no-deps sglang==0.5.23 && unzip sglang-*.whl -d SOURCES
    pip install --no-deps --target OTHERS compressed-tensors==0.17.0 dill msgspec openai pillow
    pip install --target OTHERS distro httpx jiter sniffio
    SGLANG_SOURCES=SOURCES:OTHERS python -m pytest tests/test_sglang_*.py

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
from typing import ClassVar
from unittest.mock import MagicMock


def install(folders: Sequence[str]) -> None:
    """Make ``sglang`` importable from the first of ``folders``, and what it imports from the others."""
    sys.path[:0] = folders
    import torch._inductor.compile_fx  # noqa: F401 (later it would take a mock of Triton for Triton)
    import transformers  # noqa: F401

    sys.meta_path.append(Mocks(os.path.abspath(folders[0]), {"sglang"}))


class Mock(types.ModuleType):
    """A module that has every name."""

    models: ClassVar[set[str]] = {"xgrammar"}
    """Packages whose names are types of fields of pydantic models."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value: object = MagicMock(name=f"{self.__name__}.{name}")
        if self.__name__.partition(".")[0] in self.models:
            from pydantic import BaseModel

            value = type(name, (BaseModel,), {})
        setattr(self, name, value)
        return value


class Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what a file below ``folder`` imports and nothing else has found, but for the standard library and packages
    in ``own``, of which it finds the modules ``mocked``."""

    def __init__(self, folder: str, own: set[str], mocked: set[str] | None = None) -> None:
        self.folder, self.mocked = folder, mocked or set()
        self.own = {"w4gemm", "torch", *own, *sys.stdlib_module_names}

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in self.own and name not in self.mocked:
            return None
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename and frame.f_back is not None:
            frame = frame.f_back
        inside = frame.f_code.co_filename.startswith(self.folder)
        if not inside and not isinstance(sys.modules.get(name.rpartition(".")[0]), Mock):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Mock(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
