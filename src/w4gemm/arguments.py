"""What users pass to :func:`w4gemm.linear`: checked here and nowhere below. Errors name the argument, what was wanted
and what came."""

from __future__ import annotations

import torch

from w4gemm.config import GemmConfig
from w4gemm.epilogue import (
    Epilogue,
    EpilogueOperands,
    bias_dtype,
    default_out_dtype,
    require_activation,
    require_out_dtype,
)
from w4gemm.errors import kind_of
from w4gemm.packing.layouts import FP8_LAYOUT
from w4gemm.weight import QuantizedWeight

_FP8 = torch.float8_e4m3fn
_HALVES = (torch.float16, torch.bfloat16)
_CPU_DTYPES = (*_HALVES, torch.float32, _FP8)
_OUT_ALIGNMENT = 16


def check(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None) -> None:
    """What every call has."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: wanted a tensor (..., k), got {type(x).__name__}")
    if not isinstance(w, QuantizedWeight):
        raise TypeError(
            f"w: wanted a QuantizedWeight, got {type(w).__name__}; w4gemm.quantize(weight, format) makes one"
        )
    if w.experts:
        raise ValueError(f"w: wanted a single weight, got one of {w.experts} experts; grouped_linear takes that")
    _check_x(x, w)
    if bias is not None:
        _check_bias(bias, x, (w.n,), out_dtype)


def _check_x(x: torch.Tensor, w: QuantizedWeight) -> None:
    device, dtype = x.device, x.dtype
    dtypes = _CPU_DTYPES if device.type == "cpu" else (*_HALVES, _FP8) if w.layout == FP8_LAYOUT else _HALVES
    if dtype not in dtypes:
        hint = f"; a weight for fp8 is w.repack({FP8_LAYOUT!r})" if dtype == _FP8 else ""
        raise TypeError(
            f"x: wanted {' or '.join(map(str, dtypes))} on {device.type} for a weight in the {w.layout} layout, got "
            f"{dtype}{hint}"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"x: wanted a dense tensor, got one of layout {x.layout}")
    if x.dim() == 0 or x.shape[-1] != w.k:
        raise ValueError(f"x: wanted shape (..., k) with k {w.k} like w, got {tuple(x.shape)}")
    if device != w.tensors[0].device:
        raise ValueError(f"x: wanted w's device {w.device}, got {device}; move one with .to(...)")


def _check_bias(bias: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...], out_dtype: torch.dtype | None) -> None:
    """shape: (n), or (experts, n)."""
    if not isinstance(bias, torch.Tensor):
        raise TypeError(f"bias: wanted a tensor (n) or None, got {type(bias).__name__}")
    wanted = bias_dtype(x.dtype, out_dtype)
    if bias.dtype != wanted:
        like = "like x" if wanted == x.dtype else "beside fp8 x"
        raise TypeError(f"bias: wanted {wanted} {like}, got {bias.dtype}")
    if bias.shape != shape:
        which = "n of w" if len(shape) == 1 else "(experts, n) of w"
        raise ValueError(f"bias: wanted shape {shape}, {which}, got {tuple(bias.shape)}")
    if bias.device != x.device:
        raise ValueError(f"bias: wanted x's device {x.device}, got {bias.device}")
    if not bias.is_contiguous():
        raise ValueError(f"bias: wanted it contiguous, got stride {bias.stride(0)}; use bias.contiguous()")


def check_grouped(
    x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> None:
    """What every call with experts has, but for where they have their rows."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: wanted a tensor (..., k), got {type(x).__name__}")
    if not isinstance(w, QuantizedWeight):
        raise TypeError(
            f"w: wanted a QuantizedWeight, got {type(w).__name__}; QuantizedWeight.stack makes one of several"
        )
    if not w.experts:
        raise ValueError("w: wanted a weight of several experts (QuantizedWeight.stack makes one), got a single one")
    _check_x(x, w)
    if bias is not None:
        _check_bias(bias, x, (w.experts, w.n), out_dtype)


def check_counts(name: str, t: torch.Tensor, size: int, x: torch.Tensor) -> None:
    """m_offsets or counts: their dtype, shape and device. Their values only the device knows."""
    if not isinstance(t, torch.Tensor) or t.dtype != torch.int32:
        raise TypeError(f"{name}: wanted torch.int32 ({size}), got {kind_of(t)}")
    if t.shape != (size,) or not t.is_contiguous():
        raise ValueError(f"{name}: wanted a contiguous tensor of shape ({size},), got {tuple(t.shape)}")
    if t.device != x.device:
        raise ValueError(f"{name}: wanted x's device {x.device}, got {t.device}")


