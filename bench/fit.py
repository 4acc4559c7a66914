"""Fit the times of Hopper configs in ``w4gemm/choice/cost/<gpu>.jsonl``: ``python -m bench.fit ROWS...``.

ROWS are files of timings as bench.sweep writes them: all of fp8 or all of 16-bit activations, and all of one kind of
GPU, an H200 if they do not say. Rows of experts have m tokens for each expert. A file, or a run of a stored file, is of
one machine; only its own times are compared. Passed over are two launches, which are predicted as the sum of both, and
dequantize_gemm.

Writes the constants of that GPU, on which no compiled kernel depends, and prints how far the first choice is from the
fastest config at each (n, k, m, experts). A GPU without a file gets the constants of the GPU most like it, scaled by
the data sheets of both. Configs that are no longer legal are left out.

With ``--keep``, configs that have constants keep them, so that no choice among these changes. With ``--adjust``, the
constants are scaled to fit ROWS, which may be few; configs that are not in ROWS are scaled as the configs of about as
many tokens are, and with ``--others-stay`` not at all. With ``--hold-out 4`` nothing is written: four times, a quarter
of the layers is predicted by a fit to the others. Needs numpy and scipy.
"""

from __future__ import annotations

import datetime
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench.constants_file import begin, write
from bench.options import command
from bench.peers.base import epilogue_of
from bench.rows import timings_of
from bench.slice_times import Launch, Weighted, fit, plausible, weight_of
from bench.sweep import gpu_of

from w4gemm.choice.cost import constants, waves
from w4gemm.choice.cost.constants import SliceTimes
from w4gemm.core.config import GemmConfig
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.kernels import config_named
from w4gemm.kernels.hopper import HopperKernel
from w4gemm.packing.layouts import FP8_LAYOUT

_ROUNDS, _UNKNOWN_ROUNDS = 7, 4
_MISLED, _UNKNOWN_MISLED = 1.03, 1.15
"""Time of the first choice over the fastest from which its samples count for more. For other layers than those of the
timings that is far, because smaller differences are chance there."""
_EXPERTS_WEIGHT = 4
"""How much a sample of experts weighs beside another: few stand for many layers."""
_QUARTER_US = 3.0
"""Time of a sample that weighs a quarter of a long one: short launches say little of the time of k-slices."""


class Point(NamedTuple):
    """A problem whose configs were timed beside each other."""

    n: int
    k: int
    m: int
    experts: int
    format: str
    run: str


