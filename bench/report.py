"""Tables and plots of a run of ``bench.run``, ``bench.grouped``, ``bench.unknown`` or ``bench.engine``.

``python -m bench.report [FILE]``.

Writes the page and the plot in docs/ for each kind of work in FILE, and docs/benchmarks.html for W4A16. Only rows of
one run are compared. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench import html
from bench.drawn import page as unknown_page
from bench.engine import page as engine_page
from bench.engine.plot import plot as plot_engines
from bench.shapes import divide

from w4gemm.tuning import roofline

ROOT = Path(__file__).parent.parent
GROUPS = {"1 to 16": (1, 16), "32, 64": (32, 64), "128, 256": (128, 256), "512 to 8192": (512, 8192)}
GROUPED = {"1 to 64": (1, 64), "128 to 1024": (128, 1024)}
"""Ranges of tokens per expert."""
RATES = roofline.RATES["NVIDIA H200"]


class Layer(NamedTuple):
    n: int
    k: int
    experts: int = 0
    """0 for a single weight."""
    routing: str = ""
    """Division of the tokens among experts, see ``bench.grouped``."""

    def __str__(self) -> str:
        sizes = f"{self.experts}x{self.n}x{self.k}" if self.experts else f"{self.n}x{self.k}"
        return sizes if self.routing in ("", "balanced") else f"{sizes} {self.routing}"


Point = tuple[Layer, int]
"""(layer, tokens; with experts, tokens per expert on average)."""
Times = dict[Point, dict[str, float]]


@dataclass(frozen=True)
class Page:
    """One page of benchmarks: its words, and what its ratios are of."""

    name: str
    """File name of the page in docs/, without an ending."""
    plot: str
    """File name of its plot in docs/plots/, without an ending."""
    title: str
    head: tuple[str, ...]
    """Paragraphs on what was measured; ``{file}`` is the file of the rows."""
    file: str
    activation_bytes: int
    rate: float
    """Operations per microsecond that large matmuls reach."""
    not_peers: tuple[str, ...] = ()
    """Implementations that are shown, but do not count as peers in a ratio."""
    ours: str = "w4gemm"
    """Beginning of the names of our implementations."""
    groups: dict[str, tuple[int, int]] = field(default_factory=lambda: GROUPS)
    """Ranges of tokens to take means over: (first, last) by name."""

    def roofline_us(self, point: Point) -> float:
        """max(bytes / 4.5 TB/s, operations / rate) of int4 g128 with 16-bit scales."""
        (n, k, experts, routing), m = point
        counts = divide(routing, m, experts) if experts else [m]
        weights = sum(count > 0 for count in counts) * (n * k / 2 + 2 * n * k / 128)
        size = weights + sum(counts) * (2 * n + self.activation_bytes * k)
        return max(size / RATES.bytes, 2 * sum(counts) * n * k / self.rate)

    def ratio(self, us: dict[str, float]) -> float:
        """The best peer's time over ours."""
        peers = [t for name, t in us.items() if not name.startswith((self.ours, *self.not_peers))]
        return min(peers) / min(t for name, t in us.items() if name.startswith(self.ours))


