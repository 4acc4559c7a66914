"""Weights of several experts, what stands around their products, and what is refused."""

from __future__ import annotations

import copy
import io
import math

import numpy as np
import pytest
import torch

import w4gemm
from reference import grouped_reference
from sass import disassemble
from w4gemm import QuantizedWeight, W4Experts, W4GroupedLinear, W4Linear, combine, quantize, route
from w4gemm.api.product import Product
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import H200, GemmProblem
from w4gemm.jit import object_code
from w4gemm.kernels import kernel_named
from w4gemm.kernels.helpers.experts import RowCombine
from w4gemm.packing.packed_shape import packed_shape

E, HIDDEN, FEATURES = 4, 96, 64
SIZES = (2 * HIDDEN, FEATURES), (FEATURES, HIDDEN)
"""n and k of gate_up and down."""


def several(n: int, k: int, seed: int = 0) -> list[QuantizedWeight]:
    g = torch.Generator().manual_seed(seed)
    return [quantize(torch.randn(n, k, generator=g), "int4_g32_zint") for _ in range(E)]


def test_a_stack_holds_its_experts_in_any_layout(tmp_path):
    each = several(200, 96)
    w = QuantizedWeight.stack(iter(each), E)
    for layout in ("canonical", "cpu", "mma16"):
        packed = w.repack(layout)
        for e in range(E):
            assert torch.equal(packed.expert(e).tensors[0], each[e].repack(layout).tensors[0])
            assert torch.equal(packed.dequantize()[e], each[e].dequantize())
    w.save(tmp_path / "w.safetensors")
    loaded = QuantizedWeight.load(tmp_path / "w.safetensors")
    assert loaded.experts == E and torch.equal(loaded.dequantize(), w.dequantize())
    half = w.shard(0, 1, 2)
    assert torch.equal(half.dequantize(), w.dequantize()[:, 100:])


def test_a_stack_refuses():
    each = several(32, 64)
    with pytest.raises(ValueError, match=r"weights: wanted 5, got 4"):
        QuantizedWeight.stack(iter(each), 5)
    with pytest.raises(TypeError, match="count: wanted the number"):
        QuantizedWeight.stack(iter(each))
    with pytest.raises(ValueError, match="weights: wanted 3, got more"):
        QuantizedWeight.stack(iter(each), 3)
    with pytest.raises(ValueError, match="weights: wanted n 32 like the first, got n 16 as number 5 of 5"):
        QuantizedWeight.stack([*each, quantize(torch.randn(16, 64), "int4_g32_zint")])
    with pytest.raises(ValueError, match="wanted format int4_g32_zint, k 64 like the first, got format nf4_g32, k 32"):
        QuantizedWeight.stack([each[0], quantize(torch.randn(32, 32), "nf4_g32")])
    with pytest.raises(ValueError, match="index: wanted an expert 0 .. 3, got 4"):
        QuantizedWeight.stack(each).expert(4)
    with pytest.raises(ValueError, match="expert: wanted a weight of several experts, got a single one"):
        each[0].expert(0)
    with pytest.raises(ValueError, match="weights: wanted at least one, got none"):
        QuantizedWeight.stack([])


def test_grouped_linear_refuses():
    w, x = QuantizedWeight.stack(several(32, 64)), torch.randn(6, 64)
    offsets = torch.tensor([0, 1, 2, 3, 6], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"m_offsets: wanted torch.int32, got torch.int64"):
        w4gemm.grouped_linear(x, w, offsets.long())
    with pytest.raises(ValueError, match=r"m_offsets: .* shape \(5,\), got \(4,\)"):
        w4gemm.grouped_linear(x, w, offsets[1:])
    with pytest.raises(ValueError, match=r"m_offsets: wanted x's device cpu, got meta"):
        w4gemm.grouped_linear(x, w, offsets.to("meta"))
    with pytest.raises(ValueError, match=r"bias: wanted shape \(4, 32\), \(experts, n\) of w, got \(32,\)"):
        w4gemm.grouped_linear(x, w, offsets, torch.zeros(32))
    with pytest.raises(ValueError, match="w: wanted a weight of several experts"):
        w4gemm.grouped_linear(x, w.expert(0), offsets)
    with pytest.raises(ValueError, match="w: wanted a single weight"):
        w4gemm.linear(x, w)
    with pytest.raises(ValueError, match="out: wanted None where a gradient is needed"):
        w4gemm.grouped_linear(x.requires_grad_(), w, offsets, out=torch.empty(6, 32))


