"""bench.gpu_steps: commands name what exists; what a failure, a limit or a missing package does to a step."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench import gpu_steps
from bench.gpu_steps import STEPS, Step

from sample import Shard, is_conformance

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_every_command_names_a_program_and_options_that_exist(step):
    python, *words = shlex.split(step.command)
    assert python == "python"
    script = next((word for word in words if word.endswith(".py")), "")
    module = words[1].replace(".", "/") if words[0] == "-m" else ""
    files = [ROOT / f"{folder}{module}{end}" for folder in ("", "tests/") for end in (".py", "/__main__.py")]
    program = next((file for file in [ROOT / script if script else ROOT, *files] if file.is_file()), None)
    if module == "pytest":
        program = ROOT / "tests/conftest.py"
    assert program is not None, step.command
    sources = [program, *ROOT.glob("bench/options.py"), *ROOT.glob("bench/engine/options.py"), ROOT / "bench/run.py"]
    text = "".join(source.read_text() for source in sources)
    options = [word for word in words if word.startswith("--") and word != "--nproc-per-node"]
    assert not [option for option in options if f'"{option}"' not in text], step.command


def step(program: str, seconds: int = 60, **others) -> Step:
    command = shlex.join(["python", "-c", f"import sys, time; rows = sys.argv[1]; {program}"]) + " {rows}"
    return Step("step", command, seconds, "rows.jsonl", **others)


def test_outcomes(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_steps, "GRACE_S", 0.5)
    assert gpu_steps.run(step("open(rows, 'w').write('row')"), tmp_path / "a", 60) == "passed"
    assert (tmp_path / "a/rows.jsonl").read_text() == "row" and (tmp_path / "a/log").exists()
    assert gpu_steps.run(step("sys.exit(3)"), tmp_path / "b", 60) == "failed with exit status 3"
    began = time.monotonic()
    assert gpu_steps.run(step("time.sleep(99)"), tmp_path / "c", 2) == "ran out of time"
    assert time.monotonic() - began < 60
    assert gpu_steps.run(step(""), tmp_path / "d", 0) == "no time left"


def test_what_is_left_out():
    gpus = ["NVIDIA H200"]
    assert gpu_steps.missing(step("", needs=("no_such_package",)), gpus) == "left out: no no_such_package"
    assert gpu_steps.missing(step("", gpus=2), gpus) == "left out: needs 2 GPUs"
    assert not gpu_steps.missing(step("", needs=("torch", "env")), gpus)


def test_steps_are_chosen_by_patterns():
    assert [step.name for step in gpu_steps.chosen(["sanit*", "load"])] == ["load", "sanitize"]
    with pytest.raises(SystemExit, match="expected names that --list prints, got fuz"):
        gpu_steps.chosen(["fuz"])


def test_shards_are_all_tests_each_once():
    """And each shard has the conformance suite last, with neighbours together."""
    items = [SimpleNamespace(path=Path("tests", "conformance" if i % 3 else "", "test_a.py"), i=i) for i in range(1000)]
    shards = [Shard.parse(f"{i}/7").of(items) for i in range(1, 8)]
    assert sorted(item.i for shard in shards for item in shard) == list(range(1000))
    assert max(map(len, shards)) - min(map(len, shards)) <= 17
    for shard in shards:
        suite = [is_conformance(item) for item in shard]
        assert suite == sorted(suite) and 47 <= suite.index(True) <= 48
        first = [item.i for item in shard if is_conformance(item)][:16]
        assert first == [i for i in range(first[0], first[-1] + 1) if i % 3]
    for text in ("0/7", "8/7", "7", "a/b"):
        with pytest.raises(Exception, match=f"wanted I/N with I from 1 to N, like 1/12, got '{text}'"):
            Shard.parse(text)
