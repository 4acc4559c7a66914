"""Each stored tensor is part of a packed module, dense, or left out with a reason; codes never become dense numbers."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from transformers import AutoModelForCausalLM

import test_compressed_tensors
from fuzz import samples
from quantized_model import change, configure, convert, put, write_model
from test_mixtures import write_gpt_oss
from tiny_model import LAYERS, write_dense, write_gguf
from w4gemm import FormatError, QuantizedWeight
from w4gemm.checkpoints import open_checkpoint
from w4gemm.checkpoints.gguf import GGUFCheckpoint
from w4gemm.checkpoints.gguf.file import GGUFFile
from w4gemm.checkpoints.quantized_folder import BESIDE, QuantizedFolder
from w4gemm.cli.__main__ import main
from w4gemm.integrations.transformers import W4GemmConfig, load, places

E4M3 = torch.float8_e4m3fn
EXPERTS = "model.layers.0.mlp.experts"
BROKEN = ("weight",)
"""Samples that are no checkpoint of a model."""


def compressed(folder: Path, **more: torch.Tensor) -> Path:
    """A folder with two packed modules and more tensors, without a model."""
    samples.FORMATS["compressed-tensors"](folder)
    change(folder, lambda tensors: tensors.update({name: t.contiguous() for name, t in more.items()}))
    configure(folder, weight_block_size=[16, 32])
    return folder


def names_in(checkpoint: Any) -> set[str]:
    if isinstance(checkpoint, GGUFCheckpoint):
        return set(checkpoint.file.tensors)
    return set(load_file(checkpoint.path / "model.safetensors"))


@pytest.mark.parametrize("kind", sorted(samples.FORMATS.keys() - BROKEN))
def test_each_tensor_is_in_one_place(kind: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(samples.FORMATS[kind](tmp_path / "in"))
    assert isinstance(checkpoint, (QuantizedFolder, GGUFCheckpoint))
    of_modules = [name for module in checkpoint.modules for name in checkpoint.stored_names(module)]
    beside = {f"{module}.{leaf}" for module in checkpoint.modules for leaf in BESIDE}
    dense = [name for tensor in checkpoint.tensors.keys() - beside for name in checkpoint.stored_names(tensor)]
    assert sorted([*of_modules, *dense, *checkpoint.left_out]) == sorted(names_in(checkpoint))
    for name in checkpoint.tensors.keys() & beside:
        assert set(checkpoint.stored_names(name)) <= set(of_modules)


SCALED = [
    ((48, 64), ()),
    ((48, 64), (1, 1)),
    ((48, 64), (48,)),
    ((48, 64), (48, 1)),
    ((40, 70), (3, 3)),
    ((3, 48, 64), ()),
    ((3, 48, 64), (3,)),
    ((3, 48, 64), (3, 1, 1)),
    ((3, 48, 64), (3, 48, 1)),
    ((3, 48, 64), (3, 1, 64)),
    ((3, 40, 70), (3, 3, 3)),
]
"""Shapes of weights in fp8 and of their scales, in blocks of 16 x 32."""


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
@pytest.mark.parametrize(("shape", "scales"), SCALED)
def test_weights_in_fp8_have_their_scales(
    shape: tuple[int, ...], scales: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    w, scale = torch.randn(shape).to(dtype), torch.rand(scales) + 0.5
    factors = scale
    if len(scale.shape) == 1:
        factors = scale.view(-1, *[1] * (len(shape) - 1))
    elif scale.shape[-2:] == (3, 3):
        factors = scale.repeat_interleave(16, -2).repeat_interleave(32, -1)[..., : shape[-2], : shape[-1]]
    matrix = len(shape) == 2
    weight = "model.c.weight" if matrix else f"{EXPERTS}.down_proj"
    for end in ("_scale_inv", "_scale", *(() if matrix else ("_weight_scale",))):
        checkpoint = open_checkpoint(compressed(tmp_path, **{weight: w, weight + end: scale}))
        if matrix:
            assert checkpoint.modules["model.c"].format.element == ("e4m3" if dtype == E4M3 else "e5m2")
            assert torch.equal(checkpoint.weight("model.c").dequantize(), w.float() * factors)
        else:
            assert checkpoint.stored_type(weight).startswith("F8_")
            assert torch.equal(checkpoint.dense(weight), w.float() * factors)
        dense = {"model.a.bias", "model.norm.weight", *([] if matrix else [weight])}
        assert checkpoint.tensors.keys() == dense
        assert checkpoint.left_out[weight + end] == f"the scale of {weight}, which is read with it"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"up": torch.ones(3, 32, 64).to(E4M3)}, r"up is F8_E4M3 of shape \(3, 32, 64\), wanted one scale beside it"),
        (
            {"up": torch.ones(3, 32, 64).to(E4M3), "up_scale": torch.ones(3, 32)},
            r"its scale is F32 of shape \(3, 32\); wanted one number, \(3, 32, 1\), or \(3, 2, 2\) for blocks of 16 x",
        ),
        (
            {"up": torch.ones(32, 64).to(E4M3), "up_scale": torch.ones(1, 64)},
            r"its scale is F32 of shape \(1, 64\); wanted one number, \(32, 1\), or \(2, 2\)",
        ),
        (
            {"up": torch.ones(64).to(E4M3), "up_scale": torch.ones(1)},
            r"up is in fp8 and has shape \(64,\), wanted .n, k.",
        ),
        (
            {"up": torch.ones(3, 32, 64).to(E4M3), "up_scale": torch.ones(3), "up_scale_inv": torch.ones(3)},
            r"up is in fp8, wanted one scale beside it, got .*up_scale_inv, .*up_scale",
        ),
        ({"up_packed": torch.ones(3, 32, 8).int()}, r"up_packed is I32 of shape \(3, 32, 8\), wanted weight_packed or"),
        ({"up": torch.ones(3, 32, 32).byte(), "up_weight_scale_2": torch.ones(3)}, r"up is U8 of shape \(3, 32, 32\)"),
        ({"up": torch.ones(3, 32, 32).char()}, r"up is I8 of shape \(3, 32, 32\), wanted weight_packed or"),
    ],
)
def test_codes_without_scales_are_refused(tensors: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message):
        open_checkpoint(compressed(tmp_path, **{f"{EXPERTS}.{name}": t for name, t in tensors.items()}))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_dense_numbers_of_a_packed_module_are_finite(number: float, tmp_path: Path) -> None:
    """Its bias, in each kind of file; the norm, of no packed module, is taken as it is."""

    def refused(folder: Path, module: str, part: str = "bias") -> None:
        with pytest.raises(FormatError, match=rf"{module}: {part}: wanted finite numbers, got 1 of NaN or infinity"):
            open_checkpoint(folder).weight(module)

    compressed(tmp_path / "integers")
    change(
        tmp_path / "integers", lambda t: [t[name][0].fill_(number) for name in ("model.a.bias", "model.norm.weight")]
    )
    refused(tmp_path / "integers", "model.a")
    assert not open_checkpoint(tmp_path / "integers").dense("model.norm.weight").isfinite().all()
    write_gpt_oss(tmp_path / "experts")
    change(tmp_path / "experts", lambda t: t[f"{EXPERTS}.gate_up_proj_bias"][1, 2].fill_(number))
    refused(tmp_path / "experts", f"{EXPERTS}.gate_up_proj")
    write_gguf(file := tmp_path / "qwen2.gguf", "qwen2")
    info = GGUFFile(file).info("blk.0.attn_q.bias")
    with file.open("r+b") as f:
        f.seek(info.offset)
        f.write(struct.pack("<f", number))
    refused(file, "model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize("number", [math.nan, math.inf, 0.0])
def test_a_factor_of_nvfp4_is_a_number_to_divide_by(number: float, tmp_path: Path) -> None:
    """Infinity would make a weight of zeros."""
    samples.FORMATS["compressed-nvfp4"](tmp_path)
    change(tmp_path, lambda tensors: tensors["model.a.weight_global_scale"].fill_(number))
    message = (
        "channels: wanted at most" if number == 0 else "weight_global_scale: wanted finite numbers, got 1 of NaN or"
    )
    with pytest.raises(FormatError, match=f"model.a: {message}"):
        open_checkpoint(tmp_path).weight("model.a")


def test_integers_that_are_no_codes_are_dense(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.gate.tid2eid"
    checkpoint = open_checkpoint(compressed(tmp_path, **{name: torch.arange(6).view(3, 2).int()}))
    assert checkpoint.dense(name).tolist() == [[0, 1], [2, 3], [4, 5]]


def test_experts_in_one_fp8_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By all ways: `inspect` says fp8, `convert` keeps them packed, and transformers gets the same."""
    folder = write_dense(tmp_path / "in", "qwen3_moe")
    convert(folder, test_compressed_tensors.config(), test_compressed_tensors.writer(), ("gate", "lm_head", "proj"))
    experts: dict[str, torch.Tensor] = {}

    def in_one(tensors: dict[str, torch.Tensor]) -> None:
        for owner in (f"model.layers.{i}.mlp.experts" for i in range(LAYERS)):
            each = [{r: tensors.pop(f"{owner}.{e}.{r}_proj.weight") for r in ("gate", "up", "down")} for e in range(4)]
            wholes = {"gate_up": [torch.cat((e["gate"], e["up"])) for e in each], "down": [e["down"] for e in each]}
            for product, matrices in wholes.items():
                w = torch.stack(matrices)
                scale = w.abs().amax(-1, keepdim=True) / 448
                tensors[f"{owner}.{product}_proj"] = stored = (w / scale).to(E4M3)
                tensors[f"{owner}.{product}_proj_scale"] = scale
                experts[f"{owner}.{product}_proj"] = stored.float() * scale

    change(folder, in_one)
    query = "model.layers.0.self_attn.q_proj"
    put(folder, f"{query}.weight", None)
    parts, _ = test_compressed_tensors.writer()(query, 64, 64)
    change(folder, lambda tensors: tensors.update({f"{query}.{leaf}": t for leaf, t in parts.items()}))
    assert main(["inspect", str(folder), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["dense"]
    assert {listed[name]["stored"] for name in experts} == {"F8_E4M3"}
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=W4GemmConfig(), dtype=torch.float32)
    other, _ = load(folder)
    assert main(["convert", str(folder), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    converted = open_checkpoint(tmp_path / "out")
    for name, weight in experts.items():
        for made in (model, other):
            w = made.get_submodule(name.removesuffix("_proj")).weight
            assert str(w.format) == "e4m3_col_fp32" and torch.equal(in_order(w, name), weight)
        w = converted.weight(name)
        assert str(w.format) == "e4m3_col_fp32" and torch.equal(in_order(w, name), weight)
    assert not experts.keys() & converted.tensors.keys()


def in_order(w: QuantizedWeight, name: str) -> torch.Tensor:
    """Gates before ups, as the model's own parameter has them."""
    rows = w.dequantize()
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), 1) if "gate_up" in name else rows


@pytest.mark.parametrize(
    ("scales", "block", "format"),
    [
        (lambda e, n, k: (e, n, 1), None, "e4m3_col_fp32"),
        (lambda e, n, k: (e,), None, "e4m3_col_fp32"),
        (lambda e, n, k: (1,), None, "e4m3_col_fp32"),
        (lambda e, n, k: (e, -(-n // 128), -(-k // 128)), [128, 128], "e4m3_g128_b128"),
        (lambda e, n, k: (e, n // 16, k // 32), [16, 32], "e4m3_g32_fp32"),
    ],
    ids=["rows", "experts", "one", "128 x 128", "16 x 32"],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_in_one_fp8_tensor_stay_packed(
    tmp_path: Path, scales: Any, block: list[int] | None, format: str, transposed: bool
) -> None:
    torch.manual_seed(0)
    count, hidden, features = 2, 128, 256
    tensors, expected = {}, {}
    sizes = {"gate_up_proj": (2 * hidden, features), "down_proj": (features, hidden)}
    for leaf, (n, k) in sizes.items():
        w, scale = torch.randn(count, n, k).to(E4M3), torch.rand(scales(count, n, k)) + 0.5
        rows, columns = block or [1, k]
        whole = scale.view(-1, 1, 1) if scale.dim() == 1 else scale.repeat_interleave(rows, 1)[:, :n]
        expected[leaf] = w.float() * (whole.repeat_interleave(columns, 2)[..., :k] if scale.dim() == 3 else whole)
        w, scale = (w.mT, scale.mT if scale.dim() == 3 else scale) if transposed else (w, scale)
        tensors |= {f"{EXPERTS}.{leaf}": w.contiguous(), f"{EXPERTS}.{leaf}_scale_inv": scale.contiguous()}
    save_file(tensors, tmp_path / "model.safetensors")
    block = block and (block[::-1] if transposed else block)
    settings = {"quant_method": "fp8", "weight_block_size": block}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    checkpoint = open_checkpoint(tmp_path)
    for leaf, weight in expected.items():
        w = checkpoint.weight(f"{EXPERTS}.{leaf}")
        assert str(w.format) == str(checkpoint.modules[f"{EXPERTS}.{leaf}"].format) == format
        assert torch.equal(in_order(w, leaf), weight)
        assert torch.equal(checkpoint.dense(f"{EXPERTS}.{leaf}"), weight.mT if transposed else weight)


def test_experts_in_one_fp8_tensor_that_stay_dense(tmp_path: Path) -> None:
    """One of both products has a bias, or a block has gates and ups."""
    for features, more in ((64, {"gate_up_proj_bias": torch.zeros(2, 128)}), (72, {})):
        tensors = {
            "gate_up_proj": torch.ones(2, 2 * features, 128).to(E4M3),
            "gate_up_proj_scale": torch.ones(2, 1 if features == 64 else 2, 1),
            "down_proj": torch.ones(2, 128, features).to(E4M3),
            "down_proj_scale": torch.ones(2, 1, 1),
        }
        parts = {f"{EXPERTS}.{leaf}": t for leaf, t in (tensors | more).items()}
        folder = compressed(tmp_path, **parts)
        configure(folder, weight_block_size=[128, 128])
        checkpoint = open_checkpoint(folder)
        assert f"{EXPERTS}.down_proj" not in checkpoint.modules and f"{EXPERTS}.down_proj" in checkpoint.tensors


@pytest.mark.parametrize("blocks", [False, True])
def test_gpt_oss_in_fp8(tmp_path: Path, blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gates and ups are in pairs, with biases, and its matrices transposed. Of a model whose code says that gates
    come before ups, experts are dense."""
    folder = write_dense(tmp_path, "gpt_oss")
    expected = {}

    def in_fp8(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            w = tensors[name]
            scale = torch.rand(len(w), *((-(-w.shape[1] // 16), -(-w.shape[2] // 32)) if blocks else (1, w.shape[2])))
            tensors[name], tensors[f"{name}_scale_inv"] = w.to(E4M3), scale
            whole = scale.repeat_interleave(16, 1).repeat_interleave(32, 2) if blocks else scale
            expected[name] = w.to(E4M3).float() * whole[:, : w.shape[1] if blocks else 1, : w.shape[2]]

    change(folder, in_fp8)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    (folder / "config.json").write_text(json.dumps(config))
    packed = (
        load(folder)[0],
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=W4GemmConfig(), dtype=torch.float32),
    )
    submodule = places.submodule

    def concatenated(model: torch.nn.Module, name: str) -> Any:
        if hasattr(module := submodule(model, name), "is_concatenated"):
            module.is_concatenated = True
        return module

    with monkeypatch.context() as patch:
        patch.setattr(places, "submodule", concatenated)
        dense = load(folder)[0]
    for layer in dense.model.layers:
        layer.mlp.experts.is_concatenated = False
    assert all(torch.equal(dense.get_parameter(name), weight) for name, weight in expected.items())
    for model in packed:
        for name, weight in expected.items():
            assert torch.equal(model.get_submodule(name.removesuffix("_proj")).weight.dequantize().mT, weight)
        with torch.inference_mode():
            ids = torch.tensor([[3, 5, 7, 11]])
            torch.testing.assert_close(model(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-5)


SKIPPED = (
    *(f"self_attn.{name}" for name in ("k_scale", "kv_scale", "q_zero_point", "attn.v_scale", "prob_output_scale")),
    *(f"self_attn.{name}" for name in ("qkv_proj.k_scale", "kv_b_proj.k_scale", "q_proj.output_scale")),
    *(f"self_attn.{name}" for name in ("k_proj.k_scale", "v_proj.v_bias", "rotary_emb.inv_freq", "o_proj.input_scale")),
    "mlp.experts.down_proj_input_scale",
)


def test_scales_of_caches_and_activations_are_left_out(tmp_path: Path) -> None:
    """Both ways to load take the folder, and say the same of it."""
    folder = tmp_path / "in"
    write_model(folder, test_compressed_tensors.config(), test_compressed_tensors.writer())
    plain = load(folder)[0]
    names = [f"model.layers.{layer}.{name}" for layer in range(LAYERS) for name in SKIPPED]
    names.append("model.embed_tokens.embed_scale")  # Gemma's, where compressed-tensors has quantized the embedding
    change(folder, lambda tensors: tensors.update({name: torch.full((1,), 3.0) for name in names}))
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, QuantizedFolder)
    parts = {name for module in checkpoint.modules for name in checkpoint.stored_names(module)}
    assert set(names) - parts == checkpoint.left_out.keys() and all(checkpoint.left_out.values())
    assert set(names) & parts == {name for name in names if name.endswith("o_proj.input_scale")}
    assert not checkpoint.tensors.keys() & set(names)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=W4GemmConfig(), dtype=torch.float32, output_loading_info=True
    )
    assert not info["unexpected_keys"]
    ids = torch.tensor([[3, 5, 7]])
    with torch.inference_mode():
        for other in (load(folder)[0], model):
            assert torch.equal(other(ids).logits, plain(ids).logits)
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 0
    assert not load_file(tmp_path / "out" / "model.safetensors").keys() & set(names)


def test_the_old_name_of_quantization_config(tmp_path: Path) -> None:
    folder = compressed(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(folder).modules


@pytest.mark.parametrize("kind", ["compressed-tensors", "awq", "hqq", "modelopt", "w4afp8", "kimi", "fp8", "exl3"])
def test_packed_tensors_without_a_quantization_config_are_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_dense(tmp_path / "in")
    packed = {"model.layers.0.self_attn.q_proj.weight": torch.ones(64, 64).to(E4M3)}
    if kind == "exl3":
        packed = {"model.layers.0.self_attn.q_proj.trellis": torch.zeros(4, 4, 64, dtype=torch.int16)}
    elif kind != "fp8":
        packed = load_file(samples.FORMATS[kind](tmp_path / "packed") / "model.safetensors")
    save_file(load_file(folder / "model.safetensors") | packed, folder / "model.safetensors", {"format": "pt"})
    message = "its weights are packed, .* which no dense model's are: config.json lacks a quantization_config"
    for read in (open_checkpoint, load):
        with pytest.raises(FormatError, match=message):
            read(folder)
    with pytest.raises(FormatError, match=message):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=W4GemmConfig())
    for command in (["inspect", str(folder)], ["convert", str(folder), str(tmp_path / "out")]):
        assert main(command) != 0
        assert "lacks a quantization_config" in capsys.readouterr().err
