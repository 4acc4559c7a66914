"""A kernel's revision: a hash of the device code that its measured times belong to."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from w4gemm.jit.disk import source_hash
from w4gemm.kernels import kernel_named

_PACKAGE = Path(__file__).resolve().parent.parent


@functools.cache
def revision(kernel: str) -> str:
    """Twelve digits that change whenever a file changes that the kernel's ``kernel.py`` is made of: it, and what it
    imports of ``w4gemm.kernels``. Which configs are legal (``spec.py``) is asked for anew and does not matter.

    Raises:
        ValueError: if there is no such kernel.
    """
    start = _PACKAGE / "kernels" / kernel_folder(kernel) / "kernel.py"
    if not start.is_file():
        raise ValueError(f"kernel: no device code of {kernel!r}")
    seen: set[Path] = set()
    todo = [start]
    while todo:
        file = todo.pop()
        if file not in seen:
            seen.add(file)
            todo += _imported(file)
    return source_hash(*sorted(f.relative_to(_PACKAGE).as_posix() for f in seen))[:12]


def kernel_folder(kernel: str) -> str:
    """The folder of ``w4gemm.kernels`` that a kernel of the registry comes from."""
    return type(kernel_named(kernel)).__module__.split(".")[-2]


def _imported(file: Path) -> list[Path]:
    """The files of ``w4gemm.kernels`` that a file imports, but for the host sides."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    found = []
    for name in names:
        if name.startswith("w4gemm.kernels."):
            path = _PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py")
            if path.is_file() and path.name != "spec.py":
                found.append(path)
    return found
