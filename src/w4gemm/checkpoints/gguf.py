"""GGUF files (llama.cpp): Q4_0 and Q4_1 tensors become :class:`QuantizedWeight` bit for bit.

=====  ==================================  =============================================  ===================
type   block of 32 elements along k        element j (low nibble), j + 16 (high nibble)   WeightFormat
=====  ==================================  =============================================  ===================
Q4_0   fp16 d, 16 bytes (18 bytes)         w = d * (q - 8)                                int4_g32_fp16
Q4_1   fp16 d, fp16 m, 16 bytes (20)       w = d * q + m                                  int4_g32_zfloat_fp16
=====  ==================================  =============================================  ===================

The header is read here rather than with the ``gguf`` package's reader, which makes one array per vocabulary entry
(3 s for 49,152 tokens, against 0.1 s; 2 CPU cores, 2026-11) and does not see that a file is cut short. That package
gives the block sizes and dequantizes the types that stay dense.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from w4gemm.checkpoints.base import CheckpointFormat
from w4gemm.errors import FormatError
from w4gemm.formats import WeightFormat
from w4gemm.weight import QuantizedWeight

BLOCK = 32
INT4_FORMATS = {"Q4_0": WeightFormat(BLOCK, "none", "fp16"), "Q4_1": WeightFormat(BLOCK, "float", "fp16")}
"""The 4-bit tensor types, and what their numbers mean."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Metadata value types by GGUF's number, as ``struct`` letters."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in the file. ``shape`` is in PyTorch's order: (n, k) for a weight."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GGUFCheckpoint:
    """An open GGUF file, mapped into memory. Tensors are copied out of it when asked for.

    Attributes:
        path: the file.
        metadata: its key-value pairs; an array is given by its length only (vocabularies are long).
        tensors: where each tensor lies, by name.

    Raises:
        FileNotFoundError: if there is no such file.
        FormatError: if it is no GGUF file, is cut short, or holds something unknown.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"path: no file {str(path)!r}")
        self.metadata, self.tensors = _read_header(self.path)
        self._bytes = np.memmap(self.path, np.uint8, mode="r")

    def names(self) -> list[str]:
        return list(self.tensors)

    def is_int4(self, name: str) -> bool:
        return self._info(name).type in INT4_FORMATS

    def weight(self, name: str, rows: torch.Tensor | None = None) -> QuantizedWeight:
        """See :meth:`w4gemm.checkpoints.base.Checkpoint.weight`.

        Raises:
            FormatError: if the tensor is missing, not a matrix, not Q4_0 or Q4_1, or its numbers are not finite.
        """
        info = self._info(name)
        if info.type not in INT4_FORMATS:
            wanted = " or ".join(INT4_FORMATS)
            raise FormatError(f"{self.path}: tensor {name!r} is {info.type}, which is not 4-bit; wanted {wanted}")
        if len(info.shape) != 2:
            raise FormatError(f"{self.path}: tensor {name!r} has shape {info.shape}, wanted a matrix (n, k)")
        format = INT4_FORMATS[info.type]
        n, k = info.shape
        blocks = torch.from_numpy(self._raw(info).reshape(n, -1).copy())
        if rows is not None:
            blocks = blocks[rows]
        blocks = blocks.view(blocks.shape[0], k // BLOCK, -1)
        heads = 2 if format.has_zero else 1
        scales, *zeros = blocks[..., : 2 * heads].contiguous().view(torch.float16).unbind(-1)
        nibbles = blocks[..., 2 * heads :]
        codes = torch.cat((nibbles & 0xF, nibbles >> 4), dim=-1).view(-1, k)
        try:
            return QuantizedWeight.from_codes(format, codes, scales, zeros[0] if zeros else None)
        except ValueError as e:
            raise FormatError(f"{self.path}: tensor {name!r}: {e}") from e

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """See :meth:`w4gemm.checkpoints.base.Checkpoint.dense`.

        Raises:
            FormatError: if the tensor is missing or of a type that the ``gguf`` package cannot dequantize.
        """
        info = self._info(name)
        gguf = _gguf()
        type = gguf.GGMLQuantizationType[info.type]
        raw = self._raw(info)
        try:
            if info.type in ("F32", "F16"):
                values = raw.view(np.float32 if info.type == "F32" else np.float16).astype(np.float32)
            else:
                values = gguf.quants.dequantize(raw.reshape(*info.shape[:-1], -1), type)
        except NotImplementedError as e:
            raise FormatError(f"{self.path}: tensor {name!r} is {info.type}, which cannot be dequantized: {e}") from e
        return torch.from_numpy(values.reshape(info.shape)).to(dtype)

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise FormatError(f"{self.path}: no tensor {name!r} among its {len(self.tensors)}")
        return self.tensors[name]

    def _raw(self, info: TensorInfo) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._bytes[info.offset : info.offset + info.nbytes]


def _gguf() -> ModuleType:
    """The ``gguf`` package; imported late, since importing w4gemm must not need it."""
    try:
        import gguf
        import gguf.quants
    except ImportError as e:
        raise ImportError("reading GGUF files needs the gguf package: pip install 'w4gemm[hf]'") from e
    return gguf


class _Cursor:
    """Reads little-endian values one after another, and says so when the file ends too early."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def bytes(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise FormatError(
                f"{self.path} is cut short: its header goes on to byte {end} or beyond, the file to {len(self.data)}"
            )
        chunk = self.data[self.at : end]
        self.at = end
        return chunk

    def one(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self.bytes(struct.calcsize("<" + letter)))[0]

    def string(self) -> str:
        return self.bytes(self.one("Q")).decode("utf-8", "replace")

    def value(self) -> Any:
        """A metadata value; of an array only its length."""
        kind = self.one("I")
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.one(_SCALARS[kind])
        if kind != _ARRAY:
            raise FormatError(f"{self.path}: metadata value of unknown type {kind} before byte {self.at}")
        kind, count = self.one("I"), self.one("Q")
        if kind in _SCALARS:
            self.bytes(count * struct.calcsize("<" + _SCALARS[kind]))
        elif kind == _STRING:
            for _ in range(count):
                self.bytes(self.one("Q"))
        else:
            raise FormatError(f"{self.path}: metadata array of unknown type {kind} before byte {self.at}")
        return count


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    with path.open("rb") as f:
        if f.read(4) != _MAGIC:
            raise FormatError(f"{path} is no GGUF file: it does not begin with {_MAGIC.decode()!r}")
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(path, data)
            cursor.bytes(4)
            version = cursor.one("I")
            if version not in _VERSIONS:
                # a big-endian file shows its version in the upper bytes
                what = "a big-endian file" if version & 0xFFFF == 0 else f"version {version}"
                raise FormatError(f"{path}: wanted little-endian GGUF version 2 or 3, got {what}")
            tensor_count, value_count = cursor.one("Q"), cursor.one("Q")
            metadata = {cursor.string(): cursor.value() for _ in range(value_count)}
            entries = [_read_entry(cursor) for _ in range(tensor_count)]
            align = metadata.get("general.alignment", 32)
            if not isinstance(align, int) or align < 1:
                raise FormatError(f"{path}: general.alignment: wanted a positive integer, got {align!r}")
            start = -(-cursor.at // align) * align
            tensors = [_locate(path, entry, start, len(data)) for entry in entries]
    return metadata, {t.name: t for t in tensors}


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """name, shape in PyTorch's order, type number, offset after the header."""
    name, dimensions = cursor.string(), cursor.one("I")
    if not 1 <= dimensions <= 4:
        raise FormatError(f"{cursor.path}: tensor {name!r} has {dimensions} dimensions, wanted 1 to 4")
    shape = tuple(cursor.one("Q") for _ in range(dimensions))[::-1]
    return name, shape, cursor.one("I"), cursor.one("Q")


@functools.cache
def _type_sizes() -> dict[int, tuple[str, int, int]]:
    """Name, elements and bytes of a block, by GGUF's type number."""
    sizes = _gguf().GGML_QUANT_SIZES
    return {int(type): (type.name, *size) for type, size in sizes.items()}


def _locate(path: Path, entry: tuple[str, tuple[int, ...], int, int], start: int, file_size: int) -> TensorInfo:
    name, shape, number, offset = entry
    if number not in _type_sizes():
        raise FormatError(f"{path}: tensor {name!r} is of unknown type {number}")
    type, elements, size = _type_sizes()[number]
    if shape[-1] % elements:
        raise FormatError(
            f"{path}: tensor {name!r} has shape {shape}, but {type} wants rows of whole blocks of {elements}"
        )
    info = TensorInfo(name, type, shape, start + offset, math.prod(shape) // elements * size)
    if info.offset + info.nbytes > file_size:
        raise FormatError(
            f"{path} is cut short: tensor {name!r} ends at byte {info.offset + info.nbytes}, the file at {file_size}"
        )
    return info


def _find(path: Path) -> Path | None:
    """A GGUF file is known by its suffix or its first bytes; in a folder, the only one."""
    if path.is_file():
        with path.open("rb") as f:
            return path if path.suffix == ".gguf" or f.read(4) == _MAGIC else None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise FormatError(
            f"path: {str(path)!r} holds {len(files)} GGUF files ({', '.join(f.name for f in files)}); name one"
        )
    return files[0] if files else None


FORMAT = CheckpointFormat("gguf", _find, GGUFCheckpoint)
