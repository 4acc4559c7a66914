"""Gradients through products of experts, against PyTorch's of the dequantized weights in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

import w4gemm
from w4gemm import QuantizedWeight, W4Experts, W4GroupedLinear, quantize, route
from w4gemm.api import operators
from w4gemm.core.epilogue import Epilogue, EpilogueOperands

E, N, K, ROWS = 5, 48, 64, 11
OFFSETS = (1, 4, 4, 6, 6, 9)
"""Rows 0, 9 and 10 belong to no expert."""
OWNED = slice(OFFSETS[0], OFFSETS[-1])


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stacked(n: int = N, k: int = K, layout: str | None = None) -> QuantizedWeight:
    return QuantizedWeight.stack([quantize(randn(n, k, seed=e), "int4_g32_zint") for e in range(E)], layout=layout)


def dense(x: torch.Tensor, w: QuantizedWeight, operands: EpilogueOperands, activation: str | None) -> torch.Tensor:
    """The formula, expert by expert, in x's dtype; only the rows of experts."""
    products, weights = [], w.dequantize().to(x.dtype)
    for e, (first, last) in enumerate(itertools.pairwise(OFFSETS)):
        own = operands.of_expert(lambda t, e=e: t[e]).of_rows(slice(first, last))
        products.append(Epilogue(activation).apply(x[first:last] @ weights[e].T, own))
    return torch.cat(products)


@pytest.mark.parametrize("layout", ["cpu", "canonical"])
@pytest.mark.parametrize("n", [N, 256], ids=["padded", "whole"])
def test_x(layout, n):
    w, x, g = stacked(n, layout=layout), randn(ROWS, K), randn(ROWS, n, seed=2)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    tracked, expected_from = x.clone().requires_grad_(), x.double().requires_grad_()
    d = w4gemm.grouped_linear(tracked, w, offsets)
    g[0], g[9:] = torch.nan, torch.inf  # rows of no expert are not read
    d.backward(g)
    dense(expected_from, w, EpilogueOperands(), None).backward(g[OWNED].double())
    torch.testing.assert_close(tracked.grad.double(), expected_from.grad, rtol=1e-5, atol=1e-4)
    assert not tracked.grad[0].any() and not tracked.grad[9:].any()
    with torch.no_grad():
        assert torch.equal(w4gemm.grouped_linear(x, w, offsets)[OWNED], d[OWNED])


@pytest.mark.parametrize("activation", [None, "gelu", "silu_mul", "swiglu_oai", "situ_mul"])
@pytest.mark.parametrize("compiled", [False, True])
def test_every_operand(activation, compiled):
    w, offsets = stacked(), torch.tensor(OFFSETS, dtype=torch.int32)
    columns = Epilogue(activation).columns(N)
    names = {
        "x": randn(ROWS, K),
        "bias": randn(E, N, seed=3),
        "alpha": torch.tensor(0.5),
        "residual": randn(ROWS, columns, seed=4),
        "expert_scale": randn(E, seed=5),
    }
    tracked = {name: t.clone().requires_grad_() for name, t in names.items()}
    reference = {name: t.double().requires_grad_() for name, t in names.items()}

    def call(tensors):
        x, rest = tensors["x"], {name: t for name, t in tensors.items() if name != "x"}
        return w4gemm.grouped_linear(x, w, offsets, activation=activation, **rest)

    if compiled:
        torch.compiler.reset()
    function = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    d = function(tracked)
    with torch.no_grad():
        torch.testing.assert_close(d[OWNED], call(names)[OWNED], rtol=1e-5, atol=1e-4)
    g = randn(ROWS, columns, seed=6)
    x = reference.pop("x")
    gradients = dense(x, w, EpilogueOperands(**reference), activation)
    torch.testing.assert_close(d[OWNED].double(), gradients, rtol=1e-4, atol=1e-4)
    expected = torch.autograd.grad(gradients, [x, *reference.values()], g[OWNED].double())
    for name, got, want in zip(tracked, torch.autograd.grad(d, list(tracked.values()), g), expected, strict=True):
        assert (got - want).norm() < 1e-4 * want.norm(), name


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_by_their_indices(compiled):
    """A row that is taken several times has the sum of its gradients."""
    w, x, g = stacked(), randn(3, K).requires_grad_(), randn(6, N, seed=1)
    offsets, indices = torch.tensor([0, 1, 1, 3, 5, 6]).int(), torch.tensor([2, 0, 2, 2, 1, 0])

    def call(x):
        return w4gemm.grouped_linear(x, w, offsets, indices=indices)

    if compiled:
        torch.compiler.reset()
    function = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    (got,) = torch.autograd.grad(function(x), x, g)
    (expected,) = torch.autograd.grad(w4gemm.grouped_linear(x[indices], w, offsets), x, g)
    torch.testing.assert_close(got, expected)


