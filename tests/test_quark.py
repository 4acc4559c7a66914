"""Folders quantized by Quark hold its numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from quantized_model import Numbers, Writer, assert_loads, change, configure, refusals, stream, write_model
from test_modelopt import mxfp4, nvfp4
from tiny_model import LAYERS
from w4gemm import FormatError, WeightFormat
from w4gemm.checkpoints import open_checkpoint
from w4gemm.checkpoints.awq import ORDER
from w4gemm.core.elements import ELEMENTS

MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32, "scale_format": "e8m0"}
NVFP4 = [
    {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "group_size": 16, "scale_format": "float32"},
    {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_scale_quant": True},
]
GROUPS = {"qscheme": "per_group", "ch_axis": -1, "group_size": 32, "zero_point_type": "int32"}
CHANNELS = GROUPS | {"qscheme": "per_channel", "ch_axis": 0, "group_size": None}
INT4, UINT4 = {"dtype": "int4", "symmetric": True}, {"dtype": "uint4", "symmetric": False}
FP8_X = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
DOWN = "model.layers.1.mlp.down_proj"
WORDS = tuple(ORDER.index(i) for i in range(8))
"""The number of a word that lies in its first, second, ... nibble, if pack_method is "reorder"."""


def config(weight: Any, method: str = "reorder", x: Any = None) -> dict[str, Any]:
    whole = {"weight": weight, "input_tensors": x}
    export = {"pack_method": method, "weight_format": "real_quantized", "kv_cache_group": []}
    return {"quant_method": "quark", "global_quant_config": whole, "exclude": ["lm_head"], "export": export}


def integers(weight: dict[str, Any], method: str = "reorder", dtype: torch.dtype = torch.bfloat16) -> Writer:
    """Quark's tensors of random numbers. It writes zero points of symmetric weights, too."""
    signed, per_group = weight["dtype"] == "int4", weight["qscheme"] == "per_group"
    order = WORDS if method == "reorder" else tuple(range(8))

    def write(name: str, n: int, k: int) -> Any:
        zeros = (8, 8) if signed else (0, 15)
        numbers = Numbers.random(n, k, weight["group_size"] or -1, zeros, dtype=dtype)
        turned = 8 if signed else 0
        codes, zeros_of = numbers.codes ^ turned, numbers.zeros ^ turned
        if per_group:
            stored = {"weight": stream(codes.T, 1, order=order), "weight_scale": numbers.scales.T}
            return stored | {"weight_zero_point": stream(zeros_of.T, 1, order=order)}, numbers.weight
        stored = {"weight": stream(codes, 1, order=order), "weight_scale": numbers.scales[:, 0]}
        return stored | {"weight_zero_point": stream(zeros_of[:, 0], 0, order=order)}, numbers.weight

    return write


@pytest.mark.parametrize(
    ("weight", "method", "write", "format"),
    [
        (MXFP4, "reorder", mxfp4, "mxfp4"),
        (NVFP4, "reorder", nvfp4, "nvfp4"),
        (INT4 | GROUPS, "reorder", None, "int4_g32_bf16"),
        (UINT4 | GROUPS, "reorder", None, "int4_g32_zint_bf16"),
        (UINT4 | GROUPS, "order", None, "int4_g32_zint_bf16"),
        (INT4 | CHANNELS, "reorder", None, "int4_col_bf16"),
        (UINT4 | CHANNELS, "order", None, "int4_col_zint_bf16"),
    ],
)
def test_weights(tmp_path: Path, weight: Any, method: str, write: Writer | None, format: str) -> None:
    expected = write_model(tmp_path, config(weight, method), write or integers(weight, method))
    assert_loads(tmp_path, expected, {str(WeightFormat.parse(format)): 7 * LAYERS})


