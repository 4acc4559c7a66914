"""PyTorch's mode around a call: whether plain eager execution is all there is."""

from __future__ import annotations

import torch
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from w4gemm.epilogue import EpilogueOperands

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_plain(t: object) -> bool:
    """Whether it is a tensor, and no subclass that has ideas of its own."""
    return type(t) in _PLAIN


def needs_dispatcher(x: torch.Tensor, fused: EpilogueOperands) -> bool:
    """Whether anything but plain eager execution is going on: then only the registered operator is right."""
    return type(x) not in _PLAIN or (torch.is_grad_enabled() and requires_grad(x, fused)) or is_watched()


def is_watched() -> bool:
    """Whether anything looks at what is called, or changes it: a compiler, a mode, a transform, a tracer."""
    return (
        is_compiling()
        or _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def requires_grad(x: torch.Tensor, fused: EpilogueOperands) -> bool:
    alpha, bias, residual, token_scale, _ = fused
    return (
        x.requires_grad
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
        or (isinstance(alpha, torch.Tensor) and alpha.requires_grad)
        or (token_scale is not None and token_scale.requires_grad)
    )


def refuse_duals(x: torch.Tensor, fused: EpilogueOperands) -> None:
    """Raise NotImplementedError where forward-mode derivatives would silently be lost."""
    if is_compiling():
        return
    for name, t in (("x", x), *fused._asdict().items()):
        if is_dual(t):
            raise NotImplementedError(
                f"{name}: forward-mode derivatives of a 4-bit linear are not implemented; use backward"
            )


def is_dual(t: object) -> bool:
    """Whether forward-mode differentiation is going on, for which the operator would silently give zeros."""
    return (
        forward_ad._current_level >= 0 and isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None
    )
