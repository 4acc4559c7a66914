"""A packing as short as one can be: what a new quantization method of Hugging Face folders needs, and what it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from quantized_model import Numbers, assert_loads, write_model
from tiny_model import LAYERS
from w4gemm import FormatError, QuantizedWeight, WeightFormat, checkpoints
from w4gemm.checkpoints import METHODS, Module, open_checkpoint
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.module_tensors import SCALES, check_bits, check_tensor, of_bytes, whole_groups
from w4gemm.checkpoints.quantized_folder import folder_format
from w4gemm.cli.__main__ import main

CONFIG = {"quant_method": "short", "bits": 4, "group_size": 32}


@dataclass(frozen=True)
class ShortPacking:
    """``codes4`` uint8 (n, k / 2), the even column in the high nibble, and ``steps`` (groups, n): w = (u - 8) * s."""

    config: Mapping[str, Any]
    marks = ("codes4",)
    others = ("steps",)

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        check_bits(self.config["bits"])
        n, half = check_tensor(stored, "codes4", ("U8",))
        check_tensor(stored, "steps", SCALES)
        format = WeightFormat(self.config["group_size"], scale=SCALES[stored["steps"].dtype])
        check_tensor(stored, "steps", SCALES, (whole_groups(format, 2 * half), n))
        return Module(n, 2 * half, format, "bias" in stored)

    def weight(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        codes = tensors["codes4"]
        return of_bytes(module, codes << 4 | codes >> 4, tensors["steps"].T)


def write(name: str, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    found = Numbers.random(n, k, 32)
    codes = torch.from_numpy(found.codes).to(torch.uint8)
    return {"codes4": codes[:, ::2] << 4 | codes[:, 1::2], "steps": found.scales.T}, found.weight


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the method, as a line of ``FORMATS`` does."""
    format = folder_format("short", "a folder with a short model", ShortPacking)
    monkeypatch.setattr(checkpoints, "FORMATS", (format, *checkpoints.FORMATS))


def test_it_loads_and_is_converted(tmp_path: Path) -> None:
    assert_loads(tmp_path / "in", write_model(tmp_path / "in", CONFIG, write), {"int4_g32_fp16": 7 * LAYERS})
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    theirs, ours = open_checkpoint(tmp_path / "in"), open_checkpoint(tmp_path / "out")
    assert ours.modules == theirs.modules
    for name in theirs.modules:
        assert torch.equal(ours.weight(name).dequantize(), theirs.weight(name).dequantize())


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    def without_steps(name: str, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tensors, weight = write(name, n, k)
        return {"codes4": tensors["codes4"]}, weight

    write_model(tmp_path / "config", {"quant_method": "short", "bits": 4}, write)
    with pytest.raises(FormatError, match="down_proj: quantization_config of config.json has no 'group_size'"):
        open_checkpoint(tmp_path / "config")
    write_model(tmp_path / "tensor", CONFIG, without_steps)
    with pytest.raises(FormatError, match="down_proj: there is no steps beside its codes4"):
        open_checkpoint(tmp_path / "tensor")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("bits", "quantization_config of config.json has no 'bits'"),
        ("steps", "there is no steps beside its codes4, steps"),
        (torch.float16, "its reader does not know torch.float16"),
    ],
)
def test_a_lookup_that_fails_blames_what_was_looked_in(
    key: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, CONFIG, write)
    monkeypatch.setattr(ShortPacking, "module", lambda self, name, stored: {}[key])
    with pytest.raises(FormatError, match=f"down_proj: {message}"):
        open_checkpoint(tmp_path)


def test_each_method_has_a_sample_to_damage() -> None:
    from fuzz import samples

    missing = {*METHODS} - samples.FORMATS.keys()
    assert not missing, f"add a small folder of each of {missing} to tests/fuzz/samples.py: damaged, it must be refused"
