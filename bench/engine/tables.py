"""The tables of the page of engines, each from the rows of one case."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from bench.engine.implementations import OURS
from bench.rows import Row

WIDTH = 120
"""Characters of a line of prose."""


class Line(NamedTuple):
    """A line of a table: what is measured, how its figures are shown, and whether less is better."""

    name: str
    value: Callable[[Row], float]
    shown: Callable[[Row], str]
    is_time: bool = False


def lines_of(row: Row) -> list[Line]:
    """Return the lines that a row is shown in; none for those that are not in the table of speeds."""
    phase, batch = row["phase"], row.get("batch")
    if phase == "decode":
        name = f"decode, batch {batch}: tokens/s (ms a step)"
        found = [Line(name, lambda r: r["tokens_s"], lambda r: f"{r['tokens_s']:,.0f} ({r['ms_step']:.2f})")]
        if batch == 1:
            name = f"first token after {row['tokens_in']}: ms"
            found.append(Line(name, lambda r: r["first_tokens_s"], lambda r: f"{1e3 * r['first_tokens_s']:.1f}", True))
        return found
    if phase == "start" and row["start"] != "first" and row.get("at_once", 1) == 1:  # the first pays for the others
        return [Line(f"{row['start']} start: s", lambda r: r["seconds"], lambda r: f"{r['seconds']:.0f}", True)]
    how = "serve" if row.get("streamed", True) else "serve whole"
    names = {"prefill": f"prefill of {row.get('tokens_in')}", "serve": f"{how}, {batch} at a time"}
    if phase not in names:
        return []
    return [Line(f"{names[phase]}: tokens/s", lambda r: r["tokens_s"], lambda r: f"{r['tokens_s']:,.0f}")]


def mean(ratios: Sequence[float | None]) -> float | None:
    """Return the geometric mean; None if a ratio is missing."""
    known = [ratio for ratio in ratios if ratio is not None]
    return statistics.geometric_mean(known) if known and len(known) == len(ratios) else None


def gains(line: Line, rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """Return w4gemm's gain over vLLM's choice, and over the best of two or more of vLLM's kernels; None where one was
    not measured."""
    ours = [line.value(row) for row in rows if OURS in row["impl"]]
    chosen = [line.value(row) for row in rows if row["chosen"] and OURS not in row["impl"]]
    others = [line.value(row) for row in rows if OURS not in row["impl"]]
    if not ours:
        return None, None
    if line.is_time:
        found = [min(times) / min(ours) if times else None for times in (chosen, others)]
    else:
        found = [max(ours) / max(rates) if rates else None for rates in (chosen, others)]
    return found[0], found[1] if len(others) > 1 else None


def gain_text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def names_of(rows: Sequence[Row]) -> dict[str, str]:
    """Heads of columns by implementation: ours first, vLLM's choice next."""
    chosen = {row["impl"] for row in rows if row["chosen"]}
    names = sorted({row["impl"] for row in rows}, key=lambda name: (OURS not in name, name not in chosen, name))
    return {name: f"{name}, vLLM's choice" if name in chosen else name for name in names}


def by_line(rows: Sequence[Row]) -> dict[str, tuple[Line, list[Row]]]:
    """Return each line of the table of speeds with its rows."""
    found: dict[str, tuple[Line, list[Row]]] = {}
    for row in rows:
        for line in lines_of(row):
            found.setdefault(line.name, (line, []))[1].append(row)
    return found


def speeds(rows: Sequence[Row]) -> list[str]:
    """Lines of the table of a case."""
    names = names_of(rows)
    head = table_line("", (*names.values(), "over vLLM's choice", "over the best"))
    lines = [head, "|---" * (len(names) + 3) + "|"]
    for name, (line, found) in by_line(rows).items():
        cells = {row["impl"]: line.shown(row) for row in found}
        ratios = (None, None) if found[0]["phase"] == "start" else gains(line, found)
        lines.append(table_line(name, (*(cells.get(n, "-") for n in names), *map(gain_text, ratios))))
    return lines


