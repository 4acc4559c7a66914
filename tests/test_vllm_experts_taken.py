"""Which experts the vLLM plugin takes over, against a stub of vLLM's interfaces, on the CPU: refusals, loading."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_experts import (
    CASES,
    EXPERTS,
    GPT_OSS,
    HIDDEN,
    MXFP4,
    WIDTH,
    Case,
    assert_near,
    inputs,
    layer_arguments,
    mixture,
    takeover_lines,
)
from vllm_parts import part_fixture

experts = part_fixture("experts")


def test_names_that_vllm_and_pickle_look_for(experts: ModuleType) -> None:
    """RoutedExperts loads by the name of a method's class; configs travel to other processes and are copied."""
    config = CASES[0].config()
    for again in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(again) is type(config) and vars(again) == vars(config)
    assert type(config).__name__ == "AutoGPTQConfig"
    method = mixture(CASES[0]).layer.quant_method
    assert type(method).__name__ == "AutoGPTQMoEMethod" and not method.is_monolithic
    experts.install()
    assert type(CASES[0].config()) is type(config)


REFUSED = [
    (Case("gptq"), {"moe_backend": "marlin"}, "--moe-backend marlin was asked for"),
    (Case("gptq"), {"has_bias": True}, "they have biases"),
    (Case("gptq"), {"is_lora_enabled": True}, "LoRA is on"),
    (
        GPT_OSS,
        {"has_bias": True, "activation": "SWIGLUOAI", "width": 80},
        "80 features of this GPU are not whole groups",
    ),
    (Case("gptq"), {"activation": "RELU2"}, "activation is relu2"),
    (MXFP4, {"activation": "SWIGLUSTEP"}, "activation is swiglustep"),
    (MXFP4, {"activation": "SWIGLUOAI_UNINTERLEAVE"}, "activation is swigluoai_uninterleave"),
    (MXFP4, {"activation": "SWIGLUOAI"}, "the order of their gates and ups is not known"),
    (GPT_OSS, {"activation": "SWIGLUOAI", "swiglu_beta": 0.0}, "activation is swigluoai"),
    (MXFP4, {"swiglu_limit": -1.0}, "limit: wanted a number above 0"),
    (MXFP4, {"all2all_backend": "moonep"}, "tokens come in the form of moonep"),
    (Case("gptq"), {"activation": "GELU", "swiglu_limit": 7.0}, "activation is gelu with limit 7"),
    (Case("gptq"), {"all2all_backend": "flashinfer_nvlink_one_sided"}, "tokens come in the form of flashinfer"),
    (Case("gptq"), {"all2all_backend": "nixl_ep"}, "tokens come in the form of nixl_ep"),
    (Case("gptq"), {"all2all_backend": "deepep_high_throughput", "hidden_dim": 320}, "padded to (512, 128)"),
    (Case("gptq", 24), {}, "multiple of 16"),
]


