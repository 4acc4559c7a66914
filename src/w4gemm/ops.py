"""THE boundary: :func:`linear`. What users pass is checked here and nowhere below.

In plain eager mode ``linear`` runs the kernel itself, since PyTorch's dispatcher would cost as much as the launch.
Under ``torch.compile``, autograd, tensor subclasses and modes it goes through the operator
``torch.ops.w4gemm.linear``, which takes flat tensors and names only.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import NamedTuple

import torch

from w4gemm import arguments, choice
from w4gemm.activations import quantize_activations
from w4gemm.config import GemmConfig
from w4gemm.epilogue import NO_OPERANDS, PLAIN, Epilogue, EpilogueOperands
from w4gemm.formats import WeightFormat
from w4gemm.gather import gather_columns
from w4gemm.kernels import Operands
from w4gemm.kernels.base import selected
from w4gemm.kernels.gpu import takes_rows
from w4gemm.modes import is_plain, needs_dispatcher, refuse_duals, requires_grad
from w4gemm.packing.layouts import FP8_LAYOUT
from w4gemm.weight import QuantizedWeight

_FP8 = torch.float8_e4m3fn
_BIAS = Epilogue(bias=True)


def linear(
    x: torch.Tensor,
    w: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    alpha: float | torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    token_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    config: GemmConfig | str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """act(alpha * token_scale * (x @ w.T) + bias) + residual, computed in float32 and rounded once, without further
    passes.

    On a GPU it runs on the current stream of x's device and does not synchronize, but for the first launch of a config
    with stream-k.

    Args:
        x: activations (..., k), float16 or bfloat16; on the CPU also float32. Any strides; without tokens the result is
            empty and nothing runs. For a weight in the mma8 layout, and on the CPU, also float8_e4m3fn; 16-bit
            activations of such a weight are quantized first, by :func:`w4gemm.quantize_activations`.
        w: the weight (n, k), on x's device and in a layout that a kernel reads there: see ``w.repack()``.
        bias: (n) of x's dtype (beside fp8 x, of the result's 16-bit dtype or bfloat16), or None.
        alpha: a number, or a float32 tensor of one element on x's device, which is read when the kernel runs.
        activation: "relu", "silu", "gelu" or "gelu_tanh" as torch has them; or "silu_mul", for a weight whose even rows
            are gates and odd rows up projections (:meth:`QuantizedWeight.interleave`): silu(gate) * up, n / 2 columns.
        residual: contiguous, of the result's shape and dtype.
        token_scale: float32 (...), for fp8 x only: what each row of it is multiplied by.
        out_dtype: of the result: float32, float16 or bfloat16; None for x's, bfloat16 for fp8 x.
        out: where to write the result: contiguous, of its shape and dtype, 16-byte aligned, sharing no memory with the
            other tensors; but it may be the residual itself. Not together with gradients.
        config: forces a kernel's config, as :func:`w4gemm.choice.plan` takes it; for tests and measurements.
        batch_invariant: whether a row of the result must have the same bits whatever the other rows hold and however
            many there are. One order of additions then serves every m, which costs speed where another is faster (see
            docs/measured.md). Gradients are not covered.

    Returns:
        (..., n), or (..., n / 2) with "silu_mul"; ``out`` if given. Gradients flow to x, bias, alpha and residual,
        never to w: where they are needed, PyTorch's operators do what comes after the bias.

    Raises:
        TypeError, ValueError: for a bad argument, naming it, what was wanted and what came.
        UnsupportedError: if no kernel can run this here; lists each kernel's reason.
        NotImplementedError: where forward-mode derivatives would be needed, or gradients beside fp8 activations.
    """
    if w.__class__ is QuantizedWeight and w.layout == FP8_LAYOUT:
        x, token_scale, out_dtype = quantized(x, token_scale, out_dtype)
    if batch_invariant is not False and batch_invariant is not True:
        raise TypeError(f"batch_invariant: wanted a bool, got {type(batch_invariant).__name__} {batch_invariant!r}")
    look, fused = None, NO_OPERANDS if bias is None else EpilogueOperands(None, bias)
    if alpha is residual is token_scale is out_dtype is out is config is None:
        look = _look(x, w, fused, activation, batch_invariant)
        call = None if look is None else _checked.get(look)
        if call is not None:
            columns = w.n if activation is None else call.epilogue.columns(w.n)
            return _computed(call, x, w, fused, columns, call.dtype)
    arguments.check(x, w, bias, out_dtype)
    if config is None:
        config = ""
    elif not isinstance(config, str):
        config = arguments.config_text(config)
    epilogue = PLAIN if bias is None else _BIAS
    if not (alpha is activation is residual is token_scale is out_dtype is None):
        epilogue, fused = arguments.fused(
            x, w, EpilogueOperands(alpha, bias, residual, token_scale), activation, out_dtype
        )
    if needs_dispatcher(x, fused):
        return _linear_dispatched(x, w, epilogue, fused, out, config, batch_invariant)
    if out is not None:
        arguments.check_out(out, x, w.n, epilogue, fused)
    call = _call(x.shape[:-1].numel(), w, x, epilogue, config, batch_invariant)
    dtype = epilogue.result_dtype(x.dtype)
    if look is not None and dtype is x.dtype:
        _remember(look, call)
    return _computed(call, x, w, fused, epilogue.columns(w.n), dtype, out)


# --- what was checked before -----------------------------------------------------------------------------------------

_checked: dict[tuple[Hashable, ...], choice.PlanKey] = {}
"""What plans are looked up by, of calls that passed every check, by what the whole call looked like: one that looks
alike need not be checked again. It holds neither tensors nor plans, so nothing makes an entry wrong."""
_MOST_CHECKED = 4096


def _look(
    x: torch.Tensor, w: QuantizedWeight, fused: EpilogueOperands, activation: str | None, batch_invariant: bool
) -> tuple[Hashable, ...] | None:
    """All that the checks look at of a call with no more than x, w, a bias and an activation, and all that its plan
    depends on. None unless it is a plain eager call with arguments of the right types."""
    bias = fused.bias
    if w.__class__ is not QuantizedWeight or w.experts or not (bias is None or is_plain(bias)):
        return None
    if needs_dispatcher(x, fused) or not (activation is None or activation.__class__ is str):
        return None
    of_bias = None if bias is None else (bias.shape, bias.dtype, bias.device, bias.is_contiguous())
    name, device = w.format.name, w.tensors[0].device  # the name, since a string keeps its hash
    return x.shape, x.dtype, x.device, name, w.layout, w.n, w.k, device, of_bias, activation, batch_invariant


def _remember(look: tuple[Hashable, ...], call: choice.PlanKey) -> None:
    if len(_checked) >= _MOST_CHECKED:
        _checked.clear()
    _checked[look] = call


def _computed(
    call: choice.PlanKey,
    x: torch.Tensor,
    w: QuantizedWeight,
    fused: EpilogueOperands,
    columns: int,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result of a call that was checked, (..., columns) in ``dtype``; ``out`` if given."""
    shape = x.shape
    flat = len(shape) == 2
    rows = x if flat else x.reshape(-1, w.k)
    if w.perm is not None:
        rows = gather_columns(rows, w.perm)
    m = shape[0] if flat else rows.shape[0]
    if out is not None:
        d = out.view(-1, columns)
    elif dtype is call.dtype:  # new_empty with plain numbers takes two thirds of torch.empty's time
        d = rows.new_empty(m, columns)
    else:
        d = rows.new_empty((m, columns), dtype=dtype)
    if m:
        _launch(call, Operands(rows, w.tensors, d, fused))
    if out is not None:
        return out
    return d if flat else d.view(*shape[:-1], columns)


