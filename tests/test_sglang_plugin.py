"""SGLang's plugin: what its schemes load becomes our weights and gives the right products; all else stays SGLang's own.

Runs on a stub of SGLang (sglang_stub/); with ``SGLANG_SOURCES`` on its sources (sglang_sources.py).
"""

from __future__ import annotations

import inspect
import json
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sglang_stub
from engine_tensors import words
from sglang_layers import (  # noqa: F401 (two are fixtures)
    GROUP,
    MIXTURES,
    QUANTIZATION,
    SCHEMES,
    SOURCES,
    Drawn,
    K,
    N,
    config,
    created,
    experts_layer,
    fill,
    loaded,
    on_hopper,
    packed,
    quantized,
    refused,
    registered,
    resolved,
    started_with,
)
from w4gemm import QuantizedWeight, linear
from w4gemm.integrations import sglang as plugin
from w4gemm.integrations.engines import warmup
from w4gemm.integrations.sglang import dense, experts, takeover


def compressed(**facts: Any) -> Any:
    return resolved(SCHEMES["ct"])(**{"strategy": "group", "num_bits": 4, "group_size": GROUP, **facts})


def of_gptq(bits: int, form: str) -> Any:
    return config(weight_bits=bits, checkpoint_format=form)


def second_version(drawn: Drawn) -> dict[str, torch.Tensor]:
    return {**drawn.gptq(), "qzeros": words(drawn.zeros.T, bits=drawn.bits)}


DENSE = {
    "gptq": (lambda: resolved(SCHEMES["gptq"])(config()), Drawn(1, N, K, False), Drawn.gptq),
    "gptq desc_act": (
        lambda: resolved(SCHEMES["gptq"])(config(desc_act=True)),
        Drawn(2, N, K, False, act_order=True),
        Drawn.gptq,
    ),
    "gptq of 8 bits": (
        lambda: resolved(SCHEMES["gptq"])(config(weight_bits=8)),
        Drawn(9, N, K, False, bits=8),
        Drawn.gptq,
    ),
    **{
        f"gptq other of {bits} bits{' asymmetric' if zero else ''}": (
            partial(lambda bits, form: resolved(SCHEMES["gptq other"])(of_gptq(bits, form)), bits, form),
            Drawn(10 + bits, N, K, zero, bits=bits),
            Drawn.gptq if form == "gptq" else second_version,
        )
        for bits, zero, form in (
            *((2, False, "gptq"), (3, False, "gptq"), (3, True, "gptq"), (8, True, "gptq_v2")),
            *((4, True, "gptq_v2"), (3, False, "gptq_v2")),
        )
    },
    "awq": (lambda: resolved(SCHEMES["awq"])(config()), Drawn(3, N, K, True), Drawn.awq),
    "awq other": (lambda: resolved(SCHEMES["awq other"])(config()), Drawn(4, N, K, True), Drawn.awq),
    "ct": (compressed, Drawn(5, N, K, False), Drawn.compressed),
    "ct of 8 bits": (lambda: compressed(num_bits=8), Drawn(21, N, K, False, bits=8), Drawn.compressed),
    "ct asymmetric of 8 bits": (
        lambda: compressed(num_bits=8, symmetric=False),
        Drawn(22, N, K, True, bits=8),
        Drawn.compressed,
    ),
    "ct asymmetric": (lambda: compressed(symmetric=False), Drawn(6, N, K, True), Drawn.compressed),
    "ct channel": (
        lambda: compressed(strategy="channel", group_size=None),
        Drawn(7, N, K, False, -1),
        Drawn.compressed,
    ),
    "ct act-order": (lambda: compressed(actorder="group"), Drawn(8, N, K, False, act_order=True), Drawn.compressed),
}


def filled(**of_layer: Any) -> tuple[Any, Any]:
    """A scheme for AWQ's linear layers, and a layer with weights that are not packed yet."""
    make, drawn, stored = DENSE["awq"]
    scheme = make()
    layer = created(scheme, **of_layer)
    fill(layer, stored(drawn))
    return scheme, layer


