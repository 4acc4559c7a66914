"""The environment variables that w4gemm reads; no other file reads any.

- ``W4GEMM_CACHE_DIR``: where compiled kernels and tuned configs are kept; ``off`` keeps none. Default: ``w4gemm`` under
  ``XDG_CACHE_HOME``, or under ``~/.cache``. Used only if no other user can have written it, see SECURITY.md. A relative
  path begins at the folder that is the current one when it is first read.
- ``W4GEMM_CACHE_SHARED``: ``1`` uses it also if its mode, or that of a folder above, lets others write: for a
  container's volume (Kubernetes' emptyDir has mode 0777) that only trusted processes can reach. Default 0.
- ``W4GEMM_LOG``: a level such as ``debug`` or ``info``: log to standard error from that level on.
- ``W4GEMM_COMPILE``: ``off`` forbids compiling: what is not in the cache folder raises UnsupportedError.
- ``W4GEMM_NVTX``: ``1`` shows each launch in a profiler as an NVTX range, named by its config.
- ``W4GEMM_WORKSPACE_MIB``: the most GPU memory, in MiB, that a launch may decode a weight into for very many tokens;
  default 256. 0 forbids it.
- ``W4GEMM_VLLM``: whether vLLM's quantized layers run on w4gemm: ``auto`` (default): on Hopper, where they were
  measured to be faster; ``on``; ``off``.
- ``W4GEMM_SGLANG``: the same for SGLang's quantized layers.
- ``W4GEMM_MXFP4``, ``W4GEMM_NVFP4``: activations of engines' layers in these formats: ``auto`` (default): fp8 where the
  checkpoint asks for it, else 16 bits; ``fp8``; ``16bit``.
- ``W4GEMM_COMMIT``: the commit to record with results if git cannot be asked; ``-dirty`` at its end for a changed tree.
- ``OMP_NUM_THREADS``: PyTorch's; if it is set, commands take no other number of threads.
- ``TERM``: the terminal's; on one that is ``dumb``, commands show no progress.

Any other name that begins with ``W4GEMM_`` is a mistake, :func:`unknown`.

Variables of CuTe DSL (``CUTE_DSL_*``) change what it compiles, so they are part of the cache's fingerprint.
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

from w4gemm.core.words import nearest

FP8_BY_CHOICE = "mxfp4", "nvfp4"
"""Formats of weights of which :func:`activations` says whether engines quantize x to fp8."""
_NAMES = (
    *("W4GEMM_CACHE_DIR", "W4GEMM_CACHE_SHARED", "W4GEMM_COMPILE", "W4GEMM_WORKSPACE_MIB", "W4GEMM_LOG"),
    *("W4GEMM_NVTX", "W4GEMM_VLLM", "W4GEMM_SGLANG", "W4GEMM_MXFP4", "W4GEMM_NVFP4", "W4GEMM_COMMIT"),
)
"""Every variable of w4gemm's own."""
# These choose where and how much the DSL writes, or are overruled by the compile options; the object stays the same.
_HARMLESS_DSL = {
    *("CUTE_DSL_ARCH", "CUTE_DSL_CACHE_DIR", "CUTE_DSL_DUMP_DIR", "CUTE_DSL_DISABLE_FILE_CACHING"),
    *("CUTE_DSL_LOG_LEVEL", "CUTE_DSL_LOG_TO_CONSOLE", "CUTE_DSL_LOG_TO_FILE"),  # SGLang's engines set two of them
}


def is_dumb_terminal() -> bool:
    """True if the terminal knows no escape sequences."""
    return os.environ.get("TERM") == "dumb"


def cache_dir() -> Path | None:
    """Return the folder of compiled kernels and tuned configs, whether or not it exists; None to keep none.

    Raises:
        ValueError: if ``W4GEMM_CACHE_DIR`` begins with the home folder of a user who has none.
    """
    value = os.environ.get("W4GEMM_CACHE_DIR", "")
    if value.lower() == "off":
        return None
    if value:
        try:
            return _absolute(Path(value).expanduser())
        except RuntimeError:
            raise ValueError(f"W4GEMM_CACHE_DIR: wanted a folder or off, got {value!r}, where ~ is unknown") from None
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return _absolute(Path(base).expanduser()) / "w4gemm"
    except RuntimeError:  # no home directory
        return None


def names_threads() -> bool:
    """True if the number of PyTorch's threads is chosen from outside."""
    return "OMP_NUM_THREADS" in os.environ


@functools.cache
def _absolute(folder: Path) -> Path:
    """Return a path that does not follow the current folder: a process that changes it keeps its cache."""
    return folder.absolute()


def of_children() -> dict[str, str]:
    """Return the environment of processes that share this one's cache folder."""
    folder = cache_dir()
    return {**os.environ, "W4GEMM_CACHE_DIR": "off" if folder is None else str(folder)}


def why_nothing_is_kept() -> str:
    """Return in words why :func:`cache_dir` is None."""
    if os.environ.get("W4GEMM_CACHE_DIR"):
        return "W4GEMM_CACHE_DIR is off"
    return "W4GEMM_CACHE_DIR is not set, and this user has no home folder"


