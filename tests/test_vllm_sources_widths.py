"""Layers of other widths than 4 bits, and of GGUF files, in vLLM's own classes: with ``VLLM_SOURCES``, see
vllm_sources.py. GGUF's need the package vllm-gguf-plugin, unpacked, among these folders."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_sources import Mock
from test_vllm_sources import (  # noqa: F401 (plugin is a fixture)
    check_experts,
    fill,
    fill_experts,
    kernel_of,
    loaded,
    plugin,
    quantization,
    reloading,
    routed_experts,
)
from tiny_model import write_out

from sglang_layers import Drawn  # isort: skip (of a stub of SGLang, which is installed on import)
from w4gemm.checkpoints import open_checkpoint
from w4gemm.checkpoints.gguf.file import GGUFFile

K, SIZES = 256, (192, 64)
PARENT, SHARDS = "model.layers.0.mlp", {"gate_proj": 0, "up_proj": 1}
NAMES = [f"{PARENT}.{shard}" for shard in SHARDS]


def compressed(bits: int, symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 64, "symmetric": symmetric}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


def gptq(bits: int, **settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 64, "sym": True, "desc_act": False, **settings}


def auto_round(bits: int, **extra: Any) -> dict[str, Any]:
    config = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int", "bits": bits}
    return {**config, "group_size": 64, "sym": True, "extra_config": extra}


CASES = {
    "GPTQ of 8 bits": (gptq(8), (8, 8)),
    "GPTQ, 8 bits by dynamic": (gptq(4, dynamic={r"+:.*\.0\.mlp\..*": {"bits": 8}}), (8, 8)),
    "AutoRound of 8 bits": (auto_round(8), (8, 8)),
    "AutoRound, 8 bits by extra_config": (auto_round(4, **{name: {"bits": 8} for name in NAMES}), (8, 8)),
    **{f"W{bits}A16": (compressed(bits, True), (bits, bits)) for bits in (2, 3, 5, 6, 8)},
    **{f"asymmetric W{bits}A16": (compressed(bits, False), (bits, bits)) for bits in (4, 8)},
}
OTHER_GPTQ = {
    "2 bits": (gptq(2), (2, 2)),
    "3 bits": (gptq(3), (3, 3)),
    "rows as groups": (gptq(3, group_size=-1), (3, 3)),
    **{f"{bits} bits with zero points": (gptq(bits, sym=False), (bits, bits)) for bits in (3, 4, 8)},
    "AutoRound of 3 bits": (auto_round(3), (3, 3)),
    "AutoRound of 8 bits with zero points": ({**auto_round(8), "sym": False}, (8, 8)),
    "AutoRound, 2 bits of one": (auto_round(4, **{NAMES[1]: {"bits": 2}}), (4, 2)),
    "3 bits by dynamic, of one": (gptq(4, dynamic={r"+:.*\.up_proj": {"bits": 3}}), (4, 3)),
}


def write(folder: Path, quantization_config: dict[str, Any], bits: tuple[int, ...]) -> None:
    """A folder with a gate and an up of these bits."""
    tensors = {}
    by_gptq = quantization_config["quant_method"] != "compressed-tensors"
    groups = quantization_config.get("config_groups", {"": {"weights": {"symmetric": quantization_config.get("sym")}}})
    symmetric = all(group["weights"]["symmetric"] for group in groups.values())
    for i, (name, n, width) in enumerate(zip(NAMES, SIZES, bits, strict=True)):
        drawn = Drawn(i, n, K, not symmetric, quantization_config.get("group_size", 64), bits=width)
        unused = {"weight_g_idx"} | ({"weight_zero_point"} if symmetric else set())
        parts = drawn.gptq() if by_gptq else {k: t for k, t in drawn.compressed().items() if k not in unused}
        tensors |= {f"{name}.{leaf}": t.contiguous() for leaf, t in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization_config}))


def merged(quant_config: Any, bias: bool = False, sizes: tuple[int, int] = SIZES) -> Any:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    layer = MergedColumnParallelLinear(
        K, list(sizes), bias=bias, quant_config=quant_config, prefix=f"{PARENT}.gate_up_proj"
    )
    if bias:
        layer.bias.data.normal_()
    return layer


def check(layer: Any, weights: list[torch.Tensor]) -> None:
    """Hold a layer's product to dense weights, float64."""
    w = torch.cat(weights)
    x = torch.randn(5, K, dtype=torch.bfloat16)
    product = x.double() @ w.T + (0 if layer.bias is None else layer.bias.double())
    assert (layer(x)[0].double() - product).norm() < 0.004 * product.norm()


