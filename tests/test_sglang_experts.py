"""SGLang's plugin: mixtures of experts. As test_sglang_plugin.py."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from sglang_layers import (  # noqa: F401 (two are fixtures)
    EXPERTS,
    HIDDEN,
    MIXTURES,
    WIDTH,
    Drawn,
    compressed_experts,
    dispatched,
    experts_layer,
    loaded,
    moe_config,
    on_hopper,
    packed,
    refused,
    registered,
)
from w4gemm.api.expert_layer import OneLaunch
from w4gemm.choice import plan_cache
from w4gemm.core.activation import canonical, parse
from w4gemm.core.problem import H100
from w4gemm.integrations.engines import warmup
from w4gemm.integrations.sglang import experts, takeover


@pytest.mark.parametrize("factor", [None, 2.5])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts(name: str, factor: float | None) -> None:
    method, layer, drawn = loaded(name, routed_scaling_factor=factor)
    method.process_weights_after_loading(layer)
    method.process_weights_after_loading(layer)
    kept = packed(layer)
    assert {n.rsplit("_", 1)[0] for n in kept} == {"w13_w4gemm", "w2_w4gemm"}
    assert all(len(p) == EXPERTS for p in kept.values())
    held = layer.w4gemm_experts.experts
    assert held.gate_up.weight.activations == MIXTURES[name][3] == held.down.weight.activations
    x = torch.randn(6, HIDDEN).bfloat16() / 4
    ids = torch.tensor([[0, 3], [1, 2], [-1, 1], [2, -1], [3, 3], [0, 1]], dtype=torch.int32)
    router = torch.rand(6, 2)
    call = method.apply if hasattr(method, "apply") and name == "w4afp8" else method.apply_weights
    got = call(layer, dispatched(x, ids, router)).hidden_states
    expected = torch.zeros(6, HIDDEN, dtype=torch.float64)
    for t in range(6):
        for j in range(2):
            if ids[t, j] < 0:
                continue
            w13, w2 = drawn[ids[t, j]]
            gate, up = (w13.dense @ x[t].double()).chunk(2)
            expected[t] += router[t, j] * (factor or 1) * (w2.dense @ (torch.nn.functional.silu(gate) * up))
    error = (got.double() - expected).norm() / expected.norm()
    assert error < (0.06 if MIXTURES[name][3] else 0.01)
    empty = call(layer, dispatched(x[:0], ids[:0], router[:0])).hidden_states
    assert empty.shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({}, "silu_mul"),
        ({"swiglu_limit": 10.0}, "silu_mul(limit=10)"),
        ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}, "swiglu_oai"),
        ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "gemm1_beta": 0.0}, ""),
        ({"gemm1_clamp_limit": 7.0}, ""),  # SGLang cuts silu(gate) then
        ({"activation": "situ", "gemm1_alpha": 2.0, "gemm1_clamp_limit": None}, "situ_mul(beta=2,linear_beta=none)"),
        ({"activation": "gelu"}, "gelu_mul"),
        ({"activation": "gelu_tanh"}, "gelu_tanh_mul"),
        ({"activation": "silu_rounded"}, ""),
        ({"is_gated": False}, "silu"),
        ({"is_gated": False, "activation": "relu2"}, "relu2"),
        ({"is_gated": False, "activation": "relu2", "swiglu_limit": 7.0}, ""),
    ],
)
def test_activations_of_experts(facts: dict[str, Any], named: str) -> None:
    actual = experts.fused_activation(moe_config(**facts))
    assert bool(actual) == bool(named) and (not actual or canonical(actual) == canonical(named))


MODELS = {
    "MiniMax-M3": (
        {"gemm1_alpha": 1.702, "gemm1_beta": 1.0, "gemm1_clamp_limit": 7.0, "gate_up_interleaved": False},
        "swiglu_oai",
    ),
    "Nemotron 3": ({"activation": "relu2", "is_gated": False}, "relu2"),
    "Kimi-K2 and GLM-4.5-Air": ({}, "silu_mul"),
}


@pytest.mark.parametrize("name", MODELS)
def test_experts_of_a_model_in_int4(name: str) -> None:
    """compressed-tensors' in groups of 32; for Nemotron 3's SGLang makes rows for gates, which they have not."""
    facts, activation = MODELS[name]
    gated, method = facts.get("is_gated", True), compressed_experts(group_size=32)
    layer = experts_layer(method, **facts)
    method.create_moe_runner(layer, layer.moe_runner_config)
    rows = WIDTH * (1 + gated)
    drawn = [(Drawn(20 + e, rows, HIDDEN, False, 32), Drawn(40 + e, HIDDEN, WIDTH, False, 32)) for e in range(EXPERTS)]
    for e, pair in enumerate(drawn):
        for product, numbers in zip(("w13", "w2"), pair, strict=True):
            for key in ("weight_packed", "weight_scale"):
                layer._parameters[f"{product}_{key}"].data[e] = numbers.compressed()[key].T
    method.process_weights_after_loading(layer)
    assert layer.w4gemm_experts.experts.activation == activation
    x, ids, router = torch.randn(3, HIDDEN).bfloat16(), torch.tensor([[0, 1], [2, 3], [3, 0]]), torch.rand(3, 2)
    got = method.apply_weights(layer, dispatched(x, ids, router)).hidden_states
    expected = torch.zeros(3, HIDDEN, dtype=torch.float64)
    for t, j in torch.cartesian_prod(torch.arange(3), torch.arange(2)):
        w13, w2 = drawn[ids[t, j]]
        first = w13.dense @ x[t].double()
        first = first.view(2, -1).T.flatten() if gated else first  # pairs of a gate and an up
        expected[t] += router[t, j] * (w2.dense @ parse(activation).apply(first))
    assert (got.double() - expected).norm() < 0.01 * expected.norm()


def test_a_model_of_experts_is_prepared_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = warmup.Warmup(takeover.SGLANG)
    monkeypatch.setattr(experts, "WARMUP", waiting)
    monkeypatch.setattr(experts, "BOUNDS", (8,))
    model = torch.nn.Module()
    waiting.expect(model)
    method, layer, _ = loaded("ct")
    method.process_weights_after_loading(layer)
    (need,) = waiting._needs.values()
    assert {key.m for key in need.keys} == {2, 4, 8, 16, 32}  # of 2 rows for each of 1 to 9 tokens, 4 experts
    before = dict(plan_cache._plans)
    waiting.settle(model)
    after = plan_cache._plans
    x = torch.randn(3, HIDDEN).bfloat16()
    plans = len(after)
    method.apply_weights(layer, dispatched(x, torch.tensor([[0, 1], [2, 3], [0, 2]]), torch.ones(3, 2)))
    assert len(after) == plans >= len(before)


def test_few_tokens_run_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a captured step all that may be launched is prepared: products, and the kernels for 1 to 8 tokens."""
    pytest.importorskip("cutlass")
    method, layer, _ = loaded("ct")
    method.process_weights_after_loading(layer)
    held, calls = layer.w4gemm_experts.experts, []
    x, ids, router = torch.randn(3, HIDDEN).bfloat16(), torch.tensor([[0, 1], [2, -1], [0, 2]]), torch.rand(3, 2)
    expected = method.apply_weights(layer, dispatched(x, ids, router)).hidden_states

    def launched(x: Any, choices: Any, *others: Any) -> torch.Tensor:
        calls.append((choices.expert_ids.dtype, choices.expert_weights))
        return expected

    packed = [each.weight.repack("mma16") for each in (held.gate_up, held.down)]
    monkeypatch.setattr(warmup.Device, "of", lambda device: H100)
    need = warmup.experts_need(*packed, "silu_mul", warmup.ExpertsCall(torch.bfloat16, [2], []), None)
    names = [unit.name for unit in need.helpers]
    assert names.count("expert_layer") == 4
    need = warmup.experts_need(*packed, "silu_mul", warmup.ExpertsCall(torch.bfloat16, [2], [], gathered=False), None)
    assert "expert_layer" not in [unit.name for unit in need.helpers]
    monkeypatch.setattr("w4gemm.api.experts.one_launch_now", lambda key, device: OneLaunch(None, "", ""))
    monkeypatch.setattr("w4gemm.api.experts.expert_layer", launched)
    assert method.apply_weights(layer, dispatched(x, ids, router)).hidden_states is expected
    assert len(calls) == 1 and calls[0][0] is torch.int32 and calls[0][1] is router