Sample = tuple[Launch, Point, float]
Points = dict[Point, dict[str, tuple[Launch, float]]]
"""Times by point and by the name that a config is timed as."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.fit", __doc__)
    parser.add_argument("rows", type=Path, nargs="+", metavar="ROWS", help="files of timings")
    parser.add_argument("--format", nargs="+", metavar="FORMAT", help="only rows of weights in these formats")
    parser.add_argument("--run", nargs="+", metavar="RUN", help="only these runs of stored files")
    known_stay = parser.add_mutually_exclusive_group()
    known_stay.add_argument("--keep", action="store_true", help="fit only configs that have no constants")
    known_stay.add_argument("--adjust", action="store_true", help="scale the constants that configs have")
    parser.add_argument("--others-stay", action="store_true", help="with --adjust: change only what was measured")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="CONFIG",
        help="with --adjust and --others-stay: change these alone, such as sm90_mixed_gemm/96x128x128_1x1x1_coop",
    )
    parser.add_argument(
        "--unknown",
        action="store_true",
        help="fit for other layers than ROWS have: only a sample that misled by far counts more",
    )
    parser.add_argument(
        "--hold-out",
        type=int,
        metavar="PARTS",
        help="write nothing: predict a part of the layers by a fit to the others, PARTS times",
    )
    args = parser.parse_args(argv)
    if args.others_stay and not args.adjust:
        parser.error("--others-stay wants --adjust")
    if args.only and not args.others_stay:
        parser.error("--only wants --adjust and --others-stay")
    rows = [{"run": path.name} | row for path in args.rows for row in timings_of(path)]
    if absent := set(args.run or ()) - {row["run"] for row in rows}:
        parser.error(f"--run: no row is of {', '.join(sorted(absent))}")
    rows = [row for row in rows if not args.run or row["run"] in args.run]
    formats = {str(WeightFormat.parse(format)) for format in args.format or ()}
    if absent := formats - {row["format"] for row in rows}:
        parser.error(f"--format: no row is of {', '.join(sorted(absent))}")
    rows = [row for row in rows if not formats or row["format"] in formats]
    device = gpu_of(rows)
    begin(device)
    known = constants.constants_for(device).configs
    if unknown_names := set(args.only or ()) - known.keys():
        parser.error(f"--only: no constants of {', '.join(sorted(unknown_names))}")
    how = How(dict(known) if args.keep else {}, args.adjust, args.others_stay, args.unknown, frozenset(args.only or ()))
    if args.hold_out:
        hold_out(rows, known, how, args.hold_out)
        return
    timings = collected(rows)
    times = after(timings, known, how)
    day = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    runs = ", ".join(dict.fromkeys(row["run"] for row in rows))
    only = f", {len(args.only)} configs only" if args.only else ""
    source = f"{device.name}, fitted {day}, {len(rows)} timings of {runs}{only}."
    word = "Adjusted to" if args.adjust else "Added:" if args.keep else ""
    write(constants.path_of(device.name), times, source, timings.fp8, word)
    report(timings.points, {name: times.get(name) or estimated(name, device) for name in timings.configs})


class How(NamedTuple):
    """Options of a fit."""

    kept: dict[str, SliceTimes]
    adjust: bool
    others_stay: bool
    unknown: bool
    only: frozenset[str] = frozenset()
    """The configs to change, if not all."""


def after(timings: Timings, known: dict[str, SliceTimes], how: How) -> dict[str, SliceTimes]:
    """The times of all configs for x of as many bits, fitted to timings."""
    before = {name: times for name, times in known.items() if ("sm90_fp8_" in name) == timings.fp8}
    adjusted: dict[str, SliceTimes] = {}
    if how.adjust:
        before = before if how.others_stay else plausible(before)
        adjusted = {name: before.get(name) or estimated(name, timings.device) for name in timings.configs}
    kept = {name: times for name, times in adjusted.items() if name not in how.only} if how.only else how.kept
    times = fitted(timings, kept, adjusted, how.unknown)
    if how.others_stay:
        times = at_level(timings.points, times, adjusted, kept)
    if not adjusted and not kept:
        return times
    if how.only:
        return before | {name: each for name, each in times.items() if name in how.only}
    if how.kept or how.others_stay:
        return before | times
    return plausible(carried(adjusted | before, times))


def at_level(
    points: Points, times: dict[str, SliceTimes], known: dict[str, SliceTimes], kept: dict[str, SliceTimes]
) -> dict[str, SliceTimes]:
    """The times, those that were fitted scaled alike, so that in the mean first choices are predicted to take as long
    as with the known ones: what stays is compared with them, and one machine is some percent faster than another."""
    logs = []
    for configs in points.values():
        first, before = ({c: launch.us(t[c]) for c, (launch, _) in configs.items()} for t in (times, known))
        if (chosen := min(first, key=first.__getitem__)) not in kept:
            logs.append(math.log(min(before.values()) / first[chosen]))
    factor = math.exp(statistics.fmean(logs)) if logs else 1.0
    return {c: t if c in kept else SliceTimes(*(factor * us for us in t)) for c, t in times.items()}


def hold_out(rows: list[dict[str, Any]], known: dict[str, SliceTimes], how: How, parts: int) -> None:
    """Print how far first choices are off at layers that were not fitted to, each held out once."""
    layers = sorted({(row["n"], row["k"]) for row in rows})
    regret: dict[str, list[float]] = {"before": [], "after": []}
    for part in range(parts):
        held = set(layers[part::parts])
        there = collected([row for row in rows if (row["n"], row["k"]) in held])
        times = after(collected([row for row in rows if (row["n"], row["k"]) not in held]), known, how)
        for name, each in (("before", known), ("after", times)):
            whole = {config: each.get(config) or estimated(config, there.device) for config in there.configs}
            regret[name] += [r for r, *_ in regrets(there.points, whole)]
    for name, each in regret.items():
        print(f"{name}, {len(layers)} layers held out in {parts} parts: {summary(each)}")


class Timings(NamedTuple):
    """Rows of the kernels with a constant for each config, in two orders."""

    configs: dict[str, list[Sample]]
    """By the name that a config is timed as."""
    points: Points
    device: Device
    fp8: bool
    """True if the rows are of fp8 activations."""


def collected(rows: list[dict[str, Any]]) -> Timings:
    """The timings in ``rows``, without those of two launches and of other kernels."""
    configs: dict[str, list[Sample]] = defaultdict(list)
    points: Points = defaultdict(dict)
    fp8, device = False, gpu_of(rows)
    for row in rows:
        (kernel, config), format = config_named(row["config"]), WeightFormat.parse(row["format"])
        if config.tail or not isinstance(kernel, HopperKernel):
            continue
        fp8 = kernel.layout == FP8_LAYOUT
        experts = row.get("experts", 0)
        sizes = row["m"] * max(1, experts), row["n"], row["k"]
        of = kernel.dtypes[-1], format, kernel.layout
        problem = GemmProblem(*sizes, *of, epilogue_of(format, of[0]), device, experts=experts)
        launch = Launch.of(kernel, problem, config)
        named = f"{waves.timed_as(kernel, problem)}/{config}"
        point = Point(row["n"], row["k"], row["m"], experts, row["format"], row["run"])
        configs[named].append((launch, point, row["us"]))
        points[point][named] = launch, row["us"]
    return Timings(configs, points, device, fp8)


def estimated(name: str, device: Device) -> SliceTimes:
    """The times of a config, or, without constants of its own, those of its nearest: few samples cannot tell what a
    CTA alone takes from what others cost it."""
    kernel, _, text = name.rpartition("/")
    known = constants.constants_for(device).times(kernel, GemmConfig.parse(text))
    assert known is not None, f"nothing is known of {kernel}"
    return known


def fitted(
    timings: Timings, kept: dict[str, SliceTimes], adjusted: dict[str, SliceTimes], unknown: bool = False
) -> dict[str, SliceTimes]:
    """Times of every config: those in ``kept`` as they are, those in ``adjusted`` scaled, the others fitted anew. Of
    several rounds it is the one whose first choices are best.

    Args:
        unknown: True if the times are for other layers than those of the timings. It is the last round then, because a
            choice that is good by chance says nothing of them (22 drawn layers, each held out once: 1.014, and 1.017
            without).
    """
    points = timings.points
    fastest = {point: min(us for _, us in configs.values()) for point, configs in points.items()}

    def weight(point: Point, us: float) -> float:
        """Weight of a sample, however slow its config is."""
        return (us / (us + _QUARTER_US)) ** 2 * (_EXPERTS_WEIGHT if point.experts else 1)

    # What slows down all configs of a point alike, a hot GPU most of all, must not count against those measured there.
    slower: dict[Point, float] = dict.fromkeys(points, 1.0)
    # Samples that a choice went wrong by count for more in the next round.
    blame: dict[tuple[str, Point], float] = defaultdict(lambda: 1.0)
    rounds: list[tuple[float, dict[str, SliceTimes]]] = []
    for _ in range(_UNKNOWN_ROUNDS if unknown else _ROUNDS):
        times = {}
        for config, samples in sorted(timings.configs.items()):
            weighted = [
                Weighted(
                    launch, us / slower[point], weight(point, us) * blame[config, point], fastest[point] / slower[point]
                )
                for launch, point, us in samples
            ]
            times[config] = kept.get(config) or fit(weighted, adjusted.get(config))
        for point, configs in points.items():
            logs = [
                (weight(point, us) * weight_of(us / fastest[point]), math.log(us / launch.us(times[config])))
                for config, (launch, us) in configs.items()
            ]
            slower[point] = math.exp(sum(w * log for w, log in logs) / sum(w for w, _ in logs))
        losses = regrets(points, times)
        rounds.append((sum(math.log(r[0]) + (r[0] > 1.05) * 0.05 for r in losses), times))
        for regret, point, chosen, best in losses:
            if regret > (_UNKNOWN_MISLED if unknown and not point.experts else _MISLED):
                blame[chosen, point] *= 3
                blame[best, point] *= 2
    return rounds[-1][1] if unknown else min(rounds, key=lambda r: r[0])[1]


def carried(before: dict[str, SliceTimes], adjusted: dict[str, SliceTimes]) -> dict[str, SliceTimes]:
    """All of ``before``: the others change as those of their kernel with as many tokens did, in the median."""

    def tokens(config: str) -> tuple[str, int]:
        kernel, _, text = config.partition("/")
        return kernel, GemmConfig.parse(text).tile_m

    changes: dict[tuple[str, int], list[np.ndarray]] = defaultdict(list)
    for config, times in adjusted.items():
        changes[tokens(config)].append(np.divide(times, np.maximum(before[config], 1e-4)))
    result = {}
    for config, times in sorted(before.items()):
        kernel, tile_m = tokens(config)
        near = sorted((abs(math.log(m / tile_m)), m) for name, m in changes if name == kernel)
        alone, shared, tile = times * np.median(changes[kernel, near[0][1]], axis=0).clip(0.5, 2) if near else times
        result[config] = adjusted.get(config) or SliceTimes(float(alone), float(shared), float(tile))
    return result


def regrets(points: Points, times: dict[str, SliceTimes]) -> list[tuple[float, Any, str, str]]:
    """(time of the first choice over the fastest, point, first choice, fastest), the worst first."""
    losses = []
    for point, configs in points.items():
        chosen = min(configs, key=lambda c: configs[c][0].us(times[c]))
        fastest = min(configs, key=lambda c: configs[c][1])
        losses.append((configs[chosen][1] / configs[fastest][1], point, chosen, fastest))
    return sorted(losses, reverse=True)


def report(points: Points, times: dict[str, SliceTimes]) -> None:
    losses = regrets(points, times)
    print(f"first choice over fastest: {summary([regret for regret, *_ in losses])}")
    for regret, point, chosen, fastest in losses[: max(12, sum(r[0] > 1.05 for r in losses))]:
        print(f"  {regret:.3f} {point}: {chosen}, fastest {fastest}")


def summary(losses: list[float]) -> str:
    """Regrets in a line."""
    mean = statistics.geometric_mean(losses)
    late = sum(regret > 1.05 for regret in losses)
    return f"geometric mean {mean:.4f}, worst {max(losses):.3f}; {late} of {len(losses)} points above 1.05"


if __name__ == "__main__":
    main()