@pytest.mark.parametrize("name", CASES)
def test_a_merged_layer_of_another_width(name: str, tmp_path: Path) -> None:
    config, bits = CASES[name]
    write(tmp_path, config, bits)
    layer = loaded(merged(quantization(tmp_path)), tmp_path, PARENT, SHARDS)
    assert kernel_of(layer) == "W4GemmLinearKernel"
    folder = open_checkpoint(tmp_path)
    check(layer, [folder.weight(each).dequantize(torch.float64) for each in NAMES])


@pytest.mark.parametrize("name", OTHER_GPTQ)
def test_gptq_that_vllm_has_no_method_for(name: str, tmp_path: Path) -> None:
    config, bits = OTHER_GPTQ[name]
    write(tmp_path, config, bits)
    layer = merged(quantization(tmp_path))
    fill(layer, tmp_path, PARENT, SHARDS)
    process(layer)
    shard = layer.w4gemm_shards[1] if hasattr(layer, "w4gemm_shards") else layer
    assert kernel_of(shard) == "GptqKernel" and not {"scales", "qzeros"} & set(shard._parameters)
    folder = open_checkpoint(tmp_path)
    check(layer, [folder.weight(each).dequantize(torch.float64) for each in NAMES])


def test_gptq_that_nobody_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, gptq(3), (3, 3))
    config = quantization(tmp_path)
    layer = merged(config)
    fill(layer, tmp_path, PARENT, SHARDS)
    layer.scales.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="gate_up_proj: w4gemm cannot run it, and vLLM has no kernel"):
        process(layer)
    monkeypatch.setenv("W4GEMM_VLLM", "off")
    with pytest.raises(ValueError, match=r"bits=3, sym=True: vLLM has no kernel .* W4GEMM_VLLM is off"):
        merged(config)


MIXES = {
    "GPTQ by dynamic": (gptq(4, dynamic={r"+:.*\.up_proj": {"bits": 8}}), (4, 8)),
    "config groups": (
        {
            **compressed(4, True),
            "config_groups": {
                f"group_{bits}": {**compressed(bits, True)["config_groups"]["group_0"], "targets": [f"re:.*{shard}"]}
                for bits, shard in ((8, "gate_proj"), (3, "up_proj"))
            },
        },
        (8, 3),
    ),
    "AutoRound by extra_config": (auto_round(4, **{NAMES[0]: {"bits": 8}}), (8, 4)),
}


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_merged_layer_of_several_widths(name: str, bias: bool, tmp_path: Path) -> None:
    config, bits = MIXES[name]
    write(tmp_path, config, bits)
    layer = merged(quantization(tmp_path), bias)
    fill(layer, tmp_path, PARENT, SHARDS)
    process(layer)
    assert [kernel_of(shard) for shard in layer.w4gemm_shards] == ["W4GemmLinearKernel"] * 2
    folder = open_checkpoint(tmp_path)
    check(layer, [folder.weight(each).dequantize(torch.float64) for each in NAMES])


def test_a_merged_layer_that_is_dense_in_part(tmp_path: Path) -> None:
    write(tmp_path, {**compressed(8, True), "ignore": [NAMES[1]]}, (8, 8))
    tensors = load_file(tmp_path / "model.safetensors")
    dense = torch.randn(SIZES[1], K, dtype=torch.bfloat16)
    kept = {name: t for name, t in tensors.items() if not name.startswith(NAMES[1])}
    save_file({**kept, f"{NAMES[1]}.weight": dense}, tmp_path / "model.safetensors")
    layer = merged(quantization(tmp_path))
    fill(layer, tmp_path, PARENT, SHARDS)
    process(layer)
    check(layer, [open_checkpoint(tmp_path).weight(NAMES[0]).dequantize(torch.float64), dense.double()])


