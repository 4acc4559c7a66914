"""``torch.func`` around a linear, held to the same around a dense one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

import w4gemm
from w4gemm import W4Linear, quantize

N, K = 48, 64
X = torch.randn(5, K, generator=torch.Generator().manual_seed(1))
R = torch.randn(K, N, generator=torch.Generator().manual_seed(2))
Layer = Callable[[torch.Tensor], torch.Tensor]


def pair(activation: str | None, act_order: bool) -> tuple[Layer, Layer]:
    """A layer and its formula, dense."""
    w, bias = quantize(torch.randn(N, K), "int4_g32_zint"), torch.randn(N)
    if act_order:
        codes, scales, zeros = w.parts()[:3]
        w = w4gemm.QuantizedWeight.from_codes(w.format, codes, scales, zeros, g_idx=torch.arange(K).flip(0) // 32)
    layer, dense = W4Linear.from_weight(w, bias), w.dequantize()
    layer.activation = activation
    after = torch.nn.functional.gelu if activation else torch.nn.Identity()
    return layer, lambda x: after(torch.nn.functional.linear(x, dense, bias))


@pytest.mark.parametrize("activation, act_order", [(None, False), ("gelu", False), (None, True)])
@pytest.mark.parametrize(
    "transformed",
    [
        lambda layer: vmap(layer)(X),
        lambda layer: vmap(layer, in_dims=1, out_dims=1)(X.T),
        lambda layer: vmap(vmap(layer))(X.view(1, 5, K).repeat(3, 1, 1)),
        lambda layer: grad(lambda x: layer(x).square().sum())(X),
        lambda layer: vmap(grad(lambda x: layer(x).square().sum()))(X),
        lambda layer: vjp(layer, X)[1](torch.ones(5, N))[0],
        lambda layer: jacrev(layer)(X[0]),
        lambda layer: jacrev(jacrev(lambda x: layer(x).square().sum()))(X[0]),
        lambda layer: jvp(layer, (X,), (X.flip(0),)),
        lambda layer: jacfwd(layer)(X[0]),
        lambda layer: hessian(lambda x: layer(x).square().sum())(X[0]),
        lambda layer: jacfwd(jacfwd(lambda x: layer(x).square().sum()))(X[0]),
        lambda layer: vmap(jvp, in_dims=(None, 0, 0))(layer, (X,), (X.flip(0),)),
    ],
    ids=[
        *("vmap", "vmap of columns", "vmap of vmap", "grad", "grad of each", "vjp", "jacrev", "jacrev of jacrev"),
        *("jvp", "jacfwd", "hessian", "jacfwd of jacfwd", "vmap of jvp"),
    ],
)
def test_as_a_dense_layer(transformed, activation, act_order):
    layer, dense = pair(activation, act_order)
    torch.testing.assert_close(transformed(layer), transformed(dense), rtol=1e-4, atol=1e-4)


def test_parameters_of_a_functional_call():
    layer, _ = pair(None, False)
    expected = 2 * layer(X).sum(0)
    got = grad(lambda bias: functional_call(layer, {"bias": bias}, (X,)).square().sum())(layer.bias.detach())
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda layer, x: grad(lambda x: layer(x).float().sum())(x),
        lambda layer, x: vmap(layer)(x),
        lambda layer, x: jvp(layer, (x,), (x.flip(0),))[1],
        lambda layer, x: vmap(jvp, in_dims=(None, 0, 0))(layer, (x,), (x.flip(0),))[1],
    ],
    ids=["grad", "vmap", "jvp", "vmap of jvp"],
)
def test_half_precision(transformed, device):
    w, x = quantize(torch.randn(N, K), "int4_g32").to(device).repack(), X.bfloat16().to(device)
    dense = w.dequantize().to(device)
    got = transformed(lambda x: w4gemm.linear(x, w), x)
    assert got.dtype == torch.bfloat16
    expected = transformed(lambda x: torch.nn.functional.linear(x, dense), x.float())
    torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=6e-2)


def test_dual_numbers():
    """Forward-mode derivatives without torch.func, by x, bias and residual at once."""
    layer, _ = pair("gelu", False)
    bias, tangent = layer.bias.detach(), torch.randn(N)

    def derivative(product):
        with forward_ad.dual_level():
            x, b = forward_ad.make_dual(X, X.flip(0)), forward_ad.make_dual(bias, tangent)
            return forward_ad.unpack_dual(product(x, b, forward_ad.make_dual(X @ R, X.flip(0) @ R))).tangent

    w = layer.weight
    got = derivative(lambda x, b, r: w4gemm.linear(x, w, b, activation="gelu", residual=r))
    expected = derivative(lambda x, b, r: torch.nn.functional.gelu(x @ w.dequantize().T + b) + r)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_forward_mode_beside_fp8_is_refused():
    w = quantize(torch.randn(N, K), "int4_g32").repack(activations="fp8")
    x, scale = w4gemm.quantize_activations(X)
    bias = torch.randn(N)
    with pytest.raises(NotImplementedError, match="bias: forward-mode derivatives of a product with fp8 activations"):
        jvp(lambda b: w4gemm.linear(x, w, b, token_scale=scale, out_dtype=torch.float32), (bias,), (bias,))


def test_a_batch_of_backward_passes() -> None:
    w, x = quantize(torch.randn(N, K)).repack(), X.clone().requires_grad_()
    d, gradients = w4gemm.linear(x, w), torch.randn(4, len(X), N)
    (actual,) = vmap(lambda g: torch.autograd.grad(d, x, g, retain_graph=True))(gradients)
    torch.testing.assert_close(actual, gradients @ w.dequantize(), rtol=1e-4, atol=1e-4)


def test_what_has_no_rule_is_refused_by_name() -> None:
    w = quantize(torch.randn(N, K)).repack()
    several, offsets = w4gemm.QuantizedWeight.stack([w, w]), torch.tensor([0, 2, 5], dtype=torch.int32)
    batch = torch.stack((X, X))
    with pytest.raises(NotImplementedError, match="grad and vmap, of experts"):
        vmap(lambda x: w4gemm.grouped_linear(x, several, offsets))(batch)
    layers = [w4gemm.W4Linear.from_weight(w) for _ in range(2)]
    with pytest.raises(
        NotImplementedError, match="w: vmap over the tensors of several weights is not implemented; Quan"
    ):
        vmap(lambda *state: functional_call(layers[0], state, X))(*stack_module_state(layers))
    with pytest.raises(NotImplementedError, match="grad and vmap, of a product with fp8 activations"):
        vmap(lambda x: w4gemm.linear(x, w.repack(activations="fp8")))(batch)
    with pytest.raises(ValueError, match="out: wanted None inside a transform"):
        vmap(lambda x: w4gemm.linear(x, w, out=torch.zeros(len(X), N)))(batch)
