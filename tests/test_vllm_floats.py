"""The vLLM plugin's linear layers of 4-bit floats, against a stub of vLLM's interfaces, on the CPU."""

from __future__ import annotations

import logging
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import w4gemm
from vllm_parts import part_fixture
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations.engines import engine
from w4gemm.tuning.random_weight import random_components

N, K = 96, 256
FACTOR = 1 / 3072

floats = part_fixture("floats")


def made(format: str, dtype: torch.dtype = torch.bfloat16, k: int = K, bias: bool = False) -> tuple[Any, Any, Any]:
    """A kernel as vLLM chooses it, a layer as vLLM's scheme leaves it to the kernel, and the weight that this is."""
    from vllm.model_executor.kernels.linear import init_mxfp4_linear_kernel, init_nvfp4_linear_kernel

    kernel = init_nvfp4_linear_kernel() if format == "nvfp4" else init_mxfp4_linear_kernel()
    return kernel, *loaded(format, dtype, k, bias)


def loaded(format: str, dtype: torch.dtype = torch.bfloat16, k: int = K, bias: bool = False) -> tuple[Any, Any]:
    """A layer as vLLM's scheme leaves it to a kernel, and the weight that this is."""
    codes, scales, *_ = random_components(WeightFormat.parse(format), N, k, 3)
    layer: Any = torch.nn.Module()
    layer.params_dtype = dtype

    def keep(name: str, t: torch.Tensor) -> None:
        setattr(layer, name, torch.nn.Parameter(t, requires_grad=False))

    if codes.max() < 16:
        keep("weight", codes[:, 0::2] | codes[:, 1::2] << 4)
    else:  # four codes in three bytes
        a, b, c, d = codes.view(N, -1, 4).int().unbind(2)
        keep("weight", torch.stack([a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2], 2).to(torch.uint8).flatten(1))
    if format == "nvfp4":
        keep("weight_scale", scales)
        for name in ("weight_global_scale", "input_global_scale", "input_global_scale_inv", "alpha"):
            keep(name, torch.tensor(FACTOR))
        w = w4gemm.QuantizedWeight.from_codes(format, codes, scales, channels=torch.full((N,), FACTOR))
    else:
        keep("weight_scale", scales.view(torch.uint8))
        w = w4gemm.QuantizedWeight.from_codes(format, codes, scales)
    if bias:
        keep("bias", torch.randn(N, dtype=dtype))
    return layer, w.repack()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_layer_is_the_weight(floats: ModuleType, format: str, dtype: torch.dtype, bias: bool) -> None:
    kernel, layer, w = made(format, dtype, bias=bias)
    assert type(kernel).__name__.startswith("W4Gemm")
    kernel.process_weights_after_loading(layer)
    x = torch.randn(3, 5, K, dtype=dtype)
    arguments = layer.bias if bias else None
    d = kernel.apply_weights(layer, x, arguments)
    assert d.shape == (3, 5, N) and d.dtype == dtype
    assert torch.equal(d, w4gemm.linear(x, w, None if arguments is None else arguments.detach()))
    assert layer.weight.dtype == torch.uint8 and not layer.weight.numel()
    held = {name for name, _ in layer.named_parameters()} - {"weight"}
    assert held == {"w4gemm_packed0", "w4gemm_packed1", *(["w4gemm_packed2"] * (format == "nvfp4")), *(["bias"] * bias)}


