"""One run of ``bench.run`` as a self-contained HTML page: :func:`page`. Its plots are SVG, made here."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import Any

from w4gemm.tuning.roofline import Rates

Point = tuple[int, int, int]
Times = dict[Point, dict[str, float]]

_COLORS = ("#111111", "#d1495b", "#2e86ab", "#3c9d5d", "#e8a33d", "#7b5ea7", "#6b7280", "#b5651d")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #1a1a1a; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; } p { max-width: 50rem; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
td, th { padding: 2px 9px; text-align: right; } th { border-bottom: 1px solid #999; }
td:first-child { text-align: left; }
.heat td { border: 1px solid #fff; min-width: 3em; text-align: center; }
svg { max-width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: #444; }
.legend span { margin-right: 1.2em; white-space: nowrap; } .wide { overflow-x: auto; }
"""


def page(
    times: Times,
    facts: dict[str, Any],
    versions: dict[str, str],
    rates: Rates,
    roofline_us: Callable[[Point], float],
    ratio: Callable[[dict[str, float]], float],
) -> str:
    """Return the whole document.

    Args:
        times: microseconds by (n, k, m) and implementation.
        facts: a row's facts about the machine.
        versions: version by implementation, in the order to show them in.
        rates: rates that large library calls reach on the device.
        roofline_us: the least microseconds of a point.
        ratio: best peer time / w4gemm time, from a point's times.
    """
    names = list(versions)
    color = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(names)}
    legend = "".join(f'<span><b style="color:{color[name]}">&#9679;</b> {_text(name)}</span>' for name in names)
    used = ", ".join(f"{name} {version}".strip() for name, version in versions.items())
    machine = f"{facts['gpu']}, driver {facts['driver']}, torch {facts['torch']}, CuTe DSL {facts['dsl']}"
    parts = [
        "<h1>w4gemm beside its peers</h1>",
        f"<p>W4A16, int4 g128 symmetric, bf16. {_text(machine)}. Run <code>{_text(facts['run'])}</code>: all",
        "implementations interleaved in one process; medians in microseconds per call, in a CUDA graph over copies of",
        f"the weight that together exceed L2. Versions: {_text(used)}.</p>",
        "<h2>Speed-up over the best peer</h2>",
        "<p>Best peer time / w4gemm time: w4gemm is the fastest where it is green, behind the fastest where red.</p>",
        _heat_map(times, ratio),
        "<h2>Roofline</h2>",
        f"<p>TFLOP/s by operations per byte. Dashed: {rates.bytes / 1e6:.1f} TB/s and {rates.operations / 1e6:.0f}",
        f'TFLOP/s. A dot per layer, m and implementation.</p><p class="legend">{legend}</p>',
        _roofline_plot(times, names, color, rates),
        "<h2>Time over roofline</h2>",
        "<p>By m, a panel per layer (n x k). 1 is the roofline; 6.5 stands for more.</p>",
        f'<p class="legend">{legend}</p>',
        "".join(_layer_plot(layer, times, names, color, roofline_us) for layer in _layers(times)),
        "<h2>Every point</h2>",
        f'<div class="wide">{_table(times, names, roofline_us, ratio)}</div>',
    ]
    head = f'<meta charset="utf-8"><title>w4gemm: benchmarks</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _text(value: object) -> str:
    return html.escape(str(value))


def _layers(times: Times) -> list[tuple[int, int]]:
    return sorted({(n, k) for n, k, _ in times})


def _tokens(times: Times) -> list[int]:
    return sorted({m for _, _, m in times})


# --- tables ----------------------------------------------------------------------------------------------------------


def _heat_map(times: Times, ratio: Callable[[dict[str, float]], float]) -> str:
    tokens = _tokens(times)
    rows = ["<tr><th>n x k \\ m</th>" + "".join(f"<th>{m}</th>" for m in tokens) + "</tr>"]
    for n, k in _layers(times):
        cells = [f"<td>{n} x {k}</td>"]
        for m in tokens:
            us = times.get((n, k, m), {})
            if "w4gemm" not in us or len(us) < 2:
                cells.append("<td></td>")
                continue
            value = ratio(us)
            best = min((t, name) for name, t in us.items() if name != "w4gemm")
            cells.append(
                f'<td style="background:{_shade(value)}" title="{_text(best[1])} {best[0]:.1f} us, '
                f'w4gemm {us["w4gemm"]:.1f} us">{value:.2f}</td>'
            )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table class="heat">{"".join(rows)}</table></div>'


def _shade(ratio: float) -> str:
    """White at 1, full green at 1.6 and above, full red at 0.8 and below."""
    strength = min(1.0, math.log(ratio) / math.log(1.6)) if ratio >= 1 else min(1.0, math.log(ratio) / math.log(0.8))
    full = (99, 190, 123) if ratio >= 1 else (248, 105, 107)
    return "#" + "".join(f"{round(255 + (c - 255) * strength):02x}" for c in full)


