"""The list of planted faults fits the sources; tests/planted.py runs it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

import planted as script
from planted import COPIED, ROOT, Outcome, command, planted, reason
from planted_faults import FAULTS


def test_every_fault_can_be_planted() -> None:
    counts = {fault: (ROOT / fault.file).read_text().count(fault.old) for fault in FAULTS}
    assert not [f"{f.name}: {f.old!r} occurs {n} times in {f.file}" for f, n in counts.items() if n != 1]
    for fault in FAULTS:
        assert fault.new != fault.old and fault.file.partition("/")[0] in COPIED
        for word in fault.by.split() if not fault.by.startswith("fuzz") else ():
            assert not word.startswith("tests/") or (ROOT / word).exists(), word
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_it_is_planted_in_the_copy(tmp_path: Path) -> None:
    fault = FAULTS[0]
    copy = tmp_path / fault.file
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / fault.file).read_text())
    planted(fault, tmp_path)
    assert fault.new in copy.read_text() and fault.new not in (ROOT / fault.file).read_text()


def test_what_failed_is_found_in_an_output() -> None:
    assert reason("..F\nFAILED tests/test_x.py::test_y - assert 1 == 2\n1 failed").startswith("FAILED tests/test_x.py")
    assert reason("seed 7\n70003:12:99: 3 of 40 are off\n  Case(...)") == "70003:12:99: 3 of 40 are off"
    assert reason("12 passed") == ""
    assert command("fuzz --like kind=masked")[-4:] == ["--device", "cpu", "--like", "kind=masked"]


LATE = Outcome(None, "did not end in 9 s", 9)
PASSES, FAILS = Outcome(True, "", 9), Outcome(False, "FAILED", 9)


@pytest.mark.parametrize(
    ("without", "actual", "word", "status"),
    [
        (PASSES, FAILS, "caught", 0),
        (PASSES, PASSES, "NOT CAUGHT", 1),
        (PASSES, LATE, "LATE", 1),
        (LATE, FAILS, "caught", 1),
        (LATE, LATE, "LATE", 1),
    ],
)
def test_a_command_past_its_time_has_caught_nothing(without, actual, word, status, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(script, "run", lambda by, fault, seconds: without if fault is None else actual)
    monkeypatch.setattr(sys, "argv", ["planted.py", "--only", FAULTS[0].name, "--json", str(tmp_path / "rows")])
    assert script.main() == status
    said = capsys.readouterr().out
    assert f"{word:10}    9 s  {FAULTS[0].name}" in said and ("late without a fault" in said) == (without is LATE)
    counts = [int(word == other) for other in ("caught", "NOT CAUGHT", "LATE")]
    assert "1 faults: {} caught, {} not caught, {} late".format(*counts) in said
    assert json.loads((tmp_path / "rows").read_text())["caught"] == {"caught": True, "NOT CAUGHT": False}.get(word)


def test_a_command_is_ended_at_its_time_with_what_it_started(monkeypatch) -> None:
    child = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '99'])"]
    monkeypatch.setattr(script, "command", lambda by: child)
    monkeypatch.setattr(script, "COPIED", ("pyproject.toml",))
    began = time.monotonic()
    assert script.run("tests", None, 0.5).passed is None
    assert time.monotonic() - began < 90, "it is waited for until nothing writes to its output"