def quantized(
    x: torch.Tensor, token_scale: torch.Tensor | None, out_dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.dtype | None]:
    """For a weight that meets fp8 activations: 16-bit x in fp8, its scales, and the dtype of the result. Any other x is
    returned as it came, with what came beside it."""
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.float16, torch.bfloat16):
        return x, token_scale, out_dtype
    if token_scale is not None:
        raise TypeError(f"token_scale: wanted None for x of {x.dtype}, which is quantized here")
    return *quantize_activations(x), out_dtype or x.dtype


class _Weight(NamedTuple):
    """What a plan depends on of a weight."""

    format: WeightFormat
    layout: str
    n: int


def _run(
    operands: Operands, w: QuantizedWeight | _Weight, epilogue: Epilogue, config: str, batch_invariant: bool
) -> None:
    """Look up the plan and launch it."""
    x, rows, m = operands.x, operands.rows, operands.out.shape[0]
    if m == 0:
        return
    if rows.indices is not None and x.device.type == "cuda" and not (x.stride(1) == 1 and takes_rows(x)):
        operands = operands.gathered_first()
        rows = operands.rows
    experts = 0 if rows.starts is None else rows.starts.shape[0]
    gathered = rows.indices is not None
    _launch(_call(m, w, x, epilogue, config, batch_invariant, experts, gathered), operands)


