"""Measured choices, kept between processes: :class:`Record`, one JSON line each.

Two tables: the user's, ``tuned.jsonl`` in the cache folder, over the shipped one, ``tables/<device>.jsonl`` in this
package. In a table later lines go before earlier ones. A line is appended in one write under a lock, so that many
processes can tune at once and an interrupted one loses nothing; what cannot be read is skipped with a warning. Whether
a record may be used, its config still legal and its kernel the same, is for :mod:`w4gemm.choice.choose` to say.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from w4gemm.core import environment, trust
from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.packing.layouts import RENAMED

_log = logging.getLogger("w4gemm")
_TABLES = Path(__file__).resolve().parent / "tables"
USER_FILE = "tuned.jsonl"


class Key(NamedTuple):
    """Problems that a measured choice holds for, besides its interval of m."""

    device: str
    """The exact name; of a CPU, its model."""
    sms: int
    """Multiprocessors; of a CPU, PyTorch's threads."""
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
    """One tuning result: ``choice`` is the config that the tuner selected, ``us`` its median microseconds per call at
    the interval's last m."""

    key: Key
    m: tuple[int, int | None]
    """First and last m that it holds for; None for no end. Measured at the last."""
    kernel: str
    config: str
    us: float
    revision: int
    """The kernel's, see :class:`w4gemm.kernels.base.Kernel`."""
    date: str

    @property
    def choice(self) -> str:
        return f"{self.kernel}/{self.config}"

    def holds_for(self, m: int) -> bool:
        first, last = self.m
        return first <= m and (last is None or m <= last)

    def line(self) -> str:
        rest = {name: getattr(self, name) for name in _VALUES}
        return json.dumps({**self.key._asdict(), **rest}) + "\n"

    @classmethod
    def parse(cls, line: str) -> Record:
        """Inverse of :meth:`line`.

        Raises:
            ValueError: if the line is not a record.
        """
        row = json.loads(line)
        wanted = (*Key._fields, *_VALUES)
        if not isinstance(row, dict) or set(row) != set(wanted):
            raise ValueError(f"wanted an object with {', '.join(wanted)}")
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
_LAYER = re.compile(r'"n": ([0-9]+), "k": ([0-9]+),')


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _LONGEST_US


_FITS: dict[str, tuple[str, Callable[[object], bool]]] = {
    **dict.fromkeys(
        ("device", "format", "dtype", "layout", "epilogue", "kernel", "config", "date"),
        ("a string that can be printed", _is_text),
    ),
    **dict.fromkeys(("sms", "n", "k"), ("an int from 1 on", _is_count)),
    "revision": ("an int from 0 on", lambda value: _is_count(value, 0)),
    "m": ("[first, last or null], ints from 1 on", _is_interval),
    "us": (f"a number from 0 to {_LONGEST_US:.0e}", _is_time),
    "batch_invariant": ("a bool", lambda value: isinstance(value, bool)),
}
"""Legal values of each field of a line, in words and as a check."""


def key_of(problem: GemmProblem) -> Key:
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
    """``silu_mul``, ``residual``, ``block_scale`` and ``float32``, as far as they are asked for: other bytes move, d is
    stored in another way, or sums are scaled in the main loop. alpha, a bias and the other activations cost too little
    to choose by."""
    asked = {
        "silu_mul": problem.epilogue.gated,
        "residual": problem.epilogue.residual,
        "block_scale": problem.epilogue.block_scale,
        "float32": problem.out_dtype == torch.float32 != problem.dtype,
    }
    return "+".join(name for name, wanted in asked.items() if wanted)


def device_facts(device: Device) -> tuple[str, int]:
    """The name and the number of multiprocessors that records are kept by."""
    return (device.name, device.sms) if device.kind == "cuda" else (_processor(), torch.get_num_threads())


@functools.cache
def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # not Linux
        found = None
    return found[1].strip() if found else "CPU"


# --- looking up ------------------------------------------------------------------------------------------------------

_session: list[Record] = []
"""Records that this process tuned and could not write."""


def find(problem: GemmProblem) -> Iterator[tuple[str, Record]]:
    """(``"tuned"`` or ``"shipped"``, record) of all that were made for ``problem``, those to prefer first.
    There are none of grouped problems."""
    if problem.experts:
        return
    key = key_of(problem)
    path = user_path()
    user = [*(_of_key(path, key) if path else ()), *(record for record in _session if record.key == key)]
    for source, records in (("tuned", user), ("shipped", _shipped(key))):
        for record in reversed(records):
            if record.holds_for(problem.m):
                yield source, record


