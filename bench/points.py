"""Timed products beside other libraries, from the rows of bench/results: :func:`points_of`."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from bench.peers.base import float_name
from bench.rows import Row

from w4gemm.core.format_names import USUAL_NAMES
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import GemmProblem, gpu_named
from w4gemm.tuning.roofline import Roofline

RANGES = ((1, 16), (17, 64), (65, 333), (334, 8192))
"""Numbers of tokens, first and last, that means are taken over."""
STEPS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 8192)
"""Last number of tokens of each column of a heatmap."""
_NAMES = {"e5m2_col_fp32": "e5m2", "iq4_g32_s8x256": "iq4_xs"}
"""Names of formats on the pages that users do not say."""
BEHIND = 0.97
"""A smaller ratio counts as behind, because machines of one kind differ by as much."""


class Kind(NamedTuple):
    """Work whose times may be compared with each other."""

    set: str
    """"unknown" for layers that nobody tuned, "experts", or "tuned" for layers of the shipped tables; with weights of
    other widths than four bits or as K-quants "unknown_widths" and "widths"."""
    work: str
    """"w4a16", "w8a8" and the like; "w4a8_exact" has scales on sums, "w4a8_folded" in e4m3 weights."""
    format: str
    """"int4", "mxfp4" or "nvfp4"; of other widths the format."""

    def __str__(self) -> str:
        name = self.format if self.format.startswith("int") else self.format.upper()
        work, _, how = self.work.partition("_")
        return f"{work.upper()}, {name}" + {"": "", "exact": ", scales on sums", "folded": ", folded scales"}[how]


class Point(NamedTuple):
    """One product, with the time of every implementation in one run."""

    kind: Kind
    n: int
    k: int
    experts: int
    """0 for a single weight."""
    routing: str
    """Division of the tokens among experts, see ``bench.grouped``."""
    m: int
    """Tokens; with experts, the mean for each of them."""
    us: dict[str, float]
    """Microseconds by implementation, the faster of an implementation's two ways to scale."""
    run: Row
    """w4gemm's row: the facts of the run, and the config."""
    others: list[Row]
    """Rows of the other implementations."""
    regret: float | None
    """Time of the first choice / that of the fastest config that was timed; None if no other was."""

    def __str__(self) -> str:
        sizes = f"{self.experts} x {self.n} x {self.k}" if self.experts else f"{self.n} x {self.k}"
        return f"{sizes}, {self.m} tokens" + (f", {self.routing} rows" if self.experts else "")

    @property
    def peers(self) -> dict[str, float]:
        """Times of the other implementations. cuBLAS does not count in W4A8, because its e4m3 weights are of another
        format and of twice the bytes."""
        left_out = {"w4gemm", "cublas"} if self.kind.work.startswith("w4a8") else {"w4gemm"}
        return {name: us for name, us in self.us.items() if name not in left_out}

    @property
    def ratio(self) -> float:
        """Time of the fastest other implementation / w4gemm's."""
        return min(self.peers.values()) / self.us["w4gemm"]

    @property
    def over_limit(self) -> float:
        """w4gemm's time / the limit: the roofline of a single weight's product, and a launch."""
        return self.us["w4gemm"] / self.roofline.limit_us

    @property
    def over_limit_of_sums(self) -> float:
        """w4gemm's time / the limit with the sums of groups, for which tensor cores wait."""
        return self.us["w4gemm"] / (self.roofline.limit_us + self.roofline.sums_us)

    @property
    def roofline(self) -> Roofline:
        """The roofline of a single weight's product."""
        device, format = gpu_named(self.run["gpu"]), WeightFormat.parse(self.run["format"])
        assert device is not None
        dtype = getattr(torch, self.run["dtype"])
        roofline = Roofline.of(GemmProblem(self.m, self.n, self.k, dtype, format, "canonical", device=device))
        assert roofline is not None
        return roofline


def points_of(rows: Iterable[Row], alone: bool = False) -> list[Point]:
    """Return the points that w4gemm and another implementation were timed at; of several runs of a point the one with
    the most implementations, the last of these.

    Args:
        alone: return the points too that w4gemm alone was timed at. They have no ratio.
    """
    runs: dict[tuple[Any, ...], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["kind"] == "time" and not row["impl"].startswith("w4gemm_"):
            own = kind_of(row), row["n"], row["k"], row.get("experts", 0), row.get("routing", ""), row["m"]
            runs[own][row["run"]].append(row)
    points = []
    for own, by_run in runs.items():
        ours = [of_run for _, of_run in sorted(by_run.items()) if any(row["impl"] == "w4gemm" for row in of_run)]
        regrets = [row["us_p50"] / row["best_config_us"] for rows in ours for row in rows if "best_config_us" in row]
        if not ours:
            continue
        shown, us = max(reversed(ours), key=lambda rows: len({row["impl"] for row in rows})), {}
        for row in shown:
            us[row["impl"]] = min(row["us_p50"], us.get(row["impl"], row["us_p50"]))
        run = next(row for row in shown if row["impl"] == "w4gemm")
        others = [row for row in shown if row["impl"] != "w4gemm"]
        point = Point(*own, us, run, others, regrets[-1] if regrets else None)
        if point.peers or alone:
            points.append(point)
    return sorted(points, key=lambda point: (point.kind, point.n, point.k, point.experts, point.routing, point.m))


def kind_of(row: Row) -> Kind:
    work, format = row["work"].removesuffix("_grouped"), WeightFormat.parse(row["format"])
    layers, name = row.get("set") or ("experts" if row["experts"] else "tuned"), float_name(format) or "int4"
    if format.bits != 4 or format.has_factors:
        name = float_name(format) or _NAMES.get(str(format)) or USUAL_NAMES.get(str(format), str(format))
        layers = {"tuned": "widths", "unknown": "unknown_widths"}.get(layers, layers)
    return Kind(layers, work, name)


def by_kind(points: Sequence[Point]) -> list[tuple[Kind, list[Point]]]:
    kinds = sorted({point.kind for point in points})
    return [(kind, [point for point in points if point.kind == kind]) for kind in kinds]


def of_newest_seed(points: Sequence[Point]) -> list[Point]:
    """Return the drawn points of the seed that was measured last."""
    newest = max(points, key=lambda point: str(point.run["run"])).run["seed"]
    return [point for point in points if point.run["seed"] == newest]


def mean(points: Sequence[Point]) -> float | None:
    """Geometric mean of the ratios; None without points."""
    return statistics.geometric_mean(point.ratio for point in points) if points else None


def within(points: Iterable[Point], first: int, last: int) -> list[Point]:
    return [point for point in points if first <= point.m <= last]


def by_step(points: Sequence[Point]) -> list[float | None]:
    """Mean ratio for each column of a heatmap."""
    firsts = (1, *(step + 1 for step in STEPS))
    return [mean(within(points, first, last)) for first, last in zip(firsts, STEPS, strict=False)]


STEP_NAMES = [
    str(last) if first == last else f"{first}-{last}"
    for first, last in zip((1, *(step + 1 for step in STEPS)), STEPS, strict=False)
]
