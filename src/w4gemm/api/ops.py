"""The function :func:`linear`, and the operator ``torch.ops.w4gemm.linear`` behind it.

In plain eager mode ``linear`` runs the kernel itself, because PyTorch's dispatcher would cost as much as the launch.
Under ``torch.compile``, autograd, tensor subclasses and modes it goes through the operator, which takes flat tensors
and names only.
"""

from __future__ import annotations

from typing import Any

import torch

from w4gemm.api import arguments, product, transforms
from w4gemm.api.call import Call, checked, compute
from w4gemm.api.gradients import narrowed, product_of
from w4gemm.api.modes import (
    first_dual,
    is_transformed,
    needs_dispatcher,
    refuse_duals,
    refuse_fp8_gradients,
    refuse_transforms,
    requires_grad,
)
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
from w4gemm.core.autocast import without_autocast
from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import NO_OPERANDS, PLAIN, Epilogue, EpilogueOperands, replaced
from w4gemm.kernels import Operands
from w4gemm.kernels.base import selected
from w4gemm.kernels.cpu.matmul import matmul
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

    On a GPU the launch goes to the current stream of x's device. Nothing synchronizes, except the first launch of a
    config with stream-k.

    Args:
        x: activations (..., k), float16 or bfloat16, on the CPU also float32; any strides. If ``w.activations`` is
            "fp8", x is quantized first, as by :func:`w4gemm.quantize_activations`, and the result keeps x's dtype. x
            itself may be float8_e4m3fn for a weight in the mma8 layout, and on the CPU.
        w: the weight (n, k), on x's device and in a layout that a kernel reads there, as ``w.repack()`` returns it.
        bias: (n,) of x's dtype, or None. For fp8 x: of the result's dtype if that has 16 bits, else bfloat16. If x is
            quantized here, the bias is rounded to that dtype, except for a float32 result on the CPU.
        alpha: a number, or a float32 tensor of one element on x's device, which is read when the kernel runs.
        activation: "relu", "silu", "gelu" or "gelu_tanh", as torch.nn.functional has them; "relu2", relu squared; or a
            gated one, which makes a column of each pair of gate and up rows of w (:meth:`QuantizedWeight.interleave`):
            "silu_mul", that is silu(gate) * up, "gelu_mul", "gelu_tanh_mul", "swiglu_oai" (gpt-oss), "situ_mul"
            (Kimi-K3). Constants are given in parentheses, as in "silu_mul(limit=10)"; :mod:`w4gemm.core.activation` has
            the formulas.
        residual: the result's shape and dtype, contiguous; it is added after the activation.
        token_scale: for fp8 x only, the factor of each row of x: float32 (...). Or, on Hopper and the CPU, of each 128
            columns of a row: (..., ceil(k / 128)), any strides, read in place if the tokens of a block are contiguous
            and copied otherwise. Powers of two may also be torch.float8_e8m0fnu, or four blocks of them in an int32,
            as DeepEP sends UE8M0; they are converted first.
        out_dtype: dtype of the result: float32, float16 or bfloat16. None for x's dtype, or bfloat16 if x is fp8.
        out: tensor to write the result to: of its shape and dtype, contiguous, 16-byte aligned. It shares no memory
            with the other tensors, but may be the residual itself. Not together with gradients.
        config: the config to run instead of the chosen one, as :func:`w4gemm.configs` lists them; for tests and
            measurements.
        batch_invariant: True if the bits of a row of the result must not depend on the other rows or their number. One
            order of additions then serves every m, which takes longer where another order is faster (see
            docs/measured.md). Gradients are computed, but without this guarantee.

    Returns:
        (..., n), or (..., n / 2) with a gated activation; ``out`` if given. Without tokens it is empty, and nothing
        runs. Gradients flow to x, bias, alpha and residual, never to w; if they are needed, PyTorch's operators compute
        what comes after the product.

    Raises:
        TypeError, ValueError: for a bad argument; the message names it, what was wanted and what came.
        UnsupportedError: if no kernel can run this here; the message has each kernel's reason.
        NotImplementedError: if derivatives with fp8 activations would be needed.

    Examples:
        >>> w = w4gemm.quantize(torch.randn(512, 1024)).repack()
        >>> x, bias = torch.randn(3, 7, 1024), torch.randn(512)
        >>> w4gemm.linear(x, w, bias, activation="silu").shape
        torch.Size([3, 7, 512])
    """
    is_simple = alpha is residual is token_scale is out_dtype is out is config is None
    if is_simple and (warm := product.bound_linear(x, w, bias, activation, batch_invariant)) is not None:
        return warm(x, w, bias)
    arguments.check(x, w)
    operands = EpilogueOperands(alpha, bias, residual, token_scale)
    call = checked(x, w, operands, activation, out_dtype, config, batch_invariant=batch_invariant)
    if needs_dispatcher(call.x, call.operands):
        return _dispatched(call, out)
    if is_simple:
        product.bind_calls_like(call, x, bias, activation)
    return compute(call, out)


def _dispatched(call: Call, out: torch.Tensor | None) -> torch.Tensor:
    """Compute a call under a compiler, autograd, a mode or a transform, by the registered operator."""
    x, w, epilogue, operands = call.x, call.w, call.epilogue, call.operands
    differentiated = torch.is_grad_enabled() and requires_grad(x, operands)
    if x.dtype == arguments.FP8:
        refuse_duals(x, operands, "a product with fp8 activations")
        refuse_transforms("a product with fp8 activations")
        if differentiated:
            refuse_fp8_gradients(x, operands)
    rows = x.reshape(-1, w.k)
    if w.perm is not None:  # an operator that autograd undoes, and that a compiler may fuse with what made x
        rows = selected(rows, 1, w.perm)
    transformed = x.dtype != arguments.FP8 and (is_transformed() or first_dual(x, operands) is not None)
    if transformed and out is not None:
        raise ValueError("out: wanted None inside a transform of torch.func; call linear without out")
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
    args = _Linear(*flat)
    epilogue, operands = nested_epilogue(args)
    out = empty_result(args, epilogue)
    weight = nested_weight(args)
    launched = Operands(args.x, tuple(args.weight), out, operands)
    product.launch(weight, launched, epilogue, args.config, args.batch_invariant)
    return out


@torch.library.register_fake("w4gemm::linear")
def _linear_fake(*flat: Any) -> torch.Tensor:
    args = _Linear(*flat)
    return empty_result(args, nested_epilogue(args)[0])


@torch.library.impl("w4gemm::linear_dx", ("cpu", "cuda"))
@without_autocast
def _linear_dx_op(*flat: Any) -> torch.Tensor:
    args = _LinearDx(*flat)
    packed = nested_weight(args)
    w = QuantizedWeight(packed.format, packed.n, packed.k, packed.layout, tuple(args.weight))

    def product(rows: torch.Tensor) -> torch.Tensor:
        dense = w.dequantize(rows.dtype)
        if rows.dtype != args.grad.dtype:
            return torch.mm(rows, dense, out_dtype=torch.float32)
        return matmul(rows, dense)

    return product_of(args.grad, product)


@torch.library.register_fake("w4gemm::linear_dx")
def _linear_dx_fake(*flat: Any) -> torch.Tensor:
    args = _LinearDx(*flat)
    return args.grad.new_empty((args.grad.shape[0], args.k))


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    args = _Linear(*inputs)
    keep_weight(ctx, args)
    ctx.dtype, ctx.linear = args.x.dtype, nested_epilogue(args)[0].linear


def _linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    if not ctx.linear:
        raise NotImplementedError("torch.ops.w4gemm.linear has gradients with a bias only; call w4gemm.linear")
    (weight, _), needed = kept_weight(ctx), _Linear(*ctx.needs_input_grad)
    grad = narrowed(grad, ctx.dtype)
    return _Linear(
        x=torch.ops.w4gemm.linear_dx(*_LinearDx(grad, **weight)).to(ctx.dtype) if needed.x else None,
        weight=[None] * len(weight["weight"]),
        bias=grad.sum(0) if needed.bias else None,
    )


def _save_linear_dx(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    keep_weight(ctx, _LinearDx(*inputs))


def _linear_dx_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    weight, _ = kept_weight(ctx)

    def product(rows: torch.Tensor) -> torch.Tensor:
        epilogue = PLAIN if rows.dtype == grad.dtype else _FLOAT32
        flat = _Linear(rows, **weight, **flat_epilogue(epilogue, NO_OPERANDS), config="", batch_invariant=False)
        d: torch.Tensor = torch.ops.w4gemm.linear(*flat)
        return d

    return _LinearDx(product_of(grad, product), [None] * len(weight["weight"]))


def _linear_dx_vmap(info: Any, in_dims: tuple[Any, ...], *flat: Any) -> tuple[torch.Tensor, int]:
    """Return the gradients of a batch, as ``is_grads_batched`` makes it, by one call with all of its rows."""
    args = _LinearDx(*flat)
    rows = args.grad.movedim(in_dims[0], 0)
    dx = torch.ops.w4gemm.linear_dx(*replaced(args, grad=rows.flatten(0, 1)))
    return dx.unflatten(0, rows.shape[:2]), 0


torch.library.register_autograd("w4gemm::linear", _linear_backward, setup_context=_save_linear)
torch.library.register_autograd("w4gemm::linear_dx", _linear_dx_backward, setup_context=_save_linear_dx)
torch.library.register_vmap("w4gemm::linear_dx", _linear_dx_vmap)
