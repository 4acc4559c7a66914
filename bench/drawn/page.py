"""The page of layers that nobody tuned on one kind of GPU, from rows, and its plot.

``unknown.jsonl`` makes docs/benchmarks-unknown.md and docs/plots/unknown.svg; ``unknown_h100.jsonl`` makes
docs/benchmarks-unknown-h100.md, and so on.
"""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from bench.plots import pyplot
from bench.rows import Row

from w4gemm.core.problem import H200

ROOT = Path(__file__).resolve().parents[2]
TITLES = {
    "w4a16": "W4A16: int4 g128, bf16 x",
    "w4a8_exact": "W4A8, group scales on float32 sums (exact)",
    "w4a8_folded": "W4A8, group scales in e4m3 weights (folded)",
}
GROUPS = ((1, 16), (17, 64), (65, 333), (334, 8192))
_WORST = 8
_COMPARED = (("", "us_p50"), ("best_", "best_config_us"))
_WHAT = (
    "How fast w4gemm is on layers that no shipped table has, that the cost model was not fitted to, and that nobody "
    "tuned: every config is the model's first guess. One {gpu}."
)
_TERMS = (
    "Ratio: best peer's time / w4gemm's time; above 1 w4gemm is faster. Means are geometric.",
    "Regret: time of the first choice / time of the fastest of up to {configs} of w4gemm's best guesses.",
)
_METHOD = (
    "Layers were drawn at random from the sizes of real models and of their shards, each at four ragged m, one in each "
    "quarter of log2(1 .. 8192) (`bench/drawn/points.py`).",
    "All implementations of a point ran interleaved in one process (`python -m bench.unknown`, rows: "
    "bench/results/{file}). Times are medians in microseconds per call, in a CUDA graph over copies of the weight "
    "that together exceed L2.",
    "If several runs timed a point, the one with the most peers is shown; only times of one run are compared. {peers}",
    "A peer that cannot run a point does not count there. cuBLAS multiplies bf16 weights and counts as a peer with "
    "bf16 x. With e4m3 x it multiplies e4m3 weights, which have twice the bytes, and does not count.",
)


class Point(NamedTuple):
    """One problem, with everybody's times."""

    kind: str
    n: int
    k: int
    m: int
    us: dict[str, float]
    """By implementation, of one run."""
    own: Row
    """w4gemm's row of that run."""
    compared: Row | None = None
    """w4gemm's row of the last run that also timed its other configs."""

    def __str__(self) -> str:
        return f"{self.n}x{self.k}, m {self.m}"

    @property
    def ratio(self) -> float | None:
        """The best peer's time over ours; None without a peer."""
        return min(self.peers.values()) / self.us["w4gemm"] if self.peers else None

    @property
    def peers(self) -> dict[str, float]:
        """Times of the peers that count."""
        passed_over = {"w4gemm"} if self.kind == "w4a16" else {"w4gemm", "cublas"}
        return {name: us for name, us in self.us.items() if name not in passed_over}

    @property
    def regret(self) -> float | None:
        """Our time over that of the best config; None where only the choice was timed."""
        row = self.compared
        return None if row is None else float(row["us_p50"] / row["best_config_us"])


def paths(file: Path) -> tuple[Path, Path]:
    """The page and the plot of a file of rows."""
    name = file.stem.replace("_", "-")
    return ROOT / f"docs/benchmarks-{name}.md", ROOT / f"docs/plots/{name}.svg"


