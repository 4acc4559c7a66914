"""The product with an engine's own tensors: one operator, few arguments, kinds by name."""

from __future__ import annotations

import pytest
import torch

import w4gemm
from w4gemm import choice
from w4gemm.api.packed import PackedLinear
from w4gemm.core.epilogue import Epilogue

N, K = 48, 128


@pytest.mark.parametrize("activation", [None, "relu", "silu_mul(limit=10)"])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_linear(activation, biased):
    torch.manual_seed(0)
    w, x = w4gemm.quantize(torch.randn(N, K), "int4_g32_zint"), torch.randn(5, K)
    bias = torch.randn(N) if biased else None
    epilogue = Epilogue(w4gemm.core.activation.canonical(activation), bias=biased)
    product, expected = PackedLinear(w.packed, epilogue), w4gemm.linear(x, w, bias, activation=activation)
    assert torch.equal(product(x, w.tensors, bias), expected)
    assert product(x[:0], w.tensors, bias).shape == (0, expected.shape[1])
    compiled = torch.compile(lambda x: product(x, w.tensors, bias), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    again = PackedLinear.named(product.name)
    assert (again.packed, again.epilogue, again.name) == (product.packed, product.epilogue, product.name)


def test_x_in_fp8():
    w, x = w4gemm.quantize(torch.randn(N, K), "int4_g32"), torch.randn(5, K).bfloat16()
    x8, scale = w4gemm.quantize_activations(x)
    epilogue = Epilogue().of_quantized(torch.bfloat16)
    product = PackedLinear(w.packed, epilogue, batch_invariant=False)
    assert torch.equal(product(x8, w.tensors, token_scale=scale), w4gemm.linear(x8, w, token_scale=scale))
    again = PackedLinear.named(product.name)
    assert again.epilogue == epilogue and again.packed.n == N


def test_batch_invariance_is_part_of_the_name():
    packed = w4gemm.quantize(torch.randn(N, K)).packed
    names = {PackedLinear(packed, batch_invariant=value).name for value in (False, True)}
    assert {PackedLinear.named(name).batch_invariant for name in names} == {False, True}


def test_an_epilogue_without_a_place_in_the_name_is_refused():
    with pytest.raises(AssertionError, match="no operator for"):
        PackedLinear(w4gemm.quantize(torch.randn(N, K)).packed, Epilogue(residual=True))


def test_plans_that_are_forgotten_are_chosen_anew(monkeypatch):
    w, x = w4gemm.quantize(torch.randn(N, K)), torch.randn(3, K)
    product = PackedLinear(w.packed)
    product(x, w.tensors)
    chosen: list[object] = []
    monkeypatch.setattr("w4gemm.api.product.plan_for", lambda key: chosen.append(key) or choice.plan_for(key))
    product(x, w.tensors)
    assert not chosen
    choice.forget(N, K)
    product(x, w.tensors)
    assert len(chosen) == 1


def test_the_operator():
    w, x, bias = w4gemm.quantize(torch.randn(N, K)), torch.randn(3, K), torch.randn(N)
    name = PackedLinear(w.packed, Epilogue(bias=True)).name
    arguments = (x, list(w.tensors), bias, None, name)
    torch.library.opcheck(
        torch.ops.w4gemm.packed_linear.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
