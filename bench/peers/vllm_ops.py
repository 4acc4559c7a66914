"""vLLM's compiled operators, which several peers share.

They are taken from an installed vLLM, or from files: those of experts from ``$VLLM_MOE_OPS_LIBRARY``, the others from
``$VLLM_OPS_LIBRARY``. ``$VLLM_MOE_VERSION`` and ``$VLLM_VERSION`` say which versions these are.
"""

from __future__ import annotations

import functools
import importlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench.peers.base import missing_gpu, missing_package

from w4gemm.jit.toolchain import installed_version


class Library(NamedTuple):
    """A compiled library of vLLM."""

    name: str
    """Its name in ``torch.ops``."""
    file: str
    """Environment variable with the path of the library."""
    version: str
    """Environment variable with the version of that file."""


OTHERS = Library("_C", "VLLM_OPS_LIBRARY", "VLLM_VERSION")
EXPERTS = Library("_moe_C", "VLLM_MOE_OPS_LIBRARY", "VLLM_MOE_VERSION")
UINT4_MINUS_8, UINT8_MINUS_128 = (bits << 8 | 1 << (bits - 1) << 17 | 1 << 50 for bits in (4, 8))
"""``vllm.scalar_type.scalar_types.uint4b8.id``: 4 bits of mantissa, a bias of 8; ``uint8b128.id``."""
E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49
"""``scalar_types.float4_e2m1f.id``: 2 bits of exponent, 1 of mantissa, signed, finite."""
E4M3 = 4 | 3 << 8 | 1 << 16 | 1 << 49 | 2 << 50
"""``scalar_types.float8_e4m3fn.id``: 4 bits of exponent, 3 of mantissa, signed, finite, NaN where all bits are 1."""


def missing(operator: str, library: Library = OTHERS) -> str:
    """Return why the operator cannot be called here, or the empty string."""
    if reason := missing_gpu():
        return reason
    file = os.environ.get(library.file)
    if not file and missing_package("vllm", "vllm"):
        return f"vllm is not installed, and {library.file} names no library of its operators"
    if file and not Path(file).is_file():
        return f"{library.file}: no file {file}"
    try:
        there = hasattr(operators(library), operator)
    except (ImportError, OSError) as e:
        return f"vLLM's operators do not load: {e}"
    return "" if there else f"vLLM's operators have no {operator}"


def version(library: Library = OTHERS) -> str:
    return os.environ.get(library.version) or installed_version("vllm")


class VllmAdapter:
    """An implementation that is one of vLLM's operators."""

    operator: str
    library = OTHERS

    def version(self) -> str:
        return version(self.library)

    def available(self) -> str:
        return missing(self.operator, self.library)


@functools.cache
def operators(library: Library = OTHERS) -> Any:
    file = os.environ.get(library.file)
    if file:
        torch.ops.load_library(file)
    else:
        importlib.import_module("vllm._custom_ops")
    return getattr(torch.ops, library.name)
