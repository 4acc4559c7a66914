"""The page of engines, docs/benchmarks-vllm.md, from rows: tables by model, ratios, and a plot."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.engine.implementations import OURS
from bench.engine.tables import (
    WIDTH,
    agreement,
    formats_that_ran,
    gain_text,
    gains,
    gpus_text,
    latencies,
    layers_of_experts,
    lines_of,
    mean,
    predictions,
    speeds,
    steps,
    table_line,
)
from bench.rows import Row

ROOT = Path(__file__).resolve().parents[2]
PAGE, PLOT = ROOT / "docs/benchmarks-vllm.md", ROOT / "docs/plots/vllm.svg"
_MODES = {
    "default": "torch.compile",
    "graphs": "CUDA graphs only",
    "eager": "eager",
    "ep": "expert parallel",
    "eplb": "experts moved",
}
"""Parts of a row's mode, with "+" between them. vLLM compiles by default; CUDA graphs of decode steps alone start
sooner."""
_WHAT = (
    "How fast models decode in vLLM if w4gemm's plugin runs their 4-bit layers. A ratio is w4gemm's tokens/s / those "
    "of the kernels that vLLM chooses, or of the best of vLLM's kernels if two or more ran; for a time it is the "
    "inverse. Above 1 w4gemm is faster."
)
_METHOD = (
    "Checkpoints have published shapes and random numbers (`bench/engine/checkpoint.py`). A random router divides "
    "tokens about evenly among experts.",
    "Each implementation served the same checkpoint in a process of its own on one machine, and was measured while no "
    "other did anything; medians. The engine was asked which kernel every layer got.",
    "Decode: `LLM.generate` with prompts of 128 random tokens and greedy answers of 128; tokens/s of the whole batch "
    "without the time to the first tokens, and milliseconds per step. Serve: `vllm serve` with a fixed number of "
    "requests at a time, whose answers are streamed or come whole.",
    "Serve, 256 at a time: the one process of vLLM's that streams answers takes part in the time: whole answers of "
    "llama-3-8b come 15 and 17 % faster ([more](measured.md#vllm-and-sglang)).",
    "Tables of steps are of the last run with a profile, which need not be that of the speeds.",
    "To repeat a table: `python -m bench.engine --model llama-3-8b --format gptq-int4-g128 --impl default w4gemm "
    "marlin humming`, with `--serve` and `--profile 1 256` for those tables. `python -m bench.report "
    "bench/results/{file}` makes this page of the rows.",
)


class Case(NamedTuple):
    """A table of the page."""

    model: str
    format: str
    gpu: str
    gpus: int
    mode: str
    dtype: str
    earlier: str = ""
    """Commit of an earlier run, if it is one that measured more than the last; else the empty string."""

    @classmethod
    def of(cls, row: Row) -> Case:
        return cls(*(row[name] for name in cls._fields[:-1]))

    def __str__(self) -> str:
        gpu = gpus_text(self.gpu, self.gpus)
        run = (f"earlier ({self.earlier})",) if self.earlier else ()
        return ", ".join((self.model, self.format, gpu, *(_MODES[part] for part in self.mode.split("+")), *run))


_OFFLINE = "offline"
_KINDS = {"serve": "serve", "profile": "profile", "prefill_profile": "profile"}
"""The kind of measurement that a phase belongs to, if not offline; the last run of each kind is shown."""


def cases_of(rows: Iterable[Row]) -> dict[Case, list[Row]]:
    """Return the rows of each table: of the last run that measured its model, offline, under load and profiled; and,
    offline, of the last one before it that measured more. Where rows stand decides the order of tables alone. Rows of
    engines that ended early are left out if there is a run without such engines, which they would hide."""
    measured = [
        row for row in rows if row["kind"] == "engine" and row["phase"] not in ("failed", "agreement", "experts")
    ]
    ended_early = {(Case.of(row), row["run"]) for row in measured if row.get("partial")}
    whole = {case for case, run in ((Case.of(row), row["run"]) for row in measured) if (case, run) not in ended_early}
    found: dict[Case, dict[str, dict[str, list[Row]]]] = {}
    starts: dict[tuple[Case, str], list[Row]] = {}
    for row in measured:
        case = Case.of(row)
        if row.get("partial") and case in whole:
            continue
        if row["phase"] == "start":
            starts.setdefault((case, row["run"]), []).append(row)
            continue
        found.setdefault(case, {}).setdefault(_KINDS.get(row["phase"], _OFFLINE), {}).setdefault(row["run"], []).append(
            row
        )
    tables: dict[Case, list[Row]] = {}
    for case, kinds in found.items():
        last = {kind: max(runs) for kind, runs in kinds.items()}  # their names begin with the time
        rows = [row for kind, runs in kinds.items() for row in runs[last[kind]]]
        tables[case] = [*rows, *starts.get((case, last.get(_OFFLINE) or next(iter(last.values()))), [])]
        offline = [rows for _, rows in sorted(kinds.get(_OFFLINE, {}).items(), reverse=True)]
        for earlier in offline[1:]:
            if has_more(earlier, offline[0]):
                run = earlier[0]["run"]
                tables[case._replace(earlier=earlier[0]["commit"][:7])] = [*earlier, *starts.get((case, run), [])]
                break
    return tables


def has_more(earlier: Sequence[Row], last: Sequence[Row]) -> bool:
    """True if an earlier run had all implementations of the last and more, or a number of requests that that lacks."""

    def impls(rows: Iterable[Row]) -> set[str]:
        return {row["impl"] for row in rows}

    def batches(rows: Iterable[Row]) -> set[int]:
        return {row["batch"] for row in rows if row["phase"] == "decode"}

    return impls(earlier) > impls(last) or not batches(earlier) <= batches(last)


def text(rows: Sequence[Row], file: str) -> str:
    """Return the page."""
    shown = cases_of(rows)
    cases = {case: kept for case, kept in shown.items() if any(OURS not in row["impl"] for row in kept)}
    ours = [kept for case, kept in shown.items() if case not in cases]
    compared = [row for row in rows if row["phase"] == "agreement"]
    alone = [row for row in rows if row["phase"] == "experts"]
    last = {(row["model"], row["gpu"]): row["run"] for row in alone}
    alone = [row for row in alone if row["run"] == last[row["model"], row["gpu"]]]
    every = [*(row for kept in shown.values() for row in kept), *compared, *alone]
    runs = "`, `".join(dict.fromkeys(row["run"] for row in every))
    facts = [f"vLLM {version}" for version in dict.fromkeys(row["engine_version"] for row in every)]
    facts += [f"torch {version}" for version in dict.fromkeys(row["torch"] for row in every)]
    facts += [f"driver {version}" for version in dict.fromkeys(row["driver"] for row in every)]
    lines = ["# w4gemm inside vLLM", "", *textwrap.wrap(_WHAT, WIDTH), ""]
    lines += ["| decode, geometric mean | batch | over vLLM's choice | over the best of vLLM's |", "|---|---|---|---|"]
    for case, kept in cases.items():
        lines += summary(case, kept)
    for case, kept in cases.items():
        lines += notes(kept, f"{case}: ")
    lines += ["", f"![Tokens/s over vLLM's choice](plots/{PLOT.name})"]
    for case, kept in cases.items():
        lines += ["", f"## {case}", "", *speeds(kept), *notes(kept), *incomplete(kept)]
        for more in (latencies(kept), steps(kept), agreement(kept)):
            lines += ["", *more] if more else []
    lines += formats_that_ran(ours)
    lines += layers_of_experts(alone)
    lines += predictions(compared)
    lines += ["", "## How it was measured", ""]
    for sentence in (*_METHOD, f"{', '.join(facts)}; runs `{runs}`."):
        lines += textwrap.wrap(f"- {sentence.format(file=file)}", WIDTH, subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def notes(rows: Sequence[Row], start: str = "") -> list[str]:
    """Return a paragraph for each row with a ``note``, which was written into it by hand."""
    lines = []
    for row in rows:
        if "note" in row:
            lines += ["", *textwrap.wrap(f"{start}{row['phase']}, batch {row['batch']}: {row['note']}", WIDTH)]
    return lines


def incomplete(rows: Sequence[Row]) -> list[str]:
    """Return a paragraph that names the implementations whose engine ended early."""
    names = dict.fromkeys(row["impl"] for row in rows if row.get("partial"))
    return ["", f"Ended before all was measured: {', '.join(names)}."] if names else []


def summary(case: Case, rows: Sequence[Row]) -> list[str]:
    """Lines of the first table: means over batches of 64 and less, and over larger ones. Batches that vLLM's choice was
    not measured at do not count; those that do are named then."""
    lines = []
    decode = [row for row in rows if row["phase"] == "decode"]
    for name, wanted in (("1 to 64", lambda b: b <= 64), ("more", lambda b: b > 64)):
        batches = sorted({row["batch"] for row in decode if wanted(row["batch"])})
        found = {batch: [row for row in decode if row["batch"] == batch] for batch in batches}
        pairs = {batch: gains(lines_of(of_batch[0])[0], of_batch) for batch, of_batch in found.items()}
        known = {batch: pair for batch, pair in pairs.items() if pair[0] is not None}
        if known:
            label = name if known.keys() == pairs.keys() else ", ".join(map(str, known))
            means = [mean([pair[i] for pair in known.values()]) for i in range(2)]
            lines.append(table_line(str(case), (label, *map(gain_text, means))))
    return lines
