"""Every kernel in the registry against every format: exact first, then random, then how it is launched.

A kernel on the GPU is launched with few distinct configs outside of the tests over configs, since each is compiled.
"""

from __future__ import annotations

import pytest
import torch

import w4gemm
from conformance.cases import (
    FEW_FORMATS,
    FORMATS,
    FP8,
    Expected,
    Target,
    assert_close,
    compile_ahead,
    job,
    linear_poisoned,
    runs_beside_others,
    supported_here,
    targets,
)
from w4gemm.core.epilogue import PLAIN, Epilogue

pytestmark = pytest.mark.sampled(0.05)

N, K = 208, 768
"""Small, and with a part of a tile along n; K is a multiple of every group size but 512."""
RAGGED = ((576, 2752), (130, 333), (130, 2752), (7, 333), (7, 32), (1, 100), (1, 32), (576, 100))
TOKENS = (0, 1, 2, 7, 13, 64, 257)
CONFIG_DTYPE = torch.bfloat16
SHAPES = {"small": (40, 200, 512), "long": (24, 136, 8192), "short": (300, 200, 100), "many": (300, 17032, 256)}
"""Shapes that every config runs: "long" wraps around every pipeline, "short" does not fill one, and "many" has more
tiles than a GPU runs CTAs, so that they walk over several."""
CONFIG_SHAPES = [(n, k) for _, n, k in SHAPES.values()]

TARGETS = targets()
all_formats = pytest.mark.parametrize("format", FORMATS, ids=str)
on_gpu = pytest.mark.parametrize("target", [p for p in TARGETS if p.values[0].device == "cuda"], indirect=True)
few_formats = pytest.mark.parametrize("format", FEW_FORMATS, ids=str)


@pytest.fixture(params=TARGETS)
def target(request) -> Target:
    supported_here(request.param)
    return request.param


@pytest.fixture(scope="module", autouse=True)
def _compiled_ahead(request):
    """In a whole run on a GPU, compile most of what it needs on all cores first."""
    if not torch.cuda.is_available() or len(request.session.items) < 200 or runs_beside_others(request.config):
        return
    jobs = []
    for param in TARGETS:
        (t,) = param.values
        if t.device != "cuda":
            continue
        jobs += [job(t, N, K, f, config) for f in FORMATS for config in t.few_configs(N, K, f)]
        for f in FEW_FORMATS:
            for n, k in RAGGED:
                epilogues = (PLAIN, Epilogue(bias=True))
                jobs += [job(t, n, k, f, config, e) for config in t.few_configs(n, k, f) for e in epilogues]
        if configs_of_all(t):
            for n, k in CONFIG_SHAPES:
                actual = t.every_config([(n, k)]).items()
                jobs += [job(t, n, k, format, config) for config, format in actual]
    compile_ahead(jobs, request.config)


# --- exact -----------------------------------------------------------------------------------------------------------


@all_formats
def test_one_hot_gives_the_dequantized_weight(target, format):
    w = target.weight(format, N, K)
    x = target.one_hot(torch.arange(K), K)
    for config in target.few_configs(N, K, format):
        assert torch.equal(linear_poisoned(x, w, None, config).T, w.dequantize(target.out_dtype))


