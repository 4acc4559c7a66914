"""Whole folders of many architectures (whole_folders.py): a case or more of each, and that wrong results are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers import AutoConfig

import whole_folders
from w4gemm.integrations.transformers import load
from whole_folders import MODELS, Case, Wrong, run


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("architecture", MODELS)
def test_right_logits_or_a_clear_refusal(architecture: str, number: int, scratch: Path) -> None:
    try:
        AutoConfig.for_model(architecture.split()[0])
    except ValueError:
        pytest.skip(f"this transformers has no {architecture}")
    run(Case(architecture, number), scratch)


def scaled(folder: Path) -> Any:
    model, tokenizer = load(folder)
    model.model.norm.weight.data *= 1.1
    return model, tokenizer


def raising(error: Exception) -> Any:
    def load(folder: Path) -> Any:
        raise error

    return load


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (scaled, "logits are off by 0.1"),
        (raising(KeyError("q_proj")), "KeyError"),
        (raising(ValueError("no")), "a message that names nothing: no"),
        (raising(ValueError("no q_proj")), "refused as it is: no q_proj"),
    ],
)
def test_a_wrong_outcome_is_found(way: Any, message: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_folders, "CHANGES", ())
    monkeypatch.setattr(whole_folders, "load", way)
    with pytest.raises(Wrong, match=f"llama 0 .*: load: {message}"):
        run(Case("llama", 0), scratch)
