"""DeepSeek's folders of two precisions: routed experts in 4 bits, other layers in fp8 with scales of blocks."""

from __future__ import annotations

import itertools
import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.quantizers.auto import AutoQuantizationConfig

from quantized_model import Numbers, assert_loads, change, configure, convert, write_model
from tiny_model import EXPERTS, LAYERS, write_dense
from w4gemm import FormatError, W4Experts
from w4gemm.checkpoints import find_checkpoint, open_checkpoint
from w4gemm.cli.__main__ import main
from w4gemm.integrations.transformers import W4GemmConfig, disable, enable, load

IDS = torch.arange(1, 12)[None]
EXPERT = re.compile(r".*\.experts\.\d+\.\w+")
BLOCK = 40, 24
"""Rows and columns of fp8 weights with a scale; they divide no size of the tiny models."""
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
W4AFP8 = {"quant_method": "w4afp8", "group_size": 32, "weight_block_size": list(BLOCK)}
ROUTERS = ("lm_head", "mlp.gate")
DOWN = "model.layers.1.mlp.experts.2.down_proj"
V4 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
V4_NAMES = (
    *(("model.embed_tokens", "embed"), ("lm_head", "head"), ("model.", "")),
    *((".self_attn.", ".attn."), (".mlp.", ".ffn.")),
)
V4_DENSE = ("embed", "head", "gate", "weights_proj", "compressor.wkv", "compressor.wgate")
"""Ends of the names of matrices that are published in 16 or 32 bits."""
knows_v4 = pytest.mark.skipif("deepseek_v4" not in CONFIG_MAPPING_NAMES, reason="this transformers has no DeepSeek-V4")


def generator(n: int, k: int) -> torch.Generator:
    return torch.Generator().manual_seed(n * k)


