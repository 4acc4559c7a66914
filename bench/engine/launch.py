"""Processes with a vLLM engine: their environment, their arguments, and their end."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench.engine.implementations import Implementation
from bench.engine.models import Model
from bench.engine.offline import Result, Task
from bench.engine.worker import EXTENSION

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results/engine.jsonl"
CAPTURED = (1, 2, 4, 8, 16, 32, 64, 128)
"""Batch sizes with CUDA graphs, beside those that are measured; vLLM captures more of them by default."""
PLUGIN_GROUP = "vllm.general_plugins"


class EngineError(RuntimeError):
    """An engine that did not start, did not end in time, or ran other kernels than asked for; says why."""


@dataclass(frozen=True)
class EngineOptions:
    """How engines are started, whichever implementation they take.

    Attributes:
        dtype: of activations.
        compiled: True for vLLM's own compilation mode; False for CUDA graphs of decode steps alone, which starts
            sooner.
        eager: True for neither.
        gpus: tensor parallel size.
        memory: part of the GPU's memory that the engine may take.
        max_len: most tokens of a request.
        expert_parallel: True if each GPU has some experts whole.
        rebalance: steps after which vLLM moves experts between GPUs; 0 for never.
        others: further arguments of ``vllm.LLM``.
    """

    dtype: str
    compiled: bool
    eager: bool
    gpus: int
    memory: float
    max_len: int
    expert_parallel: bool = False
    rebalance: int = 0
    others: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, folder: Path, implementation: Implementation, model: Model, batches: tuple[int, ...]) -> Any:
        """Return the arguments of ``vllm.LLM`` for requests of these batch sizes."""
        arguments: dict[str, Any] = {
            "model": str(folder),
            "dtype": self.dtype,
            "max_model_len": self.max_len,
            "max_num_seqs": max(batches),
            "gpu_memory_utilization": self.memory,
            "tensor_parallel_size": self.gpus,
            "enable_prefix_caching": False,  # a prompt is timed more than once
            "seed": 0,
            "worker_extension_cls": EXTENSION,
            **implementation.engine_arguments(model),
            **self.others,
        }
        if self.expert_parallel:
            arguments["enable_expert_parallel"] = True
        if self.rebalance:
            interval = {"window_size": self.rebalance, "step_interval": self.rebalance}
            arguments |= {"enable_eplb": True, "eplb_config": interval}
        if self.eager:
            return {**arguments, "enforce_eager": True}
        compilation: dict[str, Any] = {"cudagraph_capture_sizes": sorted({*CAPTURED, *batches})}
        if not self.compiled:  # mode 0 alone would drop the CUDA graphs
            compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        return {**arguments, "compilation_config": compilation}


@contextmanager
def work_folder(kept: Path | None) -> Iterator[Path]:
    """Give the folder for models and compiled code: one to keep, or a temporary one, in memory if there is room."""
    if kept:
        kept.mkdir(parents=True, exist_ok=True, mode=0o700)
        yield kept
        return
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 80e9
    with tempfile.TemporaryDirectory(prefix="w4gemm-engine-", dir=memory if roomy else None) as folder:
        yield Path(folder)


def environment(implementation: Implementation, caches: Path, plugin: Path | None) -> dict[str, str]:
    """Return the environment of an engine's process.

    Args:
        caches: folder of the code that the implementation compiles for one checkpoint.
        plugin: what :func:`plugin_metadata` returned.
    """
    folders = {"VLLM_CACHE_ROOT": "vllm", "W4GEMM_CACHE_DIR": "w4gemm", "TRITON_CACHE_DIR": "triton"}
    own = {name: str(caches / folder) for name, folder in folders.items()}
    return {**base_environment(plugin), **implementation.environment(), **own}


def base_environment(plugin: Path | None) -> dict[str, str]:
    """Return what the environments of all engines have in common."""
    paths = [str(p) for p in (ROOT, ROOT / "src", plugin, os.environ.get("PYTHONPATH")) if p]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def has_plugin(group: str = PLUGIN_GROUP) -> bool:
    """True if installed metadata names our plugin in a group of entry points, so that the engine finds it."""
    points = importlib.metadata.entry_points(group=group)
    return any(point.value.startswith("w4gemm.") for point in points)


def plugin_metadata(folder: Path, group: str = PLUGIN_GROUP) -> Path | None:
    """Write metadata by which an engine finds our plugin in a source tree; None if it is installed.

    The entry point is that of pyproject.toml.

    Args:
        group: that the engine looks for plugins in.

    Raises:
        EngineError: if pyproject.toml names no plugin.
    """
    if has_plugin(group):
        return None
    points = entry_points(ROOT / "pyproject.toml", group)
    if not points:
        raise EngineError(f"impl: w4gemm wants an entry point of {group} in pyproject.toml, which has none")
    write_metadata(folder, points, group)
    return folder


def write_metadata(folder: Path, points: list[str], group: str = PLUGIN_GROUP) -> None:
    """Write metadata of a package w4gemm with entry points of a group."""
    info = folder / "w4gemm-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: w4gemm\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *points]) + "\n")


def entry_points(pyproject: Path, group: str = PLUGIN_GROUP) -> list[str]:
    """Return the lines ``name = module:function`` of our plugin's entry points."""
    lines = iter(pyproject.read_text().splitlines())
    head = f'[project.entry-points."{group}"]'
    for line in lines:
        if line.strip() == head:
            break
    points = []
    for line in lines:
        if line.startswith("["):
            break
        if "=" in line and not line.lstrip().startswith("#"):
            points.append(line.replace('"', "").strip())
    return points


