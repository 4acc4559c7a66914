"""GPU events of PyTorch's profiler: the last decode steps among them, and their sums by kernel."""

from __future__ import annotations

import gzip
import json
import os
import re
from typing import Any

_SAMPLER = re.compile(r"gumbel_sample|argmax", re.IGNORECASE)
"""In the name of a kernel that runs once a step."""


def summary(file: str | os.PathLike[str], steps: int = 0) -> dict[str, Any]:
    """Return microseconds and launches by kernel, and the microseconds from the first to the end of the last.

    Args:
        file: a Chrome trace; compressed if its name ends with ".gz".
        steps: count only the last ``steps`` steps; 0 for all.

    Raises:
        ValueError: the trace has fewer steps.
    """
    with gzip.open(file, "rt") if os.fspath(file).endswith(".gz") else open(file) as f:
        events = json.load(f)["traceEvents"]
    return summarize(last_steps(events, steps) if steps else events)


def last_steps(events: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Return the GPU events of a Chrome trace's last ``steps`` steps: behind the sampler's kernel of the one before,
    up to the last one's.

    Raises:
        ValueError: the trace has no kernel of a sampler so often.
    """
    ends: dict[str, list[float]] = {}
    for event in on_gpu(events):
        if _SAMPLER.search(event["name"]):
            ends.setdefault(event["name"], []).append(event["ts"] + event["dur"])
    often = [sorted(found) for found in ends.values() if len(found) > steps]
    if not often:
        raise ValueError(
            f"no kernel of a sampler runs more than {steps} times, but { ({k: len(v) for k, v in ends.items()}) }"
        )
    start, end = often[0][-steps - 1], often[0][-1]
    return [e for e in on_gpu(events) if start <= e["ts"] < end]


def on_gpu(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of a Chrome trace that ran on the GPU: kernels, copies and fills."""
    return [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def summarize(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of a Chrome trace's GPU events: ``kernels`` (us and launches by name) and ``span`` (us)."""
    wanted = on_gpu(events)
    kernels: dict[str, list[float]] = {}
    for event in wanted:
        entry = kernels.setdefault(event["name"], [0.0, 0])
        entry[0] += event["dur"]
        entry[1] += 1
    first = min((e["ts"] for e in wanted), default=0.0)
    last = max((e["ts"] + e["dur"] for e in wanted), default=0.0)
    return {"kernels": kernels, "span": last - first}
