"""Gains of models inside vLLM and SGLang, from rows of engine.jsonl and sglang.jsonl: :func:`cases_of`; of engines that
took turns in one process, from rows of engine_pair.jsonl: :func:`turns_of`."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bench.engine.implementations import OURS, OURS_FP8
from bench.rows import Row

COLUMNS = ("batch 1", "batch 8", "batch 64", "batch 256", "prefill")
SCATTERS = 0.05
"""A ratio is marked if the rounds of one of its times differ by a larger part."""
_MODES = {"ep": "expert parallel", "eplb": "experts moved"}
"""Words for marks of a mode."""


class Case(NamedTuple):
    """A model that an engine served."""

    engine: str
    model: str
    format: str
    gpus: int
    mode: str

    def __str__(self) -> str:
        how = [_MODES[part] for part in self.mode.split("+") if part in _MODES]
        where = [f"{self.gpus} GPUs"] if self.gpus > 1 else []
        return ", ".join((self.model, self.format, *where, *how))


class Gain(NamedTuple):
    """Time of the engine's own kernels / w4gemm's, of the newest run that measured both."""

    over_choice: float
    """Over the kernels that the engine chooses."""
    over_best: float | None
    """Over the fastest of two or more of the engine's kernels; None if only its choice ran."""
    ms: float
    """Milliseconds of a decode step or a prefill with w4gemm."""
    row: Row
    """w4gemm's row."""
    scatter: float = 0.0
    """Under load: by what part of their median the turns of a server differ, of the two where it is larger."""

    def __str__(self) -> str:
        notes = [f"{self.over_best:.2f}"] if self.over_best else []
        notes += [f"{self.scatter:.0%}"] if self.scatter > SCATTERS else []
        return f"{self.over_choice:.2f}" + (f" ({', '.join(notes)})" if notes else "")


