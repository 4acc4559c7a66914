"""Every epilogue on every kernel: its arithmetic, random data, and every kind of config."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import w4gemm
from conformance.cases import (
    FP8,
    PARTIAL,
    Target,
    assert_close,
    compile_ahead,
    job,
    linear_poisoned,
    supported_here,
    targets,
)
from reference import linear_reference
from w4gemm.core.activation import ACTIVATIONS as NAMES
from w4gemm.core.epilogue import FLOATS, Epilogue, bias_dtype
from w4gemm.core.formats import WeightFormat
from w4gemm.kernels import config_named
from w4gemm.weights.weight import QuantizedWeight

pytestmark = pytest.mark.sampled(0.1)

M, N, K = 70, 200, 320
FORMAT, EXACT_FORMAT = WeightFormat.parse("int4_g64_zint_fp16"), WeightFormat.parse("int4_g64")
ALPHA = 13.3125
"""Large enough that the activations bend, and a float32."""

ACTIVATIONS = (*NAMES, "silu_mul(limit=2)", "swiglu_oai(limit=2,alpha=1,beta=3)", "situ_mul(linear_beta=none)")

TARGETS = [p for p in targets() if p.values[0].kernel.name not in PARTIAL]


def every_epilogue(target: Target) -> list[Epilogue]:
    """Activation x alpha x residual x out_dtype, with and without bias in turn: a third of them, in which any two
    values of two of these meet."""
    actual = []
    sizes = enumerate(itertools.product((None, *ACTIVATIONS), (False, True), FLOATS))
    for i, (activation, residual, dtype) in sizes:
        for j, alpha in enumerate((None, "host", "device")):
            if j == (i + i // 3) % 3:
                scaled = target.dtype == FP8 and i % 5 > 0
                actual.append(Epilogue(activation, alpha, i // 2 % 2 == 1, residual, dtype, scaled))
    return actual


def rows(epilogue: Epilogue, ragged: bool) -> int:
    """n: ragged leaves d an odd number of columns, else its rows are a multiple of 16 bytes."""
    return N if not ragged else 202 if epilogue.gated else 203


def tensors(target: Target, epilogue: Epilogue, m: int, n: int) -> dict[str, Any]:
    """Arguments of ``linear`` besides x, w and bias."""
    alpha = {None: None, "host": ALPHA, "device": torch.tensor(ALPHA, device=target.device)}[epilogue.alpha]
    residual = None
    if epilogue.residual:
        dtype = epilogue.result_dtype(target.dtype)
        residual = target.randn(m, epilogue.columns(n), seed=7, dtype=dtype)
    scale = target.randn(m, seed=8, dtype=torch.float32) if epilogue.token_scale else None
    return {
        "token_scale": scale,
        "alpha": alpha,
        "activation": epilogue.activation,
        "residual": residual,
        "out_dtype": epilogue.out_dtype,
    }


def bias_of(target: Target, epilogue: Epilogue, n: int) -> torch.Tensor | None:
    return target.randn(n, seed=5, dtype=bias_dtype(target.dtype, epilogue.out_dtype)) if epilogue.bias else None


def same(target: Target, epilogue: Epilogue) -> Epilogue:
    """Return the epilogue in the form of ``linear``: out_dtype only if it is not x's."""
    return epilogue._replace(out_dtype=None) if epilogue.out_dtype == target.out_dtype else epilogue


def usual_config(target: Target, n: int) -> str:
    return target.configs(n, K, FORMAT)[0]


# --- every epilogue, one config --------------------------------------------------------------------------------------

