"""The vLLM plugin's experts, against a stub of vLLM's interfaces, on the CPU: formats, activations, ranks, updates."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch

from expert_layers import Layer, emulated, spec_of
from vllm_experts import (
    CASES,
    EXPERTS,
    GPT_OSS,
    HIDDEN,
    MXFP4,
    NVFP4,
    TOP_K,
    WIDTH,
    Case,
    assert_near,
    inputs,
    layer_arguments,
    mixture,
)
from vllm_parts import part_fixture
from w4gemm import choice
from w4gemm.api.expert_layer import LayerKey, OneLaunch
from w4gemm.api.product import Product
from w4gemm.choice import plan
from w4gemm.kernels.base import selected

experts = part_fixture("experts")


def test_results_that_must_not_depend_on_the_batch(experts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With VLLM_BATCH_INVARIANT every product has one order of sums, whichever of its configs is chosen for a number of
    rows, and a layer in one launch has the same."""
    from w4gemm.integrations.vllm import experts_kernel

    def asked(key: LayerKey, device: Any) -> OneLaunch:
        assert key.in_order
        return OneLaunch(None, "a CPU", "")

    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    monkeypatch.setattr(experts_kernel, "one_launch_now", asked)
    ranked = plan.ranked
    monkeypatch.setattr(plan, "ranked", lambda among, problem: ranked(among, problem)[:: -1 if problem.m % 2 else 1])
    choice.forget()
    made = mixture(CASES[0])
    need = made.layer.quant_method.moe_kernel.fused_experts.need(64)
    assert need.keys and all(key.batch_invariant for key in need.keys)
    x, weights, ids = inputs(CASES[0].dtype, 40)
    whole = made.layer.forward_modular(x, weights, ids)
    for rows in (slice(1), slice(3, 8), slice(39, 40), slice(33)):
        assert torch.equal(made.layer.forward_modular(x[rows], weights[rows], ids[rows]), whole[rows])
    choice.forget()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_formats(experts: ModuleType, case: Case) -> None:
    made = mixture(case)
    x, weights, ids = inputs(case.dtype)
    assert type(made.layer.quant_method.moe_kernel.fused_experts).__name__ == "W4gemmExperts"
    with torch.inference_mode():
        got = made.layer.forward_modular(x, weights, ids)
        none = made.layer.forward_modular(x[:0], weights[:0], ids[:0])
    assert got.dtype == case.dtype and none.shape == (0, HIDDEN)
    assert_near(got, made.expected(x, weights, ids), case)


def test_gpt_oss(experts: ModuleType) -> None:
    """MXFP4 with biases and its activation, in its own sizes: vLLM's method would pad 128 features to 256."""
    made = mixture(GPT_OSS)
    x, weights, ids = inputs(torch.bfloat16)
    assert {name for name, _ in made.layer.named_parameters()} >= {"w13_bias", "w2_bias", "w13_weight", "w2_weight"}
    got = made.layer.forward_modular(x, weights, ids)
    assert_near(got, made.expected(x, weights, ids, activation="swiglu_oai"), GPT_OSS)


