"""SGLang's plugin: layers of 4-bit floats (NVFP4, MXFP4) become our weights. As test_sglang_plugin.py, on a stub or the
sources of SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_layers import (  # noqa: F401 (two are fixtures)
    EXPERTS,
    HIDDEN,
    QUANTIZATION,
    SOURCES,
    K,
    N,
    created,
    dispatched,
    everywhere,
    exact,
    experts_layer,
    fill,
    fill_experts,
    on_hopper,
    packed,
    refused,
    registered,
    resolved,
)
from w4gemm import QuantizedWeight, linear
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations.sglang import dense, experts
from w4gemm.tuning.random_weight import random_components

PARTS = N // 3, N - N // 3
WIDTH = 96  # SGLang pads gpt-oss' to 128
LIMIT, ALPHA = 7.0, 1.702


def config(**facts: Any) -> SimpleNamespace:
    """A quantization config of ModelOpt's, as far as SGLang's methods read it."""
    defaults = {"group_size": 16, "is_awq": False, "is_checkpoint_nvfp4_serialized": True}
    return SimpleNamespace(**{**defaults, "get_name": lambda: "modelopt_fp4", **facts})


class Floats:
    """Random numbers of a weight (n, k) in 4-bit floats, and their meaning.

    Of NVFP4, each of ``parts``, which have so many rows, has its own factor.
    """

    def __init__(self, format: str, seed: int, n: int, k: int, parts: tuple[int, ...] = ()) -> None:
        codes, self.scales, *_ = random_components(WeightFormat.parse(format), n, k, seed)
        self.codes = codes[:, 0::2] | codes[:, 1::2] << 4
        self.factors = torch.tensor([1 / (3072 * (1 + i)) for i in range(len(parts))])
        channels = self.factors.repeat_interleave(torch.tensor(parts)) if parts else None
        w = QuantizedWeight.from_codes(format, codes, self.scales, channels=channels)
        self.dense = w.dequantize(torch.float64)

    def compressed(self) -> dict[str, torch.Tensor]:
        return {"weight_packed": self.codes, "weight_scale": self.scales, "weight_global_scale": 1 / self.factors}

    def modelopt(self) -> dict[str, torch.Tensor]:
        return {"weight": self.codes, "weight_scale": self.scales, "weight_scale_2": self.factors}


# --- linear layers ---------------------------------------------------------------------------------------------------

LINEAR = {
    "compressed-tensors": (lambda: method("compressed_tensors.schemes.CompressedTensorsW4A16Fp4"), Floats.compressed),
    "compressed-tensors for 4-bit activations": (
        lambda: method("compressed_tensors.schemes.CompressedTensorsW4A16Fp4", True),
        Floats.compressed,
    ),
    "modelopt": (lambda: method("modelopt_quant.ModelOptFp4LinearMethod", config()), Floats.modelopt),
    "modelopt 16-bit": (lambda: method("modelopt_quant.ModelOptNvFp4A16LinearMethod", config()), Floats.modelopt),
}


def method(name: str, *args: Any) -> Any:
    return resolved(f"{QUANTIZATION}.{name}")(*args)


@pytest.fixture(autouse=True)
def as_on_hopper(on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    choose_marlin(monkeypatch)


def choose_marlin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have SGLang's own sources choose kernels as they do on Hopper."""
    if SOURCES:
        backends = resolved(f"{QUANTIZATION}.fp4_utils.Fp4GemmRunnerBackend")
        everywhere(monkeypatch, "get_fp4_gemm_runner_backend", lambda: backends("marlin"))
        runs(monkeypatch, "marlin")