EVERY = [
    pytest.param(target, epilogue, i % 2 == 1, id=f"{target}-{epilogue}{'-ragged' * (i % 2)}", marks=p.marks)
    for p in TARGETS
    for target in p.values
    for i, epilogue in enumerate(every_epilogue(target))
]
ACTIVATED = [
    pytest.param(target, Epilogue(a, out_dtype=dtype), id=f"{target}-{Epilogue(a, out_dtype=dtype)}", marks=p.marks)
    for p in TARGETS
    for target in p.values
    for a in ACTIVATIONS
    for dtype in dict.fromkeys((torch.float32, target.out_dtype))
]
SEVERAL = [
    Epilogue("gelu", "device", True, True),
    Epilogue("silu_mul", None, True, True),
    Epilogue("swiglu_oai", None, True),
    Epilogue(None, "host", False, True, torch.float32),
]
"""For tests over configs: stored from shared memory, with half as many columns, and from registers."""


def configs_that_differ(target: Target) -> list[tuple[str, WeightFormat]]:
    """One of every kind of config: what of a tile a thread stores, and how it comes to it."""
    kinds: dict[object, tuple[str, WeightFormat]] = {}
    for config, format in target.every_config([(N, 512)]).items():
        c = config_named(config)[1]
        size = c.tile_m <= 8, c.tile_m > 128, c.tile_m * c.tile_n >= 2**15
        kinds.setdefault((size, c.tile_n, c.tile_k > 128, c.cluster_n, c.schedule, c.split_k), (config, format))
    return sorted(kinds.values())


CONFIGS = [
    pytest.param(target, config, format, i % 2 == 1, id=f"{target}-{config.rpartition('/')[2]}", marks=p.marks)
    for p in TARGETS
    for target in p.values
    if target.dtype in (torch.bfloat16, FP8) and (target.device, target.dtype) != ("cpu", FP8)
    for i, (config, format) in enumerate(configs_that_differ(target))
]


@pytest.fixture(scope="module", autouse=True)
def _compiled_ahead(request):
    """On a GPU, compile on all cores what the selected tests need."""
    jobs = []
    for item in request.session.items:
        arguments = getattr(item, "callspec", None)
        target = arguments.params.get("target") if arguments else None
        if not torch.cuda.is_available() or item.module is not request.module or target is None:
            continue
        if target.device == "cuda" and "config" in arguments.params:
            for e in SEVERAL:
                n = rows(e, arguments.params["ragged"])
                format, config = arguments.params["format"], arguments.params["config"]
                jobs.append(job(target, n, 512, format, config, same(target, e)))
        elif target.device == "cuda" and "epilogue" in arguments.params:
            e, ragged = arguments.params["epilogue"], arguments.params.get("ragged", False)
            n = rows(e, ragged)
            format = FORMAT if "ragged" in arguments.params else EXACT_FORMAT
            jobs.append(job(target, n, K, format, usual_config(target, n), same(target, e)))
    if jobs:
        compile_ahead(jobs, request.config)


def activated(activation: str, y: torch.Tensor) -> torch.Tensor:
    """In forms that keep their digits far from 0, where PyTorch's gelu subtracts numbers that are nearly equal."""
    gate, up = y[:, 0::2], y[:, 1::2]
    return {
        "relu": lambda: y.relu(),
        "relu2": lambda: y.relu() ** 2,
        "gelu": lambda: y * torch.special.erfc(-y / 2**0.5) / 2,
        "gelu_tanh": lambda: y * (2 * (2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)).sigmoid(),
        "silu": lambda: y * y.sigmoid(),
        "silu_mul": lambda: gate * gate.sigmoid() * up,
        "silu_mul(limit=2)": lambda: activated("silu", gate.clamp(max=2)) * up.clamp(-2, 2),
        "gelu_mul": lambda: activated("gelu", gate) * up,
        "gelu_tanh_mul": lambda: activated("gelu_tanh", gate) * up,
        "swiglu_oai": lambda: gate.clamp(max=7) * (1.702 * gate.clamp(max=7)).sigmoid() * (up.clamp(-7, 7) + 1),
        "swiglu_oai(limit=2,alpha=1,beta=3)": lambda: activated("silu", gate.clamp(max=2)) * (up.clamp(-2, 2) + 3),
        "situ_mul": lambda: 4 * (gate / 4).tanh() * gate.sigmoid() * 25 * (up / 25).tanh(),
        "situ_mul(linear_beta=none)": lambda: 4 * (gate / 4).tanh() * gate.sigmoid() * up,
    }[activation]()


