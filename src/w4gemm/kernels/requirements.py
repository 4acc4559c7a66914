"""Requirements of the kernels in CuTe DSL: an NVIDIA GPU, the DSL itself, our sources, and a driver that is new
enough."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from w4gemm.core.imports import DSL, DSL_HELP, missing_dsl
from w4gemm.core.problem import Device
from w4gemm.core.words import dotted
from w4gemm.jit.toolchain import driver_cuda_version, installed_version
from w4gemm.kernels.variant import HOPPER_SHARED_MEMORY

TARGETS = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_87",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (11, 0): "sm_110a",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
}
"""Targets of CuTe DSL by compute capability."""
SHARED_MEMORY = 101376
"""Bytes that one CTA may use on SM86, SM89 and SM120, the least of these."""
_MIN_DRIVER = (12, 0)
"""CUDA version that the driver must support."""

_log = logging.getLogger("w4gemm.kernels")


def no_nvidia_gpu(device: Device, capability: str) -> str:
    """Return why kernels that need an NVIDIA GPU of a compute capability cannot run on a device of another kind, or the
    empty string."""
    if device.kind == "cuda" and not device.rocm:
        return ""
    if device.kind == "cpu":
        return "needs an NVIDIA GPU"
    have = "an AMD GPU" if device.rocm else f"a {device.kind} device"
    return f"needs an NVIDIA GPU of compute capability {capability}, this is {have}"


def refusal(
    device: Device,
    least: tuple[int, int] = (8, 0),
    since: str = "A100, RTX 30 and later",
    otherwise: str = "w.to('cpu') runs on the CPU",
) -> str:
    """Return why code for every GPU from a compute capability on cannot run on a device; the empty string if it can.

    Args:
        since: names of the first GPUs with this capability.
        otherwise: what a user with an older GPU can do.
    """
    needs = f"{dotted(least)} or newer"
    if reason := no_nvidia_gpu(device, needs):
        return reason
    have = f"{device.name or 'this GPU'} has {dotted(device.capability)}"
    if device.capability < least:
        return f"needs compute capability {needs} ({since}), {have}; {otherwise}"
    if device.capability not in TARGETS:
        known = ", ".join(dotted(c) for c in TARGETS if c >= least)
        return f"needs a compute capability that it has a target for ({known}), {have}; a newer w4gemm may have it"
    if device.shared_memory < SHARED_MEMORY:
        return f"needs {SHARED_MEMORY} bytes of shared memory a CTA, the GPU has {device.shared_memory}"
    return ""


def hopper_refusal(device: Device) -> str:
    """Return why code for SM90 cannot run on a device; the empty string if it can."""
    if reason := no_nvidia_gpu(device, "9.0"):
        return reason
    if device.capability != (9, 0):
        have = dotted(device.capability)
        return f"needs compute capability 9.0 (H100, H200, H800, H20), {device.name or 'this GPU'} has {have}"
    if device.shared_memory < HOPPER_SHARED_MEMORY:
        return f"needs {HOPPER_SHARED_MEMORY} bytes of shared memory a CTA, the GPU has {device.shared_memory}"
    return ""


@functools.cache
def missing_for_dsl() -> str:
    """Return why kernels in CuTe DSL cannot run here, or the empty string. Without a GPU the DSL is not looked for:
    there configs are only chosen, and compiled if :func:`missing_to_compile` is empty too."""
    import torch

    if not torch.cuda.is_available():
        return _missing_sources()  # beside which lie the tables that configs are chosen by
    return missing_to_compile() or _old_driver()


def missing_to_compile() -> str:
    """Return why kernels in CuTe DSL cannot be compiled here, or the empty string."""
    return _missing_dsl() or _missing_sources()


def _missing_dsl() -> str:
    if reason := missing_dsl():
        return reason
    version = installed_version("nvidia-cutlass-dsl")
    if not version:
        return ""  # importable, but installed without metadata: believe it
    if _minor(version) < _minor(DSL):
        return f"needs a newer CuTe DSL than nvidia-cutlass-dsl {version}; {DSL_HELP}"
    if _minor(version) > _minor(DSL):
        _warn_of_newer(version)
    return ""


@functools.cache
def _warn_of_newer(version: str) -> None:
    """Log once what a newer version may do: its machine code was never looked at, nor timed."""
    _log.warning(
        "nvidia-cutlass-dsl %s is newer than %s, with which w4gemm's kernels are tested and timed: one may not "
        "compile, or run more slowly; %s",
        *(version, DSL, DSL_HELP),
    )


def _missing_sources() -> str:
    """The DSL compiles sources, and their hash names what is compiled. Tables of measured times lie beside them."""
    source = Path(__file__).with_suffix(".py")
    if source.is_file():
        return ""
    return f"needs w4gemm's sources in a folder, as pip installs them, and {source} is no file; unpack a zip file"


def _minor(version: str) -> tuple[int, ...]:
    """Major and minor number of a version."""
    return tuple(int(p) for p in version.split(".")[:2])


def _old_driver() -> str:
    have = driver_cuda_version()
    if have is not None and have < _MIN_DRIVER:
        needs = f"needs a driver for CUDA {dotted(_MIN_DRIVER)} or newer"
        return f"{needs}, this one supports {dotted(have)}; update the driver"
    return ""
