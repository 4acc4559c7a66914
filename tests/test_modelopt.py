"""Folders quantized by ModelOpt hold its numbers, and x is scaled where its AWQ wants it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from quantized_model import Numbers, Writer, assert_loads, change, configure, write_model
from tiny_model import LAYERS
from w4gemm import FormatError, QuantizedWeight, W4Experts, W4Linear, WeightFormat, fold_scales, quantize_activations
from w4gemm.checkpoints import open_checkpoint
from w4gemm.cli.__main__ import main
from w4gemm.integrations.transformers import W4GemmConfig, dequantize_layers, load, summarize

NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
NVFP4_W4A8 = NVFP4 | {"quant_algo": "W4A8_NVFP4_FP8"}
NVFP4_W4A8_G32 = NVFP4_W4A8 | {"group_size": 32}
MXFP4, MXFP4_W4A8 = NVFP4 | {"quant_algo": "mxfp4"}, NVFP4 | {"quant_algo": "W4A8_MXFP4_FP8"}
INT4 = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 32, "exclude_modules": ["lm_head"]}
W4A8 = INT4 | {"quant_algo": "W4A8_AWQ"}
E2M1 = torch.tensor(WeightFormat.parse("nvfp4").element_rule.values)
DOWN = "model.layers.1.mlp.down_proj"


def nvfp4(name: str, n: int, k: int, group: int = 16) -> Any:
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(n, k // group, generator=generator) * 400).to(torch.float8_e4m3fn)
    factor = torch.tensor(2.0**-14)  # a power of two, so that no order of multiplying rounds
    weight = E2M1[codes.int()] * scales.float().repeat_interleave(group, 1) * factor
    stored = {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales, "weight_scale_2": factor}
    return stored | {"input_scale": torch.tensor(0.5)}, weight


def nvfp4_folded(name: str, n: int, k: int, group: int = 16) -> Any:
    """What fold_scales makes of the numbers: fp8 x wants e4m3 products of scales and codes."""
    stored, exact = nvfp4(name, n, k, group)
    codes = torch.stack((stored["weight"] & 15, stored["weight"] >> 4), 2).flatten(1)
    scales, factors = stored["weight_scale"], stored["weight_scale_2"].expand(n)
    w = QuantizedWeight.from_codes(f"e2m1_g{group}_e4m3_row", codes, scales, channels=factors)
    assert torch.equal(w.dequantize(), exact)
    return stored, fold_scales(w)[0].dequantize()


def mxfp4(name: str, n: int, k: int) -> Any:
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 130, (n, k // 32), generator=generator, dtype=torch.uint8)
    weight = E2M1[codes.int()] * torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    return {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales}, weight


def int4(smooth: tuple[str, ...] = (), dtype: torch.dtype = torch.bfloat16, w4a8: bool = False) -> Writer:
    """``smooth``: ends of the names of modules whose x is scaled. ModelOpt itself writes scales in float32."""

    def write(name: str, n: int, k: int) -> Any:
        numbers = Numbers.random(n, k, 32, dtype=dtype)
        q = (torch.from_numpy(numbers.codes) - 8).to(torch.int8).view(torch.uint8) & 15  # two's complement
        stored = {"weight": q[::2] | q[1::2] << 4, "weight_scale": numbers.scales}
        if name.endswith(smooth) and smooth:
            stored["pre_quant_scale"] = torch.rand(k, generator=torch.Generator().manual_seed(k)) + 0.5
        if w4a8:
            stored |= {"weight_scale_2": torch.tensor(0.003), "input_scale": torch.tensor(0.01)}
            return stored, replace(numbers, scales=numbers.scales.half()).weight
        return stored, numbers.weight

    return write


@pytest.mark.parametrize(
    ("config", "write", "format"),
    [
        (NVFP4, nvfp4, "nvfp4"),
        (NVFP4 | {"quant_algo": "W4A16_NVFP4", "group_size": 32}, partial(nvfp4, group=32), "e2m1_g32_e4m3_row"),
        (NVFP4_W4A8, nvfp4_folded, "e2m1_g16_e4m3"),
        (NVFP4_W4A8_G32, partial(nvfp4_folded, group=32), "e2m1_g32_e4m3"),
        (MXFP4, mxfp4, "mxfp4"),
        (MXFP4_W4A8, mxfp4, "mxfp4"),
        (INT4, int4(), "int4_g32"),
        (INT4, int4(dtype=torch.float32), "int4_g32_fp32"),
        (W4A8, int4(dtype=torch.float32, w4a8=True), "int4_g32_fp16"),
    ],
    ids=["nvfp4", "nvfp4-g32", "nvfp4-fp8", "nvfp4-fp8-g32", "mxfp4", "mxfp4-w4a8", "int4", "int4-float32", "w4a8"],
)
@pytest.mark.parametrize("own_file", [False, True], ids=["config", "hf_quant_config"])
def test_weights(tmp_path: Path, config: dict[str, Any], write: Writer, format: str, own_file: bool) -> None:
    expected = write_model(tmp_path, config, write)
    if own_file:
        whole = json.loads((tmp_path / "config.json").read_text())
        quantization = whole.pop("quantization_config")
        (tmp_path / "config.json").write_text(json.dumps(whole))
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    checkpoint = open_checkpoint(tmp_path)
    for name, weight in expected.items():
        w = checkpoint.weight(name)
        assert torch.equal(w.dequantize(), weight), name
        fp8 = "fp8" if config in (W4A8, MXFP4_W4A8, NVFP4_W4A8, NVFP4_W4A8_G32) else None
        assert w.activations == checkpoint.modules[name].activations == fp8
    model, _ = load(tmp_path)
    assert summarize(model).formats == {str(WeightFormat.parse(format)): 7 * LAYERS}
    ids = torch.arange(1, 8)[None]
    again = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=W4GemmConfig(), dtype=torch.float32)
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("lost", ["group_size", "quantized_layers"])
def test_settings_that_are_in_modelopts_own_file_alone(tmp_path: Path, lost: str) -> None:
    """ModelOpt's config.json lacks the group size of AWQ, and lacked the layers of a mix."""
    expected = write_model(tmp_path, INT4, int4()) if lost == "group_size" else write_mix(tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    quantization = dict(whole["quantization_config"])
    del whole["quantization_config"][lost]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    checkpoint = open_checkpoint(tmp_path)
    for name in checkpoint.modules:
        assert torch.equal(checkpoint.weight(name).dequantize(), expected[name])
    assert checkpoint.modules.keys() == expected.keys()


@pytest.mark.parametrize("dense", [(), ("q_proj", "k_proj", "v_proj", "o_proj")], ids=["4-bit", "dense"])
@pytest.mark.parametrize("leaf", ["k_proj.k_scale", "v_proj.v_scale", "k_proj.k_bias", "v_proj.output_scale"])
def test_scales_of_a_quantized_cache_are_left_out(tmp_path: Path, leaf: str, dense: tuple[str, ...]) -> None:
    config = NVFP4 | {"exclude_modules": ["lm_head", *(["*self_attn*"] if dense else [])]}
    write_model(tmp_path, config, nvfp4, ("lm_head", *dense))
    ids = torch.arange(1, 8)[None]
    with torch.inference_mode():
        expected = load(tmp_path)[0](ids).logits
        scales = {f"model.layers.{i}.self_attn.{leaf}": torch.tensor(1.0) for i in range(LAYERS)}
        change(tmp_path, lambda tensors: tensors.update(scales))
        assert torch.equal(load(tmp_path)[0](ids).logits, expected)


def test_x_is_scaled_before_the_product(tmp_path: Path) -> None:
    expected = write_model(tmp_path, INT4, int4(("o_proj", "down_proj")))
    model, _ = load(tmp_path)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, W4Linear)}
    scaled = {name for name, m in layers.items() if m.pre_quant_scale is not None}
    assert scaled == {name for name in layers if name.endswith(("o_proj", "down_proj"))}
    down, ids = layers[DOWN], torch.arange(1, 8)[None]
    x, scale = torch.randn(3, down.in_features), torch.rand(96, generator=torch.Generator().manual_seed(96)) + 0.5
    assert torch.equal(down.pre_quant_scale, scale) and "pre_quant_scale=True" in repr(down)
    torch.testing.assert_close(down(x), (x * scale) @ expected[DOWN].T)
    with torch.inference_mode():
        logits = model(ids).logits
        model.save_pretrained(tmp_path / "saved")
        options = {"quantization_config": W4GemmConfig(), "dtype": torch.float32}
        for folder in (tmp_path, tmp_path / "saved"):
            again = AutoModelForCausalLM.from_pretrained(folder, **options)
            assert torch.equal(again(ids).logits, logits)
        torch.testing.assert_close(dequantize_layers(again, torch.float32)(ids).logits, logits, rtol=1e-4, atol=1e-5)
    fresh = W4Linear(96, 64, bias=False, format="int4_g32")
    fresh.load_state_dict(down.state_dict())
    assert torch.equal(fresh(x), down(x))


