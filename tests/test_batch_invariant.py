"""batch_invariant=True: a row's bits depend on that row alone, and on its expert. And what it rests on: configs whose
kernel declares one reduction order give equal bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch

import w4gemm
from conformance.cases import (
    CONFIG_FORMATS,
    FEW_FORMATS,
    FP8,
    Target,
    assert_close,
    compile_ahead,
    job,
    random_weight,
    supported_here,
    targets,
)
from w4gemm import QuantizedWeight, UnsupportedError, W4Experts, W4Linear, WeightFormat, choice
from w4gemm.api.expert_layer import LayerKey, one_launch
from w4gemm.choice import plan
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.problem import H200, Device, GemmProblem
from w4gemm.integrations.engines.warmup import ExpertsCall, experts_need
from w4gemm.kernels import KERNELS, config_named
from w4gemm.packing.layouts import layout_for
from w4gemm.packing.packed_shape import packed_shape

H200_PROBLEM = GemmProblem(16, 8192, 8192, torch.bfloat16, WeightFormat(), "mma16", device=H200, batch_invariant=True)
CPU_PROBLEM = replace(H200_PROBLEM, n=130, k=576, dtype=torch.float32, layout="cpu", device=Device("cpu"))


@pytest.fixture(params=[f for f in FEW_FORMATS if not f.has_channels], ids=str)
def w(request, device) -> w4gemm.QuantizedWeight:
    w = random_weight(request.param, 130, 576).to(device).repack()
    if w.layout == "canonical":
        pytest.skip(
            f"{w.format} is multiplied in the canonical layout on the {device}, where nothing is batch invariant"
        )
    return w


def test_the_canonical_layout_is_refused():
    w = random_weight(WeightFormat.parse("mxfp4"), 130, 576).repack()
    assert w.layout == "canonical"
    with pytest.raises(UnsupportedError, match="cpu_mixed_gemm: the bits of a row depend on the other rows here"):
        w4gemm.linear(torch.randn(2, 576), w, batch_invariant=True)


def test_few_tokens_are_added_up_in_another_order_unless_bits_must_not_depend_on_m():
    kernel, config = config_named("sm90_decode/8x64x128_1x1x1_coop")
    orders = [kernel.reduction_order(replace(H200_PROBLEM, m=m), config) for m in (1, 2, 16)]
    plain = [kernel.reduction_order(replace(H200_PROBLEM, m=m, batch_invariant=False), config) for m in (1, 3, 5)]
    assert len({*orders, plain[2]}) == 1 and len({*plain}) == 3


def dtypes(w: w4gemm.QuantizedWeight) -> tuple[torch.dtype, ...]:
    """On a GPU only one format also with float16, since each is compiled."""
    if w.device.type == "cpu":
        return torch.bfloat16, torch.float16, torch.float32
    return (torch.bfloat16, torch.float16) if w.format == WeightFormat() else (torch.bfloat16,)


def randn(w: w4gemm.QuantizedWeight, m: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(m, w.k, generator=torch.Generator().manual_seed(m)).to(w.device, dtype)


def bias_of(w: w4gemm.QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    return torch.linspace(-1, 1, w.n).to(w.device, dtype)


def invariant(x: torch.Tensor, w: w4gemm.QuantizedWeight) -> torch.Tensor:
    return w4gemm.linear(x, w, bias_of(w, x.dtype), batch_invariant=True)


# --- rows ------------------------------------------------------------------------------------------------------------


def test_a_row_alone_and_among_others(w):
    """Rows of one m as batches of their own, and prefixes that end beside a tile's or an interval's bound."""
    step = 1 if w.device.type == "cuda" else 7  # which has every remainder of a tile's rows
    for dtype in dtypes(w):
        x = randn(w, 300, dtype)
        whole = invariant(x, w)
        assert_close(whole, x, w, bias_of(w, dtype))
        rows = range(0, 300, step if dtype == torch.bfloat16 else 37)
        assert all(torch.equal(invariant(x[i : i + 1], w)[0], whole[i]) for i in rows)
        ends = (2, 7, 8, 9, 16, 17, 33, 63, 64, 65, 127, 129, 191, 193, 255, 256, 257, 299)
        for m in ends if w.device.type == "cuda" else ends[::3]:
            assert torch.equal(invariant(x[:m], w), whole[:m]), m
            assert torch.equal(invariant(x[-m:], w), whole[-m:]), m


@pytest.mark.parametrize("m", [2, 9, 64, 300])
def test_permuted_rows(w, m):
    for dtype in dtypes(w):
        x = randn(w, m, dtype)
        order = torch.randperm(m, generator=torch.Generator().manual_seed(0)).to(w.device)
        assert torch.equal(invariant(x[order], w), invariant(x, w)[order])


def test_what_the_other_rows_hold(w):
    x = randn(w, 70, torch.bfloat16)
    whole = invariant(x, w)
    for value in (0.0, 1e30, float("nan"), float("inf")):
        others = x.clone()
        others[torch.arange(70) != 33] = value
        assert torch.equal(invariant(others, w)[33], whole[33])


LARGE = [("int4_g128", n, k) for n, k in ((2048, 2048), (8192, 8192), (136, 8192), (6144, 4096))]
LARGE += [(format, 2048, 2048) for format in ("q4_k", "q5_k", "q6_k")]


@pytest.mark.gpu
@pytest.mark.parametrize("format, n, k", LARGE)
def test_large_on_a_gpu(format, n, k):
    """From decode to prefill: every interval of m, with whatever each of them chooses."""
    w = random_weight(WeightFormat.parse(format), n, k).to("cuda").repack()
    x = randn(w, 9000, torch.bfloat16)
    whole, chosen = invariant(x, w), set()
    for m in choice.BOUNDS:
        chosen.add(str(choice.plan_for(choice.PlanKey.of_layer(w, m, x.dtype, Epilogue(bias=True), True))))
        for part in (slice(m), slice(9000 - m, 9000), slice(11, 11 + m - m // 5)):
            assert torch.equal(invariant(x[part], w), whole[part]), (m, part)
    assert len(chosen) > 1, "one config alone would show nothing"


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["int4_g128", "int4_g64_zint_fp16", "int4_g128_e4m3", "int4_col_e4m3"])
def test_fp8_activations_on_a_gpu(format):
    """Quantized on the way, each token by itself."""
    w = random_weight(WeightFormat.parse(format), 2048, 2048).to("cuda").repack(activations="fp8")
    x = randn(w, 3000, torch.bfloat16)
    whole = invariant(x, w)
    for m in (*(m for m in choice.BOUNDS if m < 3000), 3, 21, 100, 777):
        for part in (slice(m), slice(3000 - m, 3000), slice(11, 11 + m - m // 5)):
            assert torch.equal(invariant(x[part], w), whole[part]), (m, part)


# --- the declared orders ---------------------------------------------------------------------------------------------


SHAPES = (200, 1152), (136, 4096)
Q5_K = WeightFormat.parse("q5_k")
"""sm90_decode adds up its zero points by groups or by blocks, as its tile's features say."""
TOGETHER = 8
"""Configs of one test: hundreds have one order, and a GPU's take seconds each to compile."""


