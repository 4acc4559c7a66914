"""Measure implementations inside vLLM: ``python -m bench.engine --model llama-3-8b --impl default w4gemm marlin``.

For each model and format a checkpoint of random numbers is written; then every implementation serves it in a process of
its own, one after the other in mixed order. With ``--at-once N``, N engines start side by side, and each is measured
while the others do nothing. ``LLM.generate`` is timed at several batch sizes, for a long prompt, and to the first
token; with ``--serve``, ``vllm serve`` under load instead. All answers are greedy. An implementation whose layers got
another kernel than asked for is refused. What fails is a row of phase "failed" with its reason. If the engine had
measured something before, as one that is stopped by ``--seconds`` or an interrupt, the rows of that are kept, with
``"partial": true``; the page leaves them out if there is a run in which nothing failed.

``default`` is vLLM's own choice: its rows have the name of the kernel that it chose and ``"chosen": true``. Needs vLLM
and a GPU. Rows go to bench/results/engine.jsonl.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from bench.engine import phases, profile, serve
from bench.engine.cases import Case, Place, Slot
from bench.engine.implementations import DEFAULT, OURS, Implementation, Kernels
from bench.engine.launch import (
    EngineError,
    EngineOptions,
    environment,
    plugin_metadata,
    preloaded_vllm,
    run_offline,
    work_folder,
)
from bench.engine.models import Model
from bench.engine.offline import Result, Task
from bench.engine.options import pairs_of, parser
from bench.engine.packing import Packing
from bench.engine.preload import end_descendants
from bench.engine.rows import rows_of, table, with_room
from bench.engine.turns import Turns
from bench.rows import Row

import w4gemm
from w4gemm.console.progress import say
from w4gemm.tuning import record

Job = tuple[Case, Implementation]


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
    with place_of(args, implementations) as place:
        cases = [case_of(args, model, packing, place, facts) for model, packing in pairs]
        jobs = [(case, implementation) for case in cases for implementation in implementations]
        while jobs:
            if time.monotonic() > end:
                say(f"{', '.join(f'{case} {i.name}' for case, i in jobs)}: not run, the budget is spent")
                break
            count = side_by_side(jobs[: args.at_once])
            now, jobs = jobs[:count], jobs[count:]
            measure([(case.beside(count), implementation) for case, implementation in now], place)
            for case in dict.fromkeys(case for case, _ in now):
                if case not in [other for other, _ in jobs]:
                    say(f"\n{case.model.name}, {case.packing}, {facts['gpu'] or 'no GPU'}\n{table(case.shown)}")
                    case.end(kept=args.work is not None)


@contextmanager
def place_of(args: argparse.Namespace, implementations: Sequence[Implementation]) -> Iterator[Place]:
    """Give the place; what is temporary is removed at its end."""
    with ExitStack() as stack:
        work = stack.enter_context(work_folder(args.work))
        logs = args.logs or work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        ours = any(OURS in (i.linear, i.experts) for i in implementations)
        plugin = plugin_metadata(work / "plugin") if ours else None
        count = 0 if args.serve or args.fresh else args.at_once
        preloaded = [stack.enter_context(preloaded_vllm(plugin, logs / f"preload-{i}.log")) for i in range(count)]
        yield Place(work, logs, plugin, tuple(preloaded), args.out)


def case_of(args: argparse.Namespace, model: Model, packing: Packing, place: Place, facts: Row) -> Case:
    """Return what to do with a checkpoint.

    Args:
        facts: of the run.
    """
    longest = max(args.tokens_in + args.tokens_out, args.prefill + 1)
    options = EngineOptions(
        dtype=args.dtype,
        compiled=not args.no_compile,
        eager=args.eager,
        gpus=args.gpus,
        memory=args.memory,
        max_len=-(-longest // 256) * 256,
        at_once=args.at_once,
        expert_parallel=args.expert_parallel,
        rebalance=args.rebalance,
    )
    task = Task(
        engine={},
        vocabulary=model.vocabulary,
        batches=tuple(args.batch),
        tokens_in=args.tokens_in,
        tokens_out=args.tokens_out,
        prefill=args.prefill,
        repeat=args.repeat,
        profiled=() if args.profile is None else tuple(args.profile) or (1,),
    )
    common = {"kind": "engine", "run": record.run_name(facts), "engine": "vllm", "model": model.name}
    common |= {"format": str(packing), "dtype": args.dtype, "gpus": args.gpus}
    mode = "eager" if args.eager else "graphs" if args.no_compile else "default"
    mode += "+ep" * args.expert_parallel + "+eplb" * bool(args.rebalance)
    common |= {"mode": mode, "at_once": args.at_once}
    return Case(model, packing, options, task, args.serve, args.starts, args.seconds, place, common, facts)


def side_by_side(jobs: Sequence[Job]) -> int:
    """Write the checkpoints, and return how many of the engines have room in the GPU's memory together: the first of
    them, and at least one."""
    for case, _ in jobs:
        case.write()
    for count in range(len(jobs), 1, -1):
        if reason := next((lack for case, _ in jobs[:count] if (lack := case.beside(count).memory_lack())), ""):
            say(f"{count} engines side by side: {reason}; {count - 1} instead")
        else:
            return count
    return 1


def measure(jobs: Sequence[Job], place: Place) -> None:
    """Serve checkpoints, all at the same time. Each engine's rows are stored when it is done, also if the command is
    interrupted."""
    turns = Turns(place.work / f"turns-{time.monotonic_ns()}" if len(jobs) > 1 else None)
    preloaded, interrupted = place.preloaded or (None,) * len(jobs), threading.Event()
    futures: list[Future[None]] = []
    with ThreadPoolExecutor(len(jobs)) as pool:
        try:
            with turns.until_begun(len(jobs)):
                for job, process in zip(jobs, preloaded, strict=False):
                    futures.append(pool.submit(run, *job, Slot(turns, process, interrupted)))
            for future in as_completed(futures):
                future.result()
        except BaseException:
            interrupted.set()
            while wait(futures, timeout=0.2).not_done:  # a thread may be about to start an engine
                end_descendants(os.getpid())
            raise


def run(case: Case, implementation: Implementation, slot: Slot) -> None:
    """Serve a checkpoint with an implementation, and store its rows, whole."""
    start, common = time.monotonic(), case.common
    try:
        name, result, rows = (served if case.serve else offline)(case, implementation, slot)
        common, failure = {**common, "engine_version": result.engine_version}, result.failure
        case.compare(name, result, rows)
    except EngineError as e:
        name, rows, failure = implementation.name, [], str(e)
    if failure:
        reason = f"interrupted: {failure}" if slot.interrupted.is_set() else failure
        say(f"{case}, {name} failed: {reason}")
        rows = [*(row | {"partial": True} for row in rows), {"phase": "failed", "reason": reason}]
    version = w4gemm.__version__ if OURS in name else common.get("engine_version", "")
    own = {"impl": name, "impl_version": version, "chosen": implementation.linear == DEFAULT}
    say(f"{case}: {implementation.name} took {time.monotonic() - start:.0f} s")
    case.store([common | own | row for row in rows])


def offline(case: Case, implementation: Implementation, slot: Slot) -> tuple[str, Result, list[Row]]:
    """Start an engine as often as wanted, measure it at the last start.

    Returns:
        Name of what the layers ran, the last start's result, and rows. If the engine ended early, the result's
        ``failure`` says why.

    Raises:
        EngineError: if no start was measured, or the layers got other kernels.
    """
    arguments = case.options.arguments(case.folder, implementation, case.model, case.task.batches)
    arguments |= {"skip_tokenizer_init": True, "disable_log_stats": True}
    task = replace(case.task, engine=arguments, turns=str(slot.turns.file or ""))
    caches = case.caches_of(implementation)
    variables = environment(implementation, caches, case.place.plugin)
    rows: list[Row] = []
    for number in range(1, case.starts + 1):
        start, last = caches.start(), number == case.starts
        log, begun = case.place.log(f"{case}-{implementation.name}-{number}"), time.monotonic()
        try:
            result = run_offline(replace(task, start_only=not last), variables, log, case.limit, slot.preloaded)
        except EngineError as e:
            if not rows:
                raise
            result.failure = str(e)
            break
        caches.started()
        said = read(log)
        started, *found = with_room(rows_of(result, task), phases.cache_tokens(said))
        parts = phases.of_start(said, result.start_s, result.import_s)
        rows += [{**started, "start": start, "parts": parts}, *found]
        around = time.monotonic() - begun - result.start_s - result.measure_s
        say(f"{case}, {implementation.name}, {start} start: {result.start_s:.1f} s ({phases.text(parts)})")
        say(f"  measured for {result.measure_s:.1f} s; {around:.1f} s before and after, such as for the import of vLLM")
        if result.failure:
            break
    name = checked(implementation, result.kernels, rows)
    for row in profile.rows_of(result.profiles, result.prefill_profile):
        rows.append(row)
        say(f"{name}: {profile.table(row)}")
    return name, result, rows


def served(case: Case, implementation: Implementation, slot: Slot) -> tuple[str, Result, list[Row]]:
    """Start a server and put a load on it for each number of requests at a time. Returns and raises as offline."""
    task = case.task
    arguments = case.options.arguments(case.folder, implementation, case.model, task.batches)
    if compilation := arguments.pop("compilation_config", None):
        compilation.pop("cudagraph_capture_sizes")  # requests come and go: all of vLLM's batch sizes
        arguments |= {"compilation_config": compilation} if compilation else {}
    caches = case.caches_of(implementation)
    loads = [
        serve.Load(batch, task.tokens_in, task.tokens_out, task.vocabulary, streamed)
        for batch in task.batches
        for streamed in (True, False)
    ]
    variables = environment(implementation, caches, case.place.plugin)
    log, start = case.place.log(f"{case}-{implementation.name}-serve"), caches.start()
    result = serve.serve(arguments, variables, log, case.limit, loads, slot.turns)
    caches.started()
    parts = phases.of_start(read(log), result.start_s, 0.0)
    say(f"{case}, {implementation.name}, {start} start: {result.start_s:.1f} s ({phases.text(parts)})")
    rows: list[Row] = [{"phase": "start", "seconds": round(result.start_s, 2), "start": start, "parts": parts}]
    for load, figures in zip(loads, result.served, strict=False):
        point = {"batch": load.at_a_time, "tokens_in": load.tokens_in, "tokens_out": load.tokens_out}
        rows.append({"phase": "serve", **point, **figures})
    return checked(implementation, result.kernels, rows), result, rows


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
        row["kernels"] = {cls.rpartition(".")[2]: n for found in kernels.values() for cls, n in found.items()}
    return name


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # which leaves no engine behind
    main()
