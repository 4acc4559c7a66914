"""The function :func:`linear`.

In plain eager mode it runs the kernel itself, because PyTorch's dispatcher would cost as much as the launch. Under
``torch.compile``, autograd, tensor subclasses and modes it goes through the operator ``torch.ops.w4gemm.linear``.
"""

from __future__ import annotations

import torch

from w4gemm.api import arguments, product, transforms
from w4gemm.api.call import Call, checked, compute
from w4gemm.api.modes import (
    first_dual,
    is_transformed,
    needs_dispatcher,
    refuse_duals,
    refuse_fp8_gradients,
    refuse_transforms,
    requires_grad,
)
from w4gemm.api.operators import FLOAT32
from w4gemm.api.operators import product as operator
from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import NO_OPERANDS, EpilogueOperands
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

    On a GPU the launch goes to the current stream of x's device. Nothing synchronizes, except the first launch of a
    config with stream-k.

    Args:
        x: activations (..., k), float16 or bfloat16, on the CPU also float32; any strides. float32 x is rounded to
            bfloat16 only after ``torch.set_float32_matmul_precision("medium")``, where that is faster. If
            ``w.activations`` is "fp8", x is quantized first, as by :func:`w4gemm.quantize_activations`, and the result
            keeps x's dtype. x itself may be float8_e4m3fn for a weight in the mma8 layout, and on the CPU.
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
            sums = operator(call, rows, FLOAT32, NO_OPERANDS)
        d = epilogue.apply(sums, operands).to(epilogue.result_dtype(x.dtype))
    else:
        d = operator(call, rows, epilogue, operands)
    d = d.reshape(call.shape)
    if out is None:
        return d
    if torch.is_grad_enabled() and d.requires_grad:
        raise ValueError("out: wanted None where a gradient is needed; call linear without out, or under no_grad")
    call.check_out(out)
    return out.copy_(d)
