"""Experts of the newest models in vLLM's own methods, each with its model's format, activation and names: with
``VLLM_SOURCES``, see vllm_sources.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

if "VLLM_SOURCES" not in os.environ:
    pytest.skip("VLLM_SOURCES does not name vLLM's sources", allow_module_level=True)

from reference import linear_reference
from test_vllm_experts_lora import context_of
from test_vllm_sources import plugin, routed_experts  # noqa: F401 (plugin is a fixture)
from w4gemm import QuantizedWeight
from w4gemm.core.activation import is_gated
from w4gemm.core.formats import WeightFormat
from w4gemm.tuning.random_weight import random_components
from w4gemm.weights.quantize import quantize

TOKENS = 5
PREFIX = "model.layers.1.mlp.experts"


class Experts(NamedTuple):
    """A layer of experts as a model of vLLM's makes it and a checkpoint stores it."""

    quantization: str
    """vLLM's name of the config."""
    config: dict[str, Any]
    """quantization_config."""
    format: str
    moe: dict[str, Any] = {}  # noqa: RUF012
    """Settings of vLLM's FusedMoEConfig."""
    activation: str = "silu_mul"
    names: tuple[str, str, str | None] = ("gate_proj", "down_proj", "up_proj")
    """Projections in the checkpoint: gate, down and up; without gates the first is the up."""
    count: int = 4
    sizes: tuple[int, int] = (256, 256)
    """Features of tokens, and between the products."""
    fp8: bool = False
    since: str = ""
    """A method of vLLM's that its version must have."""


def compressed(kind: str, group_size: int, activations: dict[str, Any] | None = None) -> dict[str, Any]:
    """A config of compressed-tensors. kind: int, or the format of 4-bit floats."""
    weights = {"num_bits": 4, "type": "int" if kind == "int" else "float", "symmetric": True, "group_size": group_size}
    weights |= {"strategy": "tensor_group" if kind == "nvfp4" else "group", "dynamic": False}
    format = "pack-quantized" if kind == "int" else f"{kind}-pack-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": format}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}, "ignore": []}


TOKEN_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
GROUP_FP8 = {**TOKEN_FP8, "strategy": "group", "group_size": 128}
DEEPSEEK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_quant_algo": None,
    "exclude_modules": [],
    "quantized_layers": {
        "model.layers.1.self_attn.q_proj": {"quant_algo": "FP8"},
        PREFIX: {"quant_algo": "NVFP4", "group_size": 16},
    },
}
RELU2: dict[str, Any] = {"activation": "relu2_no_mul"}
UPS = ("up_proj", "down_proj", None)

