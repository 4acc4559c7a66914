"""Folders quantized by HQQ hold its numbers: bit for bit with 16-bit scales, closely with float32 ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import save_file

from quantized_model import Writer, assert_loads, put, write_model
from tiny_model import LAYERS
from w4gemm import FormatError
from w4gemm.checkpoints import open_checkpoint

CONFIG = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 32, "axis": 1}}}
DOWN = "model.layers.1.mlp.down_proj"


def text(value: str) -> torch.Tensor:
    return torch.tensor([ord(letter) for letter in value], dtype=torch.uint8)


def packed_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of codes: the first half, quarter or tenth of them in the highest bits."""
    if bits == 3:
        codes = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % 10))
    each = {1: 8, 2: 4, 3: 10, 4: 2}.get(bits, 1)
    parts = codes.int().view(each, -1, codes.shape[1])
    words = sum(part << bits * (each - 1 - i) for i, part in enumerate(parts))
    return words if bits == 3 else words.to(torch.uint8)


def writer(dtype: torch.dtype = torch.float16, group_size: int = 32, as_float: bool = False, bits: int = 4) -> Writer:
    def write(name: str, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        random = torch.Generator().manual_seed(n + k)
        group = group_size if group_size > 0 else k
        rows = n * k // group
        codes = torch.randint(0, 2**bits, (rows, group), generator=random)
        scale = (torch.rand(rows, 1, generator=random) * 0.02 + 0.005).to(dtype)
        zero = (torch.rand(rows, 1, generator=random) * 4 + 6).to(dtype)
        packed = packed_rows(codes, bits)
        return {
            "W_q": packed.view(dtype) if as_float else packed,
            "scale": scale,
            "zero": zero,
            "shape": torch.tensor([n, k]),
            "nbits": torch.tensor(bits, dtype=torch.int32),
            "group_size": torch.tensor(group, dtype=torch.int32),
            "axis": torch.tensor(1, dtype=torch.int32),
            "packing": text({1: "1bit_u8", 2: "2bit_u8", 3: "3bit_32", 4: "4bit_u8"}.get(bits, "8bit_u8")),
            "view_as_float": torch.tensor(int(as_float), dtype=torch.uint8),
            "compute_dtype": text(str(dtype)),
            "quant_scale": torch.tensor(0, dtype=torch.uint8),
        }, ((codes - zero.float()) * scale.float()).view(n, k)

    return write


@pytest.mark.parametrize(
    ("write", "format"),
    [
        (writer(), "int4_g32_zfloat_fp32"),
        (writer(torch.bfloat16, as_float=True), "int4_g32_zfloat_fp32"),
        (writer(group_size=-1), "int4_col_zfloat_fp32"),
        (writer(bits=8), "int8_g32_zfloat_fp32"),
        (writer(bits=6), "int6_g32_zfloat_fp32"),
        (writer(bits=5), "int5_g32_zfloat_fp32"),
        (writer(torch.bfloat16, as_float=True, bits=3), "int3_g32_zfloat_fp32"),
        (writer(bits=2), "int2_g32_zfloat_fp32"),
        (writer(bits=1), "int2_g32_zfloat_fp32"),
    ],
    ids=["fp16", "bf16 as float", "col", "8 bits", "6 bits", "5 bits", "3 bits", "2 bits", "1 bit"],
)
def test_weights_and_logits(tmp_path: Path, write: Writer, format: str) -> None:
    assert_loads(tmp_path, write_model(tmp_path, CONFIG, write), {format: 7 * LAYERS})


def test_three_numbers_lie_as_2_bits(tmp_path: Path) -> None:
    expected = write_model(tmp_path, CONFIG, writer(bits=2))
    put(tmp_path, f"{DOWN}.nbits", torch.tensor(1.58))
    assert torch.equal(open_checkpoint(tmp_path).weight(DOWN).dequantize(), expected[DOWN])


def test_float32_scales_are_rounded(tmp_path: Path) -> None:
    expected = write_model(tmp_path, CONFIG, writer(torch.float32))
    checkpoint = open_checkpoint(tmp_path)
    for name, weight in expected.items():
        error = (checkpoint.weight(name).dequantize() - weight).abs().max()
        assert 0 < error <= 2**-19 * 15 * 0.025


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_the_package_writes_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    monkeypatch.setenv("DISABLE_CUDA", "1")
    quantize = pytest.importorskip("hqq.core.quantize")

    def write(name: str, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        config = quantize.BaseQuantizeConfig(nbits=bits, group_size=32, axis=1)
        layer = quantize.HQQLinear(torch.nn.Linear(k, n, False), config, compute_dtype=torch.float16, device="cpu")
        meta = layer.meta | {"compute_dtype": torch.float32}
        return dict(layer.state_dict()), quantize.Quantizer.dequantize(layer.W_q, meta)

    assert_loads(tmp_path, write_model(tmp_path, CONFIG, write), {f"int{bits}_g32_zfloat_fp32": 7 * LAYERS})


def test_a_matrix_of_half_bytes_is_refused(tmp_path: Path) -> None:
    """The last number of an odd many is in no byte."""
    stored = {"W_q": torch.zeros(1, 16, dtype=torch.uint8), "scale": torch.ones(1, 1), "zero": torch.ones(1, 1)}
    stored |= {"shape": torch.tensor([1, 33]), "nbits": torch.tensor(4), "axis": torch.tensor(1)}
    tensors = {f"model.a.{leaf}": t for leaf, t in (stored | {"packing": text("4bit_u8")}).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": CONFIG}))
    with pytest.raises(FormatError, match=r"model\.a: W_q has shape \(1, 16\), wanted 0.5 rows of 33 bytes"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("leaf", "tensor", "message"),
    [
        ("axis", torch.tensor(0), "axis is 0: its groups run along the output features.*axis=1"),
        ("nbits", torch.tensor(7), "its weight has 7 bits, wanted 8 or 6 or 5 or 4 or 3 or 2 or 1"),
        ("packing", text("2bit_u8"), "packing is '2bit_u8', wanted '4bit_u8'"),
        ("quant_scale", torch.tensor(1), "its scales are quantized"),
        ("shape", torch.tensor([64, 97]), r"shape is \(64, 97\), wanted rows of whole groups of 32"),
        ("W_q", torch.zeros(32, 96, dtype=torch.uint8), "W_q has shape .* wanted 96 rows of 32 bytes"),
        ("shape", torch.tensor([32, 96]), "W_q has shape .* wanted 48 rows of 32 bytes"),
        ("group_size", torch.tensor(24), "W_q|scale has shape|group_size: wanted"),
        ("scale", torch.ones(5, 1), r"scale has shape \(5, 1\), wanted"),
        ("zero", None, "there is no zero beside"),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path: Path, leaf: str, tensor: torch.Tensor | None, message: str) -> None:
    write_model(tmp_path, CONFIG, writer())
    put(tmp_path, f"{DOWN}.{leaf}", tensor)
    with pytest.raises(FormatError, match=f"{DOWN}: .*({message})"):
        open_checkpoint(tmp_path)