def write_mix(folder: Path) -> dict[str, torch.Tensor]:
    """Attention in FP8, the rest in NVFP4; return all weights."""

    def write(name: str, n: int, k: int) -> Any:
        if "self_attn" not in name:
            return nvfp4(name, n, k)
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)).to(torch.float8_e4m3fn)
        scales = {"weight_scale": torch.tensor(0.03), "input_scale": torch.tensor(2.0), "k_scale": torch.tensor(1.0)}
        return {"weight": weight} | scales, weight.float() * 0.03

    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "exclude_modules": ["lm_head"]}
    expected = write_model(folder, config, write)
    layers = {name: {"quant_algo": "FP8" if "self_attn" in name else "NVFP4", "group_size": 16} for name in expected}
    configure(folder, quantized_layers=layers)
    return expected


def test_a_mix_with_fp8(tmp_path: Path) -> None:
    """Layers in FP8 have the scale of the tensor; their scales of x and of a cache are not used."""
    nvfp4, fp8 = str(WeightFormat.parse("nvfp4")), "e4m3_col_fp32"
    assert_loads(tmp_path, write_mix(tmp_path), {fp8: 4 * LAYERS, nvfp4: 3 * LAYERS})


def test_w4a8_scales_and_then_quantizes_x(tmp_path: Path) -> None:
    expected = write_model(tmp_path, W4A8, int4(("down_proj",), torch.float32, w4a8=True))
    down = load(tmp_path)[0].get_submodule(DOWN)
    x, scale = torch.randn(3, 96), torch.rand(96, generator=torch.Generator().manual_seed(96)) + 0.5
    x8, token_scale = quantize_activations(x * scale)
    torch.testing.assert_close(down(x), (x8.float() * token_scale[:, None]) @ expected[DOWN].T)