_METHOD = (
    "All implementations ran interleaved in one process (protocol: `bench/{script}.py`; rows: bench/results/{file}).",
    "Times are medians in microseconds per call, in a CUDA graph over copies of the weight that together exceed L2.",
)
_CHOICE = "w4gemm runs the config that it chooses by default."
_SCALES = (
    "w4gemm, quack, humming: bf16 group scales on float32 sums. The same with `e4m3`: group scales in e4m3, part of "
    "the e4m3 weight that is multiplied. cutlass_w4a8 is vLLM's."
)
_QUANTIZES = "humming takes bf16 x and quantizes it within the call"
_EXPERTS = (
    "Tokens are the average per expert. Routing is balanced unless a row says zipf (expert e in proportion to "
    "1 / (1 + e)) or hot (all tokens to one expert)."
)
W4A16 = Page(
    "benchmarks",
    "roofline",
    "W4A16 beside other libraries",
    ("int4 g128 symmetric weights, bf16 x.", *_METHOD, f"{_CHOICE} machete, marlin: vLLM's. cublas: bf16 weights."),
    "times.jsonl",
    2,
    RATES.operations,
)
W4A8 = Page(
    "benchmarks-w4a8",
    "roofline-w4a8",
    "W4A8 beside other libraries",
    (
        "int4 g128 symmetric weights, e4m3 x with one scale per token.",
        *_METHOD,
        _CHOICE,
        f"{_SCALES} {_QUANTIZES}, which takes about 3 us.",
        "cublas: the same numbers as an fp8 weight, shown for what large matmuls reach, not counted as a peer.",
        "A ratio takes the faster of each library's two ways to scale.",
    ),
    "w4a8.jsonl",
    1,
    RATES.fp8_operations,
    ("cublas",),
)
SM80 = Page(
    "benchmarks-sm80",
    "roofline-sm80",
    "The kernel for GPUs before Hopper, on a Hopper GPU",
    (
        "`sm80_mixed_gemm`, forced: W4A16, int4 g128 symmetric weights, bf16 x.",
        *_METHOD,
        "It runs the config that its model ranks first. marlin: vLLM's. torch_int4: PyTorch's.",
    ),
    "sm80.jsonl",
    2,
    RATES.operations,
    ours="sm80_mixed_gemm",
)
GROUPED_W4A16 = Page(
    "benchmarks-grouped",
    "roofline-grouped",
    "Mixtures of experts in W4A16 beside other libraries",
    ("int4 g128 symmetric weights, bf16 x.", *_METHOD, f"{_CHOICE} vLLM and Quack have no such kernel.", _EXPERTS),
    "grouped.jsonl",
    2,
    RATES.operations,
    groups=GROUPED,
)
GROUPED_W4A8 = Page(
    "benchmarks-grouped-w4a8",
    "roofline-grouped-w4a8",
    "Mixtures of experts in W4A8 beside other libraries",
    (
        "int4 g128 symmetric weights, e4m3 x with one scale per token.",
        *_METHOD,
        _CHOICE,
        f"{_SCALES} {_QUANTIZES}.",
        "A ratio takes the faster of w4gemm's two ways to scale.",
        _EXPERTS,
    ),
    "grouped.jsonl",
    1,
    RATES.fp8_operations,
    groups=GROUPED,
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m bench.report", description=(__doc__ or "").partition(":")[0])
    parser.add_argument(
        "file", nargs="?", default=str(ROOT / "bench/results/times.jsonl"), help="(default: %(default)s)"
    )
    path = Path(parser.parse_args(argv).file)
    if path.name.startswith("engine"):
        stored = [json.loads(line) for line in path.read_text().splitlines()]
        engine_page.PAGE.write_text(engine_page.text(stored, path.name))
        plot_engines(engine_page.cases_of(stored), engine_page.PLOT)
    if path.name.startswith("unknown"):
        stored = [json.loads(line) for line in path.read_text().splitlines()]
        unknown_page.PAGE.write_text(unknown_page.text(stored, path.name))
        unknown_page.plot(stored)
        return
    for rows in last_of_each_work(path):
        page = page_of(rows)
        times, versions = by_point(rows)
        plot(page, times, list(versions))
        (ROOT / f"docs/{page.name}.md").write_text(text(page, rows, times, versions))
        if page is W4A16:
            (ROOT / "docs/benchmarks.html").write_text(html_page(times, rows[-1], versions))


def last_of_each_work(path: Path) -> list[list[dict[str, Any]]]:
    """Return, for each kind of work in a file, the rows that its page shows: those of the last row's commit, for each
    point those of the last run, without forced choices (``w4gemm_config`` and the like)."""
    works: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "time" and not row["impl"].startswith("w4gemm_"):
            works[row["work"]].append(row)
    found = []
    for rows in works.values():
        rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
        runs = {_point(row): row["run"] for row in rows}
        found.append([row for row in rows if row["run"] == runs[_point(row)]])
    return found


def _point(row: dict[str, Any]) -> tuple[Layer, int]:
    return Layer(row["n"], row["k"], row.get("experts", 0), row.get("routing", "")), row["m"]


def html_page(times: Times, row: dict[str, Any], versions: dict[str, str]) -> str:
    """Return the W4A16 page as HTML."""
    by_sizes = {(layer.n, layer.k, m): us for (layer, m), us in times.items()}
    return html.page(by_sizes, row, versions, RATES, lambda p: W4A16.roofline_us((Layer(*p[:2]), p[2])), W4A16.ratio)


def page_of(rows: list[dict[str, Any]]) -> Page:
    """The page that rows of one run are for."""
    named = {"w4a8": W4A8, "w4a8_grouped": GROUPED_W4A8, "w4a16_grouped": GROUPED_W4A16}
    if rows[0]["work"] in named:
        return named[rows[0]["work"]]
    return SM80 if any(row["impl"] == SM80.ours for row in rows) else W4A16


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
        versions[name] = row["impl_version"]
    return times, versions


def text(page: Page, rows: list[dict[str, Any]], times: Times, versions: dict[str, str]) -> str:
    """Return the page: how it was measured, means over ranges of tokens, and a row for each point."""
    row, runs = rows[-1], "`, `".join(dict.fromkeys(row["run"] for row in rows))
    names, grouped = list(versions), any(layer.experts for layer, _ in times)
    tokens = "tokens" if grouped else "m"
    ratio = f"best peer time / {page.ours} time"
    machine = f"One {row['gpu']}, driver {row['driver']}, torch {row['torch']}; run `{runs}`."
    script = "grouped" if grouped else "run"
    lines = [f"# {page.title}", "", f"- {machine}"]
    for sentence in page.head:
        sentence = sentence.format(file=page.file, script=script)
        lines += textwrap.wrap(f"- {sentence}", 120, subsequent_indent="  ")
    lines += [
        "- Versions: " + ", ".join(f"{name} {version}".strip() for name, version in versions.items()) + ".",
        "- Roofline: max(bytes / 4.5 TB/s, operations / "
        + f"{page.rate / 1e6:,.0f} TFLOP/s), what large library matmuls reach on this GPU.",
        "",
        f"| {tokens} | {ratio}, geometric mean | worst point |",
        "|---|---|---|",
    ]
    for name, (first, last) in page.groups.items():
        found = sorted((page.ratio(us), p) for p, us in times.items() if first <= p[1] <= last)
        if not found:
            continue
        mean = math.exp(sum(math.log(r) for r, _ in found) / len(found))
        worst, (layer, m) = found[0]
        lines.append(f"| {name} | {mean:.2f} | {worst:.2f} at {layer}, {tokens} {m} |")
    lines += ["", f"![Time over roofline](plots/{page.plot}.svg)", ""]
    lines += [
        f"| {'experts x ' if grouped else ''}n x k | {tokens} | roofline | " + " | ".join(names) + f" | {ratio} |",
        "|---" * (len(names) + 4) + "|",
    ]
    for point in sorted(times):
        layer, m = point
        cells = [f"{times[point][name]:.1f}" if name in times[point] else "-" for name in names]
        over = page.ratio(times[point])
        lines.append(f"| {layer} | {m} | {page.roofline_us(point):.1f} | {' | '.join(cells)} | {over:.2f} |")
    return "\n".join(lines) + "\n"


def plot(page: Page, times: Times, names: list[str]) -> None:
    """Plot time over roofline against m, a panel per layer, a line per implementation; experts if routed evenly."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "w4gemm"  # the same rows give the same file
    import matplotlib.pyplot as plt

    layers = sorted({layer for layer, _ in times if layer.routing in ("", "balanced")})
    rows = -(-len(layers) // 4)
    columns = -(-len(layers) // rows)
    size = (4.2 * columns, 4.2 * rows)
    figure, panels = plt.subplots(rows, columns, figsize=size, sharey=True, squeeze=False)
    for panel in panels.flat[len(layers) :]:
        panel.set_visible(False)
    for panel, layer in zip(panels.flat, layers, strict=False):
        tokens = sorted(m for own, m in times if own == layer)
        for name in names:
            ms = [m for m in tokens if name in times[layer, m]]
            over = [times[layer, m][name] / page.roofline_us((layer, m)) for m in ms]
            style = {"linewidth": 2.6, "color": "black", "zorder": 3} if name == page.ours else {"linewidth": 1.2}
            if name == "w4gemm e4m3":
                style = {"linewidth": 2.6, "color": "dimgray", "zorder": 3}
            panel.plot(ms, over, marker=".", label=name, **style)
        panel.axhline(1, color="gray", linewidth=0.8, linestyle="--")
        title, shown = str(layer).replace("x", " x "), tokens[:: 2 if len(tokens) > 7 else 1]
        panel.set(title=title, xscale="log", xlabel="tokens of an expert" if layer.experts else "m (tokens)")
        panel.set(ylim=(0.8, 6))
        panel.set_xticks(shown, [str(m) for m in shown], fontsize=7)
        panel.minorticks_off()
    panels[0][0].set_ylabel("time / roofline")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    folder = ROOT / "docs/plots"
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{page.plot}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
