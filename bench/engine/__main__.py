"""Measure implementations inside vLLM: ``python -m bench.engine --model llama-3-8b --impl default w4gemm marlin``.

For each model and format a checkpoint of random numbers is written; then every implementation serves it in a process of
its own, one after the other in mixed order. ``LLM.generate`` is timed at several batch sizes, for a long prompt, and to
the first token; with ``--serve``, ``vllm serve`` under load instead. All answers are greedy. An implementation whose
layers got another kernel than asked for is refused. What fails is a row of phase "failed" with its reason.

``default`` is vLLM's own choice: its rows have the name of the kernel that it chose and ``"chosen": true``. Needs vLLM
and a GPU. Rows go to bench/results/engine.jsonl.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.engine import phases, profile, serve
from bench.engine.checkpoint import tensors_of, write
from bench.engine.implementations import DEFAULT, OURS, Implementation, Kernels
from bench.engine.launch import (
    Caches,
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
from bench.engine.preload import Preloaded
from bench.engine.rows import Answers, Row, add_agreement, rows_of, table

import w4gemm
from w4gemm.console.progress import say
from w4gemm.tuning import record


@dataclass(frozen=True)
class Place:
    """Where engines run.

    Attributes:
        work: folder of checkpoints and of compiled code.
        logs: folder for what engines print.
        plugin: folder with our plugin's metadata, if the package is not installed.
        preloaded: process to fork engines of ``LLM.generate`` from.
    """

    work: Path
    logs: Path
    plugin: Path | None
    preloaded: Preloaded | None

    def log(self, name: str) -> Path:
        """Return a file for what an engine prints, without what another printed before."""
        file = self.logs / f"{name}.log"
        file.unlink(missing_ok=True)
        return file


@dataclass(frozen=True)
class Case:
    """A checkpoint to serve and how.

    Attributes:
        task: what is measured of each implementation; its engine's arguments are added for each.
        serve: True to measure ``vllm serve``, False for ``LLM.generate``.
        starts: how often an engine starts; the last start is measured.
        seconds: limit of each process.
    """

    model: Model
    packing: Packing
    folder: Path
    options: EngineOptions
    task: Task
    serve: bool
    starts: int
    seconds: float
    place: Place

    def __str__(self) -> str:
        return f"{self.model.name}-{self.packing}"

    def caches_of(self, implementation: Implementation) -> Caches:
        """Return the implementation's folders of compiled code for this checkpoint."""
        caches = self.place.work / "caches"
        return Caches(caches / f"{self}-{implementation.name}", caches / "shared")


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    packings = [Packing.parse(text) for text in args.format]
    implementations = [Implementation.parse(text) for text in args.impl]
    cases = [pair for text in args.model for pair in pairs_of(text, packings, args)]
    facts, end = record.facts(), time.monotonic() + args.budget
    if not args.in_order:
        random.Random(facts["utc"]).shuffle(implementations)
    with place_of(args, implementations) as place:
        for model, packing in cases:
            case = case_of(args, model, packing, place)
            common = {"kind": "engine", "run": record.run_name(facts), "engine": "vllm", "model": model.name}
            common |= {"format": str(packing), "dtype": args.dtype, "gpus": args.gpus}
            common["mode"] = "eager" if args.eager else "graphs" if args.no_compile else "default"
            shown: list[Row] = []
            for rows in measure(case, implementations, common, end):
                record.append(args.out, *(row | facts for row in rows))
                shown += rows
            say(f"\n{model.name}, {packing}, {facts['gpu'] or 'no GPU'}\n{table(shown)}")


@contextmanager
def place_of(args: argparse.Namespace, implementations: Sequence[Implementation]) -> Iterator[Place]:
    """Give the place; what is temporary is removed at its end."""
    with ExitStack() as stack:
        work = stack.enter_context(work_folder(args.work))
        logs = args.logs or work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        ours = any(OURS in (i.linear, i.experts) for i in implementations)
        plugin = plugin_metadata(work / "plugin") if ours else None
        preload = not (args.serve or args.fresh)
        preloaded = stack.enter_context(preloaded_vllm(plugin, logs / "preload.log")) if preload else None
        yield Place(work, logs, plugin, preloaded)