@pytest.mark.parametrize("fused", [{}, {"alpha": 0.5, "activation": "silu_mul", "bias": True}], ids=["alone", "fused"])
def test_a_scale_for_each_expert(fused):
    w, x = QuantizedWeight.stack(several(32, 64)), torch.randn(6, 64)
    offsets, scale = torch.tensor([0, 1, 1, 3, 6], dtype=torch.int32), torch.tensor([2.0, -1.0, 0.5, 3.0])
    fused = fused | ({"bias": torch.randn(4, 32)} if fused else {})
    d = w4gemm.grouped_linear(x, w, offsets, expert_scale=scale, **fused)
    expected = grouped_reference(x, w, offsets, expert_scale=scale, **fused)
    torch.testing.assert_close(d.double(), expected, rtol=1e-5, atol=1e-5 * max(1.0, expected.abs().max().item()))
    function = torch.compile(
        lambda x, s: w4gemm.grouped_linear(x, w, offsets, expert_scale=s, **fused), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(function(x, scale), d)


def test_a_scale_for_each_expert_of_padded_rows():
    w, x = QuantizedWeight.stack(several(32, 64)), torch.randn(4, 3, 64)
    counts, scale = torch.tensor([1, 0, 3, 2], dtype=torch.int32), torch.tensor([2.0, -1.0, 0.5, 3.0])
    d, plain = (w4gemm.masked_linear(x, w, counts, expert_scale=s) for s in (scale, None))
    for e, count in enumerate(counts.tolist()):
        torch.testing.assert_close(d[e, :count], plain[e, :count] * scale[e])


def test_a_scale_for_each_expert_is_checked():
    w, x = QuantizedWeight.stack(several(32, 64)), torch.randn(6, 64)
    offsets = torch.tensor([0, 1, 2, 3, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"expert_scale: wanted shape \(4,\), got \(3,\)"):
        w4gemm.grouped_linear(x, w, offsets, expert_scale=torch.ones(3))
    with pytest.raises(TypeError, match="expert_scale: wanted torch.float32, got torch.float16"):
        w4gemm.grouped_linear(x, w, offsets, expert_scale=torch.ones(4).half())
    with pytest.raises(ValueError, match="epilogue: wanted one without expert_scale"):
        w4gemm.MixedGemm("int4_g128", torch.float32, "cpu", epilogue=w4gemm.Epilogue(expert_scale=True))


def test_x_is_cast_to_the_dtype_of_layers_of_16_bits(monkeypatch):
    monkeypatch.setattr("w4gemm.api.arguments._dtypes", lambda w, device: (torch.bfloat16,))  # as on a GPU
    gate_up, down = (QuantizedWeight.stack(several(n, k)) for n, k in ((96, 64), (64, 48)))
    experts = W4Experts(gate_up, down, dtype=torch.bfloat16)
    x, (weights, ids) = torch.randn(6, 64, requires_grad=True), torch.rand(6, 4).topk(2)
    y = experts(x, ids, weights)
    expected = experts(x.bfloat16(), ids, weights)
    assert y.dtype == torch.float32 and expected.dtype == torch.bfloat16
    torch.testing.assert_close(y.bfloat16(), expected)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.dtype == torch.float32 and grad.abs().sum() > 0


def test_under_torch_compile():
    w, x = QuantizedWeight.stack(several(32, 64)), torch.randn(6, 64)
    offsets = torch.tensor([0, 1, 1, 3, 6], dtype=torch.int32)
    function = torch.compile(lambda x, o: w4gemm.grouped_linear(x, w, o), fullgraph=True, backend="aot_eager")
    assert torch.equal(function(x, offsets), w4gemm.grouped_linear(x, w, offsets))


@pytest.mark.parametrize("tracked", [False, True])
def test_under_torch_compile_with_a_number_that_changes(tracked):
    w, x = QuantizedWeight.stack(several(32, 64)), torch.randn(4, 2, 64, requires_grad=tracked)
    counts, offsets = torch.full((4,), 2, dtype=torch.int32), torch.tensor([0, 2, 4, 6, 8], dtype=torch.int32)

    def call(x: torch.Tensor, number: float) -> tuple[torch.Tensor, ...]:
        sorted_rows = w4gemm.grouped_linear(x.flatten(0, 1), w, offsets, alpha=number)
        return sorted_rows, w4gemm.masked_linear(x, w, counts, alpha=number, expected_m=int(number))

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for number in (1.5, 2.5, 3.25, 2):
        torch.testing.assert_close(compiled(x, number), call(x, number))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_rows_of_no_expert_stay_as_they_are_in_out(backend):
    """Compiled as well, where the operator writes to memory of its own first. Once they were overwritten."""
    w = QuantizedWeight.stack([w4gemm.quantize(torch.randn(48, 64), "int4_g32") for _ in range(4)])
    offsets, counts = (torch.tensor(rows, dtype=torch.int32) for rows in ((2, 5, 5, 9, 10), (3, 0, 5, 1)))
    x, padded = torch.randn(12, 64), torch.randn(4, 5, 64)

    def call(x: torch.Tensor, padded: torch.Tensor, outs: list[torch.Tensor]) -> None:
        w4gemm.grouped_linear(x, w, offsets, out=outs[0])
        w4gemm.masked_linear(padded, w, counts, out=outs[1])

    torch.compiler.reset()
    expected, actual = ([torch.full(shape, 7.0) for shape in ((12, 48), (4, 5, 48))] for _ in range(2))
    call(x, padded, expected)
    torch.compile(call, fullgraph=True, backend=backend)(x, padded, actual)
    assert all(map(torch.equal, expected, actual))
    assert (actual[0][:2] == 7).all() and (actual[0][10:] == 7).all() and (actual[1][1] == 7).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_by_their_indices_under_torch_compile(dtype):
    w, x = QuantizedWeight.stack(several(32, 64)), torch.randn(3, 64)
    offsets = torch.tensor([0, 1, 1, 3, 6], dtype=torch.int32)
    indices, residual = torch.tensor([2, 0, 2, 1, 1, 0], dtype=dtype), torch.randn(6, 32)

    def call(x, o, i, r):
        return w4gemm.grouped_linear(x, w, o, indices=i, residual=r)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(x, offsets, indices, residual)
    assert torch.equal(compiled, w4gemm.grouped_linear(x[indices.long()], w, offsets, residual=residual))


def test_the_indexed_form_refuses():
    w, x = QuantizedWeight.stack(several(32, 64)), torch.randn(3, 64)
    offsets, indices = torch.tensor([0, 1, 2, 3, 6], dtype=torch.int32), torch.tensor([2, 0, 2, 1, 1, 0])
    with pytest.raises(TypeError, match=r"indices: wanted int32 or int64 \(total_m\), got torch.float32"):
        w4gemm.grouped_linear(x, w, offsets, indices=indices.float())
    with pytest.raises(ValueError, match=r"indices: wanted x's device cpu, got meta"):
        w4gemm.grouped_linear(x, w, offsets, indices=indices.to("meta"))
    with pytest.raises(ValueError, match=r"residual: wanted shape \(6, 32\) like the result, got \(3, 32\)"):
        w4gemm.grouped_linear(x, w, offsets, indices=indices, residual=torch.zeros(3, 32))
    with pytest.raises(ValueError, match=r"out: wanted shape \(6, 32\), got \(3, 32\)"):
        w4gemm.grouped_linear(x, w, offsets, indices=indices, out=torch.zeros(3, 32))


def test_combine_adds_in_order():
    d, weights = torch.randn(6, 8), torch.rand(3, 2)
    places = torch.tensor([[5, 0], [-1, 2], [-1, -1]], dtype=torch.int32)
    d[1] = torch.nan  # no token has it
    got = combine(d, places, weights)
    expected = torch.stack((weights[0, 0] * d[5] + weights[0, 1] * d[0], weights[1, 1] * d[2], torch.zeros(8)))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_an_absent_row_adds_nothing_whatever_its_weight(device, weight):
    """A router that is computed for this rank's experts alone may give any number for others."""
    d, weights = torch.randn(4, 8, device=device).bfloat16(), torch.rand(2, 2, device=device)
    places = torch.tensor([[3, -1], [-1, 2]], dtype=torch.int32, device=device)
    expected = combine(d, places, weights)
    weights[places < 0] = weight
    assert torch.equal(combine(d, places, weights), expected)  # on a GPU by the kernel
    got = combine(d.requires_grad_(), places, weights.requires_grad_())
    assert torch.equal(got, expected)
    got.sum().backward()
    assert d.grad.isfinite().all()
    assert not weights.grad[places < 0].any()


@pytest.mark.parametrize("past", [0, 1])
def test_combine_writes_to_out(device, past):
    d, weights = torch.randn(6, 8, device=device).bfloat16(), torch.rand(3, 2, device=device)
    places = torch.tensor([[5, 0], [-1, 2], [-1, -1]], dtype=torch.int32, device=device)
    out = torch.full((25,), torch.nan, dtype=d.dtype, device=device)[past : past + 24].view(3, 8)  # aligned, or not
    assert combine(d, places, weights, out=out) is out
    assert torch.equal(out, combine(d, places, weights))
    assert not combine(d[:0], places.fill_(-1), weights, out=out).any()
    with pytest.raises(TypeError, match="out: wanted torch.bfloat16, got torch.float32"):
        combine(d, places, weights, out=out.float())
    with pytest.raises(ValueError, match="out: wanted shape"):
        combine(d, places, weights, out=out[:2])
    with pytest.raises(ValueError, match="out: wanted memory of its own, got memory shared with d"):
        combine(d, places, weights, out=d[1:4])  # a row would be overwritten while another token still needs it
    with pytest.raises(ValueError, match="out: wanted memory of its own, got memory shared with weights"):
        combine(d[:, :2].float(), places, weights, out=weights)
    with pytest.raises(TypeError, match="settled: wanted a bool, got int 1"):
        combine(d, places, weights, settled=1)
    with pytest.raises(ValueError, match="out: wanted None where gradients"):
        combine(d.requires_grad_(), places, weights, out=out)


def test_combine_gives_gradients_to_both(device):
    d, weights = torch.randn(6, 8, device=device).bfloat16(), torch.rand(3, 2, device=device, requires_grad=True)
    places = torch.tensor([[5, 0], [1, 2], [-1, 3]], dtype=torch.int32, device=device)
    combine(d, places, weights).sum().backward()
    expected = torch.where(places >= 0, d.float().sum(1)[places.clamp(min=0).long()], 0.0)
    torch.testing.assert_close(weights.grad, expected)
    d.requires_grad_()
    assert combine(d, places, weights.detach()).requires_grad


def test_routing_refuses():
    ids, weights = torch.zeros(3, 2, dtype=torch.int64), torch.rand(3, 2)
    for experts in (-1, 0, 2.5, "4", True):
        with pytest.raises((TypeError, ValueError), match="experts: wanted an int from 1 on"):
            route(ids, experts)
    with pytest.raises(TypeError, match="row_of_choice: wanted a tensor .*, got list"):
        combine(torch.zeros(4, 8), [[0, 1]], weights)
    gate, down = several(2 * HIDDEN, FEATURES), several(FEATURES, HIDDEN)
    layer = W4Experts(QuantizedWeight.stack(gate), QuantizedWeight.stack(down), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"expert_ids: wanted 5 rows, one for each of x, got \(3, 2\)"):
        layer(torch.randn(5, FEATURES), ids, weights)
    with pytest.raises(TypeError, match="expert_ids: wanted a tensor .tokens, top k. of torch.int32 or torch.int64"):
        layer(torch.randn(3, FEATURES), [[0, 1]], weights)
    with pytest.raises(TypeError, match="x: wanted a tensor"):
        layer([1.0], ids, weights)
    for wrong, error, message in (
        (weights.int(), TypeError, "wanted floating point, got torch.int32"),
        (weights[:, :1], ValueError, r"wanted shape \(3, 2\) like expert_ids, got \(3, 1\)"),
        (0.5, TypeError, r"wanted a tensor \(3, 2\) of floating point, got float"),
    ):
        with pytest.raises(error, match=f"expert_weights: {message}"):
            layer(torch.randn(3, FEATURES), ids, wrong)
    with pytest.raises(ValueError, match="expert_weights: wanted x's device cpu, got meta"):
        layer(torch.randn(3, FEATURES), ids, weights.to("meta"))
    with pytest.raises(TypeError, match="w: wanted a QuantizedWeight, got int"):
        W4GroupedLinear(64, 32)
    assert not issubclass(W4GroupedLinear, W4Linear) and not hasattr(W4GroupedLinear, "from_linear")
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, FEATURES), ids, weights).dtype == torch.bfloat16


