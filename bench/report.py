"""Write the pages of benchmarks, their plots and the caption of README.md's: ``python -m bench.report``.

They are made of the rows in bench/results. ``--points FILE`` prints every point of one file of rows instead, and
``--text`` writes the pages without the plots, which need matplotlib.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import plots
from bench.engine import page as engine_page
from bench.engine import summary
from bench.markdown import image, paragraph, table, with_parts
from bench.options import command
from bench.points import (
    BEHIND,
    RANGES,
    STEP_NAMES,
    Kind,
    Point,
    by_kind,
    by_step,
    mean,
    of_newest_seed,
    points_of,
    within,
)
from bench.rows import Row, read

from w4gemm.tuning.roofline import LAUNCH_US, RATES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results"
PRODUCTS = (
    *("times", "w4a8", "fp4", "fp4_h100", "widths", "unknown", "unknown_h100"),
    *("grouped", "grouped_fp4", "grouped_fp4_h100"),
)
"""Files of timed products."""
TITLES = {
    "unknown": "Untuned layers",
    "tuned": "Layers of the shipped tables",
    "widths": "Other widths",
    "unknown_widths": "Other widths, untuned layers",
    "experts": "Mixtures of experts",
}
_WHAT = {
    "unknown": "Layers drawn at random from the sizes of real models and of their shards, each at four ragged numbers "
    "of tokens (`bench/drawn.py`). No shipped table has them, and when they were timed no constant had been fitted to "
    "them, so every config is the cost model's first guess.",
    "tuned": "6144 x 4096, 28672 x 4096, 8192 x 8192 and 8192 x 28672 (n x k).",
    "widths": "The second and third of these layers, or all, with weights of other widths than four bits, and as "
    "K-quants and IQ4_XS; all configs are the cost model's. FP8: e4m3 with a scale for each row, as E5M2; FP8_BLOCK: "
    "one for each 128 x 128, as DeepSeek has it, and then fp8 x has one for each 128 columns. Integers are symmetric, "
    "with a scale for 128 columns or, `_col`, for each row. No other library here multiplies GGUF's types, so cuBLAS "
    "with dense weights stands beside them.",
    "unknown_widths": "The same formats and layers drawn at random, as those of int4 above.",
    "experts": "Layers of published models; tokens are the mean for each expert, divided evenly, at random, or by "
    "Zipf's law (expert e in proportion to 1 / (1 + e)).",
}
_WORST = 8
README = ROOT / "README.md"
PLOT = ROOT / "docs/plots/products.svg"
"""README.md's plot, of both GPUs."""
_STEPS = {"1": (1, 1), "2-16": (2, 16), "17-64": (17, 64), "65-256": (65, 256), "257-8192": (257, 8192)}
"""Its columns: first and last number of tokens. The steps of :data:`summary.COLUMNS` fall into one each."""
WHOLE = "models in vLLM"
"""Its last row."""


class Page(NamedTuple):
    """One GPU's page."""

    gpu: str
    name: str

    @property
    def path(self) -> Path:
        return ROOT / f"docs/benchmarks-{self.name}.md"

    def plot(self, what: str) -> Path:
        return ROOT / f"docs/plots/{what}-{self.name}.svg"


