"""Products of mixtures of experts: :func:`grouped_linear` of sorted rows, :func:`masked_linear` of padded ones."""

from __future__ import annotations

from typing import Any

import torch

from w4gemm.api import arguments
from w4gemm.api.call import Call, checked, compute
from w4gemm.api.gather import gather_columns_of_experts
from w4gemm.api.modes import needs_dispatcher, refuse_duals, refuse_transforms, requires_grad
from w4gemm.api.operators import differentiable, owned_rows, product
from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import EpilogueOperands, replaced
from w4gemm.core.errors import is_int, require_bool
from w4gemm.kernels.arguments import ExpertRows
from w4gemm.weights.weight import QuantizedWeight


def grouped_linear(
    x: torch.Tensor,
    w: QuantizedWeight,
    m_offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    indices: torch.Tensor | None = None,
    alpha: float | torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    token_scale: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    config: GemmConfig | str | None = None,
    settled: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Multiply each expert's rows of x by the expert's weight, in one launch.

    Expert e has the rows r = m_offsets[e] .. m_offsets[e + 1] - 1, and row r of the result is
    act(alpha * expert_scale[e] * token_scale[r] * (x[r] @ w[e].T) + bias[e]) + residual[r].

    On a GPU only the device reads ``m_offsets``. So nothing synchronizes, and a CUDA graph of a call serves any
    division of the rows. An expert may have no rows, or all of them.

    Args:
        x: activations (total_m, k), sorted by expert, of the dtypes that :func:`w4gemm.linear` takes.
        w: the weights (experts, n, k) of up to 1024 experts, as :meth:`QuantizedWeight.stack` makes them; on x's
            device.
        m_offsets: int32 (experts + 1,) on x's device, ascending, within 0 .. total_m. On a GPU the values are **not
            checked**, because that would take a synchronization; wrong ones are undefined behaviour.
        bias: (experts, n) of x's dtype, or None.
        indices: int32 or int64 (total_m,), or None. Row i of the result is computed from x[indices[i]] and
            token_scale[indices[i]], and x has any number of rows. On a GPU the values are not checked. The kernel reads
            the rows of x in place if their address, stride and length are multiples of 16 bytes and that is predicted
            to be faster; otherwise the rows are copied first. A forced config reads them in place wherever it can.
        expert_scale: float32 (experts,), or None: a factor for each expert, for weights that were quantized with a
            scale for each tensor.
        alpha, activation, residual, token_scale, out_dtype, out, config: as for :func:`w4gemm.linear`, with total_m
            rows. The config is chosen for total_m / experts rows of an expert.
        settled: True if another launch, such as the one that computes x, comes between this launch and the one that
            wrote ``m_offsets`` and ``indices``. On Hopper the kernel then starts early (programmatic dependent launch):
            it reads them and requests weights while the launch before it still runs. That launch is a product of
            w4gemm's, or its ``quantize_activations``, or one without programmatic dependent launch, or one that calls
            ``griddepcontrol.launch_dependents`` only after its own ``griddepcontrol.wait``.
        batch_invariant: True if the bits of a row of the result must depend on that row and its expert alone: neither
            on the other rows and their experts, nor on total_m or how x is laid out.

    Returns:
        (total_m, n), or (total_m, n / 2) with a gated activation; ``out`` if given. Rows that no expert has are not
        written. Gradients flow to x, bias, alpha, expert_scale and residual, never to w; a backward pass synchronizes.

    Raises:
        TypeError, ValueError: for a bad argument; the message names it, what was wanted and what came.
        UnsupportedError: if no kernel can run this here; the message has each kernel's reason.
        NotImplementedError: if forward-mode derivatives, or gradients with fp8 activations, would be needed.

    Examples:
        >>> stack = w4gemm.QuantizedWeight.stack([w4gemm.quantize(torch.randn(256, 64)) for _ in range(4)])
        >>> m_offsets = torch.tensor([0, 3, 3, 9, 10], dtype=torch.int32)  # the second expert has no rows
        >>> w4gemm.grouped_linear(torch.randn(10, 64), stack, m_offsets).shape
        torch.Size([10, 256])
    """
    arguments.check(x, w, grouped=True)
    if x.dim() != 2:
        raise ValueError(f"x: wanted shape (total_m, k), got {tuple(x.shape)}")
    if indices is not None:
        indices = arguments.checked_indices(indices, x)
    total_m = (x if indices is None else indices).shape[0]
    arguments.check_offsets(m_offsets, w.experts, total_m, x.device)
    require_bool("settled", settled)
    rows = ExpertRows(m_offsets[:-1], m_offsets[1:], indices, int(settled))
    operands = EpilogueOperands(alpha, bias, residual, token_scale, expert_scale)
    call = checked(x, w, operands, activation, out_dtype, config, batch_invariant=batch_invariant, rows=rows)
    return _computed(call, out)


def masked_linear(
    x: torch.Tensor,
    w: QuantizedWeight,
    counts: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    alpha: float | torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    token_scale: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    config: GemmConfig | str | None = None,
    expected_m: int | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Multiply each expert's rows of x by the expert's weight, in one launch, if the rows are padded: expert e has the
    first counts[e] rows of x[e].

    Args:
        x: activations (experts, max_m, k), contiguous, of the dtypes that :func:`w4gemm.linear` takes.
        w: the weights (experts, n, k), as for :func:`grouped_linear`.
        counts: int32 (experts,) on x's device, each within 0 .. max_m. On a GPU the values are **not checked**;
            wrong ones are undefined behaviour.
        bias, expert_scale: as for :func:`grouped_linear`.
        alpha, activation, residual, token_scale, out_dtype, out, config: as for :func:`w4gemm.linear`, with
            (experts, max_m) rows.
        expected_m: rows that an expert will have on average, at least 1. The config is chosen for them; None for max_m.
            It changes no result but by rounding.
        batch_invariant: as for :func:`grouped_linear`, which then gives a row of an expert the same bits.

    Returns:
        (experts, max_m, n), or (experts, max_m, n / 2) with a gated activation; ``out`` if given. Rows from counts[e]
        on are not written. Gradients flow as from :func:`grouped_linear`.

    Raises:
        TypeError, ValueError, UnsupportedError, NotImplementedError: as from :func:`grouped_linear`.

    Examples:
        >>> stack = w4gemm.QuantizedWeight.stack([w4gemm.quantize(torch.randn(256, 64)) for _ in range(4)])
        >>> counts = torch.tensor([3, 0, 8, 1], dtype=torch.int32)
        >>> w4gemm.masked_linear(torch.randn(4, 8, 64), stack, counts).shape
        torch.Size([4, 8, 256])
    """
    arguments.check(x, w, grouped=True)
    if x.dim() != 3 or x.shape[0] != w.experts or not x.is_contiguous():
        raise ValueError(
            f"x: wanted a contiguous tensor (experts, max_m, k) with {w.experts} experts, got {tuple(x.shape)} of "
            f"strides {x.stride()}"
        )
    arguments.check_counts(counts, x)
    if expected_m is not None and not (is_int(expected_m) and expected_m >= 1):
        raise ValueError(f"expected_m: wanted an int from 1 on or None, got {expected_m!r}")
    rows = max(1, x.shape[1])  # arange wants a step
    expected = w.experts * int(min(expected_m or rows, rows))
    starts = torch.arange(0, w.experts * rows, rows, dtype=torch.int32, device=x.device)
    operands = EpilogueOperands(alpha, bias, residual, token_scale, expert_scale)
    apart = ExpertRows(starts, starts + counts)
    options: dict[str, Any] = {"batch_invariant": batch_invariant, "rows": apart, "expected": expected}
    return _computed(checked(x, w, operands, activation, out_dtype, config, **options), out)


def _in_packed_order(call: Call) -> Call:
    """Return the call of a weight in act-order with rows of x in the order of the result, each row's columns in the
    order of its expert."""
    w, rows, operands = call.w, call.rows, call.operands
    assert w.perm is not None
    x, indices, scale = call.x.reshape(-1, w.k), rows.indices, operands.token_scale
    if indices is not None and scale is not None:
        operands = replaced(operands, token_scale=scale.index_select(0, indices))
    x = gather_columns_of_experts(x, w.perm, rows.starts, indices)
    return call._replace(x=x, operands=operands, rows=rows._replace(indices=None))


def _computed(call: Call, out: torch.Tensor | None) -> torch.Tensor:
    x, operands = call.x, call.operands
    refuse_duals(x, operands, "experts")
    if call.w.perm is not None:
        call = _in_packed_order(call)
        x, operands = call.x, call.operands
    if not needs_dispatcher(x, operands):
        return compute(call, out)
    refuse_transforms("experts")
    if torch.is_grad_enabled() and requires_grad(x, operands):
        if out is not None:
            raise ValueError("out: wanted None where a gradient is needed; call without out, or under no_grad")
        return differentiable(call)
    if out is not None:
        call.check_out(out)
    d = product(call, x.reshape(-1, call.w.k), call.epilogue, operands).view(call.shape)
    if out is None:
        return d
    owned = owned_rows(call.rows.starts, call.rows.ends, call.shape[:-1])
    return out.copy_(torch.where(owned, d, out))  # what other rows hold stays, as where the launch writes to out
