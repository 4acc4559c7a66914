"""The container of GGUF (llama.cpp): metadata and tensors under the file's own names.

======  =====================================================  ============================  ====================
type    block along k                                          w                             WeightFormat
======  =====================================================  ============================  ====================
Q4_0    32 elements: fp16 d, 16 bytes of codes                 d * (q - 8)                   int4_g32_fp16
Q4_1    32: fp16 d, fp16 m, 16 bytes                           d * q + m                     int4_g32_zfloat_fp16
Q4_K    256: fp16 d, e, 8 times 6-bit s and m, 4 x 32 bytes    (d * s) * q - e * m           q4_k
IQ4_NL  32: fp16 d, 16 bytes                                   d * v(q), 16 fixed numbers    iq4_g32_fp16
IQ4_XS  256: fp16 d, 8 times 6-bit s, 8 x 16 bytes             (d * (s - 32)) * v(q)         iq4_g32_fp32
MXFP4   32: e8m0 d, 16 bytes                                   d * e2m1(q)                   mxfp4
NVFP4   64: four e4m3 d without sign, of 16 each; 4 x 8 bytes  d * e2m1(q)                   nvfp4, channels of 1
======  =====================================================  ============================  ====================

The codes of 32 (of 16, in Q4_K of 64) elements are in 16 (8, 32) bytes: element j in the low nibble of byte j, the
second half of the elements in the high nibbles. Other types stay dense, 16 bits or more.

The header is read here rather than with the ``gguf`` package's reader, which makes one array per vocabulary entry
(3 s for 49,152 tokens, against 0.1 s; 2 CPU cores, 2026-11) and does not notice a file that is cut short. That package
gives the block sizes and dequantizes the types that stay dense.

Tensors must lie as llama.cpp wants them: in the header's order, each from the next multiple of the alignment on. An
offset that was changed, or a tensor marked with a type of another size, is therefore refused, and so is a file that
goes on behind its last tensor.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from w4gemm.core.errors import FormatError
from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight

INT4_FORMATS = {
    "Q4_0": WeightFormat(32, "none", "fp16"),
    "Q4_1": WeightFormat(32, "float", "fp16"),
    "Q4_K": WeightFormat.parse("q4_k"),
    "IQ4_NL": WeightFormat(32, "none", "fp16", "iq4"),
    "IQ4_XS": WeightFormat(32, "none", "fp32", "iq4"),
    "MXFP4": WeightFormat.parse("mxfp4"),
    "NVFP4": WeightFormat.parse("nvfp4"),
}
"""Format by 4-bit tensor type."""
MAGIC = b"GGUF"

_VERSIONS = (2, 3)
_ELEMENTS = 2**22
"""Elements dequantized at a time, so that temporary memory stays small beside a dense tensor."""
_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""``struct`` letter by GGUF's number of a metadata value type."""


class Array(NamedTuple):
    """A metadata array; its elements are not kept, because vocabularies are long."""

    length: int


class TensorInfo(NamedTuple):
    """Place of a tensor in the file. ``shape`` is in PyTorch's order: (n, k) for a weight; ``offset`` and ``nbytes``
    are in bytes, from the beginning of the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file, mapped into memory. Tensors are copied out of it when asked for.

    Attributes:
        path: the file.
        metadata: value by key; an array is an :class:`Array`.
        tensors: place of each tensor, by name.

    Raises:
        FileNotFoundError: if there is no such file.
        FormatError: if it is no GGUF file, is cut short, contradicts itself or holds something unknown.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"path: no file {str(path)!r}")
        self.metadata, self.tensors = _read_header(self.path)
        self._bytes = np.memmap(self.path, np.uint8, mode="r")

    def format(self, name: str) -> WeightFormat | None:
        """Format of a 4-bit matrix; None for any other tensor."""
        info = self.info(name)
        return INT4_FORMATS.get(info.type) if len(info.shape) == 2 else None

    def weight(self, name: str, rows: torch.Tensor | None = None) -> QuantizedWeight:
        """Return a 4-bit matrix losslessly, in the canonical layout on the CPU.

        Args:
            rows: int64 indices (n): take these rows, in this order; None for all as stored.

        Raises:
            FormatError: if the tensor is missing, not a matrix, not of a 4-bit type, or its numbers are not finite.
        """
        info = self.info(name)
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
        codes, scales, zeros, factors = _parts(blocks, info.type, k)
        channels = torch.ones(len(codes)) if format.has_channels else None
        try:
            return QuantizedWeight.from_codes(format, codes, scales, zeros, channels=channels, factors=factors)
        except ValueError as e:
            raise FormatError(f"{self.path}: tensor {name!r}: {e}") from e

    def dense(self, name: str, dtype: torch.dtype = torch.float32, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return any tensor, dequantized in float32 and rounded once to ``dtype``, on the CPU.

        Args:
            rows: as for :meth:`weight`.

        Raises:
            FormatError: if the tensor is missing or of a type that the ``gguf`` package cannot dequantize.
        """
        info = self.info(name)
        raw, k = self._raw(info), info.shape[-1]
        raw = raw.reshape(math.prod(info.shape[:-1]), -1)
        tensor = torch.empty(len(raw), k, dtype=dtype)
        step = max(1, _ELEMENTS // k)
        for first in range(0, len(raw), step):
            part = slice(first, first + step)
            tensor[part] = torch.from_numpy(self._dequantized(info, raw[part]))
        tensor = tensor.view(info.shape)
        return tensor if rows is None else tensor[rows]

    def _dequantized(self, info: TensorInfo, raw: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, Any]:
        """float32 numbers of rows of a tensor."""
        if info.type in ("F32", "F16"):
            return raw.view(np.float32 if info.type == "F32" else np.float16).astype(np.float32)
        gguf = _gguf()
        try:
            return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[info.type])
        except NotImplementedError as e:
            raise FormatError(
                f"{self.path}: tensor {info.name!r} is {info.type}, which cannot be dequantized: {e}"
            ) from e

    def info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise FormatError(f"{self.path}: no tensor {name!r} among its {len(self.tensors)}")
        return self.tensors[name]

    def _raw(self, info: TensorInfo) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._bytes[info.offset : info.offset + info.nbytes]