def run_offline(task: Task, variables: dict[str, str], log: Path, seconds: float) -> Result:
    """Run ``bench.engine.offline`` in a process of its own and return what it measured. If it ended early, the result's
    ``failure`` gives the reason.

    Args:
        log: file for all that the engine prints.

    Raises:
        EngineError: if it fails or is not done within ``seconds`` before it is up; with the last error that it printed.
    """
    wait_for_memory(task.engine.get("gpu_memory_utilization", 0.0), task.engine.get("tensor_parallel_size", 1))
    task_file, result_file = log.with_suffix(".task.json"), log.with_suffix(".result.json")
    task_file.write_text(json.dumps(asdict(task)))
    result_file.unlink(missing_ok=True)
    begun = time.monotonic()
    try:
        with started(
            [sys.executable, "-m", "bench.engine.offline", str(task_file), str(result_file)], variables, log
        ) as process:
            end = f"ended with {process.wait(seconds)} after {time.monotonic() - begun:.0f} s"
    except subprocess.TimeoutExpired:
        end = f"not done in {seconds:.0f} s, its limit"
    failure = f"{end}: {last_error(log)}"
    if not result_file.exists():
        raise EngineError(failure)
    result = Result(**json.loads(result_file.read_text()))
    if result.failure:  # else all was measured, however the engine ended
        result.failure = failure
    return result


@contextmanager
def turn(file: Path | None) -> Iterator[None]:
    """Use the GPU while no other process does, if they lock the same file; at once if there is none."""
    if file is None:
        yield
        return
    with open(file, "w") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        yield


def wait_for_memory(part: float, gpus: int) -> None:
    """Wait until ``part`` of the memory of the GPUs is free: the engine before may still be giving its own back.

    Raises:
        EngineError: if it is not free in 20 seconds.
    """
    if not torch.cuda.is_available():
        return
    end = time.monotonic() + 20
    while (least := min(free / total for free, total in map(torch.cuda.mem_get_info, range(gpus)))) < part:
        if time.monotonic() > end:
            raise EngineError(f"{least:.0%} of a GPU's memory is free, wanted {part:.0%}: another process holds it")
        time.sleep(0.2)


@contextmanager
def started(command: list[str], variables: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process group of its own, of which nothing is left at the end."""
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command, env=variables, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        end_tree(process.pid)  # its workers too
        process.wait()


def end_tree(leader: int) -> None:
    """Kill a process group and every descendant of its leader: an engine's core in a group of its own would keep its
    GPU's memory."""
    descendants = _descendants(leader)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    for process in descendants:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _descendants(process: int) -> list[int]:
    """Return the children of a process, theirs, and so on."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            after_name = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(after_name[1]), []).append(int(stat.parent.name))
    processes, todo = [], [process]
    while todo:
        own = children.get(todo.pop(), [])
        processes += own
        todo += own
    return processes


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def last_error(log: Path) -> str:
    """Return the last line of a log that names an error and not another process's; else its last line."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"\w(Error|Exception|Exit): ", line)]
    own = [line for line in named if not re.search(r"root cause", line)]
    return (own or named or lines or ["nothing was printed"])[-1][-400:]
