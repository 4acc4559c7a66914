"""``w4gemm info``: versions, the machine, and what each kernel says about it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from typing import Any

import torch

import w4gemm
from w4gemm import dispatch, environment
from w4gemm.cli.report import typical_problem
from w4gemm.tuning.record import facts

NAME = "info"
HELP = "print versions, the machine, and what each kernel says about it"
DESCRIPTION = "Print versions, the machine, and what each kernel says about it."
PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "transformers", "gguf", "safetensors", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(args: argparse.Namespace) -> int:
    found = collect()
    print(json.dumps(found, indent=2) if args.json else as_text(found))
    return 0


def collect() -> dict[str, Any]:
    machine = facts()
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    cache = environment.cache_dir()
    return {
        "w4gemm": w4gemm.__version__,
        "python": machine["python"],
        "packages": {name: _version(name) for name in PACKAGES},
        "driver": machine["driver"],
        "cache": str(cache) if cache else "",
        "devices": [_device(name) for name in devices],
    }


def as_text(found: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in found["packages"].items())
    lines = [
        f"w4gemm {found['w4gemm']}, Python {found['python']}",
        packages,
        f"NVIDIA driver: {found['driver'] or 'none'}",
        f"compiled kernels: {found['cache'] or 'not kept'}",
    ]
    for device in found["devices"]:
        lines.append(f"{device['device']}{': ' + device['name'] if device['name'] else ''}, for {device['problem']}")
        lines += [f"  {name}: {answer or 'runs here'}" for name, answer in device["kernels"].items()]
    return "\n".join(lines)


def _device(name: str) -> dict[str, Any]:
    """What every kernel says: the empty string if it runs there, else the reason why not."""
    problem = typical_problem(name)
    kernels = {kernel: status.reason for kernel, status in dispatch.explain(problem).status.items()}
    described = problem.device
    return {
        "device": name,
        "name": described.name,
        "capability": list(described.capability) if described.kind == "cuda" else None,
        "problem": str(problem),
        "kernels": kernels,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
