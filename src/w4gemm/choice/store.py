"""The tables of measured choices, which are kept between processes.

There are two: the user's, ``tuned.jsonl`` in the cache folder, and the shipped one, ``tables/<device>.jsonl`` in this
package. The user's goes before the shipped one and, in a table, later lines go before earlier ones. A line is appended
in one write under a lock, so that many processes can tune at once and an interrupted one loses nothing. A line that
cannot be read is skipped with a warning. :mod:`w4gemm.choice.plan` decides whether a record may still be used.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from w4gemm.choice.records import Key, Record, effective, key_of, parse_lines
from w4gemm.core import environment, trust
from w4gemm.core.files import placed
from w4gemm.core.problem import GemmProblem

_log = logging.getLogger("w4gemm")
_TABLES = Path(__file__).resolve().parent / "tables"
USER_FILE = "tuned.jsonl"
"""Name of the user's table in the cache folder."""
_LAYER = re.compile(r'"n": ([0-9]+), "k": ([0-9]+),')


# --- looking up ------------------------------------------------------------------------------------------------------

_session: list[Record] = []
"""Records that this process tuned and could not write."""


def find(problem: GemmProblem) -> list[tuple[str, Record]]:
    """Return ``"tuned"`` or ``"shipped"`` and the record, for each record of ``problem`` with any m, the preferred ones
    first. There are no records of grouped problems."""
    if problem.experts:
        return []
    key = key_of(problem)
    path = user_path()
    user = [*(_of_key(path, key) if path else ()), *(record for record in _session if record.key == key)]
    tables = (("tuned", user), ("shipped", _shipped(key)))
    return [(source, record) for source, records in tables for record in reversed(records)]


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


def read(path: Path) -> tuple[Record, ...]:
    """Return a table's records in the order of their lines; none if there is no file."""
    about = _state(path)
    return _read(path, *about) if about else ()


def _of_key(path: Path, key: Key) -> Sequence[Record]:
    """Return a table's records of one key in the order of their lines."""
    about = _state(path)
    return _by_key(path, *about).get(key, ()) if about else ()


def _shipped(key: Key) -> list[Record]:
    """Return the records of one key in the shipped table."""
    path = shipped_path(key.device)
    about = _state(path)
    return _of_layer(path, *about, key.n, key.k).get(key, []) if about else []


@functools.lru_cache(maxsize=256)
def _of_layer(path: Path, changed: int, size: int, n: int, k: int) -> dict[Key, list[Record]]:
    """Return the records of weights (n, k) in a shipped table by their key, in the order of their lines."""
    records: dict[Key, list[Record]] = {}
    for line in _by_layer(path, changed, size).get((str(n), str(k)), []):
        record = Record.parse(line)
        records.setdefault(record.key, []).append(record)
    return records


@functools.lru_cache(maxsize=8)
def _by_layer(path: Path, changed: int, size: int) -> dict[tuple[str, str], list[str]]:
    """Return the lines of a shipped table by n and k, in digits. Only the lines of one layer are parsed then, because
    parsing all of them takes as long as everything else in the first choice of a process."""
    lines: dict[tuple[str, str], list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        layer = _LAYER.search(line)
        assert layer is not None, line
        lines.setdefault((layer[1], layer[2]), []).append(line)
    return lines


def _state(path: Path) -> tuple[int, int] | None:
    """Return a file's time of change and its size, which differ once the file has changed. None if there is no file, or
    if this user may not look at it; the log then says so once."""
    try:
        about = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        trust.warn(f"cannot read the tuned configs in {path} ({e.strerror}): going without")
        return None
    return about.st_mtime_ns, about.st_size


@functools.lru_cache(maxsize=8)
def _by_key(path: Path, changed: int, size: int) -> dict[Key, list[Record]]:
    records: dict[Key, list[Record]] = {}
    for record in _read(path, changed, size):
        records.setdefault(record.key, []).append(record)
    return records


@functools.lru_cache(maxsize=8)
def _read(path: Path, changed: int, size: int) -> tuple[Record, ...]:
    opener = None if path.parent == _TABLES else trust.opener
    try:
        with open(path, encoding="utf-8", errors="replace", opener=opener) as f:
            lines = f.read().removeprefix("\ufeff").splitlines()  # the mark that some editors begin a file with
    except FileNotFoundError:  # another process has cleared it since it was looked at
        return ()
    except trust.Untrusted as e:
        trust.warn(str(e))
        return ()
    except OSError as e:
        _log.warning("cannot read the tuned configs in %s (%s): going without", path, e)
        return ()
    records, bad = parse_lines(lines)
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
        _log.warning("cannot keep tuned configs in %s (%s); set W4GEMM_CACHE_DIR to a folder that can", path, e)
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
