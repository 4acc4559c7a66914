"""Tells plain eager execution from a call under a compiler, autograd, a mode or a transform of PyTorch's."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from w4gemm.core.epilogue import EpilogueOperands

try:  # private: PyTorch 2.8 to 2.13 have all of them, but none has a public name that is as fast
    from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
    from torch._C._functorch import peek_interpreter_stack
    from torch.autograd.forward_ad import _current_level as _  # noqa: F401 (it changes: it is read anew)
except ImportError:

    def _len_torch_dispatch_stack() -> int:
        """Say that a mode is always on, so that every call takes the dispatcher: always right, only slower."""
        return 1


current_gpu = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Function like torch.cuda.current_device, but fast; for when CUDA is initialized."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CAST = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that autocast casts; it leaves float64 as it is."""


def is_plain(t: object) -> bool:
    """True if ``t`` is a tensor or a parameter, and of no subclass with behaviour of its own."""
    return type(t) in _PLAIN


def is_eager(x: object, bias: object = None) -> bool:
    """True if x and the bias are plain tensors in plain eager execution that need no gradient; the bias may be None."""
    if type(x) not in _PLAIN or not (bias is None or type(bias) in _PLAIN) or x.is_meta:  # type: ignore[attr-defined]
        return False
    if (x.requires_grad or (bias is not None and bias.requires_grad)) and torch.is_grad_enabled():  # type: ignore[attr-defined]
        return False
    if is_watched():
        return False
    return not (x.is_neg() or (bias is not None and bias.is_neg()))  # type: ignore[attr-defined]


def needs_dispatcher(x: torch.Tensor, operands: EpilogueOperands) -> bool:
    """True if a call is not plain eager execution, so that it must go through the registered operator."""
    if type(x) not in _PLAIN or x.is_meta or is_watched():  # on the meta device there are shapes only
        return True
    return (torch.is_grad_enabled() and requires_grad(x, operands)) or any_negated(x, *operands)


def any_negated(*tensors: object) -> bool:
    """True if a tensor is a view whose numbers PyTorch negates when it reads them, such as the imaginary part of a
    conjugate. Its memory, which a kernel reads, holds others. No compiler can trace this: ask :func:`is_watched`
    first."""
    for t in tensors:  # noqa: SIM110 (a generator takes twice the time, at every call)
        if isinstance(t, torch.Tensor) and t.is_neg():
            return True
    return False


def is_watched() -> bool:
    """True if a compiler, a mode, a transform or a tracer watches or changes calls, or if this PyTorch cannot tell."""
    return bool(
        is_compiling()
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def is_transformed() -> bool:
    """True inside a transform of ``torch.func``, such as grad or vmap."""
    return not is_compiling() and peek_interpreter_stack() is not None


def refuse_transforms(of: str) -> None:
    """Raise NotImplementedError inside a transform of ``torch.func``."""
    if is_transformed():
        raise NotImplementedError(f"transforms of torch.func, such as grad and vmap, of {of} are not implemented")


def requires_grad(x: torch.Tensor, operands: EpilogueOperands) -> bool:
    """True if x or an operand of the epilogue requires a gradient."""
    if x.requires_grad:
        return True
    for t in operands:  # noqa: SIM110 (a generator takes twice the time, at every call)
        # torch.compile traces alpha as a number that has no attributes
        if isinstance(t, torch.Tensor) and t.requires_grad:
            return True
    return False


def refuse_fp8_gradients(x: torch.Tensor, operands: EpilogueOperands) -> None:
    """Raise NotImplementedError with the names of the tensors that require grad in a product with fp8 activations."""
    tensors = {"x": x, **operands._asdict()}
    names = [name for name, t in tensors.items() if isinstance(t, torch.Tensor) and t.requires_grad]
    raise NotImplementedError(
        f"{' and '.join(names)}: requires grad, but gradients with fp8 activations are not implemented; call this "
        "under torch.no_grad(), pass it detached, or train with activations None, which keeps x in 16 bits"
    )


def refuse_duals(x: torch.Tensor, operands: EpilogueOperands, of: str) -> None:
    """Raise NotImplementedError if forward-mode derivatives would silently be lost."""
    if name := first_dual(x, operands):
        raise NotImplementedError(f"{name}: forward-mode derivatives of {of} are not implemented; use backward")


def first_dual(x: torch.Tensor, operands: EpilogueOperands) -> str | None:
    """Return the first of the arguments that has a tangent of forward-mode differentiation, or None."""
    if is_compiling():
        return None
    return next((name for name, t in {"x": x, **operands._asdict()}.items() if is_dual(t)), None)


def is_dual(t: object) -> bool:
    """True if ``t`` has a tangent of forward-mode differentiation, which the operator would silently drop."""
    if getattr(forward_ad, "_current_level", 0) < 0:  # unpack_dual says the same, but takes longer
        return False
    return isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None


def autocast(x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return x and the bias, in autocast's dtype if ``torch.autocast`` is on, as torch.nn.functional.linear sees
    them."""
    if not isinstance(x, torch.Tensor):
        return x, bias
    kind = "cuda" if x.is_cuda else "cpu" if x.is_cpu else ""  # x.device.type takes ten times as long
    if not kind or not torch.is_autocast_enabled(kind) or x.dtype not in _CAST:
        return x, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), None if bias is None else bias.to(dtype)


def layer_dtype(x: object, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype to which a layer of ``dtype`` casts x and its bias; None if it takes them as they are.

    A layer of 16 bits casts, unless ``torch.autocast`` has. fp8 x stays, and what is no tensor is refused later.
    """
    if dtype == torch.float32 or not isinstance(x, torch.Tensor) or x.dtype not in _CAST:
        return None
    if x.dtype == dtype and (bias is None or bias.dtype == dtype):
        return None
    kind = "cuda" if x.is_cuda else "cpu" if x.is_cpu else ""
    return None if kind and torch.is_autocast_enabled(kind) else dtype
