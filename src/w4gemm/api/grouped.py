"""The boundary for mixtures of experts: :func:`grouped_linear`, :func:`masked_linear` and their operator."""

from __future__ import annotations

from typing import Any

import torch

from w4gemm.api import arguments, boundary
from w4gemm.api.boundary import Call
from w4gemm.api.modes import needs_dispatcher, refuse_duals, requires_grad
from w4gemm.api.operator_arguments import (
    EPILOGUE,
    WEIGHT,
    flat_epilogue,
    flat_weight,
    named,
    nested_epilogue,
    nested_weight,
    schema,
)
from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import Epilogue, EpilogueOperands
from w4gemm.kernels import Operands
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
) -> torch.Tensor:
    """Compute, in one launch, for every expert e and its rows r = m_offsets[e] .. m_offsets[e + 1]:
    act(alpha * expert_scale[e] * token_scale[r] * (x[r] @ w[e].T) + bias[e]) + residual[r].

    On a GPU the device alone reads ``m_offsets``: nothing synchronizes, and a CUDA graph of a call serves any division
    of the rows. Experts may have no rows, or all of them.

    Args:
        x: activations (total_m, k), sorted by expert, of the dtypes that :func:`w4gemm.linear` takes.
        w: the weights of up to 512 experts, see :meth:`QuantizedWeight.stack`; on x's device.
        m_offsets: int32 (experts + 1,) on x's device, ascending from 0 or more to total_m or less. **Not checked**,
            because that would take a synchronization; other values are undefined behaviour.
        bias: (experts, n) of x's dtype, or None.
        indices: int32 or int64 (total_m,). Row i of the product is computed from x[indices[i]] and
            token_scale[indices[i]]; x has any number of rows. Values are not checked. A GPU kernel reads the rows in
            place if x's address, row stride and row length are multiples of 16 bytes and this is predicted to be
            faster; otherwise the rows are copied first.
        expert_scale: float32 (experts,), or None; for weights whose tensors have a scale each.
        alpha, activation, residual, token_scale, out_dtype, out, config: as for :func:`w4gemm.linear`. Without a config
            it is chosen for total_m / experts tokens each.

    Returns:
        (total_m, n), or (total_m, n / 2) with "silu_mul"; ``out`` if given. Rows of no expert are not written.
        There are no gradients.

    Raises:
        TypeError, ValueError: for a bad argument, naming it, what was wanted and what came.
        UnsupportedError: if no kernel can run this here.
        NotImplementedError: if a gradient would be needed.
    """
    arguments.check(x, w, grouped=True)
    if x.dim() != 2:
        raise ValueError(f"x: wanted shape (total_m, k), got {tuple(x.shape)}")
    arguments.check_counts("m_offsets", m_offsets, w.experts + 1, x)
    if indices is not None:
        indices = arguments.checked_indices(indices, x)
    rows = ExpertRows(m_offsets[:-1], m_offsets[1:], indices)
    given = EpilogueOperands(alpha, bias, residual, token_scale, expert_scale)
    return _computed(boundary.checked(x, w, given, activation, out_dtype, config, rows=rows), out)


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
) -> torch.Tensor:
    """Compute :func:`grouped_linear` for padded rows: expert e has the first counts[e] rows of x[e].

    Args:
        x: contiguous (experts, max_m, k).
        counts: int32 (experts,) on x's device, each 0 .. max_m; not checked.
        bias, alpha, activation, residual, token_scale, expert_scale, out_dtype, out, config: as for
            :func:`grouped_linear`.

    Returns:
        (experts, max_m, n), or n / 2; rows from counts[e] on are not written.
    """
    arguments.check(x, w, grouped=True)
    if x.dim() != 3 or x.shape[0] != w.experts or not x.is_contiguous():
        raise ValueError(
            f"x: wanted a contiguous tensor (experts, max_m, k) with {w.experts} experts, got {tuple(x.shape)}"
        )
    arguments.check_counts("counts", counts, w.experts, x)
    rows = max(1, x.shape[1])  # arange wants a step
    starts = torch.arange(0, w.experts * rows, rows, dtype=torch.int32, device=x.device)
    given = EpilogueOperands(alpha, bias, residual, token_scale, expert_scale)
    apart = ExpertRows(starts, starts + counts)
    return _computed(boundary.checked(x, w, given, activation, out_dtype, config, rows=apart), out)


def _computed(call: Call, out: torch.Tensor | None) -> torch.Tensor:
    x, w, operands = call.x, call.w, call.operands
    if torch.is_grad_enabled() and requires_grad(x, operands):
        raise NotImplementedError("x: gradients of a grouped linear are not implemented; call it under no_grad")
    refuse_duals(x, operands)
    if not needs_dispatcher(x, operands):
        return boundary.compute(call, out)
    if out is not None:
        call.check_out(out)
    flat = _Grouped(x.view(-1, w.k), *call.rows, **flat_weight(w), **flat_epilogue(call.epilogue, operands))
    d = torch.ops.w4gemm.grouped_linear(*flat._replace(config=call.config)).view(call.shape)
    return d if out is None else out.copy_(d)


# --- the operator --------------------------------------------------------------------------------------------------

_ROWS = {"starts": "Tensor", "ends": "Tensor", "indices": "Tensor?"}
_GROUPED = {"x": "Tensor", **_ROWS, **WEIGHT, **EPILOGUE, "config": "str"}
_Grouped = named(_GROUPED)

torch.library.define("w4gemm::grouped_linear", schema(_GROUPED))


@torch.library.impl("w4gemm::grouped_linear", ("cpu", "cuda"))
def _grouped_op(*flat: Any) -> torch.Tensor:
    given = _Grouped(*flat)
    epilogue, operands = nested_epilogue(given)
    out, rows = _empty_result(given, epilogue), ExpertRows(given.starts, given.ends, given.indices)
    weight = nested_weight(given, len(given.starts))
    boundary.run(weight, Operands(given.x, tuple(given.weight), out, operands, rows), epilogue, given.config)
    return out


@torch.library.register_fake("w4gemm::grouped_linear")
def _grouped_fake(*flat: Any) -> torch.Tensor:
    given = _Grouped(*flat)
    return _empty_result(given, nested_epilogue(given)[0])


def _empty_result(given: Any, epilogue: Epilogue) -> torch.Tensor:
    x: torch.Tensor = given.x
    m = (x if given.indices is None else given.indices).shape[0]
    return x.new_empty((m, epilogue.columns(given.n)), dtype=epilogue.result_dtype(x.dtype))
