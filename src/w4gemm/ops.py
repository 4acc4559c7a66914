"""THE boundary: :func:`linear`. What users pass is checked here and nowhere below.

In plain eager mode ``linear`` runs the kernel itself, since PyTorch's dispatcher would cost as much as the launch.
Under ``torch.compile``, autograd, tensor subclasses and modes it goes through the operator
``torch.ops.w4gemm.linear``, which takes flat tensors and names only.
"""

from __future__ import annotations

import functools

import torch
from torch.autograd import forward_ad

from w4gemm import dispatch
from w4gemm.config import GemmConfig
from w4gemm.formats import WeightFormat
from w4gemm.gather import gather_columns
from w4gemm.kernels import Operands
from w4gemm.weight import QuantizedWeight

_DTYPES = {"cpu": (torch.float16, torch.bfloat16, torch.float32)}
_GPU_DTYPES = (torch.float16, torch.bfloat16)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OUT_ALIGNMENT = 16


def linear(
    x: torch.Tensor,
    w: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    config: GemmConfig | str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """x @ w.T + bias, with float32 accumulation and one rounding to x's dtype.

    On a GPU it runs on the current stream of x's device and never synchronizes.

    Args:
        x: activations (..., k), float16 or bfloat16; on the CPU also float32. Any strides; without tokens the result is
            empty and nothing runs.
        w: the weight (n, k), on x's device and in a layout that a kernel reads there: see ``w.repack()``.
        bias: (n) of x's dtype, or None.
        out: where to write the result: contiguous (..., n) of x's dtype, 16-byte aligned, sharing no memory with x or
            bias. Not together with gradients.
        config: forces a kernel's config, as :func:`w4gemm.dispatch.plan` takes it; for tests and measurements.
        batch_invariant: whether a row of the result must have the same bits whatever the other rows hold and however
            many there are. One order of additions then serves every m, which costs speed where another is faster (see
            docs/measured.md). Gradients are not covered.

    Returns:
        (..., n) of x's dtype; ``out`` if given. Gradients flow to x and bias, never to w.

    Raises:
        TypeError, ValueError: for a bad argument, naming it, what was wanted and what came.
        UnsupportedError: if no kernel can run this here; lists each kernel's reason.
    """
    _check(x, w, bias)
    if config is None:
        config = ""
    elif not isinstance(config, str):
        config = _config_text(config)
    if batch_invariant is not False and batch_invariant is not True:
        raise TypeError(f"batch_invariant: wanted a bool, got {type(batch_invariant).__name__} {batch_invariant!r}")
    if _needs_dispatcher(x, bias):
        return _linear_dispatched(x, w, bias, out, config, batch_invariant)
    rows = x if x.dim() == 2 else x.reshape(-1, w.k)
    if w.perm is not None:
        rows = gather_columns(rows, w.perm)
    if out is None:
        d = torch.empty((rows.shape[0], w.n), dtype=x.dtype, device=x.device)
        _run(rows, w.tensors, w.format, w.layout, d, bias, config, batch_invariant)
        return d if x.dim() == 2 else d.view(*x.shape[:-1], w.n)
    _check_out(out, x, w, bias)
    _run(rows, w.tensors, w.format, w.layout, out.view(-1, w.n), bias, config, batch_invariant)
    return out


def _run(
    x: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    format: WeightFormat,
    layout: str,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    config: str,
    batch_invariant: bool,
) -> None:
    """Look up the plan and launch it. x (m, k), out (m, n) contiguous."""
    m, k = x.shape
    if m == 0:
        return
    row, column = x.stride()
    if column != 1 or (row < k and m > 1):  # rows that overlap, as after expand, are no matrix to a kernel
        x = torch.empty((m, k), dtype=x.dtype, device=x.device).copy_(x)
    device = x.device
    n, has_bias = out.shape[1], bias is not None
    call = dispatch.Call(dispatch.interval(m), n, k, x.dtype, format, layout, has_bias, device, config, batch_invariant)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            dispatch.plan_for(call).launch(Operands(x, tensors, out, bias))
    else:
        dispatch.plan_for(call).launch(Operands(x, tensors, out, bias))


def _needs_dispatcher(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether anything but plain eager execution is going on: then only the registered operator is right."""
    return (
        torch.compiler.is_compiling()
        or type(x) not in _PLAIN
        or (torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)))
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def _is_dual(x: torch.Tensor) -> bool:
    """Whether forward-mode differentiation is going on, for which the operator would silently give zeros."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def _linear_dispatched(
    x: torch.Tensor,
    w: QuantizedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    config: str,
    batch_invariant: bool,
) -> torch.Tensor:
    if not torch.compiler.is_compiling() and _is_dual(x):
        raise NotImplementedError("x: forward-mode derivatives of a 4-bit linear are not implemented; use backward")
    rows = x.reshape(-1, w.k)
    if w.perm is not None:  # an operator that autograd undoes, and that a compiler may fuse with what made x
        rows = rows.index_select(1, w.perm)
    names = (w.format.name, w.layout, w.n, w.k)
    d = torch.ops.w4gemm.linear(rows, list(w.tensors), *names, bias, config, batch_invariant)
    d = d.reshape(*x.shape[:-1], w.n)
    if out is None:
        return d
    if torch.is_grad_enabled() and d.requires_grad:
        raise ValueError("out: wanted None where a gradient is needed; call linear without out, or under no_grad")
    _check_out(out, x, w, bias)
    return out.copy_(d)


# --- what users pass -----------------------------------------------------------------------------------------------


def _check(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: wanted a tensor (..., k), got {type(x).__name__}")
    if not isinstance(w, QuantizedWeight):
        raise TypeError(
            f"w: wanted a QuantizedWeight, got {type(w).__name__}; w4gemm.quantize(weight, format) makes one"
        )
    device, dtype = x.device, x.dtype
    dtypes = _DTYPES.get(device.type, _GPU_DTYPES)
    if dtype not in dtypes:
        raise TypeError(f"x: wanted {' or '.join(map(str, dtypes))} on {device.type}, got {dtype}")
    if x.dim() == 0 or x.shape[-1] != w.k:
        raise ValueError(f"x: wanted shape (..., k) with k {w.k} like w, got {tuple(x.shape)}")
    if device != w.tensors[0].device:
        raise ValueError(f"x: wanted w's device {w.device}, got {device}; move one with .to(...)")
    if bias is None:
        return
    if not isinstance(bias, torch.Tensor):
        raise TypeError(f"bias: wanted a tensor (n) or None, got {type(bias).__name__}")
    if bias.dtype != dtype:
        raise TypeError(f"bias: wanted {dtype} like x, got {bias.dtype}")
    if bias.dim() != 1 or bias.shape[0] != w.n:
        raise ValueError(f"bias: wanted shape ({w.n},), n of w, got {tuple(bias.shape)}")
    if bias.device != device:
        raise ValueError(f"bias: wanted x's device {device}, got {bias.device}")
    if bias.stride(0) != 1 and w.n > 1:
        raise ValueError(f"bias: wanted it contiguous, got stride {bias.stride(0)}; use bias.contiguous()")


def _check_out(out: torch.Tensor, x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> None:
    shape = (*x.shape[:-1], w.n)
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out: wanted a tensor or None, got {type(out).__name__}")
    if out.dtype != x.dtype:
        raise TypeError(f"out: wanted {x.dtype} like x, got {out.dtype}")
    if out.shape != shape:
        raise ValueError(f"out: wanted shape {tuple(shape)}, got {tuple(out.shape)}")
    if out.device != x.device:
        raise ValueError(f"out: wanted x's device {x.device}, got {out.device}")
    if not out.is_contiguous():
        raise ValueError(f"out: wanted it contiguous, got strides {out.stride()} for shape {tuple(out.shape)}")
    if torch.is_grad_enabled() and out.requires_grad:
        raise ValueError("out: wanted a tensor without requires_grad, got one with")
    if torch.compiler.is_compiling():  # there are no addresses yet; and the operator writes elsewhere first
        return
    if past := out.data_ptr() % _OUT_ALIGNMENT:
        raise ValueError(f"out: wanted its data at a multiple of {_OUT_ALIGNMENT} bytes, got {past} past one")
    for name, other in (("x", x), ("bias", bias)):
        if other is not None and _overlap(out, other):
            raise ValueError(f"out: wanted memory of its own, got memory shared with {name}")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the address ranges of two tensors meet."""
    if a.numel() == 0 or b.numel() == 0:
        return False

    def span(t: torch.Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()

    (a_first, a_end), (b_first, b_end) = span(a), span(b)
    return a_first < b_end and b_first < a_end


def _config_text(config: object) -> str:
    if not isinstance(config, GemmConfig):
        raise TypeError(f"config: wanted a GemmConfig, its string or None, got {type(config).__name__} {config!r}")
    return str(config)


# --- the operator --------------------------------------------------------------------------------------------------

_WEIGHT = "Tensor[] weight, str format, str layout, int n, int k"
_parse_format = functools.cache(WeightFormat.parse)

torch.library.define(
    "w4gemm::linear", f"(Tensor x, {_WEIGHT}, Tensor? bias, str config, bool batch_invariant) -> Tensor"
)
torch.library.define("w4gemm::linear_dx", f"(Tensor grad, {_WEIGHT}) -> Tensor")


@torch.library.impl("w4gemm::linear", ("cpu", "cuda"))
def _linear_op(x, weight, format, layout, n, k, bias, config, batch_invariant):  # type: ignore[no-untyped-def]
    out = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    _run(x, tuple(weight), _parse_format(format), layout, out, bias, config, batch_invariant)
    return out


@torch.library.register_fake("w4gemm::linear")
def _linear_fake(x, weight, format, layout, n, k, bias, config, batch_invariant):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], n))


@torch.library.impl("w4gemm::linear_dx", ("cpu", "cuda"))
def _linear_dx_op(grad, weight, format, layout, n, k):  # type: ignore[no-untyped-def]
    w = QuantizedWeight(_parse_format(format), n, k, layout, tuple(weight))
    return grad @ w.dequantize(grad.dtype)


@torch.library.register_fake("w4gemm::linear_dx")
def _linear_dx_fake(grad, weight, format, layout, n, k):  # type: ignore[no-untyped-def]
    return grad.new_empty((grad.shape[0], k))


def _save_weight(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, weight, *names = inputs
    ctx.save_for_backward(*weight)
    ctx.names = names[:4]


def _linear_backward(ctx, grad):  # type: ignore[no-untyped-def]
    weight = list(ctx.saved_tensors)
    dx = torch.ops.w4gemm.linear_dx(grad, weight, *ctx.names) if ctx.needs_input_grad[0] else None
    dbias = grad.sum(0) if ctx.needs_input_grad[6] else None
    return dx, [None] * len(weight), None, None, None, None, dbias, None, None


def _linear_dx_backward(ctx, grad):  # type: ignore[no-untyped-def]
    weight = list(ctx.saved_tensors)
    dgrad = torch.ops.w4gemm.linear(grad, weight, *ctx.names, None, "", False)
    return dgrad, [None] * len(weight), None, None, None, None


torch.library.register_autograd("w4gemm::linear", _linear_backward, setup_context=_save_weight)
torch.library.register_autograd("w4gemm::linear_dx", _linear_dx_backward, setup_context=_save_weight)
