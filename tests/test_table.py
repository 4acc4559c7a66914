"""Tuned configs on disk and their place in the choice: whole lines or none, the user's before the shipped, never an
illegal one."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from w4gemm import choice
from w4gemm.choice import table
from w4gemm.choice.cost import constants
from w4gemm.choice.model import interval_of, ranked
from w4gemm.choice.table import Record, device_facts, effective, key_of, parse_lines
from w4gemm.cli.__main__ import main
from w4gemm.core import trust
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import H200, Device, GemmProblem
from w4gemm.kernels import KERNELS, kernel_named
from w4gemm.packing.layouts import RENAMED

PROBLEM = GemmProblem(64, 6144, 4096, torch.bfloat16, WeightFormat(), "mma16", device=H200)
MISLEADS = 0.9
"""A record misleads if another config is predicted to take less than this part of its config's predicted time, and of
its own."""


@pytest.fixture(autouse=True)
def folder(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user's table and no shipped one."""
    monkeypatch.setattr(table, "_TABLES", cache_folder / "tables")
    return cache_folder


def record(problem: GemmProblem = PROBLEM, nth: int = 7, **changes) -> Record:
    """One that names the nth guess."""
    _, kernel, config, _ = choice.explain(problem).candidates[nth]
    made = Record(
        key_of(problem),
        choice.interval_of(problem.m),
        kernel,
        str(config),
        9.5,
        kernel_named(kernel).revision,
        "2026-11-21",
    )
    return replace(made, **changes)


def chosen(problem: GemmProblem = PROBLEM) -> tuple[str, str]:
    stored = choice.explain(problem)
    return "/".join(map(str, stored.chosen)), stored.source


def test_a_line_is_a_record():
    for made in (record(), record(m=(8193, None)), record(replace(PROBLEM, batch_invariant=True), nth=0)):
        assert Record.parse(made.line()) == made
    fields = set(json.loads(record().line()))
    assert {"device", "sms", "format", "dtype", "n", "k", "m", "kernel", "config", "us", "revision", "date"} <= fields


def test_a_line_with_a_former_layout_name_is_read():
    for former, name in RENAMED.items():
        made = record()
        made = replace(made, key=made.key._replace(layout=name))
        assert Record.parse(made.line().replace(f'"{name}"', f'"{former}"')) == made


def test_user_over_shipped_over_heuristic():
    first = choice.configs(PROBLEM)[0]
    assert chosen() == (first, "heuristic")
    shipped, tuned, later = record(nth=3), record(nth=5), record(nth=6)
    table.append(table.shipped_path(H200.name), [shipped])
    assert chosen() == (shipped.choice, "shipped")
    table.add([tuned])
    assert chosen() == (tuned.choice, "tuned")
    table.add([later])
    assert chosen() == (later.choice, "tuned"), "a later line replaces an earlier one"
    assert choice.explain(PROBLEM, first).source == "forced"
    assert table.clear() == 2
    assert chosen() == (shipped.choice, "shipped")


