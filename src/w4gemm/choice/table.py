"""The tables of measured configs: :class:`Record`, one choice as a line of JSON, and the files that keep them.

There are two tables: the user's, ``tuned.jsonl`` in the cache folder, and the shipped one, ``tables/<device>.jsonl`` in
this package. The user's goes before the shipped one and, in a table, later lines go before earlier ones. A line is
appended in one write under a lock, so that many processes can tune at once and an interrupted one loses nothing. A line
that cannot be read is skipped with a warning. :mod:`w4gemm.choice.plan` decides whether a record may still be used.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from w4gemm.core import environment, trust
from w4gemm.core.config import GemmConfig
from w4gemm.core.files import linux_says, placed, system_reason
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.packing.layouts import RENAMED

_log = logging.getLogger("w4gemm")
_TABLES = Path(__file__).resolve().parent / "tables"
USER_FILE = "tuned.jsonl"
"""Name of the user's table in the cache folder."""


class Key(NamedTuple):
    """The problems that a measured choice holds for, apart from its interval of m."""

    device: str
    """Exact name of the GPU, or model of the CPU."""
    sms: int
    """Number of multiprocessors; on a CPU, of PyTorch's threads."""
    format: str
    dtype: str
    """dtype of x."""
    layout: str
    n: int
    k: int
    epilogue: str
    """The part of the epilogue that changes the time, see :func:`epilogue_kind`."""
    batch_invariant: bool


@dataclass(frozen=True)
class Record:
    """One tuning result: the config that the tuner kept for an interval of m."""

    key: Key
    m: tuple[int, int | None]
    """First and last m of the interval; the last is None if it has no end."""
    kernel: str
    config: str
    us: float
    """Median microseconds per call at the interval's last m."""
    revision: int
    """Revision of the kernel that was measured, see :class:`w4gemm.kernels.base.Kernel`."""
    date: str
    """Day of the measurement, such as 2026-11-23."""

    @property
    def choice(self) -> str:
        """The config with its kernel, ``"<kernel>/<config>"``."""
        return f"{self.kernel}/{self.config}"

    @property
    def place(self) -> tuple[Key, tuple[int, int | None], int]:
        """A later record with an equal place replaces this one. Versions of w4gemm with other revisions of the kernels
        may share a table, and leave each other's records."""
        return self.key, self.m, self.revision

    def holds_for(self, m: int) -> bool:
        """True if m is in the record's interval."""
        first, last = self.m
        return first <= m and (last is None or m <= last)

    def line(self) -> str:
        """Return the record as a line of JSON."""
        rest = {name: getattr(self, name) for name in _VALUES}
        return json.dumps({**self.key._asdict(), **rest}) + "\n"

    @classmethod
    def parse(cls, line: str) -> Record:
        """Inverse of :meth:`line`.

        Raises:
            ValueError: if the line is not a record.
        """
        row = json.loads(line)
        fields = (*Key._fields, *_VALUES)
        if not isinstance(row, dict) or set(row) != set(fields):
            raise ValueError(f"wanted an object with {', '.join(fields)}")
        for name, (kind, fits) in _FITS.items():
            if not fits(row[name]):
                raise ValueError(f"{name}: wanted {kind}, got {row[name]!r:.80}")
        first, last = row["m"]
        GemmConfig.parse(row["config"])
        row["layout"] = RENAMED.get(row["layout"], row["layout"])
        key = Key(*(row.pop(name) for name in Key._fields))
        return cls(key, (first, last), *(row[name] for name in _VALUES[1:]))