@pytest.mark.parametrize(
    ("settings", "changed", "message"),
    [
        ({"quant_algo": "NVFP4_SVD"}, None, "product of low rank beside the weight is not added here; export .* NVFP4"),
        ({"quant_algo": "mxfp4"}, None, r"weight_scale is BF16, wanted U8 or F8_E8M0"),
        ({"quant_algo": "FP8"}, None, "quantized by 'FP8'; wanted one of NVFP4,"),
        ({"quant_algo": "W4A8_AWQ"}, None, "there is no weight_scale_2 beside its weight, weight_scale"),
        ({"exclude_modules": ["*down_proj"]}, None, "the config excludes it, but it has quantized tensors"),
        ({"group_size": 64}, None, "groups of 64 do not divide its 96 input features"),
        ({}, {f"{DOWN}.weight_scale_2": torch.tensor(1.0)}, "two scales"),
        ({}, {f"{DOWN}.pre_quant_scale": torch.ones(95)}, r"pre_quant_scale has shape \(95,\), wanted \(96,\)"),
    ],
)
def test_what_is_refused(tmp_path: Path, settings: dict[str, Any], changed: Any, message: str) -> None:
    write_model(tmp_path, INT4, int4())
    configure(tmp_path, **settings)
    change(tmp_path, lambda t: t.update(changed or {}))
    with pytest.raises(FormatError, match=message):
        open_checkpoint(tmp_path)


