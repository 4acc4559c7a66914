"""SGLang's plugin: what its schemes load becomes our weights and gives the right products; all else stays SGLang's own.

Runs on a stub of SGLang (sglang_stub.py); with ``SGLANG_SOURCES`` on its sources (sglang_sources.py).
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sglang_stub
from engine_tensors import AWQ_ORDER, words

SOURCES = os.environ.get("SGLANG_SOURCES", "")
if SOURCES:
    import sglang_sources

    sglang_sources.install(SOURCES.split(os.pathsep))
else:
    sglang_stub.install()

from w4gemm import QuantizedWeight, linear  # noqa: E402
from w4gemm.choice import plan_cache  # noqa: E402
from w4gemm.core.activation import canonical  # noqa: E402
from w4gemm.integrations import sglang as plugin  # noqa: E402
from w4gemm.integrations.engines import engine, supports, warmup  # noqa: E402
from w4gemm.integrations.sglang import dense, experts, takeover  # noqa: E402

QUANTIZATION = "sglang.srt.layers.quantization"
SCHEMES = {
    "gptq": f"{QUANTIZATION}.gptq.schemes.GPTQMarlinLinearScheme",
    "awq": f"{QUANTIZATION}.awq.schemes.AWQMarlinLinearScheme",
    "awq other": f"{QUANTIZATION}.awq.schemes.AWQLinearScheme",
    "ct": f"{QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsWNA16",
    "gptq experts": f"{QUANTIZATION}.gptq.schemes.GPTQMarlinMoEScheme",
    "awq experts": f"{QUANTIZATION}.awq.schemes.AWQMoEScheme",
    "ct experts": f"{QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsWNA16MoE",
    "ct fp8 experts": f"{QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsW4AFP8MoE",
    "w4afp8 experts": f"{QUANTIZATION}.w4afp8.W4AFp8MoEMethod",
}
N, K, GROUP = 192, 256, 64
EXPERTS, HIDDEN, WIDTH = 4, 128, 192


def resolved(name: str) -> Any:
    return pkgutil.resolve_name(name)


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    resolved(f"{QUANTIZATION}.w4afp8")
    plugin.register()
    resolved("sglang.srt.plugins.hook_registry.HookRegistry").apply_hooks()


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin takes the CPU for a Hopper GPU; SGLang checks nothing of a GPU that is not there."""
    waiting, model = warmup.Warmup(takeover.SGLANG), torch.nn.Module()
    waiting.expect(model)
    monkeypatch.delenv("W4GEMM_SGLANG", raising=False)
    for part in (takeover, dense, experts):  # waits for a model that no test loads
        monkeypatch.setattr(part, "WARMUP", waiting)
    for part in (dense, experts):
        monkeypatch.setattr(part, "capability", lambda device=None: (9, 0))
    named = SimpleNamespace(value="none", is_none=lambda: True, is_deepep_v2=lambda: False)
    auto = SimpleNamespace(value="auto", is_auto=lambda: True, is_hpc_ops=lambda: False)
    everywhere(monkeypatch, "get_moe_a2a_backend", lambda: named)
    wants_determinism(monkeypatch, False)
    if SOURCES:
        everywhere(monkeypatch, "get_moe_runner_backend", lambda: auto)
        for name in ("verify_marlin_supported", "verify_marlin_supports_shape"):
            everywhere(monkeypatch, name, lambda **shapes: None)
    yield
    del model


def everywhere(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """Replace a function in every module that has imported it."""
    for module in list(sys.modules.values()):
        at = getattr(module, "__name__", "")
        if (at.startswith("sglang.") or at == experts.__name__) and name in vars(module):
            monkeypatch.setattr(module, name, value)


def wants_determinism(monkeypatch: pytest.MonkeyPatch, yes: bool) -> None:
    """Answer whether SGLang was started with --enable-deterministic-inference."""
    bag = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=yes))
    monkeypatch.setattr(resolved("sglang.srt.runtime_context"), "get_exec", lambda: bag)


def config(**facts: Any) -> SimpleNamespace:
    """A quantization config of SGLang's, as far as schemes read it."""
    defaults = {
        "weight_bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "pack_factor": 8,
        "quant_type": None,
        "quant_format": "pack-quantized",
        "zero_point": True,
    }
    return SimpleNamespace(**{**defaults, **facts})