OTHERS = {
    "another GPU": replace(PROBLEM, device=replace(H200, name="NVIDIA H100 80GB HBM3")),
    "fewer multiprocessors": replace(PROBLEM, device=replace(H200, sms=114)),
    "n": replace(PROBLEM, n=6145),
    "k": replace(PROBLEM, k=4097),
    "m": replace(PROBLEM, m=65),
    "dtype": replace(PROBLEM, dtype=torch.float16),
    "format": replace(PROBLEM, format=WeightFormat(64)),
    "batch invariance": replace(PROBLEM, batch_invariant=True),
    "float32 output": replace(PROBLEM, epilogue=Epilogue(out_dtype=torch.float32)),
    "a residual": replace(PROBLEM, epilogue=Epilogue(residual=True)),
    "gates": replace(PROBLEM, epilogue=Epilogue("silu_mul")),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_a_record_does_not_hold_for(other):
    table.add([record()])
    assert chosen(other)[1] == "heuristic"


@pytest.mark.parametrize("m", [57, 60, 64])
def test_what_a_record_holds_for(m):
    made = record()
    table.add([made])
    same = (PROBLEM, replace(PROBLEM, epilogue=Epilogue("gelu", alpha="host", bias=True)))
    for problem in same:
        assert chosen(replace(problem, m=m)) == (made.choice, "tuned")


def test_a_record_of_a_longer_interval_holds_where_that_ended():
    """Tables outlive the bounds of intervals; what was measured for 64 tokens is nothing for 40."""
    made = record(m=(33, 64))
    table.add([made])
    assert [chosen(replace(PROBLEM, m=m))[1] for m in (33, 56, 57, 64)] == ["heuristic"] * 2 + ["tuned"] * 2


def test_the_last_interval_has_no_end():
    at = replace(PROBLEM, m=choice.interval_end(10**6))
    made = record(at)
    table.add([made])
    assert chosen(at)[1] == "tuned"
    stored = [choice.measured_record(replace(at, m=m)) for m in (8192, 8193, 10**7)]
    assert stored == [None, ("tuned", made), ("tuned", made)]


@pytest.mark.parametrize(
    "change",
    [{"config": "8x64x64_1x1x1_coop"}, {"revision": 0}, {"kernel": "sm70_mixed_gemm"}],
    ids=["a config that is no longer legal", "older device code", "a kernel that is gone"],
)
def test_what_cannot_be_used_is_passed_over(change):
    table.add([record(nth=4), record(**change)])
    assert chosen() == (record(nth=4).choice, "tuned"), "the one before still counts"


def test_batch_invariance_is_kept():
    """Not even a record that was made for it may bring another order of additions."""
    invariant = replace(PROBLEM, batch_invariant=True)
    legal = choice.configs(invariant)
    outside = next(c for c in choice.configs(PROBLEM) if c not in legal)
    kernel, _, config = outside.rpartition("/")
    table.add([record(invariant, nth=1), record(invariant, nth=0, kernel=kernel, config=config)])
    assert chosen(invariant) == (legal[1], "tuned")


def test_unreadable_lines_are_skipped_with_one_warning(folder, caplog):
    good = record()
    folder.mkdir()
    lines = ["not json", good.line().strip()[:-20], '{"n": 1}', good.line().strip(), "[]", "\0\xff"]
    (folder / table.USER_FILE).write_bytes("\n".join(lines).encode("latin-1"))
    with caplog.at_level(logging.WARNING, "w4gemm"):
        assert chosen() == (good.choice, "tuned")
        chosen()
    assert caplog.text.count("skipped 5 unreadable lines; line 1") == 1
    table.add([record(nth=2)])
    assert chosen() == (record(nth=2).choice, "tuned"), "a line that was cut short does not swallow the next"


@pytest.mark.parametrize(
    "bad",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        json.dumps({"config": "+".join(["64x64x64_1x1x1_coop"] * 1000)}),
        json.dumps({"us": 10**400}),
        json.dumps({"device": "\ud800"}),
        json.dumps({"date": "\x1b[2J"}),
        '{"n": ' + "9" * 5000 + "}",
    ],
    ids=["brackets", "braces", "tails", "long", "surrogate", "escape", "digits"],
)
def test_no_line_breaks_more_than_itself(folder, caplog, capsys, bad):
    """Neither a call, nor the commands that list, export and clear the table."""
    if bad.startswith('{"') and bad.endswith("}") and '"n"' not in bad:
        bad = json.dumps(json.loads(record().line()) | json.loads(bad))
    folder.mkdir(mode=0o700)
    (folder / table.USER_FILE).write_text(f"{bad}\n{record().line()}")
    (folder / table.USER_FILE).chmod(0o600)
    assert chosen() == (record().choice, "tuned")
    assert main(["cache", "list"]) == main(["cache", "export"]) == main(["info"]) == 0
    capsys.readouterr().out.encode()
    assert caplog.text.count("skipped 1 unreadable lines; line 1") == 1
    assert main(["cache", "clear", "--tuned"]) == 0 and not (folder / table.USER_FILE).exists()


@pytest.mark.parametrize(
    "error, logged",
    [
        (FileNotFoundError(2, "cleared"), ""),
        (OSError(24, "Too many open files"), "(Too many open files): going without"),
    ],
    ids=["cleared", "not readable"],
)
def test_a_table_that_cannot_be_opened_once_is_read_the_next_time(folder, caplog, monkeypatch, error, logged):
    """Once it counted as empty until it changed. That another process has cleared it since is no warning."""

    def refuse(path: str, flags: int) -> int:
        raise error

    table.add([record()])
    with monkeypatch.context() as patch:
        patch.setattr(trust, "opener", refuse)
        assert table.read(table.user_path()) == () and logged in caplog.text and bool(logged) == bool(caplog.records)
    assert table.read(table.user_path()) == (record(),)