def test_experts_whose_x_is_scaled(tmp_path: Path) -> None:
    """All experts of a layer share the factors of x, as ModelOpt exports them; others are refused."""
    expected = write_model(tmp_path, INT4, int4(("w1", "w2", "w3")), ("lm_head", "gate"), architecture="mixtral")
    owner = "model.layers.1.block_sparse_moe.experts"
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.modules[f"{owner}.down_proj"].pre_quant_scale
    model, tokenizer = load(tmp_path)
    experts, ids = model.model.layers[1].mlp.experts, torch.arange(1, 8)[None]
    factors = {k: torch.rand(k, generator=torch.Generator().manual_seed(k)) + 0.5 for k in (64, 96)}
    assert torch.equal(experts.gate_up.pre_quant_scale, factors[64])
    assert torch.equal(experts.down.pre_quant_scale, factors[96])
    x, choice = torch.randn(3, 64), torch.tensor([[0], [3], [0]])
    for row, (e,) in enumerate(choice.tolist()):
        gate, up, down = (expected[f"{owner}.{e}.{role}"] for role in ("w1", "w3", "w2"))
        scaled = x[row] * factors[64]
        hidden = torch.nn.functional.silu(gate @ scaled) * (up @ scaled)
        y = experts(x, choice, torch.ones(3, 1))[row]
        torch.testing.assert_close(y, down @ (hidden * factors[96]), rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        logits = model(ids).logits
        model.save_pretrained(tmp_path / "saved")
        tokenizer.save_pretrained(tmp_path / "saved")
        options = {"quantization_config": W4GemmConfig(), "dtype": torch.float32}
        for folder in (tmp_path, tmp_path / "saved"):
            again = AutoModelForCausalLM.from_pretrained(folder, **options)
            assert torch.equal(again(ids).logits, logits)
            assert torch.equal(load(folder)[0](ids).logits, logits)
        torch.testing.assert_close(dequantize_layers(again, torch.float32)(ids).logits, logits, rtol=1e-4, atol=1e-5)
    change(tmp_path, lambda tensors: tensors[f"{owner}.2.w2.pre_quant_scale"].add_(1))
    with pytest.raises(FormatError, match=r"experts\.2\.w2 scales x \(pre_quant_scale\) by other factors than .*0\.w2"):
        load(tmp_path)


def test_experts_in_nvfp4_whose_x_is_quantized(tmp_path: Path) -> None:
    expected = write_model(tmp_path, NVFP4_W4A8, nvfp4_folded, ("lm_head", "gate"), architecture="mixtral")
    model, tokenizer = load(tmp_path)
    experts, ids = model.model.layers[1].mlp.experts, torch.arange(1, 8)[None]
    owner = "model.layers.1.block_sparse_moe.experts.3"
    assert experts.gate_up.weight.activations == experts.down.weight.activations == "fp8"
    gate_up = torch.stack([expected[f"{owner}.{leaf}"] for leaf in ("w1", "w3")], 1).flatten(0, 1)
    assert torch.equal(experts.gate_up.weight.expert(3).dequantize(), gate_up)
    assert torch.equal(experts.down.weight.expert(3).dequantize(), expected[f"{owner}.w2"])
    with torch.inference_mode():
        logits = model(ids).logits
        model.save_pretrained(tmp_path / "saved")
        tokenizer.save_pretrained(tmp_path / "saved")
        assert torch.equal(load(tmp_path / "saved")[0](ids).logits, logits)


def test_settings_of_all_experts_of_a_layer(tmp_path: Path) -> None:
    expected = write_model(tmp_path, INT4, int4(), ("lm_head", "gate"), architecture="qwen3_moe")
    layers = {name.partition(".experts.")[0] for name in expected if ".experts." in name}
    experts = {f"{name}.experts": {"quant_algo": "W4A16_AWQ", "group_size": 32} for name in layers}
    others = {name: {"quant_algo": "W4A16_AWQ", "group_size": 32} for name in expected if ".experts." not in name}
    configure(tmp_path, quant_algo="MIXED_PRECISION", group_size=None, quantized_layers=experts | others)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.modules["model.layers.1.mlp.experts.gate_up_proj"].format == WeightFormat(32)


def write_llama_4(folder: Path) -> dict[str, torch.Tensor]:
    """Experts of a layer in one tensor, as ModelOpt leaves them; return their numbers as transformers has them."""
    write_model(folder, NVFP4, nvfp4, ("lm_head", "router"), architecture="llama4_text")
    dense = {}

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            experts, k, n = tensors[name].shape
            stored, weight = nvfp4(name, n, k)
            for leaf, end in (("weight", ""), ("weight_scale", "_weight_scale")):
                each = [stored[leaf].view(torch.uint8).roll(e, 0).T for e in range(experts)]  # by rows
                tensors[name + end] = torch.stack(each).view(stored[leaf].dtype)
            own = 2.0 ** torch.arange(experts) if name.endswith("down_proj") else torch.ones(())  # or one for all
            tensors[f"{name}_weight_scale_2"] = stored["weight_scale_2"] * own
            tensors[f"{name}_input_scale"] = stored["input_scale"]
            dense[name] = torch.stack([weight.roll(e, 0).T * own.expand(experts)[e] for e in range(experts)])

    change(folder, pack)
    return dense


def test_llama_4(tmp_path: Path) -> None:
    expected = write_llama_4(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    for name, dense in expected.items():
        module, rows = checkpoint.modules[name], dense.mT
        assert (module.experts, module.n, module.k) == rows.shape and module.format == WeightFormat.parse("nvfp4")
        if module.fused:
            rows = torch.stack(rows.chunk(2, 1), 2).flatten(1, 2)
        assert torch.equal(checkpoint.weight(name).dequantize(), rows)
    ids = torch.arange(1, 8)[None]
    with torch.inference_mode():
        own = load(tmp_path)[0]
        assert sum(isinstance(module, W4Experts) for module in own.modules()) == LAYERS
        again = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=W4GemmConfig(), dtype=torch.float32)
        assert torch.equal(again(ids).logits, own(ids).logits)
        assert main(["convert", str(tmp_path), str(tmp_path / "own")]) == 0
        assert torch.equal(load(tmp_path / "own")[0](ids).logits, own(ids).logits)
    name = next(name for name in expected if "down" in name)
    scale = f"{name}_weight_scale"
    for damage, message in (
        (lambda t: t.pop(scale), "there is no weight_scale"),
        (lambda t: t.update({scale: t[scale][1:].clone()}), r"weight_scale has shape \(3, .* wanted that of 4 experts"),
        (lambda t: t.update({scale: t[scale][:, 1:].clone()}), "weight_scale has shape"),
        (lambda t: t.update({f"{scale}_2": t[f"{scale}_2"][1:].clone()}), "weight_scale_2 has shape"),
    ):
        whole = (tmp_path / "model.safetensors").read_bytes()
        change(tmp_path, damage)
        with pytest.raises(FormatError, match=f"{name}.*{message}"):
            open_checkpoint(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(whole)
    configure(tmp_path, quant_algo="W4A8_NVFP4_FP8")
    with pytest.raises(FormatError, match="all experts in one tensor in W4A8_NVFP4_FP8; wanted NVFP4"):
        open_checkpoint(tmp_path)
