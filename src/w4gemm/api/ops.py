"""The boundary: :func:`linear`, and the operator ``torch.ops.w4gemm.linear``. What users pass is checked here.

In plain eager mode ``linear`` runs the kernel itself, because PyTorch's dispatcher would cost as much as the launch.
Under ``torch.compile``, autograd, tensor subclasses and modes it goes through the operator, which takes flat tensors
and names only.
"""

from __future__ import annotations

from typing import Any

import torch

from w4gemm.api import arguments, bound, boundary, transforms
from w4gemm.api.boundary import Call
from w4gemm.api.modes import is_transformed, needs_dispatcher, refuse_duals, requires_grad
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
from w4gemm.core.epilogue import NO_OPERANDS, PLAIN, Epilogue, EpilogueOperands, replaced
from w4gemm.kernels import Operands
from w4gemm.kernels.base import selected
from w4gemm.weights.weight import QuantizedWeight


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
    """Return act(alpha * token_scale * (x @ w.T) + bias) + residual, computed in one launch in float32 and rounded
    once.

    On a GPU it runs on the current stream of x's device. It does not synchronize, except in the first launch of a
    config with stream-k.

    Args:
        x: activations (..., k), float16 or bfloat16; on the CPU also float32. Any strides; without tokens the result is
            empty and nothing runs. If ``w.activations`` is "fp8", x is quantized first, on every device, by
            :func:`w4gemm.quantize_activations`; the result keeps its dtype. x may also be float8_e4m3fn itself, for a
            weight in the mma8 layout and on the CPU.
        w: the weight (n, k), on x's device and in a layout that a kernel reads there: see ``w.repack()``.
        bias: (n,) of x's dtype (beside fp8 x, of the result's 16-bit dtype or bfloat16), or None.
        alpha: a number, or a float32 tensor of one element on x's device, which is read when the kernel runs.
        activation: "relu", "silu", "gelu" or "gelu_tanh" as torch has them. Or a gated one, with n / 2 columns, for a
            weight whose even rows are gates and odd rows up projections (:meth:`QuantizedWeight.interleave`):
            "silu_mul", silu(gate) * up, "gelu_mul", "gelu_tanh_mul", "swiglu_oai" of gpt-oss, "situ_mul" of Kimi-K3.
            Their constants may be others: "silu_mul(limit=10)"; see :mod:`w4gemm.core.activation`.
        residual: contiguous, of the result's shape and dtype.
        token_scale: float32 (...), for fp8 x only: the number that each row of it is multiplied by; or, on Hopper and
            the CPU, (..., ceil(k / 128)) of any strides: one for each 128 columns of a row; they are read in place if
            the tokens of a block are contiguous, and copied otherwise. Powers of two may come as
            torch.float8_e8m0fnu, or four blocks of them in an int32, as DeepEP sends UE8M0; they are converted first.
        out_dtype: dtype of the result: float32, float16 or bfloat16; None for x's, bfloat16 for fp8 x.
        out: where to write the result: contiguous, of its shape and dtype, 16-byte aligned, sharing no memory with the
            other tensors; but it may be the residual itself. Not together with gradients.
        config: forces a kernel's config, as :func:`w4gemm.choice.plan` takes it; for tests and measurements.
        batch_invariant: True if a row of the result must have the same bits whatever the other rows hold and however
            many there are. One order of additions then serves every m, which costs time if another is faster (see
            docs/measured/batch_invariant.md). Gradients are computed, but without this guarantee.

    Returns:
        (..., n), or (..., n / 2) with a gated activation; ``out`` if given. Gradients flow to x, bias, alpha and
        residual, never to w. If they are needed, PyTorch's operators do what comes after the bias.

    Raises:
        TypeError, ValueError: for a bad argument, naming it, what was wanted and what came.
        UnsupportedError: if no kernel can run this here; lists each kernel's reason.
        NotImplementedError: if forward-mode derivatives would be needed, or gradients beside fp8 activations.

    Examples:
        >>> w = w4gemm.quantize(torch.randn(512, 1024)).repack()
        >>> x, bias = torch.randn(3, 7, 1024), torch.randn(512)
        >>> w4gemm.linear(x, w, bias, activation="silu").shape
        torch.Size([3, 7, 512])
    """
    is_simple = alpha is residual is token_scale is out_dtype is out is config is None
    if is_simple and (warm := bound.find(x, w, bias, activation, batch_invariant)) is not None:
        return warm(x, w, bias)
    arguments.check(x, w)
    given = EpilogueOperands(alpha, bias, residual, token_scale)
    call = boundary.checked(x, w, given, activation, out_dtype, config, batch_invariant=batch_invariant)
    if needs_dispatcher(call.x, call.operands):
        return _dispatched(call, out)
    if is_simple:
        bound.remember(call, x, bias, activation)
    return boundary.compute(call, out)