def latencies(rows: Sequence[Row]) -> list[str]:
    """Lines of the table of times under load, streamed: median and 99th percentile."""
    found = [row for row in rows if row["phase"] == "serve" and row.get("streamed", True)]
    if not found:
        return []
    lines = ["| under load, ms: median (99 %) | at a time | first token | between tokens |", "|---|---|---|---|"]
    for row in sorted(found, key=lambda row: (row["batch"], row["impl"])):
        first, between = (
            f"{row[f'{name}_ms_p50']:.1f} ({row[f'{name}_ms_p99']:.1f})" for name in ("first_token", "between_tokens")
        )
        lines.append(f"| {row['impl']} | {row['batch']} | {first} | {between} |")
    return lines


_OVERLAP = (
    "Kernels of w4gemm start before those in front of them end, and their times include the wait: only sums of a step "
    "compare. The profiler itself makes a step longer."
)


def steps(rows: Sequence[Row]) -> list[str]:
    """Lines of the tables of where decode steps and prefills spend their time."""
    lines: list[str] = []
    for batch in sorted({row["batch"] for row in rows if row["phase"] == "profile"}):
        found = {row["impl"]: row for row in rows if row["phase"] == "profile" and row["batch"] == batch}
        lines += [*([""] if lines else []), *_times_by_group(f"a decode step at batch {batch}, us", found)]
    if found := {row["impl"]: row for row in rows if row["phase"] == "prefill_profile"}:
        lines += ["", *_times_by_group("the prefill, us", found)]
    return [*lines, "", *textwrap.wrap(_OVERLAP, WIDTH)] if lines else []


def _times_by_group(title: str, found: dict[str, Row]) -> list[str]:
    """Lines of one of these tables. found: rows by implementation."""
    longest = next(iter(found.values()))["groups"]
    groups = list(dict.fromkeys([*longest, *(name for row in found.values() for name in row["groups"])]))
    lines = [table_line(title, found), "|---" * (len(found) + 1) + "|"]
    for name in groups:
        lines.append(table_line(name, (f"{row['groups'].get(name, 0.0):.0f}" for row in found.values())))
    for name, key in (("no kernel runs", "gaps"), ("in all, under the profiler", "us_step")):
        lines.append(table_line(name, (f"{row[key]:.0f}" for row in found.values())))
    return lines


def agreement(rows: Sequence[Row]) -> list[str]:
    """A sentence on greedy answers that begin alike."""
    found = [row for row in rows if "equal_prefix" in row]
    if not found:
        return []
    by_name: dict[str, list[Row]] = {}
    for row in found:
        by_name.setdefault(row["impl"], []).append(row)
    parts = [f"{name} {_listed(row['equal_prefix'] for row in of_name)}" for name, of_name in by_name.items()]
    batches = _listed(row["batch"] for row in next(iter(by_name.values())))
    decode = [row for row in rows if row["phase"] == "decode"]
    own = sorted({row["impl"] for row in decode if not row["repeats_itself"]})
    sentence = (
        f"Greedy tokens, of {found[0]['tokens_out']}, before the first that differs from "
        f"{found[0]['same_tokens_as']}'s, mean at batch {batches}: {'; '.join(parts)}. "
    )
    if own:
        sentence += f"Gave other tokens when repeated: {', '.join(own)}."
    elif all(row.get("runs", 1) > 1 for row in decode):  # older rows do not say whether they were repeated
        sentence += "All gave the same tokens when repeated."
    return textwrap.wrap(sentence, WIDTH)


def formats_that_ran(cases: Sequence[Sequence[Row]]) -> list[str]:
    """Lines of the section on models that w4gemm served alone, beside no kernel of vLLM's. cases: the rows of each."""
    decode = [[row for row in rows if row["phase"] == "decode"] for rows in cases]
    if not any(decode):
        return []
    batches = sorted({row["batch"] for rows in decode for row in rows})
    told = (
        "Models with random numbers that were served to see that they run, beside no kernel of vLLM's. Most have few "
        "layers, so that a step is mostly not of 4-bit products. Kernels: how many layers each of w4gemm's classes "
        "took over. Decode: ms a step."
    )
    heads = ("format", "GPU", "kernels", *(f"batch {batch}" for batch in batches))
    lines = ["", "## Ran alone", "", *textwrap.wrap(told, WIDTH), "", table_line("model", heads)]
    lines.append("|---" * (len(heads) + 1) + "|")
    for rows in decode:
        if rows:
            first, ms = rows[0], {row["batch"]: f"{row['ms_step']:.2f}" for row in rows}
            kernels = ", ".join(f"{count} {name}" for name, count in first.get("kernels", {}).items())
            cells = (
                first["format"],
                gpus_text(first["gpu"], first["gpus"]),
                kernels,
                *(ms.get(batch, "-") for batch in batches),
            )
            lines.append(table_line(first["model"], cells))
    for row in (row for rows in cases for row in rows if row["phase"] == "moves"):
        lines += ["", *textwrap.wrap(_moves(row), WIDTH)]
    return lines


