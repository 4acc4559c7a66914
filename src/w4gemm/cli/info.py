"""``w4gemm info``: versions, the machine, and what each kernel says about it."""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

import torch

import w4gemm
from w4gemm import choice
from w4gemm.choice import table
from w4gemm.choice.explanation import answers
from w4gemm.choice.table import device_facts, effective
from w4gemm.cli.cache import is_current
from w4gemm.console.devices import typical_problem
from w4gemm.core import environment, trust
from w4gemm.core.words import dotted
from w4gemm.integrations.engines.engine import Engine
from w4gemm.integrations.sglang.takeover import SGLANG
from w4gemm.integrations.vllm.takeover import VLLM
from w4gemm.jit import disk
from w4gemm.jit.toolchain import driver_cuda_version, installed_version
from w4gemm.kernels.requirements import missing_for_dsl
from w4gemm.tuning.record import facts

ENGINES = (VLLM, SGLANG)
"""Serving engines with a plugin of ours."""
PACKAGES = (
    *("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "llvmlite", "transformers", "gguf", "safetensors", "numpy"),
)


def run(args: argparse.Namespace) -> int:
    report = collect()
    print(json.dumps(report, indent=2) if args.json else as_text(report))
    return 0


def collect() -> dict[str, Any]:
    """Return everything that a bug report should say."""
    machine = facts()
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    cuda = driver_cuda_version()
    return {
        "w4gemm": w4gemm.__version__,
        "commit": machine["commit"] + ("-dirty" if machine["commit"] and machine["dirty"] else ""),
        "python": machine["python"],
        "platform": platform.platform(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "driver": machine["driver"],
        "driver_cuda": dotted(cuda) if cuda else "",
        "torch_cuda": torch.version.cuda or "",
        "environment": environment.settings(),
        **_cache(),
        "engines": [_engine(engine) for engine in ENGINES],
        "devices": [_device(name) for name in devices],
    }


def as_text(r: dict[str, Any]) -> str:
    """Return the report ``r`` of :func:`collect` as lines of text."""
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in r["packages"].items())
    cuda = f" (CUDA {r['driver_cuda']}; torch was built for {r['torch_cuda']})" if r["driver_cuda"] else ""
    tables = [f"{t['records']} {t['name']}" + f" ({t['stale']} stale)" * bool(t["stale"]) for t in r["tables"]]
    lines = [
        f"w4gemm {r['w4gemm']}{' at ' + r['commit'][:12] if r['commit'] else ''}, Python {r['python']}",
        r["platform"],
        packages,
        f"NVIDIA driver: {r['driver'] or 'none'}{cuda}",
        f"compiled kernels: {r['objects']} in {r['cache']}" if r["cache"] else "compiled kernels: not kept",
        *([r["cache_refused"]] if r["cache_refused"] else ()),
        f"tuned configs: {', '.join(tables) or 'none'}",
        *(f"{name}={value}" for name, value in r["environment"].items()),
        *(answer for answer in r["engines"]),
    ]
    for device in r["devices"]:
        lines.append(f"{device['device']}{': ' + device['name'] if device['name'] else ''}, for {device['problem']}")
        lines += answers({name: answer or "runs here" for name, answer in device["kernels"].items()})
        if device["config"]:
            method = f", {device['method']}" * bool(device["method"])
            lines.append(f"  chosen: {device['config']} ({device['source']}{method})")
    return "\n".join(lines)


def _cache() -> dict[str, Any]:
    """Return the cache folder, its compiled kernels and the tables of tuned configs."""
    folder, user = environment.cache_dir(), table.user_path()
    tables = []
    for path in (*((user,) if user else ()), *table.shipped_tables()):
        records = effective(table.read(path))
        stale = sum(not is_current(record) for record in records)
        name = "tuned" if path == user else f"shipped for {path.stem}"
        tables.append({"name": name, "file": str(path), "records": len(records), "stale": stale})
    return {
        "cache": str(folder) if folder else "",
        "cache_refused": trust.refusal(folder) if folder else "",
        "objects": len(disk.stored()),
        "tables": tables,
    }


def _engine(engine: Engine) -> str:
    """Return in words what runs an engine's quantized layers on the first GPU."""
    capability = torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None
    return engine.answer(capability, missing_for_dsl())


def _device(name: str) -> dict[str, Any]:
    """Return a device's properties, each kernel's reason for not running there, empty if it runs, and the config that
    would be chosen, with its method on a CPU."""
    problem = typical_problem(name)
    explanation = choice.explain(problem)
    described = problem.device
    on_gpu = described.kind == "cuda"
    runs = next((each for each in explanation.candidates if str(each) == str(explanation.chosen)), None)
    return {
        "device": name,
        "name": described.name if on_gpu else device_facts(described)[0],
        "capability": list(described.capability) if on_gpu else None,
        "multiprocessors": described.sms if on_gpu else None,
        "memory": torch.cuda.get_device_properties(name).total_memory if on_gpu else None,
        "problem": str(problem),
        "kernels": {kernel: status.reason for kernel, status in explanation.status.items()},
        "config": str(explanation.chosen or ""),
        "source": explanation.source,
        "method": runs.resources.method if runs else None,
    }
