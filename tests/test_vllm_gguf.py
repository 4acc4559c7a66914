"""The vLLM plugin's layers and experts of GGUF files, against stubs of vLLM and of its GGUF plugin, on the CPU."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_parts import part_fixture
from w4gemm.checkpoints.gguf.blocks import TYPES, BlockNumbers
from w4gemm.integrations.engines import engine

gguf = pytest.importorskip("gguf")

K = 256
FACTORS = {"Q6_K": (208,), "Q4_K": (0, 2), "Q8_0": (0,), "IQ3_S": (0,), "MXFP4": (), "IQ1_S": ()}
"""Where a block has fp16 numbers, which must be finite."""

part = part_fixture("gguf", autouse=True)


def blocks_of(type: str, n: int, seed: int = 0) -> torch.Tensor:
    """Rows of random blocks, uint8 (n, bytes)."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n * K // elements, size), dtype=np.uint8)
    for at in FACTORS[type]:
        blocks[:, at : at + 2] = (rng.random((len(blocks), 1)) / 50).astype(np.float16).view(np.uint8)
    if type == "MXFP4":
        blocks[:, 0] = rng.integers(110, 130, len(blocks))
    return torch.from_numpy(blocks.reshape(n, -1))


def dense(type: str, blocks: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[type])).double()


def made(sizes: list[int], layer: Any = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A layer that vLLM has made, with a method of its GGUF plugin's."""
    layer = torch.nn.Module() if layer is None else layer
    config = importlib.import_module("vllm_gguf_plugin.quantization").GGUFConfig()
    layer.quant_method = config.get_quant_method(layer, "model.layers.0.qkv_proj")
    layer.quant_method.create_weights(layer, K, sizes, K, sum(sizes), dtype)
    return layer


def load(layer: Any, parts: dict[Any, tuple[str, torch.Tensor]]) -> Any:
    for shard, (type, blocks) in parts.items():
        number = torch.tensor(int(gguf.GGMLQuantizationType[type]))
        layer.qweight_type.weight_loader(layer.qweight_type, number, shard)
        layer.qweight.weight_loader(layer.qweight, blocks, shard)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize(
    ("types", "products"),
    [(("Q4_K", "Q4_K", "Q4_K"), 1), (("Q4_K", "Q4_K", "Q6_K"), 2), (("Q8_0", "MXFP4", "Q8_0"), 3)],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_merged_layer_is_a_product_for_each_run_of_types(types: tuple[str, ...], products: int, bias: bool) -> None:
    """Shards come in any order."""
    sizes, layer = [96, 32, 32], made([96, 32, 32])
    stored = {shard: (type, blocks_of(type, n, n)) for shard, type, n in zip("qkv", types, sizes, strict=True)}
    layer.bias = torch.nn.Parameter(torch.randn(160).bfloat16()) if bias else None
    load(layer, {shard: stored[shard] for shard in "vqk"})
    assert "qweight" in layer._parameters and not {"qweight_type", "processed"} & vars(layer).keys()
    x = torch.randn(3, 5, K, dtype=torch.bfloat16)
    product = x.double() @ torch.cat([dense(*each) for each in stored.values()]).T
    product = product + layer.bias.double() if bias else product
    d = layer.quant_method.apply(layer, x, layer.bias)
    assert d.shape == (3, 5, 160) and (d.double() - product).norm() < 0.004 * product.norm()
    if not bias:
        return
    torch._dynamo.reset()
    called: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        called.extend(node.target for node in graph.graph.nodes)
        return graph

    with torch.inference_mode():
        compiled = torch.compile(layer.quant_method.apply, fullgraph=True, dynamic=True, backend=backend)
        assert torch.equal(compiled(layer, x, layer.bias), d)
    assert called.count(torch.ops.w4gemm.packed_linear) == products


@pytest.mark.parametrize("type", sorted(FACTORS.keys() & TYPES.keys()))
def test_blocks_are_packed_as_they_are(type: str) -> None:
    blocks = blocks_of(type, 300)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]][1]
    w = BlockNumbers(type, blocks.view(300, -1, size)).packed()
    assert torch.equal(w.dequantize(torch.float64), dense(type, blocks))


