"""Machine code for this processor, which the package llvmlite (extra ``cpu``) makes of LLVM's text, and the threads
that run it."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

Run = Callable[[bytes], int]
"""A compiled function of packed arguments. Products of codes return the largest bit pattern of a result's magnitude in
float32; those of numbers return 0, because a matmul's sums would not be finite either."""
NEEDS = "llvmlite (pip install '.[cpu]') on a processor with AVX2 or of 64-bit Arm"


_compiling = threading.RLock()
"""Held while llvmlite compiles. A fork waits for it."""


@functools.cache
def is_available() -> bool:
    """True if llvmlite is installed, and this processor has the vectors that make it worth while."""
    try:
        from llvmlite import binding
    except ImportError:
        return False
    machine = binding.get_process_triple().split("-")[0]
    return machine == "aarch64" or (machine == "x86_64" and has("avx2", "fma", "f16c"))


@functools.cache
def has(*features: str) -> bool:
    """True if this processor has LLVM's features of these names."""
    from llvmlite import binding

    return all(binding.get_host_cpu_features().get(feature) for feature in features)


@functools.cache
def lanes() -> int:
    return 16 if has("avx512f") else 8


@functools.cache
def array_of(bytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Return the type of an array, which is zeros at first."""
    return ctypes.c_char * bytes


@functools.cache
def packing(arguments: type[NamedTuple]) -> Callable[..., bytes]:
    """Return the function that makes int64 in a row of the arguments of compiled code."""
    return struct.Struct(f"={len(arguments._fields)}q").pack


@functools.cache
def machine_code(program: Callable[..., str], *parameters: Hashable) -> Run:
    """Return the function of the module that ``program`` writes for the parameters. Its argument is int64 in a row, by
    :func:`packing`. Other Python threads run meanwhile."""
    with _compiling:
        return _machine_code(program(*parameters))


def _machine_code(text: str) -> Run:
    from llvmlite import binding

    from w4gemm.kernels.cpu.builder import NAME

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = binding.get_host_cpu_features().flatten() + ",-prefer-256-bit"
    machine = binding.Target.from_default_triple().create_target_machine(binding.get_host_cpu_name(), features, opt=3)
    module = binding.parse_assembly(text)
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(engine.get_function_address(NAME))
    function.engine = engine  # type: ignore[attr-defined]  # it owns the code
    return function


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "w4gemm")


def run_all(run: Run, arguments: Sequence[bytes]) -> int:
    """Run a function on several arguments at once, each in a thread, and return its largest result."""
    if len(arguments) == 1:
        return run(arguments[0])
    futures = [_pool(len(arguments) - 1).submit(run, own) for own in arguments[1:]]
    try:
        largest = run(arguments[0])
    finally:  # after Ctrl-C too the threads write to the result, which must outlive them
        wait(futures)
    return max(largest, *(future.result() for future in futures))


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads
# and llvmlite's lock, if one of them compiled, would stay locked
os.register_at_fork(before=_compiling.acquire, after_in_parent=_compiling.release, after_in_child=_compiling.release)
