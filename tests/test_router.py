"""The choice of experts by a router's logits: by PyTorch's operators, by the compiled kernel, by a plain loop."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import w4gemm
from emulator.ptx import parse, ptx_of
from emulator.races import RaceChecker
from w4gemm import QuantizedWeight, Router, W4Experts, choose_experts, quantize
from w4gemm.kernels.helpers.experts import ExpertChoice

CASES = {
    "Mixtral": (Router(2), 8, torch.float32, False),
    "more than a warp, one group of two": (
        Router(6, renormalize=False, groups=2, top_groups=1, scale=16.0),
        70,
        torch.float16,
        False,
    ),
    "DeepSeek": (Router(4, "sigmoid", groups=4, top_groups=2, scale=2.5), 32, torch.bfloat16, True),
}


def in_python(router: Router, logits: list[float], bias: list[float] | None) -> tuple[list[int], list[float]]:
    """Choices of a token, as the engines' code reads."""
    if router.scoring == "softmax":
        powers = [math.exp(v - max(logits)) for v in logits]
        scores = [p / sum(powers) for p in powers]
    else:
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    values = [s + b for s, b in zip(scores, bias or [0.0] * len(scores), strict=True)]
    size = len(values) // router.groups
    members = [range(g * size, (g + 1) * size) for g in range(router.groups)]
    tops = [sum(sorted((values[e] for e in each), reverse=True)[: 2 if bias else 1]) for each in members]
    best = sorted(range(router.groups), key=lambda g: -tops[g])[: router.top_groups]
    allowed = sorted(e for g in best for e in members[g])
    chosen = sorted(allowed, key=lambda e: -values[e])[: router.top_k]
    total = sum(scores[e] for e in chosen) if router.renormalize else 1.0
    return chosen, [scores[e] / total * router.scale for e in chosen]


def drawn(name: str) -> tuple[Router, torch.Tensor, torch.Tensor | None]:
    """Twelve tokens, the first with equal logits, the second with some."""
    router, experts, dtype, biased = CASES[name]
    g = torch.Generator().manual_seed(experts)
    logits = torch.randn(12, experts, generator=g).mul(3).to(dtype)
    logits[0], logits[1, ::2] = 0.0, 1.0
    return router, logits, torch.randn(experts, generator=g) if biased else None


@pytest.mark.parametrize("name", CASES)
def test_experts_and_weights(device: str, name: str) -> None:
    router, logits, bias = drawn(name)
    ids, weights = choose_experts(logits.to(device), router, None if bias is None else bias.to(device))
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    for t, row in enumerate(logits.tolist()):
        chosen, expected = in_python(router, row, None if bias is None else bias.tolist())
        assert ids[t].tolist() == chosen
        assert weights[t].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_compiled_kernel(name: str) -> None:
    pytest.importorskip("cutlass")
    router, experts, dtype, biased = CASES[name]
    _, logits, bias = drawn(name)
    logits[2, 3], logits[3] = math.nan, math.nan
    expected, weights = router.choose(logits, bias)
    ids, actual = torch.zeros_like(expected), torch.zeros_like(weights)
    program = parse(ptx_of(ExpertChoice(router, experts, dtype, biased).unit()))
    RaceChecker(program, 3).run(*(t for t in (logits, bias, ids, actual) if t is not None))
    assert torch.equal(ids, expected)
    torch.testing.assert_close(actual, weights, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_pytorch_chooses_where_compiling_is_forbidden(tmp_path, monkeypatch) -> None:
    router, logits, _ = drawn("Mixtral")
    router = dataclasses.replace(router, scale=1.25)  # of which no kernel is in memory
    monkeypatch.setenv("W4GEMM_COMPILE", "off")
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path))
    assert torch.equal(choose_experts(logits.cuda(), router)[0].cpu(), router.choose(logits, None)[0])


def test_gradients_flow_to_logits() -> None:
    logits = torch.randn(3, 8, requires_grad=True)
    _, weights = choose_experts(logits, Router(2))
    weights[:, 0].sum().backward()
    assert logits.grad is not None and (logits.grad != 0).any(1).all()


def test_experts_by_logits() -> None:
    gate_up = QuantizedWeight.stack([quantize(torch.randn(128, 64)) for _ in range(4)])
    experts = W4Experts(gate_up, QuantizedWeight.stack([quantize(torch.randn(64, 64)) for _ in range(4)]))
    x, logits = torch.randn(3, experts.gate_up.weight.k), torch.randn(3, experts.gate_up.weight.experts)
    out = experts.of_logits(x, logits, Router(2))
    assert torch.equal(out, experts(x, *choose_experts(logits, Router(2))))
    with pytest.raises(ValueError, match=r"x: wanted a tensor \(3, features\) on logits' device cpu, got"):
        experts.of_logits(x[:2], logits, Router(2))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"top_k": 33}, ValueError, "top_k: wanted an int of at most 32, got 33"),
        ({"scoring": "tanh"}, ValueError, "scoring: wanted one of softmax, sigmoid, got 'tanh'"),
        ({"groups": 2, "top_groups": 3}, ValueError, "top_groups: wanted an int of at most 2, got 3"),
        ({"scale": math.inf}, ValueError, "scale: wanted a finite float, got inf"),
        ({"scale": "2"}, TypeError, "scale: wanted a float, got '2'"),
    ],
)
def test_a_rule_that_cannot_be(values: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Router(**({"top_k": 2} | values))


@pytest.mark.parametrize(
    ("logits", "router", "bias", "message"),
    [
        (
            torch.zeros(2, 8).int(),
            Router(2),
            None,
            "logits: wanted torch.float32 or torch.float16 or torch.bfloat16, got",
        ),
        (torch.zeros(2, 8), 2, None, "router: wanted a Router, got int"),
        (torch.zeros(2, 8), Router(2), torch.zeros(7), r"bias: .*\(8,\)"),
        (torch.zeros(2, 8), Router(2), torch.zeros(8).half(), "bias: wanted torch.float32"),
        (torch.zeros(2, 8), Router(2, groups=3), None, "logits: wanted a multiple of 3 groups, got 8 experts"),
        (torch.zeros(2, 8), Router(9), None, "logits: wanted 9 experts or more in 1 of 1 groups, got 8 in all"),
        (torch.zeros(2, 8), Router(2, groups=8, top_groups=2), torch.zeros(8), "two experts or more in each of 8"),
    ],
)
def test_what_is_refused(logits: torch.Tensor, router: Router, bias: torch.Tensor | None, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        w4gemm.choose_experts(logits, router, bias)
