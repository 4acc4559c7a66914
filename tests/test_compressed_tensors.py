"""Folders in compressed-tensors hold the producer's numbers bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from quantized_model import Numbers, Writer, assert_loads, change, configure, put, refusals, stream, write_model
from tiny_model import LAYERS
from w4gemm import FormatError, W4Linear, WeightFormat, linear
from w4gemm.checkpoints import open_checkpoint
from w4gemm.integrations.transformers import load

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
DOWN = "model.layers.1.mlp.down_proj"


def config(
    weights: dict[str, Any] | None = None,
    packing: str = "pack-quantized",
    ignore: tuple[str, ...] = ("lm_head",),
    **rest: Any,
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": WEIGHTS | (weights or {}), "input_activations": None} | rest
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def writer(
    group_size: int = 32,
    packed: bool = True,
    zero_point: bool = False,
    g_idx: Any = None,
    put: Callable[[np.ndarray, int, int], torch.Tensor] = stream,
    **numbers: Any,
) -> Writer:
    """Pack modules as compressed-tensors does.

    Args:
        zero_point: whether zero points are stored.
        put: packs numbers along an axis.
        g_idx: "groups" to store the group of each column, "unused" to store -1.
    """

    def write(name: str, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        actual = Numbers.random(n, k, group_size, **{"dtype": torch.bfloat16} | numbers)
        parts = {"weight_scale": actual.scales}
        bits = numbers.get("bits", 4)
        if packed:
            parts |= {"weight_packed": put(actual.codes, 1, bits), "weight_shape": torch.tensor([n, k])}
        else:
            parts["weight"] = torch.from_numpy(actual.codes - 2 ** (bits - 1)).to(torch.int8)
        if zero_point:
            q = torch.from_numpy(actual.zeros - 2 ** (bits - 1)).to(torch.int8)
            parts["weight_zero_point"] = put(actual.zeros, 0, bits) if packed else q
        if g_idx is not None:
            parts["weight_g_idx"] = torch.from_numpy(actual.groups).int() if g_idx == "groups" else -torch.ones(k).int()
        return parts, actual.weight

    return write


def whole(numbers: np.ndarray, axis: int, bits: int) -> torch.Tensor:
    """As many numbers a word as fit."""
    moved = np.moveaxis(numbers, axis, -1).astype(np.int64)
    padded = np.pad(moved, [(0, 0), (0, -moved.shape[-1] % (32 // bits))]).reshape(len(moved), -1, 32 // bits)
    words = (padded << np.arange(32 // bits) * bits).sum(-1).astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)))


@pytest.mark.parametrize("put", [stream, whole])
@pytest.mark.parametrize("bits", [2, 3, 5, 6, 8])
def test_other_bits(tmp_path: Path, bits: int, put: Any) -> None:
    """Codes of 3, 5 and 6 bits straddle words since 2026-06; before, a word had 10, 6 and 5 of them."""
    middle = 2 ** (bits - 1)
    expected = write_model(
        tmp_path, config({"num_bits": bits}), writer(bits=bits, put=put, zeros=(middle, middle), zero_point=True)
    )
    assert_loads(tmp_path, expected, {f"int{bits}_g32": 7 * LAYERS})
    numbers: dict[str, Any] = {"bits": bits, "put": put, "zeros": (0, 2**bits - 1), "zero_point": True}
    expected = write_model(tmp_path, config({"num_bits": bits, "symmetric": False}), writer(**numbers, g_idx="groups"))
    assert_loads(tmp_path, expected, {f"int{bits}_g32_zint": 7 * LAYERS})


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "int8"])
def test_7_bits_become_8(tmp_path: Path, packed: bool) -> None:
    packing = "pack-quantized" if packed else "int-quantized"
    symmetric: dict[str, Any] = {"bits": 7, "packed": packed, "zeros": (64, 64), "zero_point": True}
    expected = write_model(tmp_path, config({"num_bits": 7}, packing), writer(**symmetric))
    assert_loads(tmp_path, expected, {"int8_g32": 7 * LAYERS})
    numbers = symmetric | {"zeros": (0, 127)}
    expected = write_model(tmp_path, config({"num_bits": 7, "symmetric": False}, packing), writer(**numbers))
    assert_loads(tmp_path, expected, {"int8_g32_zint": 7 * LAYERS})
    if packed:
        write_model(tmp_path, config({"num_bits": 7}), writer(**symmetric, put=whole))
        with pytest.raises(FormatError, match="four codes of 7 bits a word, as before 2026-06"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize(("bits", "k"), [(2, 72), (8, 33), (4, 44), (3, 7), (5, 61), (6, 5)])
def test_a_last_word_that_is_not_full(tmp_path: Path, bits: int, k: int) -> None:
    """Of channels: groups of multiples of 16 fill words of 2, 4 and 8 bits. In one word both packings are the same."""
    parts, expected = writer(-1, bits=bits, zeros=(0, 2**bits - 1), zero_point=True)("", 24, k)
    save_file({f"layer.{leaf}": t.contiguous() for leaf, t in parts.items()}, tmp_path / "model.safetensors")
    settings = config({"num_bits": bits, "strategy": "channel", "symmetric": False})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    w = open_checkpoint(tmp_path).weight("layer")
    assert (w.n, w.k) == (24, k) and torch.equal(w.dequantize(), expected)
    x = torch.randn(3, k)
    torch.testing.assert_close(linear(x, w.repack()), x @ expected.T, rtol=1e-4, atol=1e-5)
    put(tmp_path, "layer.weight_shape", torch.tensor([24, k + 40]))
    with pytest.raises(FormatError, match=f"layer: weight_packed has .* words a row, wanted .* of {k + 40} codes of"):
        open_checkpoint(tmp_path)


def test_words_of_both_packings(tmp_path: Path) -> None:
    parts, _ = writer(16, bits=5, zeros=(16, 16))("", 24, 48)
    save_file({f"layer.{leaf}": t.contiguous() for leaf, t in parts.items()}, tmp_path / "model.safetensors")
    settings = config({"num_bits": 5, "group_size": 16})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with pytest.raises(FormatError, match="8 words a row for 48 codes of 5 bits, as many if codes straddle"):
        open_checkpoint(tmp_path)


def test_words_of_neither_packing(tmp_path: Path) -> None:
    write_model(tmp_path, config({"num_bits": 3}), writer(bits=3, zeros=(4, 4)))
    change(tmp_path, lambda t: t.update({f"{DOWN}.weight_packed": t[f"{DOWN}.weight_packed"][:, 1:].contiguous()}))
    with pytest.raises(FormatError, match=r"has 8 words a row, wanted 9 of 96 codes of 3 bits, or 10 if no code"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_int8(tmp_path: Path, strategy: str) -> None:
    """W8A8, whose x stays in 16 bits."""
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    settings = config({"num_bits": 8, "strategy": strategy}, "int-quantized", activations)
    group_size = 32 if strategy == "group" else -1
    expected = write_model(tmp_path, settings, writer(group_size, packed=False, bits=8, zeros=(128, 128)))
    assert_loads(tmp_path, expected, {"int8_g32" if strategy == "group" else "int8_col": 7 * LAYERS})


ASYMMETRIC: dict[str, Any] = {"zero_point": True, "zeros": (0, 15)}


@pytest.mark.parametrize(
    ("config", "write", "format"),
    [
        (config(), writer(), "int4_g32"),
        (config(), writer(dtype=torch.float16, g_idx="unused", zero_point=True), "int4_g32_fp16"),
        (config({"symmetric": False}), writer(**ASYMMETRIC), "int4_g32_zint"),
        (config({"strategy": "channel", "group_size": None}), writer(-1), "int4_col"),
        (config({"strategy": "channel", "symmetric": False}), writer(-1, **ASYMMETRIC), "int4_col_zint"),
        (config({"actorder": "group"}), writer(g_idx="groups", act_order=True), "int4_g32"),
        (config({"actorder": "weight"}, ignore=("re:.*lm_head",)), writer(), "int4_g32"),
        (config(packing="mixed-precision", format="int-quantized"), writer(packed=False), "int4_g32"),
        (config({"symmetric": False}, "int-quantized"), writer(packed=False, **ASYMMETRIC), "int4_g32_zint"),
    ],
    ids=["sym", "fp16", "asym", "col", "col-asym", "act-order", "static-order", "int", "int-asym"],
)
def test_weights_and_logits(tmp_path: Path, config: dict[str, Any], write: Writer, format: str) -> None:
    assert_loads(tmp_path, write_model(tmp_path, config, write), {format: 7 * LAYERS})


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "int8"])
def test_w4afp8_quantizes_activations(tmp_path: Path, packed: bool) -> None:
    packing = "pack-quantized" if packed else "int-quantized"
    expected = write_model(tmp_path, config(packing=packing, input_activations=FP8), writer(packed=packed))
    checkpoint = open_checkpoint(tmp_path)
    assert {module.activations for module in checkpoint.modules.values()} == {"fp8"}
    for name, weight in expected.items():
        assert torch.equal(checkpoint.weight(name).dequantize(), weight), name
    model, tokenizer = load(tmp_path)
    layer = model.get_submodule(DOWN)
    assert layer.weight.activations == "fp8"
    ids = tokenizer("hello there", return_tensors="pt").input_ids
    with torch.inference_mode():
        assert model(ids).logits.isfinite().all()


@pytest.mark.parametrize(
    ("activations", "expected"),
    [
        (FP8 | {"dynamic": False, "strategy": "tensor"}, "fp8"),
        (FP8 | {"strategy": "group", "group_size": 128}, "fp8"),
        (FP8 | {"type": "int"}, None),
        (FP8 | {"type": "int", "num_bits": 4}, None),
    ],
    ids=["static", "groups", "int8", "int4"],
)
def test_activations_of_other_kinds(tmp_path: Path, activations: dict[str, Any], expected: str | None) -> None:
    """Activations in e4m3 get a scale for each token, all others stay in 16 bits. A cache's scales are not used."""
    weights = write_model(
        tmp_path, config(packing="int-quantized", input_activations=activations), writer(packed=False)
    )
    scales = {f"{DOWN}.input_scale": torch.ones(1), "model.layers.0.self_attn.k_scale": torch.ones(1)}
    change(tmp_path, lambda t: t.update(scales))
    checkpoint = open_checkpoint(tmp_path)
    w = checkpoint.weight(DOWN)
    assert checkpoint.modules[DOWN].activations == w.activations == expected
    assert torch.equal(w.dequantize(), weights[DOWN])
    load(tmp_path)


