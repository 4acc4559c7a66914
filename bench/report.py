"""Make tables and plots of rows: ``python -m bench.report [FILE]``.

FILE is one that bench.run, bench.grouped, bench.unknown or bench.engine wrote. The page and the plot in docs/ of each
kind of work in it are written, and docs/benchmarks.html for W4A16. Only rows of one run are compared. Needs matplotlib.
"""

from __future__ import annotations

import statistics
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import html
from bench.drawn import page as unknown_page
from bench.engine import page as engine_page
from bench.engine.plot import plot as plot_engines
from bench.options import command
from bench.pages import METHOD, W4A16, Layer, Page, Times, kind_of_work, page_of
from bench.plots import pyplot
from bench.rows import read

ROOT = Path(__file__).parent.parent


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.report", __doc__)
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        type=Path,
        default=ROOT / "bench/results/times.jsonl",
        help="file of rows (default: %(default)s)",
    )
    path = parser.parse_args(argv).file
    if path.name.startswith("engine"):
        stored = read(path)
        engine_page.PAGE.write_text(engine_page.text(stored, path.name))
        plot_engines(engine_page.cases_of(stored), engine_page.PLOT)
    if path.name.startswith("unknown"):
        stored, (to, plotted) = read(path), unknown_page.paths(path)
        to.write_text(unknown_page.text(stored, path))
        unknown_page.plot(stored, plotted)
        return
    for rows in last_of_each_work(path):
        page = page_of(rows, path.name)
        if page is None:
            print(f"{rows[0]['work']} of {rows[0]['format']}: no page shows it")
            continue
        times, versions = by_point(rows)
        plot(page, times, list(versions))
        (ROOT / f"docs/{page.name}.md").write_text(text(page, rows, times, versions))
        if page is W4A16:
            (ROOT / "docs/benchmarks.html").write_text(html_page(times, rows[-1], versions))


def last_of_each_work(path: Path) -> list[list[dict[str, Any]]]:
    """Return, for each kind of work in a file, the rows that its page shows: of each point those of the last run that
    had peers, without forced choices (``w4gemm_config`` and the like)."""
    works: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in read(path):
        if row["kind"] == "time" and not row["impl"].startswith("w4gemm_"):
            works[kind_of_work(row)].append(row)
    found = []
    for rows in works.values():
        runs = {_point(row): row["run"] for row in rows if not row["impl"].startswith("w4gemm")}
        found.append([row for row in rows if row["run"] == runs.get(_point(row))])
    return found


def _point(row: dict[str, Any]) -> tuple[Layer, int]:
    return Layer(row["n"], row["k"], row.get("experts", 0), row.get("routing", "")), row["m"]


def html_page(times: Times, row: dict[str, Any], versions: dict[str, str]) -> str:
    """Return the W4A16 page as HTML."""
    by_sizes = {(layer.n, layer.k, m): us for (layer, m), us in times.items()}
    return html.page(
        by_sizes, row, versions, W4A16.rates, lambda p: W4A16.roofline_us((Layer(*p[:2]), p[2])), W4A16.ratio
    )


def by_point(rows: list[dict[str, Any]]) -> tuple[Times, dict[str, str]]:
    """Return microseconds by point, and the version of every implementation; several formats count as several.

    Raises:
        ValueError: if rows of a point are of several runs, which may not be compared.
    """
    times: Times = defaultdict(dict)
    versions: dict[str, str] = {}
    runs: dict[tuple[Layer, int], str] = {}
    for row in rows:
        name = f"{row['impl']} e4m3" if row["format"].endswith("_e4m3") else row["impl"]
        point = _point(row)
        run = runs.setdefault(point, row["run"])
        if run != row["run"]:
            raise ValueError(f"{point[0]}, m {point[1]}: wanted rows of one run, got some of {run} and {row['run']}")
        times[point][name] = row["us_p50"]
        versions[name] = row["impl_version"] or versions.get(name, "")
    return times, versions