@pytest.mark.parametrize("name", ["3 bits", "AutoRound of 8 bits with zero points"])
def test_vllm_reloads_gptq_of_other_widths(name: str, tmp_path: Path) -> None:
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig

    if "has_g_idx" in MPLinearLayerConfig.__dataclass_fields__:
        pytest.skip("this vLLM counts the order of columns once for each part, and processes the layer too early")
    config, bits = OTHER_GPTQ[name]
    write(tmp_path, config, bits)
    layer = merged(quantization(tmp_path))
    again = reloading(layer)
    fill(layer, tmp_path, PARENT, SHARDS)
    process(layer)
    before = {name: p.data_ptr() for name, p in layer.named_parameters()}
    again(lambda: fill(layer, tmp_path, PARENT, SHARDS))
    assert {name: p.data_ptr() for name, p in layer.named_parameters()} == before
    folder = open_checkpoint(tmp_path)
    check(layer, [folder.weight(each).dequantize(torch.float64) for each in NAMES])


def process(layer: Any) -> None:
    """Ask all methods of a layer's modules, as vLLM's loader does."""
    for module in layer.modules():
        if (method := getattr(module, "quant_method", None)) is not None:
            method.process_weights_after_loading(module)


def fp8(strategy: str, **settings: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **settings}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


MXFP8 = {**fp8("group", group_size=32, scale_dtype="torch.uint8"), "format": "mxfp8-quantized"}


