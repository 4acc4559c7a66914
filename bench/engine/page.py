"""The page of engines, docs/benchmarks-vllm.md, from rows: tables by model, ratios, and a plot."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.engine.implementations import OURS
from bench.rows import Row

ROOT = Path(__file__).resolve().parents[2]
PAGE, PLOT = ROOT / "docs/benchmarks-vllm.md", ROOT / "docs/plots/vllm.svg"
_WIDTH = 120
_MODES = {
    "default": "torch.compile",
    "graphs": "CUDA graphs only",
    "eager": "eager",
}
"""vLLM compiles by default; CUDA graphs of decode steps alone start sooner."""
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
    "llama-3-8b come 15 and 17 % faster ([more](measured/engine.md#under-load-streamed-and-whole-2026-11-24)).",
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
    """Commit of an earlier run, if it is one that ran more implementations than the last; else the empty string."""

    @classmethod
    def of(cls, row: Row) -> Case:
        return cls(*(row[name] for name in cls._fields[:-1]))

    def __str__(self) -> str:
        gpu = f"{self.gpus} x {self.gpu}" if self.gpus > 1 else self.gpu
        run = (f"earlier ({self.earlier})",) if self.earlier else ()
        return ", ".join((self.model, self.format, gpu, _MODES[self.mode], *run))


class Line(NamedTuple):
    """A line of a table: what is measured, how its figures are shown, and whether less is better."""

    name: str
    value: Callable[[Row], float]
    shown: Callable[[Row], str]
    is_time: bool = False


def lines_of(row: Row) -> list[Line]:
    """Return the lines that a row is shown in; none for those that are not in the table of speeds."""
    phase, batch = row["phase"], row.get("batch")
    if phase == "decode":
        name = f"decode, batch {batch}: tokens/s (ms a step)"
        found = [Line(name, lambda r: r["tokens_s"], lambda r: f"{r['tokens_s']:,.0f} ({r['ms_step']:.2f})")]
        if batch == 1:
            name = f"first token after {row['tokens_in']}: ms"
            found.append(Line(name, lambda r: r["first_tokens_s"], lambda r: f"{1e3 * r['first_tokens_s']:.1f}", True))
        return found
    if phase == "start" and row["start"] != "first" and row.get("at_once", 1) == 1:  # the first pays for the others
        return [Line(f"{row['start']} start: s", lambda r: r["seconds"], lambda r: f"{r['seconds']:.0f}", True)]
    how = "serve" if row.get("streamed", True) else "serve whole"
    names = {"prefill": f"prefill of {row.get('tokens_in')}", "serve": f"{how}, {batch} at a time"}
    if phase not in names:
        return []
    return [Line(f"{names[phase]}: tokens/s", lambda r: r["tokens_s"], lambda r: f"{r['tokens_s']:,.0f}")]


_OFFLINE = "offline"
_KINDS = {"serve": "serve", "profile": "profile", "prefill_profile": "profile"}
"""The kind of measurement that a phase belongs to, if not offline; the last run of each kind is shown."""


def cases_of(rows: Iterable[Row]) -> dict[Case, list[Row]]:
    """Return the rows of each table: of the last run that measured its model, offline, under load and profiled; and,
    offline, of the last one before it that ran all of its implementations and more."""
    found: dict[Case, dict[str, dict[str, list[Row]]]] = {}
    starts: dict[tuple[Case, str], list[Row]] = {}
    for row in rows:
        if row["kind"] != "engine" or row["phase"] in ("failed", "agreement", "experts"):
            continue
        case = Case.of(row)
        if row["phase"] == "start":
            starts.setdefault((case, row["run"]), []).append(row)
            continue
        found.setdefault(case, {}).setdefault(_KINDS.get(row["phase"], _OFFLINE), {}).setdefault(row["run"], []).append(
            row
        )
    tables: dict[Case, list[Row]] = {}
    for case, kinds in found.items():
        last = {kind: next(reversed(runs)) for kind, runs in kinds.items()}
        rows = [row for kind, runs in kinds.items() for row in runs[last[kind]]]
        tables[case] = [*rows, *starts.get((case, last.get(_OFFLINE) or next(iter(last.values()))), [])]
        offline = list(reversed(kinds.get(_OFFLINE, {}).values()))
        for earlier in offline[1:]:
            if {row["impl"] for row in earlier} > {row["impl"] for row in offline[0]}:
                run = earlier[0]["run"]
                tables[case._replace(earlier=earlier[0]["commit"][:7])] = [*earlier, *starts.get((case, run), [])]
                break
    return tables


def text(rows: Sequence[Row], file: str) -> str:
    """Return the page."""
    cases, compared = cases_of(rows), [row for row in rows if row["phase"] == "agreement"]
    alone = [row for row in rows if row["phase"] == "experts"]
    alone = [row for row in alone if row["run"] == alone[-1]["run"]]
    every = [*(row for kept in cases.values() for row in kept), *compared, *alone]
    runs = "`, `".join(dict.fromkeys(row["run"] for row in every))
    facts = [f"vLLM {version}" for version in dict.fromkeys(row["engine_version"] for row in every)]
    facts += [f"torch {version}" for version in dict.fromkeys(row["torch"] for row in every)]
    facts += [f"driver {version}" for version in dict.fromkeys(row["driver"] for row in every)]
    lines = ["# w4gemm inside vLLM", "", *textwrap.wrap(_WHAT, _WIDTH), ""]
    lines += ["| decode, geometric mean | batch | over vLLM's choice | over the best of vLLM's |", "|---|---|---|---|"]
    for case, kept in cases.items():
        lines += summary(case, kept)
    lines += ["", f"![Tokens/s over vLLM's choice](plots/{PLOT.name})"]
    for case, kept in cases.items():
        lines += ["", f"## {case}", "", *speeds(kept)]
        for more in (latencies(kept), steps(kept), agreement(kept)):
            lines += ["", *more] if more else []
    lines += layer_of_experts(alone)
    lines += predictions(compared)
    lines += ["", "## How it was measured", ""]
    for sentence in (*_METHOD, f"{', '.join(facts)}; runs `{runs}`."):
        lines += textwrap.wrap(f"- {sentence.format(file=file)}", _WIDTH, subsequent_indent="  ")
    return "\n".join(lines) + "\n"


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
            lines.append(_line(str(case), (label, *map(_gain, means))))
    return lines


def mean(ratios: Sequence[float | None]) -> float | None:
    """Return the geometric mean; None if a ratio is missing."""
    known = [ratio for ratio in ratios if ratio is not None]
    return statistics.geometric_mean(known) if known and len(known) == len(ratios) else None


def gains(line: Line, rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """Return w4gemm's gain over vLLM's choice, and over the best of two or more of vLLM's kernels; None where one was
    not measured."""
    ours = [line.value(row) for row in rows if OURS in row["impl"]]
    chosen = [line.value(row) for row in rows if row["chosen"] and OURS not in row["impl"]]
    others = [line.value(row) for row in rows if OURS not in row["impl"]]
    if not ours:
        return None, None
    if line.is_time:
        found = [min(times) / min(ours) if times else None for times in (chosen, others)]
    else:
        found = [max(ours) / max(rates) if rates else None for rates in (chosen, others)]
    return found[0], found[1] if len(others) > 1 else None


def _gain(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def names_of(rows: Sequence[Row]) -> dict[str, str]:
    """Heads of columns by implementation: ours first, vLLM's choice next."""
    chosen = {row["impl"] for row in rows if row["chosen"]}
    names = sorted({row["impl"] for row in rows}, key=lambda name: (OURS not in name, name not in chosen, name))
    return {name: f"{name}, vLLM's choice" if name in chosen else name for name in names}


