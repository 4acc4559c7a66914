"""A weight in files: tensors and facts in a safetensors file; the name of its format and activations, such as
``int4_g128 fp8``, which state dicts keep as a tensor."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from w4gemm.core.errors import FormatError, device_here, kind_of
from w4gemm.core.files import placed, system_reason, why_unread
from w4gemm.core.formats import WeightFormat

_KIND = "w4gemm.weights.weight"
_VERSION = "1"


def write(path: str | Path, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
    """Write tensors, and facts that JSON can hold. The file's metadata also name its tensors, so that a reader notices
    one that was lost or renamed."""
    # clone: safetensors refuses tensors that share storage, as scales and zero points of a caller's may
    copies = {name: t.cpu().clone() for name, t in tensors.items()}
    text = json.dumps({"kind": _KIND, "version": _VERSION, "tensors": sorted(tensors), **facts})
    target = os.path.realpath(path) if os.path.islink(path) else path  # a user's link is followed, as by open()
    try:
        save_tensors(target, copies, {"w4gemm": text})
    except OSError as e:
        raise OSError(f"path: {system_reason(e)}") from e


def save_tensors(path: str | Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file, which others may read. A file of that name is replaced when the new one is whole, so
    that weights that were loaded from it keep their numbers: they lie in its memory, which safetensors before 0.8
    writes over.

    Raises:
        OSError: if it cannot be written, as where the disk is full; the message names it.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise OSError(f"cannot write {str(path)!r}: it is no regular file")
    with placed(Path(path)) as unfinished:
        try:
            save_file(tensors, unfinished, metadata=metadata)
        except SafetensorError as e:
            raise OSError(f"cannot write {str(unfinished)!r}: {e}") from e
        with contextlib.suppress(PermissionError):  # of a file system without modes
            unfinished.chmod(0o644)  # safetensors lets nobody else read what it writes


def read(path: str | Path, device: torch.device | str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return (tensors, facts) as :func:`write` got them. The facts also hold kind, version and the tensors' names.

    Raises:
        FileNotFoundError: if there is no such file.
        FormatError: if the file is truncated, is not such a file, or holds other tensors than its metadata name.
        TypeError, ValueError: for what is no path or no device, or a device that is not there or is meta.
    """
    check_path(path)
    device = device_here(device)
    if device.type == "meta":
        raise ValueError("device: wanted one that holds numbers, got meta; load(path).to('meta') has the shapes alone")
    place = "cpu" if device.type == "cpu" else str(device)  # safetensors knows no cpu:0
    if not Path(path).is_file():
        raise FileNotFoundError(f"path: no file {str(path)!r}")
    try:
        with safe_open(path, "pt", device=place) as f:
            text = (f.metadata() or {}).get("w4gemm")
            if text is None:
                raise FormatError(f"path: {path} is a safetensors file without w4gemm metadata")
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as e:
        reason = why_unread(Path(path)) or f"is not a whole safetensors file: {e}"
        raise FormatError(f"path: {path} {reason}") from e
    except OSError as e:
        raise OSError(f"path: {path} {why_unread(Path(path)) or f'cannot be read: {e}'}") from e
    try:
        facts = json.loads(text)
        kind, version = facts["kind"], facts["version"]
        if (kind, version) != (_KIND, _VERSION):
            raise ValueError(f"it holds {kind!r} version {version!r}, wanted {_KIND!r} {_VERSION!r}")
        named = set(facts.get("tensors", tensors))  # files written before this fact have none
        if named != tensors.keys():
            raise ValueError(f"it holds tensors {sorted(tensors)}, its metadata name {sorted(named)}")
    except RecursionError as e:
        raise unfit(path, ValueError("its metadata are nested too deep")) from e
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise unfit(path, e) from e
    return tensors, facts


def check_path(path: object) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: wanted a string or a Path, got {kind_of(path)}")


def unfit(path: str | Path, error: Exception) -> FormatError:
    """Return the FormatError to raise for a file whose contents caused ``error``."""
    reason = f"its metadata lack {error}" if isinstance(error, KeyError) else error
    return FormatError(f"path: {path} is not a w4gemm weight: {reason}")


def format_name(format: WeightFormat, activations: str | None) -> str:
    """Return the format's string, with the activations behind it if there are any."""
    return f"{format} {activations}" if activations else str(format)


def parse_format_name(name: str) -> tuple[WeightFormat, str | None]:
    """Return the format and the activations of a :func:`format_name`.

    Raises:
        ValueError: if the first word is no format's string.
    """
    format, _, activations = name.partition(" ")
    return WeightFormat.parse(format), activations or None


def is_same_format(name: str, other: str) -> bool:
    """True if both name one format and the same activations, maybe a codebook before and after it got a name."""
    try:
        return name == other or parse_format_name(name) == parse_format_name(other)
    except ValueError:
        return False


def name_as_tensor(name: str) -> torch.Tensor:
    """Return the bytes of a :func:`format_name`, uint8: a tensor, so that any file of tensors can hold it."""
    return torch.tensor(list(name.encode()), dtype=torch.uint8, device="cpu")


def name_of_tensor(state: torch.Tensor) -> str:
    """Return the name of a tensor that :func:`name_as_tensor` made.

    Raises:
        ValueError: if ``state`` is no tensor of bytes (n,).
    """
    if state.dtype != torch.uint8 or state.dim() != 1:
        raise ValueError(f"wanted the name of a format, torch.uint8 (n), got {state.dtype} {tuple(state.shape)}")
    return bytes(state.tolist()).decode(errors="replace")