def experts_left(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """See that experts are left to SGLang, for a reason that is logged when their layer is made."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "sglang.srt.w4gemm"):
        method, layer, _ = loaded("awq")
    assert reason in caplog.text
    refused(method, layer, caplog, experts)


@pytest.mark.parametrize("name", DENSE)
def test_linear_layers(name: str) -> None:
    make, drawn, stored = DENSE[name]
    scheme = make()
    layer = created(scheme)
    fill(layer, stored(drawn))
    scheme.process_weights_after_loading(layer)
    scheme.process_weights_after_loading(layer)  # SGLang may ask again
    w = layer.w4gemm_weight[0]
    assert torch.equal(w.dequantize(torch.float64), drawn.dense)
    assert {n.rsplit("_", 1)[0] for n in packed(layer)} == {"w4gemm_weight"}
    assert all(t is p for t, p in zip(w.tensors, packed(layer).values(), strict=True))
    x, bias = torch.randn(2, 3, K).bfloat16(), torch.randn(N).bfloat16()
    for b in (None, bias):
        assert torch.equal(scheme.apply_weights(layer, x, b), linear(x, w, b))
    expected = x.double() @ drawn.dense.T + bias.double()
    torch.testing.assert_close(scheme.apply_weights(layer, x, bias).double(), expected, rtol=2e-2, atol=2e-2)


def test_where_answers_must_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers and experts are batch-invariant."""
    started_with(monkeypatch, enable_deterministic_inference=True)
    called: list[bool] = []
    monkeypatch.setattr(dense, "linear", lambda *args, batch_invariant: called.append(batch_invariant))
    scheme, layer = filled()
    scheme.process_weights_after_loading(layer)
    scheme.apply_weights(layer, torch.randn(2, K).bfloat16(), None)
    assert called == [True]
    method, layer, _ = loaded("awq")
    method.process_weights_after_loading(layer)
    assert layer.w4gemm_experts.experts.batch_invariant


def test_where_adapters_may_be_loaded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Experts that SGLang runs then need the switch, and another runner than those with adapters of their own."""
    started_with(monkeypatch, enable_lora=True)
    named = SimpleNamespace(value="auto")
    monkeypatch.setattr("w4gemm.integrations.sglang.experts_lora.get_moe_runner_backend", lambda: named)
    monkeypatch.delenv("W4GEMM_SGLANG", raising=False)
    for name in MIXTURES:  # SGLang's start would end
        method, layer, _ = loaded(name)
        method.process_weights_after_loading(layer)
        assert layer.w4gemm_experts.first is not None
    named.value = "marlin"
    experts_left(caplog, "--enable-lora is on, with which w4gemm was not timed; W4GEMM_SGLANG=on takes over")
    monkeypatch.setenv("W4GEMM_SGLANG", "on")
    named.value = "lora_triton"
    experts_left(caplog, "--moe-runner-backend lora_triton runs experts and adapters")
    started_with(monkeypatch, enable_lora=True, enable_deterministic_inference=True)
    experts_left(caplog, "--enable-deterministic-inference")


@pytest.mark.parametrize("option", ["cpu_offload_gb", "offload_group_size"])
def test_layers_whose_weights_are_in_the_hosts_memory(
    option: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang moves the parameters that it knows, and puts others in their place for a call."""
    started_with(monkeypatch, **{option: 4})
    scheme, layer = filled()
    assert "--cpu-offload-gb or --offload-group-size" in refused(scheme, layer, caplog, dense)
    experts_left(caplog, "--cpu-offload-gb or --offload-group-size")


@pytest.mark.parametrize(
    "method",
    [
        "ShardedStateLoader.load_model",
        "PreshardedModelLoader.load_model",
        "RemoteInstanceModelLoader.load_model",
        "RemoteModelLoader._load_model_from_remote_kv",
    ],
)
def test_weights_that_another_engine_had_packed(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang packs a layer that holds anything, and reads the file over the parameters that it finds by name."""
    scheme, layer = filled()
    before, made_before, _ = loaded("awq")
    assert hasattr(made_before, "w4gemm_runner")

    def load(*args: Any, **named: Any) -> None:
        assert "as another engine had packed them" in refused(scheme, layer, caplog, dense)
        experts_left(caplog, "as another engine had packed them")
        refused(before, made_before, caplog, experts)

    target = f"sglang.srt.model_loader.loader.{method}"
    (around,) = (hook.around for hook in takeover.LOADING if hook.target == target)
    around(load, object(), model_config=None)
    scheme.process_weights_after_loading(layer)
    assert hasattr(layer, "w4gemm_weight")


@pytest.mark.parametrize("algorithm", [None, "EAGLE"])
def test_a_head_that_a_draft_model_shares(
    algorithm: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started_with(monkeypatch, speculative_algorithm=algorithm)
    for head in (False, True):
        scheme, layer = filled(kind="ParallelLMHead" if head else "")
        if head and algorithm:
            assert "draft models read and replace" in refused(scheme, layer, caplog, dense)
        else:
            scheme.process_weights_after_loading(layer)
            assert hasattr(layer, "w4gemm_weight")


@pytest.mark.parametrize(
    ("option", "settings"),
    [
        ("--dwdp-size", {"dwdp_size": 2}),
        ("--enable-paged-experts", {"moe": {"enable_paged_experts": True}}),
        ("--kt-weight-path", {"moe": {"kt_weight_path": "/folder"}}),
    ],
)
def test_experts_that_are_not_all_on_their_gpu(
    option: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started_with(monkeypatch, **settings)
    with caplog.at_level(logging.INFO, "sglang.srt.w4gemm"):
        method, layer, _ = loaded("w4afp8")
    assert option in caplog.text
    refused(method, layer, caplog, experts)


def test_a_head_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang hands lm_head float32 then, which no kernel takes."""
    scheme, layer = filled(kind="ParallelLMHead")
    scheme.process_weights_after_loading(layer)
    x, asked, own = torch.randn(2, K).bfloat16(), [], dense.linear
    monkeypatch.setattr(dense, "linear", lambda x, *args, **named: (asked.append(x.dtype), own(x, *args, **named))[1])
    got = scheme.apply_weights(layer, x.float(), None)
    assert got.dtype == torch.float32 and asked == [torch.bfloat16]
    assert torch.equal(got, own(x, layer.w4gemm_weight[0], None).float())


def test_a_parameter_with_two_names_is_not_kept_under_the_other() -> None:
    """DeepSeek's dense and shared experts of SGLang's have ``weight`` beside compressed-tensors' ``weight_packed``."""
    make, drawn, stored = DENSE["ct"]
    scheme = make()
    layer = created(scheme)
    fill(layer, stored(drawn))
    layer.weight = layer.weight_packed
    scheme.process_weights_after_loading(layer)
    assert not {"weight", "weight_packed"} & packed(layer).keys()


def test_a_taken_layer_is_traced_without_a_break() -> None:
    scheme, layer = filled()
    scheme.process_weights_after_loading(layer)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return dense.apply(None, scheme, layer, x) * 2  # type: ignore[arg-type]

    x = torch.randn(5, K).bfloat16()
    assert torch.equal(torch.compile(forward, backend="eager", fullgraph=True)(x), forward(x))


@pytest.mark.parametrize("name", DENSE)
def test_all_that_is_packed_was_loaded(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint that lacks one of the tensors; all of them; and layers that are never loaded stay SGLang's."""
    make, drawn, stored = DENSE[name]
    tensors = stored(drawn)
    scheme = make()
    (which,) = (s for s in dense.SCHEMES if resolved(s.target) is type(scheme))
    names = which.parameters(created(scheme))
    assert names[:2] == list(tensors)[:2]
    for lacking in names:
        scheme = make()
        layer = created(scheme)
        fill(layer, {each: t for each, t in tensors.items() if each != lacking})
        with pytest.raises(RuntimeError, match=f": {lacking}: 100.00% of its shape"):
            scheme.process_weights_after_loading(layer)
    scheme = make()
    if name.startswith("gptq other"):  # which SGLang cannot run
        with pytest.raises(ValueError, match="neither can SGLang: nothing of them was loaded"):
            scheme.process_weights_after_loading(created(scheme))
    else:
        assert "nothing of them was loaded" in refused(scheme, created(scheme), caplog)


@pytest.mark.parametrize("name", ["awq", "ct", "w4afp8"])
def test_all_experts_that_are_packed_were_loaded(name: str) -> None:
    """The last expert's downs were loaded in the place of another's, its codes or its scales."""
    method, layer, _ = loaded(name)
    made = {each: p.data.clone() for each, p in created_experts(name).named_parameters()}
    first, second = (each for each in layer._parameters if each.startswith("w2_") and each.endswith(ENDS[name]))
    for each in (first, second):
        method, layer, _ = loaded(name)
        getattr(layer, each).data[-1] = made[each][-1]
        with pytest.raises(RuntimeError, match=f"experts of layer 0: {each}: 25.00% of its shape"):
            method.process_weights_after_loading(layer)


ENDS = {
    "awq": ("qweight", "scales"),
    "ct": ("weight_packed", "weight_scale"),
    "w4afp8": ("w2_weight", "weight_scale_inv"),
}


def created_experts(name: str) -> torch.nn.Module:
    """A layer of experts that SGLang has made for our runner."""
    method = MIXTURES[name][0]()
    layer = experts_layer(method)
    method.create_moe_runner(layer, layer.moe_runner_config)
    return layer


def test_random_weights_of_the_dummy_loader() -> None:
    """SGLang leaves integers as they were made."""
    (around,) = (hook.around for hook in takeover.LOADING if "DummyModelLoader" in hook.target)
    scheme, experts_layers = DENSE["ct"][0](), []

    def load(*args: Any, **named: Any) -> torch.nn.Module:
        experts_layers.append(created_experts("ct"))
        return created(scheme)

    layer = around(load, object(), model_config=None)
    for parameter in (*layer.parameters(), *experts_layers[0].parameters()):
        if parameter.is_floating_point():
            parameter.data.uniform_(-1e-3, 1e-3)
        else:
            parameter.data.zero_()  # memory of an earlier test may hold its marks
    scheme.process_weights_after_loading(layer)
    assert hasattr(layer, "w4gemm_weight")
    experts_layers[0].scheme.process_weights_after_loading(experts_layers[0])
    assert hasattr(experts_layers[0], "w4gemm_experts")


def test_parameters_that_are_not_understood(caplog: pytest.LogCaptureFixture) -> None:
    """One more may change what the numbers mean; zero points of a symmetric layer must be what it says."""
    scheme, layer = filled()
    layer.register_parameter("offset", torch.nn.Parameter(torch.zeros(N)))
    assert "they have a parameter 'offset'" in refused(scheme, layer, caplog)
    make, drawn, stored = DENSE["gptq"]
    scheme = make()
    layer = created(scheme)
    fill(layer, {**stored(drawn), "qzeros": torch.full((K // GROUP, N // 8), 0x77777775).int()})
    assert "says that it is symmetric" in refused(scheme, layer, caplog)
    method, layer, _ = loaded("ct")
    layer.register_parameter("w2_weight_offset", torch.nn.Parameter(torch.zeros(4)))
    assert "they have a parameter 'w2_weight_offset'" in refused(method, layer, caplog, experts)


@pytest.mark.parametrize(
    ("facts", "full_k", "reason"),
    [({"desc_act": True}, 2 * K, "divided among GPUs"), ({"group_size": 8}, K, "multiple of 16")],
)
def test_layers_that_are_left_to_sglang(
    facts: dict[str, Any], full_k: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheme = resolved(SCHEMES["gptq"])(config(**facts))
    layer = created(scheme, full_k=full_k)
    for p in layer.parameters():
        p.data.zero_()
    assert reason in refused(scheme, layer, caplog)


def test_gptq_that_neither_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang has no kernel for it: without ours, or if numbers cannot be packed, the start ends."""
    make, drawn, stored = DENSE["gptq other of 3 bits asymmetric"]
    scheme = make()
    layer = created(scheme)
    fill(layer, stored(drawn))
    layer.scales.data[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"cannot run GPTQ's linear layers .* neither can SGLang: .*not be finite"):
        scheme.process_weights_after_loading(layer)
    monkeypatch.setenv("W4GEMM_SGLANG", "off")
    with pytest.raises(RuntimeError, match="kernel has been removed"):
        make()


def test_zero_points_that_readers_take_for_different_ones() -> None:
    scheme, layer = (made := DENSE["gptq other of 3 bits asymmetric"])[0](), None
    layer = created(scheme)
    fill(layer, {**made[2](made[1]), "qzeros": words(torch.arange(N).expand(K // GROUP, N) % 8, bits=3)})
    with pytest.raises(ValueError, match="are stored as 7, which in version 1"):
        scheme.process_weights_after_loading(layer)


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
    monkeypatch.setattr(takeover, "capability", lambda device=None: capability)
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
    runner.model = torch.nn.Module()

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
    assert said.startswith("w4gemm runs 3 linear layers;")


# --- dense layers with fp8 activations -------------------------------------------------------------------------------


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
    assert layer.w4gemm_weight[0].activations == "fp8"
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


# --- installation ----------------------------------------------------------------------------------------------------


def test_registering_again_changes_nothing() -> None:
    registry = resolved("sglang.srt.plugins.hook_registry.HookRegistry")
    before = {target: len(hooks) for target, hooks in registry._hooks.items()}
    plugin.register()
    assert {target: len(hooks) for target, hooks in registry._hooks.items()} == before
    assert plugin._installed == ["dense", "shards", "experts"]


def test_experts_alone_know_how_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version whose linear layers are unknown may have experts that are not."""
    from w4gemm.integrations.sglang import experts

    targets: list[str] = []
    monkeypatch.setattr(takeover, "hook_loading", takeover.hook_loading.__wrapped__)
    monkeypatch.setattr(experts, "hook_loading", takeover.hook_loading)
    for module in (takeover, experts):
        monkeypatch.setattr(module, "hook", lambda hooks: targets.extend(hook.target for hook in hooks))
    monkeypatch.setattr(experts, "register_moe_runner_core", lambda name, runner: None)
    experts.install()
    assert {hook.target for hook in takeover.LOADING} < set(targets)


@pytest.mark.parametrize("change", ["missing", "other parameters"])
def test_an_unknown_version_goes_on_with_one_warning(
    change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = resolved("sglang.srt.plugins.hook_registry.HookRegistry")
    monkeypatch.setattr(plugin, "_installed", ["shards", "experts"])
    before = {target: len(hooks) for target, hooks in registry._hooks.items()}
    if change == "missing":
        monkeypatch.delattr(resolved(f"{QUANTIZATION}.gptq.schemes"), "GPTQMarlinLinearScheme")
    else:
        monkeypatch.setattr(resolved(SCHEMES["ct"]), "apply_weights", lambda self, weights: None)
    plugin.register()
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "to SGLang's own kernels, because version" in record.message and "\n" not in record.message
    assert {target: len(hooks) for target, hooks in registry._hooks.items()} == before


# --- the stub --------------------------------------------------------------------------------------------------------

INTERFACE = Path(__file__).with_name("sglang_interface.json")
METHODS = (
    "_load_model_from_remote_kv",
    *("__init__", "create_weights", "process_weights_after_loading", "apply_weights", "apply"),
    *("create_moe_runner", "run_from_dispatch", "run", "register", "apply_hooks", "_get_scheme_from_parts"),
    "load_model",
    "get_moe_runner_backend",
    "get_moe_quant_info",
    "get_quant_method",
    "restore_weights_before_loading",
    "pause",
)


def interface() -> dict[str, list[str]]:
    """Parameters of each function and method that the stub has, and fields of each tuple, as they are imported."""
    actual = {}
    for module, values in sglang_stub.SGLANG.values.items():
        for stub in values.values():
            value = resolved(f"{module}.{stub.__name__}")
            if not isinstance(stub, type):
                actual[f"{module}.{stub.__name__}"] = list(inspect.signature(inspect.unwrap(value)).parameters)
            elif hasattr(stub, "_fields"):
                actual[f"{module}.{stub.__name__}"] = list(value._fields)
            else:
                bases = [base for base in stub.__mro__[:-1] if base is not torch.nn.Module]
                for name in METHODS:
                    if any(name in vars(base) for base in bases):
                        own = inspect.unwrap(getattr(value, name))
                        actual[f"{module}.{stub.__name__}.{name}"] = list(inspect.signature(own).parameters)
    return dict(sorted(actual.items()))


def test_the_stub_has_the_interface_of_the_sources() -> None:
    actual = interface()
    if SOURCES and not INTERFACE.exists():
        INTERFACE.write_text(json.dumps(actual, indent=1) + "\n")
    assert actual == json.loads(INTERFACE.read_text())
