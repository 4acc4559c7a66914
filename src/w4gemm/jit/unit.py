"""The unit of compilation, :class:`Unit`: a name, a key, a target and a function that makes the program."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Program(NamedTuple):
    """The input of ``cute.compile``: a ``cute.jit`` entry, and stand-ins for its arguments with their dtypes and
    symbolic shapes."""

    entry: Callable[..., None]
    tensors: tuple[Any, ...]
    """The arguments before the last one, the stream."""

    def arguments(self) -> tuple[Any, ...]:
        """Return the stand-ins for all arguments. The stream is PyTorch's current one."""
        from cutlass.cute.runtime import make_fake_stream

        return (*self.tensors, make_fake_stream(use_tvm_ffi_env_stream=True))


@dataclass(frozen=True)
class Unit:
    """One object file: the host and device code of one compiled form of a kernel. Equal units share one object."""

    name: str
    """Name of the kernel, with which the object's file name begins."""
    key: Hashable
    """Everything that the code depends on, except the target, our sources and the compiler. Its repr must be the same
    in every process, because the file name is a hash of it."""
    arch: str
    """Target of the compiler, such as ``"sm_90a"``."""
    program: Callable[[], Program] = field(compare=False, repr=False)
    """Function that makes the program. It imports the DSL, needs no GPU, and is called only if there is no object yet.
    It can be pickled, so that another process can compile the unit."""
