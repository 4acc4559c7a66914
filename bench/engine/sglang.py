"""Measure w4gemm inside SGLang: ``python -m bench.engine.sglang --model llama-3-8b qwen3-30b-a3b=ct-int4-g128``.

For each model a checkpoint of random numbers is written; then SGLang serves it, without our plugin ("default") and with
it ("w4gemm"), each in a process of its own, timed as bench.engine times vLLM. What our plugin says that it took over is
in the rows; an engine that does not end well, or with the plugin and without that line, is a row of phase "failed", and
what it had measured is kept with ``"partial": true``.

Needs SGLang and a GPU. Rows go to bench/results/sglang.jsonl. CUDA graphs of decode steps are on; attention is
Triton's and sampling PyTorch's, so that FlashInfer need not be there.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.engine.checkpoint import write_once
from bench.engine.implementations import DEFAULT, OURS
from bench.engine.launch import (
    CAPTURED,
    ROOT,
    EngineError,
    base_environment,
    plugin_metadata,
    run_offline,
    work_folder,
)
from bench.engine.models import Model
from bench.engine.offline import Result, Task
from bench.engine.options import add_models, pairs_of
from bench.engine.packing import Packing
from bench.engine.rows import Answers, add_agreement, rows_of, table
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
    args, facts = parsed(argv), record.facts()
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
            reference: tuple[str, Answers] | None = None
            for impl in args.impl:
                log, variables = logs / f"{folder.name}-{impl}.log", base_environment(plugin)
                variables |= {"W4GEMM_SGLANG": _SWITCH[impl]}
                result, rows = measured(impl, task_of(args, model, folder), variables, log, args.seconds)
                answers = {point["batch"]: point["tokens"] for point in result.decode}
                if reference:
                    add_agreement(rows, answers, *reference)
                elif not result.failure:
                    reference = impl, answers
                rows = [common | row | facts for row in rows]
                record.append(args.out, *rows)
                shown += rows
            say(f"\n{model.name}, {packing}, {facts['gpu'] or 'no GPU'}\n{table(shown)}")


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    p = command("bench.engine.sglang", __doc__)
    add_models(p)
    p.add_argument("--impl", nargs="+", choices=tuple(_SWITCH), default=list(_SWITCH), help="(default: both)")
    p.add_argument("--batch", nargs="+", type=positive, default=[1, 8, 64], metavar="N", help="requests (1 8 64)")
    p.add_argument("--tokens-in", type=positive, default=128, metavar="N", help="of each request (%(default)s)")
    p.add_argument("--tokens-out", type=positive, default=128, metavar="N", help="of each answer (%(default)s)")
    p.add_argument("--repeat", type=positive, default=5, metavar="N", help="times each is measured (%(default)s)")
    p.add_argument("--memory", type=float, default=0.7, metavar="PART", help="of the GPU's (%(default)s)")
    p.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of sglang.Engine")
    p.add_argument("--seconds", type=float, default=300, metavar="S", help="limit of each engine (%(default)s)")
    p.add_argument("--work", type=Path, metavar="DIR", help="models, kept (default: a temporary folder)")
    p.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="rows (bench/results/sglang.jsonl)")
    p.add_argument("--logs", type=Path, metavar="DIR", help="what engines print")
    args = p.parse_args(argv)
    if args.tokens_in + args.tokens_out > _CONTEXT:
        p.error(f"--tokens-in and --tokens-out: wanted at most {_CONTEXT} together")
    return args


def task_of(args: argparse.Namespace, model: Model, folder: Path) -> Task:
    """Return what the process of an engine does: the arguments of ``sglang.Engine``, and what it is asked for."""
    most = max(args.batch)
    engine: dict[str, Any] = {
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
    asked = {name: getattr(args, name) for name in ("tokens_in", "tokens_out", "repeat")}
    return Task(engine, model.vocabulary, tuple(args.batch), **asked, name="sglang")


def measured(impl: str, task: Task, variables: dict[str, str], log: Path, seconds: float) -> tuple[Result, list[Row]]:
    """Run an implementation, in a process of its own; return the result and its rows."""
    log.unlink(missing_ok=True)
    try:
        result = run_offline(task, variables, log, seconds)
    except EngineError as e:
        result = Result(failure=str(e))
    says = re.search(r"w4gemm runs .*", log.read_text(errors="replace")) if log.exists() else None
    if impl == OURS and not says and not result.failure:
        result.failure = f"w4gemm took over nothing: {log} has no line 'w4gemm runs'"
    rows = rows_of(result, task) if result.engine_version else []
    if result.failure:
        say(f"{log.stem}: {result.failure}")
        rows = [*(row | {"partial": True} for row in rows), {"phase": "failed", "reason": result.failure}]
    own = {"impl": impl, "engine_version": result.engine_version, "took_over": says[0] if says else ""}
    return result, [own | row for row in rows]


if __name__ == "__main__":
    main()