def _table(
    times: Times,
    names: list[str],
    roofline_us: Callable[[Point], float],
    ratio: Callable[[dict[str, float]], float],
) -> str:
    columns = ("n x k", "m", "roofline", *names, "best peer time / w4gemm time")
    rows = ["<tr>" + "".join(f"<th>{_text(c)}</th>" for c in columns) + "</tr>"]
    for point in sorted(times):
        n, k, m = point
        us = times[point]
        cells = [f"{us[name]:.1f}" if name in us else "-" for name in names]
        over = f"{ratio(us):.2f}" if "w4gemm" in us and len(us) > 1 else "-"
        values = (f"{n} x {k}", str(m), f"{roofline_us(point):.1f}", *cells, over)
        rows.append("<tr>" + "".join(f"<td>{v}</td>" for v in values) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


# --- plots -----------------------------------------------------------------------------------------------------------


class _Axes:
    """A plot with logarithmic axes: positions of values, and the SVG around the curves."""

    def __init__(self, width: int, height: int, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.width, self.height, self.x, self.y = width, height, x, y
        self.left, self.right, self.top, self.bottom = 52, 12, 26, 34

    def at(self, x: float, y: float) -> tuple[float, float]:
        def part(value: float, limits: tuple[float, float]) -> float:
            return math.log(value / limits[0]) / math.log(limits[1] / limits[0])

        across, up = part(x, self.x), part(y, self.y)
        inner = self.height - self.top - self.bottom
        return self.left + across * (self.width - self.left - self.right), self.top + (1 - up) * inner

    def curve(self, points: Sequence[tuple[float, float]], color: str, width: float, dashed: bool = False) -> str:
        places = " ".join("{:.1f},{:.1f}".format(*self.at(*p)) for p in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{width}"{dash}/>'

    def dot(self, point: tuple[float, float], color: str, size: float, title: str) -> str:
        x, y = self.at(*point)
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{color}"><title>{_text(title)}</title></circle>'

    def svg(self, title: str, names: tuple[str, str], ticks: tuple[Sequence[float], Sequence[float]], body: str) -> str:
        lines = []
        for value in ticks[0]:
            x, y = self.at(value, self.y[0])
            lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{self.top}" y2="{y:.1f}" stroke="#e5e5e5"/>')
            lines.append(f'<text x="{x:.1f}" y="{y + 14:.1f}" text-anchor="middle">{value:g}</text>')
        for value in ticks[1]:
            x, y = self.at(self.x[0], value)
            lines.append(
                f'<line x1="{x:.1f}" x2="{self.width - self.right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>'
            )
            lines.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
        middle = (self.left + self.width - self.right) / 2
        lines.append(f'<text x="{middle:.0f}" y="{self.height - 4}" text-anchor="middle">{_text(names[0])}</text>')
        lines.append(f'<text x="{self.left}" y="14">{_text(f"{title}{names[1]}")}</text>')
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{"".join(lines)}{body}</svg>'


def _roofline_plot(times: Times, names: list[str], color: dict[str, str], rates: Rates) -> str:
    def intensity(point: Point) -> float:
        n, k, m = point
        return 2 * m * n * k / (n * k / 2 + 2 * n * k / 128 + 2 * m * (n + k))

    found = [intensity(point) for point in times]
    x = (min(found) / 1.5, max(found) * 1.5)
    reached = [2 * p[0] * p[1] * p[2] / t / 1e6 for p, us in times.items() for t in us.values()]
    y = (min(reached) / 1.5, rates.operations / 1e6 * 1.4)
    axes = _Axes(900, 480, x, y)
    knee = rates.operations / rates.bytes
    roof = [(x[0], max(y[0], x[0] * rates.bytes / 1e6)), (knee, rates.operations / 1e6), (x[1], rates.operations / 1e6)]
    body = axes.curve(roof, "#555", 1.5, dashed=True)
    for name in sorted(names, key=lambda name: name == "w4gemm"):  # ours on top
        for point, us in times.items():
            if name in us:
                n, k, m = point
                tera = 2 * m * n * k / us[name] / 1e6
                title = f"{name}, {n} x {k}, m {m}: {us[name]:.1f} us, {tera:.0f} TFLOP/s"
                body += axes.dot((intensity(point), tera), color[name], 3.6 if name == "w4gemm" else 2.4, title)
    powers = [10.0**e for e in range(-1, 6)]
    ticks = tuple([p for p in powers if low <= p <= high] for low, high in (x, y))
    return axes.svg("", ("operations per byte", "TFLOP/s"), (ticks[0], ticks[1]), body)


def _layer_plot(
    layer: tuple[int, int],
    times: Times,
    names: list[str],
    color: dict[str, str],
    roofline_us: Callable[[Point], float],
) -> str:
    tokens = [m for m in _tokens(times) if (*layer, m) in times]
    axes = _Axes(440, 300, (tokens[0] / 1.2, tokens[-1] * 1.2), (0.85, 6.5))
    body = axes.curve([(axes.x[0], 1), (axes.x[1], 1)], "#777", 1, dashed=True)
    for name in sorted(names, key=lambda name: name == "w4gemm"):
        over = [
            (m, min(6.5, times[(*layer, m)][name] / roofline_us((*layer, m))))
            for m in tokens
            if name in times[(*layer, m)]
        ]
        body += axes.curve(over, color[name], 2.6 if name == "w4gemm" else 1.2)
        for m, value in over:
            body += axes.dot((m, value), color[name], 2, f"{name}, m {m}: {value:.2f} of the roofline")
    return axes.svg(f"{layer[0]} x {layer[1]}: ", ("m", "time / roofline"), (tokens[::2], (1, 1.5, 2, 3, 4, 6)), body)
