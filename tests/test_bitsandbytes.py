"""Folders quantized by bitsandbytes hold its numbers bit for bit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from quantized_model import Writer, assert_loads, put, write_model
from tiny_model import LAYERS
from w4gemm import FormatError, WeightFormat
from w4gemm.checkpoints import Module, bitsandbytes, find_checkpoint, open_checkpoint
from w4gemm.core.elements import ELEMENTS

CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
DOWN = "model.layers.1.mlp.down_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"
FP4 = [v / 12 for v in (0, 0.0625, 8, 12, 4, 6, 2, 3)]
TABLES = {"nf4": list(ELEMENTS["nf4"].values), "fp4": FP4 + [-v for v in FP4]}


def as_bytes(settings: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


def writer(kind: str = "nf4", block: int = 64, nested: bool = False, storage: torch.dtype = torch.uint8) -> Writer:
    """Weights by bitsandbytes' definition: blocks of all elements in a row, the even code in the high nibble."""

    def write(name: str, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        random = torch.Generator().manual_seed(n + k)
        codes = torch.randint(0, 16, (n * k,), generator=random)
        blocks = -(-n * k // block)
        table = torch.tensor(TABLES[kind])
        settings: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
        if nested:
            indices = torch.randint(0, 256, (blocks,), generator=random)
            numbers = torch.linspace(-1, 1, 256)
            factors = torch.rand(-(-blocks // 256), generator=random) * 0.01 + 0.01
            scales = numbers[indices] * factors.repeat_interleave(256)[:blocks] + torch.tensor(0.03)
            settings |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": torch.tensor(0.03).item()}
            absmax = {
                "weight.absmax": indices.to(torch.uint8),
                "weight.nested_absmax": factors,
                "weight.nested_quant_map": numbers,
            }
        else:
            scales = torch.rand(blocks, generator=random) * 0.05 + 0.01
            absmax = {"weight.absmax": scales}
        weight = (table[codes] * scales.repeat_interleave(block)[: n * k]).view(n, k)
        return {
            "weight": (codes[0::2] << 4 | codes[1::2]).to(torch.uint8).view(storage)[:, None],
            **absmax,
            "weight.quant_map": table,
            f"weight.quant_state.bitsandbytes__{kind}": as_bytes(settings),
        }, weight

    return write


@pytest.mark.parametrize(
    ("write", "formats"),
    [
        (writer(block=32), {"nf4_g32_fp32": 7 * LAYERS}),
        (writer(nested=True), {"nf4_g64_fp32": 6 * LAYERS, "nf4_g32_fp32": LAYERS}),
        (writer(block=32, nested=True, storage=torch.bfloat16), {"nf4_g32_fp32": 7 * LAYERS}),
    ],
    ids=["float32 scales", "nested, blocks over rows of 96", "as bf16"],
)
def test_weights_and_logits(tmp_path: Path, write: Writer, formats: dict[str, int]) -> None:
    assert_loads(tmp_path, write_model(tmp_path, CONFIG, write), formats)


def test_another_table(tmp_path: Path) -> None:
    expected = write_model(tmp_path, CONFIG, writer("fp4", 32))
    checkpoint = open_checkpoint(tmp_path)
    for name, weight in expected.items():
        actual = checkpoint.weight(name)
        assert actual.format.element.startswith("codebook") and torch.equal(actual.dequantize(), weight)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_the_package_writes_what_is_read(tmp_path: Path, kind: str, nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")

    def write(name: str, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        dense = torch.randn(n, k, generator=torch.Generator().manual_seed(n))
        packed, state = functional.quantize_4bit(dense, blocksize=32, compress_statistics=nested, quant_type=kind)
        stored = {f"weight.{leaf}": t.contiguous() for leaf, t in state.as_dict(packed=True).items()}
        return {"weight": packed, **stored}, functional.dequantize_4bit(packed, state)

    expected = write_model(tmp_path, CONFIG, write)
    checkpoint = open_checkpoint(tmp_path)
    for name, weight in expected.items():
        assert torch.equal(checkpoint.weight(name).dequantize(), weight)


@pytest.mark.parametrize(
    ("leaf", "tensor", "message"),
    [
        ("weight", torch.zeros(7, 1, dtype=torch.uint8), r"weight is U8 of shape \(7, 1\), wanted 3072 elements of U8"),
        ("weight.absmax", torch.ones(5), r"weight.absmax is F32 of shape \(5,\), wanted 192 elements of F32"),
        ("weight.absmax", None, "there is no weight.absmax beside its weight"),
        ("weight.quant_map", torch.ones(16), "values: wanted numbers of both signs"),
        ("weight.quant_map", torch.full((16,), math.nan), "values: wanted a largest magnitude"),
        (STATE, None, "wanted one weight.quant_state.bitsandbytes__nf4 or __fp4 beside its absmax, got 0"),
        (STATE, as_bytes({"blocksize": 32}), "weight.quant_state: no settings that can be read: KeyError: 'shape'"),
        (STATE, as_bytes({"blocksize": 32, "shape": [0, 96]}), "wanted positive integers"),
        (STATE, as_bytes({"blocksize": 32, "shape": [96, 32]}), "disagree|weight"),
        (STATE, as_bytes({"blocksize": 24, "shape": [32, 96]}), "absmax is F32"),
        (STATE, torch.zeros(4, dtype=torch.uint8), "no settings that can be read: JSONDecodeError"),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path: Path, leaf: str, tensor: torch.Tensor | None, message: str) -> None:
    write_model(tmp_path, CONFIG, writer(block=32))
    put(tmp_path, f"{DOWN}.{leaf}", tensor)
    with pytest.raises(FormatError, match=f"{DOWN}: .*({message})"):
        open_checkpoint(tmp_path)


INT8 = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True, "llm_int8_threshold": 6.0}


def in_int8(name: str, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Weights by the definition of LLM.int8, with float16's largest magnitudes."""
    random = torch.Generator().manual_seed(n + k)
    codes = torch.randint(-127, 128, (n, k), generator=random).to(torch.int8)
    most = (torch.rand(n, generator=random) + 0.1).half().float()
    parts = {"weight": codes, "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, codes * (most * 7.874015718698502e-3)[:, None]


def test_8_bits(tmp_path: Path) -> None:
    assert_loads(tmp_path, write_model(tmp_path, INT8, in_int8), {"int8_col_fp32": 7 * LAYERS})


def test_8_bits_of_the_package(tmp_path: Path) -> None:
    """It multiplies codes by the largest magnitude first, so that the last bit of a weight may be another."""
    functional = pytest.importorskip("bitsandbytes.functional")
    for n, k in ((64, 96), (3, 32)):
        codes, most, _ = functional.int8_vectorwise_quant(torch.randn(n, k).half())
        expected = functional.int8_vectorwise_dequant(codes, most)
        packing = bitsandbytes.Int8Packing({})
        module = Module(n, k, WeightFormat.of("int8_col_fp32"))
        w = packing.numbers(module, {"weight": codes, "SCB": most}).weight().dequantize()
        torch.testing.assert_close(w, expected, rtol=2**-23, atol=0)


@pytest.mark.parametrize(
    ("leaf", "tensor", "message"),
    [
        ("weight", torch.zeros(64, 96), "weight is F32, wanted I8"),
        ("weight", torch.zeros(32, 64, 96, dtype=torch.int8), r"weight has shape \(32, 64, 96\), wanted a matrix"),
        ("weight", None, "there is no weight beside its SCB, weight_format"),
        ("SCB", torch.ones(96), r"SCB has shape \(96,\), wanted \(64,\)"),
        ("SCB", torch.ones(64).half(), "SCB is F16, wanted F32"),
        ("SCB", None, "there is no SCB beside its weight, weight_format"),
        ("weight_format", torch.tensor(2, dtype=torch.uint8), r"weight_format is \[2\], an order of a GPU's"),
    ],
    ids=str,
)
def test_8_bits_that_are_refused(tmp_path: Path, leaf: str, tensor: torch.Tensor | None, message: str) -> None:
    write_model(tmp_path, INT8, in_int8)
    put(tmp_path, f"{DOWN}.{leaf}", tensor)
    with pytest.raises(FormatError, match=f"{DOWN}: {message}"):
        open_checkpoint(tmp_path)


def test_numbers_in_8_bits_that_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, INT8, in_int8)
    put(tmp_path, f"{DOWN}.SCB", torch.full((64,), math.nan))
    with pytest.raises(FormatError, match=f"{DOWN}: scales: the weights of 64 groups would not be finite"):
        open_checkpoint(tmp_path).weight(DOWN)


def test_settings_without_the_methods_name(tmp_path: Path) -> None:
    """transformers took them for bitsandbytes' before it wrote the name, and does still."""
    write_model(tmp_path, {key: value for key, value in CONFIG.items() if key != "quant_method"}, writer(block=32))
    assert find_checkpoint(tmp_path).format.name == "bitsandbytes"


@pytest.mark.parametrize("wrong", [True, False])
def test_both_or_none_of_4_and_8_bits(tmp_path: Path, wrong: bool) -> None:
    write_model(tmp_path, CONFIG | {"load_in_4bit": wrong, "load_in_8bit": wrong}, writer(block=32))
    with pytest.raises(FormatError, match=f"load_in_4bit and load_in_8bit are {'both' if wrong else 'not'} true"):
        open_checkpoint(tmp_path)
