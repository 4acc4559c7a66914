"""The ``cute.compile`` entry of a kernel that takes :class:`w4gemm.kernels.arguments.Arguments`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from w4gemm.kernels.arguments import Arguments, nested


@dataclass(frozen=True)
class FlatEntry:
    """Takes the values of ``Arguments`` without the nesting, then the stream: one nested argument does not compile with
    a number in it (CuTe DSL 4.8.1)."""

    launch: Callable[[Arguments, Any], None]

    @cute.jit
    def __call__(self, *values: Any):
        self.launch(nested(values[:-1]), values[-1])
