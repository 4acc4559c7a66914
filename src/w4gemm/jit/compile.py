"""The only caller of ``cute.compile``: :func:`compiled` makes a unit callable.

A unit is looked up in memory (about 1 us), then on disk (:mod:`w4gemm.jit.disk`), and compiled only then (1 s). What is
on disk is loaded from its shared library (1 ms, :mod:`w4gemm.jit.library`) or, if there is none, from its object (5 ms,
and 0.4 s to import the DSL). What this process just compiled is loaded from its object.
Compiling for another GPU than this machine's, or on a machine without one, takes the same path.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from w4gemm.core import environment
from w4gemm.core.errors import UnsupportedError
from w4gemm.jit import disk, library
from w4gemm.jit.unit import Unit

_log = logging.getLogger("w4gemm.jit")
_SYMBOL = "w4gemm"
"""Name of the host function in every object; each object is loaded into a namespace of its own."""

_memory: dict[Unit, Callable[..., Any]] = {}
# The DSL compiles in global state (options, the current kernel): one thread at a time.
_lock = threading.RLock()
# A fork waits for the thread that compiles: in the child that lock would stay locked, and the DSL's state half changed.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def compiled(unit: Unit) -> Callable[..., Any]:
    """Return the function that launches a unit. It takes the run-time arguments of the program's entry by position,
    except the stream, and launches on torch's current stream of its tensors' device.

    Several threads may call this at once.

    Raises:
        UnsupportedError: if it would have to be compiled and ``W4GEMM_COMPILE`` forbids that.
    """
    function = _memory.get(unit)
    if function is None:
        with _lock:
            function = _memory.get(unit)
            if function is None:
                function = _memory[unit] = _find(unit)
    return function


def is_ready(unit: Unit) -> bool:
    """True if :func:`compiled` would not have to compile the unit."""
    return unit in _memory or disk.read(disk.entry_name(unit)) is not None


def adopt(unit: Unit, code: bytes) -> None:
    """Load the object that :func:`object_code` returned in another process, or the library that it linked from it, so
    that :func:`compiled` finds it."""
    with _lock:
        if unit not in _memory:
            _memory[unit] = library.load(disk.entry_name(unit), _SYMBOL) or _load(code)


def object_code(unit: Unit) -> bytes:
    """Return the bytes of a unit's object file, with host and device code, from disk or compiled and stored now.

    The object is not loaded, so that a pool of processes can fill the disk cache. Errors are those of :func:`compiled`.
    """
    code = disk.read(disk.entry_name(unit))
    return _build(unit) if code is None else code


def _find(unit: Unit) -> Callable[..., Any]:
    started = time.perf_counter()
    name = disk.entry_name(unit)
    linked = library.load(name, _SYMBOL)
    if linked is not None:
        _log.debug("loaded the library of %s in %.0f ms", name, 1e3 * (time.perf_counter() - started))
        return linked
    code = disk.read(name)
    if code is not None:
        try:
            function = _load(code)
            _log.debug("loaded %s from disk in %.0f ms", name, 1e3 * (time.perf_counter() - started))
            return function
        except Exception as e:  # the loader's errors have no common class; any of them is a miss
            _log.warning("cannot load the compiled kernel %s (%s): compiling it again", name, e)
    started = time.perf_counter()
    function = _load(_build(unit))
    _log.debug("compiled %s in %.2f s", name, time.perf_counter() - started)
    return function


def _build(unit: Unit) -> bytes:
    """Compile a unit to an object and store it."""
    name = disk.entry_name(unit)
    if not environment.may_compile():
        raise UnsupportedError(
            f"W4GEMM_COMPILE=off forbids compiling, and {name} cannot be loaded: {disk.why_missing(name)}"
        )
    import cutlass.cute as cute

    with _lock, _nameless_file() as (f, path):
        program = unit.program()
        function = cute.compile(
            program.entry,
            *program.arguments(),
            options=f"--enable-tvm-ffi --gpu-arch {unit.arch}",
            # the object's bytes are all that is wanted: do not link it into this process as well
            no_jit_engine=True,
        )
        function.export_to_c(path, function_name=_SYMBOL)
        code = f.read()
    if disk.write(name, code):
        library.link(name)
    return code


def _load(code: bytes) -> Callable[..., Any]:
    """Return the host function of an object. Needs no GPU: device code is loaded at the first launch on each device."""
    from cutlass.cute.runtime import load_module

    with _nameless_file() as (f, path):
        f.write(code)
        f.flush()
        return getattr(load_module(path, enable_tvm_ffi=True), _SYMBOL)


@contextlib.contextmanager
def _nameless_file() -> Iterator[tuple[IO[bytes], str]]:
    """Yield a file and a path to it, because the DSL takes only paths. The file has no name in any folder, so that no
    other user can put another file in its place."""
    with tempfile.TemporaryFile(prefix="w4gemm-") as f:
        yield f, f"/proc/self/fd/{f.fileno()}"
