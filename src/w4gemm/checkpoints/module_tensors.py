"""Parts that packings share: checks of a module's tensors, and weights of their bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.stored import NAMES
from w4gemm.core.formats import PER_COLUMN, SCALE_OF, WeightFormat

WIDE_SCALES = {NAMES[dtype]: rule for dtype, rule in SCALE_OF.items()}
"""Scale rules by safetensors' name of the scales' dtype."""
SCALES = {name: rule for name, rule in WIDE_SCALES.items() if rule != "fp32"}
"""Those of 16 bits."""
SYMMETRIC = 8
"""Integer zero point of a symmetric weight of 4 bits."""


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


def check_bits(bits: Any, legal: Collection[int] = (4,)) -> None:
    """Raise ValueError unless a packing has integers of so many bits."""
    if type(bits) is not int or bits not in legal:
        raise ValueError(f"its weight has {bits!r} bits, wanted {' or '.join(map(str, legal))}")


def check_symmetric(zeros: torch.Tensor, bits: int = 4) -> None:
    """Raise ValueError unless all integer zero points are the middle of the codes, such as :data:`SYMMETRIC`."""
    middle = 1 << bits - 1
    if not (zeros == middle).all():
        raise ValueError(
            f"config.json says that it is symmetric, but its zero points are {int(zeros.min())} to "
            f"{int(zeros.max())} instead of {middle}"
        )
