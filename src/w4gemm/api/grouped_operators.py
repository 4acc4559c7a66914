"""The operators of products of experts: ``torch.ops.w4gemm.grouped_linear`` and ``grouped_linear_dx``, its gradient.

The gradient to x is grad[r] @ w[e] for the rows r of each expert e. A kernel for that would have to read the weight
across its packed order. So experts are dequantized instead, a few at a time, and each is multiplied by one matmul. The
memory beyond the result stays below :data:`_DENSE_BYTES`, or what one expert takes. The host reads the bounds of the
rows, which synchronizes, so a CUDA graph cannot capture a backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from w4gemm.api.arguments import FP8
from w4gemm.api.call import Call
from w4gemm.api.gradients import narrowed, product_of
from w4gemm.api.modes import refuse_fp8_gradients
from w4gemm.api.operator_arguments import (
    EPILOGUE,
    WEIGHT,
    empty_result,
    flat_epilogue,
    flat_weight,
    keep_weight,
    kept_weight,
    named,
    nested_epilogue,
    nested_weight,
    schema,
)
from w4gemm.api.product import launch
from w4gemm.core.autocast import without_autocast
from w4gemm.core.epilogue import NO_OPERANDS, PLAIN, Epilogue, EpilogueOperands, replaced
from w4gemm.kernels import Operands
from w4gemm.kernels.arguments import ExpertRows
from w4gemm.kernels.cpu.matmul import matmul
from w4gemm.weights.weight import QuantizedWeight

_DENSE_BYTES = 256 * 2**20
"""Largest number of bytes of experts that are dequantized together, temporaries included."""
_BYTES_PER_WEIGHT = 16
"""Upper limit of the bytes for each number of a weight while it is dequantized."""
_FLOAT32 = Epilogue(out_dtype=torch.float32)

_ROWS = {"starts": "Tensor", "ends": "Tensor"}
_OF_ROWS = {**_ROWS, "indices": "Tensor?", "settled": "int"}
_PLAN = {"config": "str", "expected": "int", "batch_invariant": "bool"}
_GROUPED = {"x": "Tensor", **_OF_ROWS, **WEIGHT, **EPILOGUE, **_PLAN}
_GROUPED_DX = {"grad": "Tensor", **_ROWS, **WEIGHT}
_Grouped, _GroupedDx = named(_GROUPED), named(_GROUPED_DX)


def product(call: Call, epilogue: Epilogue, operands: EpilogueOperands) -> torch.Tensor:
    """Return the operator's product (rows, columns) for the x and w of a call, with this epilogue and its operands."""
    flat = _Grouped(
        call.x.reshape(-1, call.w.k), *call.rows, **flat_weight(call.w), **flat_epilogue(epilogue, operands)
    )
    plan = {"config": call.config, "expected": call.expected, "batch_invariant": call.batch_invariant}
    return torch.ops.w4gemm.grouped_linear(*replaced(flat, **plan))


def differentiable(call: Call) -> torch.Tensor:
    """Return the result of a call that needs gradients. PyTorch's operators compute the epilogue. Rows of no expert are
    zero and give no gradients.

    Raises:
        NotImplementedError: if x is fp8.
    """
    if call.x.dtype == FP8:
        refuse_fp8_gradients(call.x, call.operands)
    if _is_plain(call.epilogue):
        return product(call, call.epilogue, call.operands).view(call.shape)
    sums = product(call, _FLOAT32, NO_OPERANDS)
    owner, owned = _owners(call.rows.starts, call.rows.ends, sums.shape[0])
    operands = call.operands.of_expert(lambda t: t[owner])
    if operands.expert_scale is not None:
        operands = replaced(operands, expert_scale=operands.expert_scale[:, None])
    d = call.epilogue.apply(torch.where(owned, sums, 0.0), operands)
    return torch.where(owned, d, 0.0).to(call.epilogue.result_dtype(call.x.dtype)).view(call.shape)


def _is_plain(epilogue: Epilogue) -> bool:
    return replaced(epilogue, out_dtype=None) == PLAIN


