"""Imports go one way, and importing the library is cheap and touches no GPU."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import w4gemm

PACKAGE = Path(w4gemm.__file__).parent

ROOMS = (
    *("core", "jit", "ptx", "packing", "weights", "kernels", "choice", "tuning", "console"),
    *("api", "checkpoints", "integrations", "cli"),
)
"""Folders of the package. Each may import itself and those before it."""


def room_of(file: Path) -> str:
    """The folder of the package that a file lies in; ``python -m w4gemm`` belongs to the commands."""
    return "cli" if file == PACKAGE / "__main__.py" else file.relative_to(PACKAGE).parts[0]


def imported_rooms(file: Path) -> set[str]:
    """Rooms that a file imports, anywhere in it. ``from w4gemm import x`` counts as the room that x comes from."""
    rooms = set()
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
            package, *parts = name.split(".")
            if package != "w4gemm" or not parts:
                continue
            source = getattr(getattr(w4gemm, parts[0], None), "__module__", f"w4gemm.{parts[0]}")
            rooms.add(parts[0] if parts[0] in ROOMS else source.split(".")[1])
    return rooms


FILES = [f for f in sorted(PACKAGE.rglob("*.py")) if f != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.relative_to(PACKAGE).as_posix())
def test_imports_go_one_way(file):
    below = ROOMS[: ROOMS.index(room_of(file)) + 1]
    wrong = imported_rooms(file) - {*below}
    assert not wrong, f"{room_of(file)} imports {', '.join(sorted(wrong))}, which stands above it"


def test_bench_stands_beside_the_commands():
    """``w4gemm bench`` imports bench, so bench may not import the commands."""
    files = [*(PACKAGE.parents[1] / "bench").rglob("*.py")]
    assert files and not [f.name for f in files if "cli" in imported_rooms(f)]


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


def test_the_decoder_has_one_door():
    """No other package imports more of it than ``decode_by_graph``, nor the kernel that is written for it."""
    decoder, kernel = "w4gemm.integrations.decoder", "w4gemm.kernels.helpers.step_attention"
    doors = []
    for file in FILES:
        package = file.parent.relative_to(PACKAGE.parent).as_posix().replace("/", ".")
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            modules = names if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
            for module in modules:
                if f"{module}.".startswith(f"{decoder}.") and package != decoder:
                    doors.append((module, *names))
                if f"{module}.".startswith(f"{kernel}."):
                    assert package in (decoder, kernel, "w4gemm.kernels"), f"{file}:{node.lineno}: {module}"
    assert set(doors) == {(decoder, "decode_by_graph")}


def test_environment_is_read_in_one_file():
    readers = [f.name for f in FILES if any(s in f.read_text() for s in ("os.environ", "getenv"))]
    assert readers == ["environment.py"]


def test_cute_compile_has_one_caller():
    callers = [f.name for f in FILES if "cute.compile(" in f.read_text()]
    assert callers == ["compile.py"]


@pytest.mark.parametrize("cuda, device", [("", "meta"), ("13.0", "cuda")])
def test_importing_is_cheap_and_touches_no_gpu(cuda, device):
    """Neither the DSL nor transformers is imported, and CUDA is not initialized; what loads kernels is imported beside
    a torch that knows of GPUs, unless it may compile an extension, as for PyTorch 2.8. Tensors are made on the CPU: on
    another default device they would have no numbers, or initialize CUDA. cuda: torch's version of CUDA, or the empty
    string."""
    script = f"""
import sys; sys.path[:] = {sys.path!r}
import torch
torch.version.cuda = {cuda!r} or None
torch.set_default_device({device!r})
imported = {{"tvm_ffi"}} if {cuda!r} and hasattr(torch.Tensor, "__dlpack_c_exchange_api__") else set()
import w4gemm
heavy = {{"cutlass", "tvm_ffi", "transformers", "gguf", "triton"}} & set(sys.modules)
assert heavy == imported, heavy
assert not torch.cuda.is_initialized()
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


ENGINES = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
"""Packages of serving engines, and their groups of entry points."""


@pytest.mark.parametrize("engine", ENGINES)
def test_importing_a_plugin_imports_no_engine(engine):
    plugin = f"w4gemm.integrations.{engine}"
    script = f"import sys; sys.path[:] = {sys.path!r}\nimport {plugin}\nassert {engine!r} not in sys.modules"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no tomllib")
@pytest.mark.parametrize(("engine", "group"), ENGINES.items())
def test_the_entry_point_of_a_plugin_is_its_function(engine, group):
    import tomllib

    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
    plugin = importlib.import_module(f"w4gemm.integrations.{engine}")
    assert pkgutil.resolve_name(project["entry-points"][group]["w4gemm"]) is plugin.register


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("quantise", "'quantise'; nearest is 'quantize'"),
        ("matmul", "'matmul'; nearest is 'linear'"),
        ("tuning", "'tuning'; import w4gemm.tuning"),
        ("load", "'load'; from w4gemm.integrations.transformers import load"),
        ("nothing.here", "'nothing.here'"),
        ("", "''"),
    ],
)
def test_a_name_that_is_not_public_is_an_attribute_error(name, message, monkeypatch):
    monkeypatch.delattr(w4gemm, name or "_", raising=False)  # a module that some test has imported
    with pytest.raises(AttributeError, match=f"^module 'w4gemm' has no attribute {re.escape(message)}$"):
        getattr(w4gemm, name)


def test_tests_wait_for_modules_of_ours_by_the_names_that_these_have():
    """Under an old name a test would be skipped for ever."""
    for file in Path(__file__).parent.rglob("*.py"):
        for name in re.findall(r'importorskip\(f?"(w4gemm\.[^"]*)"', file.read_text()):
            assert (PACKAGE.parent / f"{name.replace('.', '/')}.py").is_file(), f"{file}: {name}"


def test_no_two_classes_share_a_name():
    files = defaultdict(set)
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                files[node.name].add(str(file.relative_to(PACKAGE)))
    assert not {name: sorted(each) for name, each in files.items() if len(each) > 1}