def by_line(rows: Sequence[Row]) -> dict[str, tuple[Line, list[Row]]]:
    """Return each line of the table of speeds with its rows."""
    found: dict[str, tuple[Line, list[Row]]] = {}
    for row in rows:
        for line in lines_of(row):
            found.setdefault(line.name, (line, []))[1].append(row)
    return found


def speeds(rows: Sequence[Row]) -> list[str]:
    """Lines of the table of a case."""
    names = names_of(rows)
    head = _line("", (*names.values(), "over vLLM's choice", "over the best"))
    lines = [head, "|---" * (len(names) + 3) + "|"]
    for name, (line, found) in by_line(rows).items():
        cells = {row["impl"]: line.shown(row) for row in found}
        ratios = (None, None) if found[0]["phase"] == "start" else gains(line, found)
        lines.append(_line(name, (*(cells.get(n, "-") for n in names), *map(_gain, ratios))))
    return lines


def latencies(rows: Sequence[Row]) -> list[str]:
    """Lines of the table of times under load, streamed: median and 99th percentile."""
    found = [row for row in rows if row["phase"] == "serve" and row.get("streamed", True)]
    if not found:
        return []
    lines = ["| under load, ms: median (99 %) | at a time | first token | between tokens |", "|---|---|---|---|"]
    for row in sorted(found, key=lambda row: (row["batch"], row["impl"])):
        first, between = (
            f"{row[f'{name}_ms_p50']:.1f} ({row[f'{name}_ms_p99']:.1f})" for name in ("first_token", "between_tokens")
        )
        lines.append(f"| {row['impl']} | {row['batch']} | {first} | {between} |")
    return lines


_OVERLAP = (
    "Kernels of w4gemm start before those in front of them end, and their times include the wait: only sums of a step "
    "compare. The profiler itself makes a step longer."
)


