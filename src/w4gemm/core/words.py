"""Words that messages share. Importing this does without PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def nearest(value: object, legal: Iterable[str]) -> str:
    """Return the end of a message: "; nearest is 'silu'" if a string is close to a legal one, else nothing."""
    close = closest(value, legal)
    return f"; nearest is {close!r}" if close else ""


def closest(value: object, legal: Iterable[str]) -> str | None:
    """Return the first name that a string begins, or else the one that it is closest to; None if it is close to none.
    Upper and lower case count as one."""
    import difflib  # only once something is wrong

    if not isinstance(value, str):
        return None
    by_lower = {name.lower(): name for name in legal}
    begun = [name for name in by_lower if len(value) > 2 and name.startswith(value.lower())]
    close = begun or difflib.get_close_matches(value.lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


def listed(names: Collection[str]) -> str:
    """Return the first names, and how many there are."""
    first = ", ".join([*names][:3])
    return f"{first}, ... ({len(names)} in all)" if len(names) > 3 else first


def printable(text: str) -> str:
    """Return a text of a file for a terminal: with escapes for characters that would move its cursor or hide others."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def dotted(version: Iterable[int]) -> str:
    """Return a version or a compute capability as text, such as "9.0"."""
    return ".".join(map(str, version))
