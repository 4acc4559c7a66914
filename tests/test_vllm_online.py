"""Layers that vLLM quantizes while it loads a dense checkpoint, and those of DeepSeek-V4.1: with ``VLLM_SOURCES``, see
vllm_sources.py."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from test_vllm_sources import kernel_of, model_named, plugin, routed_experts, tiny  # noqa: F401 (plugin is a fixture)
from w4gemm.checkpoints import packed_floats
from w4gemm.checkpoints.fp8_folder import ScaleBlock, numbers
from w4gemm.checkpoints.packed_floats import MXFP4
from w4gemm.core.formats import WeightFormat

online = pytest.importorskip("vllm.model_executor.layers.quantization.online.mxfp4", reason="this vLLM has no MXFP4")

N, K = 128, 256
FORMATS = {
    "mxfp4": ("W4GemmMxFp4LinearKernel", "mxfp4", "mxfp4_quantize"),
    "mxfp8": ("W4GemmMxFp8LinearKernel", "mxfp8", "mxfp8_e4m3_quantize"),
}
"""The kernel that vLLM must choose, vLLM's module of the method, and its function that quantizes, on GPUs alone."""


def quantized(format: str, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a format that other numbers change; they are near none of w."""
    some = w.contiguous().view(torch.uint8)
    scales = some[:, : w.shape[1] // 32] % 8 + 120
    return (some[:, : w.shape[1] // 2].clone() if format == "mxfp4" else w.to(torch.float8_e4m3fn)), scales


def matrix(format: str, w: torch.Tensor) -> torch.Tensor:
    """What a layer multiplies by when w was quantized."""
    codes, scales = quantized(format, w)
    if format == "mxfp4":
        return packed_floats.numbers(codes, scales, MXFP4).weight().dequantize().double()
    return numbers(WeightFormat.parse("mxfp8"), codes, scales, ScaleBlock()).weight().dequantize().double()


@pytest.mark.parametrize("format", FORMATS)
def test_layers_are_quantized_while_they_load(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again, into the tensors of the first numbers."""
    from vllm.config.quantization import QuantizationConfigArgs
    from vllm.model_executor.layers.linear import RowParallelLinear
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.model_executor.model_loader.reload import layerwise

    kernel, name, quantizer = FORMATS[format]
    module = importlib.import_module(f"vllm.model_executor.layers.quantization.online.{name}")
    monkeypatch.setattr(module, quantizer, lambda w: quantized(format, w))
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    monkeypatch.setattr(fp8, "get_current_vllm_config", lambda: config)
    options: dict[str, Any] = {"quant_config": OnlineQuantizationConfig(QuantizationConfigArgs(linear=format))}
    layer = RowParallelLinear(K, N, bias=False, prefix="layers.0.mlp.down_proj", **options)
    layerwise.record_metadata_for_reloading(layer)

    def load() -> None:
        w = torch.randn(N, K)
        layer.weight.weight_loader(layer.weight, w)
        x = torch.randn(5, K)
        product = x.double() @ matrix(format, w).T
        checks.append(lambda: (layer(x)[0].double() - product).norm() < 0.004 * product.norm())

    checks: list[Any] = []
    load()
    layerwise.finalize_layerwise_processing(layer, None)
    assert type(layer.quant_method.kernel).__name__ == kernel and checks[-1]()
    places = {name: p.data_ptr() for name, p in layer.named_parameters()}
    for _ in range(2):
        layerwise.initialize_layerwise_reload(layer)
        load()
        layerwise.finalize_layerwise_reload(layer, None)
        assert checks[-1]() and not checks[-2]()
        assert {name: p.data_ptr() for name, p in layer.named_parameters()} == places


def test_experts_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from vllm.config.quantization import QuantizationConfigArgs
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    model = tiny(model_named("qwen3-30b-a3b"))
    monkeypatch.setattr(online, "select_mxfp4_moe_backend", lambda **options: (online.Mxfp4MoeBackend.EMULATION, None))
    with caplog.at_level("INFO", "vllm.w4gemm"):
        options = OnlineQuantizationConfig(QuantizationConfigArgs(moe="mxfp4"))
        layer = routed_experts(model.config, options, "model.layers.0.mlp.experts")
    assert type(layer.quant_method) is online.Mxfp4OnlineMoEMethod
    assert "vLLM quantizes them while it loads them" in caplog.text


@pytest.mark.parametrize("batches", [0, 4])
def test_linear_layers_of_deepseek_v41(batches: int) -> None:
    """In blocks of 32 x 32. vLLM multiplies batches of some by kernels of its own, which it chooses when they are
    loaded."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.model_executor.layers.quantization import get_quantization_config

    stored = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    config = get_quantization_config("deepseek_v4_fp8").from_config(stored)
    config._resolved_expert_dtype = "fp4"
    layer = ColumnParallelLinear(K, N, bias=False, quant_config=config, prefix="layers.0.attn.wo_a")
    if batches:
        layer.is_bmm, layer.bmm_batch_size = True, batches
    codes, scales = torch.randn(N, K).to(torch.float8_e4m3fn), torch.randint(120, 130, (N // 32, K // 32)).byte()
    layer.weight.weight_loader(layer.weight, codes)
    layer.weight_scale.weight_loader(layer.weight_scale, scales)
    layer.quant_method.process_weights_after_loading(layer)
    assert (kernel_of(layer) == "W4GemmMxFp8LinearKernel") == (not batches)
    if not batches:
        w = codes.double() * torch.exp2(scales.double() - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)
        x = torch.randn(5, K)
        assert (layer(x)[0].double() - x.double() @ w.T).norm() < 0.004 * (x.double() @ w.T).norm()
    else:
        assert layer.weight.shape[-2:] == (N, K) and not hasattr(layer, "w4gemm_packed0")
