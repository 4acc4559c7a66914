"""One measured choice as it is stored: :class:`Record`, a line of JSON."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from w4gemm.core.config import GemmConfig
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.packing.layouts import RENAMED


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
    try:
        match = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # not Linux
        match = None
    return match[1].strip() if match else "CPU"


# --- tables ---------------------------------------------------------------------------------------------------------


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
