"""Engines in a process each (bench.engine.apart). Nothing here imports PyTorch, which each process would do again."""

from __future__ import annotations

import os

from bench.engine.apart import Started, rows_apart


def start(name: str) -> Started:
    """Start an engine that has two times, or that fails as its name says."""
    if name == "start fails":
        raise ValueError("no kernel")

    def times():
        yield {"impl": name, "phase": "decode", "us": 1}
        if name == "times fail":
            raise RuntimeError("out of memory")
        yield {"impl": name, "phase": "decode", "us": 2}

    return Started({"impl": name, "phase": "start", "process": os.getpid()}, [name], times())


def test_engines_that_start_together_are_timed_by_turns():
    """Also beside engines that fail, which have a row each and cost no other engine's rows."""
    names = ("ours", "start fails", "times fail", "last")
    rows = list(rows_apart(start, names, 3))
    assert len({row["process"] for _, row, answers in rows if answers}) == 3, "a process each"
    assert [(row["impl"], row["phase"], row.get("us"), answers) for _, row, answers in rows] == [
        ("ours", "start", None, ["ours"]),
        ("start fails", "failed", None, None),
        ("times fail", "start", None, ["times fail"]),
        *((name, "decode", 1, None) for name in ("ours", "times fail")),
        ("ours", "decode", 2, None),
        ("times fail", "failed", None, None),
        ("last", "start", None, ["last"]),
        *(("last", "decode", us, None) for us in (1, 2)),
    ]
    assert [name for name, row, _ in rows if row["phase"] == "failed"] == ["start fails", "times fail"]
    reasons = [row["reason"] for _, row, _ in rows if row["phase"] == "failed"]
    assert reasons == ["ValueError: no kernel", "RuntimeError: out of memory"]
