"""Modules that a quantization_config names one by one or by patterns, and that its folder does not have:
:func:`warn_of_missing`.

A folder whose numbers are known is loaded, so such a name is no error: a model may be stored without its vision tower,
and its config is kept. But a setting that holds for no module may have been meant for one of another name, so it is
told once. Names of modules that stay dense (``ignore``, ``exclude_modules``, ``-:``) are never told: configs list what
only the model had from which the folder was made.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_FULL_NAME = re.compile(r"[\w.-]+")
_CANDIDATES = 2000
"""Names at most among which the nearest one is looked for, because difflib compares them one by one."""


class Named(NamedTuple):
    """A name or pattern by which a quantization_config speaks of modules in 4 bits."""

    argument: str
    """Its place in the config, such as "dynamic"."""
    text: str
    matches: Callable[[str], object] | None = None
    """True for names of modules that a pattern means; None for a name in full, of a module or of what it is in."""


def compiled(argument: str, pattern: str) -> re.Pattern[str]:
    """Return a regular expression; raise ValueError, which names the argument, if it is none."""
    try:
        return re.compile(pattern)
    except re.error as e:
        raise ValueError(f"{argument}: {pattern!r} is no regular expression: {e}") from e


def in_extra_config(config: Mapping[str, Any]) -> list[Named]:
    """Return what AutoRound's extra_config names."""
    overrides = (config.get("extra_config") or {}).items()
    names = [name for name, settings in overrides if settings.get("bits", 4) == 4]
    return [
        Named("extra_config", name, None if _FULL_NAME.fullmatch(name) else compiled("extra_config", name).search)
        for name in names
    ]


def warn_of_missing(path: Path, named: Iterable[Named], modules: Collection[str]) -> None:
    """Warn once of the names and patterns that mean none of a folder's 4-bit modules."""
    known = {*modules}
    for name in modules:
        while (name := name.rpartition(".")[0]) and name not in known:
            known.add(name)
    missing = [n for n in named if n.text not in known and not (n.matches and any(map(n.matches, modules)))]
    if not missing:
        return
    first, more = missing[0], f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    warnings.warn(
        f"{path}: {first.argument} of its quantization_config names {first.text!r}{more}, but no such module is in "
        f"4 bits, so its settings are not used; the nearest of its {len(modules)} 4-bit modules is "
        f"{_nearest(first.text, modules)!r}",
        stacklevel=2,
    )


def _nearest(text: str, modules: Collection[str]) -> str:
    last = re.findall(r"\w+", text)[-1:]
    alike = [name for name in modules if name.rpartition(".")[2] in last] or list(modules)
    return difflib.get_close_matches(text, alike[:_CANDIDATES], n=1, cutoff=0)[0]
