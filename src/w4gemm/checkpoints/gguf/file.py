"""The container of GGUF (llama.cpp): metadata and tensors under the file's own names.

Matrices of the types of blocks.py are read losslessly. Others stay dense, 16 bits or more.

The header is read by header.py. The ``gguf`` package dequantizes the types that stay dense.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from w4gemm.checkpoints.base import Pack
from w4gemm.checkpoints.gguf.blocks import TYPES, BlockNumbers
from w4gemm.checkpoints.gguf.header import Array, GGUFTensor, elements, gguf_package, read_header, type_sizes
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.core.errors import FormatError, require_among
from w4gemm.core.formats import WeightFormat
from w4gemm.weights.weight import QuantizedWeight

_PART = re.compile(r"(?P<whole>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.ASCII)
"""File name of a part of a split file."""
_MOST_PARTS = 99_999

_COMPANIONS = (".scale", ".input_scale")
"""Ends of the names of what lies beside a tensor in NVFP4: the factor of each of its matrices, and that of x for
products in 4 bits on both sides, which are not computed here."""

_ELEMENTS = 2**22
"""Elements dequantized at a time, so that temporary memory stays small beside a dense tensor."""


def name_of_whole(path: Path) -> str:
    """Return what the names of all parts of a split file have in common, or the name of another file."""
    return f"{match['whole']}-of-{match['count']}" if (match := _PART.fullmatch(path.name)) else path.name


class GGUFFile:
    """An open GGUF file, mapped into memory. Tensors are copied out of it when asked for. Any part of a split file
    opens all of it.

    Attributes:
        path: the file; of a split one the first part, which has the metadata.
        parts: the file, or all parts of a split one.
        metadata: value by key; an array is an :class:`~w4gemm.checkpoints.gguf.header.Array`.
        tensors: place of each tensor, by name.

    Raises:
        FileNotFoundError: if there is no such file.
        FormatError: if it is no GGUF file, is cut short, contradicts itself or holds something unknown; if a part of a
            split file is missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"path: no file {str(path)!r}")
        self.metadata, self.tensors = read_header(self.path)
        self.parts = [self.path]
        count, named = self.metadata.get("split.count", 1), _PART.fullmatch(self.path.name)
        if count != 1 or (named and int(named["count"]) != 1):
            self.parts = self._parts(count)
            self._join(self.parts)
        self._bytes = [np.memmap(part, np.uint8, mode="r") for part in self.parts]

    def _parts(self, count: Any) -> list[Path]:
        """Return the parts of a split file of ``count``, and make the first one :attr:`path`."""
        if type(count) is not int or not 1 <= count <= _MOST_PARTS:
            raise FormatError(f"{self.path}: split.count: wanted 1 to {_MOST_PARTS}, got {count!r:.80}")
        if (match := _PART.fullmatch(self.path.name)) is None:
            raise FormatError(
                f"{self.path} is a part of {count} of a split file; wanted its name to end in "
                f"-00001-of-{count:05}.gguf, as llama.cpp names the first one, to find the others by"
            )
        if int(match["count"]) != count:
            raise FormatError(
                f"{self.path}: its name says that it is a part of {int(match['count'])}, its split.count {count}; if "
                "it is whole, wanted another name"
            )
        parts = [self.path.with_name(f"{match['whole']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
        if missing := [part.name for part in parts if not part.is_file()]:
            raise FormatError(
                f"{self.path} is a part of {count} of a split file, of which {', '.join(missing)} is not beside it"
            )
        self.path = parts[0]
        return parts

    def _join(self, parts: Sequence[Path]) -> None:
        """Read the headers of all parts: the first one's metadata, the tensors of each."""
        headers = [read_header(part) for part in parts]
        self.metadata, self.tensors = headers[0][0], {}
        for i, (part, (metadata, tensors)) in enumerate(zip(parts, headers, strict=True)):
            if (metadata.get("split.no"), metadata.get("split.count")) != (i, len(parts)):
                raise FormatError(
                    f"{part}: wanted part {i} of {len(parts)} by its name, counted from 0, got split.no "
                    f"{metadata.get('split.no')} and split.count {metadata.get('split.count')}"
                )
            if twice := self.tensors.keys() & tensors.keys():
                raise FormatError(f"{part}: tensor {min(twice)!r} is in an earlier part, too")
            self.tensors |= {name: info._replace(part=i) for name, info in tensors.items()}
        if (total := self.metadata.get("split.tensors.count")) not in (None, len(self.tensors)):
            raise FormatError(
                f"{self.path}: split.tensors.count is {total}, its parts have {len(self.tensors)} tensors"
            )

    def elements(self, array: Array) -> Sequence[Any]:
        """Return the numbers of a metadata array, or its strings as bytes."""
        return elements(self._bytes[0].data, array)

    def format(self, name: str, dimensions: int = 2) -> WeightFormat | None:
        """Format of a matrix, or of a tensor of several if it has three dimensions; None for one that stays dense."""
        info = self.info(name)
        return TYPES[info.type].format if info.type in TYPES and len(info.shape) == dimensions else None

    def numbers(
        self,
        name: str,
        rows: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        expert: int | None = None,
    ) -> Numbers:
        """Return the numbers of a matrix.

        Args:
            rows: int64 indices (n): take these rows, in this order; None for all as stored.
            device: device to unpack on, and of the packed weight.
            expert: which matrix of a tensor (experts, n, k); None for a tensor that is a matrix.

        Raises:
            FormatError: if the tensor is missing, no matrix or of a type that stays dense.
        """
        info = self.info(name)
        if info.type not in TYPES:
            expected = " or ".join(TYPES)
            raise FormatError(f"{self.path}: tensor {name!r} is {info.type}, which stays dense; wanted {expected}")
        if len(info.shape) != (2 if expert is None else 3):
            expected = "a matrix (n, k)" if expert is None else "one for each expert, (experts, n, k)"
            raise FormatError(f"{self.path}: tensor {name!r} has shape {info.shape}, wanted {expected}")
        matrices = self._raw(info).reshape(-1, info.shape[-2], info.nbytes // math.prod(info.shape[:-1]))
        stored = torch.from_numpy(matrices[expert or 0].copy())
        stored = (stored if rows is None else stored[rows]).to(device)
        factor = self._factors(info)[expert or 0].to(device) if TYPES[info.type].format.has_channels else None
        return self._numbers(info, stored, factor)

    def weight(
        self,
        name: str,
        rows: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        pack: Pack = Numbers.weight,
    ) -> QuantizedWeight:
        """Return a matrix losslessly; arguments as of :meth:`numbers` and
        :meth:`w4gemm.checkpoints.base.Checkpoint.weight`.

        Raises:
            FormatError: as from :meth:`numbers`, and for infinite numbers.
        """
        return self.packed([name], self.numbers(name, rows, device), pack)

    def packed(self, names: Sequence[str], numbers: Numbers, pack: Pack) -> QuantizedWeight:
        """Return the weight of numbers that tensors hold.

        Raises:
            FormatError: for infinite numbers, naming the tensors.
        """
        try:
            return pack(numbers, None)
        except FormatError:
            raise
        except ValueError as e:
            raise FormatError(f"{self.path}: tensor {', '.join(map(repr, names))}: {e}") from e

    @staticmethod
    def _numbers(info: GGUFTensor, rows: torch.Tensor, factor: torch.Tensor | None = None) -> Numbers:
        """Return the numbers of rows, uint8 (n, bytes), of a matrix; ``factor`` is its f in NVFP4."""
        size = next(size for name, _, size in type_sizes().values() if name == info.type)
        return BlockNumbers(info.type, rows.view(len(rows), -1, size), factor)

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
        factors = None
        if info.type == "NVFP4":
            of_matrices = self._factors(info)
            factors = of_matrices.repeat_interleave(len(raw) // len(of_matrices))[:, None]
        tensor = torch.empty(len(raw), k, dtype=dtype, device="cpu")
        step = max(1, _ELEMENTS // k)
        for first in range(0, len(raw), step):
            part = slice(first, first + step)
            numbers = torch.from_numpy(self._dequantized(info, raw[part]))
            tensor[part] = numbers if factors is None else numbers * factors[part]
        tensor = tensor.view(info.shape)
        return tensor if rows is None else tensor[rows]

    def companions(self, name: str) -> list[str]:
        """Return the names of the scales that belong to a tensor in NVFP4. The model has no tensors of these names."""
        if self.info(name).type != "NVFP4":
            return []
        return [companion for end in _COMPANIONS if (companion := name.removesuffix(".weight") + end) in self.tensors]

    def _factors(self, info: GGUFTensor) -> torch.Tensor:
        """float32 (matrices,): the factor of each matrix of a tensor in NVFP4."""
        count = math.prod(info.shape[:-2])
        scale = next((name for name in self.companions(info.name) if name.endswith(_COMPANIONS[0])), None)
        if scale is None:
            return torch.ones(count, dtype=torch.float32, device="cpu")
        factors = self.info(scale)
        if factors.type != "F32" or factors.shape != (count,):
            raise FormatError(
                f"{self.path}: tensor {scale!r} is {factors.type} of shape {factors.shape}; wanted F32 of shape "
                f"{(count,)}, a factor for each matrix of {info.name!r}"
            )
        return self.dense(scale)

    def _dequantized(self, info: GGUFTensor, raw: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, Any]:
        """float32 numbers of rows of a tensor."""
        if info.type in ("F32", "F16"):
            return raw.view(np.float32 if info.type == "F32" else np.float16).astype(np.float32)
        gguf = gguf_package()
        if info.type not in gguf.GGMLQuantizationType.__members__:
            return self._numbers(info, torch.from_numpy(raw.copy())).weight().dequantize().numpy()
        try:
            return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[info.type])
        except NotImplementedError as e:
            raise FormatError(
                f"{self.path}: tensor {info.name!r} is {info.type}, which cannot be dequantized: {e}"
            ) from e

    def info(self, name: str) -> GGUFTensor:
        require_among(self.path, "tensor", name, self.tensors)
        return self.tensors[name]

    def _raw(self, info: GGUFTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._bytes[info.part][info.offset : info.offset + info.nbytes]