def test_moved_rows_of_experts_are_what_is_run() -> None:
    """SGLang rebalances experts by copying rows of every parameter of a layer."""
    method, layer, _ = loaded("awq")
    method.process_weights_after_loading(layer)
    x, router = torch.randn(1, HIDDEN).bfloat16(), torch.ones(1, 1)
    third = method.apply_weights(layer, dispatched(x, torch.tensor([[3]]), router)).hidden_states
    for p in packed(layer).values():
        p.data[0].copy_(p.data[3])
    assert torch.equal(method.apply_weights(layer, dispatched(x, torch.tensor([[0]]), router)).hidden_states, third)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"activation": "silu_rounded"}, "their activation is silu_rounded"),
        ({"activation": "gelu_tanh", "is_gated": False}, "without gates"),
        ({"no_combine": True}, "sum is left to others"),
    ],
)
def test_experts_that_are_left_to_sglang(facts: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sglang.srt.w4gemm"):
        method, layer, _ = loaded("awq", **facts)
    assert reason in caplog.text
    refused(method, layer, caplog, experts)


def test_experts_that_cannot_be_packed_are_left_to_sglang(caplog: pytest.LogCaptureFixture) -> None:
    method, layer, _ = loaded("awq")
    layer.w2_scales.data[2, 0, 5] = float("nan")
    assert "would not be finite" in refused(method, layer, caplog, experts)
    assert not hasattr(layer, "w4gemm_runner")
