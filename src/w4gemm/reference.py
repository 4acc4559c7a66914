"""The reference of every operation: plain PyTorch in float64, slow and obvious."""

from __future__ import annotations

import torch

from w4gemm.weight import QuantizedWeight


def linear_reference(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., k) @ w.T + bias as float64 (..., n), with the weights of ``w.dequantize(torch.float32)``."""
    d = x.double() @ w.dequantize(torch.float32).double().T
    return d if bias is None else d + bias.double()
