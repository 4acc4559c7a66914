"""Linear layers that vLLM quantizes while it loads a dense checkpoint, on kernels of the plugin: with ``VLLM_SOURCES``,
see vllm_sources.py."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if "VLLM_SOURCES" not in os.environ:
    pytest.skip("VLLM_SOURCES does not name vLLM's sources", allow_module_level=True)

import vllm_sources
from w4gemm.checkpoints import packed_floats
from w4gemm.checkpoints.fp8_folder import ScaleBlock, numbers
from w4gemm.checkpoints.packed_floats import MXFP4
from w4gemm.core.formats import WeightFormat

vllm_sources.install(os.environ["VLLM_SOURCES"].split(os.pathsep))
online = pytest.importorskip("vllm.model_executor.layers.quantization.online.mxfp4", reason="this vLLM has no MXFP4")

N, K = 128, 256
FORMATS = {
    "mxfp4": ("W4GemmMxFp4LinearKernel", "mxfp4", "mxfp4_quantize"),
    "mxfp8": ("W4GemmMxFp8LinearKernel", "mxfp8", "mxfp8_e4m3_quantize"),
}
"""The kernel that vLLM must choose, vLLM's module of the method, and its function that quantizes, on GPUs alone."""


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("W4GEMM_VLLM", "on")
    for part in ("floats", "fp8"):
        importlib.import_module(f"w4gemm.integrations.vllm.{part}").install()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


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
