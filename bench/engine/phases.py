"""Facts in an engine's log: seconds of its start by phase, so that the time of a run can be planned
(:func:`of_start`), and how many tokens its KV cache holds (:func:`cache_tokens`)."""

from __future__ import annotations

import re
from collections import defaultdict

_SAID = {
    "load": re.compile(r"Model loading took .* and ([\d.]+) seconds"),
    "kernels": re.compile(r"kernels ready in ([\d.]+) s"),
    "torch.compile": re.compile(r"init engine \(.*\bcompilation: ([\d.]+) s"),
    "graphs": re.compile(r"Graph capturing finished in ([\d.]+) secs"),
}
"""Lines in the logs of vLLM 0.26 to 0.33, and the plugin's."""
_CACHE = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
_PROCESS = re.compile(r"\(\w+ pid=\d+\)")


def of_start(log: str, seconds: float, imported: float) -> dict[str, float]:
    """Return the seconds of a start by phase.

    ``import`` is that of vLLM; ``load`` makes the model, loads and packs its weights; ``kernels`` compiles or loads
    those of the plugin; ``torch.compile``, ``graphs`` and ``other`` are the rest. A phase of which the log says nothing
    is left out, and is in ``other``. Of several processes, which do the same side by side, the slowest counts.

    Args:
        seconds: of the whole start, ``imported`` of them for the import.
    """
    found = {name: _slowest(pattern, log) for name, pattern in _SAID.items()}
    if found["load"] and found["kernels"]:  # made ready while the model is loaded
        found["load"] -= found["kernels"]
    said = {"import": imported, **{name: value for name, value in found.items() if value is not None}}
    said["other"] = max(0.0, seconds - sum(said.values()))
    return {name: round(value, 1) for name, value in said.items()}


def cache_tokens(log: str) -> int | None:
    """Return the number of tokens that the KV cache holds; the least of several processes, None if no line has it."""
    return min((int(said[1].replace(",", "")) for said in _CACHE.finditer(log)), default=None)


def _slowest(pattern: re.Pattern[str], log: str) -> float | None:
    """Return the largest sum of what a process says; None if none says anything."""
    sums: dict[str, float] = defaultdict(float)
    for line in log.splitlines():
        if said := pattern.search(line):
            process = _PROCESS.search(line)
            sums[process[0] if process else ""] += float(said[1])
    return max(sums.values(), default=None)


def text(parts: dict[str, float]) -> str:
    """Return the phases in words, the longest first."""
    longest = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in longest if seconds >= 0.05)
