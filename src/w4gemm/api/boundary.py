"""The way from checked tensors to a launch, which :func:`w4gemm.linear`, :func:`w4gemm.grouped_linear`,
:func:`w4gemm.masked_linear`, their operators and :class:`w4gemm.MixedGemm` share.

:func:`checked` makes a :class:`Call` of what a user passed, with x quantized if the weight asks for that.
:func:`compute` runs a call in plain eager mode. :func:`run` looks up the plan for the operands of a launch, and
:func:`launch` launches it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from w4gemm.api import arguments
from w4gemm.api.activations import quantize_activations
from w4gemm.api.gather import gather_columns
from w4gemm.api.modes import current_gpu, refuse_fp8_gradients
from w4gemm.choice import PlanKey, plan_for
from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import Epilogue, EpilogueOperands, replaced
from w4gemm.core.errors import require_bool
from w4gemm.kernels import Operands
from w4gemm.kernels.arguments import NO_ROWS, ExpertRows
from w4gemm.kernels.gpu import takes_rows
from w4gemm.packing.packed_shape import PackedShape
from w4gemm.weights.weight import QuantizedWeight


class Call(NamedTuple):
    """A product whose arguments passed every check, except ``out``."""

    x: torch.Tensor
    """(..., k), as it is multiplied: fp8 if it was quantized."""
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
    given: EpilogueOperands,
    activation: str | None,
    out_dtype: torch.dtype | None,
    config: GemmConfig | str | None = None,
    *,
    batch_invariant: bool = False,
    rows: ExpertRows = NO_ROWS,
    expected: int = 0,
) -> Call:
    """Check the arguments of a product besides x and w, which :func:`w4gemm.api.arguments.check` has checked.

    If w has ``activations="fp8"`` and x is not fp8, x is quantized, and the result keeps the dtype that x had.

    Args:
        given: the tensors and the alpha of the epilogue, as the user passed them.
        rows, expected: as the fields of :class:`Call`.
    """
    text = "" if config is None else arguments.checked_config(config)
    require_bool("batch_invariant", batch_invariant)
    if w.activations == "fp8" and x.dtype != arguments.FP8:
        if given.token_scale is not None:
            raise TypeError(f"token_scale: wanted None for x of {x.dtype}, which is quantized here")
        if x.requires_grad and torch.is_grad_enabled():
            refuse_fp8_gradients(x, given)
        out_dtype = out_dtype or x.dtype
        bias = arguments.bias_beside_fp8(given.bias, x, out_dtype)
        x, token_scale = quantize_activations(x)
        given = replaced(given, bias=bias, token_scale=token_scale)
    shape = x.shape[:-1] if rows.indices is None else rows.indices.shape
    epilogue, operands = arguments.checked_epilogue(x, w, given, activation, out_dtype, shape)
    return Call(x, w, epilogue, operands, (*shape, epilogue.columns(w.n)), text, batch_invariant, rows, expected)


def compute(call: Call, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the result of a call in plain eager mode, written to ``out`` if given, which is checked here."""
    x, w = call.x, call.w
    if out is None:
        dtype = call.dtype  # plain numbers take two thirds of the time of a tuple with a dtype
        out = x.new_empty(*call.shape) if dtype is x.dtype else x.new_empty(call.shape, dtype=dtype)
    else:
        call.check_out(out)
    flat = len(call.shape) == 2
    rows, d = (x, out) if flat else (x.reshape(-1, w.k), out.view(-1, call.shape[-1]))
    if w.perm is not None:
        rows = gather_columns(rows, w.perm)
    run(
        w.packed,
        Operands(rows, w.tensors, d, call.operands, call.rows),
        call.epilogue,
        call.config,
        call.batch_invariant,
        call.expected,
    )
    return out


def run(
    weight: PackedShape,
    operands: Operands,
    epilogue: Epilogue,
    config: str = "",
    batch_invariant: bool = False,
    expected: int = 0,
) -> None:
    """Look up the plan for checked operands and launch it.

    Args:
        expected: as the field of :class:`Call`.
    """
    x, m, device = operands.x, operands.out.shape[0], operands.x.device
    if m == 0:
        return
    gathered = operands.rows.indices is not None
    in_place = operands.epilogue.block_scale is None and x.stride(1) == 1 and takes_rows(x)
    if gathered and device.type == "cuda" and not in_place:
        operands, gathered = operands.gathered_first(), False
    rows = expected or m
    key = PlanKey.of(weight, rows, x.dtype, epilogue, batch_invariant, gathered, config=config, device=device)
    launch(plan_for(key).launch, operands, device)


def launch(function: Callable[[Operands], None], operands: Operands, device: torch.device) -> None:
    """Launch a plan on x's device, which need not be the current one. There is at least one row."""
    x = operands.x
    if not x.is_contiguous() and not _is_matrix(x):
        operands = operands._replace(x=torch.empty(x.shape, dtype=x.dtype, device=device).copy_(x))
    if _several_gpus() and device.type == "cuda" and device.index != current_gpu():
        with torch.cuda.device(device):
            function(operands)
    else:
        function(operands)


def _is_matrix(x: torch.Tensor) -> bool:
    """True if the columns of x (m, k) are contiguous and its rows do not overlap; after ``expand`` rows overlap."""
    row, column = x.stride()
    return column == 1 and (row >= x.shape[1] or x.shape[0] == 1)


@functools.cache
def _several_gpus() -> bool:
    """True if several GPUs are visible, so that x may be on a GPU that is not current. It guards the query of the
    current device, which takes about 1 us."""
    return torch.cuda.device_count() > 1
