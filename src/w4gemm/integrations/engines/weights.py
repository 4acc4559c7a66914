"""The formats in which engines load weights. Their numbers are those of the checkpoint: w4gemm/checkpoints has them."""

from __future__ import annotations

import torch

from w4gemm.checkpoints import gptq
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations.engines.loading import unloaded

SCALES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Scale rules of 16-bit scales by their dtype."""
_HELD = {**SCALES, torch.float32: "bf16"}
"""Scale rules of the scales that engines hold. float32 is rounded to bf16, as engines' own W4A8 kernels do."""


def int4_format(group_size: int, asymmetric: bool, scales: torch.dtype) -> WeightFormat:
    """Return the format of integers that an engine holds.

    Args:
        group_size: -1 for one group of all columns.

    Raises:
        TypeError, ValueError: if there is none.
    """
    if scales not in _HELD:
        raise TypeError(f"scales: wanted one of {', '.join(map(str, _HELD))}, got {scales}")
    return WeightFormat(group_size, "int" if asymmetric else "none", _HELD[scales])


def check_unused_zeros(qzeros: torch.Tensor) -> None:
    """Raise ValueError unless GPTQ's zero points of a symmetric weight are 8, or the engine has loaded none."""
    if qzeros.dtype == torch.int32 and unloaded(qzeros) < 1:
        gptq.check_unused_zeros(qzeros.data)
