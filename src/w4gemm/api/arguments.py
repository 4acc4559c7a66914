"""The checks of a product's arguments. Code below the API checks nothing again.

Each error names the argument, what was expected and what came.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor

from w4gemm.api.modes import is_watched
from w4gemm.core.activation import canonical, require_pairs
from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import (
    HALVES,
    SCALE_BLOCK,
    Epilogue,
    EpilogueOperands,
    bias_dtype,
    default_out_dtype,
    replaced,
    require_out_dtype,
)
from w4gemm.core.errors import kind_of, require_dense, require_own_numbers, require_tensor
from w4gemm.packing.layouts import FP8_LAYOUT
from w4gemm.weights.weight import QuantizedWeight

FP8 = torch.float8_e4m3fn
UE8M0 = torch.float8_e8m0fnu
DTYPES = (*HALVES, torch.float32, FP8)
"""dtypes of x, of float32 on the CPU only."""
_OUT_ALIGNMENT = 16
_OWN_CHECKS = ("alpha", "bias", "residual", "token_scale", "block_scale", "channel_scale")
_OTHER_OPERANDS = tuple(name for name in EpilogueOperands._fields if name not in _OWN_CHECKS)
"""Operands that are all that :meth:`Epilogue.operand_shapes` says."""


# --- x and w ---------------------------------------------------------------------------------------------------------


def check(x: torch.Tensor, w: QuantizedWeight, *, grouped: bool = False, any_dtype: bool = False) -> None:
    """Check x (..., k) and w, a weight of several experts if ``grouped``; not x's dtype if ``any_dtype``."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: wanted a tensor (..., k), got {kind_of(x)}")
    if not isinstance(w, QuantizedWeight):
        made = "QuantizedWeight.stack makes one of several" if grouped else "w4gemm.quantize(weight, format) makes one"
        raise TypeError(f"w: wanted a QuantizedWeight, got {type(w).__name__}; {made}")
    if grouped and not w.experts:
        raise ValueError("w: wanted a weight of several experts (QuantizedWeight.stack makes one), got a single one")
    if w.experts and not grouped:
        raise ValueError(f"w: wanted a single weight, got one of {w.experts} experts; grouped_linear takes that")
    _check_x(x, w, any_dtype)


def _check_x(x: torch.Tensor, w: QuantizedWeight, any_dtype: bool) -> None:
    device, dtype = x.device, x.dtype
    dtypes = _dtypes(w, device)
    if dtype not in dtypes and not any_dtype:
        hint = "; w.repack(activations='fp8') takes fp8 x, and quantizes 16-bit x itself"
        raise TypeError(
            f"x: wanted {' or '.join(map(str, dtypes))} on {device.type} for a weight in the {w.layout} layout, got "
            f"{dtype}{hint if dtype == FP8 or dtypes == (FP8,) else ''}"
        )
    require_dense("x", x)
    if x.dim() == 0 or x.shape[-1] != w.k:
        raise ValueError(f"x: wanted shape (..., k) with k {w.k} like w, got {tuple(x.shape)}")
    if device != w.tensors[0].device:
        raise ValueError(f"x: wanted w's device {w.device}, got {device}; move one with .to(...)")