def case_of(args: argparse.Namespace, model: Model, packing: Packing, place: Place) -> Case:
    """Write the checkpoint, if it is not there from an earlier run, and return what to do with it."""
    name = f"{model.name}-{packing}"
    folder = place.work / "models" / name
    done = folder / "complete"
    if not done.exists():
        start = time.monotonic()
        size = sum(tensor.nbytes for tensor in tensors_of(model, packing))
        say(f"{name}: {size / 1e9:.1f} GB into {folder}")
        write(model, packing, folder)
        done.touch()
        say(f"{name}: written in {time.monotonic() - start:.1f} s")
    longest = max(args.tokens_in + args.tokens_out, args.prefill + 1)
    options = EngineOptions(
        dtype=args.dtype,
        compiled=not args.no_compile,
        eager=args.eager,
        gpus=args.gpus,
        memory=args.memory,
        max_len=-(-longest // 256) * 256,
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
    return Case(model, packing, folder, options, task, args.serve, args.starts, args.seconds, place)


def measure(case: Case, implementations: Sequence[Implementation], common: Row, end: float) -> Iterator[list[Row]]:
    """Serve one checkpoint with every implementation, and give the rows of each when it is done.

    Args:
        common: fields of all rows.
        end: time (``time.monotonic``) after which none starts.
    """
    reference: tuple[str, Answers] | None = None
    for implementation in implementations:
        start = time.monotonic()
        if start > end:
            say(f"{implementation.name}: not run, the budget is spent")
            continue
        try:
            name, result, rows = (served if case.serve else offline)(case, implementation)
            common = {**common, "engine_version": result.engine_version}
            answers = {point["batch"]: point["tokens"] for point in result.decode}
            if reference:
                add_agreement(rows, answers, *reference)
            reference = reference or (name, answers)
        except EngineError as e:
            name, rows = implementation.name, [{"phase": "failed", "reason": str(e)}]
            say(f"{name} failed: {e}")
        version = w4gemm.__version__ if OURS in name else common.get("engine_version", "")
        own = {"impl": name, "impl_version": version, "chosen": implementation.linear == DEFAULT}
        say(f"{case.model.name}, {case.packing}: {implementation.name} took {time.monotonic() - start:.0f} s")
        yield [common | own | row for row in rows]


def offline(case: Case, implementation: Implementation) -> tuple[str, Result, list[Row]]:
    """Start an engine as often as wanted, measure it at the last start.

    Returns:
        Name of what the layers ran, the last start's result, and rows.

    Raises:
        EngineError: if a start fails, or the layers got other kernels.
    """
    arguments = case.options.arguments(case.folder, implementation, case.model, case.task.batches)
    task = replace(case.task, engine={**arguments, "skip_tokenizer_init": True, "disable_log_stats": True})
    caches = case.caches_of(implementation)
    variables = environment(implementation, caches, case.place.plugin)
    rows: list[Row] = []
    for number in range(1, case.starts + 1):
        start, last = caches.start(), number == case.starts
        log, begun = case.place.log(f"{case}-{implementation.name}-{number}"), time.monotonic()
        result = run_offline(replace(task, start_only=not last), variables, log, case.seconds, case.place.preloaded)
        caches.started()
        started, *found = rows_of(result, task)
        parts = phases.of_start(read(log), result.start_s, result.import_s)
        rows += [{**started, "start": start, "parts": parts}, *found]
        around = time.monotonic() - begun - result.start_s - result.measure_s
        say(f"{case}, {implementation.name}, {start} start: {result.start_s:.1f} s ({phases.text(parts)})")
        say(f"  measured for {result.measure_s:.1f} s; {around:.1f} s before and after, such as for the import of vLLM")
    name = checked(implementation, result.kernels, rows)
    for row in profile.rows_of(result):
        rows.append(row)
        say(f"{name}: {profile.table(row)}")
    return name, result, rows


def served(case: Case, implementation: Implementation) -> tuple[str, Result, list[Row]]:
    """Start a server and put a load on it for each number of requests at a time. Returns and raises as offline."""
    task = case.task
    arguments = case.options.arguments(case.folder, implementation, case.model, task.batches)
    if compilation := arguments.pop("compilation_config", None):
        compilation.pop("cudagraph_capture_sizes")  # requests come and go: all of vLLM's batch sizes
        arguments |= {"compilation_config": compilation} if compilation else {}
    caches = case.caches_of(implementation)
    loads = [serve.Load(batch, task.tokens_in, task.tokens_out, task.vocabulary) for batch in task.batches]
    variables = environment(implementation, caches, case.place.plugin)
    log, start = case.place.log(f"{case}-{implementation.name}-serve"), caches.start()
    facts, found = serve.serve(arguments, variables, log, case.seconds, loads)
    caches.started()
    result = Result(**facts)
    parts = phases.of_start(read(log), result.start_s, 0.0)
    say(f"{case}, {implementation.name}, {start} start: {result.start_s:.1f} s ({phases.text(parts)})")
    rows: list[Row] = [{"phase": "start", "seconds": round(result.start_s, 2), "start": start, "parts": parts}]
    for load, figures in zip(loads, found, strict=True):
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