def same_order(target: Target, n: int, k: int, format: WeightFormat, among: Iterable[str]) -> dict[object, list[str]]:
    """Configs by their reduction order."""
    by_order: dict[object, list[str]] = {}
    for name in among:
        config = config_named(name)[1]
        order = target.kernel.reduction_order(target.problem(64, n, k, format), config)
        if order is not None:
            by_order.setdefault(order, []).append(name)
    return by_order


def orders_of() -> list[object]:
    """A target, a format, and some configs of one order, of which the first one comes again with all others."""
    cases = []
    for p in targets():
        (target,) = p.values
        if target.dtype != torch.bfloat16 and (target.dtype, target.device) != (FP8, "cuda"):
            continue
        formats = CONFIG_FORMATS if target.dtype == FP8 else CONFIG_FORMATS[:1]
        if target.kernel.name == "sm90_decode":
            formats = [*formats, Q5_K]
        for format in formats:
            n, k = SHAPES[0]
            for first, *others in same_order(target, n, k, format, target.configs(n, k, format)).values():
                for i in range(0, max(1, len(others)), TOGETHER):
                    configs = [first, *others[i : i + TOGETHER]]
                    name = f"{p.id}-{format}-{configs[-1].split('/')[1]}"
                    cases.append(pytest.param(target, format, configs, id=name, marks=p.marks))
    return cases


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("target, format, configs", orders_of())
def test_configs_of_one_order_give_equal_bits(target, format, configs, request):
    supported_here(target)
    if target.device == "cuda":
        compile_ahead((job(target, *SHAPES[0], format, config) for config in configs), request.config)
    for n, k in SHAPES:
        w, x = target.weight(format, n, k), target.randn(300, k)
        for order, equal in same_order(target, n, k, format, configs).items():
            first = w4gemm.linear(x, w, config=equal[0])
            for config in equal:
                assert torch.equal(w4gemm.linear(x, w, config=config), first), (order, config)
                assert torch.equal(w4gemm.linear(x[9:20], w, config=config), first[9:20]), (order, config)


