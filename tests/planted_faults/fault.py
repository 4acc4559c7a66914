"""What a planted fault is: :class:`Fault`."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A mistake in one file."""

    name: str
    file: str
    """Relative to the repository."""
    old: str
    new: str
    by: str
    """Tests that should catch it, as pytest takes them, or ``fuzz`` and options of ``fuzz.run``."""