EXACT_POWERS = {torch.bfloat16: (22, 155), torch.float16: (103, 140), torch.float32: (0, 155)}
"""First and last e8m0 scale, by its bits, whose products with every e2m1 number a kernel holds: see e2m1_decode.py.
Larger ones are refused; in fp16 they are infinite, as numbers beyond 65504 are."""


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_every_code_with_every_scale(target, name):
    """The bits of the float64 product, rounded once."""
    if target.dtype == FP8:
        pytest.skip("rows with scales of more than 29 binades are rounded")
    format, dtype = w4gemm.WeightFormat.parse(name), target.out_dtype
    first, last = EXACT_POWERS[target.dtype] if name == "mxfp4" else (0, 255)
    bits = torch.arange(first, last + 1, dtype=torch.uint8)
    bits = bits[(bits & 127) != 127] if name == "nvfp4" else bits
    k, groups = 96, format.groups(96)
    codes = torch.arange(16, dtype=torch.uint8).repeat(len(bits), k // 16)
    scales = torch.stack([bits.roll(i) for i in range(groups)], dim=1).view(format.scale_dtype)
    for factor in (1.0, 1 / 3) if name == "nvfp4" else (None,):
        channels = None if factor is None else torch.full((len(bits),), factor)
        target.takes(format)
        w = w4gemm.QuantizedWeight.from_codes(format, codes, scales, channels=channels)
        s = scales.float() if name == "nvfp4" else torch.exp2(scales.view(torch.uint8).double() - 127)
        exact = format.element_rule.numbers(codes).double() * s.double().repeat_interleave(format.group_size, dim=1)
        if channels is not None:  # a kernel multiplies a sum in float32 by the row's factor, in float32
            exact = exact.float() * channels[:, None]
        w = w.to(target.device).repack(target.layout)
        for config in target.few_configs(len(bits), k, format):
            got = linear_poisoned(target.one_hot(torch.arange(k), k), w, None, config)
            assert torch.equal(got.T.cpu(), exact.to(dtype))


@pytest.mark.parametrize("scale", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("element", ["iq4", "nf4"])
def test_every_number_with_many_scales(target, element, scale):
    """Every number, as x's dtype holds it, with scales of every exponent from 2**-12 to 2**8 and 512 significands: the
    bits of the float64 product, rounded to float32 where scales are, and then once."""
    format, k = w4gemm.WeightFormat(32, scale=scale, element=element), 96
    target.takes(format)
    n = 512
    codes = torch.arange(16, dtype=torch.uint8).repeat(n, k // 16)
    spread = torch.arange(n * 3).view(n, 3)
    scales = ((1 + spread / (3 * n)) * torch.exp2((spread % 21 - 12).float()) * (1 - spread % 2 * 2)).to(
        format.scale_dtype
    )
    w = w4gemm.QuantizedWeight.from_codes(format, codes, scales).to(target.device).repack(target.layout)
    numbers = torch.tensor(format.element_rule.values)
    numbers = numbers.to(target.dtype).double() if target.dtype.itemsize == 2 else numbers.double()
    exact = numbers[codes.int()] * scales.double().repeat_interleave(32, dim=1)
    rounded = exact.float() if scale == "fp32" else exact
    for config in target.few_configs(n, k, format):
        got = linear_poisoned(target.one_hot(torch.arange(k), k), w, None, config)
        assert torch.equal(got.T.cpu(), rounded.to(target.out_dtype))


@few_formats
@pytest.mark.parametrize("n, k", RAGGED)
def test_one_hot_ragged(target, format, n, k):
    """Columns of a power of two, with and without bias."""
    w, bias = target.weight(format, n, k), target.randn(n, dtype=target.out_dtype)
    columns = torch.randperm(k, generator=torch.Generator().manual_seed(0))[:192].to(target.device)
    x = target.one_hot(columns, k, -4)
    exact = -4 * w.dequantize(target.out_dtype)[:, columns].T
    # factors of rows multiply sums, and scales of two levels may, so that a weight that is a subnormal of x's dtype is
    # not rounded before it meets -4
    is_rounded = format.has_channels or format.has_factors
    subnormal = 4 * torch.finfo(target.out_dtype).smallest_normal if is_rounded else 0
    # a kernel may add the bias to a weight that is not rounded yet
    roundings = torch.finfo(target.out_dtype).eps * ((exact + bias).abs() + exact.abs() + subnormal).double()
    for config in target.few_configs(n, k, format):
        got = linear_poisoned(x, w, None, config)
        assert torch.equal(torch.where(exact.abs() <= subnormal, exact, got), exact)
        assert ((got - exact).abs() <= subnormal * torch.finfo(target.out_dtype).eps).all()
        biased = linear_poisoned(x, w, bias, config).double()
        assert ((biased - (exact.double() + bias.double())).abs() <= roundings).all()


# --- random ----------------------------------------------------------------------------------------------------------


@all_formats
def test_random(target, format):
    w, x = target.weight(format, N, K), target.randn(64, K)
    expected = Expected(x, w)
    for config in target.few_configs(N, K, format):
        got = linear_poisoned(x, w, None, config)
        expected.check(got)
        for _ in range(2):
            assert torch.equal(linear_poisoned(x, w, None, config), got), "another run gave other bits"


@few_formats
@pytest.mark.parametrize("n, k", RAGGED)
def test_ragged(target, format, n, k):
    """Any m, n and k, with and without bias; NaN stands beside every row of x and must not be read."""
    w, bias = target.weight(format, n, k), target.randn(n, dtype=target.out_dtype)
    for m in TOKENS:
        line = 16 // target.dtype.itemsize
        beside = torch.full((m + 1, k + line + -k % line), float("nan"), device=target.device).to(target.dtype)
        x = beside[:m, :k]
        x.copy_(target.randn(m, k))
        plain, biased = Expected(x, w), Expected(x, w, bias)
        for config in target.few_configs(n, k, format):
            plain.check(linear_poisoned(x, w, None, config))
            biased.check(linear_poisoned(x, w, bias, config))


@pytest.mark.parametrize("m", TOKENS)
def test_chosen_by_dispatch(target, m):
    """``linear`` without a forced config."""
    w, x = target.weight(target.format, 576, 576), target.randn(m, 576)
    assert_close(linear_poisoned(x, w, None, None), x, w)


# --- configs ---------------------------------------------------------------------------------------------------------


def configs_of_all(target: Target) -> bool:
    """True if every config runs: for one dtype if several share the device code."""
    return target.dtype == CONFIG_DTYPE or (target.dtype == FP8 and target.device == "cuda")


def _every_config() -> list[object]:
    actual = []
    for param in TARGETS:
        (target,) = param.values
        if not configs_of_all(target):
            continue
        for config, format in sorted(target.every_config(CONFIG_SHAPES).items()):
            name = f"{target}-{config.rpartition('/')[2]}"
            actual.append(pytest.param(target, config, format, id=name, marks=param.marks))
    return actual


@pytest.mark.parametrize("target, config, format", _every_config())
def test_every_config(target, config, format):
    supported_here(target)
    legal = {name: config in target.configs(n, k, format) for name, (_, n, k) in SHAPES.items()}
    assert any(legal.values())
    for name, (m, n, k) in SHAPES.items():
        if not legal[name]:
            continue
        if name == "many" and target.device == "cpu":
            n = 4296  # more than the largest tile has
        w, x = target.weight(format, n, k), target.randn(m, k)
        got = linear_poisoned(x, w, None, config)
        assert_close(got, x, w)
        again = [linear_poisoned(x, w, None, config) for _ in range(2 if target.device == "cpu" else 10)]
        assert all(torch.equal(d, got) for d in again), f"{name}: another run gave other bits"


# --- launches --------------------------------------------------------------------------------------------------------


def test_strides_of_x(target):
    """x in any strides gives the bits of its contiguous copy; on the CPU matmul's bits depend on the strides."""
    k = 576
    w = target.weight(target.format, 144, k)
    config = target.few_configs(144, k, target.format)[0]
    wide = target.randn(20, 2 * k + 3)
    views = {
        "rows with a stride": wide[:, :k],
        "an odd first element": wide[:, 1 : k + 1],
        "columns with a stride": wide[:, : 2 * k : 2],
        "transposed": target.randn(k, 20).T,
        "one row for all": wide[:1, :k].expand(20, k),
        "overlapping rows": wide.view(-1).as_strided((20, k), (8, 1)),
        "every other row": wide[::2, :k],
        "three dimensions": wide[:, :k].view(4, 5, k).transpose(0, 1),
        "one token": wide[3, :k],
    }
    for name, x in views.items():
        got = w4gemm.linear(x, w, config=config)
        expected = w4gemm.linear(x.clone(memory_format=torch.contiguous_format), w, config=config)
        assert got.shape == (*x.shape[:-1], 144)
        if target.device == "cuda":
            assert torch.equal(got, expected), name
        else:
            torch.testing.assert_close(got, expected, msg=name)


@on_gpu
def test_cuda_graph(target):
    w, x = target.weight(target.format, 576, 576), target.randn(16, 576)
    config = target.few_configs(576, 576, target.format)[0]
    w4gemm.linear(x, w, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        d = w4gemm.linear(x, w, config=config)
    for seed in range(2, 5):
        x.copy_(target.randn(16, 576, seed=seed))
        d.fill_(float("nan"))
        graph.replay()
        assert torch.equal(d, w4gemm.linear(x, w, config=config))


@on_gpu
def test_two_streams(target):
    """Launches on two streams at once share nothing, whatever split-k needs between its CTAs."""
    n, k, format = 576, 8192, target.format
    split = [c for c in target.configs(n, k, format) if "_k" in c.rpartition("/")[2]]
    config = (split or target.configs(n, k, format))[0]
    jobs = [(target.weight(format, n, k, seed), target.randn(64, k, seed=seed)) for seed in (1, 2)]
    expected = [w4gemm.linear(x, w, config=config) for w, x in jobs]
    streams = [torch.cuda.Stream() for _ in jobs]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for stream, (w, x), result in zip(streams, jobs, results, strict=True):
            with torch.cuda.stream(stream):
                result.append(w4gemm.linear(x, w, config=config))
    torch.cuda.synchronize()
    for result, d_alone in zip(results, expected, strict=True):
        assert all(torch.equal(d, d_alone) for d in result)
