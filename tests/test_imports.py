"""Imports go one way, and importing the library is cheap and touches no GPU."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import w4gemm

PACKAGE = Path(w4gemm.__file__).parent

# Each may import what stands before it, and what stands beside it on its own line.
LEVELS = (
    ("errors", "environment", "trust"),
    ("jit",),
    ("formats", "epilogue", "gpu_rates", "problem", "config"),
    ("packing",),
    ("packed_shape",),
    (
        *("act_order", "dequantize", "weight", "weight_experts", "weight_file", "weight_make", "weight_repack"),
        *("weight_shard", "quantization", "reference"),
    ),
    ("kernels",),
    ("choice", "gather"),
    ("tuning", "console"),
    ("arguments",),
    ("modes",),
    ("activations", "routing"),
    ("boundary",),
    ("bound", "operator_arguments"),
    ("ops", "grouped", "runner"),
    ("nn", "experts", "checkpoints"),
    ("integrations",),
    ("cli",),
)
LEVEL = {unit: i for i, units in enumerate(LEVELS) for unit in units}


def unit_of(file: Path) -> str:
    """The first part of a file's module name inside the package."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_units(file: Path) -> set[str]:
    """Units that a file imports, anywhere in it. ``from w4gemm import x`` is the unit x, or the unit x comes from."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            module = node.module or ""
            names = [f"w4gemm.{alias.name}" for alias in node.names] if module == "w4gemm" else [module]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] != "w4gemm" or len(parts) == 1:
                continue
            unit = parts[1]
            if unit not in LEVEL and hasattr(w4gemm, unit):
                module = getattr(getattr(w4gemm, unit), "__module__", None)
                unit = module.split(".")[1] if module and "." in module else "__init__"
            found.add(unit)
    return found


FILES = [f for f in sorted(PACKAGE.rglob("*.py")) if f != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.relative_to(PACKAGE).as_posix())
def test_imports_go_one_way(file):
    unit = unit_of(file)
    assert unit in LEVEL, f"{unit}: say in LEVELS where it stands"
    wrong = {u for u in imported_units(file) if u != "__init__" and LEVEL.get(u, 99) > LEVEL[unit]}
    assert not wrong, f"{unit} imports {', '.join(sorted(wrong))}, which stands above it"


def test_bench_stands_beside_the_commands():
    """``w4gemm bench`` imports bench, so bench may not import the commands."""
    files = [*(PACKAGE.parents[1] / "bench").rglob("*.py")]
    assert files and not [f.name for f in files if "cli" in imported_units(f)]


def private_uses(file: Path) -> list[str]:
    """Private names of another module of the package that a file imports, or reads from a module that it imports."""
    tree = ast.parse(file.read_text())
    froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("w4gemm")]
    modules = {alias.asname or alias.name for n in froms for alias in n.names if alias.name.islower()}
    used = [alias.name for n in froms for alias in n.names if alias.name.startswith("_")]
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    read = [n.attr for n in attributes if n.value.id in modules and n.attr.startswith("_") and n.attr[1] != "_"]
    return used + [name for name in read if name not in ("_asdict", "_fields", "_make", "_replace")]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.relative_to(PACKAGE).as_posix())
def test_private_names_stay_in_their_module(file):
    assert not private_uses(file)


def test_environment_is_read_in_one_file():
    readers = [f.name for f in FILES if any(s in f.read_text() for s in ("os.environ", "getenv"))]
    assert readers == ["environment.py"]


def test_cute_compile_has_one_caller():
    callers = [f.name for f in FILES if "cute.compile(" in f.read_text()]
    assert callers == ["compile.py"]


def test_importing_is_cheap_and_touches_no_gpu():
    """Neither the DSL nor transformers is imported, and CUDA is not initialized."""
    script = f"""
import sys; sys.path[:] = {sys.path!r}
import w4gemm, torch
heavy = {{"cutlass", "tvm_ffi", "transformers", "gguf", "triton"}} & set(sys.modules)
assert not heavy, heavy
assert not torch.cuda.is_initialized()
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
