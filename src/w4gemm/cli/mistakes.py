"""Mistakes that show without PyTorch, so that they are answered at once: :func:`require_named`."""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from w4gemm.cli.bench import NO_GPU, measures, require_checkout
from w4gemm.console.options import (
    listed_shapes,
    require_device,
    router_fields,
    three_sizes,
    token_ranges,
    unknown_target,
)
from w4gemm.core.config import GemmConfig
from w4gemm.core.files import described, existing, lacks_weights
from w4gemm.core.format_names import parts_of
from w4gemm.core.function_names import activation_parts
from w4gemm.core.gpus import is_known
from w4gemm.core.imports import missing_dsl

_RUNS_A_MODEL = ("generate", "eval", "convert")


def require_named(args: argparse.Namespace) -> None:
    """Refuse what a command cannot do with: sizes, numbers of tokens, formats, configs, activations, routers, devices
    and GPUs that are none, a GPU without a driver, measurements without a checkout or a GPU, a prompt that is a model,
    places to write that are none, checkpoints that are not there or hold no model, and compiling without a compiler.

    Raises:
        ValueError, OSError, ImportError: as the command would, some seconds later.
    """
    named = vars(args)
    if "sizes" in named:
        three_sizes(args)
    elif named.get("m") is not None:
        token_ranges(args.m)
    if named.get("shapes") is not None:
        listed_shapes(args.shapes)
    if named.get("device") is not None:
        require_device(args.device, args.command in ("explain", "inspect"))
        if args.device.startswith("cuda") and not _has_driver():
            raise ValueError(f"--device: {args.device} is not there; PyTorch sees no CUDA GPU")
    if named.get("gpu") is not None and not is_known(args.gpu) and not (args.gpu and args.arch and args.sms):
        raise unknown_target(args.gpu)
    for format in _each(named.get("format")):
        parts_of(format)
    for config in (named.get("config"), named.get("why")):
        if config is not None:
            GemmConfig.parse(config.rpartition("/")[2])
    for activation in _each(named.get("activation")):
        activation_parts(activation)
    if named.get("router") is not None:
        router_fields(args.router)
    if args.command == "bench":
        require_checkout(args.action)
        if measures(args) and not _has_driver():
            raise OSError(f"bench {args.action} {NO_GPU}")
    if args.command == "generate":
        _require_prompt(args.prompt, args.model)
    if args.command in ("convert", "compile"):
        name = "OUTPUT" if args.command == "convert" else "--output"
        there = next(p for p in (args.output, *args.output.absolute().parents) if os.path.lexists(p))
        if not there.is_dir():
            kind = "file" if there.exists() else "link to nothing"
            raise FileExistsError(f"{name}: wanted a folder, which is made if needed, got the {kind} {str(there)!r}")
        if args.output.exists() and args.command == "convert" and existing(args.path).samefile(args.output):
            raise ValueError(f"{name}: wanted another folder than PATH, got {str(args.output)!r} for both")
    for path in (named.get("path"), named.get("model"), named.get("vllm")):
        if path is not None:
            _require_model(path, args.command)
    if named.get("text") is not None and not args.text.exists():
        raise FileNotFoundError(f"--text: no file {str(args.text)!r}")
    if args.command == "compile" and (reason := missing_dsl()):
        raise ModuleNotFoundError(f"compile {reason}")


def _has_driver() -> bool:
    """False where no driver of a GPU is installed, so that PyTorch sees none either."""
    if sys.platform != "linux" or Path("/dev/kfd").exists():  # that of AMD's driver
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _each(value: str | Sequence[str] | None) -> Sequence[str]:
    """Return the values of an option that some commands take once and others several times."""
    return [value] if isinstance(value, str) else value or []


def _require_prompt(prompt: str, model: str | None) -> None:
    """Refuse a prompt without text and, unless a model is named besides, one that is the path of a model."""
    if not prompt.strip():
        raise ValueError("PROMPT: it is empty")
    try:
        prompt.encode()
    except UnicodeEncodeError as e:  # Python keeps bytes that are no text as surrogates, which no tokenizer takes
        raise ValueError(f"PROMPT: wanted text in UTF-8, got other bytes at character {e.start}") from None
    if model is None and _is_model(prompt):
        how = f'w4gemm generate "Hello" --model {shlex.quote(prompt)}'
        raise ValueError(f"PROMPT: wanted a text to answer, got the path of a model, {prompt!r}; {how}")


def _is_model(text: str) -> bool:
    """True if a text is the path of a GGUF file, or of a folder with one or with a Hugging Face model."""
    try:
        path = Path(text).expanduser()
        return _holds_model(path) if path.is_dir() else path.suffix == ".gguf" and path.is_file()
    except (OSError, ValueError, RuntimeError):  # most prompts are no paths
        return False


def _holds_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or any(folder.glob("*.gguf"))


def _is_gguf(file: Path) -> bool:
    with file.open("rb") as f:
        return file.suffix == ".gguf" or f.read(4) == b"GGUF"


def _require_model(path: str, command: str) -> None:
    """Refuse a path where nothing is, a file that is no GGUF file, a folder without a model and, if the command runs a
    model, one without its numbers."""
    folder = existing(path)
    if folder.is_file() and not _is_gguf(folder):
        expected = "a GGUF file, or a folder with one or with a Hugging Face model"
        raise OSError(f"path: {str(path)!r} is {described(folder)}; what can be loaded: {expected}")
    if not folder.is_dir():
        return
    if not _holds_model(folder):
        inside = min((str(config.parent) for config in folder.glob("*/config.json")), default=None)
        expected = "a GGUF file, or a folder with one or with a Hugging Face model (config.json)"
        close = f"; nearest is {inside!r}" if inside else ""
        raise FileNotFoundError(f"path: {str(path)!r} is {described(folder)}; what can be loaded: {expected}{close}")
    if command in _RUNS_A_MODEL and lacks_weights(folder):
        raise FileNotFoundError(f"path: {str(path)!r} holds no whole model: a config.json, but no weights")
