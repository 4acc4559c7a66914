"""Devices from their names on the command line."""

from __future__ import annotations

import os
import statistics
import time

import torch

from w4gemm import choice
from w4gemm.console.options import require_device
from w4gemm.console.progress import say
from w4gemm.core.environment import names_threads
from w4gemm.core.errors import require_gpu
from w4gemm.core.files import linux_says
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device, GemmProblem, gpu_named
from w4gemm.core.words import dotted
from w4gemm.kernels.cpu import machine
from w4gemm.packing.layouts import layout_for


def choose_device(name: str | None) -> tuple[torch.device, str]:
    """Return the device to run on, and a note if a GPU is there but cannot be used.

    Raises:
        ValueError: for a name that is no device's, or of a device that is not there.
    """
    if name is not None:
        require_device(name)
        device = torch.device(name)
        require_gpu("--device", device)
        return device, ""
    if not torch.cuda.is_available():
        return torch.device("cpu"), ""
    reasons = refusals(torch.device("cuda"))
    if not reasons:
        return torch.device("cuda"), ""
    return torch.device("cpu"), f"using the CPU, since no kernel runs on {device_name('cuda')}: {reasons}"


def use_idle_cores(device: torch.device) -> None:
    """On a CPU, let PyTorch use the cores that other processes leave, at least one; as many as ``OMP_NUM_THREADS`` says
    if it is set. Threads that wait for one another on busy cores take several times as long as one alone."""
    if device.type != "cpu" or names_threads():
        return
    threads = torch.get_num_threads()
    idle = max(1, (os.cpu_count() or threads) - _running_elsewhere())  # both of the machine, also in a container
    if idle < threads:
        torch.set_num_threads(idle)
        say(f"{idle} of {threads} threads, because other processes run too; OMP_NUM_THREADS sets another number")


def say_if_busy(device: torch.device) -> None:
    """On a CPU, say that other processes run, before something is timed."""
    if device.type == "cpu" and (others := _running_elsewhere()):
        cores = os.cpu_count() or others
        say(f"other processes use {min(others, cores)} of {cores} cores: times are longer than on an idle machine")


def _running_elsewhere() -> int:
    """Return how many threads of other processes run or wait for a core, the median of 100 ms."""
    counts = []
    for _ in range(5):
        time.sleep(0.02)
        counts.append(int(linux_says("stat", r"procs_running (\d+)") or 1) - 1)
    return int(statistics.median(counts))


def device_name(device: torch.device | str) -> str:
    """Return the name of a GPU, or "the CPU"."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def described_device(name: str | None) -> Device:
    """Return the device to choose for: one of this machine, or a GPU by its name, which need not be there.

    Raises:
        ValueError: for a name that is no device's, or of a device that is not there.
    """
    if name is not None:
        require_device(name, described=True)
        if (gpu := gpu_named(name)) is not None:
            return gpu
    return chosen_device(name)[0]


def chosen_device(name: str | None) -> tuple[Device, torch.device]:
    """Return the device to run on, described and as PyTorch's.

    Raises:
        ValueError: for a name that is no device's, or of a device that is not there.
    """
    device, note = choose_device(name)
    if note:
        say(note)
    if device.type == "cpu" and not machine.is_available():
        say(f"products run on PyTorch's operators; the compiled ones, several times as fast, need {machine.NEEDS}")
    return Device.of(device), device


def device_line(device: Device) -> str:
    """Return a GPU's name, compute capability and number of multiprocessors, or "the CPU"."""
    if device.kind != "cuda":
        return "the CPU" if device.kind == "cpu" else device.kind
    capability = dotted(device.capability)
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
