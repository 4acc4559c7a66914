"""AutoRound's layers in SGLang, with schemes of GPTQ and AWQ: with ``SGLANG_SOURCES``, see sglang_sources.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_layers import (
    EXPERTS,
    GROUP,
    HIDDEN,
    QUANTIZATION,
    SOURCES,
    WIDTH,
    Drawn,
    K,
    dispatched,
    everywhere,
    exact,
    experts_layer,
    fill_experts,
    on_hopper,
    registered,
    resolved,
)

if not SOURCES:
    pytest.skip("SGLANG_SOURCES names no sources of SGLang", allow_module_level=True)

__all__ = ["on_hopper", "registered"]
STORED = {"auto_gptq": Drawn.gptq, "auto_awq": Drawn.awq}


def auto_round(packing: str, for_marlin: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's config. for_marlin: SGLang finds that Marlin could run the layers."""
    for name in ("check_marlin_supported", "check_moe_marlin_supports_layer"):
        everywhere(monkeypatch, name, lambda *sizes, **others: for_marlin)
    everywhere(monkeypatch, "verify_marlin_supported", lambda *sizes, **others: None)
    facts = {"bits": 4, "group_size": GROUP, "sym": packing == "auto_gptq", "packing_format": f"auto_round:{packing}"}
    return resolved(f"{QUANTIZATION}.auto_round.AutoRoundConfig").from_config(facts)


@pytest.mark.parametrize("for_marlin", [True, False], ids=["marlin", ""])
@pytest.mark.parametrize("packing", STORED)
def test_linear_layers(packing: str, for_marlin: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, config = (64, 96), auto_round(packing, for_marlin, monkeypatch)
    made = {"params_dtype": torch.bfloat16, "quant_config": config, "parallel_group": "replicated"}
    layer = resolved("sglang.srt.layers.linear.MergedColumnParallelLinear")(
        K, list(sizes), bias=False, prefix="model.layers.0.mlp.gate_up_proj", **made
    )
    drawn = [Drawn(i, n, K, packing == "auto_awq") for i, n in enumerate(sizes)]
    for i, each in enumerate(drawn):
        for name, t in STORED[packing](each).items():
            parameter = dict(layer.named_parameters())[name]
            parameter.weight_loader(parameter, t, i)
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(layer.w4gemm_weight[0].dequantize(torch.float64), torch.cat([each.dense for each in drawn]))
    x = torch.randn(3, K).bfloat16()
    expected = x.double() @ torch.cat([each.dense for each in drawn]).T
    assert (layer.quant_method.apply(layer, x).double() - expected).norm() < 0.004 * expected.norm()


@pytest.mark.parametrize("packing", STORED)
def test_experts(packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, zero = resolved("sglang.srt.layers.moe.fused_moe_triton.FusedMoE"), packing == "auto_awq"
    fused = cls.__new__(cls)
    torch.nn.Module.__init__(fused)
    method = auto_round(packing, True, monkeypatch).get_quant_method(fused, "model.layers.0.mlp.experts")
    scheme = method.quant_config.get_moe_scheme(fused)
    layer = experts_layer(scheme)
    method.create_moe_runner(layer, layer.moe_runner_config)
    drawn = [(Drawn(20 + e, 2 * WIDTH, HIDDEN, zero), Drawn(40 + e, HIDDEN, WIDTH, zero)) for e in range(EXPERTS)]
    fill_experts(layer, drawn, STORED[packing])
    method.process_weights_after_loading(layer)
    assert layer.w4gemm_experts.experts.gate_up.weight.format.has_zero == zero
    x, router = torch.randn(4, HIDDEN).bfloat16() / 4, torch.rand(4, 2)
    ids = torch.tensor([[0, 3], [1, 2], [3, 3], [0, 1]], dtype=torch.int32)
    result, expected = method.apply(layer, dispatched(x, ids, router)).hidden_states, exact(x, ids, router, drawn)
    assert (result.double() - expected).norm() < 0.01 * expected.norm()
