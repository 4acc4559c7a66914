"""SGLang's plugin: layers of GGUF files. On a stub of SGLang, or with ``SGLANG_SOURCES`` on its sources."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from sglang_layers import QUANTIZATION, K, created, on_hopper, registered, resolved  # noqa: F401 (two are fixtures)
from test_vllm_gguf import blocks_of, dense, gguf
from w4gemm.integrations.engines import engine

SIZES = [64, 128]
"""Rows of the parts that ``created`` makes."""


def method(config: Any = None) -> Any:
    return resolved(f"{QUANTIZATION}.gguf.GGUFLinearMethod")(config)


def load(layer: Any, parts: dict[Any, tuple[str, torch.Tensor]]) -> Any:
    """Fill a layer as SGLang's loaders do."""
    stored, types = layer.qweight, layer.qweight_type
    for shard, (type, blocks) in parts.items():
        number = int(gguf.GGMLQuantizationType[type])
        if shard is None:
            types.weight_type = number
            stored.materialize(tuple(blocks.shape), dtype=blocks.dtype)
            stored.data.copy_(blocks)
        else:
            types.shard_weight_type[shard] = number
            stored.shard_id.append(shard)
            stored.shard_id_map[shard] = len(stored.data_container)
            stored.data_container.append(blocks)
    return layer


@pytest.mark.parametrize(("types", "products"), [(("Q4_K", "Q4_K"), 1), (("Q4_K", "Q6_K"), 2)], ids=str)
def test_a_merged_layer(types: tuple[str, str], products: int) -> None:
    of = method()
    parts = {i: (type, blocks_of(type, n, n)) for i, (type, n) in enumerate(zip(types, SIZES, strict=True))}
    layer = load(created(of), {1: parts[1], 0: parts[0]})
    of.process_weights_after_loading(layer)
    of.process_weights_after_loading(layer)  # SGLang may ask again
    assert len(layer.w4gemm_weight) == products and not hasattr(layer, "qweight_type")
    w = torch.cat([dense(*part) for part in parts.values()])
    assert torch.equal(torch.cat([part.dequantize(torch.float64) for part in layer.w4gemm_weight]), w)
    x, bias = torch.randn(2, 3, K).bfloat16(), torch.randn(sum(SIZES)).bfloat16()
    for b in (None, bias):
        expected = x.double() @ w.T + (0 if b is None else b.double())
        assert (of.apply(layer, x, b).double() - expected).norm() < 0.004 * expected.norm()


def test_a_head_is_taken_and_a_table_of_embeddings_is_not(caplog: pytest.LogCaptureFixture) -> None:
    parts = {None: ("Q6_K", blocks_of("Q6_K", sum(SIZES)))}
    of = method()
    head = load(created(of, kind="ParallelLMHead"), parts)
    of.process_weights_after_loading(head)
    x = torch.randn(5, K).bfloat16()
    expected = x.double() @ dense(*parts[None]).T
    assert (of.apply(head, x.float()).double() - expected).norm() < 0.004 * expected.norm()
    table = load(created(of, kind="VocabParallelEmbedding"), parts)
    of.process_weights_after_loading(table)
    assert table.qweight.dtype == torch.uint8 and not hasattr(table, "w4gemm_weight")


def test_what_is_left_to_sglang(caplog: pytest.LogCaptureFixture) -> None:
    engine._refuse.cache_clear()
    of, parts = method(), {0: ("IQ1_S", blocks_of("IQ1_S", SIZES[0])), 1: ("Q4_K", blocks_of("Q4_K", SIZES[1]))}
    layer = load(created(of), parts)
    with caplog.at_level(logging.INFO, "sglang.srt.w4gemm"):
        of.process_weights_after_loading(layer)
    assert "leaves linear layers of GGUF to SGLang's own kernels: they are in IQ1_S, wanted one of" in caplog.text
    assert hasattr(layer, "qweight_type")
    of_pack = method(type("ExpertPackConfig", (), {})())  # DeepSeek-V4's wo_a and wkv_gate
    layer = load(created(of_pack), {i: ("Q4_K", blocks_of("Q4_K", n)) for i, n in enumerate(SIZES)})
    with caplog.at_level(logging.INFO, "sglang.srt.w4gemm"):
        of_pack.process_weights_after_loading(layer)
    assert "models of expert packs read the blocks" in caplog.text and hasattr(layer, "qweight_type")
    with pytest.raises(RuntimeError, match="128 of its 192 output features were loaded, wanted all"):
        of.process_weights_after_loading(load(created(of), {1: parts[1]}))