def _dtypes(w: QuantizedWeight, device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the dtypes of x that ``linear`` multiplies by ``w``."""
    if device.type == "cpu" or (device.type == "meta" and w.layout in ("cpu", "canonical")):  # of some device yet
        return DTYPES
    if w.activations == "fp8":
        return (*HALVES, FP8)
    return (FP8,) if w.layout == FP8_LAYOUT else HALVES


def check_offsets(m_offsets: torch.Tensor, experts: int, total_m: int, device: torch.device) -> None:
    """Check the first row of each expert among ``total_m`` rows. Values on a GPU are not read."""
    require_tensor("m_offsets", m_offsets, torch.int32, (experts + 1,), device)
    if is_known(m_offsets):
        rows: list[int] = m_offsets.tolist()
        if rows != sorted(rows):
            raise ValueError(f"m_offsets: wanted ascending rows, got {rows[:16]}")
        if rows[0] < 0 or rows[-1] > total_m:
            raise ValueError(f"m_offsets: wanted rows 0 .. {total_m}, got {rows[0] if rows[0] < 0 else rows[-1]}")


def check_counts(counts: torch.Tensor, x: torch.Tensor) -> None:
    """Check each expert's number of rows of x (experts, max_m, k). Values on a GPU are not read."""
    require_tensor("counts", counts, torch.int32, (x.shape[0],), x.device)
    check_rows("counts", counts, 0, x.shape[1] + 1)


def is_known(numbers: torch.Tensor) -> bool:
    """True if the host may read ``numbers``. It may not on a GPU, because that would synchronize, nor under a
    compiler."""
    return numbers.device.type == "cpu" and numbers.numel() > 0 and not is_watched()


def checked_indices(indices: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Check ``indices``; return them as kernels take them, contiguous int32 (total_m,)."""
    if not isinstance(indices, torch.Tensor) or indices.dtype not in (torch.int32, torch.int64) or indices.dim() != 1:
        raise TypeError(f"indices: wanted int32 or int64 (total_m), got {kind_of(indices)}")
    require_dense("indices", indices)
    if indices.device != x.device:
        raise ValueError(f"indices: wanted x's device {x.device}, got {indices.device}")
    check_rows("indices", indices, 0, x.shape[0])
    return indices.to(torch.int32).contiguous()


def check_rows(name: str, numbers: torch.Tensor, least: int, end: int) -> None:
    """Check that ``numbers``, if they are known, are rows ``least`` .. end - 1."""
    if not is_known(numbers):
        return
    low, high = (int(t) for t in numbers.aminmax())
    if low < least or high >= end:
        legal = f"at most {end - 1}" if least < 0 else f"{least} .. {end - 1}"
        raise ValueError(f"{name}: wanted rows {legal}, got {low if low < least else high}")


# --- the epilogue ----------------------------------------------------------------------------------------------------


def checked_activation(activation: str | None, n: int) -> str | None:
    """Check an activation for a weight of n rows; return its canonical text."""
    activation = canonical(activation)
    require_pairs("activation", activation, n)
    return activation


def checked_epilogue(
    x: torch.Tensor,
    w: QuantizedWeight,
    operands: EpilogueOperands,
    activation: str | None,
    out_dtype: torch.dtype | None,
    shape: torch.Size,
) -> tuple[Epilogue, EpilogueOperands]:
    """Check the epilogue of a call; return it and its operands as kernels take them.

    Args:
        x: x as it is multiplied, checked.
        operands: the operands as passed by the caller.
        shape: shape of the result without its last dimension.
    """
    alpha, bias, residual, scale, *_ = operands
    activation = checked_activation(activation, w.n)
    require_out_dtype(out_dtype)
    if bias is not None:
        _check_bias(bias, x, w, out_dtype)
    if alpha is not None:
        alpha = _checked_alpha(alpha, x.device)
    token_scale, block_scale = (None, None) if scale is None else _checked_token_scale(scale, x)
    if block_scale is not None and w.perm is not None:
        raise ValueError(
            "token_scale: wanted one number for each row of x with a weight in act-order, which takes "
            f"x's columns in another order, got one for each {SCALE_BLOCK} columns"
        )
    if out_dtype == default_out_dtype(x.dtype):
        out_dtype = None
    if alpha is not operands.alpha or token_scale is not scale:
        operands = replaced(operands, alpha=alpha, token_scale=token_scale, block_scale=block_scale)
    epilogue = Epilogue.of(operands, activation, out_dtype)
    for name in _OTHER_OPERANDS:
        if (t := getattr(operands, name)) is not None:
            tensors = epilogue.operand_shapes(x.dtype, (shape.numel(), epilogue.columns(w.n)), w.n, w.experts)
            require_tensor(name, t, *tensors[name], x.device)
    if residual is not None:
        result, full_shape = epilogue.result_dtype(x.dtype), (*shape, epilogue.columns(w.n))
        like = "like the result"
        require_tensor("residual", residual, result, full_shape, x.device, like=like, size=f" {like}")
        if len(full_shape) != 2:
            operands = replaced(operands, residual=residual.view(-1, full_shape[-1]))
    return epilogue, operands


def _check_bias(bias: torch.Tensor, x: torch.Tensor, w: QuantizedWeight, out_dtype: torch.dtype | None) -> None:
    dtype = bias_dtype(x.dtype, out_dtype)
    if x.device.type == "cpu" and out_dtype == torch.float32 and getattr(bias, "dtype", None) == torch.float32:
        dtype = torch.float32  # there the epilogue is computed in float32 whatever the bias is
    shape, size = ((w.experts, w.n), ", (experts, n) of w") if w.experts else ((w.n,), ", n of w")
    like = "like x" if x.dtype != FP8 else "with fp8 x"
    require_tensor("bias", bias, dtype, shape, x.device, like=like, size=size)


def bias_for_fp8(bias: object, x: torch.Tensor, out_dtype: torch.dtype) -> object:
    """Return the bias for a product with x quantized to fp8. A bias of x's dtype is cast to the kernels' dtype, another
    stays as it is."""
    if not isinstance(bias, torch.Tensor) or bias.dtype != x.dtype:
        return bias
    in_float32 = x.device.type == "cpu" and out_dtype == torch.float32
    return bias.to(torch.float32 if in_float32 else bias_dtype(FP8, out_dtype))


def _checked_token_scale(scale: object, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Check token_scale; return it in float32 as (scales of rows, None) or (None, scales of each 128 columns)."""
    of_rows, blocks = x.shape[:-1], -(-x.shape[-1] // SCALE_BLOCK)
    if x.dtype != FP8:
        raise TypeError(f"token_scale: wanted None for x of {x.dtype}, since only fp8 x has scales")
    if not isinstance(scale, torch.Tensor) or scale.dtype not in (torch.float32, UE8M0, torch.int32):
        raise TypeError(
            f"token_scale: wanted torch.float32 {tuple(of_rows)}, got {kind_of(scale)}; powers of two may be "
            f"{UE8M0}, or four of them a torch.int32"
        )
    if scale.dtype == torch.int32:  # as DeepEP packs them: of four blocks, the first in the lowest byte
        words = (*of_rows, -(-blocks // 4))
        if scale.shape != words:
            raise ValueError(f"token_scale: wanted shape {words} of torch.int32, four blocks each, got {scale.shape}")
        scale = scale.reshape(-1).view(UE8M0).view(*of_rows, 4 * words[-1])[..., :blocks]
    require_dense("token_scale", scale)
    scale = scale.float()
    shapes = of_rows, (*of_rows, 1), (*of_rows, blocks)
    if scale.shape not in shapes or scale.device != x.device:
        raise ValueError(
            f"token_scale: wanted shape {tuple(of_rows)}, one number for each row of x, or {shapes[2]}, one for each "
            f"{SCALE_BLOCK} columns of it, on {x.device}, got {tuple(scale.shape)} on {scale.device}"
        )
    if scale.shape == shapes[2] and blocks > 1:
        return None, scale.movedim(-1, 0).reshape(blocks, -1).T  # if copied, as kernels read it
    return scale.reshape(-1).contiguous(), None


def _checked_alpha(alpha: object, device: torch.device) -> float | torch.Tensor:
    if isinstance(alpha, torch.Tensor):
        if alpha.dtype != torch.float32 or alpha.numel() != 1 or alpha.device != device:
            legal = f"a number or a torch.float32 tensor of one element on {device}"
            raise ValueError(f"alpha: wanted {legal}, got {kind_of(alpha)} on {alpha.device}")
        return alpha.view(1)
    factor = checked_factor(alpha)
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import has_static_value  # its import takes seconds

        if not has_static_value(factor):  # an operator would have it as a constant, with a graph for each value
            return torch.ones(1, device=device) * factor
    return factor


def checked_factor(alpha: object) -> float:
    """Check an alpha that is no tensor; return it as a float."""
    if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real):
        raise TypeError(f"alpha: wanted a number or a tensor of one element, got {type(alpha).__name__}")
    try:
        return float(alpha)
    except OverflowError:
        raise ValueError("alpha: wanted a number of at most 1.8e308, got a larger int") from None


# --- config and out ---------------------------------------------------------------------------------------------------


def checked_config(config: GemmConfig | str) -> str:
    """Check the type of a forced config; return it as a string."""
    if isinstance(config, str):
        return config
    if not isinstance(config, GemmConfig):
        raise TypeError(f"config: wanted a GemmConfig, its string or None, got {type(config).__name__} {config!r}")
    return str(config)


def check_out(
    out: torch.Tensor,
    read: Mapping[str, object],
    epilogue: Epilogue,
    x: torch.Tensor,
    shape: tuple[int, ...],
    size: str = "",
) -> None:
    """Check the tensor that the result of ``shape`` is written to.

    Args:
        read: as for :func:`check_own_memory`.
        size: as for :func:`w4gemm.core.errors.require_tensor`.
    """
    like = "like x" if epilogue.out_dtype is None else "as out_dtype"
    require_tensor("out", out, epilogue.result_dtype(x.dtype), shape, x.device, like=like, size=size)
    if torch.is_grad_enabled() and out.requires_grad:
        raise ValueError("out: wanted a tensor without requires_grad, got one with")
    if not _has_address(out):
        return
    require_own_numbers("out", out)
    check_alignment("out", out, _OUT_ALIGNMENT)
    check_own_memory(out, read)


def _has_address(out: torch.Tensor) -> bool:
    """True if a launch writes to the memory of ``out``. It does not while a graph is traced, because operators write
    elsewhere first, nor if ``out`` has no memory."""
    return not (torch.compiler.is_compiling() or out.is_meta or isinstance(out, FakeTensor))


def check_own_memory(out: torch.Tensor, read: Mapping[str, object]) -> None:
    """Raise ValueError if ``out`` shares memory with a tensor that a launch reads; it may be the residual.

    Args:
        read: tensors, and tuples of tensors, by the name of their argument; other values are passed over.
    """
    if not _has_address(out) or not out.numel():
        return
    first, end = _addresses(out)
    for name, value in read.items():
        for t in value if isinstance(value, tuple) else (value,):
            if not isinstance(t, torch.Tensor) or not t.numel():
                continue
            other_first, other_end = _addresses(t)
            if other_first >= end or first >= other_end:
                continue
            if name == "residual" and first == other_first:
                continue  # each element is read before it is written
            also = " or all of the residual's" if name == "residual" else ""
            raise ValueError(f"out: wanted memory of its own{also}, got memory shared with {name}")


def check_alignment(name: str, t: torch.Tensor, bytes: int) -> None:
    """Raise ValueError unless ``t`` begins at a multiple of ``bytes``."""
    if past := t.data_ptr() % bytes:
        raise ValueError(f"{name}: wanted its data at a multiple of {bytes} bytes, got {past} past one")


def _addresses(t: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte of ``t`` and the address behind its last byte. ``t`` is not empty."""
    first = t.data_ptr()
    if t.is_contiguous():
        return first, first + t.nbytes
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return first, first + (last + 1) * t.element_size()