@pytest.mark.parametrize("element", ["e2m3", "e3m2"])
def test_mxfp6(tmp_path: Path, element: str) -> None:
    """Four codes in three bytes (utils/pack.py of amd-quark 0.13, Pack_fp6)."""

    def write(name: str, n: int, k: int) -> Any:
        random = torch.Generator().manual_seed(n + k)
        codes = torch.randint(0, 64, (n, k), generator=random)
        powers = torch.randint(110, 130, (n, k // 32), generator=random, dtype=torch.uint8)
        a, b, c, d = codes.unflatten(1, (-1, 4)).unbind(-1)
        words = a | b << 6 | c << 12 | d << 18
        packed = torch.stack([words & 255, words >> 8 & 255, words >> 16], -1).flatten(1).to(torch.uint8)
        numbers = torch.tensor(ELEMENTS[element].values)[codes]
        weight = numbers * powers.view(torch.float8_e8m0fnu).float().repeat_interleave(32, 1)
        return {"weight": packed, "weight_scale": powers}, weight

    expected = write_model(tmp_path, config(MXFP4 | {"dtype": f"fp6_{element}"}), write)
    checkpoint = open_checkpoint(tmp_path)
    assert {str(module.format) for module in checkpoint.modules.values()} == {f"{element}_g32_e8m0"}
    assert all(torch.equal(checkpoint.weight(name).dequantize(), w) for name, w in expected.items())


INT8, UINT8 = {"dtype": "int8", "symmetric": True}, {"dtype": "uint8", "symmetric": False}
TENSOR = GROUPS | {"qscheme": "per_tensor", "ch_axis": None, "group_size": None}


def in_bytes(weight: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Writer:
    """Quark's tensors of random numbers in 8 bits (utils/pack.py of amd-quark 0.13, Pack_8_bits): groups lie along the
    first dimension."""
    signed = weight["dtype"] == "int8"

    def write(name: str, n: int, k: int) -> Any:
        zeros = (128, 128) if weight["symmetric"] else (0, 255)
        numbers = Numbers.random(n, k, weight["group_size"] or -1, zeros, dtype=dtype, bits=8)
        if weight["qscheme"] == "per_tensor":
            numbers = replace(numbers, scales=numbers.scales[:1].expand(n, 1), zeros=numbers.zeros[:1].repeat(n, 0))
        parts = [torch.from_numpy(t.astype(np.uint8)) for t in (numbers.codes, numbers.zeros)]
        codes, zeros_of = [(t ^ 128).view(torch.int8) if signed else t for t in parts]
        scales = numbers.scales
        if weight["qscheme"] == "per_group":
            codes, zeros_of, scales = codes.T, zeros_of.T, scales.T
        elif weight["qscheme"] == "per_channel":
            zeros_of, scales = zeros_of[:, 0], scales[:, 0]
        else:
            zeros_of, scales = zeros_of[0, 0], scales[0, 0]
        stored = {"weight": codes, "weight_scale": scales, "weight_zero_point": zeros_of}
        return {leaf: t.clone() for leaf, t in stored.items()}, numbers.weight

    return write


@pytest.mark.parametrize(
    ("weight", "dtype", "format"),
    [
        (INT8 | TENSOR, torch.float32, "int8_col_fp32"),
        (INT8 | CHANNELS, torch.bfloat16, "int8_col"),
        (INT8 | CHANNELS | {"symmetric": False}, torch.float16, "int8_col_zint_fp16"),
        (INT8 | GROUPS, torch.bfloat16, "int8_g32"),
        (UINT8 | GROUPS, torch.bfloat16, "int8_g32_zint"),
        (UINT8 | TENSOR, torch.bfloat16, "int8_col_zint"),
    ],
)
def test_8_bits(tmp_path: Path, weight: Any, dtype: torch.dtype, format: str) -> None:
    expected = write_model(tmp_path, config(weight), in_bytes(weight, dtype))
    checkpoint = open_checkpoint(tmp_path)
    assert {str(module.format) for module in checkpoint.modules.values()} == {format}
    assert all(torch.equal(checkpoint.weight(name).dequantize(), w) for name, w in expected.items())
    refused = refusals(tmp_path)
    refused(f"{DOWN}: weight is F32, wanted {'I8' if 'u' not in weight['dtype'] else 'U8'}", as_floats)
    refused(f"{DOWN}: there is no weight_scale beside", lambda t: t.pop(f"{DOWN}.weight_scale"))
    refused(f"{DOWN}: weight_zero_point has shape", lambda t: t.update({f"{DOWN}.weight_zero_point": codes_of(weight)}))


def as_floats(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"].float()


def codes_of(weight: dict[str, Any]) -> torch.Tensor:
    return torch.zeros(7, 7, dtype=getattr(torch, weight["dtype"]))


def test_a_last_word_that_is_not_full(tmp_path: Path) -> None:
    """Zero points of 66 rows lie in nine words."""
    expected = write_model(tmp_path, config(UINT4 | CHANNELS), integers(UINT4 | CHANNELS))
    down, numbers = expected[DOWN], Numbers.random(66, 96, -1, (0, 15), dtype=torch.bfloat16)
    assert down.shape == (64, 96)
    zeros = torch.nn.functional.pad(torch.from_numpy(numbers.zeros[:, 0]), (0, 6)).numpy()
    parts = {"weight": stream(numbers.codes, 1, order=WORDS), "weight_scale": numbers.scales[:, 0]}
    parts["weight_zero_point"] = stream(zeros, 0, order=WORDS)
    change(tmp_path, lambda t: t.update({f"{DOWN}.{leaf}": part for leaf, part in parts.items()}))
    assert torch.equal(open_checkpoint(tmp_path).weight(DOWN).dequantize(), numbers.weight)


def test_x_in_fp8(tmp_path: Path) -> None:
    """x in e4m3 is quantized beside MXFP4; x in 4 bits is multiplied as it comes."""
    expected = write_model(tmp_path, config(MXFP4, x=FP8_X), mxfp4)
    change(tmp_path, lambda t: t.update({f"{name}.input_scale": torch.tensor(0.5) for name in expected}))
    checkpoint = open_checkpoint(tmp_path)
    assert {checkpoint.weight(name).activations for name in expected} == {"fp8"}
    configure(tmp_path, **config(MXFP4, x=MXFP4 | {"is_dynamic": True}))
    assert {module.activations for module in open_checkpoint(tmp_path).modules.values()} == {None}


def test_settings_of_some_modules(tmp_path: Path) -> None:
    """A name in full goes before patterns, these before the class of a layer, and that before the model's settings."""
    settings = {"down_proj": INT4 | GROUPS, "o_proj": UINT4 | GROUPS}
    writers = {end: integers(weight) for end, weight in settings.items()}

    def write(name: str, n: int, k: int) -> Any:
        return writers.get(name.rpartition(".")[2], nvfp4 if name.endswith("up_proj") else mxfp4)(name, n, k)

    expected = write_model(tmp_path, config(INT4 | CHANNELS), write)
    names = {name: {"weight": NVFP4} for name in expected if name.endswith("up_proj")}
    patterns = {"*up_proj": {"weight": MXFP4}} | {f"*{end}": {"weight": weight} for end, weight in settings.items()}
    configure(tmp_path, layer_quant_config=patterns | names, layer_type_quant_config={"Linear": {"weight": MXFP4}})
    formats = {"e2m1_g32_e8m0": 4, "e2m1_g16_e4m3_row": 1, "int4_g32": 1, "int4_g32_zint": 1}
    assert_loads(tmp_path, expected, {str(WeightFormat.parse(f)): count * LAYERS for f, count in formats.items()})


@pytest.mark.parametrize("write", [mxfp4, integers(UINT4 | GROUPS)], ids=["mxfp4", "uint4"])
def test_experts(tmp_path: Path, write: Writer) -> None:
    weight = MXFP4 if write is mxfp4 else UINT4 | GROUPS
    expected = write_model(tmp_path, config(weight), write, ("lm_head", "gate"), architecture="qwen3_moe")
    checkpoint = open_checkpoint(tmp_path)
    owner = "model.layers.1.mlp.experts"
    down = checkpoint.weight(f"{owner}.down_proj")
    assert torch.equal(down.expert(2).dequantize(), expected[f"{owner}.2.down_proj"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (config(MXFP4 | {"dtype": "int8", "symmetric": True}), "weight is I32, wanted I8"),
        (config(MXFP4 | {"dtype": "int2"}), "its weight is int2 per_group 32 e8m0; wanted fp4 or fp6 with e8m0"),
        (config(UINT4 | TENSOR), "its qscheme is 'per_tensor' along axis None, wanted 'per_group' along -1 or"),
        (config(MXFP4 | {"scale_format": "e4m3"}), "its weight is fp4 per_group 32 e4m3; wanted"),
        (config([{"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, INT4 | CHANNELS]), "fp8_e4m3 per_tensor of int4 per_"),
        (config(INT4 | GROUPS | {"symmetric": False}), "symmetric is False beside int4, wanted True"),
        (config(UINT4 | GROUPS | {"zero_point_type": "float32"}), "zero_point_type is 'float32', wanted 'int32'"),
        (config(UINT4 | GROUPS | {"ch_axis": 0}), "'per_group' along axis 0, wanted 'per_group' along -1 or"),
        (config(UINT4 | GROUPS | {"group_size": 64}), "groups of 64 do not divide its 96 input features"),
        (config(UINT4 | GROUPS, "shuffle"), "pack_method is 'shuffle', wanted 'reorder' or 'order'"),
        (config(UINT4 | CHANNELS), r"weight_scale has shape \(3, 64\), wanted \(96,\)"),
        (config(NVFP4), "weight is I32, wanted U8"),
        ({"exclude": ["*down_proj"]}, "exclude of its config names it, but it has quantized tensors"),
        ({"export": None}, "pack_method is None, wanted 'reorder' or 'order'"),
        (
            {"algo_config": [{"name": "rotation", "r1": True, "r4": True}]},
            r"algo_config rotates .*\(r4\), which cannot",
        ),
        # of Quark 0.9 to 0.11
        ({"algo_config": [{"name": "awq"}, {"name": "quarot", "r3": True, "r4": True}]}, r"rotates .*\(r4\)"),
        ({"algo_config": [{"name": "svdquant"}]}, "svdquant, whose product of low rank"),
    ],
)
def test_what_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    write_model(tmp_path, config(UINT4 | GROUPS), integers(UINT4 | GROUPS))
    configure(tmp_path, **settings)
    with pytest.raises(FormatError, match=message):
        open_checkpoint(tmp_path)


def test_zero_points_beside_a_symmetric_weight_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, config(INT4 | GROUPS), integers(INT4 | GROUPS))
    change(tmp_path, lambda t: t[f"{DOWN}.weight_zero_point"].add_(1))
    with pytest.raises(FormatError, match="it is symmetric, but its zero points are 8 to 9 instead of 8"):
        open_checkpoint(tmp_path).weight(DOWN)


@pytest.mark.parametrize(
    "algorithms", [[{"name": "rotation", "r1": True, "r3": True, "r4": False}], {"name": "quarot", "r1": True}]
)
def test_rotations_that_change_no_product_are_read(tmp_path: Path, algorithms: Any) -> None:
    expected = write_model(tmp_path, config(UINT4 | GROUPS), integers(UINT4 | GROUPS))
    configure(tmp_path, algo_config=algorithms)
    assert torch.equal(open_checkpoint(tmp_path).weight(DOWN).dequantize(), expected[DOWN])