PAGES = (Page("NVIDIA H200", "h200"), Page("NVIDIA H100 80GB HBM3", "h100"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.report", __doc__)
    parser.add_argument("--points", type=Path, metavar="FILE", help="print every point of a file of rows alone")
    parser.add_argument("--text", action="store_true", help="write the pages without their plots")
    args = parser.parse_args(argv)
    if args.points:
        print("\n".join(every_point(points_of(read(args.points)))))
        return
    for page in PAGES:
        points, engines = stored(page.gpu)
        page.path.write_text(text(page, points, engines))
        if not args.text:
            draw(page, points, engines)
    README.write_text(with_caption(README.read_text()))
    if not args.text:
        plots.heatmap(PLOT, "Speed-up by tokens", [*_STEPS], of_both(), row_height=0.235)


def stored(gpu: str) -> tuple[list[Point], list[Row]]:
    """Return the points and the rows of engines that were measured on a GPU."""
    files = [RESULTS / f"{name}.jsonl" for name in PRODUCTS]
    rows = [row for file in files for row in read(file) if row["gpu"] == gpu]
    engines = [row for name in ("engine", "sglang") for row in read(RESULTS / f"{name}.jsonl") if row["gpu"] == gpu]
    return points_of(rows), engines


Heatmap = tuple[Sequence[str], dict[str, list[float | None]]]
"""Names of columns, and ratios by row."""


def heatmaps(points: Sequence[Point], engines: Sequence[Row]) -> dict[str, Heatmap]:
    """Return the heatmaps of a page by name."""
    experts = {str(kind): by_step(own)[:-1] for kind, own in _of_sets(points, "experts")}
    vllm = {
        name: [gains[column].over_choice if column in gains else None for column in summary.COLUMNS]
        for name, gains in summary.in_vllm(engines).items()
    }
    maps: dict[str, Heatmap] = {
        "products": (STEP_NAMES, {str(kind): by_step(own) for kind, own in _of_products(points)}),
        "widths": (STEP_NAMES, {str(kind): by_step(own) for kind, own in _of_sets(points, "widths")}),
        "experts": (STEP_NAMES[:-1], experts),
        "vllm": (summary.COLUMNS, vllm),
    }
    return {what: heatmap for what, heatmap in maps.items() if heatmap[1]}


def draw(page: Page, points: Sequence[Point], engines: Sequence[Row]) -> None:
    """Write the plots of a page."""
    gpu = f"{page.gpu.removesuffix(' 80GB HBM3')}: speed-up"
    titles = {
        "products": f"{gpu} over the fastest other library, by tokens",
        "widths": f"{gpu} over the fastest other library, other widths, by tokens",
        "experts": f"{gpu} by tokens of an expert",
        "vllm": f"{gpu} over vLLM's kernels",
    }
    for what, (columns, rows) in heatmaps(points, engines).items():
        plots.heatmap(page.plot(what), titles[what], columns, {"": rows})
    untuned = {str(kind): [(p.m, p.ratio) for p in own] for kind, own in _of_sets(points, "unknown")}
    plots.scatter(page.plot("untuned"), f"{gpu} over the fastest other library, untuned layers", untuned)


def of_both() -> dict[str, dict[str, list[float | None]]]:
    """Return the ratios of README.md's plot by GPU and row: kinds of the first page, in wider steps than those of a
    page, and models in vLLM."""
    of_pages = {page.gpu.removesuffix(" 80GB HBM3"): stored(page.gpu) for page in PAGES}
    kinds = {gpu: {str(kind): own for kind, own in _of_products(points)} for gpu, (points, _) in of_pages.items()}
    names = [*next(iter(kinds.values()))]
    return {
        gpu: {name: [mean(within(kinds[gpu].get(name, ()), *ends)) for ends in _STEPS.values()] for name in names}
        | {WHOLE: summary.mean_gains(summary.in_vllm(engines), summary.COLUMNS)}
        for gpu, (_, engines) in of_pages.items()
    }


def _of_products(points: Sequence[Point]) -> list[tuple[Kind, list[Point]]]:
    """Return single products by kind: untuned layers, or those of the shipped tables where there are none."""
    kinds = _of_sets(points, "unknown", "tuned")
    untuned = {kind.format for kind, _ in kinds if kind.set == "unknown"}
    return [(kind, own) for kind, own in kinds if kind.set == "unknown" or kind.format not in untuned]


def _of_sets(points: Sequence[Point], *sets: str) -> list[tuple[Kind, list[Point]]]:
    return [(kind, own) for name in sets for kind, own in by_kind(points) if kind.set == name]


def text(page: Page, points: Sequence[Point], engines: Sequence[Row]) -> str:
    """Return the page."""
    lines = [f"# Benchmarks: {page.gpu}", ""]
    lines += paragraph(
        "A ratio is the time of the fastest other library / w4gemm's time, so above 1 w4gemm is faster; means are "
        "geometric. All implementations of a point ran interleaved in one process, with w4gemm's default choice of "
        "config. Times are medians in a CUDA graph over copies of the weight that together exceed L2. cuBLAS "
        "multiplies dense bf16 weights, or beside fp8 x e4m3 ones; in W4A8 it is left out, because these have twice "
        "the bytes. `python "
        "-m bench.report --points bench/results/FILE` prints every point."
    )
    lines += ["", image(page.plot("products"), "Speed-up by tokens and format"), ""]
    lines += paragraph("Rows of int4 are means of untuned layers, the others of the four layers of the shipped tables.")
    for name, title in TITLES.items():
        if own := [point for point in points if point.kind.set == name]:
            lines += ["", f"## {title}", "", *paragraph(_WHAT[name]), ""]
            plot = {"unknown": "untuned", "widths": "widths", "experts": "experts"}.get(name)
            lines += [image(page.plot(plot), title), ""] if plot else []
            lines += _ratios(own)
            lines += _limits(page.gpu) if name == "unknown" else []
    lines += ["", "## Where w4gemm is behind", "", *_behind(points)]
    turns = [row for row in read(RESULTS / "engine_pair.jsonl") if row["gpu"] == page.gpu]
    lines += engine_page.sections(engines, turns, image(page.plot("vllm"), "Speed-up inside vLLM"))
    lines += ["", "## Versions", "", *_versions(points, engines)]
    return "\n".join(lines) + "\n"


def _ranges(points: Sequence[Point]) -> dict[str, tuple[int, int]]:
    """The ranges of tokens that have points, by name."""
    ranges = {f"{first} to {last}": (first, last) for first, last in RANGES[:-1]}
    ranges[f"from {RANGES[-1][0]}"] = RANGES[-1]
    return {name: ends for name, ends in ranges.items() if within(points, *ends)}


def _limits(gpu: str) -> list[str]:
    """The table of untuned layers beside the limit. No other implementation is needed at these points."""
    untuned = [row for name in PRODUCTS if name.startswith("unknown") for row in read(RESULTS / f"{name}.jsonl")]
    every = points_of((row for row in untuned if row["gpu"] == gpu), alone=True)
    points = of_newest_seed([point for point in every if point.kind.set == "unknown"])
    rates, ranges, run = RATES[gpu], _ranges(points), points[0].run
    commits = ", ".join(sorted({_date_and_commit(point.run) for point in points}))
    sentence = (
        f"w4gemm's time / the limit, mean and worst, of the layers of seed {run['seed']} ({commits}). The limit is "
        f"{LAUNCH_US:.0f} us for a launch and the longer of two times: of all bytes at {rates.bytes / 1e6:.2f} TB/s, "
        f"of all operations at {rates.operations / 1e6:.0f} TFLOP/s (fp8 {rates.fp8_operations / 1e6:.0f}), rates that "
        "large library calls reach:"
    )
    rows = []
    for kind, own in by_kind(points):
        rows.append(_limit_row(str(kind), own, ranges, lambda point: point.over_limit))
        if any(point.roofline.sums_us for point in own):
            rows.append(_limit_row(f"{kind}: with sums", own, ranges, lambda point: point.over_limit_of_sums))
    lines = ["", *paragraph(sentence), "", *table(("x, weight", "points", *ranges), rows)]
    if any(point.roofline.sums_us for point in points):
        sentence = (
            "With sums: operations take 1 + 32 / group times as long (1.25 for groups of 128), since each group's sum "
            "takes a float32 fma, and no order of instructions that was timed overlapped these with the tensor cores "
            "([measured](measured.md#sm90_fp8_gemm))."
        )
        lines += ["", *paragraph(sentence)]
    return lines


def _limit_row(
    name: str, points: Sequence[Point], ranges: dict[str, tuple[int, int]], over: Callable[[Point], float]
) -> tuple[object, ...]:
    several = [[over(point) for point in within(points, *ends)] for ends in ranges.values()]
    cells = (f"{statistics.geometric_mean(each):.2f}, {max(each):.2f}" if each else "" for each in several)
    return name, len(points), *cells


def _ratios(points: Sequence[Point]) -> list[str]:
    ranges = _ranges(points)
    guessed = any(point.regret for point in points)
    tail = ["worst", f"below {BEHIND}", *(["first / fastest guess"] if guessed else [])]
    rows: list[list[object]] = []
    for kind, own in by_kind(points):
        means = [mean(within(own, *ends)) for ends in ranges.values()]
        regrets = [point.regret for point in own if point.regret]
        worst, behind = min(point.ratio for point in own), sum(point.ratio < BEHIND for point in own)
        rows.append([kind, len(own), *("" if m is None else f"{m:.2f}" for m in means), f"{worst:.2f}", behind])
        if guessed:
            rows[-1].append(f"{sum(regrets) / len(regrets):.3f}, worst {max(regrets):.2f}" if regrets else "")
    lines = table(("x, weight", "points", *ranges, *tail), rows)
    if guessed:
        sentence = (
            "First / fastest guess: the time of the model's first choice / that of the fastest of its best guesses, "
            "at the points where up to ten guesses were timed."
        )
        lines += ["", *paragraph(sentence)]
    return lines


def _behind(points: Sequence[Point]) -> list[str]:
    """The worst points, at most one for each kind, layer and routing."""
    worst: dict[tuple[object, ...], Point] = {}
    for point in sorted(points, key=lambda point: point.ratio):
        if point.ratio < BEHIND:
            worst.setdefault((point.kind, point.n, point.k, point.routing), point)
    count = sum(point.ratio < BEHIND for point in points)
    rows = []
    for point in list(worst.values())[:_WORST]:
        us, name = min((us, name) for name, us in point.peers.items())
        rows.append((point.kind, point, f"{point.ratio:.2f}", f"{point.us['w4gemm']:.1f}", f"{name} {us:.1f}"))
    sentence = f"{count} of {len(points)} points are below {BEHIND}; the furthest, one for each layer:"
    return [sentence, "", *table(("x, weight", "layer", "ratio", "w4gemm, us", "fastest other, us"), rows)]


def with_caption(readme: str) -> str:
    """Return README.md with the caption of its plot."""
    of_pages = [stored(page.gpu) for page in PAGES]
    points = [point for points, _ in of_pages for _, own in _of_products(points) for point in own]
    gains = [gain for _, engines in of_pages for gains in summary.in_vllm(engines).values() for gain in gains.values()]
    runs = [*(point.run for point in points), *(gain.row for gain in gains)]
    days = sorted({_date_and_commit(run).split()[0] for run in runs})
    versions: dict[str, set[str]] = defaultdict(set)
    for point in points:
        for row in point.others:
            versions[row["impl"]].add(row["impl_version"].partition("+")[0])
    humming, quack, cublas = (", ".join(sorted(versions[name])) for name in ("humming", "quack", "cublas"))
    (vllm,) = {gain.row["engine_version"] for gain in gains}
    sentences = (
        "Time of the fastest other library / w4gemm's. W4A8: x in fp8, with [scales on sums or "
        "folded](docs/how-the-kernel-works.md#sm90_fp8_gemm). int4: layers drawn at random, never tuned; "
        "MXFP4 and NVFP4: four tuned layers. Models: decode steps of 1, 8, 64 and 256 tokens and a prefill, over the "
        f"kernels that vLLM {vllm} chooses. Measured from {days[0]} to {days[-1]} beside Humming {humming}, Quack "
        f"{quack}, cuBLAS of {cublas}, and vLLM's Machete, Marlin and CUTLASS. All points, and where w4gemm is behind: "
        f"{', '.join(f'[{page.name.upper()}](docs/{page.path.name})' for page in PAGES)}."
    )
    return with_parts(readme, "bench.report", lambda name: paragraph(sentences))


def _versions(points: Sequence[Point], engines: Sequence[Row]) -> list[str]:
    rows = []
    for name, title in TITLES.items():
        own = [point for point in points if point.kind.set == name]
        runs = {point.run["run"]: point.run for point in own}.values()
        peers = {f"{row['impl']} {row['impl_version']}".strip() for point in own for row in point.others}
        when, ours = ({word(run) for run in runs} for word in (_date_and_commit, lambda run: run["impl_version"]))
        if own:
            rows.append((title, *(", ".join(sorted(words)) for words in (ours, when, peers))))
    shown = [gain.row for gains in summary.cases_of(engines).values() for gain in gains.values()]
    facts = {f"{row['engine']} {row['engine_version']}" for row in shown}
    torch, driver = ({row[name] for row in [*shown, *(p.run for p in points)]} for name in ("torch", "driver"))
    sentence = f"Engines: {', '.join(sorted(facts))}. " if facts else ""
    sentence += (
        f"torch {', '.join(sorted(torch))}; driver {', '.join(sorted(driver))}. machete, marlin and cutlass_w4a8 are "
    )
    sentence += "vLLM's; where no version stands, the rows have none."
    return [*table(("rows", "w4gemm", "date, commit", "other libraries"), rows), "", *paragraph(sentence)]


def _date_and_commit(run: Row) -> str:
    """The date in a run's name, such as 20261127T1037-b6090d5, and the commit."""
    day = run["run"][:8]
    return f"{day[:4]}-{day[4:6]}-{day[6:]} {run['commit'][:7]}"


def every_point(points: Sequence[Point]) -> Iterator[str]:
    """Yield a table for each kind of work."""
    for kind, own in by_kind(points):
        names = sorted({name for point in own for name in point.us}, key=lambda name: (name != "w4gemm", name))
        rows = []
        for point in own:
            layer, us = str(point).split(",")[0], [f"{point.us[n]:.2f}" if n in point.us else "" for n in names]
            routing = f" {point.routing}" if point.experts else ""
            rows.append((f"{layer}{routing}", point.m, *us, f"{point.ratio:.2f}"))
        size = "experts x n x k" if own[0].experts else "n x k"
        yield f"\n{kind}"
        yield from table((size, "tokens", *names, "ratio"), rows)


if __name__ == "__main__":
    main()
