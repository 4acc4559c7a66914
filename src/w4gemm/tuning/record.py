"""Facts that every measured number and every GPU test run is written with: machine, versions, commit."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from w4gemm.core import environment
from w4gemm.jit.disk import source_hash
from w4gemm.jit.toolchain import installed_version, toolkit

_HERE = Path(__file__).resolve().parent
_BUILT_OF = _HERE.parent / "commit.txt"
"""Written by ``hatch_build.py``."""


def facts(device: torch.device | str | None = None) -> dict[str, Any]:
    """Return the fields gpu, driver, torch, dsl, python, commit, dirty and utc, with which every row ends.

    Args:
        device: the GPU; None for the current one. Without a GPU, ``gpu`` is the empty string.
    """
    commit, dirty = _commit()
    return {
        "gpu": torch.cuda.get_device_properties(device).name if torch.cuda.is_available() else "",
        "driver": _driver(),
        "torch": torch.__version__,
        "dsl": _dsl(),
        "python": platform.python_version(),
        "commit": commit,
        "dirty": dirty,
        "utc": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def run_name(row: dict[str, Any]) -> str:
    """Return the name that rows of one process share, from its :func:`facts`: ``20261121T0412-ab12cd3``."""
    time = row["utc"][:16].replace("-", "").replace(":", "")
    return f"{time}-{row['commit'][:7] or 'unknown'}"


def kernels_hash() -> str:
    """Return a hash of the kernels' sources, which tells whether a recorded run tested the kernels of today."""
    return source_hash("kernels")


def append(path: str | Path, *rows: dict[str, Any]) -> None:
    """Append rows to a file of JSON lines, which is made if needed."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as f:
        f.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def _commit() -> tuple[str, bool]:
    """Return the commit of the checkout, or of the one that this copy was built of, and True if anything but results
    differs from it; ("", True) if that is unknown."""
    commit = environment.commit()
    if commit is None and _BUILT_OF.is_file():
        commit = _BUILT_OF.read_text().strip()
    if commit is not None:
        return commit.removesuffix("-dirty"), commit.endswith("-dirty")
    try:
        _git("ls-files", "--error-unmatch", str(Path(__file__).resolve()))  # else this is an installed copy
        top = _git("rev-parse", "--show-toplevel")
        changes = _git("-C", top, "status", "--porcelain", "--", ".", ":!bench/results")
        return _git("rev-parse", "HEAD"), bool(changes)
    except (OSError, subprocess.CalledProcessError):
        return "", True


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=_HERE, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _driver() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        pass
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""


def _dsl() -> str:
    """The DSL's version and the CUDA toolkit that it compiles with, of which each has its ptxas: ``4.8.1+cu12``."""
    if version := installed_version("nvidia-cutlass-dsl"):
        return f"{version}+cu{cuda}" if (cuda := toolkit()) else version
    try:
        import cutlass  # it may only be on the path
    except ImportError:
        return ""
    return str(cutlass.__version__)
