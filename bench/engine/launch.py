"""Processes with a vLLM engine: their environment, their arguments, and their end."""

from __future__ import annotations

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench.engine.implementations import Implementation
from bench.engine.models import Model
from bench.engine.offline import Result, Task
from bench.engine.preload import Preloaded, end_tree
from bench.engine.worker import EXTENSION

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results/engine.jsonl"
CAPTURED = (1, 2, 4, 8, 16, 32, 64, 128)
"""Batch sizes with CUDA graphs, beside those that are measured; vLLM captures more of them by default."""
PLUGIN_GROUP = "vllm.general_plugins"
_LOADED, _LOADED_EXPERTS = 1.25, 2.0
"""Memory of an engine that loads weights over theirs, without and with experts among them."""
_PACKED = 1.1
"""The same, once they are loaded."""
_ENGINE_BYTES = 6e9
"""Activations, graphs, a context."""


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
        likeliest: most tokens whose probabilities are asked for at a position.
        at_once: engines that share ``memory``.
        expert_parallel: True if each GPU has some experts whole.
        rebalance: steps after which vLLM moves experts between GPUs; 0 for never.
    """

    dtype: str
    compiled: bool
    eager: bool
    gpus: int
    memory: float
    max_len: int
    likeliest: int = 20
    at_once: int = 1
    expert_parallel: bool = False
    rebalance: int = 0

    def arguments(self, folder: Path, implementation: Implementation, model: Model, batches: tuple[int, ...]) -> Any:
        """Return the arguments of ``vllm.LLM`` for requests of these batch sizes.

        Raises:
            EngineError: if the memory is too small for the weights in ``folder``.
        """
        arguments: dict[str, Any] = {
            "model": str(folder),
            "dtype": self.dtype,
            "max_model_len": self.max_len,
            "max_num_seqs": max(batches),
            "max_logprobs": self.likeliest,
            "gpu_memory_utilization": self.memory / self.at_once,
            "tensor_parallel_size": self.gpus,
            "enable_prefix_caching": False,  # a prompt is timed more than once
            "seed": 0,
            "worker_extension_cls": EXTENSION,
            **implementation.engine_arguments(model),
        }
        if self.at_once > 1:  # else vLLM would find out how much is free, while others take and give back
            arguments["kv_cache_memory_bytes"] = self.cache_bytes(folder, model)
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

    def cache_bytes(self, folder: Path, model: Model) -> int:
        """Return the bytes of keys and values that an engine has room for beside others and its weights in ``folder``.

        Raises:
            EngineError: if there are none.
        """
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / self.gpus
        memory = self.memory / self.at_once * torch.cuda.mem_get_info()[1]
        left = int(memory - _PACKED * weights - _ENGINE_BYTES)
        loaded = _LOADED_EXPERTS if model.experts else _LOADED
        if memory < loaded * weights + _ENGINE_BYTES or left < 2**30:
            raise EngineError(
                f"memory: {memory / 1e9:.0f} GB for each engine are too few for {weights / 1e9:.0f} GB of weights"
            )
        return left


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


@dataclass(frozen=True)
class Caches:
    """Folders of compiled code: an implementation's ``own``, and what all implementations share."""

    own: Path
    shared: Path

    def start(self) -> str:
        """Make the folders, and return what a start now is: "warm" if the implementation started with them before,
        "cold" if only others did, and "first" if none did."""
        start = "warm" if self._mark(self.own).exists() else "cold" if self._mark(self.shared).exists() else "first"
        infos = self.own / "vllm/modelinfos"  # vLLM's facts on the model's class
        if not infos.is_symlink():
            (self.shared / "modelinfos").mkdir(parents=True, exist_ok=True, mode=0o700)
            infos.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            infos.symlink_to((self.shared / "modelinfos").resolve())
        return start

    def started(self) -> None:
        """Note that an engine has started with them."""
        for folder in (self.own, self.shared):
            self._mark(folder).touch()

    @staticmethod
    def _mark(folder: Path) -> Path:
        return folder / "started"

    def environment(self) -> dict[str, str]:
        """Return the variables that name the folders."""
        own = {"VLLM_CACHE_ROOT": "vllm", "W4GEMM_CACHE_DIR": "w4gemm"}
        folders = {name: str(self.own / folder) for name, folder in own.items()}
        return {**folders, "TRITON_CACHE_DIR": str(self.shared / "triton")}


def environment(implementation: Implementation, caches: Caches, plugin: Path | None) -> dict[str, str]:
    """Return the environment of an engine's process.

    Args:
        plugin: what :func:`plugin_metadata` returned.
    """
    return {**base_environment(plugin), **implementation.environment(), **caches.environment()}


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
    found = importlib.metadata.entry_points(group=group)
    return any(point.value.startswith("w4gemm.") for point in found)


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
    found = []
    for line in lines:
        if line.startswith("["):
            break
        if "=" in line and not line.lstrip().startswith("#"):
            found.append(line.replace('"', "").strip())
    return found


def run_offline(
    task: Task, variables: dict[str, str], log: Path, seconds: float, preloaded: Preloaded | None = None
) -> Result:
    """Run ``bench.engine.offline`` in a process of its own and return what it found. If it ended early, the result's
    ``failure`` says why.

    Args:
        log: file for all that the engine prints.
        preloaded: a process to fork it from, if it can; None to start a new one.

    Raises:
        EngineError: if it fails or is not done within ``seconds``, and was not even up; with the last error that it
            printed.
    """
    wait_for_memory(task.engine.get("gpu_memory_utilization", 0.0), task.engine.get("tensor_parallel_size", 1))
    task_file, result_file = log.with_suffix(".task.json"), log.with_suffix(".result.json")
    task_file.write_text(json.dumps(asdict(task)))
    result_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.engine.offline", str(task_file), str(result_file)]
    begun = time.monotonic()
    try:
        if preloaded and preloaded.ready():
            code = preloaded.run(task_file, result_file, variables, log, seconds)
        else:
            with started(command, variables, log) as process:
                code = process.wait(seconds)
        end = f"ended with {code} after {time.monotonic() - begun:.0f} s"
    except subprocess.TimeoutExpired:
        end = f"not done in {seconds:.0f} s, its limit"
    failure = f"{end}: {last_error(log)}"
    if not result_file.exists():
        raise EngineError(failure)
    result = Result(**json.loads(result_file.read_text()))
    if result.failure:  # else all was measured, however the engine ended
        result.failure = failure
    return result


def wait_for_memory(part: float, gpus: int, seconds: float = 20) -> None:
    """Wait until ``part`` of the memory of the GPUs is free: the engine before may still be giving its own back.

    Raises:
        EngineError: if it is not free in time.
    """
    if not torch.cuda.is_available():
        return
    end = time.monotonic() + seconds
    while (least := min(free / total for free, total in map(torch.cuda.mem_get_info, range(gpus)))) < part:
        if time.monotonic() > end:
            raise EngineError(f"{least:.0%} of a GPU's memory is free, wanted {part:.0%}: another process holds it")
        time.sleep(0.2)


@contextmanager
def preloaded_vllm(plugin: Path | None, log: Path) -> Iterator[Preloaded]:
    """Give a process to fork engines from, which is importing vLLM meanwhile."""
    found = Preloaded(base_environment(plugin), ROOT, log)
    try:
        yield found
    finally:
        found.close()


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
