"""The header of a GGUF file (llama.cpp): metadata, and where each tensor lies, by :func:`read_header`.

It is read here rather than with the ``gguf`` package's reader, which makes one array per vocabulary entry (3 s for
49,152 tokens, against 0.1 s; 2 CPU cores, 2026-11) and does not notice a file that is cut short. That package gives the
block sizes.

Tensors must lie as llama.cpp wants them: in the header's order, each from the next multiple of the alignment on. An
offset that was changed, or a tensor marked with a type of another size, is therefore refused, and so is a file that
goes on behind its last tensor.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from w4gemm.core.errors import FormatError
from w4gemm.core.files import why_unread

MAGIC = b"GGUF"

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""``struct`` letter by GGUF's number of a metadata value type."""

_Q2_0 = 42
"""Number of a type that the ``gguf`` package does not know up to 0.19."""


class Array(NamedTuple):
    """A metadata array; its elements are not kept, because vocabularies are long. :func:`elements` reads them.

    Attributes:
        kind: GGUF's number of the elements' type.
        at: where they begin, in bytes from the beginning of the file.
    """

    length: int
    kind: int
    at: int


class GGUFTensor(NamedTuple):
    """Place of a tensor in the file. ``shape`` is in PyTorch's order: (n, k) for a weight; ``offset`` and ``nbytes``
    are in bytes, from the beginning of the file; ``part`` counts the parts of a split file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    part: int = 0


def gguf_package() -> ModuleType:
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
            text = raw.decode()
        except UnicodeDecodeError:
            raise FormatError(f"{self.path}: {what} {raw[:80]!r} is no UTF-8") from None
        if not text.isprintable():
            raise FormatError(f"{self.path}: {what} {text[:80]!r} has characters that are not printable")
        return text

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
        at = self.at
        if kind in _SCALARS:
            self.bytes(count * struct.calcsize("<" + _SCALARS[kind]))
        elif kind == _STRING:
            for _ in range(count):
                self.bytes(self.one("Q"))
        else:
            raise FormatError(f"{self.path}: metadata array of unknown type {kind} before byte {self.at}")
        return Array(count, kind, at)


class _Entry(NamedTuple):
    """A tensor as the header lists it: type by GGUF's number, offset in bytes after the header."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Return the metadata by key and the place of each tensor by name.

    Raises:
        FormatError: if the file is no GGUF file, is cut short, contradicts itself or holds something unknown.
    """
    with path.open("rb") as f:
        if f.read(len(MAGIC)) != MAGIC:
            reason = why_unread(path) or f"is no GGUF file: it does not begin with {MAGIC.decode()!r}"
            raise FormatError(f"{path} {reason}")
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


def elements(data: memoryview, array: Array) -> Sequence[Any]:
    """Return an array's numbers, or its strings as bytes. The file's header has been read."""
    at = array.at
    if array.kind != _STRING:
        return struct.unpack_from(f"<{array.length}{_SCALARS[array.kind]}", data, at)
    strings = []
    for _ in range(array.length):
        (size,) = struct.unpack_from("<Q", data, at)
        strings.append(bytes(data[at + 8 : at + 8 + size]))
        at += 8 + size
    return strings


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


def _located(path: Path, entries: list[_Entry], align: int, header_size: int, file_size: int) -> dict[str, GGUFTensor]:
    """Return the place of each tensor by name. It must be where llama.cpp looks for it."""
    start = _aligned(header_size, align)
    at = start
    tensors: dict[str, GGUFTensor] = {}
    for entry in entries:
        info = _sized(path, entry, start)
        if info.name in tensors:
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
        tensors[info.name] = info
    if file_size > at and tensors:
        raise FormatError(
            f"{path}: its {len(tensors)} tensors end at byte {at}, the file at {file_size}: the header does not name "
            "all"
        )
    return tensors


def _aligned(at: int, align: int) -> int:
    return -(-at // align) * align


@functools.cache
def type_sizes() -> dict[int, tuple[str, int, int]]:
    """Name, elements and bytes of a block, by GGUF's type number."""
    sizes = gguf_package().GGML_QUANT_SIZES
    return {_Q2_0: ("Q2_0", 64, 18)} | {int(type): (type.name, *size) for type, size in sizes.items()}


def _sized(path: Path, entry: _Entry, start: int) -> GGUFTensor:
    if entry.type not in type_sizes():
        raise FormatError(f"{path}: tensor {entry.name!r} is of unknown type {entry.type}")
    type, elements, size = type_sizes()[entry.type]
    if entry.shape[-1] % elements:
        raise FormatError(
            f"{path}: tensor {entry.name!r} has shape {entry.shape}, but {type} wants rows of whole blocks of "
            f"{elements}"
        )
    return GGUFTensor(entry.name, type, entry.shape, start + entry.offset, math.prod(entry.shape) // elements * size)
