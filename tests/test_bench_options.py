"""The commands of bench/: help that explains them, and errors that name the option and what it takes."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

COMMANDS = sorted(
    f"bench.{path.stem}" for path in (ROOT / "bench").glob("*.py") if '__name__ == "__main__"' in path.read_text()
)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_the_command_and_every_option(name, capsys):
    module = importlib.import_module(name)
    with pytest.raises(SystemExit) as end:
        module.main(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and f"usage: python -m {name} " in text
    assert " ".join(module.__doc__.split()[:6]) in " ".join(text.split())
    for option in re.findall(r"^  (--\S+.*(?:\n   .*)*)", text, re.MULTILINE):
        words = re.sub(r"^--\S+( [A-Z]+| \{[^}]*\})?|\(default:.*", "", " ".join(option.split())).split()
        assert words, f"no word says what this is: {option}"


@pytest.mark.parametrize(
    ("command", "options", "error"),
    [
        ("run", ["--shapes", "layer"], "argument --shapes: wanted layers, .* or sizes like 8192x4096.*, got 'layer'"),
        ("run", ["--m", "1,two"], "argument --m: wanted numbers like 1,16,256, or all, or awkward, got '1,two'"),
        ("run", ["--impl", "machette"], "argument --impl: wanted all or some of w4gemm, .*, got machette"),
        ("run", ["--format", "int5"], "argument --format: .*int5"),
        ("run", ["--dtype", "float8"], "argument --dtype: wanted some of float32, .*, got float8"),
        ("grouped", ["--shapes", "28672x4096"], "argument --shapes: wanted moe, .*, got '28672x4096'"),
        ("grouped", ["--tokens", "0"], "argument --tokens: wanted integers from 1 on like 1,16,256, got '0'"),
        ("generation", ["--ways", "fast"], "argument --ways: wanted some of eager, .*, got fast"),
        ("generation", ["--weights", "int5"], "argument --weights: .*int5"),
        ("unknown", ["--kinds", "w4a4"], "argument --kinds: wanted some of w4a16, .*, got w4a4"),
        ("engine.__main__", ["--expert-parallel"], "--expert-parallel: wanted --gpus 2 or more beside it, got 1"),
        ("engine.__main__", ["--rebalance", "50"], "--rebalance: wanted --expert-parallel beside it, got 50"),
        ("tune", ["--shapes", "8192x8192"], "argument --shapes: wanted some of layers, .*, got 8192x8192"),
    ],
)
def test_an_option_that_is_off_is_named_with_what_is_wanted(command, options, error, capsys):
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"bench.{command}").main(options)
    said = " ".join(capsys.readouterr().err.split())
    assert end.value.code == 2 and re.search(error, said), said
