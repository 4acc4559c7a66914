"""The only caller of ``cute.compile``: :func:`compiled` gives what a kernel launches.

Looked for in memory, then on disk (:mod:`w4gemm.jit.disk`), then compiled; about 1 us, 5 ms and 1 s. A compiled kernel
always goes through its object file's bytes, new or stored, so both behave alike, and compiling for another GPU than
this machine's, or on a machine without one, is the same thing.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import IO, Any

from w4gemm import environment
from w4gemm.config import GemmConfig
from w4gemm.errors import UnsupportedError
from w4gemm.jit import disk
from w4gemm.kernels.base import Compilable, Program
from w4gemm.problem import GemmProblem

_log = logging.getLogger("w4gemm.jit")
_SYMBOL = "w4gemm"
"""What the host function is called in every object; each is loaded into a namespace of its own."""

_memory: dict[Hashable, Callable[..., Any] | None] = {}
# The DSL compiles in global state (options, the current kernel): one thread at a time.
_lock = threading.RLock()


def compiled(kernel: Compilable, problem: GemmProblem, config: GemmConfig) -> Callable[..., Any] | None:
    """What a kernel's launcher calls: takes the entry's run-time arguments by position, except the stream.

    It launches on torch's current stream of its tensors' device. Safe to call from several threads.

    Returns:
        None if the kernel has nothing to compile.

    Raises:
        UnsupportedError: if it would have to be compiled and ``W4GEMM_COMPILE`` forbids that.
    """
    key = _key(kernel, problem, config)
    try:
        return _memory[key]
    except KeyError:
        pass
    with _lock:
        if key not in _memory:
            _memory[key] = _find(kernel, problem, config)
        return _memory[key]


def _key(kernel: Compilable, problem: GemmProblem, config: GemmConfig) -> Hashable:
    return kernel.name, kernel.compile_key(problem, config), problem.device.capability


def is_ready(kernel: Compilable, problem: GemmProblem, config: GemmConfig) -> bool:
    """Whether :func:`compiled` would compile nothing."""
    if _key(kernel, problem, config) in _memory:
        return True
    program = kernel.program(problem, config)
    return program is None or disk.read(_name(kernel, problem, config, program)) is not None


def adopt(kernel: Compilable, problem: GemmProblem, config: GemmConfig, code: bytes) -> None:
    """Take over what :func:`object_code` gave in another process, so that :func:`compiled` finds it."""
    key = _key(kernel, problem, config)
    with _lock:
        if key not in _memory:
            _memory[key] = _load(code)


def object_code(kernel: Compilable, problem: GemmProblem, config: GemmConfig) -> bytes | None:
    """The object with the kernel's host and device code, from disk or compiled and stored; None if it has none.

    Loads nothing, so a pool of processes can fill the disk cache with it. Errors as :func:`compiled`.
    """
    program = kernel.program(problem, config)
    if program is None:
        return None
    name = _name(kernel, problem, config, program)
    code = disk.read(name)
    return _build(name, program) if code is None else code


def _name(kernel: Compilable, problem: GemmProblem, config: GemmConfig, program: Program) -> str:
    return disk.entry_name(kernel.name, kernel.compile_key(problem, config), program.arch)


def _find(kernel: Compilable, problem: GemmProblem, config: GemmConfig) -> Callable[..., Any] | None:
    program = kernel.program(problem, config)
    if program is None:
        return None
    name = _name(kernel, problem, config, program)
    started = time.perf_counter()
    code = disk.read(name)
    if code is not None:
        try:
            function = _load(code)
            _log.debug("loaded %s %s from disk in %.0f ms", kernel.name, config, 1e3 * (time.perf_counter() - started))
            return function
        except Exception as e:  # the loader's errors have no common class; any of them is a miss
            _log.warning("cannot load the compiled kernel %s (%s): compiling it again", name, e)
    started = time.perf_counter()
    function = _load(_build(name, program))
    _log.debug("compiled %s %s in %.2f s", kernel.name, config, time.perf_counter() - started)
    return function


def _build(name: str, program: Program) -> bytes:
    """Compile ``program`` to an object and store it."""
    if not environment.may_compile():
        raise UnsupportedError(
            f"W4GEMM_COMPILE=off forbids compiling, and {name} cannot be loaded: {disk.why_missing(name)}"
        )
    import cutlass.cute as cute

    with _lock, _nameless_file() as (f, path):
        function = cute.compile(
            program.entry,
            *program.arguments,
            options=f"--enable-tvm-ffi --gpu-arch {program.arch}",
            # the object's bytes are all that is wanted: do not link it into this process as well
            no_jit_engine=True,
        )
        function.export_to_c(path, function_name=_SYMBOL)
        code = f.read()
    disk.write(name, code)
    return code


def _load(code: bytes) -> Callable[..., Any]:
    """The host function in an object. Needs no GPU: the device code is loaded at the first launch on each device."""
    from cutlass.cute.runtime import load_module

    with _nameless_file() as (f, path):
        f.write(code)
        f.flush()
        return getattr(load_module(path, enable_tvm_ffi=True), _SYMBOL)


@contextlib.contextmanager
def _nameless_file() -> Iterator[tuple[IO[bytes], str]]:
    """Give a file and a path to it, since the DSL takes paths only. It has no name in any folder, so that no other user
    can put another in its place."""
    with tempfile.TemporaryFile(prefix="w4gemm-") as f:
        yield f, f"/proc/self/fd/{f.fileno()}"
