"""Activations quantized to fp8, with a scale for each token: :func:`quantize_activations`."""

from __future__ import annotations

from typing import Any

import torch

from w4gemm.api.modes import is_dual, needs_dispatcher
from w4gemm.core.epilogue import HALVES, NO_OPERANDS
from w4gemm.core.errors import require_bool, require_dense, require_tensor
from w4gemm.kernels import launcher
from w4gemm.kernels.helpers.activation_quantize import LARGEST, SMALLEST, ActivationQuantize

_DTYPES = {"cpu": (*HALVES, torch.float32)}
_LARGEST_EPS = torch.finfo(torch.float32).max
_Quantized = tuple[torch.Tensor, torch.Tensor]


def quantize_activations(
    x: torch.Tensor, *, norm_weight: torch.Tensor | None = None, eps: float = 1e-6, silu_mul: bool = False
) -> _Quantized:
    """Quantize each row of x to float8_e4m3fn with a float32 scale, or first apply an RMSNorm or silu(gate) * up, all
    in one pass over x.

    For a row y, computed in float32: top is the largest abs(y), token_scale = top / 448, and x8 = y * (448 / top),
    rounded to the nearest, ties to even. Every operation is rounded once. A row of zeros has scale 1, and a top below
    2**-100 counts as 2**-100. If a row has a NaN, the row and its scale are NaN. If it has an infinity and no NaN, its
    scale is infinite, its infinities become NaN and its other numbers zeros, so that a product with it is NaN.

    y is x or, computed in float32 and **rounded to x's dtype once**, one of these:

    - RMSNorm: x / sqrt(mean(x**2) + eps) * norm_weight. (transformers' Llama also rounds before the weight.)
    - silu(gate) * up for x = (gate, up), all gates first, as a merged gate_up projection returns them. (For gates and
      ups in pairs, as from ``QuantizedWeight.interleave``, use ``linear(..., activation="silu_mul")``.)

    On GPUs with e4m3 (SM89 and later) one kernel does it, elsewhere PyTorch's operators. Both give equal bits, except
    for the sign of a NaN. With an RMSNorm they may differ in the last bits of float32, because the order of its sum
    differs, and with silu because the exponential does. A row's bits do not depend on the other rows.

    Args:
        x: (..., k) or, with ``silu_mul``, (..., 2 k), float16 or bfloat16, on the CPU also float32; any strides.
            Strided rows cost nothing. The kernel is fast if k and the row stride are multiples of 8 and x is aligned to
            16 bytes. It then takes k up to 65,536 (57,344 with silu_mul, 32,768 with RMSNorm, 24,576 on SM89 and SM120,
            which have less shared memory), otherwise up to 32,768. PyTorch's operators take longer rows.
        norm_weight: (k,) of x's dtype, contiguous; None for no RMSNorm.
        eps: epsilon of the RMSNorm.
        silu_mul: True if x holds gates and ups.

    Returns:
        (x8, token_scale): x8 float8_e4m3fn (..., k), contiguous, and token_scale float32 (...), so that
        x8 * token_scale[..., None] is about y. There are no gradients.

    Raises:
        TypeError, ValueError: for a bad argument; the message names it, what was wanted and what came.
        NotImplementedError: if a gradient would be needed.

    Examples:
        >>> x8, token_scale = w4gemm.quantize_activations(torch.randn(5, 1024))
        >>> x8.dtype, token_scale.shape
        (torch.float8_e4m3fn, torch.Size([5]))
        >>> w = w4gemm.quantize(torch.randn(512, 1024)).repack(activations="fp8")
        >>> w4gemm.linear(x8, w, token_scale=token_scale).dtype
        torch.bfloat16
    """
    _check(x, norm_weight, eps, silu_mul)
    return quantized(x, norm_weight, eps, silu_mul)


