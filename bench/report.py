"""Tables and plots of one run of ``bench.run``: ``python -m bench.report [FILE]`` writes docs/benchmarks.md,
docs/benchmarks.html and docs/plots/. Only rows of one run are compared. Needs matplotlib."""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import html

from w4gemm.tuning import roofline

ROOT = Path(__file__).parent.parent
GROUPS = {"1 to 16": (1, 16), "32, 64": (32, 64), "128, 256": (128, 256), "512 to 8192": (512, 8192)}
RATES = BYTES_PER_US, FLOP_PER_US = roofline.RATES["NVIDIA H200"][:2]

Point = tuple[int, int, int]
Times = dict[Point, dict[str, float]]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m bench.report", description=(__doc__ or "").partition(":")[0])
    parser.add_argument(
        "file", nargs="?", default=str(ROOT / "bench/results/times.jsonl"), help="(default: %(default)s)"
    )
    path = parser.parse_args(argv).file
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "time" and row["run"] == rows[-1]["run"]]
    times: Times = defaultdict(dict)
    for row in rows:
        times[row["n"], row["k"], row["m"]][row["impl"]] = row["us_p50"]
    versions = {row["impl"]: row["impl_version"] for row in rows}
    plot(times, list(versions))
    (ROOT / "docs/benchmarks.md").write_text(text(rows[0], times, versions))
    (ROOT / "docs/benchmarks.html").write_text(html.page(times, rows[0], versions, RATES, roofline_us, ratio))


def roofline_us(point: Point) -> float:
    """max(bytes / 4.5 TB/s, operations / 790 TFLOP/s) of int4 g128 with bf16 activations."""
    n, k, m = point
    size = n * k / 2 + 2 * n * k / 128 + 2 * m * (n + k)
    return max(size / BYTES_PER_US, 2 * m * n * k / FLOP_PER_US)


def ratio(us: dict[str, float]) -> float:
    """The best peer's time over ours."""
    return min(t for name, t in us.items() if name != "w4gemm") / us["w4gemm"]


def text(row: dict[str, Any], times: Times, versions: dict[str, str]) -> str:
    names = list(versions)
    lines = [
        "# Benchmarks",
        "",
        f"W4A16, int4 g128 symmetric, bf16, on one {row['gpu']} (driver {row['driver']}, torch {row['torch']}), run",
        f"`{row['run']}`: all implementations interleaved in one process, microseconds a call in a CUDA graph over",
        "rotating weights, medians (the protocol of `bench/run.py`; rows in bench/results/times.jsonl). w4gemm runs",
        "what it chooses unasked. Machete, Marlin: vLLM's; cublas: bf16 weights.",
        "",
        "Versions: " + ", ".join(f"{name} {version}".strip() for name, version in versions.items()) + ".",
        "",
        "| m | best peer / w4gemm, geometric mean | worst point |",
        "|---|---|---|",
    ]
    for name, (first, last) in GROUPS.items():
        found = sorted((ratio(us), p) for p, us in times.items() if first <= p[2] <= last)
        mean = math.exp(sum(math.log(r) for r, _ in found) / len(found))
        worst, (n, k, m) = found[0]
        lines.append(f"| {name} | {mean:.2f} | {worst:.2f} at {n}x{k}, m {m} |")
    lines += ["", "![Time over roofline](plots/roofline.svg)", ""]
    lines += [
        "| n x k | m | roofline | " + " | ".join(names) + " | best peer / w4gemm |",
        "|---" * (len(names) + 4) + "|",
    ]
    for point in sorted(times):
        n, k, m = point
        cells = [f"{times[point][name]:.1f}" if name in times[point] else "-" for name in names]
        lines.append(f"| {n}x{k} | {m} | {roofline_us(point):.1f} | {' | '.join(cells)} | {ratio(times[point]):.2f} |")
    return "\n".join(lines) + "\n"


def plot(times: Times, names: list[str]) -> None:
    """Time over roofline against m, a panel a layer, a line an implementation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers = sorted({(n, k) for n, k, _ in times})
    figure, panels = plt.subplots(1, len(layers), figsize=(4.2 * len(layers), 4.2), sharey=True, squeeze=False)
    for panel, (n, k) in zip(panels[0], layers, strict=True):
        tokens = sorted(m for a, b, m in times if (a, b) == (n, k))
        for name in names:
            ms = [m for m in tokens if name in times[n, k, m]]
            over = [times[n, k, m][name] / roofline_us((n, k, m)) for m in ms]
            style = {"linewidth": 2.6, "color": "black", "zorder": 3} if name == "w4gemm" else {"linewidth": 1.2}
            panel.plot(ms, over, marker=".", label=name, **style)
        panel.axhline(1, color="gray", linewidth=0.8, linestyle="--")
        panel.set(title=f"{n} x {k}", xscale="log", xlabel="m (tokens)", ylim=(0.8, 6))
        panel.set_xticks(tokens[::2], [str(m) for m in tokens[::2]], fontsize=7)
    panels[0][0].set_ylabel("time / roofline")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    folder = ROOT / "docs/plots"
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "roofline.svg")
    figure.savefig(folder / "roofline.png", dpi=110)


if __name__ == "__main__":
    main()