def test_padded_rows():
    w, x, counts = stacked(), randn(E, 4, K).requires_grad_(), torch.tensor([3, 0, 4, 1, 2]).int()
    bias = randn(E, N, seed=8).requires_grad_()
    g = randn(E, 4, N, seed=1)
    got = torch.autograd.grad(w4gemm.masked_linear(x, w, counts, bias), (x, bias), g)
    here = (torch.arange(4) < counts[:, None])[..., None]
    expected = torch.autograd.grad(torch.einsum("emk,enk->emn", x, w.dequantize()) + bias[:, None], (x, bias), g * here)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_second_derivative():
    w, x, offsets = stacked(), randn(ROWS, K).requires_grad_(), torch.tensor(OFFSETS, dtype=torch.int32)
    g = randn(ROWS, N, seed=1).requires_grad_()
    (dx,) = torch.autograd.grad(w4gemm.grouped_linear(x, w, offsets), x, g, create_graph=True)
    (dg,) = torch.autograd.grad(dx, g, torch.ones_like(dx))
    expected = torch.zeros(ROWS, N)
    expected[OWNED] = dense(torch.ones(ROWS, K), w, EpilogueOperands(), None)
    torch.testing.assert_close(dg, expected, rtol=1e-4, atol=1e-4)


def test_memory_is_bounded(monkeypatch):
    """No more experts are dense at a time than the limit says, and the bits are the same."""
    w, x, offsets = stacked(128), randn(ROWS, K), torch.tensor(OFFSETS, dtype=torch.int32)
    g, seen, results = randn(ROWS, 128), [], []
    dequantize = QuantizedWeight.dequantize
    monkeypatch.setattr(
        QuantizedWeight, "dequantize", lambda self, dtype: seen.append(self.n // 128) or dequantize(self, dtype)
    )
    for most, counts in ((5, [5]), (2, [2, 2]), (1, [1, 1, 1])):  # experts 0, 2 and 4 have rows
        monkeypatch.setattr(operators, "_DENSE_BYTES", most * 16 * 128 * K)
        seen.clear()
        tracked = x.clone().requires_grad_()
        results += torch.autograd.grad(w4gemm.grouped_linear(tracked, w, offsets), tracked, g)
        assert seen in (counts, [*counts, 1])
        assert max(seen) <= most and torch.equal(results[0], results[-1])


def test_a_whole_layer(device):
    """Gradients to x, the router's weights and biases, with gpt-oss' activation; some chosen experts are elsewhere."""
    hidden, features, tokens, top = 96, 64, 40, 3
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    weights = [stacked(2 * hidden, features), stacked(features, hidden)]
    biases = [randn(E, 2 * hidden, seed=1).to(dtype), randn(E, features, seed=2).to(dtype)]
    layer = W4Experts(
        *(W4GroupedLinear.from_weight(w, b) for w, b in zip(weights, biases, strict=True)), activation="swiglu_oai"
    ).to(device)
    for product in (layer.gate_up, layer.down):
        product.bias.requires_grad_()
    ids = torch.randint(-1, E + 1, (tokens, top), generator=torch.Generator().manual_seed(3))
    tensors = [randn(tokens, features, seed=4).to(dtype), torch.rand(tokens, top).softmax(-1)]
    x, scores = (t.to(device).requires_grad_() for t in tensors)
    y = layer(x, ids.to(device), scores)
    g = randn(tokens, features, seed=5)
    got = torch.autograd.grad(y, (x, scores, layer.gate_up.bias, layer.down.bias), g.to(device, dtype))

    reference = [t.double().requires_grad_() for t in (*tensors, *biases)]
    rx, rscores, first, second = reference
    a, b = (w.dequantize().double() for w in weights)
    expected = torch.zeros(tokens, features, dtype=torch.float64)
    for j in range(top):
        e, here = ids[:, j].clamp(0, E - 1), ((ids[:, j] >= 0) & (ids[:, j] < E))[:, None]
        both = torch.einsum("tk,tnk->tn", rx, a[e]) + first[e]
        gate, up = both[:, ::2].clamp(max=7), both[:, 1::2].clamp(-7, 7)
        inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        outer = torch.einsum("tk,tnk->tn", inner, b[e]) + second[e]
        expected = expected + torch.where(here, rscores[:, j, None] * outer, 0.0)
    tolerance = 1e-5 if device == "cpu" else 2e-2
    assert (y.detach().cpu() - expected).norm() < tolerance * expected.norm()
    for i, (t, w) in enumerate(zip(got, torch.autograd.grad(expected, reference, g), strict=True)):
        assert (t.cpu() - w).norm() < 2 * tolerance * w.norm(), i


def test_choices_elsewhere_alone():
    """No row has an expert: every gradient is zero, none NaN."""
    layer = W4Experts(stacked(2 * N, K), stacked(K, N), dtype=torch.float32)
    x, scores = randn(4, K).requires_grad_(), torch.rand(4, 2).requires_grad_()
    layer(x, torch.full((4, 2), E), scores).sum().backward()
    assert not x.grad.any() and not scores.grad.any()
    assert route(torch.full((4, 2), E), E).m_offsets.tolist() == [0] * (E + 1)


@pytest.mark.parametrize(("tokens", "top"), [(0, 2), (4, 0)])
@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_to_add(tokens, top, compiled):
    """A batch without tokens, or without choices, still has gradients, as a dense layer's has."""
    layer = W4Experts(stacked(2 * N, K), stacked(K, N), dtype=torch.float32)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    x, scores = randn(tokens, K).requires_grad_(), torch.rand(tokens, top).requires_grad_()
    y = run(x, torch.zeros(tokens, top, dtype=torch.int64), scores)
    y.sum().backward()
    assert y.shape == x.grad.shape == (tokens, K) and not y.any() and not x.grad.any()
    assert scores.grad.shape == (tokens, top)


def test_gradients_beside_fp8_activations_are_refused():
    w, x, offsets = stacked(), randn(ROWS, K), torch.tensor(OFFSETS, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="^x: requires grad, .*or train with activations None"):
        w4gemm.grouped_linear(x.clone().requires_grad_(), w.repack(activations="fp8"), offsets)
    x8, token_scale = w4gemm.quantize_activations(x)
    bias = torch.zeros(E, N, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="^bias: requires grad, but gradients with fp8"):
        w4gemm.grouped_linear(x8, w, offsets, bias, token_scale=token_scale)


def test_the_operator_alone_refuses_an_epilogue():
    w, x = stacked(), randn(ROWS, K).requires_grad_()
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    call = w4gemm.api.call.checked(
        x, w, EpilogueOperands(), "gelu", None, rows=w4gemm.api.grouped.ExpertRows(offsets[:-1], offsets[1:])
    )
    d = operators.product(call, call.x, call.epilogue, call.operands)
    with pytest.raises(NotImplementedError, match="without an epilogue"):
        d.sum().backward()