@pytest.mark.parametrize("kind", ["tensor", "channel", "block", "mxfp8"])
def test_a_merged_layer_in_fp8(kind: str, tmp_path: Path) -> None:
    """vLLM merges whole blocks only."""
    sizes, tensors = (256, 128), {}
    for name, n in zip(NAMES, sizes, strict=True):
        shape = {"tensor": (1,), "channel": (n, 1), "block": (n // 128, K // 128), "mxfp8": (n, K // 32)}[kind]
        scales = torch.randint(118, 124, shape).to(torch.uint8) if kind == "mxfp8" else torch.rand(shape) / 50
        scales = scales.bfloat16() if kind in ("tensor", "channel") else scales
        tensors |= {f"{name}.weight": torch.randn(n, K).to(torch.float8_e4m3fn), f"{name}.weight_scale": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    config = MXFP8 if kind == "mxfp8" else fp8(kind, **({"block_structure": [128, 128]} if kind == "block" else {}))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    layer = merged(quantization(tmp_path), sizes=sizes)
    fill(layer, tmp_path, PARENT, SHARDS)
    scheme = layer.scheme
    process(layer)
    kernel = getattr(scheme, "linear_kernel", None) or scheme.kernel
    assert type(kernel).__name__ == ("W4GemmMxFp8LinearKernel" if kind == "mxfp8" else "W4GemmFp8LinearKernel")
    assert kernel.vllm_kernel is None
    folder = open_checkpoint(tmp_path)
    check(layer, [folder.weight(each).dequantize(torch.float64) for each in NAMES])


def integers(num_bits: int, strategy: str = "token", dynamic: bool = True) -> dict[str, Any]:
    return {"num_bits": num_bits, "type": "int", "strategy": strategy, "symmetric": True, "dynamic": dynamic}


@pytest.mark.parametrize(("bits", "x_bits", "format"), [(8, 8, "int"), (3, 8, "pack"), (4, 4, "pack")])
def test_activations_of_integers_are_left_to_vllm(
    bits: int, x_bits: int, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM says of packed ones that x has 16 bits, and has one of its kernels quantize it."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    from w4gemm.integrations.engines import engine

    engine._refuse.cache_clear()
    config = {**compressed(bits, True), "format": f"{format}-quantized"}
    group = config["config_groups"]["group_0"]
    group["input_activations"] = integers(x_bits)
    if format == "int":
        group["weights"] |= {"strategy": "channel", "group_size": None}
    schemes = importlib.import_module("vllm.model_executor.layers.quantization.compressed_tensors.schemes")
    if format == "pack" and not hasattr(schemes, f"CompressedTensorsWNA{x_bits}Int"):
        pytest.skip("this vLLM does not load them")
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        layer = merged(get_quantization_config("compressed-tensors").from_config(config))
    assert f"compressed-tensors to vLLM's own kernels: their activations are {x_bits}-bit integers" in caplog.text
    if format == "pack":
        assert not kernel_of(layer).startswith("W4Gemm")


@pytest.mark.parametrize("format", ["pack-quantized", "int-quantized"])
def test_static_scales_of_inputs_and_outputs(format: str, tmp_path: Path) -> None:
    """vLLM rounds both around a product with 16-bit x. It packs weights that are stored in bytes after loading."""
    schemes = importlib.import_module("vllm.model_executor.layers.quantization.compressed_tensors.schemes")
    if not hasattr(schemes, "CompressedTensorsWNA8O8Int"):
        pytest.skip("this vLLM does not load them")
    bits = 8 if format == "int-quantized" else 4
    config = compressed(bits, True)
    write(tmp_path, config, (bits, bits))
    weights = [open_checkpoint(tmp_path).weight(name).dequantize(torch.float64) for name in NAMES]
    tensors = load_file(tmp_path / "model.safetensors")
    x_scale, d_scale = 2.0**-5, 2.0**-3
    for name in NAMES:
        tensors |= {f"{name}.input_scale": torch.tensor([x_scale]), f"{name}.output_scale": torch.tensor([d_scale])}
        if format == "int-quantized":
            codes = tensors.pop(f"{name}.weight_packed").view(torch.uint8).int() - 128
            tensors[f"{name}.weight"] = codes.to(torch.int8)
            del tensors[f"{name}.weight_shape"]
    save_file(tensors, tmp_path / "model.safetensors")
    group = config["config_groups"]["group_0"]
    group["input_activations"] = group["output_activations"] = integers(8, "tensor", dynamic=False)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config | {"format": format}}))
    layer = merged(quantization(tmp_path))
    fill(layer, tmp_path, PARENT, SHARDS)
    if format == "int-quantized":
        assert not kernel_of(layer).startswith("W4Gemm")
        return
    process(layer)
    assert kernel_of(layer) == "W4GemmLinearKernel" and layer.scheme.kernel.vllm_kernel is None
    x = torch.randn(5, K, dtype=torch.bfloat16)
    rounded = (x.double() / x_scale).round().clamp(-128, 127) * x_scale
    exact = rounded @ torch.cat(weights).T
    assert ((layer(x)[0].double() - exact).abs() <= 0.6 * d_scale).all() and exact.std() > 4 * d_scale


# --- GGUF ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gguf_plugin(plugin: None, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: F811
    if importlib.util.find_spec("vllm_gguf_plugin") is None:
        pytest.skip("VLLM_SOURCES does not name the package vllm-gguf-plugin")
    for name in ("triton", "triton.language"):
        monkeypatch.setitem(sys.modules, name, Mock(name))
    importlib.import_module("w4gemm.integrations.vllm.gguf").install()
    return importlib.import_module("vllm_gguf_plugin.quantization").GGUFConfig()


def write_gguf(path: Path, tensors: dict[str, tuple[str, int | tuple[int, int]]]) -> GGUFFile:
    """A file of matrices (n, K), or (experts, n, K), with random blocks of a type each."""
    gguf = pytest.importorskip("gguf")
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    for name, (type, n) in tensors.items():
        kind = gguf.GGMLQuantizationType[type]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        rows = np.prod(n)
        blocks = rng.integers(0, 256, (rows * K // elements, size), dtype=np.uint8)
        factors = {"Q6_K": (208,), "Q4_K": (0, 2), "Q8_0": (0,), "IQ1_S": (0,), "Q5_K": (0, 2)}[type]
        for at in factors:
            blocks[:, at : at + 2] = (rng.random((len(blocks), 1)) / 50).astype(np.float16).view(np.uint8)
        writer.add_tensor(name, blocks.reshape(*np.atleast_1d(n), -1), raw_dtype=kind)
    write_out(writer)
    return GGUFFile(path)


def load_gguf(layer: Any, path: Path, shards: dict[str, Any]) -> None:
    """Have the plugin's reader and loaders fill a layer with tensors of a file, by their names."""
    from vllm_gguf_plugin.weight_utils import gguf_quant_weights_iterator

    parameters = dict(layer.named_parameters())
    for name, tensor in gguf_quant_weights_iterator(path, None):
        owner, leaf = name.rsplit(".", 1)
        if owner in shards:
            shard = () if shards[owner] is None else (shards[owner],)
            parameters[leaf].weight_loader(parameters[leaf], tensor, *shard)
    layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K"), ("Q4_K", "Q6_K"), ("Q8_0", "Q5_K")], ids=str)
def test_a_merged_layer_of_gguf(types: tuple[str, str], gguf_plugin: Any, tmp_path: Path) -> None:
    stored = zip(("ffn_gate", "ffn_up"), types, SIZES, strict=True)
    file = write_gguf(tmp_path / "a.gguf", {f"{name}.weight": (type, n) for name, type, n in stored})
    layer = merged(gguf_plugin)
    load_gguf(layer, file.path, {"ffn_gate": 0, "ffn_up": 1})
    assert {"qweight", "qweight_type"} & dict(layer.named_parameters()).keys() == {"qweight"}
    check(layer, [file.weight(f"{name}.weight").dequantize(torch.float64) for name in ("ffn_gate", "ffn_up")])


def test_queries_keys_and_values_of_gguf(gguf_plugin: Any, tmp_path: Path) -> None:
    """As Q4_K_M has them, in the order of the layer, not of the file."""
    from vllm.model_executor.layers.linear import QKVParallelLinear

    sizes = {"v": ("Q6_K", 64), "k": ("Q4_K", 64), "q": ("Q4_K", 128)}
    file = write_gguf(tmp_path / "a.gguf", {f"{name}.weight": size for name, size in sizes.items()})
    layer = QKVParallelLinear(K, 32, 4, 2, bias=True, quant_config=gguf_plugin, prefix="model.layers.0.qkv_proj")
    load_gguf(layer, file.path, {name: name for name in sizes})
    layer.bias.data.normal_()
    w = torch.cat([file.weight(f"{name}.weight").dequantize(torch.float64) for name in "qkv"])
    x = torch.randn(5, K, dtype=torch.bfloat16)
    product = x.double() @ w.T + layer.bias.double()
    assert (layer(x)[0].double() - product).norm() < 0.004 * product.norm()


def test_a_head_of_gguf(gguf_plugin: Any, tmp_path: Path) -> None:
    """Whose rows are filled up. A table of embeddings stays vLLM's."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    file = write_gguf(tmp_path / "a.gguf", {"output.weight": ("Q6_K", 100)})
    head = ParallelLMHead(100, K, quant_config=gguf_plugin, prefix="lm_head")
    load_gguf(head, file.path, {"output": None})
    x = torch.randn(5, K, dtype=torch.bfloat16)
    product, logits = (
        x.double() @ file.weight("output.weight").dequantize(torch.float64).T,
        head.quant_method.apply(head, x),
    )
    assert logits.shape[1] == 128 and not logits[:, 100:].any()
    assert (logits[:, :100].double() - product).norm() < 0.004 * product.norm()
    table = VocabParallelEmbedding(100, K, quant_config=gguf_plugin, prefix="model.embed_tokens")
    load_gguf(table, file.path, {"output": None})
    assert table.qweight.dtype == torch.uint8 and table.qweight.shape == (128, 210)


def test_gguf_that_is_left_to_vllm(gguf_plugin: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from w4gemm.integrations.engines import engine

    engine._refuse.cache_clear()
    file = write_gguf(
        tmp_path / "a.gguf", {"ffn_gate.weight": ("IQ1_S", SIZES[0]), "ffn_up.weight": ("Q4_K", SIZES[1])}
    )
    layer = merged(gguf_plugin)
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        load_gguf(layer, file.path, {"ffn_gate": 0, "ffn_up": 1})
    assert "w4gemm leaves linear layers of GGUF to vLLM's own kernels: they are in IQ1_S, wanted one of" in caplog.text
    assert layer.qweight.shape == (sum(SIZES), K // 256 * 144) and layer.qweight.shard_offset_map[0][1] == SIZES[0]


def test_gguf_of_which_a_part_is_loaded(gguf_plugin: Any, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf", {"ffn_gate.weight": ("Q4_K", SIZES[0])})
    with pytest.raises(RuntimeError, match="gate_up_proj: 192 of its 256 output features were loaded, wanted all"):
        load_gguf(merged(gguf_plugin), file.path, {"ffn_gate": 0})


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "Q8_0", "Q5_K")], ids=str)
def test_experts_of_gguf(types: tuple[str, str, str], gguf_plugin: Any, tmp_path: Path) -> None:
    """As Q4_K_M has them in half of the layers: the plugin's reader divides a file's tensors among vLLM's experts."""
    from vllm_gguf_plugin.weight_utils import gguf_quant_weights_iterator
    from vllm_gguf_plugin.weights_adapter.default import GGUFWeightsAdapter

    count, prefix = 4, "model.layers.1.mlp.experts"
    names = dict(zip(("gate", "up", "down"), types, strict=True))
    stored: dict[str, Any] = {f"blk.1.ffn_{role}_exps.weight": (type, (count, K)) for role, type in names.items()}
    file = write_gguf(tmp_path / "a.gguf", stored)
    sizes = {"num_experts_per_tok": 2, "hidden_size": K, "moe_intermediate_size": K}
    layer = routed_experts({"num_experts": count, **sizes}, gguf_plugin, prefix)
    in_vllm = {f"blk.1.ffn_{role}_exps.weight": f"{prefix}.0.{role}_proj.weight" for role in names}
    tensors = GGUFWeightsAdapter(None).map_weights(gguf_quant_weights_iterator(file.path, in_vllm))
    loaded = layer.load_weights((name.removeprefix(f"{prefix}."), tensor) for name, tensor in tensors)
    assert set(loaded) == {f"{product}_{leaf}" for product in ("w13", "w2") for leaf in ("qweight", "qweight_type")}
    layer.quant_method.process_weights_after_loading(layer)
    assert type(layer.quant_method.moe_kernel.fused_experts).__name__ == "W4gemmExperts"
    assert all(p.shape[0] == count for p in layer.parameters())
    x, router = torch.randn(5, K, dtype=torch.bfloat16), torch.rand(5, 2)
    ids = torch.stack([torch.randperm(count)[:2] for _ in range(5)]).int()
    d = layer.forward_modular(x, router, ids)
    product = torch.zeros(5, K, dtype=torch.float64)
    for t, j in np.ndindex(5, 2):
        gate, up, down = (
            file.numbers(f"blk.1.ffn_{role}_exps.weight", expert=int(ids[t, j])).weight().dequantize(torch.float64)
            for role in names
        )
        rows = torch.nn.functional.silu(gate @ x[t].double()) * (up @ x[t].double())
        product[t] += router[t, j].double() * (down @ rows)
    assert (d.double() - product).norm() < 0.01 * product.norm()


def test_experts_of_compressed_tensors_with_zero_points(tmp_path: Path) -> None:
    config = {"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 256, "moe_intermediate_size": 128}
    prefix, tensors = "model.layers.0.mlp.experts", dict[str, torch.Tensor]()
    for e, (leaf, n, k) in itertools.product(range(4), (("gate", 128, 256), ("up", 128, 256), ("down", 256, 128))):
        parts = Drawn(len(tensors), n, k, zero=True).compressed()
        parts.pop("weight_g_idx")
        tensors |= {f"{prefix}.{e}.{leaf}_proj.{name}": t.contiguous() for name, t in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": compressed(4, symmetric=False)}))
    layer = routed_experts(config, quantization(tmp_path), prefix)
    fill_experts(layer, tmp_path, prefix)
    process(layer)
    assert type(layer.quant_method.moe_kernel.fused_experts).__name__ == "W4gemmExperts"
    check_experts(layer, tmp_path, prefix, 0.008)
