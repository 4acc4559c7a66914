"""bench.between: a layer's launches compute what the layer does, and its options."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import rms_norm, silu

import w4gemm
from w4gemm.weights.random import random_weight

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import between

HIDDEN, MIDDLE, M = 256, 512, 3


@pytest.mark.parametrize("fp8", [False, True])
def test_a_layer_is_computed(fp8: bool) -> None:
    """Beside float32 products of the same weights; quantized x costs a few percent."""
    torch.manual_seed(0)
    format = w4gemm.WeightFormat.parse("int4_g128")
    sizes = (HIDDEN + 128, HIDDEN), (HIDDEN, HIDDEN), (2 * MIDDLE, HIDDEN), (HIDDEN, MIDDLE)
    activations = "fp8" if fp8 else None
    weights = between.Layer(
        *(random_weight(format, n, k, i, signed=True).repack(activations=activations) for i, (n, k) in enumerate(sizes))
    )
    hidden = between.Hidden(torch.randn(M, HIDDEN).bfloat16(), torch.randn(M, HIDDEN).bfloat16())
    got = between.Step(hidden, fp8).layer(weights)

    qkv, o, gate_up, down = (w.dequantize() for w in weights)
    wanted_residual = hidden.added.float() + hidden.residual.float()
    attended = rms_norm(wanted_residual, (HIDDEN,), eps=1e-6) @ qkv.T
    wanted_residual += attended[:, :HIDDEN] @ o.T
    gate, up = (rms_norm(wanted_residual, (HIDDEN,), eps=1e-6) @ gate_up.T).chunk(2, -1)
    wanted = silu(gate) * up @ down.T
    for given, exact in ((got.residual, wanted_residual), (got.added, wanted)):
        assert given.dtype == torch.bfloat16
        assert (given.float() - exact).norm() / exact.norm() < (0.15 if fp8 else 0.02)


def test_only_models_whose_products_are_all_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(between.WHOLE) == {"llama-3-8b", "llama-3-70b", "qwen2.5-32b"}
    with pytest.raises(SystemExit):
        between.main(["--model", "qwen2.5-72b"])
    assert "wanted some of llama-3-8b, llama-3-70b, qwen2.5-32b, got qwen2.5-72b" in capsys.readouterr().err