# --- what is chosen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [H200_PROBLEM, replace(H200_PROBLEM, n=512, k=28672), CPU_PROBLEM], ids=str)
def test_one_order_for_every_m(problem):
    kernels = {kernel.name: kernel for kernel in KERNELS}
    rankings = [choice.explain(replace(problem, m=m)).candidates for m in (*choice.BOUNDS, 10**5)]
    orders = {kernels[c.kernel].reduction_order(problem, c.config) for ranking in rankings for c in ranking}
    assert len(orders) == 1 and None not in orders
    free = [choice.explain(replace(problem, m=m, batch_invariant=False)).candidates for m in choice.BOUNDS[::4]]
    assert all(len(a) < len(b) for a, b in zip(rankings[::4], free, strict=False))


def test_the_intervals_of_few_tokens_count_as_one():
    """Else those of one, two and four tokens would take a split_k of 3 for this layer, at the cost of all larger m."""
    problem = replace(H200_PROBLEM, n=4416, k=16640)
    assert {choice.explain(replace(problem, m=m)).candidates[0].config.split_k for m in choice.BOUNDS} == {2}


def test_a_forced_config_must_be_of_the_order():
    w = random_weight(WeightFormat(), 130, 576).repack()
    x = torch.randn(3, 576)
    ((_, _, config, _),) = choice.explain(CPU_PROBLEM).candidates
    forced = w4gemm.linear(x, w, bias_of(w, x.dtype), config=config, batch_invariant=True)
    assert torch.equal(forced, invariant(x, w))
    other = next(
        c.config for c in choice.explain(replace(CPU_PROBLEM, batch_invariant=False)).candidates if c.config != config
    )
    with pytest.raises(ValueError, match=rf"config: {other} is not legal .* batch invariant; nearest are .*{config}"):
        w4gemm.linear(x, w, config=other, batch_invariant=True)


def test_unsupported_says_why_and_what_helps():
    w = random_weight(WeightFormat(), 130, 576)
    with pytest.raises(UnsupportedError, match=r"(?s)batch invariant on cpu.*rows here.*w.repack\(\) gives cpu"):
        invariant(torch.randn(3, 576), w)
    explanation = choice.explain(replace(CPU_PROBLEM, layout="canonical"))
    assert not explanation.candidates and "depend on the other rows" in str(explanation)


def test_bad_argument(w):
    with pytest.raises(TypeError, match="batch_invariant: wanted a bool, got int 1"):
        w4gemm.linear(randn(w, 2, torch.bfloat16), w, batch_invariant=1)


# --- around it -------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(0.3)
def test_under_compile_autograd_and_empty(w):
    torch.compiler.reset()
    x = randn(w, 20, torch.bfloat16)
    expected = invariant(x, w)
    f = torch.compile(lambda x: invariant(x, w), fullgraph=True, backend="aot_eager")
    assert torch.equal(f(x), expected) and torch.equal(f(x[:3]), expected[:3])
    assert torch.equal(invariant(x.requires_grad_(), w), expected)
    assert invariant(x[:0], w).shape == (0, w.n)


def test_layer(w):
    layer = W4Linear.from_weight(w, bias_of(w, torch.bfloat16))
    assert not layer.batch_invariant and "batch_invariant" not in repr(layer)
    layer.batch_invariant = True
    x = randn(w, 40, torch.bfloat16)
    assert torch.equal(layer(x)[7:8], layer(x[7:8])) and torch.equal(layer(x), invariant(x, w))
    assert "batch_invariant=True" in repr(layer)
    assert W4Linear(64, 64, batch_invariant=True).batch_invariant


# --- experts ---------------------------------------------------------------------------------------------------------

E, HIDDEN, WIDTH, TOP_K = 6, 256, 128, 2


def products_of(format: str) -> list[QuantizedWeight]:
    """gate_up and down."""
    kind, sizes = WeightFormat.parse(format), ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    return [QuantizedWeight.stack([random_weight(kind, n, k, seed) for seed in range(E)]) for n, k in sizes]