class Drawn:
    """Random numbers of a weight (n, k), and their meaning."""

    def __init__(self, seed: int, n: int, k: int, zero: bool, group: int = GROUP, act_order: bool = False) -> None:
        g = torch.Generator().manual_seed(seed)
        group = k if group == -1 else group
        self.codes = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
        self.scales = (torch.rand(n, k // group, generator=g) / 50 + 0.001).bfloat16()
        self.zeros = torch.randint(1, 16, (n, k // group), generator=g, dtype=torch.uint8)
        self.zeros = self.zeros if zero else torch.full_like(self.zeros, 8)
        order = torch.randperm(k, generator=g) if act_order else torch.arange(k)
        self.g_idx = (torch.arange(k) // group)[order]
        s, z = (t.double()[:, self.g_idx] for t in (self.scales, self.zeros))
        self.dense = (self.codes.double() - z) * s

    def gptq(self) -> dict[str, torch.Tensor]:
        return {
            "qweight": words(self.codes).T,
            "scales": self.scales.T,
            "qzeros": words(self.zeros.T - 1),
            "g_idx": self.g_idx.int(),
        }

    def awq(self) -> dict[str, torch.Tensor]:
        return {
            "qweight": words(self.codes.T, AWQ_ORDER),
            "scales": self.scales.T,
            "qzeros": words(self.zeros.T, AWQ_ORDER),
        }

    def compressed(self) -> dict[str, torch.Tensor]:
        return {
            "weight_packed": words(self.codes),
            "weight_scale": self.scales,
            "weight_shape": torch.tensor(self.codes.shape),
            "weight_zero_point": words(self.zeros.T).T,
            "weight_g_idx": self.g_idx.int(),
        }

    def pairs(self) -> dict[str, torch.Tensor]:
        q = self.codes.to(torch.int8) - 8
        return {"weight": (q[:, ::2] & 15) | (q[:, 1::2] << 4), "weight_scale_inv": self.scales}


def fill(layer: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Load what there is a parameter for, as SGLang's loader would."""
    for name, parameter in layer.named_parameters():
        if name in tensors:
            assert parameter.shape == tensors[name].shape, name
            parameter.data.copy_(tensors[name])


def created(scheme: Any, full_k: int = K) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.scheme = scheme
    scheme.create_weights(
        layer=layer,
        input_size_per_partition=K,
        output_partition_sizes=[N // 3, N - N // 3],
        input_size=full_k,
        output_size=N,
        params_dtype=torch.bfloat16,
        weight_loader=lambda *given: None,
    )
    return layer


def compressed(**facts: Any) -> Any:
    return resolved(SCHEMES["ct"])(**{"strategy": "group", "num_bits": 4, "group_size": GROUP, **facts})


DENSE = {
    "gptq": (lambda: resolved(SCHEMES["gptq"])(config()), Drawn(1, N, K, False), Drawn.gptq),
    "gptq desc_act": (
        lambda: resolved(SCHEMES["gptq"])(config(desc_act=True)),
        Drawn(2, N, K, False, act_order=True),
        Drawn.gptq,
    ),
    "awq": (lambda: resolved(SCHEMES["awq"])(config()), Drawn(3, N, K, True), Drawn.awq),
    "awq other": (lambda: resolved(SCHEMES["awq other"])(config()), Drawn(4, N, K, True), Drawn.awq),
    "ct": (compressed, Drawn(5, N, K, False), Drawn.compressed),
    "ct asymmetric": (lambda: compressed(symmetric=False), Drawn(6, N, K, True), Drawn.compressed),
    "ct channel": (
        lambda: compressed(strategy="channel", group_size=None),
        Drawn(7, N, K, False, -1),
        Drawn.compressed,
    ),
    "ct act-order": (lambda: compressed(actorder="group"), Drawn(8, N, K, False, act_order=True), Drawn.compressed),
}


@pytest.mark.parametrize("name", DENSE)
def test_linear_layers(name: str) -> None:
    make, drawn, stored = DENSE[name]
    scheme = make()
    layer = created(scheme)
    fill(layer, stored(drawn))
    scheme.process_weights_after_loading(layer)
    scheme.process_weights_after_loading(layer)  # SGLang may ask again
    w = layer.w4gemm_weight
    assert torch.equal(w.dequantize(torch.float64), drawn.dense)
    assert {n.rsplit("_", 1)[0] for n, _ in layer.named_parameters()} == {"w4gemm_weight"}
    assert all(t is p for t, p in zip(w.tensors, layer.parameters(), strict=True))
    x, bias = torch.randn(2, 3, K).bfloat16(), torch.randn(N).bfloat16()
    for b in (None, bias):
        assert torch.equal(scheme.apply_weights(layer, x, b), linear(x, w, b))
    wanted = x.double() @ drawn.dense.T + bias.double()
    torch.testing.assert_close(scheme.apply_weights(layer, x, bias).double(), wanted, rtol=2e-2, atol=2e-2)


def test_where_answers_must_not_depend_on_the_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Linear layers are batch-invariant, experts are SGLang's."""
    wants_determinism(monkeypatch, True)
    called: list[bool] = []
    monkeypatch.setattr(dense, "linear", lambda *given, batch_invariant: called.append(batch_invariant))
    make, drawn, stored = DENSE["awq"]
    scheme = make()
    layer = created(scheme)
    fill(layer, stored(drawn))
    scheme.process_weights_after_loading(layer)
    scheme.apply_weights(layer, torch.randn(2, K).bfloat16(), None)
    assert called == [True]
    with caplog.at_level(logging.INFO, "sglang.srt.w4gemm"):
        method, layer, _ = loaded("awq")
    assert "--enable-deterministic-inference is on" in caplog.text
    refused(method, layer, caplog, experts)


def test_a_taken_layer_is_traced_without_a_break() -> None:
    make, drawn, stored = DENSE["awq"]
    scheme = make()
    layer = created(scheme)
    fill(layer, stored(drawn))
    scheme.process_weights_after_loading(layer)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return dense.apply(None, scheme, layer, x) * 2  # type: ignore[arg-type]

    x = torch.randn(5, K).bfloat16()
    assert torch.equal(torch.compile(forward, backend="eager", fullgraph=True)(x), forward(x))


def refused(scheme: Any, layer: Any, caplog: pytest.LogCaptureFixture, part: Any = dense) -> str:
    """Convert a layer, see that SGLang's own method was asked, and return what was logged."""
    asked: list[Any] = []
    (which,) = (s for s in (dense.SCHEMES if part is dense else experts.METHODS) if resolved(s.target) is type(scheme))
    before = dict(layer._parameters)
    supports.why_no_kernel.cache_clear()
    engine._refuse.cache_clear()
    with caplog.at_level(logging.INFO, "sglang.srt.w4gemm"):
        part.convert(which, lambda *given: asked.append(given), scheme, layer)
    assert asked == [(scheme, layer)] and layer._parameters == before
    return caplog.text


@pytest.mark.parametrize(
    ("facts", "full_k", "reason"),
    [
        ({"weight_bits": 8}, K, "they have 8 bits"),
        ({"desc_act": True}, 2 * K, "divided among GPUs"),
        ({"group_size": 8}, K, "multiple of 16"),
    ],
)
def test_layers_that_are_left_to_sglang(
    facts: dict[str, Any], full_k: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheme = resolved(SCHEMES["gptq"])(config(**facts))
    layer = created(scheme, full_k=full_k)
    for p in layer.parameters():
        p.data.zero_()
    assert reason in refused(scheme, layer, caplog)


def test_a_layer_whose_scales_are_not_finite_is_left_to_sglang(caplog: pytest.LogCaptureFixture) -> None:
    make, drawn, stored = DENSE["gptq"]
    scheme = make()
    layer = created(scheme)
    fill(layer, stored(drawn))
    layer.scales.data[0, 0] = float("inf")
    assert "would not be finite" in refused(scheme, layer, caplog)


@pytest.mark.parametrize(
    ("switch", "capability", "reason"),
    [("auto", (8, 0), "W4GEMM_SGLANG=on takes over"), ("on", None, "no NVIDIA GPU"), ("off", (9, 0), "is off")],
)
def test_where_layers_are_taken_over(
    switch: str,
    capability: tuple[int, int] | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("W4GEMM_SGLANG", switch)
    monkeypatch.setattr(dense, "capability", lambda device=None: capability)
    scheme = DENSE["gptq"][0]()
    assert reason in refused(scheme, created(scheme), caplog)


def test_a_model_is_prepared_when_all_its_layers_are_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = "awq", "gptq", "awq other"
    fresh = warmup.Warmup(takeover.SGLANG)
    for part in (takeover, dense, experts):
        monkeypatch.setattr(part, "WARMUP", fresh)
    ran: list[int] = []
    monkeypatch.setattr(warmup, "linear", lambda x, w, bias, batch_invariant: ran.append(len(x)))
    runner_class = resolved("sglang.srt.model_executor.model_runner.ModelRunner")
    runner = runner_class.__new__(runner_class)

    def load(self: Any) -> None:
        for name in names:
            make, drawn, stored = DENSE[name]
            scheme = make()
            layer = created(scheme)
            fill(layer, stored(drawn))
            scheme.process_weights_after_loading(layer)
            assert not ran

    with caplog.at_level(logging.INFO, "sglang.srt.w4gemm"):
        takeover.load_model(load, runner)
    assert {1, 2, 8193} <= set(ran)
    (said,) = [r.message for r in caplog.records if "kernels ready" in r.message]
    assert said.startswith("w4gemm runs 3 4-bit linear layers;")


# --- dense layers with fp8 activations -------------------------------------------------------------------------------


def quantized(**facts: Any) -> SimpleNamespace:
    defaults = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
    return SimpleNamespace(**{**defaults, "dynamic": False, "actorder": None, **facts})


def scheme_of(weight: Any, activations: Any) -> Any:
    cls = resolved(f"{QUANTIZATION}.compressed_tensors.compressed_tensors.CompressedTensorsConfig")
    of = cls.__new__(cls)
    of.quant_format = "pack-quantized"
    return of._get_scheme_from_parts(weight, activations)


def test_dense_w4afp8_gets_a_scheme() -> None:
    token = quantized(num_bits=8, type="float", strategy="token", dynamic=True)
    scheme, drawn = scheme_of(quantized(), token), DENSE["ct"][1]
    layer = created(scheme)
    fill(layer, drawn.compressed())
    scheme.process_weights_after_loading(layer)
    assert layer.w4gemm_weight.activations == "fp8"
    x = torch.randn(4, K).bfloat16()
    same = QuantizedWeight.from_codes("int4_g64", drawn.codes, drawn.scales).repack("canonical", activations="fp8")
    torch.testing.assert_close(scheme.apply_weights(layer, x, None), linear(x, same))


@pytest.mark.parametrize(
    "activations",
    [
        quantized(num_bits=8, type="float", strategy="tensor", dynamic=True),
        quantized(num_bits=8, type="float", strategy="token", dynamic=False),
        quantized(num_bits=8, type="int", strategy="token", dynamic=True),
    ],
)
def test_other_activations_stay_sglangs(activations: Any) -> None:
    with pytest.raises(NotImplementedError, match="No compressed-tensors compatible scheme"):
        scheme_of(quantized(), activations)


def test_dense_w4afp8_that_cannot_be_packed_is_an_error() -> None:
    scheme = scheme_of(quantized(), quantized(num_bits=8, type="float", strategy="token", dynamic=True))
    layer = created(scheme)
    fill(layer, DENSE["ct"][1].compressed())
    layer.weight_scale.data[3, 1] = float("nan")
    with pytest.raises(ValueError, match="neither can SGLang"):
        scheme.process_weights_after_loading(layer)


# --- mixtures of experts ---------------------------------------------------------------------------------------------


def moe_config(**facts: Any) -> SimpleNamespace:
    defaults = {
        "activation": "silu",
        "is_gated": True,
        "params_dtype": torch.bfloat16,
        "routed_scaling_factor": None,
        "gemm1_alpha": None,
        "gemm1_clamp_limit": None,
        "gate_up_interleaved": True,
        "swiglu_limit": None,
        "silu_mul_keep_fp32": False,
        "apply_router_weight_on_input": False,
        "no_combine": False,
        "num_experts": EXPERTS,
        "top_k": 2,
    }
    return SimpleNamespace(**{**defaults, **facts})


def experts_layer(method: Any, width: int = WIDTH, with_bias: bool = False, **facts: Any) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.scheme, layer.moe_tp_size, layer.with_bias = method, 1, with_bias
    layer.num_experts = layer.num_local_experts = EXPERTS
    layer.hidden_size, layer.intermediate_size_per_partition = HIDDEN, width
    layer.moe_runner_config = moe_config(**facts)
    biases = {"with_bias": True} if with_bias else {}
    method.create_weights(layer, EXPERTS, HIDDEN, width, torch.bfloat16, weight_loader=None, **biases)
    return layer


def compressed_experts(**facts: Any) -> Any:
    return resolved(SCHEMES["ct experts"])(config(), quantized(**facts))


def fp8_experts() -> Any:
    weight = quantized()
    return resolved(SCHEMES["ct fp8 experts"])(
        config(target_scheme_map={"Linear": {"weights": weight}}), weight, quantized(num_bits=8, type="float")
    )


def transposed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = ("weight_packed", "weight_scale", "weight_zero_point")
    return {name: tensors[name].T for name in names}


MIXTURES = {
    "gptq": (lambda: resolved(SCHEMES["gptq experts"])(config()), False, Drawn.gptq, None),
    "awq": (lambda: resolved(SCHEMES["awq experts"])(config()), True, Drawn.awq, None),
    "ct": (compressed_experts, False, lambda drawn: transposed(drawn.compressed()), None),
    "ct asymmetric": (
        lambda: compressed_experts(symmetric=False),
        True,
        lambda drawn: transposed(drawn.compressed()),
        None,
    ),
    "ct fp8": (fp8_experts, False, Drawn.compressed, "fp8"),
    "w4afp8": (lambda: resolved(SCHEMES["w4afp8 experts"])(config()), False, Drawn.pairs, "fp8"),
}


def loaded(name: str, **facts: Any) -> tuple[Any, torch.nn.Module, list[tuple[Drawn, Drawn]]]:
    """A method that has loaded random experts, its layer and their numbers (w13, w2)."""
    make, zero, stored, _ = MIXTURES[name]
    method = make()
    layer = experts_layer(method, **facts)
    method.create_moe_runner(layer, layer.moe_runner_config)
    drawn = [(Drawn(20 + e, 2 * WIDTH, HIDDEN, zero), Drawn(40 + e, HIDDEN, WIDTH, zero)) for e in range(EXPERTS)]
    for e, pair in enumerate(drawn):
        for product, numbers in zip(("w13", "w2"), pair, strict=True):
            for key, tensor in stored(numbers).items():
                parameter = layer._parameters.get(f"{product}_{key}")
                if parameter is not None and parameter[e].shape == tensor.shape:
                    parameter.data[e].copy_(tensor)
    return method, layer, drawn


def dispatched(x: torch.Tensor, ids: torch.Tensor, router: torch.Tensor) -> Any:
    output = resolved("sglang.srt.layers.moe.token_dispatcher.StandardDispatchOutput")
    chosen = resolved("sglang.srt.layers.moe.topk.StandardTopKOutput")
    return output(x, None, chosen(router, ids, router))


@pytest.mark.parametrize("factor", [None, 2.5])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts(name: str, factor: float | None) -> None:
    method, layer, drawn = loaded(name, routed_scaling_factor=factor)
    method.process_weights_after_loading(layer)
    method.process_weights_after_loading(layer)
    kept = dict(layer.named_parameters())
    assert {n.rsplit("_", 1)[0] for n in kept} == {"w13_w4gemm", "w2_w4gemm"}
    assert all(len(p) == EXPERTS for p in kept.values())
    held = layer.w4gemm_experts.experts
    assert held.gate_up.weight.activations == MIXTURES[name][3] == held.down.weight.activations
    x = torch.randn(6, HIDDEN).bfloat16() / 4
    ids = torch.tensor([[0, 3], [1, 2], [-1, 1], [2, -1], [3, 3], [0, 1]], dtype=torch.int32)
    router = torch.rand(6, 2)
    call = method.apply if hasattr(method, "apply") and name == "w4afp8" else method.apply_weights
    got = call(layer, dispatched(x, ids, router)).hidden_states
    wanted = torch.zeros(6, HIDDEN, dtype=torch.float64)
    for t in range(6):
        for j in range(2):
            if ids[t, j] < 0:
                continue
            w13, w2 = drawn[ids[t, j]]
            gate, up = (w13.dense @ x[t].double()).chunk(2)
            wanted[t] += router[t, j] * (factor or 1) * (w2.dense @ (torch.nn.functional.silu(gate) * up))
    error = (got.double() - wanted).norm() / wanted.norm()
    assert error < (0.06 if MIXTURES[name][3] else 0.01)
    empty = call(layer, dispatched(x[:0], ids[:0], router[:0])).hidden_states
    assert empty.shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({}, "silu_mul"),
        ({"swiglu_limit": 10.0}, "silu_mul(limit=10)"),
        ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}, "swiglu_oai"),
        ({"activation": "gelu"}, ""),
        ({"is_gated": False}, ""),
    ],
)
def test_activations_of_experts(facts: dict[str, Any], named: str) -> None:
    found = experts.fused_activation(moe_config(**facts))
    assert bool(found) == bool(named) and (not found or canonical(found) == canonical(named))


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


def test_moved_rows_of_experts_are_what_is_run() -> None:
    """SGLang rebalances experts by copying rows of every parameter of a layer."""
    method, layer, _ = loaded("awq")
    method.process_weights_after_loading(layer)
    x, router = torch.randn(1, HIDDEN).bfloat16(), torch.ones(1, 1)
    third = method.apply_weights(layer, dispatched(x, torch.tensor([[3]]), router)).hidden_states
    for p in layer.parameters():
        p.data[0].copy_(p.data[3])
    assert torch.equal(method.apply_weights(layer, dispatched(x, torch.tensor([[0]]), router)).hidden_states, third)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"activation": "gelu"}, "their activation is gelu"),
        ({"is_gated": False}, "without gates"),
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


# --- installation ----------------------------------------------------------------------------------------------------


def test_registering_again_changes_nothing() -> None:
    registry = resolved("sglang.srt.plugins.hook_registry.HookRegistry")
    before = {target: len(hooks) for target, hooks in registry._hooks.items()}
    plugin.register()
    assert {target: len(hooks) for target, hooks in registry._hooks.items()} == before
    assert plugin._installed == ["dense", "experts"]


@pytest.mark.parametrize("change", ["missing", "other parameters"])
def test_an_unknown_version_goes_on_with_one_warning(
    change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = resolved("sglang.srt.plugins.hook_registry.HookRegistry")
    monkeypatch.setattr(plugin, "_installed", ["experts"])
    before = {target: len(hooks) for target, hooks in registry._hooks.items()}
    if change == "missing":
        monkeypatch.delattr(resolved(f"{QUANTIZATION}.gptq.schemes"), "GPTQMarlinLinearScheme")
    else:
        monkeypatch.setattr(resolved(SCHEMES["ct"]), "apply_weights", lambda self, weights: None)
    plugin.register()
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "to SGLang's own kernels, because version" in record.message and "\n" not in record.message
    assert {target: len(hooks) for target, hooks in registry._hooks.items()} == before


def test_importing_the_plugin_imports_no_sglang() -> None:
    script = (
        f"import sys; sys.path[:] = {sys.path!r}\nimport w4gemm.integrations.sglang\nassert 'sglang' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no tomllib")
def test_the_entry_point_is_the_function() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["sglang.srt.plugins"]["w4gemm"].partition(":")
    assert getattr(sys.modules[module], function) is plugin.register


# --- the stub --------------------------------------------------------------------------------------------------------

INTERFACE = Path(__file__).with_name("sglang_interface.json")
METHODS = (
    *("__init__", "create_weights", "process_weights_after_loading", "apply_weights", "apply"),
    *("create_moe_runner", "run_from_dispatch", "run", "register", "apply_hooks", "_get_scheme_from_parts"),
    "load_model",
    "get_moe_runner_backend",
)


def interface() -> dict[str, list[str]]:
    """Parameters of each function and method that the stub has, and fields of each tuple, as they are imported."""
    found = {}
    for module, values in sglang_stub.MODULES.items():
        for stub in values:
            value = resolved(f"{module}.{stub.__name__}")
            if not isinstance(stub, type):
                found[f"{module}.{stub.__name__}"] = list(inspect.signature(inspect.unwrap(value)).parameters)
            elif hasattr(stub, "_fields"):
                found[f"{module}.{stub.__name__}"] = list(value._fields)
            else:
                for name in METHODS:
                    if name in vars(stub) or any(name in vars(base) for base in stub.__mro__[1:-1]):
                        own = inspect.unwrap(getattr(value, name))
                        found[f"{module}.{stub.__name__}.{name}"] = list(inspect.signature(own).parameters)
    return dict(sorted(found.items()))


def test_the_stub_has_the_interface_of_the_sources() -> None:
    found = interface()
    if SOURCES and not INTERFACE.exists():
        INTERFACE.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(INTERFACE.read_text())
