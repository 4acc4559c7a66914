"""The reference of every operation: plain PyTorch in float64, slow and obvious."""

from __future__ import annotations

import torch

from w4gemm.epilogue import Epilogue
from w4gemm.weight import QuantizedWeight


def linear_reference(
    x: torch.Tensor,
    w: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    alpha: float | torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """act(alpha * (x @ w.T) + bias) + residual as float64, with the weights of ``w.dequantize(torch.float32)``."""
    d = x.double() @ w.dequantize(torch.float32).double().T
    return Epilogue(activation).apply(d, alpha, bias, residual)
