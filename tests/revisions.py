"""Record what each kernel's ``revision`` stands for: ``python tests/revisions.py`` writes tests/revisions.json.

A revision says that measured times still tell which config is fastest. Its file has a hash of the device sources that
were there when somebody last said so; tests/test_revisions.py compares. Comments and docstrings do not count.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import tokenize
from pathlib import Path

from w4gemm.kernels import KERNELS

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "tests/revisions.json"
_SOURCE = ROOT / "src"
_PACKAGE = _SOURCE / "w4gemm"
_KERNELS = _PACKAGE / "kernels"
_SHARED = (_KERNELS / "device", _KERNELS / "sm90_mixed_gemm", _PACKAGE / "ptx")
_DECODERS = sorted((_PACKAGE / "packing/codecs").glob("*_decode*.py"))
"""What a weight's codec imports when a kernel is compiled."""
_DEVICE_CODE_OF = {"sm90_fp8_gemm": "sm90_mixed_gemm", "sm89_fp8_gemm": "sm80_mixed_gemm", "cpu_mixed_gemm": "cpu"}
"""Folder with a kernel's device code, if it is not called like the kernel."""
_HOST = {"spec.py", "space.py"}
"""Files of a kernel's folder that choose configs and launch: what they decide is tested elsewhere."""


def sources(kernel: str) -> list[Path]:
    """Files that a kernel's device code is made of: its folder, decoders, and what these import of the code kernels
    share."""
    folder = _KERNELS / _DEVICE_CODE_OF.get(kernel, kernel)
    todo = [path for path in sorted(folder.rglob("*.py")) if path.name not in _HOST]
    todo += _DECODERS if kernel != "cpu_mixed_gemm" else []
    paths: set[Path] = set()
    while todo:
        path = todo.pop()
        if path not in paths:
            paths.add(path)
            todo += [p for p in imported(path) if any(p.is_relative_to(folder) for folder in _SHARED)]
    return sorted(paths)


def imported(path: Path) -> list[Path]:
    """Files of the package that a file imports by ``from w4gemm... import``."""
    paths = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("w4gemm"):
            module = _SOURCE / Path(*(node.module or "").split("."))
            for place in (module.with_suffix(".py"), *(module / f"{alias.name}.py" for alias in node.names)):
                if place.is_file():
                    paths.append(place)
    return paths


def code(path: Path) -> str:
    """A file's lines without comments, docstrings and blank lines."""
    text = path.read_text()
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for row in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[row - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def source_hash(kernel: str) -> str:
    digest = hashlib.sha256()
    for path in sources(kernel):
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()}\0{code(path)}\0".encode())
    return digest.hexdigest()[:16]


def current() -> dict[str, dict[str, object]]:
    """Revision and hash of every kernel as it is now."""
    return {kernel.name: {"revision": kernel.revision, "sources": source_hash(kernel.name)} for kernel in KERNELS}


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    RECORDED.write_text(json.dumps(current(), indent=2) + "\n")
    print(f"wrote {RECORDED.relative_to(ROOT)}")
