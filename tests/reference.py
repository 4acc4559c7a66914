"""References of the products in plain PyTorch and float64: slow and obvious, for tests."""

from __future__ import annotations

import itertools

import torch

from w4gemm.core.epilogue import Epilogue, EpilogueOperands
from w4gemm.weights.weight import QuantizedWeight


def linear_reference(
    x: torch.Tensor,
    w: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    alpha: float | torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    token_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return act(alpha * token_scale * (x @ w.T) + bias) + residual in float64, with the weights of
    ``w.dequantize(torch.float32)``.

    Args:
        x: (m, k) of any floating dtype.
        token_scale: float32 (m,) or, one for each 128 columns of x, (m, ceil(k / 128)).
    """
    operands = EpilogueOperands(alpha, bias, residual, token_scale)
    return dense_reference(x, w.dequantize(torch.float32).double(), activation, operands)


def dense_reference(
    x: torch.Tensor, weight: torch.Tensor, activation: str | None, operands: EpilogueOperands
) -> torch.Tensor:
    """Return what :func:`linear_reference` does for a weight that is float64 (n, k)."""
    scale = operands.token_scale
    if scale is not None and scale.dim() == 2:
        operands = operands._replace(token_scale=None, block_scale=scale)
    return Epilogue(activation).apply(operands.scaled_blocks(x.double()) @ weight.T, operands)


def grouped_reference(
    x: torch.Tensor,
    w: QuantizedWeight,
    m_offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    alpha: float | torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    token_scale: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """``linear_reference`` of each expert's rows; rows past the last offset are NaN."""
    ends = m_offsets.tolist()
    d = x.new_full((x.shape[0], Epilogue(activation).columns(w.n)), torch.nan, dtype=torch.float64)
    for e, (first, last) in enumerate(itertools.pairwise(ends)):
        rows, own = slice(first, last), None if bias is None else bias[e]
        added, scale = (None if t is None else t[rows] for t in (residual, token_scale))
        is_block = scale is not None and scale.dim() == 2
        sums = linear_reference(x[rows], w.expert(e), token_scale=scale if is_block else None)
        operands = EpilogueOperands(alpha, own, added, None if is_block else scale)
        operands = operands._replace(expert_scale=None if expert_scale is None else expert_scale[e])
        d[rows] = Epilogue(activation).apply(sums, operands)
    return d
