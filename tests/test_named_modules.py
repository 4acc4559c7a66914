"""Modules that a quantization_config names and its folder does not have are told once, with the nearest name."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import test_awq
import test_compressed_tensors
import test_gptq
import test_modelopt
from quantized_model import configure, write_model
from w4gemm import FormatError
from w4gemm.checkpoints import open_checkpoint
from w4gemm.checkpoints.w4gemm import OwnWriter
from w4gemm.checkpoints.writing import write_folder
from w4gemm.cli.__main__ import main

DOWN = "model.layers.1.mlp.down_proj"
TYPO = "model.layers.1.mlp.down_prj"
GROUP = test_compressed_tensors.config()["config_groups"]["group_0"]
MAKERS: dict[str, Any] = {
    "gptq": (test_gptq.CONFIG, test_gptq.writer(-1)),
    "awq": (test_awq.CONFIG, test_awq.writer()),
    "compressed-tensors": (test_compressed_tensors.config(), test_compressed_tensors.writer()),
    "modelopt": (test_modelopt.INT4, test_modelopt.int4()),
}


def groups(*targets: str, bits: int = 4) -> dict[str, Any]:
    """config_groups: all linear layers, and these targets with settings of their own."""
    own = GROUP | {"targets": list(targets), "weights": test_compressed_tensors.WEIGHTS | {"num_bits": bits}}
    return {"group_0": GROUP, "group_1": own}


def opened(folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        open_checkpoint(folder)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("method", "settings", "argument", "named"),
    [
        ("compressed-tensors", {"config_groups": groups(TYPO)}, "config_groups.group_1.targets", TYPO),
        (
            "compressed-tensors",
            {"config_groups": groups(r"re:.*down_prj$")},
            "config_groups.group_1.targets",
            "re:.*down_prj$",
        ),
        ("gptq", {"dynamic": {r"+:.*\.down_prj$": {"group_size": 64}}}, "dynamic", r"+:.*\.down_prj$"),
        (
            "gptq",
            {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_prj"]]},
            "modules_in_block_to_quantize",
            "mlp.down_prj",
        ),
        ("gptq", {"extra_config": {TYPO: {"group_size": 64}}}, "extra_config", TYPO),
        ("awq", {"extra_config": {".*down_prj": {"group_size": 64}}}, "extra_config", ".*down_prj"),
        ("modelopt", {"quantized_layers": {TYPO: {"quant_algo": "W4A16_AWQ"}}}, "quantized_layers", TYPO),
    ],
)
def test_a_setting_that_holds_for_no_module_is_told(
    tmp_path: Path, method: str, settings: dict[str, Any], argument: str, named: str
) -> None:
    write_model(tmp_path, *MAKERS[method])
    configure(tmp_path, **settings)
    (message,) = opened(tmp_path)
    assert message.startswith(f"{tmp_path}: {argument} of its quantization_config names {named!r}, but no such module")
    assert "the nearest of its 14 packed modules is 'model.layers." in message and "down_proj'" in message


def test_how_many_more(tmp_path: Path) -> None:
    write_model(tmp_path, *MAKERS["compressed-tensors"])
    configure(tmp_path, config_groups=groups(TYPO, "re:.*vision.*", "Linear", DOWN))
    (message,) = opened(tmp_path)
    assert f"names {TYPO!r} and 1 more, but" in message


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("compressed-tensors", {"ignore": ["lm_head", "re:.*vision.*", "model.layers.9.mlp.gate"]}),
        ("compressed-tensors", {"config_groups": groups("re:.*vision.*", bits=8)}),
        ("compressed-tensors", {"config_groups": groups("re:.*down_proj", DOWN, "Linear", "Qwen3MoeExperts")}),
        ("gptq", {"dynamic": {"-:.*vision.*": {}, "+:.*vision.*": {"bits": 8}, r"+:.*\.down_proj": {}}}),
        ("gptq", {"modules_in_block_to_quantize": ["self_attn.q_proj", "mlp.down_proj"]}),
        ("gptq", {"extra_config": {"lm_head": {"bits": 16}, "model.layers.1": {}, ".*q_proj.*": {}}}),
        ("awq", {"modules_to_not_convert": ["visual"]}),
        ("modelopt", {"quantized_layers": {"model.vision": {"quant_algo": "FP8"}}, "exclude_modules": ["vision*"]}),
    ],
)
def test_names_that_are_normal(tmp_path: Path, method: str, settings: dict[str, Any]) -> None:
    write_model(tmp_path, *MAKERS[method])
    configure(tmp_path, **settings)
    assert opened(tmp_path) == []


def test_our_own_folder(tmp_path: Path) -> None:
    write_model(tmp_path / "gptq", *MAKERS["gptq"])
    write_folder(open_checkpoint(tmp_path / "gptq"), tmp_path / "own", OwnWriter(), dtype=torch.float32)
    assert opened(tmp_path / "own") == []
    configure(tmp_path / "own", modules={TYPO: "int4_g64_fp16"})
    (message,) = opened(tmp_path / "own")
    assert f"modules of its quantization_config names {TYPO!r}" in message


@pytest.mark.parametrize("method", MAKERS)
def test_a_folder_without_4_bit_modules(tmp_path: Path, method: str) -> None:
    write_model(tmp_path, *MAKERS[method], dense=("",))
    with pytest.raises(FormatError, match="all its weights are dense, wanted some of them quantized, with .*a dense"):
        open_checkpoint(tmp_path)


def test_the_command_tells_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, *MAKERS["gptq"])
    configure(tmp_path, extra_config={TYPO: {"group_size": 64}})

    def show(message: Warning | str, *where: Any) -> None:  # as Python's own, which pytest replaces
        sys.stderr.write(warnings.formatwarning(message, *where[:3]))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        before = warnings.formatwarning
        warnings.showwarning = show
        assert main(["inspect", str(tmp_path)]) == 0
    assert warnings.formatwarning is before
    told = f"w4gemm: warning: {tmp_path}: extra_config of its quantization_config names {TYPO!r}"
    assert any(line.startswith(told) for line in capsys.readouterr().err.splitlines())