def user_path() -> Path | None:
    """The user's table, whether or not it exists; None where nothing is kept."""
    folder = environment.cache_dir()
    return None if folder is None else folder / USER_FILE


def shipped_path(device: str) -> Path:
    """The table of a device that comes with the package, whether or not there is one."""
    return _TABLES / f"{re.sub('[^a-z0-9]+', '_', device.lower()).strip('_') or 'unknown'}.jsonl"


def shipped_tables() -> list[Path]:
    """Every table that comes with the package."""
    return sorted(_TABLES.glob("*.jsonl"))


def read(path: Path) -> tuple[Record, ...]:
    """A table's records in the order of their lines; none if there is no file."""
    about = _state(path)
    return _read(path, *about) if about else ()


def _of_key(path: Path, key: Key) -> Sequence[Record]:
    """A table's records of one key in the order of their lines."""
    about = _state(path)
    return _by_key(path, *about).get(key, ()) if about else ()


def _shipped(key: Key) -> list[Record]:
    """Records of one key in the table that comes with the package."""
    path = shipped_path(key.device)
    about = _state(path)
    lines = _by_layer(path, *about).get((str(key.n), str(key.k)), []) if about else []
    return [record for record in map(Record.parse, lines) if record.key == key]


@functools.lru_cache(maxsize=8)
def _by_layer(path: Path, changed: int, size: int) -> dict[tuple[str, str], list[str]]:
    """The lines of a table that :meth:`Record.line` made, by n and k in digits: reading them all takes as long as all
    else that the first choice of a process does."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        layer = _LAYER.search(line)
        assert layer is not None, line
        found.setdefault((layer[1], layer[2]), []).append(line)
    return found


def _state(path: Path) -> tuple[int, int] | None:
    """When a file was changed and its size, which say whether it is still the one that was read; None if it is not
    there."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size


@functools.lru_cache(maxsize=8)
def _by_key(path: Path, changed: int, size: int) -> dict[Key, list[Record]]:
    found: dict[Key, list[Record]] = {}
    for record in _read(path, changed, size):
        found.setdefault(record.key, []).append(record)
    return found


@functools.lru_cache(maxsize=8)
def _read(path: Path, changed: int, size: int) -> tuple[Record, ...]:
    opener = None if path.parent == _TABLES else trust.opener
    try:
        with open(path, encoding="utf-8", errors="replace", opener=opener) as f:
            lines = f.read().splitlines()
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


def parse_lines(lines: Iterable[str]) -> tuple[list[Record], list[tuple[int, str]]]:
    """The records of a table, and (line number, reason) of each line that is none."""
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
    """Without those that a later record of the same key and interval replaces."""
    return list({(r.key, r.m): r for r in records}.values())


# --- writing ---------------------------------------------------------------------------------------------------------


def add(records: Iterable[Record]) -> None:
    """Use records from now on, and append them to the user's table. Where it cannot be written, says so in the log."""
    records = list(records)
    path = user_path()
    if path is None:
        _session.extend(records)
        return
    try:
        append(path, records)
    except trust.Untrusted as e:
        _session.extend(records)
        trust.warn(str(e))
    except OSError as e:
        _session.extend(records)
        _log.warning("cannot keep tuned configs in %s (%s); set W4GEMM_CACHE_DIR to a folder that can", path, e)


def append(path: Path, records: Iterable[Record]) -> None:
    """Append to a table, which is made if needed, in one write under a lock."""
    text = "".join(record.line() for record in records)
    trust.make_folder(path.parent)
    with _lock(path), open(path, "a+b", opener=trust.opener) as f:
        f.seek(0, os.SEEK_END)
        if f.tell():
            f.seek(-1, os.SEEK_END)
            if f.read(1) != b"\n":  # a line that was cut short must not swallow ours
                text = "\n" + text
        f.write(text.encode())


def replace_table(path: Path, records: Iterable[Record]) -> None:
    """Write a table anew; readers see the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as f:
        f.writelines(record.line() for record in records)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


def clear() -> int:
    """Forget every record of the user's table, and say how many there were."""
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
    """One writer at a time, in all processes."""
    try:
        import fcntl
    except ImportError:  # not POSIX: a single write is all the care there is
        yield None
        return
    with open(path.with_name(f".{path.name}.lock"), "a", opener=trust.opener) as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield f
