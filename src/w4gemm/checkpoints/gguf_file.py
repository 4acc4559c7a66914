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
NVFP4   64: four e4m3 d without sign, of 16 each; 4 x 8 bytes  d * e2m1(q) * f               nvfp4
======  =====================================================  ============================  ====================

The codes of 32 (of 16, in Q4_K of 64) elements are in 16 (8, 32) bytes: element j in the low nibble of byte j, the
second half of the elements in the high nibbles. Other types stay dense, 16 bits or more. f is one number of a matrix in
NVFP4, in a tensor beside it whose name ends in ``.scale``, or 1.

The header is read by gguf_header.py. The ``gguf`` package dequantizes the types that stay dense.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from w4gemm.checkpoints.gguf_header import Array, GGUFTensor, elements, gguf_package, read_header, type_sizes
from w4gemm.core.errors import FormatError, not_among
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.bits import fields
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

_COMPANIONS = (".scale", ".input_scale")
"""Ends of the names of what lies beside a tensor in NVFP4: the factor of each of its matrices, and that of x for
products in 4 bits on both sides, which are not computed here."""

_ELEMENTS = 2**22
"""Elements dequantized at a time, so that temporary memory stays small beside a dense tensor."""


class GGUFFile:
    """An open GGUF file, mapped into memory. Tensors are copied out of it when asked for.

    Attributes:
        path: the file.
        metadata: value by key; an array is an :class:`~w4gemm.checkpoints.gguf_header.Array`.
        tensors: place of each tensor, by name.

    Raises:
        FileNotFoundError: if there is no such file.
        FormatError: if it is no GGUF file, is cut short, contradicts itself or holds something unknown.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"path: no file {str(path)!r}")
        self.metadata, self.tensors = read_header(self.path)
        self._bytes = np.memmap(self.path, np.uint8, mode="r")

    def elements(self, array: Array) -> Sequence[Any]:
        """Return the numbers of a metadata array, or its strings as bytes."""
        return elements(self._bytes.data, array)

    def format(self, name: str, dimensions: int = 2) -> WeightFormat | None:
        """Format of a 4-bit matrix, or of a tensor of several if it has three dimensions; None for any other tensor."""
        info = self.info(name)
        return INT4_FORMATS.get(info.type) if len(info.shape) == dimensions else None

    def weight(
        self,
        name: str,
        rows: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        expert: int | None = None,
    ) -> QuantizedWeight:
        """Return a 4-bit matrix losslessly, in the canonical layout.

        Args:
            rows: int64 indices (n): take these rows, in this order; None for all as stored.
            device: device to unpack on, and of the result.
            expert: which matrix of a tensor (experts, n, k); None for a tensor that is a matrix.

        Raises:
            FormatError: if the tensor is missing, not a matrix, not of a 4-bit type, or its numbers are not finite.
        """
        info = self.info(name)
        if info.type not in INT4_FORMATS:
            expected = " or ".join(INT4_FORMATS)
            raise FormatError(f"{self.path}: tensor {name!r} is {info.type}, which is not 4-bit; wanted {expected}")
        if len(info.shape) != (2 if expert is None else 3):
            expected = "a matrix (n, k)" if expert is None else "one for each expert, (experts, n, k)"
            raise FormatError(f"{self.path}: tensor {name!r} has shape {info.shape}, wanted {expected}")
        format = INT4_FORMATS[info.type]
        *_, n, k = info.shape
        matrices = self._raw(info).reshape(-1, n, info.nbytes // math.prod(info.shape[:-1]))
        blocks = torch.from_numpy(matrices[expert or 0].copy())
        blocks = (blocks if rows is None else blocks[rows]).to(device)
        codes, scales, zeros, factors = _parts(blocks, info.type, k)
        channels = None
        if format.has_channels:
            channels = self._factors(info)[expert or 0].repeat(len(codes)).to(device)
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
        try:
            return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[info.type])
        except NotImplementedError as e:
            raise FormatError(
                f"{self.path}: tensor {info.name!r} is {info.type}, which cannot be dequantized: {e}"
            ) from e

    def info(self, name: str) -> GGUFTensor:
        if name not in self.tensors:
            raise not_among(self.path, "tensor", name, self.tensors)
        return self.tensors[name]

    def _raw(self, info: GGUFTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._bytes[info.offset : info.offset + info.nbytes]


class _Parts(NamedTuple):
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    factors: torch.Tensor | None = None


def _parts(rows: torch.Tensor, type: str, k: int) -> _Parts:
    """Take rows of blocks, uint8 (n, bytes), apart."""
    n = len(rows)
    elements, size = {name: block for name, *block in type_sizes().values()}[type]
    blocks = rows.view(n, k // elements, size)
    if type == "NVFP4":
        scales, bytes = blocks[..., :4].reshape(n, -1), blocks[..., 4:].reshape(n, -1, 8)
        # the byte that is NaN in e4m3 is 0 in llama.cpp, which does not read the sign of others (of 0xFF it makes 480)
        scales = torch.where(scales == 0x7F, 0, torch.where(scales == 0xFF, scales, scales & 0x7F))
        scales = scales.view(torch.float8_e4m3fn)
        return _Parts(_halves(bytes, k), scales)
    if type == "MXFP4":
        return _Parts(_halves(blocks[..., 1:], k), blocks[..., 0].contiguous().view(torch.float8_e8m0fnu))
    if type == "Q4_K":
        factors = blocks[..., :4].contiguous().view(torch.float16) * torch.tensor([1, -1], device=rows.device).half()
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
    nibbles = torch.stack(fields(last, 4), dim=-2)
    return torch.cat((first & 63, nibbles | first >> 6 << 4), dim=-1)


def _signed_six_bits(bytes: torch.Tensor) -> torch.Tensor:
    """Scales -32..31, int8 (..., 8), of IQ4_XS's six bytes (..., 6): the high two bits of all in two bytes, then the
    low four in nibbles."""
    high = bytes[..., :2, None] >> torch.arange(0, 8, 2, dtype=torch.uint8, device=bytes.device) & 3
    low = torch.stack(fields(bytes[..., 2:], 4), dim=-1)
    return (high.flatten(-2) << 4 | low.flatten(-2)).to(torch.int8) - 32


def _halves(bytes: torch.Tensor, k: int) -> torch.Tensor:
    """Codes (n, k) of bytes (n, blocks, bytes): the low nibbles of a block, then the high ones."""
    return torch.cat(fields(bytes, 4), dim=-1).view(-1, k)
