"""The transforms of ``torch.func`` (grad, vjp, jvp, jacrev, jacfwd, hessian, vmap) and forward-mode derivatives of
:func:`w4gemm.linear`.

The gradients of a registered operator do not serve them. So the product is an autograd.Function with rules for vmap and
for tangents, and PyTorch's operators compute what comes after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._functorch import is_batchedtensor

from w4gemm.api.operators import FLOAT32, flat_epilogue, flat_weight, in_halves, narrowed
from w4gemm.core.epilogue import NO_OPERANDS
from w4gemm.weights.weight import QuantizedWeight


def product(rows: torch.Tensor, w: QuantizedWeight, config: str, batch_invariant: bool) -> torch.Tensor:
    """Return rows (m, k) @ w.T (m, n) in float32, under any transforms of ``torch.func``.

    Raises:
        NotImplementedError: if vmap has a weight of each batch, as of layers stacked by ``stack_module_state``.
    """
    if any(is_batchedtensor(t) for t in w.tensors):
        raise NotImplementedError(
            "w: vmap over the tensors of several weights is not implemented; QuantizedWeight.stack makes one weight of "
            "them, which grouped_linear takes"
        )
    return _Product.apply(rows, w, config, batch_invariant)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(rows: torch.Tensor, w: QuantizedWeight, config: str, batch_invariant: bool) -> torch.Tensor:
        arguments = flat_weight(w) | flat_epilogue(FLOAT32, NO_OPERANDS)
        arguments |= {"config": config, "batch_invariant": batch_invariant}
        return in_halves(rows, lambda rows: torch.ops.w4gemm.linear(rows, **arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        rows, *ctx.others = inputs
        ctx.dtype, ctx.w = rows.dtype, inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _Transposed.apply(narrowed(grad, ctx.dtype), ctx.w).to(ctx.dtype), None, None, None

    @staticmethod
    def jvp(ctx: Any, rows: torch.Tensor, *others: None) -> torch.Tensor:
        return _Product.apply(rows, *ctx.others)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], rows: torch.Tensor, *others: Any) -> tuple[torch.Tensor, int]:
        return _batched(_Product, in_dims[0], rows, *others)


class _Transposed(torch.autograd.Function):
    """The gradient of the product: grad (m, n) @ w (m, k)."""

    @staticmethod
    def forward(grad: torch.Tensor, w: QuantizedWeight) -> torch.Tensor:
        return torch.ops.w4gemm.linear_dx(grad, **flat_weight(w))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.dtype, ctx.w = inputs[0].dtype, inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _Product.apply(grad, ctx.w, "", False).to(ctx.dtype), None

    @staticmethod
    def jvp(ctx: Any, grad: torch.Tensor, w: None) -> torch.Tensor:
        return _Transposed.apply(grad, ctx.w)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], grad: torch.Tensor, *others: Any) -> tuple[torch.Tensor, int]:
        return _batched(_Transposed, in_dims[0], grad, *others)


def _batched(function: Any, dim: int, rows: torch.Tensor, *others: Any) -> tuple[torch.Tensor, int]:
    """Return a function of a batch of rows, by calling it once with all rows of the batch."""
    rows = rows.movedim(dim, 0)
    return function.apply(rows.flatten(0, 1), *others).unflatten(0, rows.shape[:2]), 0