MODELS = {
    "DeepSeek-V4": Experts(
        "deepseek_v4_fp8", DEEPSEEK, "mxfp4", {"swiglu_limit": 10.0}, "silu_mul(limit=10)", ("w1", "w2", "w3")
    ),
    "Kimi-K2": Experts("compressed-tensors", compressed("int", 32), "int4_g32", count=384, sizes=(128, 32)),
    "Kimi-K3": Experts(
        "compressed-tensors",
        compressed("mxfp4", 32),
        "mxfp4",
        {"activation": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0},
        "situ_mul",
        ("w1", "w2", "w3"),
        since="CompressedTensorsW4A8Mxfp4MoEMethod",
    ),
    "Kimi-K3 with fp8 activations": Experts(
        "compressed-tensors",
        compressed("mxfp4", 32, TOKEN_FP8),
        "mxfp4",
        {"activation": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0},
        "situ_mul",
        ("w1", "w2", "w3"),
        fp8=True,
        since="CompressedTensorsW4A8Mxfp4MoEMethod",
    ),
    "fp8 activations with scales of groups, which have 16 bits here": Experts(
        "compressed-tensors",
        compressed("mxfp4", 32, GROUP_FP8),
        "mxfp4",
        since="CompressedTensorsW4A8Mxfp4MoEMethod",
    ),
    "MiniMax-M3": Experts(
        "compressed-tensors",
        compressed("int", 32),
        "int4_g32",
        {"activation": "swigluoai_uninterleave", "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
        "swiglu_oai",
        ("w1", "w2", "w3"),
    ),
    "Nemotron 3": Experts("modelopt_mixed", MIXED, "nvfp4", RELU2, "relu2", UPS),
    "Nemotron 3 in int4": Experts("compressed-tensors", compressed("int", 32), "int4_g32", RELU2, "relu2", UPS),
    "Qwen3.5-MoE and DeepSeek-V3": Experts("modelopt_mixed", MIXED, "nvfp4"),
    "GLM-4.5-Air": Experts("compressed-tensors", compressed("int", 32), "int4_g32", count=8),
    "GLM-5": Experts("compressed-tensors", compressed("int", 128, TOKEN_FP8), "int4_g128", fp8=True),
}


@pytest.fixture(autouse=True)
def deepseek(plugin: None) -> Iterator[None]:  # noqa: F811
    """DeepSeek-V4's config looks at the model's."""
    import vllm.config.vllm

    config = vllm.config.vllm._current_vllm_config
    hf_config, before = SimpleNamespace(expert_dtype="fp4", quantization_config={}), config.model_config
    config.model_config = SimpleNamespace(hf_config=hf_config, dtype=torch.bfloat16, quantization_config=None)
    yield
    config.model_config = before


def made(model: Experts) -> Any:
    """vLLM's layer, before it is loaded."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.quantization import get_quantization_config

    quantization = get_quantization_config(model.quantization).from_config(model.config)
    moe = dict(model.moe)
    if "activation" in moe:
        moe["activation"] = MoEActivation(moe["activation"])
    hidden, width = model.sizes
    sizes = {
        "num_experts": model.count,
        "num_experts_per_tok": 2,
        "hidden_size": hidden,
        "moe_intermediate_size": width,
    }
    gate, down, up = model.names
    names: dict[str, Any] = {"ckpt_gate_proj_name": gate, "ckpt_down_proj_name": down, "ckpt_up_proj_name": up}
    # a parameter of the router, which becomes one of the layer of experts too
    names["e_score_correction_bias"] = torch.nn.Parameter(torch.zeros(model.count), requires_grad=False)
    return routed_experts(sizes, quantization, PREFIX, moe, names)


def stored(model: Experts, n: int, k: int, seed: int) -> tuple[QuantizedWeight, dict[str, torch.Tensor]]:
    """Random numbers of a projection, and the checkpoint's tensors of them."""
    format = WeightFormat.parse(model.format)
    parts = random_components(format, n, k, seed=seed)
    pairs = (parts.codes[:, 0::2] | parts.codes[:, 1::2] << 4).to(torch.uint8)
    if format.element == "int4":
        tensors = {"weight_packed": pairs.view(torch.int32), "weight_scale": parts.scales}
        return QuantizedWeight.from_codes(format, *parts[:2]), tensors | {"weight_shape": torch.tensor((n, k))}
    if model.format == "mxfp4":
        named = "weight" if model.quantization == "deepseek_v4_fp8" else "weight_packed"
        codes = pairs.view(torch.int8) if named == "weight" else pairs
        tensors = {named: codes, "weight_scale": parts.scales.view(torch.uint8)}  # as DeepSeek-V4's loader views them
        return QuantizedWeight.from_codes(format, *parts[:2]), tensors
    factor = torch.tensor(2.0 ** -(seed % 3), dtype=torch.float32)
    tensors = {
        "weight": pairs,
        "weight_scale": parts.scales,
        "weight_scale_2": factor,
        "input_scale": torch.ones((), dtype=torch.float32),
    }
    w = QuantizedWeight.from_codes(format, *parts[:2], channels=factor.expand(n).contiguous())
    return w, tensors


@pytest.mark.parametrize("name", MODELS)
def test_experts_of_a_model(name: str) -> None:
    model = MODELS[name]
    if model.since:
        module = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
        pytest.importorskip(f"{module}.compressed_tensors_moe_w4a8_mxfp4", reason=f"no {model.since}")
    (hidden, width), layer, weights = model.sizes, made(model), {}
    tensors = []
    for e in range(model.count):
        for i, projection in enumerate(filter(None, model.names)):
            n, k = (hidden, width) if projection == model.names[1] else (width, hidden)
            weights[e, projection], each = stored(model, n, k, 7 * e + i)
            tensors += [(f"{e}.{projection}.{leaf}", t) for leaf, t in each.items()]
    loaded = set(layer.load_weights(tensors))
    names = {name for name, _ in layer.named_parameters()}
    # what vLLM makes besides, and what dense weights would be loaded into
    others = ("g_idx", "g_idx_sort_indices", "chan_scale", "e_score_correction_bias")
    dense = {name for name in ("w13_weight", "w2_weight") if f"{name}_packed" in names}
    assert {name for name in names - dense if not name.endswith(others)} == loaded
    layer.quant_method.process_weights_after_loading(layer)
    kernel = layer.quant_method.moe_kernel.fused_experts
    assert type(kernel).__name__ == "W4gemmExperts"
    assert kernel.products[0].epilogue.activation == model.activation
    assert {product.epilogue.token_scale for product in kernel.products} == {model.fp8}
    x, scores = torch.randn(TOKENS, hidden, dtype=torch.bfloat16), torch.rand(TOKENS, 2)
    ids = torch.stack([torch.randperm(model.count)[:2] for _ in range(TOKENS)]).int()
    with torch.inference_mode():
        d = layer.quant_method.apply(layer, x, scores, ids, None, None)
    expected = torch.zeros(TOKENS, hidden, dtype=torch.float64)
    gate, down, up = model.names
    for t, j in torch.cartesian_prod(torch.arange(TOKENS), torch.arange(2)).tolist():
        e = int(ids[t, j])
        first = weights[e, gate]
        if is_gated(model.activation):
            first = QuantizedWeight.interleave(first, weights[e, up])
        between = linear_reference(x[t : t + 1].double(), first, activation=model.activation)
        expected[t] += scores[t, j].double() * linear_reference(between, weights[e, down])[0]
    assert (d.double() - expected).norm() < (0.1 if model.fp8 else 0.008) * expected.norm()


@pytest.mark.parametrize("streamed", [False, True], ids=["", "one by one"])
def test_dense_experts_of_gpt_oss(streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model's own load_weights, for experts that it has loaded in MXFP4."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.models import gpt_oss

    if streamed and not hasattr(gpt_oss, "GptOssRoutedExperts"):
        pytest.skip("this vLLM has no such experts")
    if streamed:
        monkeypatch.setattr(
            "vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts", gpt_oss.GptOssRoutedExperts
        )
    for group in ("ep", "dp", "pcp"):
        alone = SimpleNamespace(world_size=1, rank_in_group=0)
        monkeypatch.setattr(gpt_oss, f"get_{group}_group", lambda alone=alone: alone)
    count, hidden, width = 4, 128, 96
    quantization = get_quantization_config("gpt_oss_mxfp4").from_config({"quant_method": "mxfp4"})
    sizes = {"num_experts": count, "num_experts_per_tok": 2, "hidden_size": hidden, "moe_intermediate_size": width}
    layer = routed_experts(sizes, quantization, PREFIX, {"activation": MoEActivation.SWIGLUOAI, "has_bias": True})
    experts, model = torch.nn.Module(), torch.nn.Module()
    experts.routed_experts = layer
    model.layers = torch.nn.ModuleList([torch.nn.Module()])
    model.layers[0].mlp = torch.nn.Module()
    model.layers[0].mlp.experts = experts
    model.quant_config, model.parallel_config = quantization, SimpleNamespace(enable_expert_parallel=False)
    settings = {"num_attention_heads": 8, "num_local_experts": count, "intermediate_size": width}
    model.config = SimpleNamespace(**settings, quantization_config={"quant_method": "mxfp4"})
    model.__class__ = type("Model", (gpt_oss.GptOssModel,), {"__init__": torch.nn.Module.__init__})
    name = "layers.0.mlp.experts"
    tensors = {
        "w13_weight": torch.randint(256, (count, 2 * width, hidden // 32, 16), dtype=torch.uint8),
        "w2_weight": torch.randint(256, (count, hidden, width // 32, 16), dtype=torch.uint8),
        "w13_weight_scale": torch.randint(120, 124, (count, 2 * width, hidden // 32), dtype=torch.uint8),
        "w2_weight_scale": torch.randint(120, 124, (count, hidden, width // 32), dtype=torch.uint8),
        "w13_bias": torch.randn(count, 2 * width),
        "w2_bias": torch.randn(count, hidden),
    }
    model.load_weights((f"{name}.{leaf}", t) for leaf, t in tensors.items())
    layer.quant_method.process_weights_after_loading(layer)
    products = layer.quant_method.products
    places = {each: p.data_ptr() for each, p in layer.named_parameters()}
    dense = {"w13": torch.randn(count, hidden, 2 * width), "w2": torch.randn(count, width, hidden)}
    biases = {"w13": torch.randn(count, 2 * width), "w2": torch.randn(count, hidden)}
    sent = {f"{product}_weight": t.bfloat16() for product, t in dense.items()}
    sent |= {f"{product}_bias": t.bfloat16() for product, t in biases.items()}
    if streamed:
        sent = {f"{e}.{leaf}": t[e] for leaf, t in sent.items() for e in range(count)}
    model.load_weights((f"{name}.{leaf}", t) for leaf, t in sent.items())
    for product, (leaf, t) in zip(products, dense.items(), strict=True):
        for e in range(count):
            expected = quantize(t[e].T.bfloat16().contiguous(), "mxfp4").dequantize()
            assert torch.equal(product.weight.expert(e).dequantize(), expected)
        assert torch.equal(product.bias, biases[leaf].bfloat16())
    assert places == {each: p.data_ptr() for each, p in layer.named_parameters()}


@pytest.mark.parametrize("name", ["DeepSeek-V4", "Nemotron 3 in int4"])
def test_adapters_beside_experts(name: str) -> None:
    """vLLM's own context, mixin and method for adapters; its GPU kernels in PyTorch."""
    from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
    from vllm.model_executor.layers.fused_moe.fused_moe_modular_method import FusedMoEModularMethod

    model = MODELS[name]._replace(sizes=(128, 128))
    model = model._replace(moe=model.moe | {"is_lora_enabled": True})
    layer, (hidden, width) = made(model), model.sizes
    tensors = [
        (f"{e}.{projection}.{leaf}", t)
        for e in range(model.count)
        for i, projection in enumerate(filter(None, model.names))
        for leaf, t in stored(model, hidden, width, 7 * e + i)[1].items()
    ]
    list(layer.load_weights(tensors))
    layer.quant_method.process_weights_after_loading(layer)
    kernel = layer.quant_method.moe_kernel
    assert kernel.supports_lora()
    slices, adapters = 1 + is_gated(model.activation), torch.tensor([1, -1, 0, -1, 1])
    shapes = [(model.count, slices * width, hidden), (model.count, hidden, width)]
    matrices = context_of(adapters, slices == 2, shapes, model.count)
    context = MoELoRAContext(
        **vars(matrices),
        adapter_enabled=torch.ones(3, dtype=torch.int32),
        max_loras=2,
        top_k=2,
        w13_num_slices=slices,
        fully_sharded=False,
        tp_rank=0,
        tp_size=1,
        local_num_experts=model.count,
        use_tuned_config=False,
    )
    x, scores = torch.randn(TOKENS, hidden, dtype=torch.bfloat16), torch.rand(TOKENS, 2)
    ids = torch.stack([torch.randperm(model.count)[:2] for _ in range(TOKENS)]).int()
    method = FusedMoEModularMethod(layer.quant_method, kernel)
    with torch.inference_mode():
        plain = method.apply(layer, x, scores, ids, None, None)
        kernel.fused_experts.set_lora_context(context)
        d = method.apply(layer, x, scores, ids, None, None)
    # beside others' adapters rows are rounded before the activation, which a step without any is not
    assert (d - plain)[adapters < 0].norm() < 0.008 * plain[adapters < 0].norm()
    assert (d - plain)[adapters >= 0].norm() > 0.05 * plain.norm()
    assert context.original_hidden_states is None