def test_what_is_left_to_vllm(caplog: pytest.LogCaptureFixture) -> None:
    def left(parts: dict[Any, tuple[str, torch.Tensor]], dtype: torch.dtype = torch.bfloat16) -> str:
        caplog.clear()
        engine._refuse.cache_clear()
        with caplog.at_level(logging.INFO, "vllm.w4gemm"):
            layer = load(made([32, 32], dtype=dtype), parts)
        assert layer.processed and torch.equal(layer.quant_method.apply(layer, torch.ones(2)), torch.full((2,), 2.0))
        return caplog.text

    q4, q6 = (("Q4_K", blocks_of("Q4_K", 32)), ("Q6_K", blocks_of("Q6_K", 32)))
    assert "leaves linear layers of GGUF to vLLM's own kernels: they are in IQ1_S, wanted one of Q8_0," in left(
        {0: q4, 1: ("IQ1_S", blocks_of("IQ1_S", 32))}
    )
    assert "their 256 input features on this GPU are not whole blocks of Q6_K" in left(
        {0: q4, 1: (q6[0], q6[1][:, :-2])}
    )
    assert "nothing of them was loaded" in left({})
    assert "their activations are torch.float32" in left({0: q4, 1: q6}, torch.float32)
    spoiled = q4[1].clone()
    spoiled[:, :2] = 255
    assert "groups would not be finite" in left({0: q4, 1: ("Q4_K", spoiled)})


def test_a_part_of_a_layer_ends_the_start() -> None:
    with pytest.raises(RuntimeError, match="layers.0.qkv_proj: 32 of its 64 output features were loaded, wanted all"):
        load(made([32, 32]), {0: ("Q4_K", blocks_of("Q4_K", 32))})


def test_heads_are_taken_and_tables_of_embeddings_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    parts = {None: ("Q6_K", blocks_of("Q6_K", 64))}
    head = load(made([64], ParallelLMHead()), parts)
    x = torch.randn(5, K, dtype=torch.bfloat16)
    product = x.double() @ dense(*parts[None]).T
    assert (head.quant_method.apply(head, x).double() - product).norm() < 0.004 * product.norm()
    assert load(made([64], VocabParallelEmbedding()), parts).processed
    monkeypatch.setenv("W4GEMM_VLLM", "off")
    assert load(made([64], ParallelLMHead()), parts).processed