def quantized(
    x: torch.Tensor, norm_weight: torch.Tensor | None = None, eps: float = 1e-6, silu_mul: bool = False
) -> _Quantized:
    """Return :func:`quantize_activations` of checked arguments. torch.compile can trace this."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if needs_dispatcher(x, NO_OPERANDS):
        x8, scale = torch.ops.w4gemm.quantize_activations(rows, norm_weight, eps, silu_mul)
    else:
        x8, scale = quantize_rows(rows, norm_weight, eps, silu_mul)
    return (x8, scale) if x.dim() == 2 else (x8.view(*x.shape[:-1], x8.shape[1]), scale.view(x.shape[:-1]))


def _check(x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, silu_mul: bool) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: wanted a tensor (..., k), got {type(x).__name__}")
    dtypes = _DTYPES.get(x.device.type, HALVES)
    if x.dtype not in dtypes:
        raise TypeError(f"x: wanted {' or '.join(map(str, dtypes))} on {x.device.type}, got {x.dtype}")
    require_dense("x", x)
    require_bool("silu_mul", silu_mul)
    if silu_mul and norm_weight is not None:
        raise ValueError("norm_weight, silu_mul: wanted one of them, got both")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: wanted shape (..., k) with k at least 1, got {tuple(x.shape)}")
    if silu_mul and x.shape[-1] % 2:
        raise ValueError(f"x: wanted shape (..., 2 k) with silu_mul, k gates and k ups, got {tuple(x.shape)}")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps: wanted a number, got {type(eps).__name__}")
    if not 0 <= eps <= _LARGEST_EPS:
        raise ValueError(f"eps: wanted a finite number of at least 0, got {eps!r:.40}")
    if norm_weight is not None:
        require_tensor("norm_weight", norm_weight, x.dtype, (x.shape[-1],), x.device, like="like x", size=", k of x")
    for name, t in (("x", x), ("norm_weight", norm_weight)):
        tracked = t is not None and torch.is_grad_enabled() and t.requires_grad
        if tracked or (not torch.compiler.is_compiling() and is_dual(t)):
            raise NotImplementedError(
                f"{name}: gradients of quantize_activations are not implemented; call it under no_grad"
            )


def quantize_rows(
    x: torch.Tensor, norm_weight: torch.Tensor | None = None, eps: float = 1e-6, silu_mul: bool = False
) -> _Quantized:
    """Quantize x (m, columns) in plain eager mode, by the kernel if it runs here, else by PyTorch's operators."""
    (m, k), device = x.shape, x.device
    if device.type != "cuda":
        return quantize_in_pytorch(x, norm_weight, eps, silu_mul)
    if silu_mul:
        k //= 2
    if x.stride(1) != 1:
        x = x.contiguous()
    front = "silu_mul" if silu_mul else "" if norm_weight is None else "rms"
    wide = ActivationQuantize.aligned(x, norm_weight, k)
    quantize = launcher(ActivationQuantize.of, device, x.dtype, k, front, wide)
    if quantize is None:
        return quantize_in_pytorch(x, norm_weight, eps, silu_mul)
    x8 = torch.empty((m, k), dtype=torch.uint8, device=device)
    scale = torch.empty(m, dtype=torch.float32, device=device)
    if m:
        quantize(x, None, norm_weight, x8, scale, None, eps)
    return x8.view(torch.float8_e4m3fn), scale


def quantize_in_pytorch(x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, silu_mul: bool) -> _Quantized:
    """Quantize x (m, columns) by PyTorch's operators, with the roundings of the kernel in the same order.

    Divisors are tensors, because PyTorch multiplies by the reciprocal of a number.
    """
    y = x.float()
    if silu_mul:
        gate, up = y.chunk(2, dim=1)
        y = (torch.nn.functional.silu(gate) * up).to(x.dtype).float()
    elif norm_weight is not None:
        total = y.square().sum(1, keepdim=True)
        root = (total / torch.full_like(total, y.shape[1]) + eps).sqrt()
        y = (y * (torch.ones_like(root) / root) * norm_weight.float()).to(x.dtype).float()
    top = y.abs().amax(1, keepdim=True)
    counted, largest = top.clamp(min=SMALLEST), torch.full_like(top, LARGEST)
    x8 = (y * (largest / counted)).to(torch.float8_e4m3fn)
    return x8, torch.where(top == 0, 1.0, counted / largest).squeeze(1)


# --- the operator --------------------------------------------------------------------------------------------------

torch.library.define(
    "w4gemm::quantize_activations", "(Tensor x, Tensor? norm_weight, float eps, bool silu_mul) -> (Tensor, Tensor)"
)
torch.library.impl("w4gemm::quantize_activations", ("cpu", "cuda"))(quantize_rows)


@torch.library.register_fake("w4gemm::quantize_activations")
def _fake(x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, silu_mul: bool) -> _Quantized:
    m, columns = x.shape
    x8 = x.new_empty((m, columns // 2 if silu_mul else columns), dtype=torch.float8_e4m3fn)
    return x8, x.new_empty(m, dtype=torch.float32)


def _backward(ctx: Any, *grads: torch.Tensor) -> None:
    raise NotImplementedError("x: gradients of quantize_activations are not implemented; call it under no_grad")


torch.library.register_autograd("w4gemm::quantize_activations", _backward)
