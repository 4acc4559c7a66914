"""Compiled kernels on disk: one object file for each key.

A file is an x86 or Arm object that holds host and device code, followed by the SHA-256 of all that (ELF readers ignore
what follows the sections, so ``nm`` and ``cuobjdump`` read it as it is). The checksum is looked at before loading,
because loading half an object can end the process. Files are written beside their place and renamed, so readers never
see half a one; whoever writes last wins, and all write the same. Whatever goes wrong on disk costs a compilation,
never an answer.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import re
import tempfile
from collections.abc import Hashable
from pathlib import Path

from w4gemm import environment

_log = logging.getLogger("w4gemm.jit")
_PACKAGE = Path(__file__).resolve().parent.parent
_SOURCES = ("kernels", "layouts", "jit", "formats.py", "epilogue.py")
_DIGEST = hashlib.sha256().digest_size


def source_hash(*parts: str) -> str:
    """Hash of the package's Python files ``parts`` (folders or files, relative to ``w4gemm``), names included."""
    digest = hashlib.sha256()
    for part in parts:
        path = _PACKAGE / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.relative_to(_PACKAGE).as_posix()}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def fingerprint() -> tuple[Hashable, ...]:
    """What compiled code depends on besides a kernel's key: our sources, the compiler's versions, the host's processor.

    Not the Python version: the object holds no Python.
    """
    import cutlass
    import tvm_ffi

    versions = (cutlass.__version__, str(getattr(cutlass, "CUDA_VERSION", "")), tvm_ffi.__version__)
    return (source_hash(*_SOURCES), *versions, *_processor(), environment.dsl_settings())


def _processor() -> tuple[str, ...]:
    """What the host half of an object may use: the DSL compiles it for this very processor, AVX-512 and all, while a
    cache may lie in a home directory that several machines share."""
    try:
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # not Linux
        found = None
    flags = found[1].split() if found else []
    return (platform.machine(), *sorted(f for f in flags if f.startswith(("avx", "amx", "bmi", "fma", "sve"))))


def entry_name(kernel: str, key: Hashable, arch: str) -> str:
    """File name of a compiled kernel: its name, and a hash of everything that its code depends on."""
    text = repr((kernel, key, arch, fingerprint()))
    assert " at 0x" not in text, f"{kernel}: the compile key's repr differs between processes: {key!r}"
    return f"{kernel}-{arch}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.o"


def read(name: str) -> bytes | None:
    """The object stored as ``name``; None if there is none, it cannot be read, or it is not whole."""
    folder = environment.cache_dir()
    if folder is None:
        return None
    try:
        data = (folder / name).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as e:
        _log.warning("cannot read the compiled kernel %s (%s): compiling it again", folder / name, e)
        return None
    code, digest = data[:-_DIGEST], data[-_DIGEST:]
    if hashlib.sha256(code).digest() != digest:
        _log.warning("the compiled kernel %s is damaged: compiling it again", folder / name)
        return None
    return code


def write(name: str, code: bytes) -> None:
    """Store an object as ``name``, or log why it cannot be stored."""
    folder = environment.cache_dir()
    if folder is None:
        return
    temporary = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
        with os.fdopen(handle, "wb") as f:
            f.write(code + hashlib.sha256(code).digest())
        os.replace(temporary, folder / name)
    except OSError as e:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        # later compilations of this process would fail alike: say it loudly only once
        _warn_unwritable(str(folder), str(e))


@functools.cache
def _warn_unwritable(folder: str, reason: str) -> None:
    _log.warning("cannot store compiled kernels in %s (%s); set W4GEMM_CACHE_DIR to a folder that can", folder, reason)
