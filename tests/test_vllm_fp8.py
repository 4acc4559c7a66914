"""The vLLM plugin's linear layers of 8-bit floats, against a stub of vLLM's interfaces, on the CPU."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import w4gemm
from vllm_parts import part_fixture
from w4gemm.checkpoints import open_checkpoint

N, K = 256, 256
SHAPES = {"channel": (N, 1), "block": (N // 128, K // 128), "mxfp8": (N, K // 32)}

part = part_fixture("fp8", autouse=True)


def made(kind: str, tensors: dict[str, torch.Tensor], own: Any = None) -> tuple[Any, Any]:
    """A kernel that vLLM chooses, and a layer as vLLM's scheme leaves it to the kernel. own: vLLM's next kernel."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    lists: dict[str, Any] = {"mxfp8": linear._POSSIBLE_MXFP8_KERNELS}
    possible = lists.get(kind, linear._POSSIBLE_WFP8A16_KERNELS)[PlatformEnum.CUDA]
    if own is not None:
        possible.append(own)
    kernel = possible[0](SimpleNamespace(), *([] if kind == "mxfp8" else [["weight", "weight_scale"]]))
    layer: Any = torch.nn.Module()
    layer.params_dtype, layer.logical_widths, layer.weight_block_size = torch.bfloat16, [128, N - 128], [128, 128]
    names = {"weight_scale": "weight_scale_inv"} if kind == "block" else {}
    for name, t in tensors.items():
        held = t.t() if (kind, name) == ("channel", "weight") else t
        layer.register_parameter(names.get(name, name), torch.nn.Parameter(held, requires_grad=False))
    return kernel, layer


def drawn(kind: str) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    scales = torch.rand(SHAPES[kind], generator=g) / 50
    if kind == "mxfp8":
        scales = torch.randint(118, 124, SHAPES[kind], generator=g).to(torch.uint8)
    return {"weight": torch.randn(N, K, generator=g).to(torch.float8_e4m3fn), "weight_scale": scales}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_layer_has_the_numbers_of_load(kind: str, bias: bool, tmp_path: Path) -> None:
    tensors = drawn(kind)
    save_file({f"model.layers.0.{name}": t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    w = open_checkpoint(tmp_path).weight("model.layers.0").repack()
    kernel, layer = made(kind, tensors)
    layer.bias = torch.nn.Parameter(torch.randn(N).bfloat16()) if bias else None
    kernel.process_weights_after_loading(layer)
    assert not {"weight_scale", "weight_scale_inv"} & layer._parameters.keys()
    x = torch.randn(3, 5, K, dtype=torch.bfloat16)
    d = kernel.apply_weights(layer, x, layer.bias)
    assert torch.equal(d, w4gemm.linear(x, w, None if layer.bias is None else layer.bias.detach()))


def test_a_config_without_activations_has_none_with_a_static_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A4Fp4

    def as_vllm_makes_it(scheme: Any, use_a16: bool) -> None:
        scheme.is_static_input_scheme = None

    monkeypatch.setattr(CompressedTensorsW4A4Fp4, "__init__", as_vllm_makes_it)
    config: Any = get_quantization_config("compressed-tensors")
    layer: Any = torch.nn.Module()
    config({"Linear": {"input_activations": None}}).get_quant_method(layer, "model.layers.0.mlp.down_proj")
    assert layer.scheme.is_static_input_scheme is False


def test_what_is_left_to_vllm(caplog: pytest.LogCaptureFixture) -> None:
    class Marlin(SimpleNamespace):
        is_supported = can_implement = classmethod(lambda cls, *args: (True, None))

        def __init__(self, *args: Any) -> None:
            self.process_weights_after_loading = lambda layer: None
            self.apply_weights = lambda layer, x, bias: x + 1

    def left(kind: str, tensors: dict[str, torch.Tensor], **of_layer: Any) -> str:
        caplog.clear()
        kernel, layer = made(kind, tensors, Marlin)
        vars(layer).update(of_layer)
        with caplog.at_level(logging.INFO, "vllm.w4gemm"):
            kernel.process_weights_after_loading(layer)
        assert type(kernel.vllm_kernel) is Marlin
        assert torch.equal(kernel.apply_weights(layer, torch.ones(2), None), torch.full((2,), 2.0))
        return caplog.text

    spoiled = drawn("channel")
    spoiled["weight"].view(torch.uint8)[3, 3] = 0x7F
    assert "8-bit floats with 16-bit activations to vLLM's own kernels: codes" in left("channel", spoiled)
    assert "their blocks are [128, 128] of parts [200, 56]" in left("block", drawn("block"), logical_widths=[200, 56])
    assert "their blocks are [64, 128]" in left("block", drawn("block"), weight_block_size=[64, 128])
    assert "a parameter 'offset'" in left("mxfp8", drawn("mxfp8") | {"offset": torch.zeros(N)})


def test_where_layers_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _ = made("mxfp8", drawn("mxfp8"))
    assert type(kernel).is_supported() == (True, None)
    monkeypatch.setenv("W4GEMM_VLLM", "off")
    assert type(kernel).is_supported() == (False, "W4GEMM_VLLM is off")
