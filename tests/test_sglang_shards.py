"""The SGLang plugin's merged layers of several formats.

Runs on a stub of SGLang (sglang_stub/); with ``SGLANG_SOURCES`` on its sources (sglang_sources.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_layers import GROUP, QUANTIZATION, Drawn, K, on_hopper, registered, resolved
from w4gemm.integrations.sglang.takeover import REFUSES_UPDATES

__all__ = ["on_hopper", "registered"]
SIZES = (64, 96)
PREFIX = "model.layers.0.mlp.gate_up_proj"
UP = r"+:.*\.up_proj"
CASES = {
    "4 and 8 bits": ({UP: {"bits": 8}}, (4, 8), (False, False)),
    "4 and 2 bits": ({UP: {"bits": 2}}, (4, 2), (False, False)),
    "with zero points": ({UP: {"bits": 8}}, (4, 8), (True, True)),
}


def merged(dynamic: dict[str, Any], config: str = "GPTQConfig", bias: bool = False) -> Any:
    values: list[Any] = [4, GROUP, False, False, dynamic]
    if config == "GPTQMarlinConfig":
        values = [*values[:3], True, False, dynamic, {}]
    made = resolved(f"{QUANTIZATION}.gptq.{config}")(*values)
    layer = resolved("sglang.srt.layers.linear.MergedColumnParallelLinear")
    options = {"params_dtype": torch.bfloat16, "quant_config": made, "prefix": PREFIX, "parallel_group": "replicated"}
    return layer(K, list(SIZES), bias=bias, **options)


def load(layer: Any, drawn: list[Drawn]) -> None:
    """Send the tensors of both shards, as SGLang's models do; then have every layer processed."""
    for i, each in enumerate(drawn):
        for name, t in each.gptq().items():
            parameter = dict(layer.named_parameters())[name]
            parameter.weight_loader(parameter, t, i)
    for module in layer.modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_shards_of_several_formats(name: str, bias: bool) -> None:
    dynamic, bits, zero = CASES[name]
    layer = merged(dynamic, bias=bias)
    drawn = [Drawn(i, n, K, zero[i], bits=bits[i]) for i, n in enumerate(SIZES)]
    load(layer, drawn)
    assert [shard.w4gemm_weight[0].format.bits for shard in layer.w4gemm_shards] == list(bits)
    assert "have different formats" in getattr(layer, REFUSES_UPDATES)
    x = torch.randn(3, K).bfloat16()
    b = torch.randn(sum(SIZES)).bfloat16() if bias else None
    expected = x.double() @ torch.cat([each.dense for each in drawn]).T
    expected = expected if b is None else expected + b.double()
    assert (layer.quant_method.apply(layer, x, b).double() - expected).norm() < 0.004 * expected.norm()


def test_marlins_config_has_shards_too() -> None:
    layer = merged({UP: {"bits": 8}}, "GPTQMarlinConfig")
    drawn = [Drawn(i, n, K, False, bits=bits) for i, (n, bits) in enumerate(zip(SIZES, (4, 8), strict=True))]
    load(layer, drawn)
    for each, shard in zip(drawn, layer.w4gemm_shards, strict=True):
        assert torch.equal(shard.w4gemm_weight[0].dequantize(torch.float64), each.dense)


def test_a_shard_that_is_dense() -> None:
    """Of a dense shard there is a weight, and none of the others' tensors."""
    layer = merged({r"-:.*\.up_proj": {}})
    drawn, up = Drawn(0, SIZES[0], K, False), torch.randn(SIZES[1], K).bfloat16()
    parameters = dict(layer.named_parameters())
    for name, t in drawn.gptq().items():
        parameters[name].weight_loader(parameters[name], t, 0)
    parameters["weight"].weight_loader(parameters["weight"], up, 1)
    with pytest.raises(ValueError, match=r"mlp\.up_proj\.qweight: its format has no such tensor"):
        parameters["qweight"].weight_loader(parameters["qweight"], drawn.gptq()["qweight"], 1)
    with pytest.raises(ValueError, match="wanted a qweight of each, got one of None"):
        parameters["qweight"].weight_loader(parameters["qweight"], drawn.gptq()["qweight"])
    load(layer, [])
    x = torch.randn(3, K).bfloat16()
    expected = x.double() @ torch.cat([drawn.dense, up.double()]).T
    assert (layer.quant_method.apply(layer, x).double() - expected).norm() < 0.004 * expected.norm()


def test_layers_of_one_format_stay_merged() -> None:
    """A rule that means all shards and the merged name alike, or none of them."""
    for dynamic in ({}, {r"+:.*\.mlp\..*": {"bits": 8}}, {r"+:.*\.o_proj": {"bits": 8}}):
        assert not hasattr(merged(dynamic), "w4gemm_shards")
