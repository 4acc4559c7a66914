"""A call with checked arguments. :func:`w4gemm.linear`, :func:`w4gemm.grouped_linear` and :func:`w4gemm.masked_linear`
make one with :func:`checked`, and run it with :func:`compute` in plain eager mode."""

from __future__ import annotations

from typing import NamedTuple

import torch

from w4gemm.api import arguments
from w4gemm.api.activations import quantized
from w4gemm.api.gather import gather_columns
from w4gemm.api.modes import refuse_duals, refuse_fp8_gradients
from w4gemm.api.product import launch
from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import Epilogue, EpilogueOperands, replaced
from w4gemm.core.errors import require_bool
from w4gemm.kernels import Operands
from w4gemm.kernels.arguments import NO_ROWS, ExpertRows
from w4gemm.weights.weight import QuantizedWeight


class Call(NamedTuple):
    """A product with checked arguments; ``out`` is checked later."""

    x: torch.Tensor
    """(..., k); fp8 if it was quantized."""
    w: QuantizedWeight
    epilogue: Epilogue
    operands: EpilogueOperands
    shape: tuple[int, ...]
    """Shape of the result."""
    config: str = ""
    """A forced config, or the empty string."""
    batch_invariant: bool = False
    rows: ExpertRows = NO_ROWS
    """The rows of each expert; ``NO_ROWS`` for a single weight."""
    expected: int = 0
    """Number of rows of all experts that the plan is chosen for; 0 for the number of rows of the result."""

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the result."""
        return self.epilogue.result_dtype(self.x.dtype)

    def check_out(self, out: torch.Tensor) -> None:
        """Raise TypeError or ValueError unless the result can be written to ``out``."""
        w, rows = self.w, self.rows
        read = {"x": self.x, "w": (*w.tensors, w.perm), "m_offsets": (rows.starts, rows.ends), "indices": rows.indices}
        arguments.check_out(out, read | self.operands._asdict(), self.epilogue, self.x, self.shape)


def checked(
    x: torch.Tensor,
    w: QuantizedWeight,
    operands: EpilogueOperands,
    activation: str | None,
    out_dtype: torch.dtype | None,
    config: GemmConfig | str | None = None,
    *,
    batch_invariant: bool = False,
    rows: ExpertRows = NO_ROWS,
    expected: int = 0,
) -> Call:
    """Check the arguments of a product, except x and w, which :func:`w4gemm.api.arguments.check` has checked.

    If w has ``activations="fp8"`` and x is not fp8, x is quantized, and the result keeps the dtype that x had.

    Args:
        operands: the operands as passed by the caller.
        rows, expected: as the fields of :class:`Call`.
    """
    text = "" if config is None else arguments.checked_config(config)
    require_bool("batch_invariant", batch_invariant)
    if w.activations == "fp8" and x.dtype != arguments.FP8:
        if operands.token_scale is not None:
            raise TypeError(f"token_scale: wanted None for x of {x.dtype}, which is quantized here")
        if x.requires_grad and torch.is_grad_enabled():
            refuse_fp8_gradients(x, operands)
        refuse_duals(x, operands, "a product with fp8 activations")
        out_dtype = out_dtype or x.dtype
        bias = arguments.bias_for_fp8(operands.bias, x, out_dtype)
        x, token_scale = quantized(x)
        operands = replaced(operands, bias=bias, token_scale=token_scale)
    shape = x.shape[:-1] if rows.indices is None else rows.indices.shape
    epilogue, operands = arguments.checked_epilogue(x, w, operands, activation, out_dtype, shape)
    return Call(x, w, epilogue, operands, (*shape, epilogue.columns(w.n)), text, batch_invariant, rows, expected)


def compute(call: Call, out: torch.Tensor | None) -> torch.Tensor:
    """Return the result of a call in plain eager mode. It is written to ``out``, which is checked here, or to a new
    tensor if that is None."""
    x, w = call.x, call.w
    if out is None:
        dtype = call.dtype  # plain numbers take two thirds of the time of a tuple with a dtype
        out = x.new_empty(*call.shape) if dtype is x.dtype else x.new_empty(call.shape, dtype=dtype)
    else:
        call.check_out(out)
    flat = len(call.shape) == 2
    rows, d = (x, out) if flat else (x.reshape(-1, w.k), out.view(-1, call.shape[-1]))
    if w.perm is not None and not w.experts:  # of experts, grouped_linear has gathered them
        rows = gather_columns(rows, w.perm)
    launched = Operands(rows, w.tensors, d, call.operands, call.rows)
    launch(w.packed, launched, call.epilogue, call.config, call.batch_invariant, call.expected)
    return out