def test_exponents_of_older_mxfp4(tmp_path: Path) -> None:
    """compressed-tensors 0.13.0 stored floor(log2(scale)) + 125, and so did nightly builds before 2026-01-09."""
    codes, exponents = torch.randint(0, 16, (8, 64)), torch.randint(-9, 2, (8, 2))
    stored = {"weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)}
    stored["weight_scale"] = (exponents + 125).to(torch.uint8)
    save_file({f"linear.{leaf}": t for leaf, t in stored.items()}, tmp_path / "model.safetensors")
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes % 8] * (1 - codes // 8 * 2)
    expected = numbers * (2.0**exponents).repeat_interleave(32, 1)
    older = ("0.12.3.a20251114", "0.13.0", "0.13.0.post1", "0.13.1.a20251218", "0.13.1a20260108")
    newer = ("0.13.1.a20260109", "0.13.1", "0.14.0.a20251231", "0.14.0", None)
    for version, factor in (*((v, 1) for v in older), *((v, 1 / 4) for v in newer)):
        settings = config(weights, "mxfp4-pack-quantized") | {"version": version}
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
        assert torch.equal(open_checkpoint(tmp_path).weight("linear").dequantize(), expected * factor), version


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("group_size", [32, 128, None])
@pytest.mark.parametrize("packing", ["pack-quantized", "int-quantized"])
def test_the_package_that_defines_the_format(
    tmp_path: Path, packing: str, group_size: int | None, symmetric: bool
) -> None:
    """A folder that compressed-tensors packed is read as what it decompresses, in float32."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(0)
    n, k = 20, 384
    changes = {"symmetric": symmetric, "strategy": "group" if group_size else "channel", "group_size": group_size}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**WEIGHTS | changes))
    compressor = BaseCompressor.get_value_from_registry(packing)
    shape = n, k // group_size if group_size else 1
    zeros = torch.zeros(shape) if symmetric else torch.randint(-8, 8, shape)
    stored = compressor.compress(
        {
            "weight": (torch.randn(n, k) * 0.05).bfloat16(),
            "weight_scale": (torch.rand(shape) / 50 + 0.005).bfloat16(),
            "weight_zero_point": zeros.to(torch.int8),
        },
        scheme,
    )
    save_file({f"linear.{leaf}": t.contiguous() for leaf, t in stored.items()}, tmp_path / "model.safetensors")
    settings = {"quantization_config": config(changes, packing)}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    expected = compressor.decompress(stored | {"weight_scale": stored["weight_scale"].float()}, scheme)["weight"]
    assert torch.equal(open_checkpoint(tmp_path).weight("linear").dequantize(), expected)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
@pytest.mark.parametrize("n", [7, 13, 19])
def test_zero_points_whose_last_one_begins_a_word(tmp_path: Path, bits: int, n: int) -> None:
    """The package's zero points of 7 rows in 5 bits: the seventh begins in one word and ends in the next."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    changes = {"num_bits": bits, "symmetric": False}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**WEIGHTS | changes))
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    torch.manual_seed(0)
    half, shape = 2 ** (bits - 1), (n, 12)
    stored = compressor.compress(
        {
            "weight": (torch.randn(n, 384) * 0.05).bfloat16(),
            "weight_scale": (torch.rand(shape) / 50 + 0.005).bfloat16(),
            "weight_zero_point": torch.randint(-half, half, shape).to(torch.int8),
        },
        scheme,
    )
    save_file({f"linear.{leaf}": t.contiguous() for leaf, t in stored.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config(changes)}))
    expected = compressor.decompress(stored | {"weight_scale": stored["weight_scale"].float()}, scheme)["weight"]
    assert torch.equal(open_checkpoint(tmp_path).weight("linear").dequantize(), expected)