def _call(
    m: int,
    w: QuantizedWeight | _Weight,
    x: torch.Tensor,
    epilogue: Epilogue,
    config: str,
    batch_invariant: bool,
    experts: int = 0,
    gathered: bool = False,
) -> choice.PlanKey:
    """What the plan is looked up by, for m rows (..., k) of x."""
    interval = choice.interval(-(-m // experts) if experts else m)
    problem = w.n, x.shape[-1], x.dtype, w.format, w.layout, epilogue, x.device
    return choice.PlanKey(interval, *problem, config, batch_invariant, experts, gathered)


def _launch(call: choice.PlanKey, operands: Operands) -> None:
    """Launch the plan for ``call``, of at least one row, on x's device, which need not be the current one."""
    x = operands.x
    row, column = x.stride()
    if column != 1 or (row < call.k and x.shape[0] > 1):  # rows that overlap, as after expand, are no matrix
        operands = operands._replace(x=torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x))
    # what torch.cuda.current_device does once CUDA is initialized, as it is where there is a tensor
    if _several_gpus() and x.is_cuda and call.device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(call.device):
            choice.plan_for(call).launch(operands)
    else:
        choice.plan_for(call).launch(operands)


@functools.cache
def _several_gpus() -> bool:
    """Whether a tensor's device may be another than the current one. To ask for that takes a microsecond."""
    return torch.cuda.device_count() > 1


def _linear_dispatched(
    x: torch.Tensor,
    w: QuantizedWeight,
    epilogue: Epilogue,
    fused: EpilogueOperands,
    out: torch.Tensor | None,
    config: str,
    batch_invariant: bool,
) -> torch.Tensor:
    refuse_duals(x, fused)
    if x.dtype == _FP8 and torch.is_grad_enabled() and requires_grad(x, fused):
        raise NotImplementedError("x: gradients of a linear with fp8 activations are not implemented; call no_grad")
    rows = x.reshape(-1, w.k)
    if w.perm is not None:  # an operator that autograd undoes, and that a compiler may fuse with what made x
        rows = selected(rows, 1, w.perm)
    weight = (list(w.tensors), w.format.name, w.layout, w.n, w.k)
    if not epilogue.linear and torch.is_grad_enabled() and requires_grad(x, fused):
        sums = torch.ops.w4gemm.linear(rows, *weight, *_flat(_FLOAT32, NO_OPERANDS), config, batch_invariant)
        d = epilogue.apply(sums, fused).to(epilogue.result_dtype(x.dtype))
    else:
        d = torch.ops.w4gemm.linear(rows, *weight, *_flat(epilogue, fused), config, batch_invariant)
    d = d.reshape(*x.shape[:-1], epilogue.columns(w.n))
    if out is None:
        return d
    if torch.is_grad_enabled() and d.requires_grad:
        raise ValueError("out: wanted None where a gradient is needed; call linear without out, or under no_grad")
    arguments.check_out(out, x, w.n, epilogue, fused)
    return out.copy_(d)


# --- the operator --------------------------------------------------------------------------------------------------

_WEIGHT = "Tensor[] weight, str format, str layout, int n, int k"
_FUSED = (
    "Tensor? bias, Tensor? residual, Tensor? token_scale, Tensor? alpha, float? scale, str? activation, "
    "ScalarType? out_dtype"
)
_FLOAT32 = Epilogue(out_dtype=torch.float32)
_parse_format = functools.cache(WeightFormat.parse)

torch.library.define("w4gemm::linear", f"(Tensor x, {_WEIGHT}, {_FUSED}, str config, bool batch_invariant) -> Tensor")
torch.library.define("w4gemm::linear_dx", f"(Tensor grad, {_WEIGHT}) -> Tensor")


def _flat(epilogue: Epilogue, fused: EpilogueOperands) -> tuple[object, ...]:
    """The operator's arguments ``_FUSED``; alpha as a number is its ``scale``."""
    alpha, bias, residual, token_scale, _ = fused
    tensor, number = (alpha, None) if isinstance(alpha, torch.Tensor) else (None, alpha)
    return bias, residual, token_scale, tensor, number, epilogue.activation, epilogue.out_dtype


def _unflat(*flat) -> tuple[Epilogue, EpilogueOperands]:  # type: ignore[no-untyped-def]
    bias, residual, token_scale, alpha, scale, activation, out_dtype = flat
    kind = "device" if alpha is not None else "host" if scale is not None else None
    epilogue = Epilogue(activation, kind, bias is not None, residual is not None, out_dtype, token_scale is not None)
    return epilogue, EpilogueOperands(scale if alpha is None else alpha, bias, residual, token_scale)


@torch.library.impl("w4gemm::linear", ("cpu", "cuda"))
def _linear_op(x, weight, format, layout, n, k, *rest):  # type: ignore[no-untyped-def]
    *flat, config, batch_invariant = rest
    epilogue, fused = _unflat(*flat)
    dtype = epilogue.result_dtype(x.dtype)
    out = torch.empty((x.shape[0], epilogue.columns(n)), dtype=dtype, device=x.device)
    w = _Weight(_parse_format(format), layout, n)
    _run(Operands(x, tuple(weight), out, fused), w, epilogue, config, batch_invariant)
    return out


@torch.library.register_fake("w4gemm::linear")
def _linear_fake(x, weight, format, layout, n, k, *rest):  # type: ignore[no-untyped-def]
    epilogue, _ = _unflat(*rest[:-2])
    return x.new_empty((x.shape[0], epilogue.columns(n)), dtype=epilogue.result_dtype(x.dtype))


@torch.library.impl("w4gemm::linear_dx", ("cpu", "cuda"))
def _linear_dx_op(grad, weight, format, layout, n, k):  # type: ignore[no-untyped-def]
    w = QuantizedWeight(_parse_format(format), n, k, layout, tuple(weight))
    return grad @ w.dequantize(grad.dtype)


@torch.library.register_fake("w4gemm::linear_dx")
def _linear_dx_fake(grad, weight, format, layout, n, k):  # type: ignore[no-untyped-def]
    return grad.new_empty((grad.shape[0], k))


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, weight, *names = inputs
    ctx.save_for_backward(*weight)
    ctx.names, ctx.dtype = names[:4], x.dtype


def _save_linear(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _save(ctx, inputs, output)
    ctx.linear = _unflat(*inputs[6:-2])[0].linear


def _linear_backward(ctx, grad):  # type: ignore[no-untyped-def]
    if not ctx.linear:
        raise NotImplementedError("torch.ops.w4gemm.linear has gradients with a bias only; call w4gemm.linear")
    weight = list(ctx.saved_tensors)
    grad = grad.to(ctx.dtype)
    dx = torch.ops.w4gemm.linear_dx(grad, weight, *ctx.names) if ctx.needs_input_grad[0] else None
    dbias = grad.sum(0) if ctx.needs_input_grad[6] else None
    return dx, [None] * len(weight), *(4 * [None]), dbias, *(8 * [None])


def _linear_dx_backward(ctx, grad):  # type: ignore[no-untyped-def]
    weight = list(ctx.saved_tensors)
    d = torch.ops.w4gemm.linear(grad, weight, *ctx.names, *_flat(PLAIN, NO_OPERANDS), "", False)
    return d, [None] * len(weight), *(4 * [None])


torch.library.register_autograd("w4gemm::linear", _linear_backward, setup_context=_save_linear)
torch.library.register_autograd("w4gemm::linear_dx", _linear_dx_backward, setup_context=_save)
