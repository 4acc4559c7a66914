"""The benchmark of a whole layer of experts: both layers compute the same, as far as a CPU can tell."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import experts
from bench.peers import flashinfer


@pytest.mark.parametrize("limit", [7.0, 0.5])
def test_both_layers(limit):
    sizes = experts.Sizes(experts=6, top_k=2, hidden=96, intermediate=64, limit=limit)
    products = experts.drawn_products(sizes, "cpu")
    ours, theirs = experts.our_layer(sizes, products, "w4a16"), experts.their_layer(sizes, products, torch.float32)
    ours.gate_up.bias.data, ours.down.bias.data = (p.bias.float() for p in products)
    for routing in ("uniform", "zipf"):
        given = experts.draw(sizes, 20, routing, 1, "cpu", torch.float32)
        wanted = experts.exact(theirs, given)
        assert wanted.std() > 0.05
        with torch.no_grad():
            for layer in (ours, experts.peer(theirs, "eager"), experts.peer(theirs, "batched_mm")):
                assert experts.relative(layer(*given), wanted) < 1e-5
            quantized = experts.our_layer(sizes, products, "w4a8")
            given = experts.draw(sizes, 20, routing, 1, "cpu", torch.bfloat16)
            assert 1e-3 < experts.relative(quantized(*given), experts.exact(theirs, given)) < 5e-2


def test_a_line_names_what_is_faster():
    rows = [
        {"impl": "w4gemm", "work": "w4a16_experts", "us_p50": 10.0, "rel_error": 0.003},
        {"impl": "transformers_grouped_mm", "work": "w4a16_experts", "us_p50": 25.0, "rel_error": 0.003},
    ]
    assert experts.line("one", rows).startswith(
        "one: best peer / w4gemm 2.50; w4gemm w4a16_experts 10.0 us (error 0.0030)"
    )


def test_flashinfers_rows_are_ups_then_gates_padded_with_zeros():
    sizes = experts.Sizes(experts=2, top_k=1, hidden=160, intermediate=96)
    gate_up, down = experts.drawn_products(sizes, "cpu")
    rows = flashinfer.padded(*gate_up, gated=True)
    assert rows.codes.shape == (2, 256, 128) and rows.scales.shape == (2, 256, 8) and rows.bias.shape == (2, 256)
    blocks = rows.codes.unflatten(2, (8, 16))
    assert torch.equal(blocks[:, :96, :5], gate_up.blocks[:, 1::2]) and not blocks[:, 96:128].any()
    assert torch.equal(blocks[:, 128:224, :5], gate_up.blocks[:, ::2]) and not blocks[:, :, 5:].any()
    assert torch.equal(rows.scales[:, 128:224, :5], gate_up.scales[:, ::2]) and (rows.scales[:, :, 5:] == 127).all()
    assert torch.equal(rows.bias[:, :96], gate_up.bias[:, 1::2]) and not rows.bias[:, 224:].any()
    rows = flashinfer.padded(*down, gated=False)
    assert rows.codes.shape == (2, 256, 64) and torch.equal(rows.bias[:, :160], down.bias)
