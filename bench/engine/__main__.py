"""Measure implementations inside vLLM: ``python -m bench.engine --model llama-3-8b --impl default w4gemm marlin``.

For each model and format a checkpoint of random numbers is written; then every implementation serves it in a process of
its own, one after the other in mixed order. ``LLM.generate`` is timed at several batch sizes, for a long prompt, and to
the first token; with ``--serve``, ``vllm serve`` under load instead. All answers are greedy. An implementation whose
layers got another kernel than asked for is refused. What fails is a row of phase "failed" with its reason; rows that an
engine had measured before are kept with ``"partial": true``.

``default`` is vLLM's own choice: its rows have the name of the kernel that it chose and ``"chosen": true``. Needs vLLM
and a GPU. Rows go to bench/results/engine.jsonl.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.engine import serve
from bench.engine.checkpoint import write_once
from bench.engine.implementations import DEFAULT, OURS, Implementation, Kernels
from bench.engine.launch import EngineError, EngineOptions, environment, plugin_metadata, run_offline, work_folder
from bench.engine.models import Model
from bench.engine.offline import Result, Task
from bench.engine.options import pairs_of, parser
from bench.engine.packing import Packing
from bench.engine.rows import Answers, add_agreement, cache_tokens, rows_of, table, with_room
from bench.rows import Row

import w4gemm
from w4gemm.console.progress import say
from w4gemm.tuning import record


@dataclass(frozen=True)
class Job:
    """One implementation that serves one checkpoint.

    Attributes:
        folder: of the checkpoint.
        caches: folder of compiled code.
        log: file for what the engine prints.
        plugin: folder with our plugin's metadata; None if the package is installed.
        seconds: limit of the process.
    """

    model: Model
    implementation: Implementation
    options: EngineOptions
    task: Task
    folder: Path
    caches: Path
    log: Path
    plugin: Path | None
    seconds: float
    lock: Path | None = None
    """File that is locked while there is load on a server."""

    def environment(self) -> dict[str, str]:
        return environment(self.implementation, self.caches, self.plugin)

    def arguments(self) -> Row:
        """Arguments of ``vllm.LLM``."""
        return self.options.arguments(self.folder, self.implementation, self.model, self.task.batches)


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.expert_parallel and args.gpus < 2:
        parser().error(f"--expert-parallel: wanted --gpus 2 or more beside it, got {args.gpus}")
    if args.rebalance and not args.expert_parallel:
        parser().error(f"--rebalance: wanted --expert-parallel beside it, got {args.rebalance} without it")
    packings = [Packing.parse(text) for text in args.format]
    implementations = [Implementation.parse(text) for text in args.impl]
    pairs = [pair for text in args.model for pair in pairs_of(text, packings, args)]
    facts, end = record.facts(), time.monotonic() + args.budget
    if not args.in_order:
        random.Random(facts["utc"]).shuffle(implementations)
    with work_folder(args.work) as work:
        logs = args.logs or work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        ours = any(OURS in (i.linear, i.experts) for i in implementations)
        plugin = plugin_metadata(work / "plugin") if ours else None
        for model, packing in pairs:
            name, shown = f"{model.name}-{packing}", list[Row]()
            reference: tuple[str, Answers] | None = None
            folder = work / "models" / name
            write_once(model, packing, folder)
            for implementation in implementations:
                if time.monotonic() > end:
                    say(f"{name}, {implementation.name}: not run, the budget is spent")
                    continue
                own = f"{name}-{implementation.name}"
                options, task = options_of(args), task_of(args, model)
                places = folder, work / "caches" / own, logs / f"{own}.log"
                job = Job(model, implementation, options, task, *places, plugin, args.seconds, args.turn)
                result, rows = run(job, args.serve)
                answers = {point["batch"]: point["tokens"] for point in result.decode}
                if reference:
                    add_agreement(rows, answers, *reference)
                elif answers and not result.failure:
                    reference = rows[0]["impl"], answers
                rows = [common_of(args, model, packing, facts) | row | facts for row in rows]
                record.append(args.out, *rows)
                shown += rows
            say(f"\n{model.name}, {packing}, {facts['gpu'] or 'no GPU'}\n{table(shown)}")
            if args.work is None:
                shutil.rmtree(folder)


def options_of(args: argparse.Namespace) -> EngineOptions:
    longest = max(args.tokens_in + args.tokens_out, args.prefill + 1)
    return EngineOptions(
        dtype=args.dtype,
        compiled=not args.no_compile,
        eager=args.eager,
        gpus=args.gpus,
        memory=args.memory,
        max_len=-(-longest // 256) * 256,
        expert_parallel=args.expert_parallel,
        rebalance=args.rebalance,
        others=args.engine,
    )


def task_of(args: argparse.Namespace, model: Model) -> Task:
    asked = {name: getattr(args, name) for name in ("tokens_in", "tokens_out", "prefill", "repeat")}
    return Task(engine={}, vocabulary=model.vocabulary, batches=tuple(args.batch), **asked)


def common_of(args: argparse.Namespace, model: Model, packing: Packing, facts: Row) -> Row:
    """Return what all rows of a checkpoint share. facts: of the machine."""
    mode = "eager" if args.eager else "graphs" if args.no_compile else "default"
    mode += "+ep" * args.expert_parallel + "+eplb" * bool(args.rebalance)
    common = {"kind": "engine", "run": record.run_name(facts), "engine": "vllm", "model": model.name}
    return common | {"format": str(packing), "dtype": args.dtype, "gpus": args.gpus, "mode": mode}


def run(job: Job, serves: bool) -> tuple[Result, list[Row]]:
    """Serve a checkpoint with an implementation; return the result, and rows with the name of what the layers ran."""
    start, name, rows = time.monotonic(), job.implementation.name, list[Row]()
    try:
        result, rows = (served if serves else offline)(job)
        name, failure = checked(job.implementation, result.kernels, rows), result.failure
    except EngineError as e:
        result, rows, failure = Result(failure=str(e)), [], str(e)
    if failure:
        say(f"{job.log.stem}, {name} failed: {failure}")
        rows = [*(row | {"partial": True} for row in rows), {"phase": "failed", "reason": failure}]
    version = w4gemm.__version__ if OURS in name else result.engine_version
    own = {"impl": name, "impl_version": version, "engine_version": result.engine_version}
    own["chosen"] = job.implementation.linear == DEFAULT
    say(f"{job.log.stem}: took {time.monotonic() - start:.0f} s")
    return result, [own | row for row in rows]


def offline(job: Job) -> tuple[Result, list[Row]]:
    """Start an engine and measure it.

    Raises:
        EngineError: if it does not start.
    """
    arguments = job.arguments() | {"skip_tokenizer_init": True, "disable_log_stats": True}
    task = replace(job.task, engine=arguments)
    result = run_offline(task, job.environment(), job.log, job.seconds)
    return result, with_room(rows_of(result, task), cache_tokens(read(job.log)))


def served(job: Job) -> tuple[Result, list[Row]]:
    """Start a server and put a load on it for each number of requests at a time. Raises as :func:`offline`."""
    arguments, task = job.arguments(), job.task
    if compilation := arguments.pop("compilation_config", None):
        compilation.pop("cudagraph_capture_sizes")  # requests come and go: all of vLLM's batch sizes
        arguments |= {"compilation_config": compilation} if compilation else {}
    loads = [
        serve.Load(batch, task.tokens_in, task.tokens_out, task.vocabulary, streamed)
        for batch in task.batches
        for streamed in (True, False)
    ]
    result = serve.serve(arguments, job.environment(), job.log, job.seconds, loads, job.lock)
    rows: list[Row] = [{"phase": "start", "seconds": round(result.start_s, 2)}]
    for load, figures in zip(loads, result.served, strict=False):
        point = {"batch": load.at_a_time, "tokens_in": load.tokens_in, "tokens_out": load.tokens_out}
        rows.append({"phase": "serve", **point, **figures})
    return result, rows


def read(log: Path) -> str:
    """Return what an engine printed."""
    return log.read_text(errors="replace") if log.exists() else ""


def checked(implementation: Implementation, kernels: Kernels, rows: list[Row]) -> str:
    """Return the name of what the layers ran, and write the classes that multiply into every row.

    Raises:
        EngineError: if the layers got other kernels than asked for.
    """
    try:
        name = implementation.check(kernels)
    except ValueError as e:
        raise EngineError(str(e)) from None
    for row in rows:
        row["kernels"] = {cls.rpartition(".")[2]: n for counts in kernels.values() for cls, n in counts.items()}
    return name


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # which leaves no engine behind
    main()