def checked_indices(indices: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As kernels take them: contiguous int32."""
    if not isinstance(indices, torch.Tensor) or indices.dtype not in (torch.int32, torch.int64) or indices.dim() != 1:
        raise TypeError(f"indices: wanted int32 or int64 (total_m), got {kind_of(indices)}")
    if indices.device != x.device:
        raise ValueError(f"indices: wanted x's device {x.device}, got {indices.device}")
    return indices.to(torch.int32).contiguous()


def check_activation(activation: str | None, n: int) -> None:
    require_activation(activation)
    if activation == "silu_mul" and n % 2:
        raise ValueError(f"activation: silu_mul wants an even n, pairs of gate and up rows in w, got n {n}")


def fused(
    x: torch.Tensor,
    w: QuantizedWeight,
    given: EpilogueOperands,
    activation: str | None,
    out_dtype: torch.dtype | None,
    rows: torch.Size | None = None,
) -> tuple[Epilogue, EpilogueOperands]:
    """The epilogue of a call that asks for more than a bias, and what it is made with. ``given``: alpha, bias (already
    checked), residual and token_scale as they came. ``rows``: the result's shape without its last dimension, where it
    is not that of x."""
    alpha, bias, residual, token_scale, _ = given
    check_activation(activation, w.n)
    require_out_dtype(out_dtype)
    kind = None
    if alpha is not None:
        kind, alpha = _alpha(alpha, x.device)
    if out_dtype == default_out_dtype(x.dtype):
        out_dtype = None
    epilogue = Epilogue(activation, kind, bias is not None, residual is not None, out_dtype, token_scale is not None)
    if residual is not None:
        _check_residual(residual, x, (*(x.shape[:-1] if rows is None else rows), epilogue.columns(w.n)), epilogue)
        residual = residual.view(-1, residual.shape[-1])
    if token_scale is not None:
        token_scale = _token_scale(token_scale, x)
    return epilogue, EpilogueOperands(alpha, bias, residual, token_scale)


def _token_scale(scale: object, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != _FP8:
        raise TypeError(f"token_scale: wanted None for x of {x.dtype}, since only fp8 x has scales")
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
        raise TypeError(f"token_scale: wanted torch.float32 {tuple(x.shape[:-1])}, got {kind_of(scale)}")
    if scale.shape not in (x.shape[:-1], (*x.shape[:-1], 1)) or scale.device != x.device:
        raise ValueError(
            f"token_scale: wanted shape {tuple(x.shape[:-1])}, one number for each row of x, on {x.device}, got "
            f"{tuple(scale.shape)} on {scale.device}"
        )
    return scale.reshape(-1).contiguous()


def _alpha(alpha: object, device: torch.device) -> tuple[str, float | torch.Tensor]:
    if isinstance(alpha, torch.Tensor):
        if alpha.dtype != torch.float32 or alpha.numel() != 1 or alpha.device != device:
            wanted = f"a number or a torch.float32 tensor of one element on {device}"
            raise ValueError(f"alpha: wanted {wanted}, got {kind_of(alpha)} on {alpha.device}")
        return "device", alpha.view(1)
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise TypeError(f"alpha: wanted a number or a tensor of one, got {type(alpha).__name__}")
    return "host", float(alpha)


def _check_residual(residual: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...], epilogue: Epilogue) -> None:
    dtype = epilogue.result_dtype(x.dtype)
    if not isinstance(residual, torch.Tensor):
        raise TypeError(f"residual: wanted a tensor or None, got {type(residual).__name__}")
    if residual.dtype != dtype:
        raise TypeError(f"residual: wanted {dtype} like the result, got {residual.dtype}")
    if residual.shape != shape:
        raise ValueError(f"residual: wanted shape {tuple(shape)} like the result, got {tuple(residual.shape)}")
    if residual.device != x.device:
        raise ValueError(f"residual: wanted x's device {x.device}, got {residual.device}")
    if not residual.is_contiguous():
        raise ValueError(f"residual: wanted it contiguous, got strides {residual.stride()}; use residual.contiguous()")


def check_out(
    out: torch.Tensor,
    x: torch.Tensor,
    n: int,
    epilogue: Epilogue,
    fused: EpilogueOperands,
    rows: torch.Size | None = None,
) -> None:
    """``rows`` as for :func:`fused`."""
    shape = (*(x.shape[:-1] if rows is None else rows), epilogue.columns(n))
    dtype = epilogue.result_dtype(x.dtype)
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out: wanted a tensor or None, got {type(out).__name__}")
    if out.dtype != dtype:
        like = "like x" if epilogue.out_dtype is None else "as out_dtype"
        raise TypeError(f"out: wanted {dtype} {like}, got {out.dtype}")
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
    for name, other in (("x", x), *fused._asdict().items()):
        if isinstance(other, torch.Tensor) and _overlap(out, other):
            if name == "residual" and out.data_ptr() == other.data_ptr():
                continue  # each element is read before it is written
            also = " or all of the residual's" if name == "residual" else ""
            raise ValueError(f"out: wanted memory of its own{also}, got memory shared with {name}")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the address ranges of two tensors meet."""
    if a.numel() == 0 or b.numel() == 0:
        return False

    def span(t: torch.Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()

    (a_first, a_end), (b_first, b_end) = span(a), span(b)
    return a_first < b_end and b_first < a_end


def config_text(config: object) -> str:
    if not isinstance(config, GemmConfig):
        raise TypeError(f"config: wanted a GemmConfig, its string or None, got {type(config).__name__} {config!r}")
    return str(config)
