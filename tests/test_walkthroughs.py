"""The notebook and the serving walkthrough run, on tiny models."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from tiny_model import write_dense, write_gguf
from w4gemm.checkpoints import find_checkpoint
from w4gemm.cli.__main__ import main
from w4gemm.integrations import generation

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_notebook(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(folder / "tiny.gguf")
    monkeypatch.setattr(generation, "default_model", lambda: path)
    pyplot = MagicMock()
    pyplot.subplots.return_value = (MagicMock(), MagicMock())
    monkeypatch.setitem(sys.modules, "matplotlib", MagicMock(pyplot=pyplot))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    notebook = json.loads((DOCS / "tour.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "tour.ipynb", "exec"), names)
    out = capsys.readouterr().out
    assert "of 15 linear layers" in out and "chosen: cpu_mixed_gemm/" in out and " ms after" in out
    assert [row["format"] for row in names["rows"]][:3] == ["dense", "int8_g64", "int4_g32"]
    bars = names["axes"].bar.call_args.args
    assert len(bars[0]) == len(bars[1]) == 6 and pyplot.show.called


def test_the_serving_walkthrough(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command of w4gemm, in its order, but what compiles or needs a GPU."""
    pytest.importorskip("cutlass")
    write_dense(folder / "MODEL", "llama")
    units: list[str] = []
    monkeypatch.setattr("w4gemm.cli.compile.fill", lambda folder, needed, workers: units.extend(needed) or 0)
    commands = re.findall(r"^\$ (?:\w+=\w+ )*w4gemm (.*)$", (DOCS / "serving.md").read_text(), re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["inspect", "eval", "convert", "compile", "tune"]
    for command in commands[:-1]:
        command = command.replace("int4_g128", "int4_g32").replace("--tokens 2048", "--tokens 64")
        fewer = ("--m", "1") if command.startswith("compile") else ()
        assert main([*shlex.split(command), *fewer]) == 0, capsys.readouterr().err
    assert find_checkpoint(folder / "served").format.name == "compressed-tensors" and units