def blocks(scale: torch.Tensor, n: int, k: int, block: tuple[int, int]) -> torch.Tensor:
    """The scale of each element (n, k), by the index of its block."""
    return scale[torch.arange(n)[:, None] // block[0], torch.arange(k)[None] // block[1]]


def fp8(n: int, k: int, block: tuple[int, int] = BLOCK, powers: bool = False) -> tuple[torch.Tensor, ...]:
    """Weight in e4m3, its scales, and its numbers in float32."""
    g = generator(n, k)
    weight = (torch.randn(n, k, generator=g) * 100).to(torch.float8_e4m3fn)
    grid = -(-n // block[0]), -(-k // block[1])
    scale = 2.0 ** torch.randint(-13, -10, grid, generator=g) if powers else torch.rand(grid, generator=g) / 1000
    return weight, scale, weight.float() * blocks(scale, n, k, block)


def int4(n: int, k: int, group_size: int) -> tuple[torch.Tensor, ...]:
    """Two's complements of two columns a byte, float32 scales, and the numbers with scales rounded to bf16."""
    numbers = Numbers.random(n, k, group_size, dtype=torch.float32)
    q = torch.from_numpy(numbers.codes - 8)
    packed = (q[:, ::2] & 15 | (q[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    scales = numbers.scales.bfloat16().float()[:, torch.arange(k) // group_size]
    return packed, numbers.scales, q.float() * scales


def mxfp4(n: int, k: int) -> tuple[torch.Tensor, ...]:
    """Two codes a byte, scales e8m0, and the numbers."""
    g = generator(n, k)
    codes = torch.randint(0, 16, (n, k), generator=g)
    exponents = torch.randint(-6, -2, (n, k // 32), generator=g)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    numbers = torch.where(codes < 8, 1.0, -1.0) * E2M1[codes % 8]
    scales = (2.0**exponents).to(torch.float8_e8m0fnu)
    return packed, scales, numbers * (2.0**exponents).repeat_interleave(32, 1)


def write_w4afp8(folder: Path) -> dict[str, torch.Tensor]:
    """A tiny DeepSeek-V3 as TensorRT-LLM's script writes it, with a layer for further tokens; return its weights."""

    def write(name: str, n: int, k: int) -> Any:
        packed, scale, weight = int4(n, k, 32) if EXPERT.fullmatch(name) else fp8(n, k)
        return {"weight": packed, "weight_scale_inv": scale}, weight

    expected = convert(write_dense(folder, "deepseek_v3"), W4AFP8, write, ROUTERS)
    roles = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}

    def complete(tensors: dict[str, torch.Tensor]) -> None:
        for name in filter(EXPERT.fullmatch, expected):
            owner, _, role = name.rpartition(".")
            tensors[f"{owner}.{roles[role]}.input_scale"] = torch.ones(1)
        for name in [name for name in tensors if name.startswith("model.layers.1.mlp.experts")]:
            tensors[name.replace("layers.1", "layers.61")] = tensors[name].clone()

    change(folder, complete)
    return expected


def write_v4(folder: Path) -> dict[str, torch.Tensor]:
    """A tiny DeepSeek-V4 under the names of the published one; return its quantized weights by these."""
    write_dense(folder, "deepseek_v4")
    config = json.loads((folder / "config.json").read_text())
    config |= {"expert_dtype": "fp4", "quantization_config": V4 | {"weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps(config))
    stored, expected = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for ours, theirs in V4_NAMES:
            name = name.replace(ours, theirs)
        owner = name.removesuffix(".weight")
        if tensor.dim() != 2 or owner == name or owner.endswith(V4_DENSE):
            stored[name] = tensor
            continue
        n, k = tensor.shape
        if EXPERT.fullmatch(owner):
            stored[name], stored[f"{owner}.scale"], expected[owner] = mxfp4(n, k)
        else:
            stored[name], scale, expected[owner] = fp8(n, k, (128, 128), powers=True)
            stored[f"{owner}.scale"] = scale.to(torch.float8_e8m0fnu)
    stored |= {f"mtp.0.ffn.experts.0.w1.{leaf}": t for leaf, t in zip(("weight", "scale"), mxfp4(32, 64), strict=False)}
    stored |= {f"mtp.0.ffn.experts.0.w3.{leaf}": t for leaf, t in zip(("weight", "scale"), mxfp4(32, 64), strict=False)}
    save_file(stored, folder / "model.safetensors")
    return expected


@knows_v4
def test_a_dense_v4_keeps_its_tables(tmp_path: Path) -> None:
    """Tables of tokens' experts are integers; convert wrote them as floats, which no model takes."""
    folder = write_dense(tmp_path / "dense", "deepseek_v4")
    assert open_checkpoint(folder).dense("model.layers.0.mlp.gate.tid2eid").dtype == torch.int64
    assert main(["convert", str(folder), str(tmp_path / "out"), "--format", "int4_g32"]) == 0
    expected = open_checkpoint(folder, "int4_g32")
    again, table = open_checkpoint(tmp_path / "out"), "model.layers.0.ffn.gate.tid2eid"
    assert torch.equal(again.dense(table), expected.dense("model.layers.0.mlp.gate.tid2eid"))
    assert load(tmp_path / "out")[0] is not None


def assert_weights(folder: Path, expected: dict[str, torch.Tensor], roles: dict[str, tuple[str, ...]]) -> None:
    """Experts bit for bit, gates and ups in pairs; fp8 weights as dense tensors bit for bit."""
    checkpoint = open_checkpoint(folder)
    for name, module in checkpoint.modules.items():
        owner, _, product = name.rpartition(".")
        if name in expected:
            assert module.format.element == "e4m3" and torch.equal(checkpoint.weight(name).dequantize(), expected[name])
            continue
        if not any(expert.startswith(owner) for expert in expected):
            continue  # of a layer for further tokens
        each = [[expected[f"{owner}.{e}.{role}"] for role in roles[product]] for e in range(EXPERTS)]
        rows = torch.stack([torch.stack(parts, 1).flatten(0, 1) for parts in each])
        assert module.experts == EXPERTS
        assert torch.equal(checkpoint.weight(name).dequantize(), rows), name
    for name in [name for name in expected if not EXPERT.fullmatch(name) and name not in checkpoint.modules]:
        assert torch.equal(checkpoint.dense(f"{name}.weight"), expected[name]), name
        assert checkpoint.stored_type(f"{name}.weight") == "F8_E4M3"


@pytest.mark.parametrize("own_file", [False, True], ids=["config", "hf_quant_config"])
def test_w4afp8(tmp_path: Path, own_file: bool) -> None:
    expected = write_w4afp8(tmp_path)
    if own_file:  # what TensorRT-LLM's script leaves of it says neither groups nor blocks
        config = json.loads((tmp_path / "config.json").read_text())
        scheme = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None} | config.pop("quantization_config")
        del scheme["quant_method"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": scheme}))
    assert find_checkpoint(tmp_path).format.name == "w4afp8"
    assert_weights(tmp_path, expected, {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)})
    model, _ = load(tmp_path)
    experts = [module for module in model.modules() if isinstance(module, W4Experts)]
    assert [layer.gate_up.weight.activations for layer in experts] == ["fp8"] * (LAYERS - 1)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=W4GemmConfig(), dtype=torch.float32)
    with torch.inference_mode():
        logits = model(IDS).logits
        assert logits.isfinite().all() and torch.equal(again(IDS).logits, logits)
    q = "model.layers.0.self_attn.q_b_proj"
    assert torch.equal(again.get_submodule(q).weight, expected[q])


def test_groups_and_blocks_of_128(tmp_path: Path) -> None:
    """The sizes that are meant where a config names none; 300 x 200 has blocks that are cut off. Scales of fp8 may also
    be one a row, or one."""
    packed, scales, weight = int4(64, 256, 128)
    wide, grid, dense = fp8(300, 200, (128, 128))
    row = torch.rand(300, 1)
    tensors = {"a.weight": packed, "a.weight_scale_inv": scales, "b.weight": wide, "b.weight_scale_inv": grid}
    tensors |= {"c.weight": wide.clone(), "c.weight_scale": row}
    tensors |= {"d.weight": wide.clone(), "d.weight_scale": torch.tensor(0.5), "d.input_scale": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "w4afp8"}}))
    checkpoint = open_checkpoint(tmp_path)
    assert str(checkpoint.modules["a"].format) == "int4_g128"
    formats = {name: str(checkpoint.modules[name].format) for name in "bcd"}
    assert formats == {"b": "e4m3_g128_b128", "c": "e4m3_col_fp32", "d": "e4m3_col_fp32"} and not checkpoint.tensors
    actual = checkpoint.weight("a").dequantize()
    assert torch.equal(actual, weight)
    lossless = weight / blocks(scales.bfloat16().float(), 64, 256, (1, 128)) * blocks(scales, 64, 256, (1, 128))
    assert not torch.equal(actual, lossless) and ((actual - lossless).abs() <= 2**-8 * lossless.abs()).all()
    assert torch.equal(checkpoint.weight("b").dequantize(), dense)
    assert torch.equal(checkpoint.weight("b").dequantize(torch.bfloat16), dense.bfloat16())
    assert torch.equal(checkpoint.weight("c").dequantize(), wide.float() * row)
    assert torch.equal(checkpoint.weight("d").dequantize(), wide.float() * 0.5)


@knows_v4
def test_v4(tmp_path: Path) -> None:
    """Also against transformers' own reader, which makes the whole model dense."""
    expected = write_v4(tmp_path)
    assert find_checkpoint(tmp_path).format.name == "deepseek-v4"
    assert_weights(tmp_path, expected, {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)})
    model, _ = load(tmp_path)
    experts = [module for module in model.modules() if isinstance(module, W4Experts)]
    assert len(experts) == LAYERS
    assert {layer.activation for layer in experts} == {"silu_mul(limit=10)"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=W4GemmConfig(), dtype=torch.float32)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(IDS).logits
        assert torch.equal(again(IDS).logits, logits)
        torch.testing.assert_close(own(IDS).logits, logits, rtol=1e-4, atol=1e-4)
    enable()
    try:
        unasked = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        other = AutoQuantizationConfig.from_dict(V4)
    finally:
        disable()
    assert type(other).__name__ == "FineGrainedFP8Config"
    with torch.inference_mode():
        assert torch.equal(unasked(IDS).logits, logits)


@pytest.mark.parametrize("kind", ["w4afp8", pytest.param("v4", marks=knows_v4)])
def test_convert(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder that is written has the same numbers, and none of the source's words on how it was quantized."""
    folder, converted = tmp_path / "model", tmp_path / "converted"
    (write_w4afp8 if kind == "w4afp8" else write_v4)(folder)
    (folder / "hf_quant_config.json").write_text("{}")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert main(["convert", str(folder), str(converted), "--to", "w4gemm"]) == 0
    written = json.loads((converted / "config.json").read_text())
    assert written["quantization_config"]["quant_method"] == "w4gemm" and "expert_dtype" not in written
    assert not (converted / "hf_quant_config.json").exists()
    source, copy = open_checkpoint(folder), open_checkpoint(converted)
    assert copy.modules == {n: replace(m, fused=()) for n, m in source.modules.items()}
    for name in source.modules:
        assert torch.equal(source.weight(name).dequantize(), copy.weight(name).dequantize()), name
    for name in source.tensors:
        stored = source.stored_type(name)
        expected = source.dense(name, torch.bfloat16) if stored == "F8_E4M3" else source.dense(name)
        assert torch.equal(copy.dense(name, expected.dtype), expected), name
        assert copy.stored_type(name) == ("BF16" if stored == "F8_E4M3" else stored)
    with torch.inference_mode():
        assert load(converted)[0](IDS).logits.isfinite().all()
    assert main(["convert", str(folder), str(tmp_path / "other"), "--to", "compressed-tensors"]) == 0
    other = open_checkpoint(tmp_path / "other")
    assert other.modules == source.modules
    for name in source.modules:
        assert torch.equal(source.weight(name).dequantize(), other.weight(name).dequantize()), name
    capsys.readouterr()
    assert main(["inspect", str(folder), "--device", "h200"]) == 0
    shown = capsys.readouterr().out
    for words in ("int4_g32 fp8", "F8_E4M3") if kind == "w4afp8" else ("mxfp4", "e4m3_col_fp32"):
        assert words in shown


Q_A = "model.layers.0.self_attn.q_a_proj"


@pytest.mark.parametrize(
    ("settings", "changed", "message"),
    [
        ({"group_size": 16}, {}, r"weight_scale_inv has shape \(64, 1\), wanted \(64, 2\)"),
        ({"weight_block_size": [128]}, {}, r"weight_block_size is \[128\], wanted two positive integers"),
        ({"weight_block_size": [16, 16]}, {}, r"its scale is F32 of shape .* for blocks of 16 x 16"),
        ({}, {f"{Q_A}.weight_scale_inv": None}, f"{Q_A}.weight is F8_E4M3 .* wanted one scale beside it, got none"),
        ({}, {f"{Q_A}.weight_scale": torch.ones(1)}, "wanted one scale beside it, got .*weight_scale_inv, .*weight_sc"),
        (
            {},
            {f"{Q_A}.weight_scale_inv": torch.ones(2, 2)},
            rf"{Q_A}.weight in fp8 has shape \(32, 64\), and its scale",
        ),
        ({}, {f"{DOWN}.weight": None}, f"{DOWN}: there is no weight beside its"),
        (
            {},
            {f"{DOWN}.weight_scale_inv": None},
            f"{DOWN}.weight is I8 of shape .*, wanted weight_scale_inv, as a packed module has, beside it, got none",
        ),
        ({}, {f"{DOWN}.weight": torch.ones(64, 16).to(torch.uint8)}, f"{DOWN}: weight is U8, wanted I8"),
    ],
)
def test_what_is_refused(tmp_path: Path, settings: dict[str, Any], changed: dict[str, Any], message: str) -> None:
    write_w4afp8(tmp_path)
    configure(tmp_path, **settings)

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in changed.items():
            tensors.pop(name, None)
            tensors |= {} if tensor is None else {name: tensor}

    change(tmp_path, damage)
    with pytest.raises(FormatError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("block", [(128, 128), (32, 64), None])
def test_fp8_alone(tmp_path: Path, block: tuple[int, int] | None) -> None:
    """As DeepSeek-V3 and Qwen are published; MXFP8 without blocks. A single block is of all rows."""

    def write(name: str, n: int, k: int) -> Any:
        weight, scale, numbers = fp8(n, k, block or (1, 32), powers=block is None)
        scales = {"weight_scale_inv": scale} if block else {"weight_scale": scale.to(torch.float8_e8m0fnu)}
        return {"weight": weight} | scales, numbers

    scheme = {"quant_method": "fp8", "weight_block_size": list(block or (128, 128))}
    expected = write_model(tmp_path, scheme, write)
    formats = {
        (128, 128): {"e4m3_col_fp32": 7 * LAYERS},
        (32, 64): {"e4m3_g64_fp32": 5 * LAYERS, "e4m3_col_fp32": 2 * LAYERS},
        None: {"e4m3_g32_e8m0": 7 * LAYERS},
    }
    assert_loads(tmp_path, expected, formats[block])


@pytest.mark.parametrize("method", ["fbgemm_fp8", "mxfp8", "fp8"])
def test_other_names_of_fp8(tmp_path: Path, method: str) -> None:
    """As Meta publishes Llama 3.1 405B, transformers calls MXFP8, and Mistral names its scales."""

    def write(name: str, n: int, k: int) -> Any:
        weight, scale, numbers = fp8(n, k, {"mxfp8": (1, 32), "fp8": (n, k)}.get(method, (1, k)), method == "mxfp8")
        if method == "mxfp8":
            return {"weight": weight, "weight_scale_inv": scale.to(torch.float8_e8m0fnu).view(torch.uint8)}, numbers
        if method == "fbgemm_fp8":
            return {"weight": weight, "weight_scale": scale}, numbers
        return {"weight": weight, "qscale_weight": scale.view(()), "qscale_act": torch.ones(())}, numbers

    settings = {"weight_block_size": [1, 32], "scale_fmt": "ue8m0"} if method == "mxfp8" else {}
    expected = write_model(tmp_path, {"quant_method": method} | settings, write)
    assert_loads(tmp_path, expected, {"e4m3_g32_e8m0" if method == "mxfp8" else "e4m3_col_fp32": 7 * LAYERS})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=W4GemmConfig(), dtype=torch.float32)
    assert torch.equal(model(IDS).logits, load(tmp_path)[0](IDS).logits)


@pytest.mark.parametrize("method", ["tensor", "row", "block"])
def test_fp8_of_gptqmodel(tmp_path: Path, method: str) -> None:
    """Its weight_scale_inv is the largest fp8 number / the largest weight, and divides; others' of that name
    multiplies. Source: GPTQModel f4c327a, nn_modules/qlinear/fp8.py."""

    def write(name: str, n: int, k: int) -> Any:
        w = torch.randn(n, k, generator=generator(n, k)) / 16
        sizes = {"tensor": (n, k), "row": (1, k), "block": (32, 32)}[method]
        largest = w.abs().unflatten(0, (-1, sizes[0])).unflatten(2, (-1, sizes[1])).amax((1, 3))
        scale = 448 / largest
        factors = blocks(scale, n, k, sizes)
        weight = (w * factors).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = scale if method == "block" else scale.flatten() if method == "row" else scale.view(())
        return {"weight": weight, "weight_scale_inv": stored}, weight.float() * factors.reciprocal()

    scheme = {"quant_method": "fp8", "format": "float8_e4m3fn", "weight_scale_semantics": "inverse"}
    scheme |= {"weight_scale_method": method} | ({"weight_block_size": [32, 32]} if method == "block" else {})
    expected = write_model(tmp_path, scheme, write)
    format = "e4m3_g32_fp32" if method == "block" else "e4m3_col_fp32"
    assert_loads(tmp_path, expected, {format: 7 * LAYERS})
    scale = "model.layers.0.mlp.down_proj.weight_scale_inv"
    change(tmp_path, lambda tensors: tensors.update({scale: tensors[scale].bfloat16()}))
    with pytest.raises(FormatError, match="down_proj.weight in fp8 has a scale that divides and is BF16, wanted F32"):
        open_checkpoint(tmp_path)
    configure(tmp_path, weight_scale_semantics="direct")
    with pytest.raises(FormatError, match="weight_scale_semantics is 'direct', wanted 'inverse' or no such setting"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["weight_block_size", "config_groups"])
def test_one_number_is_no_scale_of_blocks(tmp_path: Path, kind: str) -> None:
    """A scale of blocks that was cut to its first number; one of the whole tensor is legal where the config has none
    of blocks, or other groups."""
    weight, scale, _ = fp8(256, 256, (128, 128))
    save_file({"a.weight": weight, "a.weight_scale_inv": scale[:1, :1].contiguous()}, tmp_path / "model.safetensors")
    fp8_of = {"num_bits": 8, "type": "float"}
    blocks = {"weights": fp8_of | {"strategy": "block", "block_structure": [128, 128]}}
    whole = {"weights": fp8_of | {"strategy": "tensor"}}
    settings = {"weight_block_size": [128, 128]} if kind == "weight_block_size" else {"config_groups": {"0": blocks}}
    legal = {} if kind == "weight_block_size" else {"config_groups": {"0": blocks, "1": whole}}

    def opened(settings: dict[str, Any]) -> Any:
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"} | settings}))
        return open_checkpoint(tmp_path)

    with pytest.raises(
        FormatError, match=r"a.weight .* its scale shape \(1, 1\); wanted \(2, 2\), because config.json"
    ):
        opened(settings)
    assert str(opened(legal).modules["a"].format) == "e4m3_col_fp32"


def test_codes_that_are_no_numbers(tmp_path: Path) -> None:
    weight, scale, _ = fp8(64, 64, (128, 128))
    weight.view(torch.uint8)[3, 5] = 0x7F
    save_file({"a.weight": weight, "a.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(FormatError, match="a: codes: wanted finite numbers"):
        open_checkpoint(tmp_path).weight("a")


@pytest.mark.parametrize("place", ["codes", "scale"])
def test_dense_weights_that_are_no_numbers(tmp_path: Path, place: str) -> None:
    """Experts whose other product is not there become dense."""
    weight, scale, _ = fp8(64, 64, (128, 128))
    if place == "codes":
        weight.view(torch.uint8)[3, 5] = 0x7F
    scale = torch.full_like(scale, float("nan")) if place == "scale" else scale
    name, fine = "model.layers.0.mlp.experts.down_proj", fp8(64, 64, (128, 128))
    stored = {name: weight[None], f"{name}_scale_inv": scale[None], "a.weight": fine[0], "a.weight_scale_inv": fine[1]}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(FormatError, match=rf"{name}: wanted finite numbers in fp8 and scales, got (1|4096) weights"):
        open_checkpoint(tmp_path).dense(name)


def test_scales_of_blocks_as_modelopt_has_them(tmp_path: Path) -> None:
    """FP8_PB_WO has the grid of scales as (rows, 1, columns, 1)."""
    weight, scale, expected = fp8(192, 256, (128, 128))
    save_file({"a.weight": weight, "a.weight_scale": scale[:, None, :, None]}, tmp_path / "model.safetensors")
    scheme = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": scheme}))
    w = open_checkpoint(tmp_path).weight("a")
    assert str(w.format) == "e4m3_g128_b128" and torch.equal(w.dequantize(), expected)


def test_fp8_in_blocks_that_no_format_has(tmp_path: Path) -> None:
    weight, scale, _ = fp8(64, 64)
    save_file({"a.weight": weight, "a.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    message = "all its quantized weights are in fp8 with blocks of 40 x 24, which no format has"
    for method in ("w4afp8", "fp8"):
        scheme = {"quant_method": method, "weight_block_size": list(BLOCK)}
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": scheme}))
        with pytest.raises(FormatError, match=message):
            open_checkpoint(tmp_path)


def private_bytes() -> int:
    """Memory of this process that is no file's."""
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))


@pytest.mark.parametrize("kind", ["w4afp8", pytest.param("v4", marks=knows_v4)])
def test_both_ways_keep_the_same_tensors_in_float32(tmp_path: Path, kind: str) -> None:
    """They are what a model's code wants in float32 beside bf16, such as the router's bias."""
    (write_w4afp8 if kind == "w4afp8" else write_v4)(tmp_path)
    ways = (
        load(tmp_path, dtype=torch.bfloat16)[0],
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=W4GemmConfig(), dtype=torch.bfloat16),
    )
    own, theirs = ({name: t for name, t in way.state_dict().items() if hasattr(t, "dtype")} for way in ways)
    assert own.keys() == theirs.keys()
    assert {n: t.dtype for n, t in own.items()} == {n: t.dtype for n, t in theirs.items()}
    assert all(torch.equal(t.float(), theirs[n].float()) for n, t in own.items() if t.is_floating_point())
    assert own["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


def write_wide(folder: Path) -> None:
    """A tiny DeepSeek-V3 with more and larger experts: all but its first layer are its second one's."""
    layers, experts, hidden = 4, 32, 2048
    write_w4afp8(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "n_routed_experts": experts, "moe_intermediate_size": hidden}
    (folder / "config.json").write_text(json.dumps(config))
    wide = {name: t for name, t in load_file(folder / "model.safetensors").items() if ".61." not in name}
    second = {name: t for name, t in wide.items() if ".layers.1." in name and "experts." not in name}
    for name in [name for name in wide if "experts." in name]:
        del wide[name]
    for role, shape in (("gate_proj", (hidden, 64)), ("up_proj", (hidden, 64)), ("down_proj", (64, hidden))):
        second[f"model.layers.1.mlp.shared_experts.{role}.weight"] = torch.zeros(shape)
    for layer in range(1, layers):
        wide |= {name.replace(".1.", f".{layer}.", 1): t.clone() for name, t in second.items()}
        for expert, (role, n, k) in itertools.product(
            range(experts), (("gate_proj", hidden, 64), ("up_proj", hidden, 64), ("down_proj", 64, hidden))
        ):
            name = f"model.layers.{layer}.mlp.experts.{expert}.{role}"
            wide[f"{name}.weight"] = torch.randint(-128, 128, (n, k // 2), dtype=torch.int8)
            wide[f"{name}.weight_scale_inv"] = torch.rand(n, k // 32)
    for name in [name for name in wide if ".mlp.gate." in name]:  # the router's
        wide[name] = torch.randn(experts, *wide[name].shape[1:])
    save_file(wide, folder / "model.safetensors")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_memory_while_loading(tmp_path: Path) -> None:
    """It never holds more than the loaded model and one layer; a second copy of the experts would be three layers."""
    write_wide(tmp_path)
    peaks, done = [private_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peaks.append(private_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        model, _ = load(tmp_path)
    finally:
        done.set()
        thread.join()
    packed = sum(t.nbytes for t in model.buffers())
    held = packed + sum(t.nbytes for t in model.parameters())
    assert len(peaks) > 20 and packed > 15 * 2**20
    assert max(peaks) - peaks[0] < held + packed / 3, (max(peaks) - peaks[0], held, packed)
