"""The plot of docs/benchmarks-vllm.md."""

from __future__ import annotations

import re
from pathlib import Path

from bench.engine.implementations import OURS
from bench.engine.page import Case
from bench.engine.tables import by_line, names_of
from bench.plots import pyplot
from bench.rows import Row

_WORDS = re.compile(r"(\w+)(?:,| of) (?:batch )?(\d+).*")
"""A line's name, of which a group of bars shows what was done and how many requests or tokens there were."""


def plot(cases: dict[Case, list[Row]], file: Path) -> None:
    """Plot tokens/s over vLLM's choice: a panel a case in which that ran, a group of bars a line, a bar an
    implementation."""
    plt = pyplot()

    cases = {case: rows for case, rows in cases.items() if any(row["chosen"] for row in rows)}
    columns = min(2, len(cases)) or 1
    height = -(-len(cases) // columns)
    figure, panels = plt.subplots(height, columns, figsize=(4.6 * columns, 2.9 * height), squeeze=False)
    for panel in panels.flat[len(cases) :]:
        panel.set_visible(False)
    for panel, (case, rows) in zip(panels.flat, cases.items(), strict=False):
        names = names_of(rows)
        wanted = [r for r in rows if r["phase"] in ("decode", "prefill", "serve")]
        speeds = {name: found for name, (line, found) in by_line(wanted).items() if not line.is_time}
        groups = {name: found for name, found in speeds.items() if any(r["chosen"] for r in found)}
        for i, name in enumerate(names):
            gains = []
            for found in groups.values():
                base = next(row["tokens_s"] for row in found if row["chosen"])
                gains.append(next((row["tokens_s"] / base for row in found if row["impl"] == name), 0.0))
            color = {"color": "black"} if OURS in name else {}
            panel.bar(
                [x + i * 0.8 / len(names) for x in range(len(groups))],
                gains,
                0.8 / len(names),
                label=names[name],
                **color,
            )
        short = [_WORDS.sub(r"\1\n\2", name.partition(":")[0]).replace(" ", "\n") for name in groups]
        panel.set_xticks([x + 0.4 * (1 - 1 / len(names)) for x in range(len(groups))], short, fontsize=7)
        panel.axhline(1, color="gray", linewidth=0.8, linestyle="--")
        model, format, where = str(case).split(", ", 2)
        panel.set_title(f"{model}, {format}\n{where}", fontsize=9)
        panel.margins(y=0.2)
        panel.legend(fontsize=7, ncols=len(names), loc="upper center")
    figure.supylabel("tokens/s over vLLM's choice", fontsize=10)
    figure.supxlabel(
        "decode: batch; prefill: tokens of the prompt; serve: requests at a time, streamed or whole", fontsize=9
    )
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
