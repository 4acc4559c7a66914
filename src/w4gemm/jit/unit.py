"""The unit of compilation, :class:`Unit`: a name, a key, a target and a way to make a program; nothing of GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Program(NamedTuple):
    """Input of ``cute.compile``: a ``cute.jit`` entry and stand-ins for its arguments (dtypes and symbolic
    shapes)."""

    entry: Callable[..., None]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Unit:
    """One object file: host and device code of one compiled form of a kernel. Equal units share one object."""

    name: str
    """The kernel's; the object's file name begins with it."""
    key: Hashable
    """All that the code depends on besides the target, our sources and the compiler. Its repr must be the same in every
    process, since the file name is a hash of it."""
    arch: str
    """Target of the compiler such as ``"sm_90a"``."""
    program: Callable[[], Program] = field(compare=False, repr=False)
    """Makes the program. Imports the DSL and needs no GPU; called only if there is no object yet. It can be pickled, so
    that another process can compile the unit."""