def text(page: Page, rows: list[dict[str, Any]], times: Times, versions: dict[str, str]) -> str:
    """Return the page: means over ranges of tokens, a row for each point, and how they were measured."""
    row, runs = rows[-1], "`, `".join(dict.fromkeys(row["run"] for row in rows))
    names, grouped = list(versions), any(layer.experts for layer, _ in times)
    tokens = "tokens" if grouped else "m"
    ratio = f"best peer time / {page.ours} time"
    lines = [f"# {page.title}", ""]
    lines += textwrap.wrap(f"{page.what} One {row['gpu']}. A ratio above 1 means that {page.ours} is faster.", 120)
    lines += ["", f"| {tokens} | {ratio}, geometric mean | worst point |", "|---|---|---|"]
    for name, (first, last) in page.groups.items():
        found = sorted((page.ratio(us), p) for p, us in times.items() if first <= p[1] <= last)
        if not found:
            continue
        mean = statistics.geometric_mean(r for r, _ in found)
        worst, (layer, m) = found[0]
        lines.append(f"| {name} | {mean:.2f} | {worst:.2f} at {layer}, {tokens} {m} |")
    lines += ["", f"![Time over roofline](plots/{page.plot}.svg)", ""]
    lines += [
        *("## Every point", "", f"Microseconds per call, and {ratio}.", ""),
        f"| {'experts x ' if grouped else ''}n x k | {tokens} | roofline | " + " | ".join(names) + " | ratio |",
        "|---" * (len(names) + 4) + "|",
    ]
    for point in sorted(times):
        layer, m = point
        cells = [f"{times[point][name]:.1f}" if name in times[point] else "-" for name in names]
        over = page.ratio(times[point])
        lines.append(f"| {layer} | {m} | {page.roofline_us(point):.1f} | {' | '.join(cells)} | {over:.2f} |")
    script, peers = "grouped" if grouped else "run", page.notes_on(names)
    method = [
        *(sentence.format(file=page.file, script=script, peers=peers).strip() for sentence in (*METHOD, *page.method)),
        f"Roofline: max(bytes / {page.rates.bytes / 1e6:g} TB/s, operations / {page.rate / 1e6:,.0f} TFLOP/s), the "
        "rates that large library matmuls reach on this GPU.",
        "Versions: " + ", ".join(f"{name} {version}".strip() for name, version in versions.items()) + ".",
        f"Driver {row['driver']}, torch {row['torch']}; run `{runs}`.",
    ]
    lines += ["", "## How it was measured", ""]
    for sentence in method:
        lines += textwrap.wrap(f"- {sentence}", 120, subsequent_indent="  ")
    return "\n".join(lines) + "\n"


COLORS = {
    "humming": "tab:blue",
    "machete": "tab:orange",
    "quack": "tab:green",
    "cublas": "tab:red",
    "marlin": "tab:purple",
    "torch_int4": "tab:brown",
    "bitsandbytes": "tab:gray",
    "cutlass_w4a8": "tab:pink",
}
"""The color of each peer, in every plot the same."""
OVER_ROOFLINE = (1, 1.5, 2, 3, 4, 6, 8)
"""Ticks of time over roofline; slower peers leave the plot."""


def plot(page: Page, times: Times, names: list[str]) -> None:
    """Plot time over roofline against m, a panel per layer, a line per implementation; experts if routed evenly. What
    has its scales in e4m3 is dashed."""
    plt = pyplot()

    layers = sorted({layer for layer, _ in times if layer.routing in ("", "balanced")})
    rows = -(-len(layers) // 2)
    # two columns: more would shrink the words on a page's width
    figure, panels = plt.subplots(
        rows, 2, figsize=(8.4, 3.1 * rows + 0.7), sharey=True, squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(layers) :]:
        panel.set_visible(False)
    for panel, layer in zip(panels.flat, layers, strict=False):
        tokens = sorted(m for own, m in times if own == layer)
        for name in names:
            ms = [m for m in tokens if name in times[layer, m]]
            over = [times[layer, m][name] / page.roofline_us((layer, m)) for m in ms]
            ours = name.startswith(page.ours)
            color = "black" if ours else COLORS[name.removesuffix(" e4m3")]
            style = {"linewidth": 2.6, "zorder": 3} if ours else {"linewidth": 1.2}
            line = "--" if name.endswith(" e4m3") else "-"
            panel.plot(ms, over, line, marker=".", label=name, color=color, **style)
        panel.axhline(1, color="gray", linewidth=0.8, linestyle=":")
        title, shown = str(layer).replace("x", " x "), tokens[:: 2 if len(tokens) > 9 else 1]
        panel.set_title(f"{title} ({'experts x ' if layer.experts else ''}n x k)", fontsize=10)
        panel.set(xscale="log", yscale="log", ylim=(0.9, OVER_ROOFLINE[-1]))
        panel.set_xticks(shown, [str(m) for m in shown], fontsize=8)
        panel.set_yticks(OVER_ROOFLINE, [str(tick) for tick in OVER_ROOFLINE], fontsize=8)
        panel.minorticks_off()
        panel.grid(axis="y", alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("tokens per expert" if layers[0].experts else "m (tokens)")
    figure.supylabel("time / roofline", fontsize=10)
    lines, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=min(4, len(names)), fontsize=9)
    folder = ROOT / "docs/plots"
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{page.plot}.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