@pytest.fixture(params=["int4_g64_zint", "mxfp4", "int4_g128-fp8"])
def experts(request, device) -> W4Experts:
    format, _, activations = request.param.partition("-")
    products = (w.to(device) for w in products_of(format))
    made = W4Experts(*products, activations=activations or None, batch_invariant=True)
    if made.gate_up.weight.layout == "canonical":
        pytest.skip("multiplied in the canonical layout here, where nothing is batch invariant")
    return made


def tokens_of(experts: W4Experts, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, expert ids and weights; every third token has an expert that is elsewhere."""
    g, device = torch.Generator().manual_seed(count), experts.gate_up.weight.device
    ids = torch.stack([torch.randperm(E, generator=g)[:TOP_K] for _ in range(count)])
    ids[::3, 1] = -1
    x = torch.randn(count, HIDDEN, generator=g)
    return x.to(device, torch.bfloat16), ids.int().to(device), torch.rand(count, TOP_K, generator=g).to(device)


@pytest.fixture(params=["gathered", "copied", "any choice"])
def way(request, monkeypatch) -> Iterator[str]:
    """How rows come to a product. With "any choice" a plan is the best or the worst candidate, by the interval of m."""
    if request.param == "any choice":
        ranked = plan.ranked
        step = {0: 1, 1: -1}
        monkeypatch.setattr(plan, "ranked", lambda among, p: ranked(among, p)[:: step[choice.interval(p.m) % 2]])
        choice.forget()
    yield request.param
    choice.forget()


def test_a_token_alone_and_among_others(experts, way):
    """At any number of tokens, whatever the others hold, and whichever experts they chose. x whose rows are no multiple
    of 16 bytes apart is copied on a GPU, not gathered by the kernel."""
    counts = (2, 4, 8, 9, 33, 64, 130, 300)
    if experts.gate_up.weight.device.type == "cuda":  # compiled side by side
        rows = [TOP_K * m for m in (1, *counts, 600)]
        call = ExpertsCall(torch.bfloat16, [TOP_K], rows, way != "copied", batch_invariant=True)
        choice.prepare(experts_need(experts.gate_up.weight, experts.down.weight, "silu_mul", call, None).keys)
    x, ids, weights = tokens_of(experts, 600)
    if way == "copied":
        x = torch.cat((x, x[:, :1]), 1)[:, :HIDDEN]
    whole = experts(x, ids, weights)
    assert whole.isfinite().all() and whole.abs().sum() > 0
    for i in (0, 1, 7, 64, 599):
        assert torch.equal(experts(x[i : i + 1], ids[i : i + 1], weights[i : i + 1])[0], whole[i]), i
    for m in counts:
        assert torch.equal(experts(x[:m], ids[:m], weights[:m]), whole[:m]), m
        assert torch.equal(experts(x[-m:], ids[-m:], weights[-m:]), whole[-m:]), m
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0)).to(x.device)
    assert torch.equal(experts(x[order], ids[order], weights[order]), whole[order])
    others = torch.arange(600, device=x.device) % 7 > 0
    for expert in (0, E - 1, E):
        chosen, values = ids.clone(), x.clone()
        chosen[others], values[others] = expert, float("nan")
        assert torch.equal(experts(values, chosen, weights)[~others], whole[~others]), expert


def test_sorted_gathered_and_padded_rows_have_equal_bits(experts):
    """So training, which may pad rows, and serving, which gathers them, compute the same."""
    w = experts.gate_up.weight
    x, _, _ = tokens_of(experts, 50)
    counts = torch.tensor([0, 20, 1, 0, 26, 3], dtype=torch.int32, device=x.device)
    offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    indices = torch.randperm(50, generator=torch.Generator().manual_seed(1)).to(x.device)
    fused = {"activation": "silu_mul", "batch_invariant": True}
    rows = w4gemm.grouped_linear(x[indices], w, offsets, **fused)
    assert torch.equal(w4gemm.grouped_linear(x, w, offsets, indices=indices, **fused), rows)
    for expected in (None, 1, 13):
        padded = x.new_zeros(E, 26, HIDDEN)
        for e, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            padded[e, : last - first] = x[indices[first:last]]
        d = w4gemm.masked_linear(padded, w, counts, expected_m=expected, **fused)
        assert torch.equal(torch.cat([d[e, :count] for e, count in enumerate(counts.tolist())]), rows)
    if x.device.type == "cpu":
        torch.compiler.reset()
        call = torch.compile(
            lambda x: w4gemm.grouped_linear(x, w, offsets, **fused), fullgraph=True, backend="aot_eager"
        )
        assert torch.equal(call(x[indices]), rows)
    if w.activations is None:
        plain = w4gemm.grouped_linear(x[indices], w, offsets, batch_invariant=True)
        tracked = x[indices].requires_grad_()
        assert torch.equal(w4gemm.grouped_linear(tracked, w, offsets, batch_invariant=True), plain)


@pytest.mark.parametrize(
    "experts, n, k, format, fp8",
    [(128, 1536, 2048, "int4_g128", False), (8, 256, 2048, "mxfp4", False), (128, 1536, 2048, "int4_g128", True)],
    ids=str,
)
def test_experts_have_one_order(experts, n, k, format, fp8):
    """For any number of rows, gathered or not. Of the second layer the kernels that gather would prefer another one."""
    format, dtype = WeightFormat.parse(format), FP8 if fp8 else torch.bfloat16
    epilogue = Epilogue(token_scale=fp8, out_dtype=torch.bfloat16 if fp8 else None)
    problem = GemmProblem(1, n, k, dtype, format, layout_for(H200, format, dtype), epilogue, H200, True, experts)
    kernels, orders = {kernel.name: kernel for kernel in KERNELS}, set()
    for gathered in (False, True):
        for m in (1, 4, experts, 8 * experts, 100 * experts, 5000 * experts):
            one = replace(problem, m=m, gathered=gathered)
            orders |= {kernels[c.kernel].reduction_order(one, c.config) for c in choice.explain(one).candidates}
    assert len(orders) == 1 and None not in orders


def wide_experts(format: str, device: str) -> W4Experts:
    """A layer whose sums are in order along k for any number of rows."""
    kind = WeightFormat.parse(format)
    stacks = (
        QuantizedWeight.stack([random_weight(kind, n, k, seed) for seed in range(16)])
        for n, k in ((2 * 608, 832), (832, 608))
    )
    return W4Experts(*(w.to(device) for w in stacks), batch_invariant=True)


@pytest.mark.parametrize("format", ["int4_g128", "int4_g32_zint", "mxfp4"])
def test_one_launch_has_the_bits_of_four(format, device):
    experts = wide_experts(format, device)
    if experts.gate_up.weight.layout == "canonical":
        pytest.skip("multiplied in the canonical layout here, where nothing is batch invariant")
    g = torch.Generator().manual_seed(0)
    x, weights = torch.randn(40, 832, generator=g).to(device, torch.bfloat16), torch.rand(40, 4, generator=g).to(device)
    ids = torch.stack([torch.randperm(16, generator=g)[:4] for _ in range(40)]).to(device)
    ids[1, 3], ids[2, 0] = ids[1, 0], -1
    many = experts(x, ids, weights)
    if experts.explain(8, 4).startswith("one launch"):
        experts.one_launch = True  # so that an error says so if it is not
    else:
        assert device == "cpu" or torch.cuda.get_device_capability() != (9, 0)
    for m in range(1, 9):
        assert torch.equal(experts(x[:m], ids[:m], weights[:m]), many[:m]), m


@pytest.mark.parametrize(
    ("format", "sizes", "reason"),
    [
        ("int4_g128", (16, 832, 608), ""),
        ("mxfp4", (128, 2880, 2880), ""),
        ("nvfp4", (16, 832, 608), "formats other than int4 and MXFP4"),
        ("int4_g128", (5, 192, 160), "other kernels add up in another order"),
    ],
)
def test_which_invariant_experts_run_in_one_launch(format, sizes, reason):
    (experts, features, width), kind = sizes, WeightFormat.parse(format)
    shapes = (packed_shape(kind, "mma16", n, k, experts) for n, k in ((2 * width, features), (features, width)))
    key = LayerKey(4, *shapes, torch.bfloat16, "silu_mul", 4, torch.int64, in_order=True)
    decision = one_launch(key, H200)
    assert reason in decision.refusal and bool(decision.refusal) == bool(reason)
    assert decision.layer is None or (decision.layer.in_order and not decision.layer.split)


def test_layers_say_that_they_are_invariant():
    experts = W4Experts(*products_of("int4_g128"))
    assert not experts.batch_invariant
    experts.gate_up.batch_invariant = True
    assert "batch_invariant is True of one product alone" in experts.explain(4, TOP_K)
    experts.batch_invariant = True
    assert experts.gate_up.batch_invariant and experts.down.batch_invariant
    assert "batch_invariant" not in experts.explain(4, TOP_K)
    assert "batch_invariant=True" in repr(experts)
    with pytest.raises(TypeError, match="batch_invariant: wanted a bool, got int 1"):
        experts.batch_invariant = 1
