"""A packing as short as one can be: what a new quantization method of Hugging Face folders needs, and what it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from quantized_model import Numbers, Writer, assert_loads, write_model
from tiny_model import LAYERS
from w4gemm import FormatError, WeightFormat, checkpoints
from w4gemm.checkpoints import METHODS, Module, open_checkpoint
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.packed_numbers import PackedMatrix, PackedNumbers
from w4gemm.checkpoints.quantized_folder import Packing, folder_format
from w4gemm.checkpoints.stored import SCALES, check_bits, check_tensor, whole_groups
from w4gemm.cli.__main__ import main

CONFIG = {"quant_method": "short", "bits": 4, "group_size": 32}


class ShortPacking(Packing):
    """``codes4`` uint8 (n, k / 2), the even column in the high nibble, and ``steps`` (groups, n): w = (u - 8) * s."""

    method = "short"
    contents = "a folder with a short model"
    marks = ("codes4", "steps")

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        check_bits(self.config["bits"], (4,))
        n, half = check_tensor(stored, "codes4", ("U8",))
        check_tensor(stored, "steps", SCALES)
        format = WeightFormat(self.config["group_size"], scale=SCALES[stored["steps"].dtype])
        check_tensor(stored, "steps", SCALES, (whole_groups(format, 2 * half), n))
        return Module(n, 2 * half, format, "bias" in stored)

    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> PackedNumbers:
        codes = tensors["codes4"]
        swapped = PackedMatrix(codes << 4 | codes >> 4, along="k", bits=4)
        steps = PackedMatrix(tensors["steps"], transposed=True)
        return PackedNumbers(module.format, swapped, steps)


def write(name: str, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    numbers = Numbers.random(n, k, 32)
    codes = torch.from_numpy(numbers.codes).to(torch.uint8)
    return {"codes4": codes[:, ::2] << 4 | codes[:, 1::2], "steps": numbers.scales.T}, numbers.weight


def writer_of(changed: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Writer:
    """Return :func:`write` with the tensors of each module changed."""

    def changed_write(name: str, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tensors, weight = write(name, n, k)
        return changed(tensors), weight

    return changed_write


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the method, as a line of ``FORMATS`` does."""
    format = folder_format(ShortPacking)
    monkeypatch.setattr(checkpoints, "FORMATS", (format, *checkpoints.FORMATS))


def test_it_loads_and_is_converted(tmp_path: Path) -> None:
    assert_loads(tmp_path / "in", write_model(tmp_path / "in", CONFIG, write), {"int4_g32_fp16": 7 * LAYERS})
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    theirs, ours = open_checkpoint(tmp_path / "in"), open_checkpoint(tmp_path / "out")
    assert ours.modules == theirs.modules
    for name in theirs.modules:
        assert torch.equal(ours.weight(name).dequantize(), theirs.weight(name).dequantize())


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    write_model(tmp_path / "config", {"quant_method": "short", "bits": 4}, write)
    with pytest.raises(FormatError, match="down_proj: quantization_config of config.json has no 'group_size'"):
        open_checkpoint(tmp_path / "config")
    for kept, lost in (("codes4", "steps"), ("steps", "codes4")):
        write_model(tmp_path / lost, CONFIG, writer_of(lambda tensors, kept=kept: {kept: tensors[kept]}))
        with pytest.raises(FormatError, match=f"down_proj: there is no {lost} beside its {kept}"):
            open_checkpoint(tmp_path / lost)


def test_a_dense_weight_beside_a_quantized_one_is_refused(tmp_path: Path) -> None:
    """No one can know which of both is meant, and loading would leave the dense one out."""
    write_model(tmp_path, CONFIG, writer_of(lambda tensors: tensors | {"weight": torch.zeros(2, 2)}))
    with pytest.raises(FormatError, match="down_proj: it has a dense weight beside its quantized one, wanted one of"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("to", "leaf"), [("w4gemm", "zeros"), ("compressed-tensors", "weight_shape")])
def test_a_tensor_that_would_be_taken_for_a_modules_is_not_written(
    to: str, leaf: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The packing does not know it, and in the written folder its name would be one of the quantized weight's."""
    write_model(tmp_path / "in", CONFIG, writer_of(lambda tensors: tensors | {leaf: torch.zeros(2)}))
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", to]) != 0
    assert f"down_proj.{leaf} belongs to no packed module" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


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

    missing = {*METHODS} - samples.FORMATS.keys() - {"fp8"}  # the method of the sample deepseek-v4
    assert not missing, f"add a small folder of each of {missing} to tests/fuzz/samples.py: damaged, it must be refused"
