"""SGLang's plugin: mixtures of experts. As test_sglang_plugin.py."""

from __future__ import annotations

import itertools
import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_layers import (  # noqa: F401 (two are fixtures)
    EXPERTS,
    HIDDEN,
    MIXTURES,
    SOURCES,
    WIDTH,
    Drawn,
    compressed_experts,
    dispatched,
    exact,
    experts_layer,
    fill_experts,
    loaded,
    moe_config,
    on_hopper,
    packed,
    refused,
    registered,
    resolved,
    started_with,
    transposed,
)
from w4gemm.api.expert_layer import OneLaunch
from w4gemm.choice import plan_cache
from w4gemm.core.activation import canonical
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
    expected = (factor or 1) * exact(x, ids, router, drawn)
    error = (got.double() - expected).norm() / expected.norm()
    assert error < (0.06 if MIXTURES[name][3] else 0.01)
    empty = call(layer, dispatched(x[:0], ids[:0], router[:0])).hidden_states
    assert empty.shape == (0, HIDDEN)


class Adapters:
    """SGLang's LoRAHooks in PyTorch, of two adapters; a token may have none (-1)."""

    def __init__(self, tokens: int, gated: bool = True) -> None:
        g = torch.Generator().manual_seed(3)
        self.of_token = torch.arange(tokens) % 3 - 1
        shapes = ((4, HIDDEN), ((1 + gated) * WIDTH, 4)), ((4, WIDTH), (HIDDEN, 4))
        self.pairs = [[torch.randn(2, EXPERTS, *shape, generator=g) / 8 for shape in pair] for pair in shapes]

    def delta(self, product: int, token: int, expert: int, x: torch.Tensor) -> torch.Tensor | float:
        adapter = int(self.of_token[token])
        if adapter < 0:
            return 0.0
        a, b = (t[adapter, expert].double() for t in self.pairs[product])
        return b @ (a @ x.double())

    def _add(self, product: int, rows: torch.Tensor, cache: torch.Tensor, ids: torch.Tensor, factor: Any) -> None:
        for t, j in itertools.product(*map(range, ids.shape)):
            if ids[t, j] >= 0:
                own = rows[t] if product == 0 else rows[t * ids.shape[1] + j]
                cache[t, j] += self.delta(product, t, int(ids[t, j]), own) * factor[t, j]

    def after_gate_up(self, x: torch.Tensor, cache: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        self._add(0, x, cache, ids, torch.ones(ids.shape))

    def after_down(self, x: torch.Tensor, cache: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        self._add(1, x, cache, ids, weights)


@pytest.mark.parametrize("factor", [None, 2.5])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_with_adapters(name: str, factor: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several in a step, as SGLang's layer with adapters calls our runner: with the experts that our hook gives it."""
    started_with(monkeypatch, enable_lora=True)
    monkeypatch.setenv("W4GEMM_SGLANG", "on")
    method, layer, drawn = loaded(name, routed_scaling_factor=factor)
    method.process_weights_after_loading(layer)
    backend = layer.runner.runner_backend
    base = resolved("sglang.srt.layers.quantization.base_config.FusedMoEMethodBase")
    info = base.get_moe_quant_info(method, layer, backend)
    assert info is layer.w4gemm_experts and backend.value == "w4gemm"
    x = torch.randn(6, HIDDEN).bfloat16() / 4
    ids = torch.tensor([[0, 3], [1, 2], [-1, 1], [2, -1], [3, 3], [0, 1]], dtype=torch.int32)
    router, hooks = torch.rand(6, 2), Adapters(6)
    expected, plain = torch.zeros(2, 6, HIDDEN, dtype=torch.float64)
    for t, j in itertools.product(range(6), range(2)):
        if (e := int(ids[t, j])) < 0:
            continue
        w13, w2 = drawn[e]
        for total, adapted in ((expected, hooks), (plain, None)):
            rows = w13.dense @ x[t].double() + (adapted.delta(0, t, e, x[t]) if adapted else 0)
            gate, up = rows.chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            result = w2.dense @ hidden + (adapted.delta(1, t, e, hidden) if adapted else 0)
            total[t] += router[t, j] * (factor or 1) * result
    assert (expected - plain).norm() > 0.1 * plain.norm()
    core = layer.runner.runner_core
    for own_hooks, result in ((hooks, expected), (SimpleNamespace(after_gate_up=None, after_down=None), plain)):
        got = core.run_from_dispatch(dispatched(x, ids, router), info, layer.moe_runner_config, hooks=own_hooks)
        error = (got.hidden_states.double() - result).norm() / result.norm()
        assert error < (0.08 if MIXTURES[name][3] else 0.012)


@pytest.mark.skipif(not SOURCES, reason="SGLANG_SOURCES names no sources of SGLang")
def test_sglangs_layer_with_adapters_runs_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the layer alone where a step has no adapters; before that SGLang makes buffers for CUDA graphs."""
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
    from sglang.srt.lora import lora_moe_runners
    from sglang.srt.lora.backend.triton_backend import TritonLoRABackend
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    started_with(monkeypatch, enable_lora=True)
    monkeypatch.setattr(utils, "get_moe_runner_backend", lambda: utils.MoeRunnerBackend.AUTO)
    monkeypatch.setenv("W4GEMM_SGLANG", "on")
    method, layer, _ = loaded("gptq", inplace=True)
    method.process_weights_after_loading(layer)
    x, router = torch.randn(6, HIDDEN).bfloat16() / 4, torch.rand(6, 2)
    ids = torch.tensor([[0, 3], [1, 2], [-1, 1], [2, -1], [3, 3], [0, 1]], dtype=torch.int32)
    sent = dispatched(x, ids, router)
    layer.quant_method = type("Method", (FusedMoEMethodBase,), {"apply": None})()
    layer.moe_tp_rank, layer.should_fuse_routed_scaling_factor_in_topk = 0, False
    layer.dispatcher = SimpleNamespace(dispatch=lambda **both: sent, combine=lambda combine_input: combine_input)
    layer.forward = lambda hidden_states, topk_output: method.apply_weights(layer, sent)
    batch: list[Any] = [None]
    backend: Any = SimpleNamespace(name="triton", get_batch_info=lambda layout: batch[0])
    wrapped = FusedMoEWithLoRA(layer, backend)
    layer.num_experts, layer.top_k, graphs = EXPERTS, 2, TritonLoRABackend(3, torch.device("cpu"))
    graphs.init_cuda_graph_moe_buffers(8, 3, torch.bfloat16, wrapped)
    assert {t.device for t in graphs.moe_cg_buffers.values()} == {x.device}
    hooks, asked = Adapters(6), []
    monkeypatch.setattr(wrapped, "_get_lora_info", lambda: "info")
    monkeypatch.setattr(lora_moe_runners, "build_lora_hooks", lambda *args: asked.append(args) or hooks)
    alone = wrapped(x, sent.topk_output).hidden_states
    batch[0] = "adapters"
    together = wrapped(x, sent.topk_output).hidden_states
    core, info = layer.runner.runner_core, layer.w4gemm_experts
    expected = core.run_from_dispatch(sent, info, layer.moe_runner_config, hooks=hooks).hidden_states
    assert torch.equal(together, expected) and asked[0][1] == "info"
    assert not torch.equal(alone, together) and torch.equal(alone, info.experts(x, ids, router))


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
    fill_experts(layer, drawn, lambda numbers: transposed(numbers.compressed()))
    method.process_weights_after_loading(layer)
    assert layer.w4gemm_experts.experts.activation == activation
    x, ids, router = torch.randn(3, HIDDEN).bfloat16(), torch.tensor([[0, 1], [2, 3], [3, 0]]), torch.rand(3, 2)
    got = method.apply_weights(layer, dispatched(x, ids, router)).hidden_states
    expected = exact(x, ids, router, drawn, activation)
    assert (got.double() - expected).norm() < 0.01 * expected.norm()


def test_the_seconds_of_the_log_include_the_first_launches(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang.srt.w4gemm")
    waiting, layer = warmup.Warmup(takeover.SGLANG), torch.nn.Module()
    waiting.expect(layer)
    waiting.loaded(layer, warmup.Need("linear layers", (), (), lambda: time.sleep(0.3)))
    (said,) = [record.args for record in caplog.records if "kernels ready" in record.message]
    assert isinstance(said, tuple) and float(said[2]) >= 0.3


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

    def launched(x: Any, choices: Any, *others: Any, in_order: bool) -> torch.Tensor:
        assert not in_order
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
