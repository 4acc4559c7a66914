"""Which packages are installed, CuTe DSL above all: by their metadata, because importing the DSL takes 0.4 s."""

from __future__ import annotations

import functools
import importlib.metadata
from pathlib import Path

_TOOLKITS = (13, 12)
"""Major versions of the CUDA toolkits that the DSL's libraries come for, newest first."""
_LIBRARIES = "nvidia-cutlass-dsl-libs-cu"


@functools.cache
def versions() -> tuple[str, ...]:
    """Return the versions of the DSL, of the CUDA toolkit that it compiles with, and of tvm-ffi."""
    cuda = toolkit()
    if cuda is None:  # importable, but installed without this metadata
        import cutlass
        import tvm_ffi

        return (cutlass.__version__, str(getattr(cutlass, "CUDA_VERSION", "")), tvm_ffi.__version__)
    names = ("nvidia-cutlass-dsl", f"{_LIBRARIES}{cuda}", "apache-tvm-ffi")
    return (*(installed_version(name) for name in names), f"cu{cuda}")


@functools.cache
def runtime() -> Path | None:
    """Return the library that compiled host code calls, or None if it is not found where the DSL's packages put it."""
    cuda = toolkit()
    if cuda is None:
        return None
    files = importlib.metadata.files(f"{_LIBRARIES}{cuda}") or []
    runtimes = [f for f in files if f.name == "libcute_dsl_runtime.so" and f.parent.name == "lib"]
    return Path(str(runtimes[0].locate())) if len(runtimes) == 1 else None


@functools.cache
def driver_cuda_version() -> tuple[int, int] | None:
    """CUDA version that the installed driver supports; None if there is no driver, or it does not answer."""
    import ctypes

    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


@functools.cache  # to read the metadata takes 5 ms
def toolkit() -> int | None:
    """Return the toolkit that the DSL chooses: the newest installed one that the driver supports, if there is one."""
    installed = [toolkit for toolkit in _TOOLKITS if installed_version(f"{_LIBRARIES}{toolkit}")]
    driver = driver_cuda_version() if len(installed) > 1 else None
    return next((toolkit for toolkit in installed if driver is None or toolkit <= driver[0]), None)


def installed_version(package: str) -> str:
    """Return the version of a package by its metadata, or the empty string if there are none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
