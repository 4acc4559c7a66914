"""Plots of docs/plots, small SVG files whose text is text: :func:`heatmap`, :func:`scatter`, :func:`marks`. They
need matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_MOST = 3.0
"""Ratio from which on colors stay the same."""


Ratios = Mapping[str, Sequence[float | None]]
"""Ratios by name of the row; None leaves a cell empty."""


def heatmap(
    path: Path, title: str, columns: Sequence[str], panels: Mapping[str, Ratios], row_height: float = 0.36
) -> None:
    """Write tables of ratios side by side, blue where w4gemm is faster, red where it is slower.

    Args:
        columns: names below; a column without ratios is left out.
        panels: tables by title, with equal names of rows.
        row_height: in inches.
    """
    plt = _pyplot()
    every = [row for rows in panels.values() for row in rows.values()]
    used = [x for x in range(len(columns)) if any(row[x] is not None for row in every)]
    names = list(next(iter(panels.values())))
    width = max(0.085 * max(map(len, names)) + 0.74 * len(used) * len(panels), 0.075 * len(title))
    height = 0.8 + row_height * len(names) + 0.25 * any(panels)
    figure, axes = plt.subplots(
        1, len(panels), figsize=(width, height), sharey=True, squeeze=False, layout="constrained"
    )
    limit = math.log(_MOST)
    for of_panel, (name, rows) in zip(axes.flat, panels.items(), strict=True):
        cells = [[math.nan if row[x] is None else math.log(row[x]) for x in used] for row in rows.values()]
        of_panel.pcolormesh(cells, cmap="RdBu", vmin=-limit, vmax=limit, edgecolors="white", linewidth=2)
        for y, row in enumerate(rows.values()):
            for x, ratio in enumerate(row[x] for x in used):
                if ratio is not None:
                    color = "white" if abs(math.log(ratio)) > 0.55 * limit else "black"
                    where = {"ha": "center", "va": "center", "fontsize": 9}
                    of_panel.text(x + 0.5, y + 0.5, f"{ratio:.2f}", color=color, **where)
        of_panel.set_xticks([x + 0.5 for x in range(len(used))], [columns[x] for x in used], fontsize=8)
        of_panel.set_title(name, fontsize=9)
        of_panel.tick_params(length=0)
        for side in of_panel.spines.values():
            side.set_visible(False)
    axes.flat[0].set_yticks([y + 0.5 for y in range(len(names))], names, fontsize=9)
    axes.flat[0].invert_yaxis()
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def scatter(path: Path, title: str, series: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """Write a panel for each series of (tokens, ratio), with a line at 1; points below it are red."""
    plt = _pyplot()
    figure, panels = plt.subplots(
        1, len(series), figsize=(2.9 * len(series), 2.8), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, (name, points) in zip(panels.flat, series.items(), strict=True):
        colors = ["crimson" if ratio < 1 else "tab:blue" for _, ratio in points]
        panel.scatter([m for m, _ in points], [ratio for _, ratio in points], s=6, c=colors, rasterized=True)
        panel.axhline(1, color="gray", linewidth=0.8)
        panel.set_title(name, fontsize=9)
        panel.set(xscale="log", yscale="log")
        panel.set_xticks([1, 16, 128, 1024, 8192], ["1", "16", "128", "1024", "8192"], fontsize=8)
        panel.set_yticks([0.8, 1, 1.5, 2, 3, 4, 6], ["0.8", "1", "1.5", "2", "3", "4", "6"], fontsize=8)
        panel.minorticks_off()
        panel.set_xlabel("tokens", fontsize=8)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


class Mark(NamedTuple):
    """A percent in the row of its name, and the number of its kind."""

    name: str
    percent: float
    kind: int


_SYMBOLS = (
    ("o", "white", "tab:blue"),
    ("o", "tab:blue", "tab:blue"),
    ("^", "tab:red", "tab:red"),
    ("D", "tab:green", "tab:green"),
)
"""Markers of kinds, and their colours inside and outside."""


def marks(path: Path, title: str, kinds: Sequence[str], series: Mapping[str, Sequence[Mark]]) -> None:
    """Write a panel of rows for each series, in the order of the first one's names. kinds: names, at most four."""
    plt = _pyplot()
    names = list(dict.fromkeys(mark.name for marks in series.values() for mark in marks))
    size = (1.6 + 2.2 * len(series), 0.9 + 0.22 * len(names))
    shared = {"sharex": True, "sharey": True, "squeeze": False}
    figure, panels = plt.subplots(1, len(series), figsize=size, layout="constrained", **shared)
    for panel, (name, own) in zip(panels.flat, series.items(), strict=True):
        for i, (kind, (symbol, inside, edge)) in enumerate(zip(kinds, _SYMBOLS, strict=False)):
            some = [mark for mark in own if mark.kind == i]
            x, y = [mark.percent for mark in some], [names.index(mark.name) for mark in some]
            panel.scatter(x, y, s=20, marker=symbol, facecolors=inside, edgecolors=edge, zorder=2, label=kind)
        panel.set_title(name, fontsize=9)
        panel.set(xscale="log")
        panel.set_xticks([1, 10, 100, 1000], ["1 %", "10 %", "100 %", "1000 %"], fontsize=8)
        panel.minorticks_off()
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.grid(linewidth=0.3, zorder=0)
    panels.flat[0].invert_yaxis()
    panels.flat[0].legend(fontsize=7)
    figure.suptitle(title, fontsize=9)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    _pyplot().close(figure)


def _pyplot() -> Any:
    """Return ``matplotlib.pyplot``, set so that equal rows give equal files.

    Raises:
        SystemExit: without matplotlib.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise SystemExit("plots need matplotlib: pip install '.[bench]'") from None
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "w4gemm", "svg.fonttype": "none", "font.family": "sans-serif"})
    import matplotlib.pyplot as plt

    return plt
