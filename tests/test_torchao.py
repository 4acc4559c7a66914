"""Folders quantized by torchao hold its numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from many_models import Base, base
from quantized_model import Numbers, Writer, assert_loads, configure, write_model
from test_modelopt import mxfp4, nvfp4
from tiny_model import LAYERS
from w4gemm import FormatError, W4GroupedLinear, W4Linear, WeightFormat
from w4gemm.checkpoints import open_checkpoint
from w4gemm.checkpoints.torchao import _untiled
from w4gemm.integrations.transformers import load

CONFIG = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}}}
DOWN = "model.layers.1.mlp.down_proj"
Attributes = Callable[[int, int], dict[str, Any]]


def dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


def int4(n: int, k: int) -> dict[str, Any]:
    return {"block_size": [1, 32], "shape": [n, k], "activation_dtype": dtype("bfloat16")}


def int8(n: int, k: int) -> dict[str, Any]:
    return {"block_size": [1, 32], "target_dtype": dtype("int4"), "dtype": dtype("bfloat16")}


def floats(group: int, swizzled: bool = False) -> Attributes:
    element = {"elem_dtype": dtype("float4_e2m1fn_x2")} if group == 32 else {}
    return lambda n, k: {"block_size": group, "is_swizzled_scales": swizzled} | element


def tiled(codes: np.ndarray) -> torch.Tensor:
    """int32 (n / 8, k / 128, 32, 4) of codes (n, k), thread by thread as PyTorch's _convert_weight_to_int4pack."""
    n, k = codes.shape
    words = np.zeros((n // 8, k // 128, 32, 4), np.uint32)
    for tile, outer, thread, word in np.ndindex(*words.shape):
        first = outer * 128 + word * 32 + thread % 4 * 2
        columns = [first + step for step in (0, 1, 8, 9, 16, 17, 24, 25)]
        v = codes[tile * 8 + thread // 4, columns].astype(np.uint32)
        for nibble, number in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words[tile, outer, thread, word] |= v[number] << np.uint32(4 * nibble)
    return torch.from_numpy(words.view(np.int32))


def padded(t: torch.Tensor, n: int, k: int) -> torch.Tensor:
    return torch.nn.functional.pad(t, (0, k - t.shape[1], 0, n - t.shape[0]))


def offsets(n: int, k: int) -> tuple[Numbers, torch.Tensor, torch.Tensor]:
    """Random numbers, the zero points that torchao adds to (u - 8) * s, and the weight."""
    numbers = Numbers.random(n, k, 32, dtype=torch.bfloat16)
    zeros = torch.randn(n, k // 32, generator=torch.Generator().manual_seed(n)).mul(0.01).bfloat16()
    return numbers, zeros, numbers.weight + zeros.float().repeat_interleave(32, 1)


def in_pairs(name: str, n: int, k: int) -> Any:
    numbers, zeros, weight = offsets(n, k)
    q = torch.from_numpy(numbers.codes - 8).to(torch.int8)
    qdata = (q[:, ::2] & 15) | (q[:, 1::2] << 4)
    return {"_weight_qdata": qdata, "_weight_scale": numbers.scales.T, "_weight_zero_point": zeros.T}, weight


def in_tiles(name: str, n: int, k: int) -> Any:
    numbers, zeros, weight = offsets(n, k)
    qdata = tiled(padded(torch.from_numpy(numbers.codes), n, 1024).numpy())
    both = torch.stack([padded(t, n, 32).T for t in (numbers.scales, zeros)], -1)
    return {"_weight_qdata": qdata, "_weight_scale_and_zero": both}, weight


def in_bytes(name: str, n: int, k: int) -> Any:
    numbers = Numbers.random(n, k, 32, (0, 15), dtype=torch.bfloat16)
    qdata, zeros = (torch.from_numpy(t - 8).to(torch.int8) for t in (numbers.codes, numbers.zeros))
    return {"_weight_qdata": qdata, "_weight_scale": numbers.scales, "_weight_zero_point": zeros}, numbers.weight


def blocked(scales: torch.Tensor) -> torch.Tensor:
    """Scales (n, groups) in cuBLAS's blocks of 128 rows and 4 groups: row i lies with those of i + 32, 64 and 96."""
    n, groups = scales.shape
    rows, columns = -(-n // 128), -(-groups // 4)
    whole = torch.zeros(rows * columns, 32, 4, 4, dtype=torch.uint8)
    for i, j in np.ndindex(n, groups):
        whole[i // 128 * columns + j // 4, i % 32, i % 128 // 32, j % 4] = scales.view(torch.uint8)[i, j]
    return whole.view(rows * 32, columns * 16).view(scales.dtype)


def in_floats(write: Writer, swizzled: bool = False, factor: bool = True) -> Writer:
    def parts(name: str, n: int, k: int) -> Any:
        stored, weight = write(name, n, k)
        scales = stored["weight_scale"]
        scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
        actual = {"_weight_qdata": stored["weight"], "_weight_scale": blocked(scales) if swizzled else scales}
        if "weight_scale_2" in stored and factor:
            actual["_weight_per_tensor_scale"] = stored["weight_scale_2"]
        return actual, weight if factor else weight * 2.0**14

    return parts


def write_torchao(folder: Path, kind: str, attributes: Attributes, write: Writer) -> dict[str, torch.Tensor]:
    """Write a tiny model with torchao's metadata; return its weights."""
    expected = write_model(folder, CONFIG, write)
    describe(folder, {name: {"_type": kind, "_data": attributes(*w.shape)} for name, w in expected.items()})
    return expected


def describe(folder: Path, weights: dict[str, dict[str, Any]], **more: torch.Tensor) -> None:
    """Change the metadata of some weights, and add tensors."""
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as f:
        known = f.metadata() or {}
    actual = {f"{name}.weight": json.dumps(what) for name, what in weights.items()}
    save_file(load_file(file) | more, file, known | actual)


@pytest.mark.parametrize(
    ("kind", "attributes", "write", "format"),
    [
        ("Int4Tensor", int4, in_pairs, "int4_g32_zfloat_fp32"),
        ("Int4TilePackedTo4dTensor", int4, in_tiles, "int4_g32_zfloat_fp32"),
        ("IntxUnpackedToInt8Tensor", int8, in_bytes, "int4_g32_zint_bf16"),
        ("MXTensor", floats(32), in_floats(mxfp4), "mxfp4"),
        ("MXTensor", floats(32, True), in_floats(mxfp4, True), "mxfp4"),
        ("NVFP4Tensor", floats(16), in_floats(nvfp4), "nvfp4"),
        ("NVFP4Tensor", floats(16, True), in_floats(nvfp4, True), "nvfp4"),
        ("NVFP4Tensor", floats(16), in_floats(nvfp4, factor=False), "nvfp4"),
    ],
)
def test_weights(tmp_path: Path, kind: str, attributes: Attributes, write: Writer, format: str) -> None:
    expected = write_torchao(tmp_path, kind, attributes, write)
    assert_loads(tmp_path, expected, {str(WeightFormat.parse(format)): 7 * LAYERS})


def in_symmetric_bytes(name: str, n: int, k: int) -> Any:
    numbers = Numbers.random(n, k, 32, dtype=torch.bfloat16)
    qdata, zeros = (torch.from_numpy(t - 8).to(torch.int8) for t in (numbers.codes, numbers.zeros))
    return {"_weight_qdata": qdata, "_weight_scale": numbers.scales, "_weight_zero_point": zeros}, numbers.weight


@pytest.mark.parametrize(
    ("bits", "element"), [*((bits, f"int{bits}") for bits in (8, 6, 5, 3, 2)), (7, "int8"), (1, "int2")]
)
def test_integers_of_other_widths_in_bytes(tmp_path: Path, bits: int, element: str) -> None:
    def attributes(n: int, k: int) -> dict[str, Any]:
        return int8(n, k) | {"target_dtype": dtype(f"int{bits}")}

    def write(name: str, n: int, k: int) -> Any:
        numbers = Numbers.random(n, k, 32, dtype=torch.bfloat16, bits=bits, zeros=(0, 2**bits - 1))
        qdata, zeros = (torch.from_numpy(t - 2 ** (bits - 1)).to(torch.int8) for t in (numbers.codes, numbers.zeros))
        return {"_weight_qdata": qdata, "_weight_scale": numbers.scales, "_weight_zero_point": zeros}, numbers.weight

    expected = write_torchao(tmp_path, "IntxUnpackedToInt8Tensor", attributes, write)
    assert_loads(tmp_path, expected, {f"{element}_g32_zint": 7 * LAYERS})


@pytest.mark.parametrize("zeros", [True, False])
def test_int8_tensor(tmp_path: Path, zeros: bool) -> None:
    """Scales of rows, as Int8WeightOnlyConfig has them."""

    def write(name: str, n: int, k: int) -> Any:
        numbers = Numbers.random(n, k, -1, dtype=torch.bfloat16, bits=8, zeros=(0, 255) if zeros else (128, 128))
        qdata, zero = (torch.from_numpy(t - 128).to(torch.int8) for t in (numbers.codes, numbers.zeros))
        stored = {"_weight_qdata": qdata, "_weight_scale": numbers.scales}
        return stored | ({"_weight_zero_point": zero} if zeros else {}), numbers.weight

    expected = write_torchao(tmp_path, "Int8Tensor", lambda n, k: {"block_size": [1, k]}, write)
    assert_loads(tmp_path, expected, {"int8_col_zint" if zeros else "int8_col": 7 * LAYERS})


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Int4WeightOnlyConfig"])
def test_int8_tensor_with_a_scale_of_the_matrix(tmp_path: Path, kind: str) -> None:
    """Configs of int8 weights have zero points, all of them 0; scales of static activations are not used."""

    def write(name: str, n: int, k: int) -> Any:
        q = torch.randint(-127, 128, (n, k), generator=torch.Generator().manual_seed(n), dtype=torch.int8)
        scale, zero = torch.full((1, 1), 0.013), torch.zeros(1, 1, dtype=torch.int8)
        stored = {"_weight_qdata": q, "_weight_scale": scale, "_weight_zero_point": zero}
        return stored | {"_weight_act_quant_scale": torch.ones(1, 1)}, q.float() * scale

    expected = write_torchao(tmp_path, "Int8Tensor", lambda n, k: {"block_size": [n, k]}, write)
    configure(tmp_path, quant_type={"default": {"_type": kind, "_data": {}}})
    format = "int8_col_fp32" if kind.startswith("Int8") else "int8_col_zint_fp32"
    assert_loads(tmp_path, expected, {format: 7 * LAYERS})


@pytest.mark.parametrize("format", ["mxfp6", "e3m2_g32_e8m0"])
def test_mxfp6(tmp_path: Path, format: str) -> None:
    rule = WeightFormat.parse(format)

    def write(name: str, n: int, k: int) -> Any:
        random = torch.Generator().manual_seed(n + k)
        codes = torch.randint(0, 64, (n, k), generator=random, dtype=torch.uint8)
        powers = torch.randint(110, 130, (n, k // 32), generator=random, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        weight = rule.element_rule.numbers(codes) * powers.float().repeat_interleave(32, 1)
        return {"_weight_qdata": codes, "_weight_scale": powers}, weight

    attributes = {"elem_dtype": f"fp6_{rule.element}", "block_size": 32, "is_swizzled_scales": False}
    expected = write_torchao(tmp_path, "MXTensor", lambda n, k: attributes, write)
    checkpoint = open_checkpoint(tmp_path)
    assert {module.format for module in checkpoint.modules.values()} == {rule}
    assert all(torch.equal(checkpoint.weight(name).dequantize(), weight) for name, weight in expected.items())
    name = next(iter(expected))
    file = tmp_path / "model.safetensors"
    with safe_open(file, "pt") as opened:
        kept = opened.metadata()
    tensors = load_file(file)
    tensors[f"{name}._weight_qdata"][0, 0] = 64
    save_file(tensors, file, kept)
    with pytest.raises(FormatError, match="qdata: wanted codes of 6 bits, up to 63, got 64"):
        open_checkpoint(tmp_path).weight(name)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("element", "format"), [("float8_e4m3fn", "mxfp8"), ("float8_e5m2", "e5m2_g32_e8m0")])
def test_mxfp8(tmp_path: Path, element: str, format: str, swizzled: bool) -> None:
    def write(name: str, n: int, k: int) -> Any:
        random = torch.Generator().manual_seed(n + k)
        codes = torch.randn(n, k, generator=random).to(getattr(torch, element))
        powers = torch.randint(110, 130, (n, k // 32), generator=random, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        weight = codes.float() * powers.float().repeat_interleave(32, 1)
        return {"_weight_qdata": codes, "_weight_scale": blocked(powers) if swizzled else powers}, weight

    attributes = {"elem_dtype": dtype(element), "block_size": 32, "is_swizzled_scales": swizzled}
    expected = write_torchao(tmp_path, "MXTensor", lambda n, k: attributes, write)
    checkpoint = open_checkpoint(tmp_path)
    assert {module.format for module in checkpoint.modules.values()} == {WeightFormat.parse(format)}
    assert all(torch.equal(checkpoint.weight(name).dequantize(), weight) for name, weight in expected.items())


def with_experts(folder: Path, model: Base, kind: str) -> dict[str, torch.Tensor]:
    """Write a tiny Qwen3-MoE whose experts are one tensor of torchao's for each product; return their dense numbers."""
    stored, kept, expected = dict(model.tensors), {}, {}
    for layer in range(2):
        owner = f"model.layers.{layer}.mlp.experts"
        for leaf in ("gate_up_proj", "down_proj"):
            roles = [f"{role}_proj" for role in leaf.removesuffix("_proj").split("_")]
            each = [[stored.pop(f"{owner}.{e}.{role}.weight") for role in roles] for e in range(4)]
            w = torch.stack([torch.cat(parts) for parts in each]).float()
            block = [1, 1, w.shape[-1]]
            if kind == "Float8Tensor":
                scale = w.abs().amax(-1, True) / 448
                codes, parts = (w / scale).to(torch.float8_e4m3fn), {}
            else:  # one scale of all experts
                block, scale = [*w.shape], w.abs().max().reshape(1, 1, 1) / 127
                codes = (w / scale).round().to(torch.int8)
                parts = {"zero_point": torch.zeros(1, 1, 1, dtype=torch.int8)}
            parts |= {"qdata": codes, "scale": scale}
            stored |= {f"{owner}._{leaf}_{part}": t for part, t in parts.items()}
            kept[f"{owner}.{leaf}"] = json.dumps({"_type": kind, "_data": {"block_size": block}})
            expected[f"{owner}.{leaf}"] = codes.float() * scale
    shutil.copytree(model.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    save_file(stored, folder / "model.safetensors", {"format": "pt"} | kept)
    return expected


@pytest.mark.parametrize("kind", ["Float8Tensor", "Int8Tensor"])
def test_experts_in_one_tensor(tmp_path: Path, kind: str) -> None:
    dense = base("qwen3_moe", tmp_path)
    expected = with_experts(tmp_path / "torchao", dense, kind)
    checkpoint = open_checkpoint(tmp_path / "torchao")
    assert checkpoint.modules.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(checkpoint.dense(name), weight)
        pairs = torch.stack(weight.chunk(2, 1), 2).flatten(1, 2) if name.endswith("gate_up_proj") else weight
        assert torch.equal(checkpoint.weight(name).dequantize(), pairs)
    model, _ = load(tmp_path / "torchao", dtype=torch.float32)
    assert sum(isinstance(m, W4GroupedLinear) for m in model.modules()) == 4
    save_file(dense.tensors, dense.folder / "model.safetensors", {"format": "pt"})
    ids = torch.tensor([[3, 55, 17, 23, 8]])
    reference = dense.cls.from_pretrained(dense.folder, dtype=torch.float32)
    for name, weight in expected.items():
        reference.get_parameter(name).data = weight
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, reference(ids).logits, rtol=1e-3, atol=1e-3)


def test_experts_that_do_not_fit_become_dense(tmp_path: Path) -> None:
    """Matrices (k, n), as gpt-oss keeps them, have scales along n, which no format has."""
    qdata, scale = torch.randn(3, 64, 128).to(torch.float8_e4m3fn), torch.rand(3, 64, 1) + 0.5
    owner, other = "model.layers.0.mlp.experts", torch.randn(3, 64, 64).to(torch.float8_e4m3fn)
    parts = {f"{owner}._gate_up_proj_qdata": qdata, f"{owner}._gate_up_proj_scale": scale}
    parts |= {f"{owner}._down_proj_qdata": other, f"{owner}._down_proj_scale": scale + 1}
    described = {"_type": "Float8Tensor", "_data": {"block_size": [1, 1, 128]}}
    down = {"_type": "Float8Tensor", "_data": {"block_size": [1, 1, 64]}}
    metadata = {f"{owner}.gate_up_proj": json.dumps(described), f"{owner}.down_proj": json.dumps(down)}
    save_file(parts, tmp_path / "model.safetensors", metadata)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CONFIG}))
    checkpoint = open_checkpoint(tmp_path)
    assert not checkpoint.modules
    assert torch.equal(checkpoint.dense(f"{owner}.gate_up_proj"), qdata.float() * scale)


def in_fp8(rows: int, columns: int, element: torch.dtype = torch.float8_e4m3fn) -> Writer:
    """Float8Tensor with a scale for each block; 0 for all rows or columns. w = qdata * scale in float32, as torchao's
    _dequantize_affine_float8 computes."""

    def write(name: str, n: int, k: int) -> Any:
        random = torch.Generator().manual_seed(n + k)
        block = rows or n, columns or k
        codes = torch.randn(n, k, generator=random).to(element)
        scales = torch.rand(-(-n // block[0]), -(-k // block[1]), generator=random) + 0.1
        expanded = scales.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
        return {"_weight_qdata": codes, "_weight_scale": scales}, codes.float() * expanded

    return write


@pytest.mark.parametrize(
    ("rows", "columns", "element", "format"),
    [
        (1, 0, torch.float8_e4m3fn, "e4m3_col_fp32"),
        (0, 0, torch.float8_e5m2, "e5m2_col_fp32"),
        (1, 32, torch.float8_e4m3fn, "e4m3_g32_fp32"),
        (32, 32, torch.float8_e4m3fn, "e4m3_g32_fp32"),
    ],
)
def test_fp8(tmp_path: Path, rows: int, columns: int, element: torch.dtype, format: str) -> None:
    def attributes(n: int, k: int) -> dict[str, Any]:
        return {"block_size": [rows or n, columns or k], "act_quant_kwargs": None}

    expected = write_torchao(tmp_path, "Float8Tensor", attributes, in_fp8(rows, columns, element))
    checkpoint = open_checkpoint(tmp_path)
    assert {str(module.format) for module in checkpoint.modules.values()} == {format}
    assert all(torch.equal(checkpoint.weight(name).dequantize(), weight) for name, weight in expected.items())


def test_fp8_of_the_package(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    random = torch.Generator().manual_seed(0)
    grains = (torchao.PerRow(), torchao.PerTensor(), torchao.PerBlock([128, 128]))
    made = {
        f"{i}.weight": torchao.Float8Tensor.from_hp(torch.randn(256, 384, generator=random), granularity=grain)
        for i, grain in enumerate(grains)
    }
    stored, metadata = flatten_tensor_state_dict(made)
    save_file(stored, tmp_path / "model.safetensors", metadata)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CONFIG}))
    checkpoint = open_checkpoint(tmp_path)
    for name, t in made.items():
        w = checkpoint.weight(name.removesuffix(".weight"))
        assert torch.equal(w.dequantize(), t.dequantize(torch.float32))
    assert str(checkpoint.modules["2"].format) == "e4m3_g128_b128"


@pytest.mark.parametrize(
    ("attributes", "changed", "message"),
    [
        ({"block_size": [1, 24]}, None, r"_weight_scale has shape \(64, 1\), wanted \(64, 4\)"),
        ({"block_size": [1, 24]}, torch.ones(64, 4), r"its block_size is \[1, 24\], wanted a multiple of 16 columns"),
        ({"block_size": [1, 64]}, torch.ones(64, 2), "groups of 64 do not divide its 96 input features"),
        ({"block_size": [5, 96]}, None, "blocks of 5 rows do not divide its 64 output features"),
        ({"block_size": 96}, None, "its block_size is 96, wanted two positive integers"),
        ({}, None, "the metadata of its file have no block_size of its weight"),
        ({"block_size": [1, 96]}, torch.ones(64, 1).int(), "_weight_scale is I32, wanted F16 or BF16 or F32"),
    ],
)
def test_fp8_that_is_refused(tmp_path: Path, attributes: Any, changed: torch.Tensor | None, message: str) -> None:
    write_torchao(tmp_path, "Float8Tensor", lambda n, k: {"block_size": [1, k]}, in_fp8(1, 0))
    tensors = {} if changed is None else {f"{DOWN}._weight_scale": changed}
    describe(tmp_path, {DOWN: {"_type": "Float8Tensor", "_data": attributes}}, **tensors)
    with pytest.raises(FormatError, match=f"{DOWN}: {message}"):
        open_checkpoint(tmp_path)


def test_integers_in_bytes_without_zero_points(tmp_path: Path) -> None:
    """If the config maps weights symmetrically they have none; a file that has some nevertheless is refused."""
    expected = write_torchao(tmp_path, "IntxUnpackedToInt8Tensor", int8, in_symmetric_bytes)
    maps = {"weight_mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"}}
    maps |= {"act_mapping_type": {"_type": "MappingType", "_data": "ASYMMETRIC"}}
    kind = "Int8DynamicActivationIntxWeightConfig"
    configure(tmp_path, quant_type={"default": {"_type": kind, "_data": maps}})
    assert_loads(tmp_path, expected, {"int4_g32": 7 * LAYERS})
    describe(tmp_path, {}, **{f"{DOWN}._weight_zero_point": torch.ones(64, 3, dtype=torch.int8)})
    with pytest.raises(FormatError, match="it is symmetric, but its zero points are 9 to 9 instead of 8"):
        open_checkpoint(tmp_path).weight(DOWN)


def test_x_in_fp8_and_x_that_is_scaled(tmp_path: Path) -> None:
    def write(name: str, n: int, k: int) -> Any:
        stored, weight = in_pairs(name, n, k)
        zeros = stored.pop("_weight_zero_point")
        return stored | {"_weight_zero_point": torch.zeros_like(zeros)}, weight - zeros.T.float().repeat_interleave(
            32, 1
        )

    expected = write_torchao(tmp_path, "Int4Tensor", int4, write)
    fp8 = {"_type": "Int4Tensor", "_data": int4(64, 96) | {"activation_dtype": dtype("float8_e4m3fn")}}
    describe(tmp_path, {DOWN: fp8}, **{f"{DOWN}._weight_act_pre_scale": torch.full((96,), 0.5)})
    w = open_checkpoint(tmp_path).weight(DOWN)
    assert (w.activations, w.format) == ("fp8", WeightFormat.parse("int4_g32_bf16"))
    torch.testing.assert_close(w.dequantize(), expected[DOWN], rtol=1e-6, atol=1e-8)
    layer = load(tmp_path)[0].get_submodule(DOWN)
    assert isinstance(layer, W4Linear) and torch.equal(layer.pre_quant_scale, torch.full((96,), 0.5))


def test_rows_and_columns_that_fill_up_tiles_are_left_out(tmp_path: Path) -> None:
    expected = write_torchao(tmp_path, "Int4TilePackedTo4dTensor", int4, in_tiles)
    describe(tmp_path, {DOWN: {"_type": "Int4TilePackedTo4dTensor", "_data": int4(61, 64)}})
    assert torch.equal(open_checkpoint(tmp_path).weight(DOWN).dequantize(), expected[DOWN][:61, :64])


@pytest.mark.gpu
def test_tiles_are_those_of_pytorch() -> None:
    codes = torch.randint(0, 16, (24, 1024), dtype=torch.uint8, device="cuda")
    words = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    assert torch.equal(_untiled(words), codes)
    assert torch.equal(tiled(codes.cpu().numpy()), words.cpu())


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("Float8Tensor", {}, "_weight_qdata is I8, wanted F8_E4M3 or F8_E5M2"),
        ("UIntxTensor", {}, "its weight is of UIntxTensor, wanted Int4Tensor, Int4TilePackedTo4dTensor,"),
        ("Int4Tensor", {"block_size": [64, 64]}, r"its block_size is \[64, 64\], wanted \[1, columns\]"),
        ("Int4Tensor", {"block_size": [1, 64]}, "groups of 64 do not divide its 96 input features"),
        (
            "Int4Tensor",
            {"activation_dtype": dtype("float8_e4m3fn")},
            r"its zero points are up to .*, wanted 0 with x",
        ),
        ("IntxUnpackedToInt8Tensor", {"target_dtype": dtype("uint7")}, "has the numbers of uint7, wanted int4 or int8"),
        ("MXTensor", {"elem_dtype": "fp6_e1m4"}, "elements of fp6_e1m4, wanted float4_e2m1fn_x2 or float8_e4m3fn"),
        ("NVFP4Tensor", {"block_size": 32}, "its block_size is 32, wanted 16"),
        ("MXTensor", {}, "_weight_qdata is I8, wanted U8"),
        (None, {}, "the metadata of its file are no weight of torchao: KeyError"),
        ("Int4TilePackedTo4dTensor", {"shape": None}, "the metadata of its file have no shape of its weight"),
    ],
)
def test_what_is_refused(tmp_path: Path, kind: str | None, changed: dict[str, Any], message: str) -> None:
    write_torchao(tmp_path, "Int4Tensor", int4, in_pairs)
    attributes = {"MXTensor": floats(32), "NVFP4Tensor": floats(16)}.get(str(kind), int4)(64, 96) | changed
    attributes = {key: value for key, value in attributes.items() if value is not None}
    describe(tmp_path, {DOWN: {"_type": kind, "_data": attributes} if kind else {}})
    with pytest.raises(FormatError, match=message):
        open_checkpoint(tmp_path).weight(DOWN)


def test_a_file_without_metadata_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIG, in_pairs)
    with pytest.raises(FormatError, match="the metadata of its file say nothing of its weight"):
        open_checkpoint(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    write_torchao(tmp_path, "Int4Tensor", int4, in_pairs)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FormatError, match=r"no model\.safetensors; pickled weights are not read: save 'pytorch_model"):
        open_checkpoint(tmp_path)
