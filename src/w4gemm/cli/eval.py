"""``w4gemm eval``: what formats cost a model in perplexity and in next tokens, beside its dense numbers."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from w4gemm.console.devices import chosen_device, device_name, use_idle_cores
from w4gemm.console.errors import read_text
from w4gemm.console.progress import counted, progress_bar, progress_line
from w4gemm.console.values import chosen_dtype
from w4gemm.core.format_names import USUAL_NAMES
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations import calibrated
from w4gemm.integrations.generation import default_model, positions, quiet_transformers
from w4gemm.integrations.quality import TEXT, calibration_windows, compare, load_dense, shipped_text, windows


def run(args: argparse.Namespace) -> int:
    formats = [WeightFormat.parse(format) for format in args.format or ["int4_g128"]]
    path = default_model() if args.model is None else args.model
    text = shipped_text() if args.text is None else read_text("--text", args.text)
    described, device = chosen_device(args.device)
    use_idle_cores(device)
    dtype = chosen_dtype(args.dtype, described)
    quiet_transformers()
    with progress_line() as line:
        line(0, 0, "reading the model")
        dense, tokenizer = load_dense(path, device, dtype)
    if args.length > positions(dense):
        raise ValueError(f"--length: wanted at most the model's {positions(dense)} tokens, got {args.length}")
    parts, amount = windows(tokenizer, text, args.tokens, args.length), (args.tokens, args.length)
    after = calibration_windows(tokenizer, text, *amount) if args.method in calibrated.METHODS else []
    with progress_bar() as progress:
        rows = list(compare(dense, parts, formats, args.method, progress, after))
    facts = {
        "model": str(path),
        "text": TEXT if args.text is None else str(args.text),
        "tokens": rows[0]["tokens"],
        "length": args.length,
        "method": args.method,
        "calibration_tokens": sum(ids.numel() for ids in after),
        "dtype": str(dtype).removeprefix("torch."),
        "device": device_name(device),
    }
    print(json.dumps(facts | {"rows": rows}, indent=2) if args.json else as_text(facts, rows))
    return 0


def as_text(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the facts and a line for each row."""
    method = "" if facts["method"] == "nearest" else f", {facts['method']}"
    if facts["calibration_tokens"]:
        method += f" on {counted(facts['calibration_tokens'], 'token')} that follow"
    lines = [
        f"{Path(facts['model']).name}: {counted(facts['tokens'], 'token')} of {facts['text']} in windows of "
        f"{facts['length']}; {facts['dtype']} on {facts['device']}{method}",
        f"{'format':24} {'bits':>5} {'perplexity':>10} {'above dense':>11} {'same next token':>15}",
    ]
    for row in rows:
        bits = f"{row['bits']:.2f}" if row["bits"] else "-"
        above, same = ("-", "-") if not row["layers"] else (f"{row['above_dense']:+.1%}", f"{row['agreement']:.1%}")
        perplexity = f"{row['perplexity']:.2f}" if math.isfinite(row["perplexity"]) else "inf"
        name = USUAL_NAMES.get(row["format"], row["format"])
        lines.append(f"{name:24} {bits:>5} {perplexity:>10} {above:>11} {same:>15}")
    return "\n".join(lines)
