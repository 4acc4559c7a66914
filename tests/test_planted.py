"""The list of planted faults fits the sources; tests/planted.py runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import planted as script
from planted import COPIED, ROOT, Outcome, command, planted, reason
from planted_faults import FAULTS


def test_every_fault_can_be_planted() -> None:
    for fault in FAULTS:
        count = (ROOT / fault.file).read_text().count(fault.old)
        assert count == 1, f"{fault.name}: {fault.old!r} occurs {count} times in {fault.file}"
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
    assert command("fuzz --like kind=masked", gpu=True)[-4:] == ["--device", "cuda", "--like", "kind=masked"]


@pytest.mark.parametrize(
    ("options", "without", "word"),
    [
        ((), Outcome(True, "", 1), "caught"),
        ((), Outcome(None, "did not end in 9 s", 9), "UNDECIDED"),
        (("--no-whole",), Outcome(True, "", 1), "UNDECIDED"),
    ],
)
def test_past_its_time_is_no_catch_unless_it_ends_without_the_fault(options, without, word, monkeypatch, capsys):
    late = Outcome(None, "did not end in 9 s", 9)
    monkeypatch.setattr(script, "run", lambda by, gpu, fault, seconds: without if fault is None else late)
    monkeypatch.setattr(sys, "argv", ["planted.py", "--only", FAULTS[0].name, *options])
    assert script.main() == (0 if word == "caught" else 1)
    assert f"{word:10}    9 s  {FAULTS[0].name}" in capsys.readouterr().out