def test_a_byte_order_mark_costs_no_record(folder, tmp_path, monkeypatch):
    """Editors of Windows put one at the begin of a file."""
    marked = tmp_path / "marked"
    marked.write_text(record().line(), encoding="utf-8-sig")
    assert main(["cache", "import", str(marked)]) == 0 and table.read(table.user_path()) == (record(),)
    table.user_path().write_bytes(marked.read_bytes())
    assert table.read(table.user_path()) == (record(),)


def in_processes_at_once(work: Callable[[int], None]) -> None:
    """Run work(0) to work(3) in processes of their own."""
    processes = [multiprocessing.get_context("fork").Process(target=work, args=(number,)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_many_processes_clear_at_once(folder):
    def work(number: int) -> None:
        for _ in range(40):
            table.add([record()])
            table.clear()

    in_processes_at_once(work)


@pytest.mark.parametrize(
    "change",
    [
        {"device": ["x"]},
        {"us": float("nan")},
        {"m": [1, 0]},
        {"m": None},
        {"m": [1]},
        {"m": [0, 1]},
        {"sms": "132"},
        {"sms": True},
        {"n": -1},
        {"batch_invariant": 0},
    ],
    ids=str,
)
def test_a_line_with_values_of_another_kind_is_none(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))}: wanted"):
        Record.parse(json.dumps(json.loads(record().line()) | change))


