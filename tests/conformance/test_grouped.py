"""Every kernel as a grouped one: against every format, exact first; then against itself, expert by expert."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import w4gemm
from conformance.cases import (
    CONFIG_FORMATS,
    FEW_FORMATS,
    FORMATS,
    FP8,
    PARTIAL,
    Target,
    assert_close,
    compile_ahead,
    random_weight,
    runs_beside_others,
    supported_here,
    targets,
)
from reference import grouped_reference
from w4gemm import QuantizedWeight, WeightFormat
from w4gemm.choice.model import ranked
from w4gemm.core.epilogue import Epilogue, default_out_dtype
from w4gemm.kernels import config_named
from w4gemm.kernels.gpu import takes_rows
from w4gemm.kernels.hopper import most_narrow_rows
from w4gemm.kernels.variant import EXPERT_MAPS

pytestmark = pytest.mark.sampled(0.05)

N, K = 200, 768
COUNTS = (3, 0, 70, 0, 1, 130, 0)
"""Rows of each expert."""
CONFIG_FORMAT, CONFIG_DTYPE = CONFIG_FORMATS[0], torch.bfloat16
ROUTINGS = {
    "mixed": COUNTS,
    "one": (0, 0, 0, 300, 0, 0, 0),
    "first": (300, 0, 0, 0, 0, 0, 0),
    "few": (1, 1, 0, 1, 1, 1, 1),
    "ragged": (9, 33, 65, 129, 193, 257, 5),
}
GUARD = 16

TARGETS = [p for p in targets() if p.values[0].kernel.name not in PARTIAL]
ON_GPU = [p for p in TARGETS if p.values[0].device == "cuda"]
on_gpu = pytest.mark.parametrize("target", ON_GPU, indirect=True)


@pytest.fixture(params=TARGETS)
def target(request) -> Target:
    supported_here(request.param)
    return request.param


def configs(
    target: Target, n: int, k: int, format: WeightFormat, m: int, experts: int, gathered: bool = False
) -> list[str]:
    """Every legal config of a grouped problem, best guess first."""

    problem = replace(target.problem(m, n, k, format), experts=experts, gathered=gathered)
    return [f"{target.kernel.name}/{c}" for _, _, c in ranked([target.kernel], problem)]


def usual(target: Target, format: WeightFormat = CONFIG_FORMAT, k: int = K) -> str:
    """One config for as many tests as possible, those of gathered rows too if the kernel gathers them."""
    sizes = N, k, format, 64 * len(COUNTS), len(COUNTS)
    return (configs(target, *sizes, gathered=True) or configs(target, *sizes))[0]


def experts_of(target: Target, format: WeightFormat, n: int, k: int, count: int) -> QuantizedWeight:
    target.takes(format)
    weights = (random_weight(format, n, k, seed=e).to(target.device) for e in range(count))
    return QuantizedWeight.stack(weights, count, target.layout)


def offsets_of(target: Target, counts: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *itertools.accumulate(counts)), dtype=torch.int32, device=target.device)


def poisoned(x: torch.Tensor, w: QuantizedWeight, offsets: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """``grouped_linear`` between guards that nobody may write; x goes on behind the last offset with NaN."""
    columns = Epilogue(kwargs.get("activation")).columns(w.n)
    beside = torch.full((x.shape[0] + GUARD, x.shape[1]), torch.nan, device=x.device)
    beside[: x.shape[0]] = x.float()
    beside = beside.to(x.dtype)
    dtype, rows = kwargs.get("out_dtype") or default_out_dtype(x.dtype), x.shape[0] + GUARD // 2
    buffer = torch.full((rows + 2 * GUARD, columns), torch.nan, dtype=dtype, device=x.device)
    out = buffer[GUARD : GUARD + rows]
    for name in ("residual", "token_scale"):
        if (t := kwargs.get(name)) is not None:
            kwargs[name] = torch.cat((t, t.new_zeros((GUARD // 2, *t.shape[1:]))))
    w4gemm.grouped_linear(beside[:rows], w, offsets, *args, out=out, **kwargs)
    assert out[x.shape[0] :].isnan().all(), "rows that no expert has were written"
    assert buffer[:GUARD].isnan().all() and buffer[-GUARD:].isnan().all(), "memory around out was written"
    assert not out[: x.shape[0]].isnan().any(), "a part of out was not written"
    return out[: x.shape[0]]


# --- exact -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_one_hot_gives_every_experts_weight(target, format):
    """Ten rows of one hot column each for every expert, so that tiles hold rows of neighbours, or K of them."""
    w = experts_of(target, format, N, K, 4)
    dense = w.dequantize(target.out_dtype)
    picks = [torch.arange(0, K, 77), torch.arange(0), torch.arange(K), torch.arange(1, K, 77)]
    x = target.one_hot(torch.cat(picks), K)
    expected = torch.cat([dense[e].T[p.to(target.device)] for e, p in enumerate(picks)])
    offsets = offsets_of(target, tuple(len(p) for p in picks))
    assert torch.equal(poisoned(x, w, offsets, config=usual(target, format)), expected)


# --- random ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, k", [(N, K), (130, 333), (7, 32), (576, 2752)])
@pytest.mark.parametrize("format", FEW_FORMATS, ids=str)
def test_random(target, format, n, k):
    """Against float64, with a bias of its own for each expert, and what dispatch chooses."""
    w, x = experts_of(target, format, n, k, len(COUNTS)), target.randn(sum(COUNTS), k)
    bias, offsets = target.randn(len(COUNTS), n, seed=5, dtype=target.out_dtype), offsets_of(target, COUNTS)
    d = poisoned(x, w, offsets, bias)
    assert torch.equal(poisoned(x, w, offsets, bias), d), "another run gave other bits"
    for e, (first, last) in enumerate(itertools.pairwise(offsets.tolist())):
        assert_close(d[first:last], x[first:last], w.expert(e), bias[e])


@pytest.mark.parametrize("activation", ["gelu", "silu_mul", "swiglu_oai", "silu_mul(limit=3)", "situ_mul"])
def test_epilogue(target, activation):
    w, x = experts_of(target, CONFIG_FORMAT, N, K, len(COUNTS)), target.randn(sum(COUNTS), K)
    bias, offsets = target.randn(len(COUNTS), N, seed=5, dtype=target.out_dtype), offsets_of(target, COUNTS)
    columns = Epilogue(activation).columns(N)
    residual = target.randn(sum(COUNTS), columns, seed=6, dtype=target.out_dtype)
    fused = {"alpha": 0.5, "activation": activation, "residual": residual}
    fused["expert_scale"] = target.randn(len(COUNTS), seed=9, dtype=torch.float32)
    if target.dtype == FP8:
        fused["token_scale"] = target.randn(sum(COUNTS), seed=7, dtype=torch.float32)
    d = poisoned(x, w, offsets, bias, **fused, config=usual(target))
    expected = grouped_reference(x, w, offsets, bias, **fused)
    error = (d.double() - expected).norm() / expected.norm()
    assert error < 4 * torch.finfo(target.out_dtype).eps, error


def test_more_experts_than_the_smaller_map(target):
    """With the larger map of experts."""
    count, n, k = EXPERT_MAPS[0] + 5, 64, 64
    w = experts_of(target, CONFIG_FORMAT, n, k, count)
    rows = [e % 3 for e in range(count)]
    x, offsets = target.randn(sum(rows), k), offsets_of(target, rows)
    d = poisoned(x, w, offsets)
    for e in (0, 1, EXPERT_MAPS[0] - 1, EXPERT_MAPS[0], count - 1):
        first, last = offsets[e : e + 2].tolist()
        if last > first:
            assert_close(d[first:last], x[first:last], w.expert(e))


def test_the_masked_form(target):
    w, x = experts_of(target, CONFIG_FORMAT, N, K, 5), target.randn(5, 40, K)
    counts = torch.tensor([40, 0, 3, 17, 1], dtype=torch.int32, device=target.device)
    out = torch.full((5, 40, N), torch.nan, dtype=target.out_dtype, device=target.device)
    w4gemm.masked_linear(x, w, counts, out=out, config=usual(target))
    for e, count in enumerate(counts.tolist()):
        assert out[e, count:].isnan().all()
        assert_close(out[e, :count], x[e, :count], w.expert(e))


def some_rows(target: Target, count: int, m: int) -> torch.Tensor:
    """m of ``count`` rows, in any order, some of them several times, the last one too."""
    rows = torch.randint(count, (m,), generator=torch.Generator().manual_seed(m)).int()
    rows[m // 2] = count - 1
    return rows.to(target.device)


def gathered(
    x: torch.Tensor, indices: torch.Tensor, w: QuantizedWeight, offsets: torch.Tensor, config: str | None, **fused
) -> torch.Tensor:
    """``grouped_linear`` of rows of x by their indices, which must be that of a copy of them: bit for bit with a forced
    config; dispatch may choose different ones, which add up in another order. Indices behind the last offset, which a
    kernel that gathers does not look at, say that there are rows of x far away."""
    copied = x.float()[indices.long()].to(x.dtype)
    scale = fused.get("token_scale")
    of_copy = fused if scale is None else fused | {"token_scale": scale[indices.long()]}
    try:
        expected = w4gemm.grouped_linear(copied, w, offsets, config=config, **of_copy)
    except ValueError as e:
        if "is not legal" not in str(e):
            raise
        # legal for rows by their indices alone: those of the copy in order
        in_order = torch.arange(len(copied), dtype=torch.int32, device=x.device)
        expected = w4gemm.grouped_linear(copied, w, offsets, indices=in_order, config=config, **of_copy)
    on_load = x.device.type == "cuda" and takes_rows(x)
    more = torch.full((GUARD,), 2**30 if on_load else 0, dtype=torch.int32, device=x.device)
    out = torch.full((len(indices) + GUARD, expected.shape[1]), torch.nan, dtype=expected.dtype, device=x.device)
    if (residual := fused.get("residual")) is not None:
        fused = fused | {"residual": torch.cat((residual, residual[:1].expand(GUARD, -1)))}
    d = w4gemm.grouped_linear(x, w, offsets, indices=torch.cat((indices, more)), out=out, config=config, **fused)
    assert d[len(indices) :].isnan().all(), "rows that no expert has were written"
    got = d[: len(indices)]
    if config is not None:
        assert torch.equal(got, expected)
    assert (got.double() - expected.double()).norm() < 4 * torch.finfo(got.dtype).eps * expected.double().norm()
    return got


@pytest.mark.parametrize("routing", ["mixed", "one", "first", "few", "ragged"])
@pytest.mark.parametrize("k", [K, 816, 333])
def test_the_indexed_form(target, k, routing):
    """k that is no multiple of a tile, and one whose rows cannot be read 16 bytes at a time."""
    w, x = experts_of(target, CONFIG_FORMAT, N, k, len(COUNTS)), target.randn(50, k)
    counts = ROUTINGS[routing]
    indices, offsets = some_rows(target, len(x), sum(counts)), offsets_of(target, counts)
    config = usual(target, k=k)
    d = gathered(x, indices, w, offsets, config)
    for e, (first, last) in enumerate(itertools.pairwise(offsets.tolist())):
        assert_close(d[first:last], x.float()[indices[first:last].long()].to(x.dtype), w.expert(e))
    assert torch.equal(w4gemm.grouped_linear(x, w, offsets, indices=indices.long(), config=config), d)


@pytest.mark.parametrize("activation", ["gelu", "silu_mul"])
def test_the_epilogue_of_the_indexed_form(target, activation):
    """token_scale goes with x, what else there is with the result."""
    w, x = experts_of(target, CONFIG_FORMAT, N, K, len(COUNTS)), target.randn(50, K)
    indices, columns = some_rows(target, len(x), sum(COUNTS)), Epilogue(activation).columns(N)
    residual = target.randn(sum(COUNTS), columns, seed=6, dtype=target.out_dtype)
    fused = {"alpha": 0.5, "activation": activation, "residual": residual}
    fused["bias"] = target.randn(len(COUNTS), N, seed=5, dtype=target.out_dtype)
    if target.dtype == FP8:
        fused["token_scale"] = target.randn(len(x), seed=7, dtype=torch.float32)
    for config in (usual(target), None):
        gathered(x, indices, w, offsets_of(target, COUNTS), config, **fused)


def test_rows_of_a_wider_tensor(target):
    """x with rows that are apart, at addresses that are multiples of 16 bytes or not."""
    w, wide = experts_of(target, CONFIG_FORMAT, N, K, len(COUNTS)), target.randn(50, K + 64)
    indices, offsets = some_rows(target, len(wide), sum(COUNTS)), offsets_of(target, COUNTS)
    for start in (0, 32, 5):
        gathered(wide[:, start : start + K], indices, w, offsets, usual(target))
    gathered(wide[:1, :K].expand(50, K), indices, w, offsets, usual(target))


def test_no_rows(target):
    w = experts_of(target, CONFIG_FORMAT, N, K, 3)
    x, none = target.randn(0, K), torch.zeros(4, dtype=torch.int32, device=target.device)
    assert w4gemm.grouped_linear(x, w, none).shape == (0, N)
    out = torch.full((8, N), torch.nan, dtype=target.out_dtype, device=target.device)
    for config in (None, usual(target)):
        w4gemm.grouped_linear(target.randn(8, K), w, none, out=out, config=config)
        assert out.isnan().all()


@pytest.mark.parametrize("experts", [1, 2, 33, 512])
def test_how_many_experts(target, experts):
    if target.device == "cpu":
        experts = min(experts, 33)
    few = [random_weight(CONFIG_FORMAT, 64, 128, seed).to(target.device) for seed in range(4)]
    w = QuantizedWeight.stack([few[e % 4] for e in range(experts)], layout=target.layout)
    counts = (*(7 * e % 5 for e in range(experts - 1)), 3)
    x, offsets = target.randn(sum(counts), 128), offsets_of(target, counts)
    d = poisoned(x, w, offsets)
    expected = grouped_reference(x, w, offsets)
    assert (d.double() - expected).norm() < 4 * torch.finfo(target.out_dtype).eps * expected.norm()


# --- configs ---------------------------------------------------------------------------------------------------------


def every_config(gathered: bool = False) -> list[object]:
    actual = []
    for param in ON_GPU:
        (target,) = param.values
        if target.dtype in (CONFIG_DTYPE, FP8):
            for config, format in target.every_config([(N, K)], 512, experts=7, gathered=gathered).items():
                actual.append(pytest.param(target, config, format, id=config, marks=param.marks))
    return actual


@pytest.fixture(scope="module")
def _compiled_ahead(request):
    """On all cores, before the first of many configs."""

    if not torch.cuda.is_available() or len(request.session.items) < 50 or runs_beside_others(request.config):
        return
    jobs = []
    for param in every_config():
        target, config, format = param.values
        problem, pair = target.problem(512, N, K, format), config_named(config)[1]
        jobs.append((target.kernel, replace(problem, experts=7), pair))
        jobs += [(target.kernel, problem, one) for one in {replace(pair, tail=None), pair.tail or pair}]
    for param in every_config(gathered=True):
        target, config, format = param.values
        problem = replace(target.problem(512, N, K, format), experts=7, gathered=True)
        jobs.append((target.kernel, problem, config_named(config)[1]))
    compile_ahead(jobs, request.config)


@pytest.mark.parametrize("target, config, format", every_config())
def test_every_config_is_the_dense_one(target, config, format, _compiled_ahead):
    """Bit for bit what ``linear`` gives for an expert's rows alone with the same config, or with that of its two that
    computes the expert, whatever the routing, if both add up in the same order; k and n such that rings wrap and CTAs
    walk over several tiles."""
    supported_here(target)
    problem, pair = target.problem(512, N, K, format), config_named(config)[1]
    few, many = replace(pair, tail=None), pair.tail or pair
    for n, k in ((N, K), (2056, 4352), (1000, 100)):
        w = experts_of(target, format, n, k, 7)
        for name, counts in ROUTINGS.items():
            x, offsets = target.randn(sum(counts), k), offsets_of(target, counts)
            d = poisoned(x, w, offsets, config=config)
            assert torch.equal(poisoned(x, w, offsets, config=config), d), f"{name}: another run gave other bits"
            for e, (first, last) in enumerate(itertools.pairwise(offsets.tolist())):
                if first < last:
                    one = few if pair.tail is None or last - first <= most_narrow_rows(pair) else many
                    alone = w4gemm.linear(x[first:last], w.expert(e), config=f"{target.kernel.name}/{one}")
                    # the table of experts may leave room for fewer warps
                    orders = {target.kernel.reduction_order(p, one) for p in (problem, replace(problem, experts=7))}
                    assert torch.equal(d[first:last], alone) or len(orders) > 1, f"{name}, expert {e}"
                    assert_close(d[first:last], x[first:last], w.expert(e))


@pytest.mark.parametrize("target, config, format", every_config(gathered=True))
def test_every_config_gathers(target, config, format, _compiled_ahead):
    """Bit for bit what it gives of a copy of the rows, again and again: a slot that is multiplied before all of it is
    there would show sooner or later."""
    supported_here(target)
    for n, k in ((N, K), (2056, 4352), (1000, 112)):
        w, x = experts_of(target, format, n, k, 7), target.randn(200, k)
        for counts in ROUTINGS.values():
            indices, offsets = some_rows(target, len(x), sum(counts)), offsets_of(target, counts)
            d = gathered(x, indices, w, offsets, config)
            for _ in range(3):
                again = w4gemm.grouped_linear(x, w, offsets, indices=indices, config=config)
                assert torch.equal(again, d), "another run gave other bits"


# --- launches --------------------------------------------------------------------------------------------------------


@on_gpu
def test_a_graph_serves_any_routing(target):
    w, m = experts_of(target, CONFIG_FORMAT, N, K, 7), 300
    x, offsets = target.randn(m, K), offsets_of(target, ROUTINGS["one"])
    for config in (usual(target), None):
        w4gemm.grouped_linear(x, w, offsets, config=config)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            d = w4gemm.grouped_linear(x, w, offsets, config=config)
        for counts in ((0,) * 7, ROUTINGS["first"], COUNTS, (50, 50, 50, 50, 50, 49, 1), ROUTINGS["one"]):
            offsets.copy_(offsets_of(target, counts))
            d.fill_(torch.nan)
            graph.replay()
            expected = torch.full_like(d, torch.nan)
            w4gemm.grouped_linear(x, w, offsets, config=config, out=expected)
            assert torch.equal(d.nan_to_num(9e9), expected.nan_to_num(9e9))
            assert not d[: sum(counts)].isnan().any() and d[sum(counts) :].isnan().all()


@on_gpu
def test_a_graph_serves_any_indices(target):
    """And any routing, from replay to replay."""
    w, x, m = experts_of(target, CONFIG_FORMAT, N, K, 7), target.randn(100, K), 300
    offsets, indices = offsets_of(target, ROUTINGS["one"]), some_rows(target, len(x), m)
    for config in (usual(target), None):
        w4gemm.grouped_linear(x, w, offsets, indices=indices, config=config)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            d = w4gemm.grouped_linear(x, w, offsets, indices=indices, config=config)
        for counts in (ROUTINGS["first"], (50, 50, 50, 50, 50, 49, 1), ROUTINGS["one"]):
            offsets.copy_(offsets_of(target, counts))
            indices.copy_(some_rows(target, len(x), m).roll(counts[0]))
            d.fill_(torch.nan)
            graph.replay()
            assert torch.equal(d, w4gemm.grouped_linear(x, w, offsets, indices=indices, config=config))
            assert torch.equal(d, gathered(x, indices, w, offsets, config))


@on_gpu
def test_more_than_two_gigabytes(target):
    """Offsets of blocks overflow 32 bits."""
    n, k, experts = 8192, 4096, 132
    each = [target.weight(FEW_FORMATS[1], n, k, seed) for seed in range(2)]
    tensors = torch.empty((experts, *each[0].tensors[0].shape), dtype=torch.int32, device="cuda")
    tensors[0::2], tensors[1::2] = each[0].tensors[0], each[1].tensors[0]
    w = QuantizedWeight(each[0].format, n, k, target.layout, (tensors,), experts=experts)
    assert tensors.numel() * 4 > 2**31
    x, config = target.randn(2 * experts, k), usual(target, w.format)
    offsets = torch.arange(0, 2 * experts + 1, 2, dtype=torch.int32, device="cuda")
    d = w4gemm.grouped_linear(x, w, offsets, config=config).view(experts, 2, n)
    for e in (0, 1, experts - 2, experts - 1):
        assert_close(d[e], x[2 * e : 2 * e + 2], each[e % 2])