@pytest.mark.parametrize("target, epilogue", ACTIVATED)
def test_activation(target, epilogue):
    """Sums that are exact, so that the activation's own error is all there is but a rounding."""
    supported_here(target)
    g = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (N, K), generator=g)
    scales = 2.0 ** torch.randint(-4, -1, (N, K // 64), generator=g)
    w = QuantizedWeight.from_codes(EXACT_FORMAT, codes, scales.bfloat16()).to(target.device).repack(target.layout)
    hot = 3 * target.randn(K, dtype=torch.float32).abs()
    x = (torch.eye(K, device=target.device) * hot).to(target.dtype)
    for config in target.few_configs(N, K, EXACT_FORMAT) if target.device == "cpu" else [usual_config(target, N)]:
        d = linear_poisoned(x, w, None, config, activation=epilogue.activation, out_dtype=epilogue.out_dtype)
        y = linear_reference(x, w)
        exact = activated(epilogue.activation, y)
        info = torch.finfo(d.dtype)
        largest = y.abs().view(*d.shape, -1).amax(-1)
        relative = 1e-6 * (1 + largest**2 / 8)  # the exponent's rounding
        bound = (info.eps / 2 + relative) * exact.abs() + info.smallest_normal * info.eps
        if target.device == "cpu":
            bound += 2e-7 * y.abs().max()
        worst = ((d - exact).abs() / bound)[largest < 6].max().item()
        assert worst <= 1, f"{worst:.3g} times the bound"


@pytest.mark.parametrize("target, epilogue, ragged", EVERY)
def test_every_epilogue(target, epilogue, ragged):
    supported_here(target)
    n = rows(epilogue, ragged)
    w, x = target.weight(FORMAT, n, K), target.randn(M, K)
    bias, options = bias_of(target, epilogue, n), tensors(target, epilogue, M, n)
    config = usual_config(target, n)
    d = linear_poisoned(x, w, bias, config, **options)
    assert_close(d, x, w, bias, **options)
    if epilogue.residual:
        assert_in_place(d, x, w, bias, config, options)


def assert_in_place(
    d: torch.Tensor, x: torch.Tensor, w: QuantizedWeight, bias: Any, config: str, options: dict
) -> None:
    """Over its own residual ``linear`` gives the same bits."""
    out = options["residual"].clone()
    w4gemm.linear(x, w, bias, config=config, out=out, **(options | {"residual": out}))
    assert torch.equal(out, d)


# --- several epilogues, every kind of config -------------------------------------------------------------------------


@pytest.mark.parametrize("target, config, format, ragged", CONFIGS)
def test_configs(target, config, format, ragged):
    """Tails along m and n, k that is shared between warps and CTAs, CTAs that walk over several tiles."""
    supported_here(target)
    for epilogue in SEVERAL:
        n = rows(epilogue, ragged)
        w, bias = target.weight(format, n, 512), bias_of(target, epilogue, n)
        for m in (5, 300, 9000) if target.device == "cuda" else (5, 40):
            x, options = target.randn(m, 512), tensors(target, epilogue, m, n)
            d = linear_poisoned(x, w, bias, config, **options)
            assert_close(d, x, w, bias, **options)
            if epilogue.residual:
                assert_in_place(d, x, w, bias, config, options)


@pytest.mark.parametrize("target", [p for p in TARGETS if p.values[0].device == "cuda"])
def test_a_graph_reads_alpha_when_it_runs(target):
    supported_here(target)
    w, x, alpha = target.weight(FORMAT, N, K), target.randn(16, K), torch.ones((), device="cuda")
    config = usual_config(target, N)
    w4gemm.linear(x, w, alpha=alpha, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        d = w4gemm.linear(x, w, alpha=alpha, config=config)
    for value in (2.0, -0.5):
        alpha.fill_(value)
        graph.replay()
        assert torch.equal(d, w4gemm.linear(x, w, alpha=value, config=config))
