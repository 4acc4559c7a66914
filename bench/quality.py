"""What rounding costs small models: ``python -m bench.quality [MODEL...]``; ``--report`` writes docs/quality.md's table
and plot of the stored rows.

Models are GGUF files whose weights have few bits already; their numbers are what every format is measured beside. Rows
go to bench/results/quality.jsonl.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from bench import markdown, plots
from bench.options import command, formats, typed
from bench.rows import Row, read

from w4gemm.choice.table import device_facts
from w4gemm.core.format_names import ALIASES
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device
from w4gemm.integrations import calibrated
from w4gemm.integrations.generation import quiet_transformers
from w4gemm.integrations.quality import METHODS, TEXT, calibration_windows, compare, load_dense, shipped_text, windows
from w4gemm.tuning import record

ROOT = Path(__file__).parent.parent
RESULTS, PAGE, PLOT = ROOT / "bench/results/quality.jsonl", ROOT / "docs/quality.md", ROOT / "docs/plots/quality.svg"
FORMATS = (
    "int8_g128,int4_g32,int4_g64,int4_g128,int4_col,int4_g32_zint,int4_g128_zint,int4_g128_zfloat,q4_k,mxfp4,"
    "nvfp4,nf4,int3_g32,int3_g128"
)
_SHORT = {str(WeightFormat.parse(alias)): alias for alias in ALIASES}
"""Aliases by format."""
_METHOD_NAMES = ("nearest", "search", "GPTQ", "AWQ")
"""Names of :data:`METHODS` on the page."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.quality", __doc__)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL", help="as of w4gemm eval")
    parser.add_argument("--format", type=typed(formats), default=FORMATS, help="comma-separated (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the text (default: %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens that are read at once (default: %(default)s)")
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="nearest",
        help="of rounding; GPTQ and AWQ are calibrated on as many tokens that follow (default: %(default)s)",
    )
    parser.add_argument("--report", action="store_true", help="write the page's table and the plot")
    args = parser.parse_args(argv)
    if args.report:
        rows = read(RESULTS)
        PAGE.write_text(with_table(PAGE.read_text(), rows))
        plot(rows)
        return
    quiet_transformers()
    processor, threads = device_facts(Device("cpu"))
    facts = record.facts() | {"processor": processor, "threads": threads, "text": TEXT, "length": args.length}
    for model in args.models:
        dense, tokenizer = load_dense(model, torch.device("cpu"), torch.float32)
        parts = windows(tokenizer, shipped_text(), args.tokens, args.length)
        after = []
        if args.method in calibrated.METHODS:
            after = calibration_windows(tokenizer, shipped_text(), args.tokens, args.length)
        rows = compare(dense, parts, args.format, args.method, lambda *step: None, after)
        for row in rows:
            if args.method != "nearest" and row["format"] == "dense":
                continue
            own = {"kind": "quality", "run": record.run_name(facts), "model": model.name, "method": args.method}
            own |= {"calibration_tokens": sum(ids.numel() for ids in after)} if after else {}
            record.append(RESULTS, own | row | facts)
            print(f"{model.name} {row['format']} {args.method}: {row['perplexity']:.3f}", flush=True)


def with_table(page: str, rows: list[Row]) -> str:
    """Return the page with the table of ``rows``: increases of perplexity, and next tokens that stay the same, by
    each of :data:`METHODS`."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    first, *others = _METHOD_NAMES
    head = ("format", "bits", *(name for model in models for name in (f"{_name(model)}: {first}", *others)))
    by_key = {(row["model"], row["format"], _method(row)): row for row in rows}
    cells = []
    for format, bits in _by_bits(rows):
        of_methods = (_cell(by_key.get((model, format, method))) for model in models for method in METHODS)
        cells.append((f"`{_SHORT.get(format, format)}`", f"{bits:.2f}", *of_methods))
    dense = " and ".join(f"{by_key[model, 'dense', 'nearest']['perplexity']:.2f} ({_name(model)})" for model in models)
    lines = [*markdown.table(head, cells, right=True), "", f"Perplexity of the dense numbers: {dense}."]
    return markdown.with_parts(page, "bench.quality", lambda name: lines)


def _method(row: Row) -> str:
    """Return how a row's weights were rounded. Rows of 2026-11-28 had ``search`` alone."""
    return row.get("method") or ("search" if row["search"] else "nearest")


def _cell(row: Row | None) -> str:
    return "-" if row is None else f"{row['above_dense']:+.1%} ({row['agreement']:.0%})"


def _by_bits(rows: list[Row]) -> list[tuple[str, float]]:
    """Return the formats with the bits of a weight, scales included, of most bits first."""
    bits = {row["format"]: row["bits"] for row in reversed(rows) if row["bits"]}
    return sorted(bits.items(), key=lambda each: -each[1])


def _name(model: str) -> str:
    return "SmolLM2 135M" if model.startswith("SmolLM2-135M") else "Gemma 3 270M" if "gemma-3-270m" in model else model


def plot(rows: list[Row]) -> None:
    """Write a panel for each model with the increase of perplexity in each format."""
    series: dict[str, list[plots.Mark]] = {}
    for format, bits in _by_bits(rows):
        for row in (row for row in rows if row["format"] == format):
            name = f"{_SHORT.get(format, format)}, {bits:.2f} bits"
            mark = plots.Mark(name, 100 * row["above_dense"], METHODS.index(_method(row)))
            series.setdefault(_name(row["model"]), []).append(mark)
    plots.marks(PLOT, "Perplexity above the dense numbers", _METHOD_NAMES, series)


if __name__ == "__main__":
    main()