def gpus_text(gpu: str, count: int) -> str:
    return f"{count} x {gpu}" if count > 1 else gpu


def _moves(row: Row) -> str:
    """A sentence on experts that vLLM moved between GPUs while it served."""
    after = "as they were loaded" if row["intact"] else "not as they were loaded"
    where = gpus_text(row["gpu"], row["gpus"])
    return (
        f"{row['model']}, {row['format']}, {where}: vLLM moved experts between GPUs (EPLB). "
        f"{row['moved']:,} of {row['places']:,} places had another expert at the end, and the weights of all experts "
        f"were {after}, by their checksums."
    )


def layers_of_experts(rows: Sequence[Row]) -> list[str]:
    """Lines of the section on layers of experts alone: a table for each model and GPU. rows: those of the last run of
    each."""
    tables: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        tables.setdefault((row["model"], row["gpu"]), []).append(row)
    lines = ["", "## One layer of experts"] if rows else []
    for own in tables.values():
        lines += ["", *_layer_of_experts(own)]
    return lines


def _layer_of_experts(rows: Sequence[Row]) -> list[str]:
    """A sentence on what was timed, and the table."""
    first = rows[0]
    us = {(row["batch"], row["impl"]): row["us"] for row in rows}
    tokens = list(dict.fromkeys(row["batch"] for row in rows))
    names = list(dict.fromkeys(row["impl"] for row in rows))
    ratios = {t: us[t, names[1]] / us[t, OURS] for t in tokens}
    few = mean([ratio for t, ratio in ratios.items() if t <= 64])
    told = (
        f"One layer of {first['model']}, {first['format'].replace('-', ' ')}, {first['gpu']}, all that comes after its "
        "router: sorting the choices, both products, silu(gate) * up, the weighted sum; CUDA graphs, weights from "
        "memory, experts equally likely (`python -m bench.engine.layer`). Geometric mean of the gain at 1 to 64 "
        f"tokens: {few:.2f}."
    )
    table = [table_line("tokens", map(str, tokens)), table_line("---", ["---"] * len(tokens)).replace(" ", "")]
    for name in names:
        table.append(table_line(f"{name}, us", (f"{us[t, name]:.1f}" for t in tokens)))
    table.append(table_line("gain", (f"{ratio:.2f}" for ratio in ratios.values())))
    return [*textwrap.wrap(told, WIDTH), "", *table]


def predictions(rows: Sequence[Row]) -> list[str]:
    """Lines of the section on a real model's next tokens; of the last run of each format."""
    if not rows:
        return []
    runs = {row["format"]: row["run"] for row in rows}
    kept = [row for row in rows if row["run"] == runs[row["format"]]]
    sentence = (
        f"{kept[0]['model']}, quantized anew, reads {kept[0]['positions']} tokens of text (`python -m "
        "bench.engine.agreement`). What each implementation predicts after each token is compared with what vLLM "
        "predicts with the same numbers as bf16 matrices: mean and largest divergence (KL) in nats, how often the "
        f"likeliest token is the same, and how many of {kept[0]['tokens_out']} greedy tokens come before the first "
        "that differs."
    )
    lines = ["", "## Next tokens of a real model", "", *textwrap.wrap(sentence, WIDTH), ""]
    heads = "format", "kernel", "mean KL", "largest KL", "same likeliest token", "greedy tokens"
    lines += [table_line(heads[0], heads[1:]), "|---" * len(heads) + "|"]
    for row in kept:
        kl = f"{row['kl_mean']:.2g}", f"{row['kl_max']:.2g}"
        lines.append(table_line(row["format"], (row["impl"], *kl, f"{row['top1']:.1%}", f"{row['equal_prefix']:.0f}")))
    return lines


def table_line(name: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join((name, *cells))} |"


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:.0f}" for number in numbers)