def test_layers_are_counted_and_prepared(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    layers = [made([32, 32]) for _ in range(2)]
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        for layer in layers:
            load(layer, {0: ("Q4_K", blocks_of("Q4_K", 32)), 1: ("Q6_K", blocks_of("Q6_K", 32))})
    assert "w4gemm runs 2 linear layers" in caplog.text
    monkeypatch.setattr("w4gemm.choice.plan_cache.choose", lambda *a: pytest.fail("a plan was chosen"))
    for m in (1, 8):
        layer = SimpleNamespace(**layers[0]._parameters)
        layers[0].quant_method.apply(layer, torch.randn(m, K, dtype=torch.bfloat16))


EXPERTS, TOKENS = 3, 4


def experts(width: int = K, **settings: Any) -> Any:
    """A layer of experts that vLLM has made."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    if "activation" in settings:
        settings["activation"] = MoEActivation[settings["activation"]]
    moe = FusedMoEConfig(EXPERTS, 2, K, width, EXPERTS, torch.bfloat16, **settings)
    config = importlib.import_module("vllm_gguf_plugin.quantization").GGUFConfig()
    layer = RoutedExperts("model.layers.0.mlp.experts", torch.bfloat16, moe, config, SimpleNamespace(expert_map=None))
    layer.quant_method.create_weights(layer, EXPERTS, K, width, torch.bfloat16)
    return layer


def load_experts(layer: Any, parts: dict[str, tuple[str, torch.Tensor]]) -> Any:
    """Have a layer hold the blocks (experts, n, bytes) of its shards w1, w2 and w3, gates before ups."""
    for shard, (type, _) in parts.items():
        product = "w2" if shard == "w2" else "w13"
        number = int(gguf.GGMLQuantizationType[type])
        getattr(layer, f"{product}_qweight_type").shard_weight_type[shard] = number
    for product, shards in (("w13", ("w1", "w3")), ("w2", ("w2",))):
        blocks = [parts[shard][1] for shard in shards if shard in parts]
        if blocks:
            stored = getattr(layer, f"{product}_qweight")
            stored.materialize(torch.cat(blocks, 1).shape, dtype=torch.uint8)
            stored.data.copy_(torch.cat(blocks, 1))
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def blocks_of_experts(type: str, seed: int = 0) -> torch.Tensor:
    return blocks_of(type, EXPERTS * K, seed).unflatten(0, (EXPERTS, K))


@pytest.mark.parametrize("types", [("Q4_K", "Q6_K"), ("Q8_0", "Q4_K"), ("MXFP4", "IQ3_S")], ids=str)
def test_experts_with_a_type_for_each_product(types: tuple[str, str]) -> None:
    parts = {
        shard: (types[shard == "w2"], blocks_of_experts(types[shard == "w2"], i)) for i, shard in enumerate(SHARDS)
    }
    layer = load_experts(experts(), parts)
    assert not {"w13_qweight", "w2_qweight", "w2_qweight_type"} & layer._parameters.keys()
    assert layer.get_expert_weights()
    x, ids = torch.randn(TOKENS, K).bfloat16(), torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2]], dtype=torch.int32)
    router = torch.rand(TOKENS, 2)
    d = layer.forward_modular(x, router, ids)
    product = torch.zeros(TOKENS, K, dtype=torch.float64)
    for t, j in np.ndindex(TOKENS, 2):
        gate, down, up = (dense(type, blocks[ids[t, j]]) for type, blocks in parts.values())
        rows = torch.nn.functional.silu(gate @ x[t].double()) * (up @ x[t].double())
        product[t] += router[t, j].double() * (down @ rows)
    assert (d.double() - product).norm() < 0.01 * product.norm()


SHARDS = ("w1", "w2", "w3")


def test_experts_that_are_left_to_vllm(caplog: pytest.LogCaptureFixture) -> None:
    def left(layer: Any, types: tuple[str, str, str] = ("Q4_K", "Q4_K", "Q4_K"), k: int = K) -> str:
        parts = {s: (type, blocks_of_experts(type)) for s, type in zip(SHARDS, types, strict=True)}
        parts["w2"] = parts["w2"][0], parts["w2"][1][..., : parts["w2"][1].shape[-1] * k // K]
        caplog.clear()
        engine._refuse.cache_clear()
        with caplog.at_level(logging.INFO, "vllm.w4gemm"):
            assert load_experts(layer, parts).processed
        return caplog.text

    assert "experts of GGUFMoEMethod to vLLM's own kernels: they are in IQ1_S, wanted one of Q8_0," in left(
        experts(), ("Q4_K", "IQ1_S", "Q4_K")
    )
    assert "their 128 input features on this GPU are not whole blocks of Q4_K" in left(experts(128), k=128)
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        engine._refuse.cache_clear()
        experts(has_bias=True)
        experts(activation="RELU2_NO_MUL")
    assert "they have biases" in caplog.text and "they have no gates" in caplog.text


def test_parts_of_experts_end_the_start() -> None:
    q4, q6 = (("Q4_K", blocks_of_experts("Q4_K")), ("Q6_K", blocks_of_experts("Q6_K")))
    with pytest.raises(RuntimeError, match=r"experts: w2_qweight: 100.00% was not loaded"):
        load_experts(experts(), {"w1": q4, "w3": q4})
    with pytest.raises(RuntimeError, match="experts: w13_qweight: w3 was not loaded"):
        load_experts(experts(), {"w1": q4, "w2": q6})
    narrow = ("Q4_K", torch.nn.functional.pad(q4[1], (0, 210 - 144)))  # as vLLM's loader puts it in the place of Q6_K
    with pytest.raises(RuntimeError, match="experts: gates are in Q6_K and ups in Q4_K, wanted one type for both"):
        load_experts(experts(), {"w1": q6, "w2": q6, "w3": narrow})
    spoiled = q4[1].clone()
    spoiled[0, 0, :2] = 255
    with pytest.raises(ValueError, match="would not be finite"):
        load_experts(experts(), {"w1": q4, "w2": ("Q4_K", spoiled), "w3": q4})
