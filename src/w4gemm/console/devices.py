"""Devices from their names on the command line."""

from __future__ import annotations

import torch

from w4gemm import choice
from w4gemm.console.progress import say
from w4gemm.core.errors import require_gpu
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import H100, H200, Device, GemmProblem
from w4gemm.packing.layouts import layout_for

SIMULATED = {"h100": H100, "h200": H200}
"""Descriptions of GPUs that need not be there, by name, for commands that only choose and compile."""


def choose_device(name: str | None) -> tuple[torch.device, str]:
    """Return the device to run on, and a note if a GPU is there but cannot be used.

    Raises:
        ValueError: for a name that is no device's, or of a device that is not there.
    """
    if name is not None:
        try:
            device = torch.device(name)
        except RuntimeError:
            device = torch.device("meta")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"--device: wanted cpu, cuda or cuda:N, got {name!r}")
        require_gpu("--device", device)
        return device, ""
    if not torch.cuda.is_available():
        return torch.device("cpu"), ""
    reasons = refusals(torch.device("cuda"))
    if not reasons:
        return torch.device("cuda"), ""
    return torch.device("cpu"), f"using the CPU, since no kernel runs on {device_name('cuda')}: {reasons}"


def device_name(device: torch.device | str) -> str:
    """Return the name of a GPU, or "the CPU"."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def described_device(name: str | None) -> Device:
    """Return the device to choose for, which need not be there if it is one of :data:`SIMULATED`.

    Raises:
        ValueError: for a name that is no device's, or of a device that is not there.
    """
    if name is not None and name.lower() in SIMULATED:
        return SIMULATED[name.lower()]
    try:
        return chosen_device(name)[0]
    except ValueError as e:
        raise ValueError(f"{e}; without a GPU: {' or '.join(SIMULATED)}") from None


def chosen_device(name: str | None) -> tuple[Device, torch.device]:
    """Return the device to run on, described and as PyTorch's.

    Raises:
        ValueError: for a name that is no device's, or of a device that is not there.
    """
    if name is not None and name.lower() in SIMULATED:
        expected = "wanted a device to run on, cpu, cuda or cuda:N"
        raise ValueError(f"--device: {expected}, got {name}, a description for `explain` and `inspect`")
    device, note = choose_device(name)
    if note:
        say(note)
    return Device.of(device), device


def device_line(device: Device) -> str:
    """Return a GPU's name, compute capability and number of multiprocessors, or "the CPU"."""
    if device.kind != "cuda":
        return "the CPU" if device.kind == "cpu" else device.kind
    capability = ".".join(map(str, device.capability))
    return f"{device.name}, compute capability {capability}, {device.sms} multiprocessors"


def typical_problem(device: torch.device | str) -> GemmProblem:
    """Return a problem of common sizes, to ask the kernels about without a weight."""
    described, dtype = Device.of(device), torch.bfloat16
    layout = layout_for(described, WeightFormat(), dtype)
    return GemmProblem(16, 4096, 4096, dtype, WeightFormat(), layout, device=described)


def refusals(device: torch.device | str) -> str:
    """Return every kernel's reason for not running on a device, or the empty string if one runs there."""
    status = choice.explain(typical_problem(device)).status
    return "" if any(status.values()) else "; ".join(f"{name}: {answer.reason}" for name, answer in status.items())