class _Parts(NamedTuple):
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    factors: torch.Tensor | None = None


def _parts(rows: torch.Tensor, type: str, k: int) -> _Parts:
    """Take rows of blocks, uint8 (n, bytes), apart."""
    n = len(rows)
    elements, size = {name: block for name, *block in _type_sizes().values()}[type]
    blocks = rows.view(n, k // elements, size)
    if type == "NVFP4":
        scales, bytes = blocks[..., :4].reshape(n, -1), blocks[..., 4:].reshape(n, -1, 8)
        # the byte that is NaN in e4m3 is 0 in llama.cpp; other signs there are none
        scales = torch.where(scales == 0x7F, 0, scales).view(torch.float8_e4m3fn)
        return _Parts(_halves(bytes, k), scales)
    if type == "MXFP4":
        return _Parts(_halves(blocks[..., 1:], k), blocks[..., 0].contiguous().view(torch.float8_e8m0fnu))
    if type == "Q4_K":
        factors = blocks[..., :4].contiguous().view(torch.float16) * torch.tensor([1, -1]).half()
        levels = _six_bits(blocks[..., 4:16]).transpose(1, 2).flatten(2)
        codes = _halves(blocks[..., 16:].reshape(n, -1, 32), k)
        return _Parts(codes, levels[:, 0].contiguous(), levels[:, 1].contiguous(), factors)
    if type == "IQ4_XS":
        levels = _signed_six_bits(blocks[..., 2:8]).float() * blocks[..., :2].contiguous().view(torch.float16)
        return _Parts(_halves(blocks[..., 8:].reshape(n, -1, 16), k), levels.flatten(1).contiguous())
    numbers = 2 if type == "Q4_1" else 1  # fp16 numbers before the codes
    scales, *zeros = blocks[..., : 2 * numbers].contiguous().view(torch.float16).unbind(-1)
    return _Parts(_halves(blocks[..., 2 * numbers :], k), scales, *zeros)


def _six_bits(bytes: torch.Tensor) -> torch.Tensor:
    """Scales and minimums, uint8 (..., 2, 8), of Q4_K's twelve bytes (..., 12): the low six bits of the first eight
    bytes; the last four of each in nibbles of the last four bytes, below the high two bits of the first eight."""
    first, last = bytes[..., :8].unflatten(-1, (2, 4)), bytes[..., 8:]
    nibbles = torch.stack((last & 15, last >> 4), dim=-2)
    return torch.cat((first & 63, nibbles | first >> 6 << 4), dim=-1)


def _signed_six_bits(bytes: torch.Tensor) -> torch.Tensor:
    """Scales -32..31, int8 (..., 8), of IQ4_XS's six bytes (..., 6): the high two bits of all in two bytes, then the
    low four in nibbles."""
    high = bytes[..., :2, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3
    low = torch.stack((bytes[..., 2:] & 15, bytes[..., 2:] >> 4), dim=-1)
    return (high.flatten(-2) << 4 | low.flatten(-2)).to(torch.int8) - 32


def _halves(bytes: torch.Tensor, k: int) -> torch.Tensor:
    """Codes (n, k) of bytes (n, blocks, bytes): the low nibbles of a block, then the high ones."""
    return torch.cat((bytes & 0xF, bytes >> 4), dim=-1).view(-1, k)


def _gguf() -> ModuleType:
    """The ``gguf`` package; imported late, because importing w4gemm must not need it."""
    try:
        import gguf
        import gguf.quants
    except ImportError as e:
        raise ImportError("reading GGUF files needs the gguf package: pip install '.[hf]' in a clone of w4gemm") from e
    return gguf


class _Cursor:
    """Reads little-endian values one after another, and raises FormatError when the file ends too early."""

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

    def name(self, what: str) -> str:
        """A key or a tensor's name. Two that are no UTF-8 could become the same text, so such a name is refused."""
        raw = self.bytes(self.one("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise FormatError(f"{self.path}: {what} {raw[:80]!r} is no UTF-8") from None

    def value(self) -> Any:
        """A metadata value."""
        kind = self.one("I")
        if kind == _STRING:
            return self.bytes(self.one("Q")).decode("utf-8", "replace")
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
        return Array(count)


class _Entry(NamedTuple):
    """A tensor as the header lists it: type by GGUF's number, offset in bytes after the header."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    with path.open("rb") as f:
        if f.read(len(MAGIC)) != MAGIC:
            raise FormatError(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()!r}")
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(path, data)
            cursor.bytes(len(MAGIC))
            version = cursor.one("I")
            if version not in _VERSIONS:
                # a big-endian file shows its version in the upper bytes
                what = "a big-endian file" if version & 0xFFFF == 0 else f"version {version}"
                raise FormatError(f"{path}: wanted little-endian GGUF version 2 or 3, got {what}")
            tensor_count, value_count = cursor.one("Q"), cursor.one("Q")
            metadata: dict[str, Any] = {}
            for _ in range(value_count):
                key = cursor.name("key")
                if key in metadata:
                    raise FormatError(f"{path}: key {key!r} is there twice")
                metadata[key] = cursor.value()
            entries = [_read_entry(cursor) for _ in range(tensor_count)]
            return metadata, _located(path, entries, _alignment(path, metadata), cursor.at, len(data))


def _read_entry(cursor: _Cursor) -> _Entry:
    name, dimensions = cursor.name("tensor name"), cursor.one("I")
    if not 1 <= dimensions <= 4:
        raise FormatError(f"{cursor.path}: tensor {name!r} has {dimensions} dimensions, wanted 1 to 4")
    shape = tuple(cursor.one("Q") for _ in range(dimensions))[::-1]
    if 0 in shape:
        raise FormatError(f"{cursor.path}: tensor {name!r} has shape {shape}, wanted sizes from 1")
    return _Entry(name, shape, cursor.one("I"), cursor.one("Q"))


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align < 1 or align & (align - 1):
        raise FormatError(f"{path}: general.alignment: wanted a power of two, got {align!r}")
    return align


def _located(path: Path, entries: list[_Entry], align: int, header_size: int, file_size: int) -> dict[str, TensorInfo]:
    """Place of each tensor by name, which must be where llama.cpp looks for it."""
    start = _aligned(header_size, align)
    at = start
    found: dict[str, TensorInfo] = {}
    for entry in entries:
        info = _sized(path, entry, start)
        if info.name in found:
            raise FormatError(f"{path}: tensor {info.name!r} is there twice")
        if info.offset != at:
            raise FormatError(
                f"{path}: tensor {info.name!r} begins at byte {info.offset}, but by the types and shapes of the "
                f"tensors before it at byte {at}"
            )
        if info.offset + info.nbytes > file_size:
            raise FormatError(
                f"{path} is cut short: tensor {info.name!r} ends at byte {info.offset + info.nbytes}, the file at "
                f"{file_size}"
            )
        at = _aligned(info.offset + info.nbytes, align)
        found[info.name] = info
    if file_size > at and found:
        raise FormatError(
            f"{path}: its {len(found)} tensors end at byte {at}, the file at {file_size}: the header does not name all"
        )
    return found


def _aligned(at: int, align: int) -> int:
    return -(-at // align) * align


@functools.cache
def _type_sizes() -> dict[int, tuple[str, int, int]]:
    """Name, elements and bytes of a block, by GGUF's type number."""
    sizes = _gguf().GGML_QUANT_SIZES
    return {int(type): (type.name, *size) for type, size in sizes.items()}


def _sized(path: Path, entry: _Entry, start: int) -> TensorInfo:
    if entry.type not in _type_sizes():
        raise FormatError(f"{path}: tensor {entry.name!r} is of unknown type {entry.type}")
    type, elements, size = _type_sizes()[entry.type]
    if entry.shape[-1] % elements:
        raise FormatError(
            f"{path}: tensor {entry.name!r} has shape {entry.shape}, but {type} wants rows of whole blocks of "
            f"{elements}"
        )
    return TensorInfo(entry.name, type, entry.shape, start + entry.offset, math.prod(entry.shape) // elements * size)