def test_a_table_that_cannot_be_written(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    for value in (str(tmp_path / "file" / "cache"), "off"):
        monkeypatch.setattr(table, "_session", [])
        monkeypatch.setenv("W4GEMM_CACHE_DIR", value)
        table.add([record()])
        assert chosen()[1] == "tuned", "this process knows it all the same"
    assert caplog.text.count("cannot keep tuned configs") == 1 and "Errno" not in caplog.text


def test_a_full_disk_is_said_once(folder, monkeypatch, caplog):
    monkeypatch.setattr(table, "_session", [])
    monkeypatch.setattr(table, "append", Mock(side_effect=OSError(28, "No space left on device")))  # of an open file
    assert not table.add([record()]) and not table.add([record(nth=8)])
    assert caplog.text.count("tuned.jsonl (No space left on device); set W4GEMM_CACHE_DIR") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_many_processes_append_whole_lines(folder):
    one = record()

    def work(number: int) -> None:
        for i in range(60):
            table.add([replace(one, us=number * 1000.0 + i)])

    in_processes_at_once(work)
    records, bad = parse_lines((folder / table.USER_FILE).read_text().splitlines())
    assert not bad and sorted(r.us for r in records) == sorted(i * 1000.0 + j for i in range(4) for j in range(60))
    assert len(effective(records)) == 1


def test_cpus_are_told_apart_by_model_and_threads():
    name, threads = device_facts(Device("cpu"))
    assert name and threads == torch.get_num_threads()


def test_the_shipped_tables_can_be_read(monkeypatch):
    monkeypatch.undo()
    for path in table.shipped_tables():
        records, bad = parse_lines(path.read_text().splitlines())
        assert records and not bad
        assert {table.shipped_path(r.key.device) for r in records} == {path}
        assert len(effective(records)) == len(records)


def problem_of(stored: Record) -> GemmProblem:
    """The problem at the last m of a shipped record."""
    dtype, sizes = getattr(torch, stored.key.dtype), (stored.m[1], stored.key.n, stored.key.k)
    epilogue = Epilogue(token_scale=dtype == torch.float8_e4m3fn)
    device = constants.measured()[stored.key.device]
    return GemmProblem(*sizes, dtype, WeightFormat.parse(stored.key.format), stored.key.layout, epilogue, device)


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("path", table.shipped_tables(), ids=lambda path: path.stem)
def test_no_shipped_record_is_older_than_an_interval_or_a_much_faster_config(path, first):
    """After new tiles: measure such records again, or take them out, and the model chooses."""
    for stored in table.read(path)[first::4]:
        assert stored.m == interval_of(stored.m[1]), f"measured at m {stored.m[1]} alone: {stored.line()}"
        ranking = {str(c): c.us for c in ranked(KERNELS, problem_of(stored))}
        best = min(ranking.values())
        assert best > MISLEADS * min(stored.us, ranking[stored.choice]), stored.line()


def test_compile_keeps_what_the_folder_has_of_other_layers(folder, monkeypatch):
    """-o may name the cache folder, or a folder that another model was compiled into."""
    from w4gemm.cli import compile as command

    problem = replace(PROBLEM, device=H200)
    other, mine = record(replace(problem, n=2 * problem.n)), record(problem)
    monkeypatch.setattr(command, "chosen", lambda expected, top: ({}, [mine]))
    monkeypatch.setattr(command, "fill", lambda folder, units, workers: 0)
    table.append(folder / table.USER_FILE, [other])
    for _ in range(2):
        assert main(["compile", "--shapes", f"{problem.n}x{problem.k}", "--m", "1", "-o", str(folder)]) == 0
        assert table.read(folder / table.USER_FILE) == (other, mine)
    assert (folder / table.USER_FILE).stat().st_mode & 0o777 == 0o644


def test_a_table_that_is_not_read_is_not_exported(folder, tmp_path, capsys):
    """A file of an earlier export stays as it is."""
    path, exported = folder / table.USER_FILE, tmp_path / "exported"
    table.append(path, [record()])
    assert main(["cache", "export", str(exported)]) == 0
    before = exported.read_text()
    path.chmod(0o666)
    assert before and main(["cache", "export", str(exported)]) == 1
    assert exported.read_text() == before and "has mode 0666" in capsys.readouterr().err


def test_versions_that_share_a_table_leave_each_others_records(folder, tmp_path, capsys):
    """Each uses its own; a list shows both, and an export and its import lose none."""
    mine, again = record(nth=3), record(nth=4)
    newer = replace(record(nth=5), revision=mine.revision + 1)
    table.add([mine, newer, again, replace(newer, us=8.0)])
    assert chosen() == (again.choice, "tuned")
    assert effective(table.read(table.user_path())) == [again, replace(newer, us=8.0)]
    assert main(["cache", "list"]) == 0 and capsys.readouterr().out.count("(stale)") == 1
    exported = tmp_path / "exported"
    assert main(["cache", "export", str(exported)]) == main(["cache", "clear", "--tuned"]) == 0
    for _ in range(2):
        assert main(["cache", "import", str(exported)]) == 0
        assert table.read(table.user_path()) == (again, replace(newer, us=8.0))
    assert chosen() == (again.choice, "tuned")


def test_an_export_that_does_not_fit_on_the_disk_leaves_the_file_as_it_was(folder, tmp_path, capsys):
    exported = tmp_path / "exported"
    exported.write_text("of an earlier export")
    table.append(folder / table.USER_FILE, [replace(record(), us=float(i)) for i in range(20)])
    table.append(folder / table.USER_FILE, [record(replace(PROBLEM, n=64 * i)) for i in range(1, 10)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # of one file, as a disk with that much left
    try:
        assert main(["cache", "export", str(exported)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err == f"w4gemm: error: {exported}: File too large\n"
    assert exported.read_text() == "of an earlier export" and set(tmp_path.iterdir()) == {folder, exported}
    assert main(["cache", "export", str(exported)]) == 0 and len(table.read(exported)) == 10


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has it")
def test_an_export_to_what_is_full_names_it(folder, capsys):
    table.append(folder / table.USER_FILE, [record()])
    assert main(["cache", "export", "/dev/full"]) == 1
    assert capsys.readouterr().err == "w4gemm: error: /dev/full: No space left on device\n"


def test_an_export_follows_links_and_names_its_file(tmp_path, capsys):
    (tmp_path / "link").symlink_to("file")
    for _ in range(2):
        assert main(["cache", "export", str(tmp_path / "link")]) == 0
        assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == ""
    assert main(["cache", "export", str(tmp_path / "none/file")]) == 1
    assert f"w4gemm: error: {tmp_path}/none/file: No such file or directory\n" in capsys.readouterr().err