def points_of(rows: Iterable[Row]) -> list[Point]:
    """The points of a file, without those that w4gemm did not run: each as the last run that has the most peers."""
    runs: dict[tuple[Any, ...], dict[str, dict[str, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        runs[row["gpu"], row["work"], row["n"], row["k"], row["m"]][row["run"]][row["impl"]] = row
    found = []
    for (_, *which), by_run in runs.items():
        own = [by_name for by_name in by_run.values() if "w4gemm" in by_name]
        if own:
            shown = max(reversed(own), key=len)
            compared = [by_name["w4gemm"] for by_name in own if "best_config_us" in by_name["w4gemm"]]
            us = {name: row["us_p50"] for name, row in shown.items()}
            found.append(Point(*which, us, shown["w4gemm"], compared[-1] if compared else None))
    return found


def text(rows: Sequence[Row], file: Path) -> str:
    """Return the page of a file's rows, which are of one kind of GPU."""
    last = rows[-1]
    versions = {row["impl"]: row["impl_version"] for row in rows}
    configs = max((row.get("configs", 0) for row in rows), default=0)
    points = points_of(rows)
    others = "" if last["gpu"] == H200.name else f": {last['gpu']}"
    lines = [f"# Untuned layers{others}", "", *textwrap.wrap(_WHAT.format(gpu=last["gpu"]), 120), ""]
    for sentence in _TERMS[: 2 if configs else 1]:
        lines += textwrap.wrap(f"- {sentence.format(configs=configs)}", 120, subsequent_indent="  ")
    lines += ["", f"![Best peer's time over w4gemm's](plots/{paths(file)[1].name})"]
    for kind, title in TITLES.items():
        if own := [point for point in points if point.kind == kind]:
            lines += ["", f"## {title}", ""]
            if all(point.ratio is None and point.regret is None for point in own):
                lines.append(f"{len(own)} points ran, beside no peer and no other config.")
            else:
                lines += [*_summary(own), *_by_peer(own), *_worst(own)]
    listed = ", ".join(f"{name} {version}".strip() for name, version in versions.items())
    runs = "`, `".join(dict.fromkeys(row["run"] for row in rows))
    facts = f"Versions: {listed}.", f"Driver {last['driver']}, torch {last['torch']}; run `{runs}`."
    lines += ["", "## How it was measured", ""]
    for sentence in (*_METHOD, *facts):
        found = sentence.format(file=file.name, peers=_peers_of(points))
        lines += textwrap.wrap(f"- {found}", 120, subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def _peers_of(points: list[Point]) -> str:
    """Say how many points were timed beside which peers."""
    counts = Counter(", ".join(sorted(set(point.us) - {"w4gemm"})) or "none" for point in points)
    return "Points by peers: " + "; ".join(f"{count} beside {names}" for names, count in counts.most_common()) + "."


def _summary(points: list[Point]) -> list[str]:
    lines = [
        "| m | points | ratio, mean | ratio, worst | behind | behind by over 3 % | regret, mean | regret, worst |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for first, last in (*GROUPS, (1, GROUPS[-1][1])):
        own = [point for point in points if first <= point.m <= last]
        ratios = [ratio for point in own if (ratio := point.ratio) is not None]
        regrets = [regret for point in own if (regret := point.regret) is not None]
        cells = [f"{first} to {last}", str(len(own))]
        if ratios:
            behind = [sum(ratio < least for ratio in ratios) / len(ratios) for least in (1, 0.97)]
            cells += [f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f}", *(f"{part:.0%}" for part in behind)]
        else:
            cells += ["-"] * 4
        cells += [f"{geometric_mean(regrets):.3f}", f"{max(regrets):.2f}"] if regrets else ["-"] * 2
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _by_peer(points: list[Point]) -> list[str]:
    """How much faster w4gemm is than each peer; none if there is no peer."""
    names = sorted({name for point in points for name in point.peers})
    if not names:
        return []
    heads = [f"{first} to {last}" for first, last in GROUPS]
    lines = ["", f"| peer's time / w4gemm's, mean (points); m | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name in names:
        cells = [name]
        for first, last in GROUPS:
            own = [p.us[name] / p.us["w4gemm"] for p in points if first <= p.m <= last and name in p.peers]
            cells.append(f"{geometric_mean(own):.2f} ({len(own)})" if own else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _worst(points: list[Point]) -> list[str]:
    """The points furthest behind a peer, and those of the largest regret."""
    behind = sorted((p for p in points if p.ratio is not None), key=lambda p: p.ratio or 0)[:_WORST]
    lost = sorted((p for p in points if p.regret is not None), key=lambda p: -(p.regret or 0))[:_WORST]
    lines = ["", "| furthest behind | ratio | w4gemm | its config | peers |", "|---|---|---|---|---|"] if behind else []
    for p in behind:
        peers = ", ".join(f"{name} {us:.1f}" for name, us in sorted(p.us.items()) if name != "w4gemm")
        lines.append(f"| {p} | {p.ratio:.2f} | {p.us['w4gemm']:.1f} | {p.own['config']} | {peers} |")
    if lost:
        lines += ["", "| largest regret | regret | first choice | fastest |", "|---|---|---|---|"]
    for p in lost:
        assert p.compared is not None
        first, best = (f"{p.compared[f'{of}config']} {p.compared[us]:.1f}" for of, us in _COMPARED)
        lines.append(f"| {p} | {p.regret:.2f} | {first} | {best} |")
    return lines


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plot each point's ratio against m, a panel for each kind of work with peers; behind a peer in red."""
    plt = pyplot()

    points = points_of(rows)
    compared = {point.kind for point in points if point.ratio is not None}
    kinds = [kind for kind in TITLES if kind in compared] or [points[0].kind]
    figure, panels = plt.subplots(1, len(kinds), figsize=(4.6 * len(kinds), 4), sharey=True, squeeze=False)
    for panel, kind in zip(panels.flat, kinds, strict=True):
        own = [(point.m, ratio) for point in points if point.kind == kind and (ratio := point.ratio) is not None]
        for color, label, behind in (("black", "w4gemm is faster", False), ("crimson", "the peer is faster", True)):
            some = [pair for pair in own if (pair[1] < 1) == behind]
            panel.scatter([m for m, _ in some], [ratio for _, ratio in some], s=9, c=color, label=label)
        panel.axhline(1, color="gray", linewidth=0.8, linestyle="--")
        panel.set(title=TITLES[kind], xscale="log", yscale="log", xlabel="m (tokens)")
        panel.set_xticks([1, 16, 64, 512, 8192], ["1", "16", "64", "512", "8192"])
        panel.set_yticks([0.8, 1, 1.25, 1.5, 2, 3, 4], ["0.8", "1", "1.25", "1.5", "2", "3", "4"])
        panel.minorticks_off()
    panels[0][0].set_ylabel("best peer's time / w4gemm's time")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
