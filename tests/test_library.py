"""Libraries that load without CuTe DSL: what is linked, what is loaded, and that the DSL takes over if that fails."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiny_kernel import tiny
from w4gemm.jit import compile as jit
from w4gemm.jit import compiled, disk, library, object_code, toolchain

pytest.importorskip("cutlass")
needs_linker = pytest.mark.skipif(library._linker() is None, reason="needs ld")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A disk cache with the object of the unit ``tiny()``, compiled once for all tests."""
    folder = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("W4GEMM_CACHE_DIR", str(folder))
        object_code(tiny())
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of ``filled``; an empty memory cache."""
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_memory", {})
    return Path(shutil.copytree(filled, tmp_path / "cache"))


def loaded_from(monkeypatch: pytest.MonkeyPatch) -> str:
    """``library`` or ``object``: what a new process would load the unit from, without compiling it."""
    monkeypatch.setattr(jit, "_memory", {})
    monkeypatch.setattr(jit, "_build", lambda unit: pytest.fail("compiled"))
    load, taken = jit._load, []
    with monkeypatch.context() as patch:
        patch.setattr(jit, "_load", lambda code: (taken.append(1), load(code))[1])
        scale = compiled(tiny())
    with pytest.raises(ValueError, match="device_type=cuda"):  # the compiled check; nothing was launched
        scale(torch.ones(3), torch.ones(3))
    return "object" if taken else "library"


def test_a_new_process_loads_without_compiling_nor_importing_the_dsl(folder):
    script = f"""
import sys; sys.path[:] = {sys.path!r}
import torch
from tiny_kernel import tiny
from w4gemm.jit import compile as jit, compiled, disk, library

def check():
    try:
        compiled(tiny())(torch.ones(3), torch.ones(3))
    except ValueError as e:
        assert "device_type=cuda" in str(e), e  # the compiled check; nothing was launched

if disk.libraries():
    check()
    jit._memory.clear()
    jit.adopt(tiny(), disk.read(disk.entry_name(tiny())))  # what another process has compiled for this one
    check()
    assert {{"cutlass", "tvm_ffi"}} & set(sys.modules) == {{"tvm_ffi"}}
jit._memory.clear()
library.load = jit._build = lambda *_: None  # the DSL loads the object; nothing can be compiled
check()
print("cutlass" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout == "True\n" and run.returncode == 0, run.stderr


@needs_linker
def test_a_library_lies_beside_its_object(folder, monkeypatch):
    names = {path.name for path in folder.iterdir()}
    assert names == {disk.entry_name(tiny()), disk.entry_name(tiny()).removesuffix("o") + "so"}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())
    assert loaded_from(monkeypatch) == "library"
    assert disk.size() == sum(path.stat().st_size for path in folder.iterdir()), "what `w4gemm cache list` says"
    code = disk.read(disk.libraries()[0].name)
    assert b"libcute_dsl_runtime.so\0" in code and b"libtvm_ffi.so\0" in code
    assert str(toolchain.runtime().parent).encode() not in code, "names no folder to load code from"
    assert disk.clear() == 1 and not list(folder.iterdir())


def test_a_folder_that_another_process_clears_has_a_size(folder, monkeypatch):
    monkeypatch.setattr(disk, "stored", lambda: [folder / "gone-sm_90a-1-2.o"])
    assert disk.size() == sum(path.stat().st_size for path in disk.libraries())


@needs_linker
@pytest.mark.parametrize("damage", ["flipped", "writable by others", "forbidden", "no runtime"])
def test_the_dsl_takes_over(folder, monkeypatch, damage):
    (path,) = disk.libraries()
    whole = path.read_bytes()
    if damage == "flipped":
        path.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    elif damage == "writable by others":
        path.chmod(0o666)
    elif damage == "forbidden":  # as the loader says of a folder that is mounted noexec
        disk.write(path.name, b"no library")
    else:
        monkeypatch.setattr(toolchain, "runtime", lambda: None)
    assert loaded_from(monkeypatch) == "object"


@pytest.mark.parametrize("linker", [None, "/bin/false", "/no/such/linker"])
def test_without_a_linker(folder, monkeypatch, caplog, linker):
    disk.clear()
    monkeypatch.setattr(library, "_linker", lambda: linker)
    with caplog.at_level(logging.INFO, "w4gemm"):
        object_code(tiny())
    assert [path.name for path in folder.iterdir()] == [disk.entry_name(tiny())] and not caplog.records
    assert loaded_from(monkeypatch) == "object"


def test_nothing_is_linked_if_the_dsl_calls_another_runtime(folder, monkeypatch, tmp_path):
    disk.clear()
    (tmp_path / "another.so").touch()
    monkeypatch.setattr(toolchain, "runtime", lambda: tmp_path / "another.so")
    object_code(tiny())
    assert not disk.libraries()


def test_the_toolkit_is_the_one_that_the_dsl_chooses(monkeypatch):
    import cutlass

    toolchain.versions.cache_clear()
    assert toolchain.versions()[0] == cutlass.__version__
    assert toolchain.versions()[-1] == f"cu{cutlass.CUDA_VERSION.major}"
    for installed, driver, expected in (
        ({12}, (12, 4), 12),
        ({12}, (11, 8), 12),  # refused elsewhere, with the reason
        ({12, 13}, (12, 9), 12),
        ({12, 13}, (13, 0), 13),
        ({12, 13}, None, 13),
        (set(), (13, 0), None),
    ):
        monkeypatch.setattr(
            toolchain,
            "installed_version",
            lambda name, versions=installed: "4.8.1" if int(name[-2:]) in versions else None,
        )
        monkeypatch.setattr(toolchain, "driver_cuda_version", lambda driver=driver: driver)
        assert toolchain.toolkit.__wrapped__() == expected