def test_a_masked_product_after_one_of_fake_tensors():
    """Nothing of what a tracer sees is kept for real calls."""
    w, x = QuantizedWeight.stack(several(32, 64)), torch.randn(E, 5, 64)
    counts = torch.tensor([5, 0, 2, 1], dtype=torch.int32)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        w4gemm.masked_linear(x, w, counts)
    d = w4gemm.masked_linear(x, w, counts)
    for e, count in enumerate(counts.tolist()):
        torch.testing.assert_close(d[e, :count], x[e, :count] @ w.expert(e).dequantize().T)


def test_forward_derivatives_and_transforms_of_experts_are_refused():
    w, x = QuantizedWeight.stack(several(32, 64)), torch.randn(6, 64)
    offsets = torch.tensor([0, 1, 2, 3, 6], dtype=torch.int32)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="x: forward-mode derivatives"):
            w4gemm.grouped_linear(dual, w, offsets)
    layer = W4Experts(*(QuantizedWeight.stack(several(*size)) for size in SIZES))
    many = torch.randn(2, 3, FEATURES), torch.randint(E, (2, 3, 2)), torch.rand(2, 3, 2)
    with pytest.raises(NotImplementedError, match="transforms of torch.func, such as grad and vmap, of experts"):
        torch.vmap(layer)(*many)


