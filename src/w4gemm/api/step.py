"""Small operations of a model between its products: norms and gates, also where they are added or quantized.

One kernel each on SM90, PyTorch's operators elsewhere and for shapes that a kernel does not take. The functions that
compiled graphs call are operators, ``torch.ops.w4gemm.NAME``. There are no gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from w4gemm.core.activation import parse
from w4gemm.core.problem import Device
from w4gemm.kernels import Helper, launcher
from w4gemm.kernels.helpers.activation_quantize import ADD_RMS, ActivationQuantize
from w4gemm.kernels.helpers.rows import GateHalves, RmsNorm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x ** 2) + eps), rounded to x's dtype, times weight.

    Args:
        x: (..., k), float16 or bfloat16.
        weight: (k,) of x's dtype.
    """
    k = len(weight)
    x = x.contiguous() if x.is_cuda else x  # heads of a joint product are not, of several sequences
    run = launcher(RmsNorm.of, x.device, x.dtype, k) if x.is_cuda and RmsNorm.takes(weight, x) else None
    if run is None:
        y = x.float()
        return (y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight
    out = torch.empty_like(x)
    run(x.view(-1, k), None, weight, out.view(-1, k), None, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (:func:`rms_norm` of total, total), total = x + residual rounded to their dtype.

    Args:
        x, residual: (m, k), float16 or bfloat16.
        weight: (k,) of their dtype.
    """
    x, residual = x.contiguous(), residual.contiguous()
    takes = x.is_cuda and RmsNorm.takes(weight, x, residual)
    run = launcher(RmsNorm.of, x.device, x.dtype, len(weight), True) if takes else None
    if run is None:
        total = x + residual
        return rms_norm(total, weight, eps), total
    out, total = torch.empty_like(x), torch.empty_like(x)
    if len(x):
        run(x, residual, weight, out, total, eps)
    return out, total


def add_rms_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (x8, token_scale, total), total = x + residual rounded to their dtype, x8 and token_scale as
    :func:`w4gemm.quantize_activations` gives them for total with this norm_weight.

    Args:
        x, residual: (m, k), float16 or bfloat16.
        weight: (k,) of their dtype.
    """
    x, residual = x.contiguous(), residual.contiguous()
    m, k = x.shape
    takes = x.is_cuda and RmsNorm.takes(weight, x, residual)
    run = launcher(ActivationQuantize.of, x.device, x.dtype, k, ADD_RMS, True) if takes and k % 8 == 0 else None
    if run is None:
        total = x + residual
        return *torch.ops.w4gemm.quantize_activations(total, weight, eps, False), total
    x8 = torch.empty((m, k), dtype=torch.uint8, device=x.device)
    token_scale, total = torch.empty(m, dtype=torch.float32, device=x.device), torch.empty_like(x)
    if m:
        run(x, residual, weight, x8, token_scale, total, eps)
    return x8.view(torch.float8_e4m3fn), token_scale, total


def gate_halves(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return act(gate, up) (m, n) of 16-bit x (m, 2 n), gates in its left half."""
    run = launcher(GateHalves.of, x.device, x.dtype, activation) if x.is_cuda and GateHalves.takes(x) else None
    if run is None:
        gate, up = x.float().chunk(2, -1)
        return parse(activation).apply(torch.stack((gate, up), -1).flatten(-2)).to(x.dtype)
    out = x.new_empty(len(x), x.shape[1] // 2)
    if len(x):
        run(x, out)
    return out


def between_products(device: Device, dtype: torch.dtype, k: int, fp8: bool) -> tuple[Helper | None, ...]:
    """Return the kernels of the operations before a product with k input features; None for a kernel that does not
    run.

    Args:
        fp8: True if the product's x is quantized.
    """
    if fp8:
        return (ActivationQuantize.of(device, dtype, k, ADD_RMS, True),)  # and what every layer with fp8 x needs
    return RmsNorm.of(device, dtype, k, True), GateHalves.of(device, dtype, "silu_mul")


# --- the operators ---------------------------------------------------------------------------------------------------


def _fake_add_rms_norm(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _fake_add_rms_norm_quantize(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x8 = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return x8, x.new_empty(x.shape[0], dtype=torch.float32), x.new_empty(x.shape)


def _fake_gate_halves(x: torch.Tensor, activation: str) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


_NORM = "(Tensor x, Tensor residual, Tensor weight, float eps) -> "
for _function, _schema, _fake in (
    (add_rms_norm, f"{_NORM}(Tensor, Tensor)", _fake_add_rms_norm),
    (add_rms_norm_quantize, f"{_NORM}(Tensor, Tensor, Tensor)", _fake_add_rms_norm_quantize),
    (gate_halves, "(Tensor x, str activation) -> Tensor", _fake_gate_halves),
):
    _name = f"w4gemm::{_function.__name__}"
    torch.library.define(_name, _schema)
    torch.library.impl(_name, ("cpu", "cuda"))(_function)
    torch.library.register_fake(_name)(_fake)
