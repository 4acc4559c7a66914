"""Config and tokenizer of a GGUF file for transformers, from the header that was read here: :func:`quick_reader`.

transformers reads a file's config and tokenizer with the ``gguf`` package's reader, once for each of them. That reader
makes arrays of every vocabulary entry: of Gemma 3's 262,144 tokens 28 s each time (2 CPU cores, 2026-11-23). Reading
the header here takes 0.13 s (128,256 tokens, 280,147 merges), so it is read once, when the file is opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from w4gemm.checkpoints.gguf.architectures import ARCHITECTURES
from w4gemm.checkpoints.gguf.file import GGUFFile
from w4gemm.checkpoints.gguf.header import Array, gguf_package
from w4gemm.checkpoints.hugging_face import transformers_makes
from w4gemm.core.errors import FormatError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ARRAY, _STRING = 9, 8
_KINDS = {bool: 7, str: _STRING, int: 11, float: 12}
"""GGUF's number of a type that holds all values of a Python type."""


class _Field(NamedTuple):
    """A metadata value as the package's reader gives it: ``parts[i]`` for i in ``data`` are the elements, bytes of a
    string or a number in a tuple."""

    parts: Sequence[Any]
    data: range
    types: list[int]


class _Reader:
    """Part of ``gguf.GGUFReader`` that transformers uses: the metadata that it reads rightly, and names of tensors."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self.tensors = [*file.tensors.values()]
        architecture = str(file.metadata.get("general.architecture", ""))
        known = ARCHITECTURES.get(architecture)
        unread = f"{architecture}.{known.unread}" if known and known.unread else None
        read = {key: value for key, value in file.metadata.items() if unread is None or not key.startswith(unread)}
        self.fields = {key: _field(file, value) for key, value in read.items()}


def _field(file: GGUFFile, value: Any) -> _Field:
    if isinstance(value, Array):
        elements = file.elements(value)
        parts = elements if value.kind == _STRING else [(element,) for element in elements]
        return _Field(parts, range(len(parts)), [_ARRAY, value.kind])
    part = value.encode() if isinstance(value, str) else (value,)
    return _Field([part], range(1), [_KINDS[type(value)]])


@contextmanager
def quick_reader(file: GGUFFile) -> Iterator[None]:
    """Give transformers the contents of an open file where it asks for ``gguf.GGUFReader`` of it. To be called inside
    of :func:`transformers_makes`, because all threads get this reader."""
    package: Any = gguf_package()
    own, reader = package.GGUFReader, _Reader(file)

    def reader_of(path: str | Path, *args: Any) -> Any:
        return reader if os.path.samefile(file.path, path) else own(path, *args)

    package.GGUFReader = reader_of
    try:
        yield
    finally:
        package.GGUFReader = own


_TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "tekken.json", "*.py")
"""Files of which a folder with a tokenizer has one; the last are of a model type with code of its own."""


def tokenizer_of(folder: Path, options: Mapping[str, Any], file: GGUFFile | None = None) -> PreTrainedTokenizerBase:
    """Return transformers' tokenizer of a folder or of a GGUF file there, which begins texts with <bos> if the file
    says so: with transformers 5.18 to 5.22 that of a Gemma file does not by itself.

    Args:
        options: arguments of ``from_pretrained`` besides the folder; ``gguf_file`` is the name of a file in it.
        file: that file, inside of :func:`quick_reader`.

    Raises:
        FormatError: if there is none, or transformers cannot read it.
    """
    from transformers import AutoTokenizer

    if file is None and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise FormatError(f"{folder} has no tokenizer: tokenizer.save_pretrained writes one")
    with transformers_makes("tokenizer (tokenizer.save_pretrained writes one)", folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    says_bos = file is not None and file.metadata.get("tokenizer.ggml.add_bos_token") is True
    if says_bos and getattr(tokenizer, "add_bos_token", None) is False:
        tokenizer.add_bos_token = True
    return tokenizer