@pytest.mark.parametrize("routing", ["random", "zipf", "hot", "elsewhere"])
def test_a_whole_layer(device, routing):
    """Against float32, with the dequantized weights."""
    gate, up, down = several(HIDDEN, FEATURES, 1), several(HIDDEN, FEATURES, 2), several(FEATURES, HIDDEN, 3)
    pairs = [QuantizedWeight.interleave(g, u) for g, u in zip(gate, up, strict=True)]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    layer = W4Experts(QuantizedWeight.stack(pairs), QuantizedWeight.stack(down), dtype=dtype).to(device)
    g = torch.Generator().manual_seed(0)
    x, weights = torch.randn(50, FEATURES, generator=g), torch.rand(50, 2, generator=g)
    share = {"zipf": 1 / torch.arange(1, E + 1), "hot": torch.eye(E)[2] + 1e-9}.get(routing, torch.ones(E))
    ids = torch.multinomial(share.expand(50, E).contiguous(), 2, generator=g)
    if routing == "elsewhere":
        ids = torch.randint(-2, E + 2, (50, 2), generator=g)
    x = x.to(dtype).float()
    expected = torch.zeros(50, FEATURES)
    for t, j in torch.cartesian_prod(torch.arange(50), torch.arange(2)).tolist():
        if 0 <= (e := int(ids[t, j])) < E:
            a, b, c = (m[e].dequantize() for m in (gate, up, down))
            expected[t] += weights[t, j] * (c @ (torch.nn.functional.silu(a @ x[t]) * (b @ x[t])))
    got = layer(x.to(device, dtype), ids.to(device), weights.to(device)).float().cpu()
    assert (got - expected).norm() < (1e-5 if device == "cpu" else 1e-2) * expected.norm()
    again = W4Experts(QuantizedWeight.stack(down_like(pairs)), QuantizedWeight.stack(down_like(down)), dtype=dtype)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.to(device).down.weight.dequantize(), layer.down.weight.dequantize())