ACTIVATIONS = [
    (MXFP4, {"swiglu_limit": 1.5}, "silu_mul(limit=1.5)"),  # DeepSeek-V4
    (MXFP4, {"has_bias": True}, "silu_mul"),
    (
        Case("compressed-tensors", 32, element="mxfp4"),  # Kimi-K3
        {"activation": "SITU", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0},
        "situ_mul",
    ),
    (
        MXFP4,
        {"activation": "SITU", "activation_situ_beta": 1.5, "activation_situ_linear_beta": None},
        "situ_mul(beta=1.5,linear_beta=none)",
    ),
    (
        NVFP4,  # MiniMax-M3
        {"activation": "SWIGLUOAI_UNINTERLEAVE", "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
        "swiglu_oai",
    ),
    (
        MXFP4,
        {"activation": "SWIGLUOAI_UNINTERLEAVE", "swiglu_limit": 2.0, "has_bias": True},
        "swiglu_oai(alpha=1,beta=none,limit=2)",
    ),
    (NVFP4, {"activation": "RELU2_NO_MUL"}, "relu2"),  # Nemotron 3
    (Case("compressed-tensors", 32), {"activation": "RELU2_NO_MUL"}, "relu2"),
    (Case("awq", 64, asymmetric=True, transposed=True), {"activation": "SILU_NO_MUL"}, "silu"),
    (Case("compressed-tensors", fp8=True), {"activation": "GELU_TANH_NO_MUL"}, "gelu_tanh"),
]


@pytest.mark.parametrize(("case", "settings", "activation"), ACTIVATIONS, ids=str)
def test_activations_of_models(experts: ModuleType, case: Case, settings: dict[str, Any], activation: str) -> None:
    made = mixture(case, **settings)
    x, weights, ids = inputs(case.dtype)
    assert made.layer.quant_method.moe_kernel.fused_experts.products[0].epilogue.activation == activation
    got = made.layer.forward_modular(x, weights, ids)
    assert_near(got, made.expected(x, weights, ids, activation=activation), case)


def test_features_that_a_model_adds(experts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi-K3 has vLLM make wider experts for many GPUs, says so afterwards, and loads nothing into the rest."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

    made, loaded = mixture(MXFP4, packed=False), WIDTH - 32
    stored = {name: p.data for name, p in made.layer.named_parameters() if name.endswith(("weight", "scale"))}

    def create_weights(self: Any, layer: Any) -> None:
        for name, t in stored.items():
            layer.register_parameter(name, torch.nn.Parameter(torch.empty_like(t), requires_grad=False))

    monkeypatch.setattr(Mxfp4MoEMethod, "create_weights", create_weights, raising=False)
    layer = RoutedExperts(*layer_arguments(MXFP4, {}))
    layer.quant_method.create_weights(layer)
    layer.moe_config.intermediate_size_per_partition_unpadded = loaded
    for name, t in stored.items():
        pair = t, getattr(layer, name).data
        parts, held = (each.unflatten(1, (2, -1)) if name.startswith("w13") else each for each in pair)
        size = parts.shape[2] * loaded // WIDTH
        held.narrow(2, 0, size).copy_(parts.narrow(2, 0, size))
    layer.quant_method.process_weights_after_loading(layer)
    x, weights, ids = inputs(MXFP4.dtype)
    gate_up, down = made.gate_up.dequantize(), made.down.dequantize()
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for t, j in torch.nonzero(ids >= 0).tolist():
        gate, up = (gate_up[ids[t, j], : 2 * loaded].double() @ x[t].double()).view(-1, 2).T
        hidden = torch.nn.functional.silu(gate) * up
        expected[t] += weights[t, j].double() * (down[ids[t, j], :, :loaded].double() @ hidden)
    assert_near(layer.forward_modular(x, weights, ids), expected, MXFP4)


@pytest.mark.parametrize(("format", "case"), [("MXFP4", MXFP4), ("MXFP4", GPT_OSS), ("NVFP4", NVFP4)], ids=str)
def test_floats_beside_fp8_x_by_choice(
    experts: ModuleType, monkeypatch: pytest.MonkeyPatch, format: str, case: Case
) -> None:
    monkeypatch.setenv(f"W4GEMM_{format}", "fp8")
    made = mixture(case)
    x, weights, ids = inputs(case.dtype)
    kernel = made.layer.quant_method.moe_kernel.fused_experts
    assert all(product.epilogue.token_scale for product in kernel.products)
    activation = "swiglu_oai" if case is GPT_OSS else "silu_mul"
    got = made.layer.forward_modular(x, weights, ids)
    assert_near(got, made.expected(x, weights, ids, activation=activation), case._replace(fp8=True))
    monkeypatch.setenv(f"W4GEMM_{format}", "16bit")
    made = mixture(case)
    got = made.layer.forward_modular(x, weights, ids)
    assert_near(got, made.expected(x, weights, ids, activation=activation), case)


@pytest.mark.parametrize(("strategy", "activations"), [("token", "fp8"), ("group", None)])
def test_fp8_x_that_a_checkpoint_wants(experts: ModuleType, strategy: str, activations: str | None) -> None:
    """A scale for each token, or one for each group of columns, in whose place x has 16 bits."""
    case = Case("compressed-tensors", 32, element="mxfp4", fp8=True)
    config = case.config()
    config.target_scheme_map["Linear"]["input_activations"].strategy = strategy
    layer = mixture(case, packed=False).layer
    method = config.get_quant_method(layer, "experts")
    settings, _ = experts.read(method, layer)
    assert settings.activations == activations


@pytest.mark.parametrize("case", [CASES[0], CASES[-2]], ids=str)
def test_experts_of_other_ranks_add_nothing(experts: ModuleType, case: Case) -> None:
    """Rank 1 has the last two of five experts."""
    here = EXPERTS - 2
    expert_map = torch.tensor([-1] * here + [0, 1], dtype=torch.int32)
    made = mixture(case, num_local_experts=2, ep_size=2, ep_rank=1, use_ep=True, dp_size=2, expert_map=expert_map)
    x, weights, ids = inputs(case.dtype)
    assert not made.layer.quant_method.moe_kernel.fused_experts.expects_unquantized_inputs
    got = made.layer.forward_modular(x, weights, ids)
    assert_near(got, made.expected(x, weights, torch.where(ids >= here, ids, -1)), case)


def test_few_tokens_run_in_one_launch(experts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the work is then vLLM's last step, into vLLM's own output; the kernel is emulated. A map may say which
    experts are here. Weights on the input, and more tokens, run in four launches."""
    pytest.importorskip("cutlass")
    from w4gemm.integrations.vllm import experts_kernel

    case, calls = CASES[7], []
    sizes = {"experts": EXPERTS, "features": HIDDEN, "width": WIDTH, "ids": torch.int32, "mapped": True}
    spec = spec_of(8, format=case.format.name, **sizes)

    def chosen(key: LayerKey, device: Any) -> OneLaunch:
        fits = key.choice is None and key.ids is torch.int32 and not any(key.operands) and key.tokens <= spec.tokens
        return OneLaunch(spec, "", "") if fits else OneLaunch(None, "too many tokens", "")

    def launched(
        x: Any, choices: Any, gate_up: Any, down: Any, activation: str, expert_map: Any, out: Any, in_order: bool
    ) -> Any:
        assert not in_order
        calls.append((len(x), expert_map is not None, out))
        layer = Layer(spec, gate_up.weight.repack("mma16"), down.weight.repack("mma16"), None, None, None, None)
        every = torch.arange(EXPERTS, dtype=torch.int32) if expert_map is None else expert_map
        return out.copy_(emulated(layer, x, choices, every))

    made = mixture(case)
    monkeypatch.setattr(experts_kernel, "one_launch_now", chosen)
    monkeypatch.setattr(experts_kernel, "expert_layer", launched)
    for tokens in (3, 8, 9):
        x, weights, ids = inputs(case.dtype, tokens)
        for choices in (ids, ids.long()):
            got = made.layer.forward_modular(x, weights, choices)
            assert_near(got, made.expected(x, weights, ids), case)
        if tokens <= 8:
            assert [call[:2] for call in calls] == 2 * [(tokens, False)] and calls[-1][2] is got
        calls.clear()
    made.layer.forward_modular(x[:3], weights[:3], ids[:3])
    assert made.layer.forward_modular(x[:0], weights[:0], ids[:0]).shape == (0, HIDDEN) and len(calls) == 1
    made.layer.apply_router_weight_on_input = True
    x, weights, ids = inputs(case.dtype, 3)
    one = weights[:, :1], ids[:, :1]
    assert_near(made.layer.forward_modular(x, *one), made.expected(x, *one, on_input=True), case)
    made.layer.apply_router_weight_on_input = False
    monkeypatch.setattr(type(made.layer), "expert_map", torch.tensor([0, -1, 2, 3, -1], dtype=torch.int32))
    got = made.layer.forward_modular(x, weights, ids)
    here = torch.where((ids == 1) | (ids == 4), -1, ids)
    assert_near(got, made.expected(x, weights, here), case)
    assert [call[:2] for call in calls] == [(3, False), (3, True)]


@pytest.mark.parametrize("case", [CASES[0], CASES[-2]], ids=str)
def test_tokens_from_receivers_that_would_give_them_one_scale(
    experts: ModuleType, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """They come in 16 bits. DeepEP v2 may send a token once for each of its experts, which are then its only one."""
    from w4gemm.integrations.vllm import experts_kernel

    calls, need = [], experts_kernel.experts_need
    monkeypatch.setattr(experts_kernel, "experts_need", lambda *args: calls.append(args[3]) or need(*args))
    made = mixture(case, use_ep=True, dp_size=2, all2all_backend="deepep_v2")
    x, weights, ids = inputs(case.dtype)
    kernel = made.layer.quant_method.moe_kernel.fused_experts
    assert kernel.expects_unquantized_inputs == case.fp8
    assert_near(made.layer.forward_modular(x, weights, ids), made.expected(x, weights, ids), case)
    assert [call.top_k for call in calls] == [[TOP_K, 1]]
    kernel.moe_config.moe_parallel_config.all2all_backend = "deepep_high_throughput"  # it would pad so few features
    assert kernel.expects_unquantized_inputs == case.fp8


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        ({"swiglu_limit": 0.5}, "silu_mul(limit=0.5)"),
        ({"activation": "GELU"}, "gelu_mul"),
        ({"activation": "GELU_TANH"}, "gelu_tanh_mul"),
    ],
)
def test_activations(experts: ModuleType, settings: dict[str, Any], activation: str) -> None:
    made = mixture(CASES[0], **settings)
    x, weights, ids = inputs(torch.bfloat16)
    got = made.layer.forward_modular(x, weights, ids)
    assert_near(got, made.expected(x, weights, ids, activation=activation), CASES[0])


def test_router_weights_on_the_input(experts: ModuleType) -> None:
    made = mixture(CASES[0], apply_router_weight_on_input=True)
    x, weights, ids = inputs(torch.bfloat16)
    weights, ids = weights[:, :1], ids[:, :1]  # vLLM allows it with one expert a token only
    got = made.layer.forward_modular(x, weights, ids)
    assert_near(got, made.expected(x, weights, ids, on_input=True), CASES[0])


def test_one_expert_for_each_token(experts: ModuleType) -> None:
    """Rows are then as many as tokens, in another order: they must not lie in vLLM's output, which newer versions than
    0.26 offer for rows of its shape."""
    made = mixture(CASES[0])
    x, weights, ids = inputs(torch.bfloat16)
    kernel = made.layer.quant_method.moe_kernel.fused_experts
    *_, rows = kernel.workspace_shapes(len(x), 2 * WIDTH, HIDDEN, 1, EXPERTS, EXPERTS, None, None)
    assert rows != tuple(x.shape) and math.prod(rows) == x.numel()
    weights, ids = weights[:, :1], ids[:, :1].flip(0)
    got = made.layer.forward_modular(x, weights, ids)
    assert_near(got, made.expected(x, weights, ids), CASES[0])


@pytest.mark.parametrize("case", [CASES[3], CASES[-2]], ids=str)
def test_batched_rows(experts: ModuleType, case: Case) -> None:
    """Rows past an expert's count are NaN, and are not read."""
    made = mixture(case, all2all_backend="deepep_low_latency")
    x, weights, ids = inputs(case.dtype)
    kernel = made.layer.quant_method.moe_kernel
    assert type(kernel.fused_experts).__name__ == "BatchedW4gemmExperts"
    assert (made.layer.quant_method.moe_quant_config.block_shape == [128, 128]) == case.fp8
    assert kernel.fused_experts.products[0].epilogue.block_scale == case.fp8
    got = made.layer.forward_modular(x, weights, ids)
    assert_near(got, made.expected(x, weights, ids), case)


def test_a_plan_of_batched_rows_is_for_the_tokens_of_this_step(
    experts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.forward_context as context

    ran: list[int] = []
    launch = Product.launch

    def spied(product: Product, operands: Any, m: int) -> None:
        ran.append(m)
        launch(product, operands, m)

    monkeypatch.setattr(Product, "launch", spied)
    for case in (CASES[3], CASES[-2]):  # the last of them with fp8 tokens
        made = mixture(case, all2all_backend="deepep_low_latency")
        assert set(ran) == {rows * EXPERTS for rows in (1, 2, 3, 5)}  # launched at start-up: every plan for 1 to 8 rows
        ran.clear()
    made = mixture(CASES[3], all2all_backend="deepep_low_latency")
    x, weights, ids = inputs(torch.bfloat16)
    room = 8
    for metadata, rows in (
        (None, room),
        (context.DPMetadata(torch.tensor([3, 2])), 2),  # 10 rows of 5 experts
        (context.DPMetadata(torch.tensor([1, 0])), 1),
        (context.DPMetadata(torch.tensor([999, 1])), room),
    ):
        monkeypatch.setattr(context, "_forward_context", context.ForwardContext(metadata))
        ran.clear()
        got = made.layer.forward_modular(x, weights, ids)
        assert ran == 2 * [rows * EXPERTS]
        assert_near(got, made.expected(x, weights, ids), CASES[3])


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[-2]], ids=str)
def test_rows_that_are_copied_move_an_expert(experts: ModuleType, case: Case) -> None:
    """Every tensor of an expert is a row of a parameter: EPLB copies rows between calls."""
    made = mixture(case, enable_eplb=True)
    assert made.layer.quant_method.supports_eplb
    x, weights, ids = inputs(case.dtype)
    before = made.layer.forward_modular(x, weights, ids)
    moved = torch.tensor([3, 0, 4, 1, 2])
    for rows in made.layer.get_expert_weights():
        assert rows.shape[0] == EXPERTS
        rows.copy_(selected(rows, 0, moved))
    where = moved.argsort()
    after = made.layer.forward_modular(x, weights, torch.where(ids < 0, ids, where[ids.clamp(min=0)].int()))
    assert torch.equal(after, before)


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[-2], GPT_OSS], ids=str)
def test_weights_that_are_loaded_anew_lie_where_the_first_did(experts: ModuleType, case: Case) -> None:
    """vLLM (reload_weights) copies what it finds to the tensors that it had before, and makes these the layer's."""
    layer, new = mixture(case).layer, mixture(case, seed=1000, packed=False)
    before = {name: (p, p.data_ptr()) for name, p in layer.named_parameters()}
    for name in before:
        delattr(layer, name)
    for name, p in new.layer.named_parameters():
        layer.register_parameter(name, p)
    layer.quant_method.process_weights_after_loading(layer)
    after = dict(layer.named_parameters())
    assert after.keys() == before.keys() and all(p is after[name] for name, (p, _) in before.items())
    assert all(p.data_ptr() == address for p, address in before.values())
    x, weights, ids = inputs(case.dtype)
    activation = "swiglu_oai" if case is GPT_OSS else "silu_mul"
    got = layer.forward_modular(x, weights, ids)
    assert_near(got, new.expected(x, weights, ids, activation=activation), case)
