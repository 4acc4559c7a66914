"""What a page of benchmarks says of engines: :func:`sections`."""

from __future__ import annotations

from collections.abc import Sequence

from bench.engine.summary import COLUMNS, cases_of, in_vllm, mean_gains, turns_of
from bench.markdown import paragraph, table
from bench.rows import Row

_FEW = ("1", "8", "64", "2048 to 8192")
"""Columns of the tables of turns."""


def sections(rows: Sequence[Row], turns: Sequence[Row], plot: str) -> list[str]:
    """Return the lines of one GPU's page.

    Args:
        rows: of engine.jsonl and sglang.jsonl.
        turns: of engine_pair.jsonl.
        plot: vLLM's, as Markdown.
    """
    lines: list[str] = []
    for engine, name in (("vllm", "vLLM"), ("sglang", "SGLang")):
        cases = {case: gains for case, gains in cases_of(rows).items() if case.engine == engine}
        if not cases:
            continue
        columns = [c for c in COLUMNS if any(c in gains for gains in cases.values())]
        lines += ["", f"## Inside {name}", ""]
        shown = {gain.row["phase"]: gain.row for gains in cases.values() for gain in gains.values()}
        long = f" ({shown['prefill']['tokens_in']} for a prefill)" if "prefill" in shown else ""
        lines += paragraph(
            f"Time of a decode step, or of a prefill, with the kernels that {name} chooses / with w4gemm, and in "
            f"parentheses with the fastest of {name}'s kernels where more ran. Prompts of 128 tokens{long}, greedy "
            f"answers of {shown['decode']['tokens_out']}; medians. Checkpoints have published shapes and random "
            "numbers."
        )
        lines += ["", plot] if engine == "vllm" else []
        cells: list[tuple[object, ...]] = []
        for case, gains in cases.items():
            commits = ", ".join(dict.fromkeys(gain.row["commit"][:7] for gain in gains.values()))
            cells.append((case, *(gains.get(column, "") for column in columns), commits))
        if engine == "vllm":
            means = ("" if mean is None else f"{mean:.2f}" for mean in mean_gains(in_vllm(rows), columns))
            cells.append(("**geometric mean**", *means, ""))
        lines += ["", *table(("model", *columns, "commit"), cells)]
        lines += [*served(rows), *by_turns(turns)] if engine == "vllm" else []
    return lines


def served(rows: Sequence[Row]) -> list[str]:
    """Return the table of servers under load, and what its rows note."""
    cases = cases_of(rows, ("serve",))
    if not cases:
        return []
    columns = sorted({column for gains in cases.values() for column in gains}, key=_numbers)
    sentence = (
        "Under load (`vllm serve`, in 0.33 without torch.compile), the same ratio of tokens/s, answers streamed unless "
        "whole; in parentheses how far the turns of a server differ, if by over 5 %:"
    )
    cells = []
    for case, gains in cases.items():
        row = next(iter(gains.values())).row
        measured = f"{row['engine_version']}, {row['commit'][:7]}"
        cells.append((case, *(gains.get(column, "") for column in columns), measured))
    lines = ["", *paragraph(sentence), "", *table(("model", *columns, "vLLM, commit"), cells)]
    notes = {row["note"] for row in rows if row["phase"] == "serve" and "note" in row}
    return lines + [line for note in sorted(notes) for line in ("", *paragraph(note))]


def by_turns(rows: Sequence[Row]) -> list[str]:
    """Return the tables of engines that took turns in one process: of their layers alone, and of whole engines."""
    lines: list[str] = []
    turns = turns_of(rows)
    for parts, what in ((("linear layers", "experts"), "Layers"), (("whole",), "Whole engines")):
        own = {case: _of_few_columns(ratios) for case, ratios in turns.items() if case.part in parts}
        if what == "Layers":  # one cell says little beside a whole engine's
            own = {case: ratios for case, ratios in own.items() if len(ratios) > 1} or own
        if not own:
            continue
        columns = [column for column in _FEW if any(column in ratios for ratios in own.values())]
        engines = ", ".join(sorted({case.engine.replace("vllm", "vLLM") for case in own}))
        sentence = (
            f"{what}, by turns in one process of {engines} (commits are in `bench/results/engine_pair.jsonl`): time "
            "over w4gemm's, by tokens of a step. An asterisk marks what vLLM chooses."
        )
        cells = (
            (case, case.part, case.other, *(ratios.get(column, "") for column in columns))
            for case, ratios in own.items()
        )
        lines += ["", *paragraph(sentence), "", *table(("model, format", "part", "kernels", *columns), cells)]
    return lines


def _of_few_columns(ratios: dict[str, str]) -> dict[str, str]:
    """Return the ratios by the columns of ``_FEW``; the last has the fewest tokens that were timed."""
    many = {int(column.split()[-1]): ratio for column, ratio in ratios.items()}
    kept = {column: ratio for column, ratio in ratios.items() if column in _FEW}
    return kept | next(({_FEW[-1]: many[size]} for size in sorted(many) if size >= 2048), {})


def _numbers(column: str) -> tuple[bool, int]:
    return "whole" in column, int(column.split()[0])
