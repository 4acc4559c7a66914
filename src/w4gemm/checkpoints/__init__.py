"""Checkpoints by format: :func:`open_checkpoint`.

A new format is one file with a ``CheckpointFormat`` and one line in ``FORMATS``; ``tests/toy_checkpoint.py`` is a short
one. If it is a Hugging Face folder of a quantization method, ``quantized_folder`` makes the ``CheckpointFormat`` of a
``Packing``; ``tests/test_quantized_folder.py`` has a short one, and ``stored.py`` checks that packings share.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

from w4gemm.checkpoints import dense, gguf
from w4gemm.checkpoints.auto_round import AutoRoundPacking
from w4gemm.checkpoints.awq import AWQPacking
from w4gemm.checkpoints.base import Checkpoint, CheckpointFormat, Module, Pretrained
from w4gemm.checkpoints.bitsandbytes import BitsAndBytesPacking
from w4gemm.checkpoints.compressed_tensors import CompressedTensors
from w4gemm.checkpoints.gptq import GPTQPacking
from w4gemm.checkpoints.hqq import HQQPacking
from w4gemm.checkpoints.hugging_face import check_files, quantization_config
from w4gemm.checkpoints.modelopt import ModelOptPacking
from w4gemm.checkpoints.published import W4AFP8, DeepSeekV4, Fp8, GptOss
from w4gemm.checkpoints.quantized_folder import folder_format
from w4gemm.checkpoints.quark import QuarkPacking
from w4gemm.checkpoints.torchao import TorchAoPacking
from w4gemm.checkpoints.w4gemm import OwnPacking
from w4gemm.core.errors import FormatError
from w4gemm.core.files import described, existing
from w4gemm.core.formats import WeightFormat
from w4gemm.core.words import listed

_log = logging.getLogger("w4gemm")
_OF_OTHERS = tuple(
    map(
        folder_format,
        (
            *(GPTQPacking, AWQPacking, AutoRoundPacking, CompressedTensors, ModelOptPacking, HQQPacking),
            *(BitsAndBytesPacking, GptOss, QuarkPacking, TorchAoPacking, W4AFP8, DeepSeekV4, Fp8),
        ),
    )
)
FORMATS: tuple[CheckpointFormat, ...] = (gguf.FORMAT, *_OF_OTHERS, folder_format(OwnPacking), dense.FORMAT)
"""Every format, in the order in which they are asked."""
METHODS = tuple(format.name for format in _OF_OTHERS)
"""``quant_method`` of the folders that other packages write."""


class Location(NamedTuple):
    """A recognized checkpoint: its format, and the file or folder to open."""

    format: CheckpointFormat
    path: Path


def find_checkpoint(path: str | Path) -> Location:
    """Return the first format that recognizes ``path``, a file or folder.

    Raises:
        TypeError: if ``path`` is none.
        FileNotFoundError: if nothing is at ``path``.
        FormatError: if no format recognizes it.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: wanted a file or folder, got {type(path).__name__} {path!r:.40}")
    path = existing(path)
    if path.is_dir():
        check_files(path)
    for format in FORMATS:
        if (source := format.find(path)) is not None:
            return Location(format, source)
    known, other = "a GGUF file, or a folder with one or with a Hugging Face model", ""
    if path.is_dir():
        others = (format.name for format in FORMATS if format not in (gguf.FORMAT, dense.FORMAT))
        known += f" (config.json), dense or quantized by {', '.join(others)}"
        other = "; a model of another method can, once its package dequantized it" * bool(quantization_config(path))
    raise FormatError(f"path: {str(path)!r} is {_seen(path)}; what can be loaded: {known}{other}")


def open_checkpoint(path: str | Path, format: WeightFormat | str | None = None) -> Checkpoint:
    """Open a checkpoint of any known format; only headers are read.

    Args:
        path: a file or folder.
        format: what the linear layers of a dense model are quantized to; None for groups of 128, or the largest smaller
            group that divides a layer's k. A quantized checkpoint keeps its own formats.

    Raises:
        FileNotFoundError: if nothing is at ``path``.
        FormatError: if no format recognizes it, or it is truncated or damaged.
        TypeError, ValueError: for a format that there is not.
    """
    target = None if format is None else WeightFormat.of(format)
    location = find_checkpoint(path)
    checkpoint = location.format.open(location.path, target)
    if target is not None and location.format is not dense.FORMAT:
        kept = sorted({str(module.format) for module in checkpoint.modules.values()} - {str(target)})
        if kept:
            said = "%s: its layers stay in %s; the format %s is for dense models"
            _log.warning(said, location.path, listed(kept), target)
    return checkpoint


def _seen(path: Path) -> str:
    """Describe what lies at ``path``, for a message."""
    if path.is_dir():
        if (scheme := quantization_config(path)) is not None:
            return f"a model quantized by {scheme.get('quant_method')!r}, which cannot be loaded yet"
        if not any((path / name).exists() for name in ("config.json", "adapter_config.json")) and any(
            path.glob("*.safetensors")
        ):
            return "a folder of tensors without config.json"
    elif not path.is_file():
        return "neither a file nor a folder"
    return described(path)


__all__ = [
    "FORMATS",
    "METHODS",
    "Checkpoint",
    "CheckpointFormat",
    "Location",
    "Module",
    "Pretrained",
    "find_checkpoint",
    "open_checkpoint",
]