@pytest.mark.parametrize("structure", [[112, 96], [64, 64], "64x64", "128x128", None, 32])
def test_fp8_in_the_blocks_of_the_config(tmp_path: Path, structure: Any) -> None:
    """A grid of 112 x 96 has as many blocks as one of 128 x 128 here. One number is the size of groups."""
    n, k = 200, 190
    sizes = [*map(int, structure.split("x"))] if isinstance(structure, str) else structure
    rows, columns = (1, structure) if isinstance(structure, int) else sizes or (128, 128)
    torch.manual_seed(0)
    weight, scale = torch.randn(n, k).to(torch.float8_e4m3fn), torch.rand(-(-n // rows), -(-k // columns))
    save_file({"linear.weight": weight, "linear.weight_scale": scale}, tmp_path / "model.safetensors")
    settings = config({"num_bits": 8, "type": "float", "strategy": "block"}, "float-quantized")
    weights = settings["config_groups"]["group_0"]["weights"]
    weights |= {"strategy": "group", "group_size": structure} if rows == 1 else {"block_structure": structure}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    expected = weight.float() * scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    assert torch.equal(open_checkpoint(tmp_path).weight("linear").dequantize(), expected)


def group(target: str, **weights: Any) -> dict[str, Any]:
    return {"targets": [f"re:.*{target}"], "weights": {"num_bits": 8, "type": "float", **weights}}


def test_fp8_in_blocks_of_several_sizes(tmp_path: Path) -> None:
    """The scale of each weight has the grid of one of them. Once such a folder was refused, as was MXFP8."""
    n, k, names = 192, 256, ("a", "b", "mx", "row", "whole")
    blocks = {"a": (64, 64), "b": (128, 128), "mx": (1, 32), "row": (1, k), "whole": (n, k)}
    settings = config({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]})
    settings["config_groups"] |= {
        "group_1": group("b", strategy="block", block_structure=[128, 128]),
        "group_2": group("mx", strategy="group", group_size=32, scale_dtype="torch.uint8"),
        "group_3": group("row", strategy="channel"),
        "group_4": group("whole", strategy="tensor"),
    }
    torch.manual_seed(0)
    tensors, expected = {}, {}
    for name in names:
        rows, columns = blocks[name]
        weight, scale = torch.randn(n, k).to(torch.float8_e4m3fn), torch.rand(-(-n // rows), -(-k // columns)) + 0.5
        if name == "mx":
            codes = torch.randint(120, 130, scale.shape, dtype=torch.uint8)
            scale, stored = torch.exp2(codes.float() - 127), codes
        else:
            stored = scale.view(()) if name == "whole" else scale
        tensors |= {f"{name}.weight": weight, f"{name}.weight_scale": stored}
        expected[name] = weight.float() * scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    checkpoint = open_checkpoint(tmp_path)
    assert {name: str(m.format) for name, m in checkpoint.modules.items()} == {
        "a": "e4m3_g64_fp32",
        "b": "e4m3_g128_b128",
        "mx": "e4m3_g32_e8m0",
        **dict.fromkeys(("row", "whole"), "e4m3_col_fp32"),
    }
    for name in names:
        assert torch.equal(checkpoint.weight(name).dequantize(), expected[name]), name


def test_scales_that_blocks_of_two_sizes_have_are_refused(tmp_path: Path) -> None:
    """Unless both mean the same: a block may reach past the weight."""
    settings = config({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [112, 96]})
    other = settings["config_groups"]["group_1"] = group("b", strategy="block", block_structure=[128, 128])

    def opened(n: int, k: int, grid: tuple[int, int]) -> Any:
        tensors = {"linear.weight": torch.ones(n, k).to(torch.float8_e4m3fn), "linear.weight_scale": torch.ones(grid)}
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
        return open_checkpoint(tmp_path).weight("linear")

    with pytest.raises(
        FormatError, match=r"\(2, 2\); wanted a shape that tells apart the blocks .* 112 x 96 and of 128"
    ):
        opened(200, 190, (2, 2))
    assert str(opened(112, 96, (1, 1)).format) == "e4m3_col_fp32"
    with pytest.raises(
        FormatError, match=r"wanted one number, \(64, 1\), or \(1, 2\) or \(1, 1\) for blocks of 112 x 96 or"
    ):
        opened(64, 128, (1, 3))
    other["weights"]["block_structure"] = [64]
    with pytest.raises(FormatError, match=r"group_1\.weights\.block_structure is \[64\], wanted two positive integers"):
        opened(64, 64, (1, 1))


@pytest.mark.parametrize("packing", ["mxfp4-pack-quantized", "nvfp4-pack-quantized"])
def test_4_bit_floats_of_the_package(tmp_path: Path, packing: str) -> None:
    """MXFP4 bit for bit in float32; NVFP4 within its roundings, because the package divides scales by the tensor's
    before it multiplies."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    torch.manual_seed(0)
    n, k, mx = 20, 384, packing.startswith("mx")
    group = 32 if mx else 16
    weights: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": "group" if mx else "tensor_group"}
    weights |= {"group_size": group, "symmetric": True, "scale_dtype": "torch.uint8" if mx else "torch.float8_e4m3fn"}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(packing)
    exponents = torch.randint(-8, -2, (n, k // group))
    tensors = {
        "weight": torch.randn(n, k) * 0.05,
        "weight_scale": 2.0**exponents if mx else torch.rand(n, k // group) * 400,
    }
    if not mx:
        tensors["weight_global_scale"] = torch.tensor([3000.0])
    stored = compressor.compress(tensors, scheme)
    save_file({f"linear.{leaf}": t.contiguous() for leaf, t in stored.items()}, tmp_path / "model.safetensors")
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 4, "type": "float"}}
    settings = {"quant_method": "compressed-tensors", "format": packing, "config_groups": {"group_0": group_0}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    weight = open_checkpoint(tmp_path).weight("linear")
    assert (str(weight.format), weight.activations) == (str(WeightFormat.parse(packing[:5])), None)
    # what the package's decompress does, in float32 instead of bf16
    numbers = unpack_fp4_from_uint8(stored["weight_packed"], n, k).float()
    scales = compressor._decompress_scale(stored["weight_scale"], torch.float32)
    factor = {} if mx else {"global_scale": stored["weight_global_scale"]}
    expected = dequantize(numbers, scales, args=scheme.weights, dtype=torch.float32, **factor)
    torch.testing.assert_close(weight.dequantize(), expected, rtol=0 if mx else 2**-22, atol=0)
    configure(tmp_path, config_groups={"group_0": {"targets": ["Linear"], "weights": weights | {"type": "int"}}})
    with pytest.raises(FormatError, match="its weight is of type 'int', wanted 'float'"):
        open_checkpoint(tmp_path)


def test_6_bit_floats_of_the_package(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors.compressors.mxfp6")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = {"num_bits": 6, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry("mxfp6-pack-quantized")
    w, scales = torch.randn(20, 64) * 0.05, 2.0 ** torch.randint(-8, -2, (20, 2))
    stored = compressor.compress({"weight": w, "weight_scale": scales}, scheme)
    save_file({f"linear.{leaf}": t.contiguous() for leaf, t in stored.items()}, tmp_path / "model.safetensors")
    x = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": x}
    settings = {"quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized", "config_groups": {"0": group}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    weight = open_checkpoint(tmp_path).weight("linear")
    assert (str(weight.format), weight.activations) == ("e2m3_g32_e8m0", None)
    assert torch.equal(weight.dequantize(), compressor.decompress(stored, scheme)["weight"].float())
    put(tmp_path, "linear.weight_packed", torch.zeros(20, 49, dtype=torch.uint8))
    with pytest.raises(FormatError, match="linear: a row has 49 bytes, wanted a multiple of 3"):
        open_checkpoint(tmp_path)


def test_float32_scales_and_one_of_the_tensor(tmp_path: Path) -> None:
    expected = write_model(tmp_path, config(), writer(dtype=torch.float32))
    assert torch.equal(open_checkpoint(tmp_path).weight(DOWN).dequantize(), expected[DOWN])
    whole = config({"num_bits": 8, "strategy": "tensor", "group_size": None}, "int-quantized")

    def write(name: str, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        q = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        return {"weight": q, "weight_scale": torch.tensor([0.25]).bfloat16()}, q * 0.25

    expected = write_model(tmp_path, whole, write)
    w = open_checkpoint(tmp_path).weight(DOWN)
    assert str(w.format) == "int8_col" and torch.equal(w.dequantize(), expected[DOWN])


def test_targets_choose_the_group(tmp_path: Path) -> None:
    """A name goes before a pattern, a pattern before the class; what is ignored stays dense."""
    fine, coarse = writer(), writer(64)

    def write(name: str, n: int, k: int) -> Any:
        return (coarse if name.endswith("q_proj") and not name.startswith("model.layers.0") else fine)(name, n, k)

    settings = config(ignore=("re:.*k_proj$",))
    groups = settings["config_groups"]
    groups["group_1"] = {"targets": ["re:.*q_proj"], "weights": WEIGHTS | {"group_size": 64}}
    groups["group_2"] = {"targets": ["model.layers.0.self_attn.q_proj"], "weights": WEIGHTS}
    expected = write_model(tmp_path, settings, write, dense=("k_proj",), architecture="llama")
    assert "lm_head" in expected
    assert_loads(tmp_path, expected, {"int4_g32": 6 * LAYERS, "int4_g64": 1})


def test_of_several_patterns_the_first_by_the_alphabet(tmp_path: Path) -> None:
    """As the package's match_targets has them; and of groups with one target it takes the last."""
    fine, coarse = writer(), writer(64)

    def write(name: str, n: int, k: int) -> Any:
        return (fine if name.endswith(("k_proj", "mlp.down_proj")) else coarse)(name, n, k)

    wide = {"weights": WEIGHTS | {"group_size": 64}}
    groups = {"a": {"targets": ["re:.*self_attn.*", "Linear"], **wide}, "b": {"targets": ["re:.*k_proj"]} | wide}
    groups |= {"c": {"targets": ["re:.*k_proj", "re:.*down.*"], "weights": WEIGHTS}}
    settings = config() | {"config_groups": groups}
    expected = write_model(tmp_path, settings, write, architecture="llama")
    assert_loads(tmp_path, expected, {"int4_g32": 2 * LAYERS, "int4_g64": 5 * LAYERS})


@pytest.mark.parametrize("alone", [True, False])
def test_an_embedding(tmp_path: Path, alone: bool) -> None:
    """llm-compressor quantizes modules of the class Embedding, which stay packed."""
    expected = write_model(tmp_path, config(), writer(), architecture="llama")
    stored = load_file(tmp_path / "model.safetensors")
    vocabulary, hidden = stored.pop("model.embed_tokens.weight").shape
    parts, rows = writer(64)("model.embed_tokens", vocabulary, hidden)
    stored |= {f"model.embed_tokens.{leaf}": t for leaf, t in parts.items()}
    if alone:
        for name, w in expected.items():
            for leaf in [leaf for leaf in stored if leaf.startswith(f"{name}.")]:
                del stored[leaf]
            stored[f"{name}.weight"] = w
    save_file(stored, tmp_path / "model.safetensors")
    group = {"targets": ["Embedding"], "weights": WEIGHTS | {"group_size": 64}}
    others = {} if alone else config()["config_groups"]
    configure(tmp_path, config_groups={**others, "embedding": group})
    model, _ = load(tmp_path)
    assert torch.equal(model.model.embed_tokens.weight.dequantize(), rows)
    assert torch.equal(model.model.embed_tokens(torch.arange(vocabulary)), rows)
    assert sum(isinstance(layer, W4Linear) for layer in model.modules()) == (0 if alone else 7 * LAYERS)


def test_rotations_of_weights_alone(tmp_path: Path) -> None:
    """SpinQuant's R1 and R2 are in the stored weights; R3 and R4 rotate activations."""
    expected = write_model(tmp_path, config(), writer())
    r1 = {"apply": [{"location": "weight_output"}, {"location": "weight_input", "inverse": True}]}
    configure(tmp_path, transform_config={"config_groups": {"R1": r1}})
    assert_loads(tmp_path, expected, {"int4_g32": 7 * LAYERS})
    r4 = {"apply": [{"location": "input"}, {"location": "weight_input", "inverse": True}]}
    configure(tmp_path, transform_config={"config_groups": {"R1": r1, "R4": r4}})
    with pytest.raises(FormatError, match=r"rotates activations .*, or with rotations of weights alone"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (config({"num_bits": 9}), "its weight has 9 bits, wanted 4 or 8 or 6"),
        (config({"num_bits": 8}), "groups of 32 do not divide its 48 input features"),
        (config({"strategy": "block"}), "int with a scale for each block, wanted int with a scale for each group,"),
        (config({"group_size": 64}), "groups of 64 do not divide its 96 input features"),
        (
            config() | {"config_groups": {"W4A16": ["Linear"]}},
            "config_groups.W4A16 is the name of a preset, wanted its",
        ),
        (config(packing="nvfp4-pack-quantized"), "its weight is of type 'int', wanted 'float'"),
        (config(packing="mxfp4-pack-quantized"), "its weight is of type 'int', wanted 'float'"),
        (config(packing="int-quantized"), "there is no weight beside its"),
        (config({"symmetric": False}), "there is no weight_zero_point beside its"),
        (
            config({"actorder": "group"}),
            "it has no weight_g_idx, which says the group of each column where actorder is",
        ),
        (config(ignore=("re:.*mlp",)), "config.json ignores it, but it has quantized tensors"),
        (config(targets=["re:.*q_proj"]), "no config group has it, or Linear, among its targets"),
        (config(input_activations=FP8 | {"num_bits": 16}), "its activations are 16-bit float; wanted none, or int or"),
        (config() | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config rotates activations"),
        (
            config() | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config says that weights are sparse",
        ),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    write_model(tmp_path, config(), writer())
    configure(tmp_path, **settings)
    with pytest.raises(FormatError, match=message):
        open_checkpoint(tmp_path)


def test_damaged_folders(tmp_path: Path) -> None:
    write_model(tmp_path, config(), writer())
    refused = refusals(tmp_path)
    parts = ("weight_packed", "weight_scale", "weight_shape")
    refused(f"{DOWN}: there is no weight_packed beside its weight_s", lambda t: t.pop(f"{DOWN}.weight_packed"))
    refused(f"{DOWN}: there is no weight_scale", lambda t: t.pop(f"{DOWN}.weight_scale"))
    refused(f"no tensor for {DOWN}.weight", lambda t: [t.pop(f"{DOWN}.{x}") for x in parts])
    refused(f"{DOWN}: weight_shape is", lambda t: t.update({f"{DOWN}.weight_shape": torch.tensor([64, 95])}))
    refused(f"{DOWN}: weight_zero_point has", lambda t: t.update({f"{DOWN}.weight_zero_point": torch.ones(8).int()}))
    for extra in ("weight", "weight_global_scale"):
        stray = {f"{DOWN}.{extra}": torch.ones(1)}
        refused(f"{DOWN}: {extra} is no tensor of pack-quantized", lambda t, stray=stray: t.update(stray))
    ones = torch.ones(64, 3).to(torch.int8)
    refused(
        f"{DOWN}: config.json says that it is symmetric, but its zero points are 9 to 9",
        lambda t: t.update({f"{DOWN}.weight_zero_point": ones}),
    )
    refused("no place for .*down_proj.other_scale", lambda t: t.update({f"{DOWN}.other_scale": torch.ones(1)}))


def test_numbers_out_of_range(tmp_path: Path) -> None:
    write_model(tmp_path, config({"symmetric": False}, "int-quantized"), writer(packed=False, **ASYMMETRIC))
    change(tmp_path, lambda t: t[f"{DOWN}.weight"][0].fill_(8))
    with pytest.raises(FormatError, match=f"{DOWN}: weight: wanted -8 to 7, got -8 to 8"):
        open_checkpoint(tmp_path).weight(DOWN)
    change(tmp_path, lambda t: [t[f"{DOWN}.weight"][0].fill_(7), t[f"{DOWN}.weight_zero_point"].fill_(8)])
    with pytest.raises(FormatError, match=f"{DOWN}: weight_zero_point: wanted -8 to 7, got 8 to 8"):
        open_checkpoint(tmp_path).weight(DOWN)