def runs(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Have SGLang's own sources take what --moe-runner-backend names."""
    if SOURCES:
        backends = resolved("sglang.srt.layers.moe.utils.MoeRunnerBackend")
        everywhere(monkeypatch, "get_moe_runner_backend", lambda: backends(backend))
        everywhere(monkeypatch, "get_device_capability", lambda: (9, 0))
        alone = resolved("sglang.srt.layers.moe.utils.MoeA2ABackend")("none")
        everywhere(monkeypatch, "get_moe_a2a_backend", lambda: alone)
        precision = SimpleNamespace(moe=SimpleNamespace(flashinfer_mxfp4_moe_precision="bf16"))
        monkeypatch.setattr(f"{QUANTIZATION}.mxfp4.get_exec", lambda: precision)


def loaded(name: str) -> tuple[Any, torch.nn.Module, Floats]:
    make, stored = LINEAR[name]
    scheme, drawn = make(), Floats("nvfp4", 3, N, K, PARTS)
    layer = created(scheme)
    fill(layer, stored(drawn))
    return scheme, layer, drawn


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_layer_is_the_weight(name: str) -> None:
    scheme, layer, drawn = loaded(name)
    scheme.process_weights_after_loading(layer)
    scheme.process_weights_after_loading(layer)  # SGLang may ask again
    w = layer.w4gemm_weight[0]
    assert w.format == WeightFormat.parse("nvfp4") and torch.equal(w.dequantize(torch.float64), drawn.dense)
    assert {n.rsplit("_", 1)[0] for n in packed(layer)} == {"w4gemm_weight"}
    x, bias = torch.randn(2, 3, K).bfloat16(), torch.randn(N).bfloat16()
    call = scheme.apply if name.startswith("modelopt") else scheme.apply_weights
    for b in (None, bias):
        assert torch.equal(call(layer, x, b), linear(x, w, b))


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_layer_multiplies_fp8_x_by_choice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEMM_NVFP4", "fp8")
    scheme, layer, drawn = loaded(name)
    scheme.process_weights_after_loading(layer)
    (w,) = layer.w4gemm_weight
    assert w.activations == "fp8" and w.format == WeightFormat.parse("e2m1_g16_e4m3")
    x = torch.randn(5, K).bfloat16()
    d = (scheme.apply if name.startswith("modelopt") else scheme.apply_weights)(layer, x, None)
    expected = x.double() @ drawn.dense.T
    assert torch.equal(d, linear(x, w)) and (d.double() - expected).norm() < 0.06 * expected.norm()


def test_a_factor_that_is_not_finite_leaves_the_layer_to_sglang(caplog: pytest.LogCaptureFixture) -> None:
    scheme, layer, _ = loaded("compressed-tensors")
    layer.weight_global_scale.data[1] = 0
    assert "for finite weights" in refused(scheme, layer, caplog)


@pytest.mark.parametrize(
    ("backend", "awq", "reason"), [("marlin", True, "NVFP4_AWQ"), ("auto", False, "wanted marlin")]
)
def test_modelopts_layers_that_are_left_to_sglang(
    backend: str, awq: bool, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = SimpleNamespace(value=backend, is_marlin=lambda: backend == "marlin")
    everywhere(monkeypatch, "get_fp4_gemm_runner_backend", lambda: chosen)
    scheme, layer, _ = loaded("modelopt")
    scheme.quant_config.is_awq = awq
    assert reason in refused(scheme, layer, caplog)


# --- mixtures of experts ---------------------------------------------------------------------------------------------

NVFP4 = {
    "compressed-tensors": (
        lambda: method("compressed_tensors.schemes.CompressedTensorsW4A16Nvfp4MoE", True),
        Floats.compressed,
    ),
    "modelopt": (lambda: method("modelopt_quant.ModelOptNvFp4FusedMoEMethod", config()), Floats.modelopt),
    "minimax": (lambda: method("minimax_m3_nvfp4.MiniMaxM3Nvfp4MoE"), Floats.compressed),
}


def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, the experts of each and their weights."""
    ids = torch.tensor([[0, 3], [1, 2], [-1, 1], [2, 0]], dtype=torch.int32)
    return torch.randn(4, HIDDEN).bfloat16() / 4, ids, torch.rand(4, 2)


def nvfp4_experts(name: str) -> tuple[Any, torch.nn.Module, list[tuple[Floats, Floats]]]:
    make, stored = NVFP4[name]
    of = make()
    layer = experts_layer(of)
    width = layer.intermediate_size_per_partition
    of.create_moe_runner(layer, layer.moe_runner_config)
    drawn = [
        (Floats("nvfp4", 20 + e, 2 * width, HIDDEN, (width, width)), Floats("nvfp4", 40 + e, HIDDEN, width, (HIDDEN,)))
        for e in range(EXPERTS)
    ]
    fill_experts(layer, drawn, stored)
    return of, layer, drawn


@pytest.mark.parametrize("name", NVFP4)
def test_experts_of_nvfp4(name: str) -> None:
    of, layer, drawn = nvfp4_experts(name)
    of.process_weights_after_loading(layer)
    assert {n.rsplit("_", 1)[0] for n in packed(layer)} == {"w13_w4gemm", "w2_w4gemm"}
    x, ids, router = routed()
    call = of.apply if name == "modelopt" else of.apply_weights
    got = call(layer, dispatched(x, ids, router)).hidden_states
    expected = exact(x, ids, router, drawn)
    assert (got.double() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_and_their_weights_in_one_word(rank: int) -> None:
    """Inkling's router packs them for any quantized experts, before SGLang finds out which of them are here."""
    of, layer, drawn = nvfp4_experts("modelopt")
    layer.moe_ep_rank = rank
    of.process_weights_after_loading(layer)
    x, ids, router = routed()
    router, ids = router.bfloat16(), ids.abs()
    bits = router.view(torch.int16).int() & 0xFFFF
    chosen = resolved("sglang.srt.layers.moe.topk.PackedTopKOutput")((ids + rank * EXPERTS) << 16 | bits, router)
    got = of.apply(layer, dispatched(x, ids, router)._replace(topk_output=chosen)).hidden_states
    expected = exact(x, ids, router.float(), drawn)
    assert (got.double() - expected).norm() < 0.01 * expected.norm()


def test_alternating_rows_of_gates_and_ups_are_left_to_sglang(caplog: pytest.LogCaptureFixture) -> None:
    """Inkling's model says so when the layer is made."""
    of, layer, _ = nvfp4_experts("modelopt")
    assert hasattr(layer, "w4gemm_runner")
    layer.inference_moe_w13_interleaved = True
    assert "their ups do not lie behind their gates" in refused(of, layer, caplog, experts)
    assert not hasattr(layer, "w4gemm_runner")


def test_nvfp4_that_is_made_while_loading_stays_sglangs(caplog: pytest.LogCaptureFixture) -> None:
    of, layer, _ = nvfp4_experts("modelopt")
    of.quant_config.is_checkpoint_nvfp4_serialized = False
    delattr(layer, "w4gemm_runner")
    with caplog.at_level("INFO", "sglang.srt.w4gemm"):
        of.create_moe_runner(layer, layer.moe_runner_config)
    assert "quantized while they are loaded" in caplog.text
    refused(of, layer, caplog, experts)


def gpt_oss(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> tuple[Any, torch.nn.Module]:
    """gpt-oss' experts as SGLang makes them on Hopper, before they are loaded."""
    runs(monkeypatch, "triton_kernel")
    of = method("mxfp4.Mxfp4MoEMethod", "model.layers.0.mlp.experts")
    layer = experts_layer(of, WIDTH, with_bias=True, **facts)
    of.create_moe_runner(layer, layer.moe_runner_config)
    return of, layer


OSS = {"gemm1_alpha": ALPHA, "gemm1_clamp_limit": LIMIT}


def test_experts_of_gpt_oss(monkeypatch: pytest.MonkeyPatch) -> None:
    of, layer = gpt_oss(monkeypatch, **OSS)
    assert of.get_moe_runner_backend(layer).value == "w4gemm"  # so SGLang routes in its standard form
    drawn = []
    for e in range(EXPERTS):
        pair = Floats("mxfp4", 20 + e, 2 * WIDTH, HIDDEN), Floats("mxfp4", 40 + e, HIDDEN, WIDTH)
        biases = torch.randn(2 * WIDTH).bfloat16(), torch.randn(HIDDEN).bfloat16()
        for product, numbers, bias in zip(("w13", "w2"), pair, biases, strict=True):
            n, k = numbers.dense.shape  # fewer than the padded layer has
            getattr(layer, f"{product}_weight").data[e, :n, : k // 2] = numbers.codes
            getattr(layer, f"{product}_weight_scale").data[e, :n, : k // 32] = numbers.scales.view(torch.uint8)
            getattr(layer, f"{product}_weight_bias").data[e, :n] = bias
        drawn.append((*pair, *(b.double() for b in biases)))
    of.process_weights_after_loading(layer)
    assert {n.rsplit("_", 1)[0] for n in packed(layer)} == {
        "w13_w4gemm",
        "w2_w4gemm",
        "w13_weight",
        "w2_weight",
    }  # the last two: *_weight_bias
    x, ids, router = routed()
    got = of.apply(layer, dispatched(x, ids, router)).hidden_states
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for t, j in torch.nonzero(ids >= 0).tolist():
        w13, w2, b13, b2 = drawn[ids[t, j]]
        pairs = w13.dense @ x[t].double() + b13
        gate, up = pairs[0::2].clamp(max=LIMIT), pairs[1::2].clamp(-LIMIT, LIMIT)
        expected[t] += router[t, j] * (w2.dense @ ((up + 1) * gate * torch.sigmoid(ALPHA * gate)) + b2)
    assert (got.double() - expected).norm() < 0.01 * expected.norm()


def test_biases_of_gpt_oss_move_with_their_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang makes them in bfloat16 whatever the model's dtype, and moves them as parameters of the layer."""
    of, layer = gpt_oss(monkeypatch, params_dtype=torch.float16, **OSS)
    for parameter in layer.parameters():
        parameter.data.fill_(1)
    of.process_weights_after_loading(layer)
    held = layer.w4gemm_experts.experts
    for product, of_product in ((held.gate_up, layer.w13_weight_bias), (held.down, layer.w2_weight_bias)):
        assert product.bias.dtype == torch.float16 and product.bias.data_ptr() == of_product.data_ptr()


def test_gpt_oss_that_cannot_be_packed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are routed for our runner already."""
    of, layer = gpt_oss(monkeypatch, **OSS)
    for parameter in layer.parameters():
        parameter.data.fill_(1)
    layer.w2_weight_scale.data[1, 0, 0] = 255  # NaN
    with pytest.raises(ValueError, match="W4GEMM_SGLANG=off leaves them to SGLang"):
        of.process_weights_after_loading(layer)


def test_other_mxfp4_keeps_sglangs_runner(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "sglang.srt.w4gemm"):
        of, layer = gpt_oss(monkeypatch)
    assert "they have biases" in caplog.text
    assert of.get_moe_runner_backend(layer).value == "triton_kernel"
    refused(of, layer, caplog, experts)


SITU = {"activation": "situ", "gemm1_alpha": 4.0, "gemm1_clamp_limit": 25.0}


@pytest.mark.parametrize(
    ("name", "facts", "activation", "fp8"),
    [
        ("mxfp4.Mxfp4MoEMethod", SITU, "situ_mul", False),  # Kimi-K3
        ("mxfp4.Mxfp4MoEMethod", {}, "silu_mul", False),  # others of compressed-tensors
        ("mxfp4_marlin_moe.Mxfp4MarlinMoEMethod", {"swiglu_limit": 10.0}, "silu_mul(limit=10)", False),  # DeepSeek-V4
        ("mxfp4_marlin_moe.Mxfp4MarlinMoEMethod", {"swiglu_limit": 10.0}, "silu_mul(limit=10)", True),
    ],
)
def test_experts_of_mxfp4_in_halves(
    name: str, facts: dict[str, Any], activation: str, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V4's router has multiplied its weights by the model's factor; the runner multiplies others'."""
    monkeypatch.setenv("W4GEMM_MXFP4", "fp8" if fp8 else "auto")
    runs(monkeypatch, "triton_kernel")
    deepseek = name.startswith("mxfp4_marlin")
    of = method(name, *([SimpleNamespace(process_weights_after_loading=None)] if deepseek else []), "model.layers.0")
    monkeypatch.setattr("sglang_layers.HIDDEN", 256)  # SGLang pads DeepSeek-V4's to 256
    layer = experts_layer(of, 128, routed_scaling_factor=2.5, **facts)
    of.create_moe_runner(layer, layer.moe_runner_config)
    layer.should_fuse_routed_scaling_factor_in_topk = deepseek
    if SOURCES:
        fused = resolved("sglang.srt.layers.moe.fused_moe_triton.layer._fuses_routed_scaling_factor_in_topk")
        assert fused(of, of.get_moe_runner_backend(layer)) == deepseek
    drawn = [(Floats("mxfp4", 20 + e, 256, 256), Floats("mxfp4", 40 + e, 256, 128)) for e in range(EXPERTS)]
    for e, pair in enumerate(drawn):
        for product, numbers in zip(("w13", "w2"), pair, strict=True):
            codes, scales = getattr(layer, f"{product}_weight"), f"{product}_weight_scale{'_inv' * deepseek}"
            codes.data[e] = numbers.codes.view(codes.dtype)
            getattr(layer, scales).data.view(torch.uint8)[e] = numbers.scales.view(torch.uint8)
    of.process_weights_after_loading(layer)
    held = layer.w4gemm_experts.experts
    assert held.activation == activation and (held.activations == "fp8") == fp8
    _, ids, router = routed()
    x = torch.randn(4, 256).bfloat16() / 4
    got = of.apply(layer, dispatched(x, ids, router)).hidden_states
    expected = exact(x, ids, router, drawn, activation) * (1 if deepseek else 2.5)
    assert (got.double() - expected).norm() < (0.06 if fp8 else 0.01) * expected.norm()


def test_experts_of_nvfp4_without_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nemotron 3's, beside fp8 x by choice."""
    monkeypatch.setenv("W4GEMM_NVFP4", "fp8")
    of = method("modelopt_quant.ModelOptNvFp4FusedMoEMethod", config())
    layer = experts_layer(of, activation="relu2", is_gated=False)
    width = layer.intermediate_size_per_partition
    for leaf in ("weight", "weight_scale"):  # as SGLang makes them without gates
        held = getattr(layer, f"w13_{leaf}")
        held.data = held.data[:, :width].clone()
    layer.w13_weight_scale_2.data = layer.w13_weight_scale_2.data.reshape(EXPERTS, -1)[:, 0].clone()
    of.create_moe_runner(layer, layer.moe_runner_config)
    drawn = [
        (Floats("nvfp4", 20 + e, width, HIDDEN, (width,)), Floats("nvfp4", 40 + e, HIDDEN, width, (HIDDEN,)))
        for e in range(EXPERTS)
    ]
    fill_experts(layer, drawn, Floats.modelopt)
    of.process_weights_after_loading(layer)
    held = layer.w4gemm_experts.experts
    assert held.activation == "relu2" and str(held.gate_up.weight.format) == "e2m1_g16_e4m3"
    x, ids, router = routed()
    got = of.apply(layer, dispatched(x, ids, router)).hidden_states
    expected = exact(x, ids, router, drawn, "relu2")
    assert (got.double() - expected).norm() < 0.08 * expected.norm()


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_fp8_beside_16_bit_activations(strategy: str) -> None:
    """With a scale for each row, or for each part of a merged layer."""
    scheme = resolved(f"{QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsW8A16Fp8")(strategy, False)
    layer: Any = created(scheme)
    layer.params_dtype = torch.bfloat16
    layer.weight.data.copy_(torch.randn(N, K))
    layer.weight_scale.data.uniform_(0.01, 0.02)
    each_row = layer.weight_scale.data.view(-1, 1)
    if strategy == "tensor":
        each_row = each_row.repeat_interleave(torch.tensor(layer.logical_widths), 0)
    dense = layer.weight.data.double() * each_row
    scheme.process_weights_after_loading(layer)
    assert not {"weight", "weight_scale"} & packed(layer).keys()
    x, bias = torch.randn(5, K).bfloat16(), torch.randn(N).bfloat16()
    product = x.double() @ dense.T + bias.double()
    assert (scheme.apply_weights(layer, x, bias).double() - product).norm() < 0.004 * product.norm()


def test_fp8_that_is_left_to_sglang(caplog: pytest.LogCaptureFixture) -> None:
    """Codes that are no numbers."""
    scheme = resolved(f"{QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsW8A16Fp8")("channel", False)
    layer: Any = created(scheme)
    layer.params_dtype = torch.bfloat16
    layer.weight.data.copy_(torch.randn(N, K))
    layer.weight.data.view(torch.uint8)[3, 3] = 0x7F
    layer.weight_scale.data.fill_(0.01)
    assert "codes: " in refused(scheme, layer, caplog)


# --- MXFP8 -----------------------------------------------------------------------------------------------------------


def mxfp8(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> Any:
    """SGLang's config of MXFP8, as on Hopper."""
    if SOURCES:
        backend = resolved(f"{QUANTIZATION}.fp8_utils.Mxfp8DenseGemmBackend").UNSUPPORTED
        monkeypatch.setattr(f"{QUANTIZATION}.fp8.resolve_mxfp8_dense_gemm_backend", lambda: backend)
        everywhere(monkeypatch, "dispatch_w8a8_mxfp8_linear", lambda: None)
    settings = {"is_checkpoint_fp8_serialized": True, "use_mxfp8": True} | facts
    return resolved(f"{QUANTIZATION}.fp8.Fp8Config")(**settings)


def test_mxfp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang refuses such a model on Hopper, by the config's compute capability."""
    quantization = mxfp8(monkeypatch)
    assert quantization.get_min_capability() == 80
    of = resolved(f"{QUANTIZATION}.fp8.Fp8LinearMethod")(quantization)
    layer: Any = created(of)
    layer.params_dtype = torch.bfloat16
    codes, exponents, *_ = random_components(WeightFormat.parse("mxfp8"), N, K, 3)
    layer.weight.data.copy_(codes.view(torch.float8_e4m3fn))
    layer.weight_scale_inv.data.copy_(exponents.view(torch.uint8))
    of.process_weights_after_loading(layer)
    (w,) = layer.w4gemm_weight
    assert torch.equal(w.dequantize(), QuantizedWeight.from_codes("mxfp8", codes, exponents).dequantize())
    x, bias = torch.randn(5, K).bfloat16(), torch.randn(N).bfloat16()
    assert torch.equal(of.apply(layer, x, bias), linear(x, w, bias))
    never: Any = created(of)
    never.params_dtype = torch.bfloat16
    never.weight.data.copy_(torch.full((N, K), torch.nan))
    never.weight_scale_inv.data.copy_(exponents.view(torch.uint8))
    with pytest.raises(ValueError, match="w4gemm cannot run linear layers in MXFP8, and neither can SGLang: codes"):
        of.process_weights_after_loading(never)


def test_fp8_and_experts_are_sglangs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    online = mxfp8(monkeypatch, is_checkpoint_fp8_serialized=False)
    assert online.get_min_capability() == 100
    if not SOURCES:
        with pytest.raises(
            ValueError, match="mlp.experts: experts in MXFP8 need compute capability 10.0, and this GPU"
        ):
            mxfp8(monkeypatch).get_quant_method(torch.nn.Module(), "mlp.experts")
        fp8 = resolved(f"{QUANTIZATION}.fp8.Fp8Config")(True)
        of = resolved(f"{QUANTIZATION}.fp8.Fp8LinearMethod")(fp8)
        of.process_weights_after_loading(layer := created(of))
        of.apply(layer, torch.zeros(1, K))
        assert of.asked == ["process", "apply"] and not caplog.text


def test_mxfp8_that_sglang_converts(monkeypatch: pytest.MonkeyPatch) -> None:
    """To blocks of fp8, which it multiplies on Hopper: MiniMax-M3's."""
    quantization = mxfp8(monkeypatch)
    quantization.convert_mxfp8_to_block_fp8 = True
    of = resolved(f"{QUANTIZATION}.fp8.Fp8LinearMethod")(quantization)
    layer = created(of)
    (scheme,) = (scheme for scheme in dense.SCHEMES if scheme.kind == "linear layers in MXFP8")
    asked: list[Any] = []
    dense.convert(scheme, lambda *args: asked.append(args), of, layer)
    assert asked == [(of, layer)] and not scheme.takes(of)
    if not SOURCES:
        quantization.get_quant_method(torch.nn.Module(), "mlp.experts")