def steps(rows: Sequence[Row]) -> list[str]:
    """Lines of the tables of where decode steps and prefills spend their time."""
    lines: list[str] = []
    for batch in sorted({row["batch"] for row in rows if row["phase"] == "profile"}):
        found = {row["impl"]: row for row in rows if row["phase"] == "profile" and row["batch"] == batch}
        lines += [*([""] if lines else []), *_times_by_group(f"a decode step at batch {batch}, us", found)]
    if found := {row["impl"]: row for row in rows if row["phase"] == "prefill_profile"}:
        lines += ["", *_times_by_group("the prefill, us", found)]
    return [*lines, "", *textwrap.wrap(_OVERLAP, _WIDTH)] if lines else []


def _times_by_group(title: str, found: dict[str, Row]) -> list[str]:
    """Lines of one of these tables. found: rows by implementation."""
    longest = next(iter(found.values()))["groups"]
    groups = list(dict.fromkeys([*longest, *(name for row in found.values() for name in row["groups"])]))
    lines = [_line(title, found), "|---" * (len(found) + 1) + "|"]
    for name in groups:
        lines.append(_line(name, (f"{row['groups'].get(name, 0.0):.0f}" for row in found.values())))
    for name, key in (("no kernel runs", "gaps"), ("in all, under the profiler", "us_step")):
        lines.append(_line(name, (f"{row[key]:.0f}" for row in found.values())))
    return lines


def agreement(rows: Sequence[Row]) -> list[str]:
    """A sentence on greedy answers that begin alike."""
    found = [row for row in rows if "equal_prefix" in row]
    if not found:
        return []
    by_name: dict[str, list[Row]] = {}
    for row in found:
        by_name.setdefault(row["impl"], []).append(row)
    parts = [f"{name} {_listed(row['equal_prefix'] for row in of_name)}" for name, of_name in by_name.items()]
    batches = _listed(row["batch"] for row in next(iter(by_name.values())))
    own = sorted({row["impl"] for row in rows if row["phase"] == "decode" and not row["repeats_itself"]})
    sentence = (
        f"Greedy tokens, of {found[0]['tokens_out']}, before the first that differs from "
        f"{found[0]['same_tokens_as']}'s, mean at batch {batches}: {'; '.join(parts)}. "
    )
    sentence += (
        f"Gave other tokens when repeated: {', '.join(own)}." if own else "All gave the same tokens when repeated."
    )
    return textwrap.wrap(sentence, _WIDTH)


def layer_of_experts(rows: Sequence[Row]) -> list[str]:
    """Lines on one layer of experts alone, of the last run that measured one."""
    if not rows:
        return []
    first = rows[0]
    us = {(row["batch"], row["impl"]): row["us"] for row in rows}
    tokens = list(dict.fromkeys(row["batch"] for row in rows))
    names = list(dict.fromkeys(row["impl"] for row in rows))
    ratios = {t: us[t, names[1]] / us[t, OURS] for t in tokens}
    few = mean([ratio for t, ratio in ratios.items() if t <= 64])
    told = (
        f"One layer of {first['model']}, {first['format'].replace('-', ' ')}, {first['gpu']}, all that comes after its "
        "router: sorting the choices, both products, silu(gate) * up, the weighted sum; CUDA graphs, weights from "
        "memory, experts equally likely (`python -m bench.engine.layer`). Geometric mean of the gain at 1 to 64 "
        f"tokens: {few:.2f}."
    )
    table = [_line("tokens", map(str, tokens)), _line("---", ["---"] * len(tokens)).replace(" ", "")]
    for name in names:
        table.append(_line(f"{name}, us", (f"{us[t, name]:.1f}" for t in tokens)))
    table.append(_line("gain", (f"{ratio:.2f}" for ratio in ratios.values())))
    return ["", "## One layer of experts", "", *textwrap.wrap(told, _WIDTH), "", *table]


def predictions(rows: Sequence[Row]) -> list[str]:
    """Lines of the section on a real model's next tokens; of the last run of each format."""
    if not rows:
        return []
    runs = {row["format"]: row["run"] for row in rows}
    kept = [row for row in rows if row["run"] == runs[row["format"]]]
    sentence = (
        f"{kept[0]['model']}, quantized anew, reads {kept[0]['positions']} tokens of text (`python -m "
        "bench.engine.agreement`). What each implementation predicts after each token is compared with what vLLM "
        "predicts with the same numbers as bf16 matrices: mean and largest divergence (KL) in nats, how often the "
        f"likeliest token is the same, and how many of {kept[0]['tokens_out']} greedy tokens come before the first "
        "that differs."
    )
    lines = ["", "## Next tokens of a real model", "", *textwrap.wrap(sentence, _WIDTH), ""]
    heads = "format", "kernel", "mean KL", "largest KL", "same likeliest token", "greedy tokens"
    lines += [_line(heads[0], heads[1:]), "|---" * len(heads) + "|"]
    for row in kept:
        kl = f"{row['kl_mean']:.2g}", f"{row['kl_max']:.2g}"
        lines.append(_line(row["format"], (row["impl"], *kl, f"{row['top1']:.1%}", f"{row['equal_prefix']:.0f}")))
    return lines


def _line(name: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join((name, *cells))} |"


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:.0f}" for number in numbers)