@pytest.mark.parametrize(("case", "settings", "reason"), REFUSED, ids=[reason for *_, reason in REFUSED])
def test_refused(
    experts: ModuleType, case: Case, settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    takeover_lines(caplog)
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        layers = [RoutedExperts(*layer_arguments(case, dict(settings))) for _ in range(2)]
    assert type(layers[0].quant_method).__module__.startswith("vllm.")
    (line,) = takeover_lines(caplog)
    assert reason in line and f"experts of {type(layers[0].quant_method).__name__} to vLLM's own kernels" in line


def test_experts_of_a_method_that_another_program_has_replaced(
    experts: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As verl replaces vLLM's, to bring new weights into tensors that vLLM's own kernels have."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQMoEMethod

    monkeypatch.setattr(AutoGPTQMoEMethod, "process_weights_after_loading", lambda self, layer: None, raising=False)
    monkeypatch.setattr(AutoGPTQMoEMethod, "create_weights", lambda self, layer: None, raising=False)
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        layer = RoutedExperts(*layer_arguments(CASES[0], {}))
    assert type(layer.quant_method) is AutoGPTQMoEMethod
    replaced = "test_vllm_experts_taken has replaced their AutoGPTQMoEMethod.process_weights_after_loading"
    assert replaced in takeover_lines(caplog)[0]


def test_experts_whose_gpus_come_and_go(
    experts: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    engine = SimpleNamespace(parallel_config=SimpleNamespace(enable_elastic_ep=True))
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: engine)
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        layer = RoutedExperts(*layer_arguments(CASES[0], {}))
    assert type(layer.quant_method).__module__.startswith("vllm.")
    assert "--enable-elastic-ep" in takeover_lines(caplog)[0]


@pytest.mark.parametrize(
    "setting", ["VLLM_HUMMING_INPUT_QUANT_CONFIG", "VLLM_MARLIN_INPUT_DTYPE", "quantization_config.moe.activation"]
)
def test_experts_whose_x_vllm_was_told_to_quantize(
    experts: ModuleType, setting: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once they ran on w4gemm with x in 16 bits, and nothing said so."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    asked = SimpleNamespace(moe=SimpleNamespace(activation="mxfp8" if setting.startswith("quant") else None))
    engine = SimpleNamespace(model_config=SimpleNamespace(quantization_config=asked))
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: engine)
    if setting.startswith("VLLM"):
        monkeypatch.setattr(f"vllm.envs.{setting}", "int8", raising=False)
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        layer = RoutedExperts(*layer_arguments(MXFP4, {}))
    assert type(layer.quant_method).__module__.startswith("vllm.")
    assert f"{setting} says how x is quantized" in takeover_lines(caplog)[0]


def test_models_that_ask_for_the_class_of_experts(experts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some ask before weights are loaded, and let experts of certain classes leave the last step to them."""
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQMoEMethod

    from w4gemm.checkpoints.packed_numbers import PackedNumbers

    make = AutoGPTQMoEMethod.__init__
    monkeypatch.setattr(
        AutoGPTQMoEMethod, "__init__", lambda self, *a: (make(self, *a), setattr(self, "experts_cls", "vLLM's"))[0]
    )
    layer = mixture(CASES[0], packed=False).layer
    assert layer.quant_method.experts_cls is experts.W4gemmExperts
    monkeypatch.setattr(PackedNumbers, "check_range", lambda numbers: float("not a number"))
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.runs_on_vllm and layer.quant_method.experts_cls == "vLLM's"


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("gptq", {"desc_act": True}, "in act-order"),
        ("gptq", {"is_sym": False}, "asymmetric GPTQ"),
        ("gptq", {"weight_bits": 8}, "they have 8 bits"),
        ("awq", {"zero_point": False}, "without zero points"),
    ],
)
def test_weights_that_are_refused(experts: ModuleType, name: str, changed: dict[str, Any], reason: str) -> None:
    case = Case(name)
    _, _, moe, config, _ = layer_arguments(case, {})
    vars(config).update(changed)
    layer = SimpleNamespace(moe_config=moe, params_dtype=case.dtype, hidden_size=HIDDEN)
    method = type(config).__mro__[2].get_quant_method(config, layer, "")
    assert reason in experts.why_not(method, layer)


def test_zero_points_that_readers_of_gptq_read_differently(
    experts: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """15 in version 1, which vLLM has added 1 to, and any in version 2, to which it adds 1 too."""
    for version, zero, packed in (("gptq", 3, True), ("gptq", 0, False), ("gptq_v2", 3, False)):
        layer = mixture(Case("moe_wna16", 32, asymmetric=True), packed=False).layer
        layer.quant_method.quant_config.linear_quant_method = "gptq"
        layer.quant_method.quant_config.full_config = {"checkpoint_format": version}
        for product in ("w13", "w2"):
            getattr(layer, f"{product}_qzeros").data.fill_(0x33)[1, 2] = 0x30 | zero
        if version == "gptq_v2":
            reason = experts.why_not(layer.quant_method, layer)
            assert "zero points are of version 2" in reason
            continue
        with caplog.at_level(logging.INFO, "vllm.w4gemm"):
            layer.quant_method.process_weights_after_loading(layer)
        assert packed != hasattr(layer, "runs_on_vllm")
    assert "zero points are stored as 15" in takeover_lines(caplog)[0]


def test_all_experts_that_are_packed_were_loaded(experts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ups of an expert were loaded in the place of another's; no expert was; a parameter is not known."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQMoEMethod

    stored = {name: p.data for name, p in mixture(CASES[0], packed=False).layer.named_parameters()}

    def create_weights(self: Any, layer: Any) -> None:
        for name, t in stored.items():
            parameter = torch.nn.Parameter(torch.empty_like(t), requires_grad=False)
            parameter.is_transposed = CASES[0].transposed
            layer.register_parameter(name, parameter)

    monkeypatch.setattr(AutoGPTQMoEMethod, "create_weights", create_weights, raising=False)

    def loaded(lacking: str = "", rest: bool = True) -> Any:
        layer = RoutedExperts(*layer_arguments(CASES[0], {}))
        layer.quant_method.create_weights(layer)
        for name, t in stored.items():
            held = getattr(layer, name).data
            made = held.clone()
            if rest:
                held.copy_(t)
            if name == lacking:
                held[2, :, WIDTH:] = made[2, :, WIDTH:]
        return layer

    for name in ("w13_qweight", "w13_scales"):
        layer = loaded(name)
        with pytest.raises(RuntimeError, match=f"^experts: {name}: 10.00% of its shape"):
            layer.quant_method.process_weights_after_loading(layer)
    for layer in (loaded(rest=False), loaded()):
        if layer.w13_scales.data[0, 0, 0] == stored["w13_scales"][0, 0, 0]:
            layer.register_parameter("w2_offset", torch.nn.Parameter(torch.zeros(2)))
        layer.quant_method.process_weights_after_loading(layer)
        assert layer.runs_on_vllm
    layer = loaded()
    layer.quant_method.process_weights_after_loading(layer)
    assert not hasattr(layer, "runs_on_vllm")


def test_random_scales_of_the_dummy_loader(experts: ModuleType) -> None:
    """vLLM leaves some as their memory was, which may be NaN."""
    layer = mixture(MXFP4, packed=False).layer
    for product in ("w13", "w2"):
        getattr(layer, f"{product}_weight_scale").data.fill_(255)
    layer.quant_method.is_drawn = True
    layer.quant_method.process_weights_after_loading(layer)
    assert not hasattr(layer, "runs_on_vllm")


def test_experts_that_cannot_be_packed_are_given_back(
    experts: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from w4gemm.checkpoints.packed_numbers import PackedNumbers

    def refused(numbers: PackedNumbers) -> None:
        raise ValueError("scales: the weights of 1 groups would not be finite")

    monkeypatch.setattr(PackedNumbers, "check_range", refused)
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        layer = mixture(CASES[0]).layer
    assert layer.runs_on_vllm and type(layer.quant_method).__module__.startswith("vllm.")
    assert "would not be finite" in takeover_lines(caplog)[0]
    with pytest.raises(ValueError, match="would not be finite"):
        mixture(CASES[0], enable_eplb=True)


def test_a_parameter_of_the_router_in_the_layer_of_experts(experts: ModuleType) -> None:
    """vLLM hands in DeepSeek's, Kimi's, GLM's and MiniMax's."""
    layer = mixture(CASES[0], packed=False).layer
    layer.e_score_correction_bias = torch.nn.Parameter(torch.zeros(EXPERTS))
    layer.quant_method.process_weights_after_loading(layer)
    assert type(layer.quant_method.moe_kernel.fused_experts).__name__ == "W4gemmExperts"


@pytest.mark.parametrize("loaded", [False, True])
def test_biases_that_gptqs_method_makes_for_every_model(experts: ModuleType, loaded: bool) -> None:
    """vLLM 0.33 loads them from checkpoints that have some. Where none are loaded, memory may hold anything: after
    weights were loaded anew they are not zero."""
    made = mixture(CASES[0], packed=False)
    for product, n in (("w13", 2 * WIDTH), ("w2", HIDDEN)):
        biases = torch.full((EXPERTS, n), math.nan, dtype=CASES[0].dtype)
        made.layer.register_parameter(f"{product}_bias", torch.nn.Parameter(biases, requires_grad=False))
    made.layer._loaded_expert_biases = {"w13_bias"} if loaded else set()
    made.layer.quant_method.process_weights_after_loading(made.layer)
    if loaded:  # rows of our first product are in pairs, and biases are not
        assert made.layer.runs_on_vllm and type(made.layer.quant_method).__module__.startswith("vllm.")
        return
    assert not [name for name, _ in made.layer.named_parameters() if name.endswith("bias")]
    x, weights, ids = inputs(CASES[0].dtype)
    assert_near(made.layer.forward_modular(x, weights, ids), made.expected(x, weights, ids), CASES[0])


def test_everything_is_ready_once_the_last_layer_is_loaded(
    experts: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    from w4gemm.choice import plan_cache

    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        made = mixture(Case("compressed-tensors", 32, torch.float16))
    assert any("1 layers of 4-bit experts" in r.message for r in caplog.records)
    known = set(plan_cache._plans)
    for tokens in (1, 3, 8):
        made.layer.forward_modular(*inputs(torch.float16, tokens))
    assert set(plan_cache._plans) == known
