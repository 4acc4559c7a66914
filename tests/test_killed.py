"""Writers that are killed at random moments: a slice of tests/killed.py, and that it finds what is lost."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import killed
from w4gemm.choice import table
from w4gemm.choice.table import Record
from w4gemm.jit import disk

KILLS = 40

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks and pipes")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("kind", [killed.records, killed.objects])
def test_a_slice(kind, folder: Path, new_seed: int) -> None:
    assert kind(KILLS // 2, new_seed) > 0, "nothing was written"


def test_records_that_are_written_anew_are_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of a writer that is killed is empty or holds its own records alone."""

    def over(path: Path, records: list[Record]) -> None:
        path.write_text("".join(record.line() for record in records))

    monkeypatch.setattr(table, "append", over)
    with pytest.raises(killed.Lost, match="records are lost"):
        killed.records(5, 0)


def test_objects_that_are_written_in_place_are_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_place(name: str, code: bytes) -> None:
        with open(folder / name, "wb", buffering=0) as f:
            for start in range(0, len(code), 1000):
                os.write(f.fileno(), code[start : start + 1000])

    monkeypatch.setattr(disk, "write", in_place)
    monkeypatch.setattr(disk, "read", lambda name: (folder / name).read_bytes() or None)
    with pytest.raises(killed.Lost, match="damaged|lost|came back"):
        killed.objects(KILLS, 0)
