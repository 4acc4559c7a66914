"""Parts that packings share: checks of a module's tensors, and codes out of their words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.weights.weight import QuantizedWeight

SCALES = {"F16": "fp16", "BF16": "bf16"}
"""Scale rules by safetensors' name of the scales' dtype."""
WIDE_SCALES = SCALES | {"F32": "fp32"}
SYMMETRIC = 8
"""Integer zero point of a symmetric weight."""


def check_tensor(
    stored: Mapping[str, TensorInfo], leaf: str, dtypes: Collection[str], shape: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Return the shape of one of a module's tensors; raise ValueError if it is missing or another than wanted.

    Args:
        dtypes: safetensors' names of those that are legal.
        shape: None for any matrix.
    """
    if leaf not in stored:
        raise ValueError(missing(leaf, stored))
    info = stored[leaf]
    if info.dtype not in dtypes:
        raise ValueError(f"{leaf} is {info.dtype}, wanted {' or '.join(dtypes)}")
    if (len(info.shape) != 2 or 0 in info.shape) if shape is None else info.shape != shape:
        raise ValueError(f"{leaf} has shape {info.shape}, wanted {'a matrix' if shape is None else shape}")
    return info.shape


def missing(leaf: str, stored: Collection[str]) -> str:
    """Return the message about a module that lacks a tensor."""
    return f"there is no {leaf} beside its {', '.join(sorted(stored))}"


def whole_groups(format: WeightFormat, k: int) -> int:
    """Return the number of groups along k; raise ValueError if the last one would be shorter than the others."""
    if format.group_size != PER_COLUMN and k % format.group_size:
        raise ValueError(f"groups of {format.group_size} do not divide its {k} input features")
    return format.groups(k)


def of_bytes(module: Module, packed: torch.Tensor, scales: torch.Tensor, *others: torch.Tensor) -> QuantizedWeight:
    """Return a weight whose codes lie as in the canonical layout, two of a row a byte, the even column in the low
    nibble: nothing is unpacked and packed again.

    Args:
        packed: n rows of k / 2 bytes, of any dtype.
        others: zero points or channel scales, if the format has them.
    """
    codes = packed.contiguous().view(torch.uint8)
    parts = codes, scales.contiguous(), *others
    w = QuantizedWeight(module.format, module.n, module.k, "canonical", parts, activations=module.activations)
    w.check_range()
    return w


def unpack_int4(packed: torch.Tensor, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the nibbles of int32 (..., words) as uint8 (..., 8 * words), lowest first.

    Args:
        order: which nibble of a word is its first, second, ... number; None for lowest first.
    """
    # a clone, since contiguous() leaves a last dimension of one word its stride
    pairs = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # little-endian
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    return codes if order is None else codes.unflatten(-1, (-1, 8))[..., list(order)].flatten(-2)


def unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """Return the nibbles of uint8 (..., bytes) as uint8 (..., 2 * bytes), the low one first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def check_bits(bits: Any) -> None:
    if bits != 4:
        raise ValueError(f"its weight has {bits!r} bits, wanted 4")


def check_symmetric(zeros: torch.Tensor) -> None:
    """Raise ValueError unless all integer zero points are :data:`SYMMETRIC`."""
    if not (zeros == SYMMETRIC).all():
        raise ValueError(
            f"config.json says that it is symmetric, but its zero points are {int(zeros.min())} to "
            f"{int(zeros.max())} instead of {SYMMETRIC}"
        )
