"""Gradients beside float16 x, whose true size lies within float16's range, through factors that take them out of it."""

from __future__ import annotations

import pytest
import torch

from w4gemm import QuantizedWeight, W4GroupedLinear, linear, quantize
from w4gemm.api.operators import halved

N, K, M = 64, 96, 7
G = (torch.randn(M, N, generator=torch.Generator().manual_seed(1)) * 1e-3).half()
OFFSETS = torch.tensor([0, 3, 3, M], dtype=torch.int32)


def weight(size: float) -> QuantizedWeight:
    """A weight whose numbers are about ``size`` large."""
    return quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(2)) * size, "int4_g32").repack()


def inputs() -> torch.Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(3)).half().requires_grad_()


def assert_near(actual: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert actual is not None and actual.dtype == torch.float16
    assert (actual.double() - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("alpha", [1e-6, 3e-5, 1.0, 3e4])
def test_through_alpha(alpha: float) -> None:
    x, w = inputs(), weight(1 / alpha)
    expected = alpha * G.double() @ w.dequantize(torch.float64)
    linear(x, w, alpha=alpha).backward(G)
    assert_near(x.grad, expected)
    of_transform = torch.func.grad(lambda x: (linear(x, w, alpha=alpha).double() * G.double()).sum())(x.detach())
    assert_near(of_transform, expected)


def test_through_experts_scales(device: str) -> None:
    lowest = 1e-6 if device == "cpu" else 1e-4  # tensor cores take the weights, of 1 / lowest, in float16
    x, scales = inputs().detach().to(device).requires_grad_(), torch.tensor([lowest, 1.0, 3e4])
    ws = [weight(float(1 / s)) for s in scales]
    stack = QuantizedWeight.stack(ws).to(device).repack()
    W4GroupedLinear.from_weight(stack, expert_scale=scales.to(device))(x, OFFSETS.to(device)).backward(G.to(device))
    for e in (0, 2):
        rows = slice(int(OFFSETS[e]), int(OFFSETS[e + 1]))
        expected = float(scales[e]) * G[rows].double() @ ws[e].dequantize(torch.float64)
        assert_near(None if x.grad is None else x.grad[rows].cpu(), expected)


def test_of_a_float32_bias_beyond_float16() -> None:
    x, bias = inputs(), torch.zeros(N, requires_grad=True)
    linear(x, weight(1), bias, out_dtype=torch.float32).backward(torch.full((M, N), 3e5))
    assert bias.grad is not None and (bias.grad == M * 3e5).all()


@pytest.mark.gpu
@pytest.mark.parametrize("alpha", [1e-4, 3e4])
def test_on_a_gpu_twice(alpha: float) -> None:
    """Tensor cores take the gradients in float16, each row with a factor of its own; also those of gradients. They take
    the weights in float16 too, whose numbers end at 65504."""
    x, w = inputs().detach().cuda().requires_grad_(), weight(1 / alpha).to("cuda").repack()
    dense, g = w.dequantize(torch.float64), G.cuda().requires_grad_()
    (dx,) = torch.autograd.grad(linear(x, w, alpha=alpha), x, g, create_graph=True)
    assert_near(dx, alpha * g.detach().double() @ dense)
    (dg,) = torch.autograd.grad(dx, g, x.detach())
    assert_near(dg, alpha * x.detach().double() @ dense.T)


def test_rows_in_half_keep_their_bits() -> None:
    rows = torch.randn(6, 40, generator=torch.Generator().manual_seed(4))
    rows *= torch.tensor([1e-30, 1e-6, 1.0, 1e6, 1e30, 0.0])[:, None]
    half, factors = halved(rows)
    assert half.dtype == torch.float16 and factors.shape == (6, 1)
    assert torch.equal(factors, torch.exp2(factors.log2().round()))
    top = rows.abs().amax(1, keepdim=True)
    assert ((half.double() * factors - rows).abs() <= 2.0**-11 * rows.abs() + 2.0**-38 * top).all()
    assert torch.equal(halved(torch.zeros(0, 5))[0], torch.zeros(0, 5).half())
    lost, _ = halved(torch.tensor([[torch.inf, 1.0], [torch.nan, 2.0]]))
    assert lost[0, 0].isinf() and lost[1, 0].isnan()
