"""The disk cache of compiled kernels: an object file for each unit, and the shared library that is linked from it.

A file is an x86 or Arm object with host and device code. Behind it come the processor that the host code was compiled
for and the SHA-256 of both. (ELF readers ignore bytes behind the sections, so ``nm`` and ``cuobjdump`` read the file as
it is.) The DSL compiles host code for the processor that it runs on, with all its instruction sets, but a folder may be
filled on another machine or shared by several. So an object is loaded only if this processor has every instruction set
of the other.

Only files that :mod:`w4gemm.core.trust` accepts are read, because an object is code. The checksum is compared before
loading, because loading half an object can end the process. Files are written under a temporary name in the cache
folder and renamed, so that readers never see a partial file. Concurrent writers write equal content, and the last one
wins. A disk error costs a recompilation, never a wrong result.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import tempfile
import time
from collections.abc import Hashable, Iterator
from pathlib import Path

from w4gemm.core import environment, trust
from w4gemm.core.files import linux_says, system_reason
from w4gemm.jit import toolchain
from w4gemm.jit.unit import Unit

_log = logging.getLogger("w4gemm.jit")
_PACKAGE = Path(__file__).resolve().parent.parent
_CORE = ("elements.py", "formats.py", "epilogue.py", "activation.py", "router.py")
_SOURCES = ("kernels", "packing", "ptx", "jit/compile.py", "jit/library.py", *(f"core/{name}" for name in _CORE))
"""Files and folders of this package that decide the code of an object or a library."""
_DIGEST = hashlib.sha256().digest_size
# compilers use these only for code that asks for them, and AMD's and Intel's latest processors have one each
_ONLY_BY_NAME = {"avx512_vp2intersect", "avx512_fp16"}
_SIZE = 4  # bytes of the processor's length
_ABANDONED_S = 3600.0  # age from which a temporary file is nobody's: writing one takes milliseconds


def source_hash(*parts: str) -> str:
    """Return a hash of the names and contents of Python files. parts: folders or files, relative to ``w4gemm``."""
    digest = hashlib.sha256()
    for part in parts:
        path = _PACKAGE / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            text = file.read_bytes()
            digest.update(f"{file.relative_to(_PACKAGE).as_posix()}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()[:16]


@functools.cache
def fingerprint() -> tuple[Hashable, ...]:
    """Return the hash of our sources and the versions and settings of the compiler. Compiled code depends on these, the
    unit and the host's processor, and not on the Python version, because an object holds no Python."""
    return (source_hash(*_SOURCES), *toolchain.versions(), environment.dsl_settings())


@functools.cache
def processor() -> tuple[str, ...]:
    """Return the host's architecture and the instruction sets of it that host code in an object may use."""
    flags = (linux_says("cpuinfo", r"(?:flags|Features)\s*:(.*)") or "").split()
    used = (f for f in flags if f.startswith(("avx", "bmi", "fma", "sve")) and f not in _ONLY_BY_NAME)
    return (platform.machine(), *sorted(used))


def entry_name(unit: Unit) -> str:
    """Return the file name of a unit's object: the unit's name and target, a hash of everything that its code depends
    on, and a hash of the processor."""
    text = repr((unit.name, unit.key, unit.arch, fingerprint()))
    assert " at 0x" not in text, f"{unit.name}: the key's repr differs between processes: {unit.key!r}"
    digests = (hashlib.sha256(t.encode()).hexdigest() for t in (text, " ".join(processor())))
    return f"{unit.name}-{unit.arch}-{next(digests)[:24]}-{next(digests)[:8]}.o"


def read(name: str) -> bytes | None:
    """Return the object stored as ``name``, or one of the same unit that was compiled for a processor whose instruction
    sets this one has. None if there is none, or if it cannot be trusted or read or is not whole."""
    return next((code for path in _candidates(name) if (code := _read(path)) is not None), None)


def find(name: str) -> Path | None:
    """Return the path of what :func:`read` returns. No other user can put another file there before it is used."""
    return next((path for path in _candidates(name) if _read(path) is not None), None)


def _candidates(name: str) -> Iterator[Path]:
    folder = environment.cache_dir()
    if folder is None:
        return
    yield folder / name
    pattern = f"{name.rpartition('-')[0]}-*{Path(name).suffix}"
    with contextlib.suppress(OSError):  # a folder that this user may not enter, which the first path has told
        yield from sorted(path for path in folder.glob(pattern) if path.name != name)