def _dispatched(call: Call, out: torch.Tensor | None) -> torch.Tensor:
    """Return the result of a call under anything but plain eager execution."""
    x, w, epilogue, operands = call.x, call.w, call.epilogue, call.operands
    differentiated = torch.is_grad_enabled() and requires_grad(x, operands)
    refuse_duals(x, operands)
    if differentiated and x.dtype == arguments.FP8:
        raise NotImplementedError("x: gradients of a linear with fp8 activations are not implemented; call no_grad")
    rows = x.reshape(-1, w.k)
    if w.perm is not None:  # an operator that autograd undoes, and that a compiler may fuse with what made x
        rows = selected(rows, 1, w.perm)
    transformed = x.dtype != arguments.FP8 and is_transformed()
    if transformed or (differentiated and not epilogue.linear):  # PyTorch's operators do what comes after the product
        if transformed:
            sums = transforms.product(rows, w, call.config, call.batch_invariant)
        else:
            sums = _operator(rows, w, _FLOAT32, NO_OPERANDS, call)
        d = epilogue.apply(sums, operands).to(epilogue.result_dtype(x.dtype))
    else:
        d = _operator(rows, w, epilogue, operands, call)
    d = d.reshape(call.shape)
    if out is None:
        return d
    if torch.is_grad_enabled() and d.requires_grad:
        raise ValueError("out: wanted None where a gradient is needed; call linear without out, or under no_grad")
    call.check_out(out)
    return out.copy_(d)


def _operator(
    rows: torch.Tensor, w: QuantizedWeight, epilogue: Epilogue, operands: EpilogueOperands, call: Call
) -> torch.Tensor:
    flat = _Linear(rows, **flat_weight(w), **flat_epilogue(epilogue, operands))
    return torch.ops.w4gemm.linear(*replaced(flat, config=call.config, batch_invariant=call.batch_invariant))


# --- the operator and its gradients ----------------------------------------------------------------------------------

_FLOAT32 = Epilogue(out_dtype=torch.float32)
_LINEAR = {"x": "Tensor", **WEIGHT, **EPILOGUE, "config": "str", "batch_invariant": "bool"}
_LINEAR_DX = {"grad": "Tensor", **WEIGHT}
_Linear, _LinearDx = named(_LINEAR), named(_LINEAR_DX)

torch.library.define("w4gemm::linear", schema(_LINEAR))
torch.library.define("w4gemm::linear_dx", schema(_LINEAR_DX))


@torch.library.impl("w4gemm::linear", ("cpu", "cuda"))
def _linear_op(*flat: Any) -> torch.Tensor:
    given = _Linear(*flat)
    epilogue, operands = nested_epilogue(given)
    out = _empty_result(given, epilogue)
    weight = nested_weight(given)
    launched = Operands(given.x, tuple(given.weight), out, operands)
    boundary.run(weight, launched, epilogue, given.config, given.batch_invariant)
    return out


@torch.library.register_fake("w4gemm::linear")
def _linear_fake(*flat: Any) -> torch.Tensor:
    given = _Linear(*flat)
    return _empty_result(given, nested_epilogue(given)[0])


def _empty_result(given: Any, epilogue: Epilogue) -> torch.Tensor:
    x: torch.Tensor = given.x
    return x.new_empty((x.shape[0], epilogue.columns(given.n)), dtype=epilogue.result_dtype(x.dtype))


@torch.library.impl("w4gemm::linear_dx", ("cpu", "cuda"))
def _linear_dx_op(*flat: Any) -> torch.Tensor:
    given = _LinearDx(*flat)
    packed = nested_weight(given)
    w = QuantizedWeight(packed.format, packed.n, packed.k, packed.layout, tuple(given.weight))
    return given.grad @ w.dequantize(given.grad.dtype)


@torch.library.register_fake("w4gemm::linear_dx")
def _linear_dx_fake(*flat: Any) -> torch.Tensor:
    given = _LinearDx(*flat)
    return given.grad.new_empty((given.grad.shape[0], given.k))


def _keep_weight(ctx: Any, given: Any) -> None:
    ctx.save_for_backward(*given.weight)
    ctx.names = {name: getattr(given, name) for name in WEIGHT if name != "weight"}


def _kept_weight(ctx: Any) -> dict[str, Any]:
    """Return the operators' arguments ``WEIGHT``."""
    return {"weight": list(ctx.saved_tensors), **ctx.names}


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    given = _Linear(*inputs)
    _keep_weight(ctx, given)
    ctx.dtype, ctx.linear = given.x.dtype, nested_epilogue(given)[0].linear


def _linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    if not ctx.linear:
        raise NotImplementedError("torch.ops.w4gemm.linear has gradients with a bias only; call w4gemm.linear")
    weight, grad, needed = _kept_weight(ctx), grad.to(ctx.dtype), _Linear(*ctx.needs_input_grad)
    return _Linear(
        x=torch.ops.w4gemm.linear_dx(*_LinearDx(grad, **weight)) if needed.x else None,
        weight=[None] * len(weight["weight"]),
        bias=grad.sum(0) if needed.bias else None,
    )


def _save_linear_dx(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _keep_weight(ctx, _LinearDx(*inputs))


def _linear_dx_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    weight = _kept_weight(ctx)
    flat = _Linear(grad, **weight, **flat_epilogue(PLAIN, NO_OPERANDS), config="", batch_invariant=False)
    return _LinearDx(torch.ops.w4gemm.linear(*flat), [None] * len(weight["weight"]))


torch.library.register_autograd("w4gemm::linear", _linear_backward, setup_context=_save_linear)
torch.library.register_autograd("w4gemm::linear_dx", _linear_dx_backward, setup_context=_save_linear_dx)