_VALUES = ("m", "kernel", "config", "us", "revision", "date")


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_interval(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not _is_count(value[0]):
        return False
    return value[1] is None or _is_count(value[1], value[0])


_LONGEST_US = 1e12


_FITS: dict[str, tuple[str, Callable[[object], bool]]] = {
    **dict.fromkeys(
        ("device", "format", "dtype", "layout", "epilogue", "kernel", "config", "date"),
        ("a string that can be printed", lambda value: isinstance(value, str) and value.isprintable()),
    ),
    **dict.fromkeys(("sms", "n", "k"), ("an int from 1 on", _is_count)),
    "revision": ("an int from 0 on", lambda value: _is_count(value, 0)),
    "m": ("[first, last or null], ints from 1 on", _is_interval),
    "us": (
        f"a number from 0 to {_LONGEST_US:.0e}",
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _LONGEST_US,
    ),
    "batch_invariant": ("a bool", lambda value: isinstance(value, bool)),
}
"""For each field of a line, its legal values in words and a function that checks one."""


def key_of(problem: GemmProblem) -> Key:
    """Return the key of the records for a problem."""
    dtype = str(problem.dtype).removeprefix("torch.")
    return Key(
        *device_facts(problem.device),
        str(problem.format),
        dtype,
        problem.layout,
        problem.n,
        problem.k,
        epilogue_kind(problem),
        problem.batch_invariant,
    )


def epilogue_kind(problem: GemmProblem) -> str:
    """Return the parts of the epilogue that change which config is the fastest, joined by ``+``.

    They are ``silu_mul`` (for any gated activation), ``residual``, ``block_scale`` and ``float32``: with these other
    bytes move, d is stored in another way, or sums are scaled in the main loop. alpha, a bias and the other activations
    cost too little to choose by.
    """
    kinds = {
        "silu_mul": problem.epilogue.gated,
        "residual": problem.epilogue.residual,
        "block_scale": problem.epilogue.block_scale,
        "float32": problem.out_dtype == torch.float32 != problem.dtype,
    }
    return "+".join(name for name, holds in kinds.items() if holds)


def device_facts(device: Device) -> tuple[str, int]:
    """Return the device's name and its number of multiprocessors, or of threads on a CPU, for a :class:`Key`."""
    return (device.name, device.sms) if device.kind == "cuda" else (_processor(), torch.get_num_threads())


@functools.cache
def _processor() -> str:
    return (linux_says("cpuinfo", r"model name\s*:\s*(.*)") or "CPU").strip()


def parse_lines(lines: Iterable[str]) -> tuple[list[Record], list[tuple[int, str]]]:
    """Return the records of a table's lines, and (line number, reason) for each line that is no record."""
    records: list[Record] = []
    bad: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                records.append(Record.parse(line))
        except Exception as e:  # whatever a line holds, it must cost no more than itself
            bad.append((number, str(e)))
    return records, bad


def effective(records: Iterable[Record]) -> list[Record]:
    """Return the records that no later record replaces, in the order of their lines."""
    latest: dict[object, Record] = {}
    for record in records:
        latest.pop(record.place, None)  # the place in the order changes as well
        latest[record.place] = record
    return list(latest.values())


# --- looking up ------------------------------------------------------------------------------------------------------

_session: list[Record] = []
"""Records that this process tuned and could not write."""


def find(problem: GemmProblem) -> list[tuple[str, Record]]:
    """Return ``"tuned"`` or ``"shipped"`` and the record, for each record of ``problem`` with any m, the preferred ones
    first. There are no records of grouped problems."""
    if problem.experts:
        return []
    key, path = key_of(problem), user_path()
    # only the lines of one layer are parsed, because parsing all takes as long as the rest of a process' first choice
    shipped = read(shipped_path(key.device), f'"n": {key.n}, "k": {key.k},')
    tables = (("tuned", (*(read(path) if path else ()), *_session)), ("shipped", shipped))
    return [(source, record) for source, records in tables for record in reversed(records) if record.key == key]


def user_path() -> Path | None:
    """Return the path of the user's table, whether or not it exists; None if nothing is kept."""
    folder = environment.cache_dir()
    return None if folder is None else folder / USER_FILE


def shipped_path(device: str) -> Path:
    """Return the path of the shipped table of a device, whether or not there is one."""
    return _TABLES / f"{re.sub('[^a-z0-9]+', '_', device.lower()).strip('_') or 'unknown'}.jsonl"


def shipped_tables() -> list[Path]:
    """Return the paths of all shipped tables."""
    return sorted(_TABLES.glob("*.jsonl"))


def read(path: Path, text: str = "") -> tuple[Record, ...]:
    """Return a table's records in the order of their lines; none if there is no file, or if this user may not read it,
    which the log then says once.

    Args:
        text: skip the lines without this text.
    """
    try:
        about = path.stat()
        return _read(path, about.st_mtime_ns, about.st_size, text)
    except (FileNotFoundError, NotADirectoryError):  # or another process has cleared it since it was looked at
        return ()
    except trust.Untrusted as e:
        trust.warn(str(e))
    except OSError as e:
        trust.warn(f"cannot read the tuned configs in {path} ({e.strerror or e}): going without")
    return ()


@functools.lru_cache(maxsize=64)
def _read(path: Path, changed: int, size: int, text: str) -> tuple[Record, ...]:
    """:func:`read` of a file whose time of change and size are these. What it raises is not cached: the file may be
    readable at the next look."""
    opener = None if path.parent == _TABLES else trust.opener
    with open(path, encoding="utf-8", errors="replace", opener=opener) as f:
        lines = f.read().removeprefix("\ufeff").splitlines()  # the mark that some editors begin a file with
    records, bad = parse_lines(line for line in lines if text in line)
    if bad:
        _log.warning("%s: skipped %d unreadable lines; line %d: %s", path, len(bad), *bad[0])
    return tuple(records)


# --- writing ---------------------------------------------------------------------------------------------------------


def add(records: Iterable[Record]) -> bool:
    """Use records from now on, and append them to the user's table; return whether they are in it. If it cannot be
    written, the log says why, and only this process uses them."""
    records = list(records)
    path = user_path()
    if path is None:
        _session.extend(records)
        return False
    try:
        append(path, records)
        return True
    except trust.Untrusted as e:
        _session.extend(records)
        trust.warn(str(e))
    except OSError as e:
        _session.extend(records)
        # later records will fail alike: said once
        reason = f"cannot keep tuned configs in {path} ({system_reason(e)})"
        trust.warn(f"{reason}; set W4GEMM_CACHE_DIR to a folder that can")
    return False


def append(path: Path, records: Iterable[Record]) -> None:
    """Append records to a table, which is made if needed, in one write under a lock."""
    text = "".join(record.line() for record in records)
    trust.make_folder(path.parent)
    with _lock(path), open(path, "a+b", opener=trust.opener) as f:
        f.seek(0, os.SEEK_END)
        if f.tell():
            f.seek(-1, os.SEEK_END)
            if f.read(1) != b"\n":  # a line that was cut short must not swallow ours
                text = "\n" + text
        f.write(text.encode())


def add_missing(path: Path, records: Iterable[Record]) -> int:
    """Append the records that a table does not have; return how many. Errors as :func:`append`."""
    there = set(effective(read(path)))
    new = [record for record in records if record not in there]
    append(path, new)
    return len(new)


def replace_table(path: Path, records: Iterable[Record]) -> None:
    """Write a table anew, so that readers see either the old one or the new one. Errors as :func:`placed`."""
    with placed(path) as unfinished:
        unfinished.write_text("".join(record.line() for record in records), encoding="utf-8")
        unfinished.chmod(0o644)  # whatever the umask: other users may read it


def clear() -> int:
    """Delete every record of the user's table; return their number."""
    _session.clear()
    path = user_path()
    if path is None or not path.exists():
        return 0
    with _lock(path):
        count = len(read(path))
        path.unlink(missing_ok=True)  # another process may have cleared it meanwhile
    return count


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[Any]:
    """Let one writer at a time, of all processes, into the block."""
    try:
        import fcntl
    except ImportError:  # not POSIX: a single write is all the care there is
        yield None
        return
    with open(path.with_name(f".{path.name}.lock"), "a", opener=trust.opener) as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield f