def cases_of(rows: Iterable[Row], phases: Sequence[str] = ("decode", "prefill")) -> dict[Case, dict[str, Gain]]:
    """Return the gains of every case by column, of whole models alone and, but for ``vllm serve``, of the engine's
    default compilation."""
    runs: dict[Case, dict[str, dict[str, list[Row]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in rows:
        # DeepSeek-V3 has no room on one GPU: five of its layers stand for it
        cut = row["model"].endswith("-layers") and not row["model"].startswith("deepseek")
        mode = row.get("mode", "default")
        engine = row["kind"] == "engine"  # not engine_variant, such as vLLM without its second stream
        usual = "default" in mode or row["engine"] == "sglang" or row["phase"] == "serve"
        if engine and row["phase"] in phases and not cut and usual:
            case = Case(row["engine"], row["model"], row["format"], row.get("gpus", 1), mode)
            runs[case][_column(row)][row["run"]].append(row)
    cases: dict[Case, dict[str, Gain]] = {}
    for case, columns in sorted(runs.items()):
        gains = {name: gain for name, by_run in columns.items() if (gain := _newest(by_run))}
        if gains:
            cases[case] = gains
    return cases


Gains = dict[str, Gain]
"""A model's, by column."""


def in_vllm(rows: Iterable[Row]) -> dict[str, Gains]:
    """Return the gains of each model in vLLM."""
    return {str(case): gains for case, gains in cases_of(rows).items() if case.engine == "vllm"}


def mean_gains(cases: dict[str, Gains], columns: Sequence[str]) -> list[float | None]:
    """Return the geometric mean over the engine's choice by column."""
    of_columns = ([gains[name].over_choice for gains in cases.values() if name in gains] for name in columns)
    return [statistics.geometric_mean(ratios) if ratios else None for ratios in of_columns]


def _column(row: Row) -> str:
    if row["phase"] == "prefill":
        return "prefill"
    if row["phase"] == "serve":
        return f"{row['batch']} at a time" + ("" if row.get("streamed", True) else ", whole")
    return f"batch {row['batch']}"


def _ms(row: Row) -> float:
    """A time that falls as the engine gets faster."""
    if row["phase"] == "prefill":
        return 1e3 * float(row["seconds"])
    return 1e3 / float(row["tokens_s"]) if row["phase"] == "serve" else float(row["ms_step"])


def _scatter(row: Row) -> float:
    return (row["tokens_s_most"] - row["tokens_s_least"]) / row["tokens_s"] if "tokens_s_most" in row else 0.0


def _newest(by_run: dict[str, list[Row]]) -> Gain | None:
    """Return the gain of the newest run with w4gemm and the engine's choice; over_best of the newest with more."""
    gain, over_best = None, None
    for _, rows in sorted(by_run.items()):
        ours = [row for row in rows if OURS in row["impl"]]
        others = [row for row in rows if OURS not in row["impl"]]
        chosen = [row for row in others if row.get("chosen", True)]
        if ours and chosen:
            ms = _ms(ours[-1])
            if len({row["impl"] for row in others}) > 1:
                over_best = min(map(_ms, others)) / ms
            gain = Gain(_ms(chosen[-1]) / ms, over_best, ms, ours[-1], max(map(_scatter, (ours[-1], chosen[-1]))))
    return gain and gain._replace(over_best=over_best)


# --- engines that took turns ------------------------------------------------------------------------------------------

_PARTS = {"linear": "linear layers", "experts": "experts", "decode": "whole", "prefill": "whole"}
_TIMES = {"linear": "us", "experts": "us", "decode": "ms_step", "prefill": "seconds"}
_OWN = {OURS: "", OURS_FP8: "+fp8"}
"""Engines with w4gemm, and the mark of a mode that each stands for."""


class Turns(NamedTuple):
    """What was timed by turns, and beside which of the engine's kernels."""

    engine: str
    model: str
    format: str
    mode: str
    part: str
    other: str

    def __str__(self) -> str:
        words = {"fp8": "fp8 x", "compile3": "compiled", "invariant": "batch invariant", "apart": "one after the other"}
        words |= {f"lora{n}": f"{n} LoRA adapters" for n in range(2, 10)} | {"lora": "LoRA"}
        words |= {f"apart{n}": "a process each" for n in range(2, 10)} | _MODES
        how = [words[mark] for mark in self.mode.split("+") if mark in words]
        model = re.sub(r"-(\d+)-layers$", r", \1 layers", self.model)
        return ", ".join((model, self.format, *how))


def turns_of(rows: Iterable[Row]) -> dict[Turns, dict[str, str]]:
    """Return each comparison's ratios by column: the other kernels' time / w4gemm's, with the rounds' scatter if it is
    above ``SCATTERS``. A newer run replaces an older one's ratio. In a run w4gemm's rows come before the others'."""
    ours: dict[tuple[str, Turns], Row] = {}
    ratios: dict[Turns, dict[str, str]] = defaultdict(dict)
    for row in rows:
        if row["phase"] not in _TIMES or "us_p20" in row:  # of one round
            continue
        column = f"prefill of {row['tokens_in']}" if row["phase"] == "prefill" else str(row["batch"])
        engine = f"{row['engine']} {row['engine_version']}"
        case = Turns(engine, row["model"], row["format"], row["mode"], _PARTS[row["phase"]], column)
        if row["impl"] in _OWN:
            ours[row["run"], case._replace(mode=case.mode + _OWN[row["impl"]])] = row
            continue
        for mark in _OWN.values():
            beside = case._replace(mode=case.mode + mark)
            if (own := ours.get((row["run"], beside))) is None:
                continue
            name = _TIMES[row["phase"]]
            scatter = max((r[f"{name}_most"] - r[f"{name}_least"]) / r[name] for r in (row, own))
            ratio = f"{row[name] / own[name]:.2f}" + (f" ({scatter:.0%})" if scatter > SCATTERS else "")
            other = row["impl"] + ("*" if row["chosen"] else "")
            ratios[beside._replace(other=other)][column] = ratio
    return dict(ratios)