def _read(path: Path) -> bytes | None:
    try:
        with open(path, "rb", opener=trust.opener) as f:
            data = f.read()
    except FileNotFoundError:
        return None
    except trust.Untrusted as e:
        trust.warn(str(e))
        return None
    except OSError as e:
        _log.warning("cannot read the compiled kernel %s (%s): compiling it again", path, e)
        return None
    body, digest = data[:-_DIGEST], data[-_DIGEST:]
    size = int.from_bytes(body[-_SIZE:], "little")
    code, made_for = body[: -_SIZE - size], body[-_SIZE - size : -_SIZE].decode("ascii", "replace").split()
    if hashlib.sha256(body).digest() != digest or not code or not made_for:
        _log.warning("the compiled kernel %s is damaged: compiling it again", path)
        return None
    machine, *features = processor()
    return code if made_for[0] == machine and set(made_for[1:]) <= set(features) else None


def write(name: str, code: bytes) -> bool:
    """Store an object or a library as ``name``; return whether it could be stored, and log why not."""
    folder = environment.cache_dir()
    if folder is None:
        return False
    try:
        return store(folder, name, code)
    except trust.Untrusted as e:
        trust.warn(str(e))
    except OSError as e:
        # later compilations of this process would fail alike: say it loudly only once
        _warn_unwritable(str(folder), e.strerror if e.filename == str(folder) else system_reason(e))
    return False


def store(folder: Path, name: str, code: bytes) -> bool:
    """Store an object or a library as ``name``; return False if another process has cleared the folder meanwhile.

    Raises:
        OSError: if it cannot be stored, as in a folder or on a disk that cannot be written; it names the folder.
        Untrusted: if another user can put files there.
    """
    trust.make_folder(folder)
    _delete_abandoned(folder)
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
        with os.fdopen(handle, "wb") as f:
            made_for = " ".join(processor()).encode()
            body = code + made_for + len(made_for).to_bytes(_SIZE, "little")
            f.write(body + hashlib.sha256(body).digest())
        with contextlib.suppress(FileNotFoundError):
            os.replace(temporary, folder / name)
            return True
    except OSError as e:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise OSError(e.errno, e.strerror, str(folder)) from e
    return False


def require_writable(folder: Path) -> None:
    """Raise OSError, which names the folder, if this user may not write files there."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(folder)) from e


@functools.cache
def _delete_abandoned(folder: Path) -> None:
    """Delete the temporary files of processes that were killed while they wrote; once in a process."""
    for path in _temporary(folder):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - _ABANDONED_S:
                path.unlink()


def why_missing(name: str) -> str:
    """Return in words why :func:`read` returns None for ``name``."""
    folder = environment.cache_dir()
    if folder is None:
        return environment.why_nothing_is_kept()
    try:
        with open(folder / name, "rb", opener=trust.opener):
            whole = _read(folder / name) is not None
        return f"{folder / name} is " + ("whole, and CuTe DSL cannot load it" if whole else "damaged")
    except FileNotFoundError:
        if others := [path.name for path in _candidates(name) if path.name != name]:
            return (
                f"{folder} has {others[0]}, which is damaged or was compiled on a machine whose CPU has instruction "
                "sets that this one lacks: run `w4gemm compile` on the machine whose CPU has the fewest"
            )
        return f"it is not in {folder}: `w4gemm compile` puts it there, run with this version of w4gemm and of CuTe DSL"
    except trust.Untrusted as e:
        return str(e)
    except OSError as e:
        return f"it cannot be read ({e})"


@functools.cache
def _warn_unwritable(folder: str, reason: str) -> None:
    _log.warning("cannot store compiled kernels in %s (%s); set W4GEMM_CACHE_DIR to a folder that can", folder, reason)


def stored() -> list[Path]:
    """Return the paths of all objects in the cache folder, of any version."""
    return _stored(".o")


def libraries() -> list[Path]:
    """Return the paths of all libraries in the cache folder, of any version."""
    return _stored(".so")


def size() -> int:
    """Return the bytes of all objects and libraries in the cache folder. Another process may delete some meanwhile."""
    total = 0
    for path in (*stored(), *libraries()):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _stored(suffix: str) -> list[Path]:
    folder = environment.cache_dir()
    if folder is None:
        return []
    try:
        return sorted(folder.glob(f"*-sm_*-*{suffix}"))
    except OSError:  # this user may not enter it
        return []


def _temporary(folder: Path) -> list[Path]:
    return [path for suffix in ("o", "so") for path in folder.glob(f".*.{suffix}.*")]


def clear() -> int:
    """Delete every object and library, and the temporary files of killed processes; return the number of objects.

    Raises:
        w4gemm.core.trust.Untrusted: if another user could have replaced the folder by a link to another one.
    """
    folder = environment.cache_dir()
    if folder is None or not folder.is_dir():
        return 0
    trust.check_folder(folder)
    objects = stored()
    for path in (*objects, *libraries(), *_temporary(folder)):
        path.unlink(missing_ok=True)
    return len(objects)
