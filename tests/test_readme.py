"""Python blocks of the documents run: those of README.md and getting-started.md each alone, others in their order."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import w4gemm
from w4gemm.cli.__main__ import main

ROOT = Path(__file__).resolve().parent.parent


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize(
    "page, block", [(page, block) for page in ("README.md", "docs/getting-started.md") for block in blocks_of(page)]
)
def test_each_block_runs_alone(page: str, block: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A comment behind print(...) is what a CPU prints."""
    pytest.importorskip("transformers")
    exec(compile(block, page, "exec"), {})
    shown = [line.split("  # ")[1].split(":")[0] for line in block.splitlines() if line.startswith("print(")]
    assert capsys.readouterr().out.splitlines() == shown


def test_the_readme_is_short_and_its_caption_is_that_of_the_stored_rows() -> None:
    """A screen and a half: with 580 words in 70 lines GitHub shows it 1,570 pixels high."""
    sys.path.insert(0, str(ROOT))
    from bench import report

    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 620 and len(text.splitlines()) <= 72, "move words to the page where they belong"
    assert report.with_caption(text) == text and "Measured from 20" in text, "run python -m bench.report"


def test_the_blocks_of_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/formats.md").read_text(), re.DOTALL):
        exec(compile(block, "formats.md", "exec"), names)
    assert not [*tmp_path.iterdir()], "a reader's folder stays as it was"
    assert names["top"].n == 128 and names["left"].k == 256 and names["d"].shape == (3, 256)
    assert torch.equal(names["same"].perm, names["g_idx"].argsort(stable=True).int())


def test_the_blocks_of_engines() -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/engines.md").read_text(), re.DOTALL):
        exec(compile(block, "engines.md", "exec"), names)
    assert names["y"].shape == (5, 256) and names["d"].shape == (4, 8, 128)
    assert torch.equal(names["out"], torch.from_numpy(names["out2"]))


def test_the_blocks_of_coming_from() -> None:
    """Their own assertions hold each conversion to the other library's formula."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/coming-from.md").read_text(), re.DOTALL):
        exec(compile(block, "coming-from.md", "exec"), names)
    assert names["out"].shape == names["d"].shape == names["y"].shape == (5, 256)
    assert 0.01 < names["error"] < 0.05


def test_the_explain_session(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/commands.md's session that needs no GPU shows the kernels, the columns and legal configs of today."""
    pytest.importorskip("cutlass")
    match = re.search(r"```console\n\$ w4gemm (explain .*)\n([^`]*)```", (ROOT / "docs/commands.md").read_text())
    assert match is not None
    assert main(match[1].split()) == 0
    printed, shown = capsys.readouterr().out, match[2]
    assert printed.splitlines()[:2] == shown.splitlines()[:2]
    kernels = r"^  (\w+): (?:\d+ config|needs|runs)"
    assert re.findall(kernels, shown, re.MULTILINE) == re.findall(kernels, printed, re.MULTILINE)
    assert (
        re.findall(r"^ # .*", shown, re.MULTILINE)[0].split() == re.findall(r"^ # .*", printed, re.MULTILINE)[0].split()
    )
    rows = [re.findall(r"(\w+/\w+)", line) for text in (shown, printed) for line in text.splitlines()[-6:]]
    problem = w4gemm.GemmProblem(512, 1024, 1024, torch.bfloat16, w4gemm.WeightFormat(), "mma16")
    assert {config for row in rows for config in row} <= set(w4gemm.configs(problem)) and all(rows)
