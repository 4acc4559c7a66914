"""vLLM's compiled operators, which several peers share.

They are taken from an installed vLLM, or from the file ``$VLLM_OPS_LIBRARY``, with ``$VLLM_VERSION`` saying which
version that is.
"""

from __future__ import annotations

import functools
import importlib
import os
from pathlib import Path
from typing import Any

import torch
from bench.peers.base import missing_gpu, missing_package, package_version

UINT4_MINUS_8 = 4 << 8 | 8 << 17 | 1 << 50
"""``vllm.scalar_type.scalar_types.uint4b8.id``: 4 bits of mantissa, a bias of 8."""
E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49
"""``scalar_types.float4_e2m1f.id``: 2 bits of exponent, 1 of mantissa, signed, finite."""


def missing(operator: str) -> str:
    """Return why the operator cannot be called here, or the empty string."""
    if reason := missing_gpu():
        return reason
    library = os.environ.get("VLLM_OPS_LIBRARY")
    if not library and missing_package("vllm", "vllm"):
        return "vllm is not installed, and VLLM_OPS_LIBRARY names no library of its operators"
    if library and not Path(library).is_file():
        return f"VLLM_OPS_LIBRARY: no file {library}"
    try:
        found = hasattr(operators(), operator)
    except (ImportError, OSError) as e:
        return f"vLLM's operators do not load: {e}"
    return "" if found else f"vLLM's operators have no {operator}"


def version() -> str:
    return os.environ.get("VLLM_VERSION") or package_version("vllm")


@functools.cache
def operators() -> Any:
    library = os.environ.get("VLLM_OPS_LIBRARY")
    if library:
        torch.ops.load_library(library)
    else:
        importlib.import_module("vllm._custom_ops")
    return torch.ops._C
