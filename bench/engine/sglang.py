"""Measure w4gemm inside SGLang: ``python -m bench.engine.sglang --model llama-3-8b qwen3-30b-a3b=ct-int4-g128``.

For each model a checkpoint of random numbers is written; then SGLang serves it, without our plugin ("default") and with
it ("w4gemm"), each in a process of its own. ``sglang.Engine.generate`` answers greedily at several batch sizes. A step
takes what an answer of ``--tokens-out`` tokens takes beyond one of ``--tokens-before``, divided by the tokens between;
the median of ``--repeat`` runs, and of up to six more while these differ. What our plugin says that it took over is in
the rows; an engine that does not end well, or with the plugin and without that line, is a row of phase "failed", and
what it had measured is kept with ``"partial": true``.

Needs SGLang and a GPU. Rows go to bench/results/sglang.jsonl. CUDA graphs of decode steps are on; attention is
Triton's and sampling PyTorch's, so that FlashInfer need not be there.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.engine.checkpoint import write_once
from bench.engine.implementations import DEFAULT, OURS
from bench.engine.launch import (
    CAPTURED,
    ROOT,
    base_environment,
    last_error,
    plugin_metadata,
    started,
    work_folder,
)
from bench.engine.models import Model
from bench.engine.offline import MORE_RUNS, is_trusted
from bench.engine.options import add_models, pairs_of
from bench.engine.packing import Packing
from bench.engine.rows import Answers, add_agreement, spread
from bench.options import command
from bench.rows import Row

import w4gemm
from w4gemm.console.options import positive
from w4gemm.console.progress import say
from w4gemm.tuning import record

RESULTS = ROOT / "bench/results/sglang.jsonl"
GROUP = "sglang.srt.plugins"
_SWITCH = {DEFAULT: "off", OURS: "auto"}
_CONTEXT = 4096


def main(argv: Sequence[str] | None = None) -> None:
    args = parsed(argv)
    if args.child:
        serve(json.loads(args.child.read_text()), args.child.with_suffix(".result.json"))
        return
    facts = record.facts()
    packings = [Packing.parse(text) for text in args.format]
    pairs = [pair for text in args.model for pair in pairs_of(text, packings, args)]
    with work_folder(args.work) as work:
        logs = args.logs or work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        plugin = plugin_metadata(work / "plugin", GROUP)
        for model, packing in pairs:
            folder = work / "models" / f"{model.name}-{packing}"
            write_once(model, packing, folder)
            common = {"kind": "engine", "engine": "sglang", "model": model.name, "format": str(packing)}
            common |= {"run": record.run_name(facts), "mode": "graphs", "impl_version": w4gemm.__version__}
            shown: list[Row] = []
            reference: Measured | None = None
            for impl in args.impl:
                result = measured(impl, task_of(args, model, folder), logs, plugin, args.seconds)
                if reference:
                    add_agreement(result.rows, result.answers, reference.impl, reference.answers)
                elif result.whole:
                    reference = result
                rows = [common | row | facts for row in result.rows]
                record.append(args.out, *rows)
                shown += rows
            say("\n".join((f"\n{model.name}, {packing}, {facts['gpu'] or 'no GPU'}", *lines(shown))))


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    p = command("bench.engine.sglang", __doc__)
    add_models(p)
    p.add_argument("--impl", nargs="+", choices=tuple(_SWITCH), default=list(_SWITCH), help="(default: both)")
    p.add_argument("--batch", nargs="+", type=positive, default=[1, 8, 64], metavar="N", help="requests (1 8 64)")
    p.add_argument("--tokens-in", type=positive, default=128, metavar="N", help="of each request (%(default)s)")
    p.add_argument("--tokens-out", type=positive, default=80, metavar="N", help="of each answer (%(default)s)")
    p.add_argument("--tokens-before", type=positive, default=16, metavar="N", help="that do not count (%(default)s)")
    p.add_argument("--repeat", type=positive, default=5, metavar="N", help="times each is measured (%(default)s)")
    p.add_argument("--memory", type=float, default=0.7, metavar="PART", help="of the GPU's (%(default)s)")
    p.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of sglang.Engine")
    p.add_argument("--seconds", type=float, default=300, metavar="S", help="limit of each engine (%(default)s)")
    p.add_argument("--work", type=Path, metavar="DIR", help="models, kept (default: a temporary folder)")
    p.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="rows (bench/results/sglang.jsonl)")
    p.add_argument("--logs", type=Path, metavar="DIR", help="what engines print")
    p.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.tokens_before >= args.tokens_out:
        p.error(f"--tokens-before: wanted fewer than --tokens-out, {args.tokens_out}, got {args.tokens_before}")
    if args.tokens_in + args.tokens_out > _CONTEXT:
        p.error(f"--tokens-in and --tokens-out: wanted at most {_CONTEXT} together")
    return args


def task_of(args: argparse.Namespace, model: Model, folder: Path) -> Row:
    """Return what the process of an engine does: the arguments of ``sglang.Engine``, and what it is asked for."""
    most = max(args.batch)
    engine = {
        "model_path": str(folder),
        "skip_tokenizer_init": True,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_radix_cache": True,  # a prompt comes more than once
        "disable_prefill_cuda_graph": True,
        "cuda_graph_bs_decode": sorted({batch for batch in (*CAPTURED, *args.batch) if batch <= most}),
        "cuda_graph_max_bs_decode": most,
        "max_running_requests": most,
        "mem_fraction_static": args.memory,
        "context_length": _CONTEXT,
        "random_seed": 0,
        "log_level": "info",  # by default an Engine logs errors alone, and the plugin's line is no error
        **args.engine,
    }
    names = ("batch", "tokens_in", "tokens_out", "tokens_before", "repeat")
    asked = {name: getattr(args, name) for name in names}
    return {"engine": engine, "vocabulary": model.vocabulary, **asked}


def serve(task: Row, result_file: Path) -> None:
    """Run an engine in this process, and write what it did to a file after each batch."""
    begun = time.perf_counter()
    import sglang

    engine = sglang.Engine(**task["engine"])
    row: Row = {"version": sglang.__version__, "seconds": round(time.perf_counter() - begun, 2), "batches": []}
    row["done"] = False
    rng = random.Random(1)

    def prompts_for(batch: int) -> list[list[int]]:
        return [rng.choices(range(4, task["vocabulary"]), k=task["tokens_in"]) for _ in range(batch)]

    def answer(prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        start = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=params)
        return time.perf_counter() - start, [each["output_ids"][:tokens] for each in answers]

    for batch in task["batch"]:
        prompts = prompts_for(batch)
        tokens = answer(prompts, task["tokens_out"])[1]  # a warm-up, as is the next
        answer(prompts, task["tokens_before"])
        point: Row = {"batch": batch, "tokens": tokens, "seconds": [], "repeats_itself": True}
        for run in range(task["repeat"] + MORE_RUNS):
            if run >= task["repeat"] and is_trusted(point["seconds"]):
                break
            before, _ = answer(prompts, task["tokens_before"])
            whole, again = answer(prompts, task["tokens_out"])
            point["seconds"].append(whole - before)
            point["repeats_itself"] &= again == tokens
        row["batches"].append(point)
        result_file.write_text(json.dumps(row))
    row["done"] = True
    result_file.write_text(json.dumps(row))
    engine.shutdown()


class Measured(NamedTuple):
    """Rows and answers of an implementation."""

    impl: str
    rows: list[Row]
    answers: Answers
    whole: bool
    """False if its engine ended early."""


def measured(impl: str, task: Row, logs: Path, plugin: Path | None, seconds: float) -> Measured:
    """Run an implementation, in a process of its own. plugin: see ``plugin_metadata``."""
    name = f"{Path(task['engine']['model_path']).name}-{impl}"
    task_file, log = logs / f"{name}.json", logs / f"{name}.log"
    result_file = task_file.with_suffix(".result.json")
    task_file.write_text(json.dumps(task))
    for old in (result_file, log):
        old.unlink(missing_ok=True)
    variables = base_environment(plugin) | {"W4GEMM_SGLANG": _SWITCH[impl]}
    begun = time.monotonic()
    try:
        with started([sys.executable, "-m", "bench.engine.sglang", "--child", str(task_file)], variables, log) as child:
            end = f"ended with {child.wait(seconds)} after {time.monotonic() - begun:.0f} s"
    except subprocess.TimeoutExpired:
        end = f"not done in {seconds:.0f} s, its limit"
    result = json.loads(result_file.read_text()) if result_file.exists() else {"batches": [], "done": False}
    says = re.search(r"w4gemm runs .*", log.read_text(errors="replace"))
    reason = "" if result["done"] else f"{end}: {last_error(log)}"
    if impl == OURS and not says and not reason:
        reason = f"w4gemm took over nothing: {log} has no line 'w4gemm runs'"
    common: Row = {"impl": impl, "engine_version": result.get("version", "")}
    common |= {"took_over": says[0] if says else ""} | ({"partial": True} if reason else {})
    rows = [decode_row(task, point) for point in result["batches"]]
    if "seconds" in result:
        rows.insert(0, {"phase": "start", "seconds": result["seconds"]})
    if reason:
        say(f"{name}: {reason}")
        rows.append({"phase": "failed", "reason": reason})
    answers = {point["batch"]: point["tokens"] for point in result["batches"]}
    return Measured(impl, [common | row for row in rows], answers, not reason)


def decode_row(task: Row, point: Row) -> Row:
    """Return the row of a batch, without the fields that all rows of its implementation share."""
    steps = task["tokens_out"] - task["tokens_before"]
    row = {"phase": "decode", "batch": point["batch"]}
    row |= {name: task[name] for name in ("tokens_in", "tokens_out", "tokens_before")}
    row |= {"runs": len(point["seconds"]), "repeats_itself": point["repeats_itself"]}
    return row | spread("ms_step", [1e3 * seconds / steps for seconds in point["seconds"]])


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The lines that end a model's measurement."""
    ms: dict[Any, dict[str, float]] = {}
    for row in rows:
        if row["phase"] == "decode":
            ms.setdefault(row["batch"], {})[row["impl"]] = row["ms_step"]
    for batch, of_impl in ms.items():
        times = ", ".join(f"{impl} {time:.2f}" for impl, time in of_impl.items())
        gain = f"; {of_impl[DEFAULT] / of_impl[OURS]:.2f}" if of_impl.keys() == _SWITCH.keys() else ""
        yield f"batch {batch}, ms a step: {times}{gain}"
    yield from dict.fromkeys(row["took_over"] for row in rows if row["took_over"])


if __name__ == "__main__":
    main()