@pytest.mark.parametrize("divides", [False, True], ids=["weight_scale_2", "weight_global_scale"])
def test_parts_of_a_merged_layer_keep_their_factors(floats: ModuleType, divides: bool) -> None:
    """vLLM's methods keep the largest of what multiplies, or divides, each part."""
    kernel, layer, w = made("nvfp4")
    layer.logical_widths, factors = [N - 32, 32], torch.tensor([1 / 4096, 1 / 1024])
    name = "weight_global_scale" if divides else "weight_scale_2"
    setattr(layer, name, torch.nn.Parameter(1 / factors if divides else factors, requires_grad=False))
    kernel.note(layer)
    if not divides:
        del layer.weight_scale_2
    layer.weight_global_scale = torch.nn.Parameter(factors.max(), requires_grad=False)
    kernel.process_weights_after_loading(layer)
    each = factors.repeat_interleave(torch.tensor(layer.logical_widths))[:, None]
    dense = w.dequantize(torch.float32) / FACTOR * each
    torch.testing.assert_close(kernel.weight(layer._parameters).dequantize(torch.float32), dense)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_fp8_activations_by_choice(
    floats: ModuleType, format: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(f"W4GEMM_{format.upper()}", "fp8")
    kernel, layer, w = made(format, bias=True)
    kernel.process_weights_after_loading(layer)
    x = torch.randn(7, K, dtype=torch.bfloat16)
    x8, scale = w4gemm.quantize_activations(x)
    folded, _ = w4gemm.fold_scales(w)
    d = kernel.apply_weights(layer, x, layer.bias)
    assert torch.equal(d, w4gemm.linear(x8, folded, layer.bias.detach(), token_scale=scale, out_dtype=x.dtype))
    monkeypatch.setenv(f"W4GEMM_{format.upper()}", "int8")
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        assert not type(kernel).is_supported()[0]
    assert f"W4GEMM_{format.upper()}: wanted auto, fp8 or 16bit, got 'int8'" in caplog.text


@pytest.mark.parametrize(
    ("by_token", "static", "activations"), [(True, False, "fp8"), (False, False, None), (False, True, None)]
)
def test_fp8_activations_that_a_checkpoint_wants(
    floats: ModuleType, monkeypatch: pytest.MonkeyPatch, by_token: bool, static: bool, activations: str | None
) -> None:
    """From vLLM 0.33 on it asks kernels of MXFP4 for activations, which are in MXFP4 where the checkpoint says no more.
    Ours take none with scales of the checkpoint's, and 16 bits where scales are those of groups of columns."""
    base, ours = floats.MxFp4LinearKernel, floats.W4GemmMxFp4LinearKernel
    monkeypatch.setattr(base, "_supports_quant_scheme", classmethod(lambda cls, w, x: x is None), raising=False)
    scale = SimpleNamespace(static=static, group_shape=SimpleNamespace(is_per_token=lambda: by_token))
    key = SimpleNamespace(dtype=torch.float8_e4m3fn, scale=scale)
    assert ours._supports_quant_scheme("mxfp4", key) is not static
    for value, expected in (("auto", activations), ("16bit", None)):
        monkeypatch.setenv("W4GEMM_MXFP4", value)
        assert ours(SimpleNamespace(activation_quant_key=key)).activations == expected
    monkeypatch.setattr(floats.takeover, "activations_asked_for", lambda layers: f"{layers} of the user's")
    assert ours._supports_quant_scheme("mxfp4", key) is by_token
    assert not ours._supports_quant_scheme("mxfp4", None)


def test_a_layer_is_traced_whole(floats: ModuleType) -> None:
    kernel, layer, _ = made("nvfp4")
    kernel.process_weights_after_loading(layer)
    torch._dynamo.reset()
    traced = torch.compile(lambda x: kernel.apply_weights(layer, x), fullgraph=True, dynamic=True, backend="eager")
    with torch.inference_mode():
        for m in (7, 12):
            x = torch.randn(m, K, dtype=torch.bfloat16)
            assert torch.equal(traced(x), kernel.apply_weights(layer, x))


def test_installed_once_and_first(floats: ModuleType) -> None:
    from vllm.model_executor.kernels.linear import _POSSIBLE_MXFP4_KERNELS, _POSSIBLE_NVFP4_KERNELS
    from vllm.platforms import PlatformEnum

    floats.install()
    assert _POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA] == [floats.W4GemmNvFp4LinearKernel]
    assert _POSSIBLE_MXFP4_KERNELS[PlatformEnum.CUDA] == [floats.W4GemmMxFp4LinearKernel]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a_layer_that_cannot_be_packed_runs_on_vllms_kernel(
    floats: ModuleType, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    loaded: list[Any] = []

    class Marlin:
        def __init__(self, config: Any) -> None:
            self.config = config

        is_supported = can_implement = staticmethod(lambda config=None: (True, None))
        process_weights_after_loading = staticmethod(loaded.append)
        apply_weights = staticmethod(lambda layer, x, bias=None: x + 1)

    kernel, layer, _ = made(format)
    kernel.possible.append(type("Refused", (Marlin,), {"is_supported": staticmethod(lambda: (False, "Blackwell"))}))
    if format == "mxfp4":  # NaN
        layer.weight_scale.data.fill_(255)
        kernel.config.activation_quant_key = "of 4 bits"  # as from vLLM 0.33 on
        schemes = {"_supports_quant_scheme": staticmethod(lambda weight, activation: activation == "of 8 bits")}
        kernel.possible.append(type("OtherActivations", (Marlin,), schemes))
    else:
        layer.weight_global_scale.data.fill_(float("inf"))
    kernel.possible.append(Marlin)
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        kernel.process_weights_after_loading(layer)
    assert type(kernel.vllm_kernel) is Marlin and loaded == [layer]
    assert "w4gemm leaves linear layers of 4-bit floats to vLLM's own kernels" in caplog.text
    assert torch.equal(kernel.apply_weights(layer, torch.ones(2)), torch.full((2,), 2.0))
    made_anew = made(format)[1]  # numbers that could be packed
    kernel.process_weights_after_loading(made_anew)
    assert loaded == [layer, made_anew] and not hasattr(kernel, "packed")


def weight_only() -> tuple[Any, Any]:
    """A layer of compressed-tensors NVFP4 for 16-bit activations that vLLM has loaded, and the weight that it is."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    config: Any = get_quantization_config("compressed-tensors")
    layer, w = loaded("nvfp4")
    for name in ("input_global_scale", "input_global_scale_inv", "alpha"):
        delattr(layer, name)
    made = torch.nn.Module()
    method = config({"Linear": {"input_activations": None}}).get_quant_method(made, "model.layers.0.mlp.down_proj")
    method.create_weights(made, K, [N], K, N, torch.bfloat16)
    layer.scheme = made.scheme
    layer.scheme.kernel.process_weights_after_loading(layer)
    return layer, w


@pytest.mark.parametrize("named", ["MarlinNvFp4LinearKernel", "EmulationNvFp4LinearKernel"])
def test_our_kernel_takes_the_place_of_one_that_vllm_names(
    floats: ModuleType, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """vLLM emulates NVFP4 with VLLM_BATCH_INVARIANT, whatever --linear-backend says."""
    from vllm.model_executor.kernels import linear

    monkeypatch.setattr(linear, "MarlinNvFp4LinearKernel", type(named, (linear.MarlinNvFp4LinearKernel,), {}))
    layer, w = weight_only()
    assert type(layer.scheme.kernel) is floats.W4GemmNvFp4LinearKernel
    x = torch.randn(3, K, dtype=torch.bfloat16)
    assert torch.equal(layer.scheme.kernel.apply_weights(layer, x), w4gemm.linear(x, w))


def test_a_scheme_that_another_program_has_replaced(
    floats: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As verl replaces vLLM's: the kernel of the layer is then never asked to pack it."""
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A4Fp4

    config: Any = get_quantization_config("compressed-tensors")
    for replaced in (False, True):
        if replaced:
            process = lambda self, layer: None  # noqa: E731
            monkeypatch.setattr(CompressedTensorsW4A4Fp4, "process_weights_after_loading", process, raising=False)
        layer: Any = torch.nn.Module()
        with caplog.at_level(logging.INFO, "vllm.w4gemm"):
            method = config({"Linear": {"input_activations": None}}).get_quant_method(layer, "mlp.down_proj")
            method.create_weights(layer, K, [N], K, N, torch.bfloat16)
        assert isinstance(layer.scheme.kernel, floats.W4GemmNvFp4LinearKernel) != replaced
    assert "has replaced their CompressedTensorsW4A4Fp4.process_weights_after_loading" in caplog.text


def test_a_layer_that_cannot_be_packed_runs_on_the_kernel_that_vllm_named(floats: ModuleType) -> None:
    layer, _ = weight_only()
    kernel = floats.W4GemmNvFp4LinearKernel(None, named=layer.scheme.kernel.left)
    layer, _ = loaded("nvfp4")
    layer.weight_global_scale.data.fill_(float("inf"))
    kernel.process_weights_after_loading(layer)
    assert type(kernel.vllm_kernel).__name__ == "MarlinNvFp4LinearKernel" and layer.runs_on_vllm


class QuarkOCP_MX:
    """Quark's scheme as vLLM 0.26 has it where it emulates: no kernel runs its layers."""

    def __init__(self, **changed: Any) -> None:
        vars(self).update(
            {"emulate": True, "dynamic_mxfp4_quant": False, "weight_dtype": "mxfp4", "input_dtype": "mxfp4"}
        )
        vars(self).update(changed)
        self.made: list[Any] = []

    def create_weights(self, layer: Any, **sizes: Any) -> None:
        self.made.append((layer, sizes))

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.is_emulated = True

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x + 1


def of_quark(floats: ModuleType, scheme: Any, format: str = "mxfp4") -> tuple[Any, Any]:
    """A layer in Quark's MXFP4 or MXFP6 with the scheme that it gets for vLLM's, and the weight that it is."""
    from vllm.model_executor.layers.linear import LinearMethodBase

    layer, w = loaded(format)
    layer.scheme, method = scheme, LinearMethodBase()
    assert floats.replace_emulation(method, layer) is method
    return layer, w


@pytest.mark.parametrize(
    ("element", "format"), [("mxfp4", "mxfp4"), ("mxfp6_e2m3", "mxfp6"), ("mxfp6_e3m2", "e3m2_g32_e8m0")]
)
def test_a_layer_that_vllm_emulates_gets_our_kernel(floats: ModuleType, element: str, format: str) -> None:
    scheme = QuarkOCP_MX(weight_dtype=element)
    layer, w = of_quark(floats, scheme, format)
    layer.scheme.create_weights(layer, input_size=K)
    assert scheme.made == [(layer, {"input_size": K})]
    layer.scheme.process_weights_after_loading(layer)
    x, bias = torch.randn(3, K, dtype=torch.bfloat16), torch.randn(N, dtype=torch.bfloat16)
    assert torch.equal(layer.scheme.apply_weights(layer, x, bias=bias), w4gemm.linear(x, w, bias=bias))


def test_a_layer_that_vllm_emulates_and_we_cannot_pack_is_emulated(floats: ModuleType) -> None:
    layer, _ = of_quark(floats, QuarkOCP_MX())
    layer.weight_scale.data[0, 0] = 255  # NaN
    layer.scheme.process_weights_after_loading(layer)
    assert layer.is_emulated and torch.equal(layer.scheme.apply_weights(layer, torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize(
    "changed",
    [{"emulate": False}, {"dynamic_mxfp4_quant": True}, {"input_dtype": "fp8"}],
)
def test_other_schemes_of_quark_stay(floats: ModuleType, changed: dict[str, Any]) -> None:
    scheme = QuarkOCP_MX(**changed)
    assert of_quark(floats, scheme)[0].scheme is scheme


@pytest.mark.parametrize(
    ("backend", "own", "disabled", "said"),
    [
        ("marlin", None, [], "--linear-backend marlin was asked for"),
        ("auto", {"nvfp4_w4a16": "humming"}, [], "--linear-backend humming was asked for"),
        ("auto", {"mxfp4": "humming"}, ["W4GemmNvFp4LinearKernel"], ""),
    ],
)
def test_a_kernel_that_was_asked_for_stays(
    floats: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    backend: str,
    own: dict[str, str] | None,
    disabled: list[str],
    said: str,
) -> None:
    settings = SimpleNamespace(linear_backend=backend, linear_backend_per_quant=own)
    vllm = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=9), kernel_config=settings)
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: vllm)
    monkeypatch.setattr("vllm.envs.VLLM_DISABLED_KERNELS", disabled)
    engine._refuse.cache_clear()
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        layer, _ = weight_only()
    assert type(layer.scheme.kernel).__name__ == "MarlinNvFp4LinearKernel" and layer.runs_on_vllm
    assert said in caplog.text and bool(said) == bool(caplog.text)


def test_other_gpus_keep_vllms_kernels(floats: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "get_device_capability", classmethod(lambda cls: (10, 0)))
    supported, reason = floats.W4GemmNvFp4LinearKernel.is_supported()
    assert not supported and "W4GEMM_VLLM=on takes over" in reason


def test_plans_are_ready_when_the_last_layer_is_loaded(
    floats: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=9))
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: engine)
    first, second = made("nvfp4"), made("mxfp4", bias=True)
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        first[0].process_weights_after_loading(first[1])
        assert not caplog.records
        second[0].process_weights_after_loading(second[1])
    assert "w4gemm runs 2 linear layers" in caplog.text
    monkeypatch.setattr("w4gemm.choice.plan_cache.choose", lambda *a: pytest.fail("a plan was chosen"))
    for kernel, layer, _ in (first, second):
        for m in (1, 8, 9):
            kernel.apply_weights(layer, torch.randn(m, K, dtype=torch.bfloat16), getattr(layer, "bias", None))