def _owners(starts: torch.Tensor, ends: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the expert of each of m rows, int64 (m,), and bool (m, 1), True for rows of an expert."""
    rows = torch.arange(m, dtype=torch.int32, device=starts.device)
    owner = (torch.searchsorted(starts, rows, right=True) - 1).clamp(min=0)
    return owner, ((rows >= starts[owner]) & (rows < ends[owner]))[:, None]


def owned_rows(starts: torch.Tensor, ends: torch.Tensor, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """Return bool (*shape, 1), True for rows of an expert."""
    return _owners(starts, ends, math.prod(shape))[1].view(*shape, 1)


# --- the operators ---------------------------------------------------------------------------------------------------

_READS_ON_HOST = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
torch.library.define("w4gemm::grouped_linear", schema(_GROUPED))
torch.library.define("w4gemm::grouped_linear_dx", schema(_GROUPED_DX), tags=_READS_ON_HOST)


@torch.library.impl("w4gemm::grouped_linear", ("cpu", "cuda"))
def _grouped_op(*flat: Any) -> torch.Tensor:
    args = _Grouped(*flat)
    epilogue, operands = nested_epilogue(args)
    out, rows = empty_result(args, epilogue), ExpertRows(args.starts, args.ends, args.indices, args.settled)
    weight = nested_weight(args, len(args.starts))
    launched = Operands(args.x, tuple(args.weight), out, operands, rows)
    launch(weight, launched, epilogue, args.config, args.batch_invariant, args.expected)
    return out


@torch.library.register_fake("w4gemm::grouped_linear")
def _grouped_fake(*flat: Any) -> torch.Tensor:
    args = _Grouped(*flat)
    return empty_result(args, nested_epilogue(args)[0])


@torch.library.impl("w4gemm::grouped_linear_dx", ("cpu", "cuda"))
@without_autocast
def _grouped_dx_op(*flat: Any) -> torch.Tensor:
    args = _GroupedDx(*flat)
    packed, grad = nested_weight(args, len(args.starts)), args.grad
    w = QuantizedWeight(packed.format, packed.n, packed.k, packed.layout, tuple(args.weight), experts=packed.experts)
    bounds = torch.stack((args.starts, args.ends), 1).tolist()

    def product(rows: torch.Tensor) -> torch.Tensor:
        dx = grad.new_zeros((grad.shape[0], args.k))
        for first, dense in _dequantized(w, [e for e, (start, end) in enumerate(bounds) if end > start], rows.dtype):
            for weight, (start, end) in zip(dense, bounds[first:], strict=False):
                if end > start and rows.dtype != grad.dtype:
                    dx[start:end] = torch.mm(rows[start:end], weight, out_dtype=torch.float32)
                elif end > start:
                    matmul(rows[start:end], weight, dx[start:end])
        return dx

    return product_of(grad, product)


def _dequantized(w: QuantizedWeight, needed: list[int], dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the first expert and the dense weights (count, n, k) of runs of experts. Together the runs hold every
    expert of ``needed``."""
    most = max(1, _DENSE_BYTES // (_BYTES_PER_WEIGHT * w.n * w.k))
    end = 0
    for first in needed:
        if first >= end:
            end = min(w.experts, first + most)
            some = w.as_one(first, end)
            if some is None:  # the layout pads n
                end = first + 1
                some = w.expert(first)
            yield first, some.dequantize(dtype).view(-1, w.n, w.k)


@torch.library.register_fake("w4gemm::grouped_linear_dx")
def _grouped_dx_fake(*flat: Any) -> torch.Tensor:
    args = _GroupedDx(*flat)
    return args.grad.new_empty((args.grad.shape[0], args.k))


# --- their gradients -------------------------------------------------------------------------------------------------


def _save_grouped(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    args = _Grouped(*inputs)
    keep_weight(ctx, args, args.starts, args.ends, args.indices)
    ctx.plain, ctx.x = _is_plain(nested_epilogue(args)[0]), (args.x.shape[0], args.x.dtype)


def _grouped_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    if not ctx.plain:
        raise NotImplementedError("torch.ops.w4gemm.grouped_linear has gradients without an epilogue only")
    (weight, (starts, ends, indices)), (x_rows, dtype) = kept_weight(ctx, 3), ctx.x
    dx = torch.ops.w4gemm.grouped_linear_dx(*_GroupedDx(narrowed(grad, dtype), starts, ends, **weight))
    if indices is not None:  # in the order of the rows, where index_add_ would be in any order
        sums = torch.zeros((x_rows, dx.shape[1]), dtype=torch.float32, device=dx.device)
        dx = sums.index_put((indices,), dx.float(), accumulate=True)
    return _Grouped(x=dx.to(dtype), weight=[None] * len(weight["weight"]))


def _save_grouped_dx(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    args = _GroupedDx(*inputs)
    keep_weight(ctx, args, args.starts, args.ends)


def _grouped_dx_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    weight, (starts, ends) = kept_weight(ctx, 2)
    _, owned = _owners(starts, ends, grad.shape[0])

    def product(rows: torch.Tensor) -> torch.Tensor:
        epilogue = PLAIN if rows.dtype == grad.dtype else _FLOAT32
        plan = {"settled": 0, "config": "", "expected": 0, "batch_invariant": False}
        flat = _Grouped(rows, starts, ends, **weight, **flat_epilogue(epilogue, NO_OPERANDS), **plan)
        return torch.where(owned, torch.ops.w4gemm.grouped_linear(*flat), 0.0)

    d = product_of(grad, product)
    return _GroupedDx(d, weight=[None] * len(weight["weight"]))


torch.library.register_autograd("w4gemm::grouped_linear", _grouped_backward, setup_context=_save_grouped)
torch.library.register_autograd("w4gemm::grouped_linear_dx", _grouped_dx_backward, setup_context=_save_grouped_dx)
