"""Shared libraries, linked from stored objects, that tvm-ffi loads without CuTe DSL.

The DSL loads an object as it is, but importing the DSL takes 0.4 s, most of a new process's first call. So where this
machine has a linker, each new object is also linked to a library in the same folder (10 ms). It only saves time:
without a library, or if one cannot be loaded (from a folder that forbids execution), the DSL loads the object.

A library names the two libraries that it calls, the DSL's runtime and tvm-ffi, without a folder. Both are loaded before
it from where they are installed, so that a library never decides where code comes from.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from w4gemm.core import environment
from w4gemm.jit import disk, toolchain

_log = logging.getLogger("w4gemm.jit")
_LINKER_S = 60.0  # it takes 0.01 s

if torch.version.cuda and hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    # Imported with w4gemm where products may run on a GPU, because it would be most of the first product's time. Beside
    # an older torch it may compile an extension, which can wait.
    with contextlib.suppress(ImportError, OSError):
        import tvm_ffi  # noqa: F401


def load(name: str, symbol: str) -> Callable[..., Any] | None:
    """Return the host function ``symbol`` of the library of the object that is stored as ``name``. None if there is no
    library that can be trusted and loaded."""
    path, runtime = disk.find(_library(name)), toolchain.runtime()
    if path is None or runtime is None:
        return None
    import tvm_ffi

    try:
        ctypes.CDLL(str(runtime))
        function: Callable[..., Any] = tvm_ffi.load_module(str(path.absolute()))[symbol]
    except Exception as e:  # the loaders' errors have no common class
        _log.debug("cannot load %s (%s): CuTe DSL loads the object", path, e)
        return None
    return function


def link(name: str) -> None:
    """Link the object that is stored as ``name`` to a library in the same folder, if this machine has a linker. A
    failure is only logged."""
    linker, runtime, folder = _linker(), toolchain.runtime(), environment.cache_dir()
    if linker is None or runtime is None or folder is None:
        return
    from cutlass.cute.runtime import find_runtime_libraries

    called = find_runtime_libraries(enable_tvm_ffi=True)
    temporary = None
    try:
        if not any(os.path.samefile(runtime, path) for path in called):
            _log.debug("no library of %s: CuTe DSL calls %s, expected %s", name, called, runtime)
            return
        # in the cache folder, which only this user can write
        handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder.absolute())
        os.close(handle)
        # its own symbols first, every symbol found now and at loading: nothing is left to fail at a launch
        options = ("-shared", "-Bsymbolic", "-z", "defs", "-z", "now", "-o", temporary)
        command = [linker, *options, str(folder.absolute() / name), *called]
        subprocess.run(command, check=True, capture_output=True, timeout=_LINKER_S, umask=0o077)
        disk.write(_library(name), Path(temporary).read_bytes())
    except (OSError, subprocess.SubprocessError) as e:
        _log.debug("cannot link %s: %s %s", name, e, getattr(e, "stderr", None) or "")
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


@functools.cache
def _linker() -> str | None:
    return shutil.which("ld")


def _library(name: str) -> str:
    return f"{name.removesuffix('.o')}.so"