def cache_is_shared() -> bool:
    """True if whoever may write the cache folder is trusted.

    Raises:
        ValueError: for a value that is neither on nor off.
    """
    return _switch("W4GEMM_CACHE_SHARED", False)


def dsl_settings() -> tuple[tuple[str, str], ...]:
    """Return the CuTe DSL variables that change compiled code, sorted."""
    return tuple(sorted(v for v in os.environ.items() if v[0].startswith("CUTE_DSL_") and v[0] not in _HARMLESS_DSL))


def may_compile() -> bool:
    """True if ``W4GEMM_COMPILE`` lets kernels be compiled.

    Raises:
        ValueError: if it is neither ``on`` nor ``off``.
    """
    return _switch("W4GEMM_COMPILE", True)


def nvtx() -> bool:
    """True if ``W4GEMM_NVTX`` asks for ranges. Raises like :func:`may_compile`."""
    return _switch("W4GEMM_NVTX", False)


def workspace_mib() -> int:
    """Return ``W4GEMM_WORKSPACE_MIB``.

    Raises:
        ValueError: if it is no number from 0.
    """
    value = os.environ.get("W4GEMM_WORKSPACE_MIB", "") or "256"
    if not (value.isascii() and value.isdecimal() and len(value) < 10):
        raise ValueError(f"W4GEMM_WORKSPACE_MIB: wanted a number of MiB from 0, got {value!r:.40}")
    return int(value)


def vllm() -> str:
    """Return ``W4GEMM_VLLM``: auto, on or off.

    Raises:
        ValueError: if it is none of these.
    """
    return _engine("W4GEMM_VLLM")


def sglang() -> str:
    """Return ``W4GEMM_SGLANG``, as for :func:`vllm`."""
    return _engine("W4GEMM_SGLANG")


def _engine(name: str) -> str:
    value = os.environ.get(name, "").lower() or "auto"
    value = {"0": "off", "1": "on"}.get(value, value)
    if value not in ("auto", "on", "off"):
        raise ValueError(f"{name}: wanted auto, on or off, got {value!r}")
    return value


def activations(format: str) -> str:
    """Return ``W4GEMM_MXFP4`` or ``W4GEMM_NVFP4``, of the format "mxfp4" or "nvfp4": auto, fp8 or 16bit.

    Raises:
        ValueError: if it is none of these.
    """
    name = f"W4GEMM_{format.upper()}"
    value = os.environ.get(name, "").lower() or "auto"
    if value not in ("auto", "fp8", "16bit"):
        raise ValueError(f"{name}: wanted auto, fp8 or 16bit, got {value!r}")
    return value


def takes_fp8(format: str, asked: bool) -> bool:
    """True if an engine's layers in a format quantize x to fp8. Raises like :func:`activations`.

    Args:
        asked: True if the checkpoint asks for it.
    """
    value = activations(format)
    return asked if value == "auto" else value == "fp8"


def engine_plugins(name: str) -> list[str] | None:
    """Return the names in an engine's own variable ``name`` of the plugins that it loads; None if it is not set."""
    return None if name not in os.environ else [each.strip() for each in os.environ[name].split(",")]


def _switch(name: str, default: bool) -> bool:
    value = os.environ.get(name, "").lower()
    if value not in ("", "0", "1", "off", "on"):
        raise ValueError(f"{name}: wanted on or off, got {value!r}")
    return value in ("1", "on") if value else default


def settings() -> dict[str, str]:
    """Return the variables of w4gemm and CuTe DSL that are set, for a bug report."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(("W4GEMM_", "CUTE_DSL_", "CUDA_VISIBLE"))}


def unknown() -> list[str]:
    """Return a sentence for each variable that is set and begins like w4gemm's, but is none of them."""
    names = sorted(name for name in os.environ if name.startswith("W4GEMM_") and name not in _NAMES)
    return [f"{name}: w4gemm has no such variable{nearest(name, _NAMES)}" for name in names]


def check() -> None:
    """Read what products and their compilation read, so that a command refuses a wrong value before it loads a model.

    Raises:
        ValueError: for the first variable whose value is none of its own.
    """
    for read in (configure_logging, cache_dir, cache_is_shared, may_compile, nvtx, workspace_mib):
        read()


def set_cache_dir(folder: Path) -> None:
    """Set ``W4GEMM_CACHE_DIR`` to ``folder`` for this process and those that it starts, also if the folder's name is
    ``off`` or begins with ``~``."""
    os.environ["W4GEMM_CACHE_DIR"] = str(_absolute(folder))


def commit() -> str | None:
    """``W4GEMM_COMMIT``, or None."""
    return os.environ.get("W4GEMM_COMMIT") or None


def configure_logging() -> None:
    """Show the ``w4gemm`` logger on standard error if ``W4GEMM_LOG`` asks for it.

    Raises:
        ValueError: if it is not the name of a level.
    """
    name = os.environ.get("W4GEMM_LOG", "").upper()
    if not name:
        return
    level = logging.getLevelName(name)
    if not isinstance(level, int):
        raise ValueError(f"W4GEMM_LOG: wanted debug, info, warning, error or critical, got {name.lower()!r}")
    logger = logging.getLogger("w4gemm")
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)