@pytest.mark.parametrize("act_order", [False, True])
def test_an_exported_layer_serves_any_number_of_tokens(act_order):
    order = torch.arange(FEATURES).flip(0) // 32 if act_order else None
    layer = W4Experts(
        QuantizedWeight.stack([shuffled(w, order) for w in several(*SIZES[0])]),
        QuantizedWeight.stack(several(*SIZES[1])),
    )

    def arguments(tokens: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(tokens, FEATURES), torch.randint(E, (tokens, 2)), torch.rand(tokens, 2)

    tokens = {0: torch.export.Dim("tokens", max=64)}
    exported = torch.export.export(layer, arguments(6), dynamic_shapes=(tokens,) * 3).module()
    other = arguments(9)
    assert torch.equal(exported(*other), layer(*other))


def shuffled(w: QuantizedWeight, g_idx: torch.Tensor | None) -> QuantizedWeight:
    parts = w.parts()
    return QuantizedWeight.from_codes(w.format, parts.codes, parts.scales, parts.zeros, g_idx)


def scaled_layer() -> tuple[W4Experts, torch.Tensor, torch.Tensor]:
    gate_up, down = (QuantizedWeight.stack(several(*size)) for size in SIZES)
    scales = torch.tensor([2.0, -1.0, 0.5, 1e-6]), torch.tensor([1.0, 3.0, -0.25, 1 / 3])
    made = (W4GroupedLinear.from_weight(w, expert_scale=s) for w, s in zip((gate_up, down), scales, strict=True))
    return W4Experts(*made), *scales


def test_a_layer_with_scales_of_experts():
    layer, first, second = scaled_layer()
    x, offsets = torch.randn(9, FEATURES), torch.tensor([0, 2, 2, 5, 9], dtype=torch.int32)
    hidden = layer.gate_up(x, offsets)
    fused = {"activation": "silu_mul", "expert_scale": first}
    expected = grouped_reference(x, layer.gate_up.weight, offsets, **fused)
    # float32 sums cancel, so an error is small beside the largest result
    torch.testing.assert_close(hidden.double(), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    expected = grouped_reference(hidden, layer.down.weight, offsets, expert_scale=second)
    d = layer.down(hidden, offsets).double()
    torch.testing.assert_close(d, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    assert "expert_scale=True" in repr(layer.down)
    function = torch.compile(layer.down, fullgraph=True, backend="aot_eager")
    assert torch.equal(function(hidden, offsets), layer.down(hidden, offsets))
    ids, weights = torch.tensor([[0, 3], [2, 1], [1, 1]]), torch.rand(3, 2)
    routing = route(ids, E)
    rows = layer.down(layer.gate_up(x[:3], routing.m_offsets, routing.tokens), routing.m_offsets)
    assert torch.equal(layer(x[:3], ids, weights), combine(rows, routing.row_of_choice, weights))


@pytest.mark.gpu
@pytest.mark.parametrize("activations, one_launch", [(None, False), (None, True), ("fp8", False)])
def test_a_graph_of_layers_serves_other_choices(activations, one_launch):
    """Kernels that request weights and read rows before the launch before them has ended see the newest ones."""
    experts, top_k, hidden, width, tokens = 64, 4, 512, 256, 6
    layers = []
    for seed in range(3):
        torch.manual_seed(seed)
        stacks = (
            QuantizedWeight.stack([quantize(torch.randn(*size), "int4_g128") for _ in range(experts)]).to("cuda")
            for size in ((2 * width, hidden), (hidden, width))
        )
        repacked = [w.repack(activations=activations) if activations else w.repack() for w in stacks]
        layer = W4Experts(*repacked, dtype=torch.bfloat16)
        layer.one_launch = one_launch
        layers.append(layer)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    ids = torch.zeros(tokens, top_k, dtype=torch.int32, device="cuda")
    weights = torch.rand(tokens, top_k, device="cuda")

    def all_layers():
        y = x
        for layer in layers:
            y = layer(y, ids, weights) / 16
        return y

    def one_by_one():
        y = x
        for layer in layers:
            torch.cuda.synchronize()
            if one_launch:
                y = layer(y, ids, weights) / 16
                continue
            routing = route(ids, experts)
            torch.cuda.synchronize()
            d = layer.down(layer.gate_up(y, routing.m_offsets, routing.tokens), routing.m_offsets)
            y = combine(d, routing.row_of_choice, weights) / 16
        return y

    all_layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = all_layers()
    for draw in range(30):
        torch.manual_seed(draw)
        ids.copy_(torch.rand(tokens, experts).topk(top_k).indices)
        x.copy_(torch.randn(tokens, hidden))
        graph.replay()
        assert torch.equal(result, one_by_one())


@pytest.mark.parametrize("convert", [torch.nn.Module.half, torch.nn.Module.bfloat16])
def test_scales_of_experts_keep_their_bits(convert):
    layer, first, second = scaled_layer()
    convert(layer)
    with pytest.raises(TypeError, match="dtype: wanted torch.float32 or .*, got torch.float64"):
        layer.double()
    for product, scale in ((layer.gate_up, first), (layer.down, second)):
        assert product.expert_scale.dtype == torch.float32 and torch.equal(product.expert_scale, scale)
    assert copy.deepcopy(layer).to("meta").down.expert_scale.device.type == "meta"


def test_scales_of_experts_are_saved():
    layer, first, second = scaled_layer()
    state = layer.state_dict()
    assert torch.equal(state["down.expert_scale"], second)
    plain = W4Experts(*(QuantizedWeight.stack(down_like(several(*size))) for size in SIZES))
    assert not [key for key in plain.state_dict() if "expert_scale" in key]
    for assign in (False, True):
        for other in (copy.deepcopy(plain), copy.deepcopy(plain).to("meta"), scaled_layer()[0].to("meta")):
            other.load_state_dict(state, assign=assign)
            assert torch.equal(other.gate_up.expert_scale, first) and torch.equal(other.down.expert_scale, second)
    with pytest.raises(RuntimeError, match=r"Missing key.*expert_scale"):
        layer.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch for down.expert_scale"):
        plain.load_state_dict(state | {"down.expert_scale": torch.ones(E + 1)})
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False).down.expert_scale, second)


def test_scales_of_experts_are_checked():
    w = QuantizedWeight.stack(several(*SIZES[1]))
    with pytest.raises(TypeError, match="expert_scale: wanted torch.float32"):
        W4GroupedLinear.from_weight(w, expert_scale=torch.ones(E).half())
    with pytest.raises(ValueError, match=r"expert_scale: wanted shape \(4,\), got \(5,\)"):
        W4GroupedLinear.from_weight(w, expert_scale=torch.ones(E + 1))


def down_like(weights: list[QuantizedWeight]) -> list[QuantizedWeight]:
    """Others of the same shapes."""
    return [quantize(torch.zeros(w.n, w.k), w.format) for w in weights]


def test_gpt_oss_sizes_cost_little_padding():
    """n and k 2880, 22.5 times the columns of a block."""
    format = w4gemm.WeightFormat.parse("int4_g32")
    exact, size = 2880 * (2880 // 2 + 2880 // 32 * 2), packed_shape(format, "mma16", 2880, 2880).nbytes
    assert exact < size < 1.025 * exact
    assert packed_shape(format, "mma16", 5760, 2880).nbytes == 2 * size


def test_the_activation_of_a_layer():
    gate_up, down = (QuantizedWeight.stack(several(*size)) for size in SIZES)
    layer = W4Experts(gate_up, down, activation="swiglu_oai(limit=7.0)")
    assert layer.activation == layer.gate_up.activation == "swiglu_oai"
    for activation in ("silu", None):
        with pytest.raises(ValueError, match="activation: wanted a gated one, such as silu_mul, between n"):
            layer.activation = activation
    with pytest.raises(ValueError, match=r"activation: wanted one of relu, .*, got 'swiglu'"):
        W4Experts(gate_up, down, activation="swiglu")


@pytest.mark.parametrize("activation", ["relu2", "silu"])
def test_experts_without_gates(activation):
    ups, downs = several(64, 96), several(96, 64)
    layer = W4Experts(QuantizedWeight.stack(ups), QuantizedWeight.stack(downs), activation=activation)
    x, ids, scores = torch.randn(5, 96), torch.randint(0, E, (5, 2)), torch.rand(5, 2)
    expected = torch.zeros(5, 96, dtype=torch.float64)
    for choice in range(2):
        for token, e in enumerate(ids[:, choice].tolist()):
            y = ups[e].dequantize().double() @ x[token].double()
            y = torch.relu(y) ** 2 if activation == "relu2" else y * torch.sigmoid(y)
            expected[token] += scores[token, choice] * (downs[e].dequantize().double() @ y)
    torch.testing.assert_close(
        layer(x, ids, scores).double(), expected, rtol=0, atol=1e-6 * expected.abs().max().item()
    )
    with pytest.raises(ValueError, match="activation: wanted one without gates, such as relu2, between n 64"):
        layer.activation = "silu_mul"
    with pytest.raises(ValueError, match="down: wanted 4 experts with n 96 and k 32, or 64 without gates, for"):
        W4Experts(QuantizedWeight.stack(ups), QuantizedWeight.stack(several(96, 32 * 4)), activation=activation)


@pytest.mark.parametrize("terms", [1, 16])
def test_combine_compiles(terms):
    """The rows of a token are requested before the first is added, and none spills."""
    pytest.importorskip("cutlass")
    combined = RowCombine.of(H200, torch.bfloat16, terms)
    assert combined is not None and RowCombine.of(H200, torch.bfloat16, 17) is None
    sass = disassemble(object_code(combined.unit()))
    assert sass.count("LDL") == sass.count("STL") == sass.stack == 0
    assert sass.count("STG") == 1 and sass.count("LDG.E.128") == terms
    assert sass.count("FSEL") == terms  # the factor of an absent row


def test_a_plan_of_padded_rows_is_for_as_many_as_are_expected(monkeypatch):
    w, x = QuantizedWeight.stack(several(32, 64)), torch.randn(4, 16, 64)
    counts, asked = torch.tensor([1, 0, 3, 16], dtype=torch.int32), []
    launch = Product.launch
    monkeypatch.setattr(Product, "launch", lambda self, operands, m: asked.append(m) or launch(self, operands, m))
    reference = w4gemm.masked_linear(x, w, counts)
    for expected, rows in ((1, 4), (3, 12), (np.int64(3), 12), (16, 64), (99, 64)):
        d = w4gemm.masked_linear(x, w, counts, expected_m=expected)
        assert asked[-1] == rows
        for e, count in enumerate(counts.tolist()):
            torch.testing.assert_close(d[e, :count], reference[e, :count], rtol=1e-4, atol=1e-3)
    for expected in (0, True, 1.5):
        with pytest.raises(ValueError, match="expected_m: wanted an int from 1 on or None, got"):
            w4gemm.masked_linear(x, w, counts, expected_m=expected)


@pytest.mark.parametrize("dtype, format", [("bfloat16", "int4_g128"), ("float8_e4m3fn", "int4_g128_e4m3")])
def test_four_warps_gather_every_row_of_a_tile(dtype, format):
    """Each copies whole groups of four rows, and if two of them share the tokens, each has a k chunk."""
    pytest.importorskip("cutlass")
    from w4gemm.kernels.device.row_gather import RowGather

    name, layout = ("sm90_mixed_gemm", "mma16") if dtype == "bfloat16" else ("sm90_fp8_gemm", "mma8")
    kernel, parsed = kernel_named(name), WeightFormat.parse(format)
    problem = GemmProblem(512, 4096, 4096, getattr(torch, dtype), parsed, layout, device=H200, experts=8, gathered=True)
    tokens = set()
    for config in kernel.configs(problem):
        variant = kernel.variant.of(problem, config)
        gather = RowGather(config.tile_m, config.tile_k // variant.chunk_k, variant.itemsize, warps=4)
        assert gather.rows % 4 == 0 and gather.rows * gather.row_warps == config.tile_m, config
        assert gather.warps // gather.row_warps <= gather.k_chunks, config
        tokens.add(config.tile_m % 16)
    assert tokens == {0, 8}
