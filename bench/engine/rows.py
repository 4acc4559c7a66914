"""Rows of kind ``engine`` from what engines did, and the table that ends a run."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence

from bench.engine.offline import Result, Task
from bench.rows import Row

Answers = Mapping[int, list[list[int]]]
"""Tokens of every request, by batch."""


def rows_of(result: Result, task: Task) -> list[Row]:
    """Return a result's rows, without the fields that all rows of its implementation share.

    Times are medians of ``runs`` runs; with ``_least`` and ``_most`` at the end of their name, the fastest and slowest
    run's. ``tokens_s`` of phase decode is that of the whole batch, without the time to the first tokens; ``ms_step`` is
    between two tokens of a request. A batch whose first tokens took as long as its whole answers, since kernels were
    still compiled, is a row of phase "failed". Phase "moves" has what :func:`bench.engine.offline.moves` returns.
    """
    tokens_in = {"tokens_in": task.tokens_in}
    rows: list[Row] = [{"phase": "start", "seconds": round(result.start_s, 2)}]
    for point in result.decode:
        first, total = statistics.median(point["first_token_s"]), statistics.median(point["total_s"])
        seconds, steps = total - first, task.tokens_out - 1
        if seconds <= 0:
            times = f"first tokens took {first:.3f} s, whole answers {total:.3f} s"
            rows.append({"phase": "failed", "reason": f"batch {point['batch']}: {times}"})
            continue
        row = {"phase": "decode", "batch": point["batch"], **tokens_in, "tokens_out": task.tokens_out}
        row |= {"tokens_s": round(point["batch"] * steps / seconds, 1), "runs": len(point["total_s"])}
        row |= spread("ms_step", [1e3 * (run - first) / steps for run in point["total_s"]])
        row |= spread("first_tokens_s", point["first_token_s"])
        rows.append(row | {"repeats_itself": point["repeats_itself"]})
    if result.prefill_s:
        row = {"phase": "prefill", "batch": 1, "tokens_in": task.prefill, "tokens_out": 1}
        row |= {"tokens_s": round(task.prefill / statistics.median(result.prefill_s), 1)}
        rows.append(row | {"runs": len(result.prefill_s)} | spread("seconds", result.prefill_s))
    if result.moves:
        rows.append({"phase": "moves", **result.moves})
    return rows


_CACHE = re.compile(r"GPU KV cache size: ([\d,]+) tokens")


def cache_tokens(log: str) -> int | None:
    """Return the number of tokens that the KV cache holds; the least of several processes, None if no line has it."""
    return min((int(said[1].replace(",", "")) for said in _CACHE.finditer(log)), default=None)


def with_room(rows: Sequence[Row], cache_tokens: int | None) -> list[Row]:
    """Return the rows, in which a batch whose tokens had no room in the KV cache is one of phase "failed": the engine
    then computes requests one after another, or some of them twice."""
    kept = []
    for row in rows:
        if row["phase"] == "decode" and cache_tokens is not None:
            tokens = row["batch"] * (row["tokens_in"] + row["tokens_out"])
            if tokens > cache_tokens:
                reason = f"batch {row['batch']}: {tokens:,} tokens, and the KV cache holds {cache_tokens:,}"
                row = {"phase": "failed", "reason": f"{reason}; more --memory"}
        kept.append(row)
    return kept


def spread(name: str, times: Sequence[float]) -> Row:
    """Return the median of times as ``name``, and the least and the most."""
    times_by_name = {name: statistics.median(times), f"{name}_least": min(times), f"{name}_most": max(times)}
    return {field: round(time, 4) for field, time in times_by_name.items()}


def add_agreement(rows: list[Row], answers: Answers, reference: str, others: Answers) -> None:
    """Add to decode rows ``same_tokens_as``, a reference; ``equal_prefix``, how many greedy tokens equal its, up to the
    first that differs, a mean over the batch; and ``equal_first``, in how many answers the first token does."""
    for row in rows:
        if row["phase"] == "decode":
            pairs = zip(answers[row["batch"]], others[row["batch"]], strict=True)
            prefixes = [equal_prefix(a, b) for a, b in pairs]
            row |= {"same_tokens_as": reference, "equal_prefix": round(statistics.mean(prefixes), 1)}
            row["equal_first"] = sum(prefix > 0 for prefix in prefixes)


def equal_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two answers begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# --- a run's last lines -----------------------------------------------------------------------------------------------

_SHOWN = {
    "start": ("seconds", "s"),
    "prefill": ("tokens_s", "tokens/s"),
    "decode": ("tokens_s", "tokens/s"),
    "serve": ("tokens_s", "tokens/s"),
}


def table(rows: Sequence[Row]) -> str:
    """Return the figures of one model and format as lines: a line a phase, a column an implementation."""
    names = list(dict.fromkeys(row["impl"] for row in rows))
    lines = [("", *names)]
    points = list(dict.fromkeys(_point(row) for row in rows if row["phase"] in _SHOWN))
    for point in points:
        field = _SHOWN[point[0]][0]
        by_name = {row["impl"]: row[field] for row in rows if _point(row) == point}
        lines.append((_label(*point), *(_figure(by_name.get(name)) for name in names)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(names) + 1)]
    text = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    failed = [f"{row['impl']}: {row['reason']}" for row in rows if row["phase"] == "failed"]
    agreed = [
        f"batch {row['batch']}: {row['impl']} and {row['same_tokens_as']} begin with {row['equal_prefix']} of "
        f"{row['tokens_out']} tokens alike"
        for row in rows
        if "equal_prefix" in row
    ]
    return "\n".join([*text, *failed, *agreed])


def _point(row: Row) -> tuple[str, int, int, str]:
    return row["phase"], row.get("batch", 0), row.get("tokens_in", 0), row.get("start", "")


def _label(phase: str, batch: int, tokens_in: int, start: str) -> str:
    words = [phase, start, f"batch {batch}" if batch else "", f"of {tokens_in}" if phase == "prefill" else ""]
    return " ".join(word for word in words if word) + f", {_SHOWN[phase][1]}"


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"
