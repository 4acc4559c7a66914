"""The boundary for mixtures of experts: :func:`grouped_linear` and :func:`masked_linear`, as :mod:`w4gemm.ops`."""

from __future__ import annotations

from typing import Any

import torch

from w4gemm import arguments
from w4gemm.config import GemmConfig
from w4gemm.epilogue import Epilogue, EpilogueOperands
from w4gemm.kernels import Operands
from w4gemm.kernels.arguments import ExpertRows
from w4gemm.modes import needs_dispatcher, refuse_duals, requires_grad
from w4gemm.ops import _FUSED, _WEIGHT, _flat, _parse_format, _run, _unflat, _Weight, quantized
from w4gemm.packing.layouts import FP8_LAYOUT
from w4gemm.weight import QuantizedWeight


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
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    config: GemmConfig | str | None = None,
) -> torch.Tensor:
    """For every expert e, with its rows r = m_offsets[e] .. m_offsets[e + 1]:
    act(alpha * token_scale[r] * (x[r] @ w[e].T) + bias[e]) + residual[r], in one launch.

    On a GPU ``m_offsets`` is read by the device alone: nothing synchronizes, and a CUDA graph of a call serves any
    division of the rows. Experts may have no rows, or all of them.

    Args:
        x: activations (total_m, k), sorted by expert, of the dtypes that :func:`w4gemm.linear` takes.
        w: the weights of up to 512 experts, see :meth:`QuantizedWeight.stack`; on x's device.
        m_offsets: int32 (experts + 1) on x's device, ascending from 0 or more to total_m or less. **Not checked**,
            since that would take a synchronization; others are undefined behaviour.
        bias: (experts, n) of x's dtype, or None.
        indices: int32 or int64 (total_m), to take row i from x[indices[i]]; x is then (any number, k), and token_scale
            goes with it. Their values are not checked either. Kernels on a GPU read the rows where they lie, if those
            and k are multiples of 16 bytes; else x is gathered first.
        alpha, activation, residual, token_scale, out_dtype, out, config: as for :func:`w4gemm.linear`. Without a config
            it is chosen for total_m / experts tokens each.

    Returns:
        (total_m, n), or (total_m, n / 2) with "silu_mul"; ``out`` if given. Rows that no expert has are not written.
        There are no gradients.

    Raises:
        TypeError, ValueError: for a bad argument, naming it, what was wanted and what came.
        UnsupportedError: if no kernel can run this here.
        NotImplementedError: where a gradient would be needed.
    """
    if isinstance(w, QuantizedWeight) and w.layout == FP8_LAYOUT:
        x, token_scale, out_dtype = quantized(x, token_scale, out_dtype)
    arguments.check_grouped(x, w, bias, out_dtype)
    if x.dim() != 2:
        raise ValueError(f"x: wanted shape (total_m, k), got {tuple(x.shape)}")
    arguments.check_counts("m_offsets", m_offsets, w.experts + 1, x)
    if indices is not None:
        indices = arguments.checked_indices(indices, x)
    rows = ExpertRows(m_offsets[:-1], m_offsets[1:], indices)
    given = EpilogueOperands(alpha, bias, residual, token_scale)
    return _grouped(x, w, rows, given, activation, out_dtype, out, config)


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
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    config: GemmConfig | str | None = None,
) -> torch.Tensor:
    """:func:`grouped_linear` for rows that lie apart: of x (experts, max_m, k) expert e has the first counts[e].

    Args:
        x: contiguous (experts, max_m, k).
        counts: int32 (experts) on x's device, each 0 .. max_m; not checked.
        bias, alpha, activation, residual, token_scale, out_dtype, out, config: as for :func:`grouped_linear`.

    Returns:
        (experts, max_m, n), or n / 2; rows from counts[e] on are not written.
    """
    if isinstance(w, QuantizedWeight) and w.layout == FP8_LAYOUT:
        x, token_scale, out_dtype = quantized(x, token_scale, out_dtype)
    arguments.check_grouped(x, w, bias, out_dtype)
    if x.dim() != 3 or x.shape[0] != w.experts or not x.is_contiguous():
        raise ValueError(
            f"x: wanted a contiguous tensor (experts, max_m, k) with {w.experts} experts, got {tuple(x.shape)}"
        )
    arguments.check_counts("counts", counts, w.experts, x)
    rows = max(1, x.shape[1])  # arange wants a step
    starts = torch.arange(0, w.experts * rows, rows, dtype=torch.int32, device=x.device)
    given = EpilogueOperands(alpha, bias, residual, token_scale)
    return _grouped(x, w, ExpertRows(starts, starts + counts), given, activation, out_dtype, out, config)


def _grouped(
    x: torch.Tensor,
    w: QuantizedWeight,
    rows: ExpertRows,
    given: EpilogueOperands,
    activation: str | None,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
    config: GemmConfig | str | None,
) -> torch.Tensor:
    text = "" if config is None else config if isinstance(config, str) else arguments.config_text(config)
    shape = x.shape[:-1] if rows.indices is None else rows.indices.shape
    epilogue, fused = arguments.fused(x, w, given, activation, out_dtype, shape)
    if torch.is_grad_enabled() and requires_grad(x, fused):
        raise NotImplementedError("x: gradients of a grouped linear are not implemented; call it under no_grad")
    refuse_duals(x, fused)
    columns = epilogue.columns(w.n)
    flat = x.view(-1, w.k)
    if out is not None:
        arguments.check_out(out, x, w.n, epilogue, fused, shape)
    if needs_dispatcher(x, fused):
        weight = (list(w.tensors), w.format.name, w.layout, w.n, w.k)
        d = torch.ops.w4gemm.grouped_linear(flat, *rows, *weight, *_flat(epilogue, fused), text)
        d = d.view(*shape, columns)
        return d if out is None else out.copy_(d)
    if out is None:
        out = torch.empty((*shape, columns), dtype=epilogue.result_dtype(x.dtype), device=x.device)
    _run(Operands(flat, w.tensors, out.view(-1, columns), fused, rows), w, epilogue, text, False)
    return out


# --- the operator --------------------------------------------------------------------------------------------------

torch.library.define(
    "w4gemm::grouped_linear",
    f"(Tensor x, Tensor starts, Tensor ends, Tensor? indices, {_WEIGHT}, {_FUSED}, str config) -> Tensor",
)


@torch.library.impl("w4gemm::grouped_linear", ("cpu", "cuda"))
def _grouped_op(x, starts, ends, indices, weight, format, layout, n, k, *rest):  # type: ignore[no-untyped-def]
    *flat, config = rest
    out, epilogue, fused = _result(x, indices, n, flat)
    w = _Weight(_parse_format(format), layout, n)
    _run(Operands(x, tuple(weight), out, fused, ExpertRows(starts, ends, indices)), w, epilogue, config, False)
    return out


@torch.library.register_fake("w4gemm::grouped_linear")
def _grouped_fake(x, starts, ends, indices, weight, format, layout, n, k, *rest):  # type: ignore[no-untyped-def]
    return _result(x, indices, n, rest[:-1])[0]


def _result(
    x: torch.Tensor, indices: torch.Tensor | None, n: int, flat: Any
) -> tuple[torch.Tensor, Epilogue, EpilogueOperands]:
    epilogue, fused = _unflat(*flat)
    shape = ((x if indices is None else indices).shape[0], epilogue.columns(n))
    return x.new_empty(shape, dtype=epilogue.result_dtype(x.dtype)), epilogue, fused
