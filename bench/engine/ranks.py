"""vLLM with w4gemm on several GPUs: ``python -m bench.engine.ranks --model qwen3-30b-a3b=gptq-int4-g128 --layers 4``.

A checkpoint of random numbers is served by the tensor parallel processes of one engine, with ``--expert-parallel`` each
with some experts whole, and with ``--rebalance`` with experts that vLLM moves. Its answers are compared with those of
an engine with vLLM's own kernels, before and after experts moved; then each process takes new weights. With
``--decode``, engines whose experts move and engines whose do not, with w4gemm and with vLLM's own kernels, are timed by
turns, each in a process of its own.

Needs vLLM and as many GPUs. Rows go to bench/results/engine_pair.jsonl, with ``phase`` "start", "answers", "moves",
"decode", "prefill" and "updates", as those of bench.engine.pair and bench.engine are; ``seconds`` of updates are those
of the slowest process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.engine import inside, pair, turns
from bench.engine.implementations import DEFAULT, OURS, known_as
from bench.engine.launch import turn
from bench.engine.models import Model
from bench.engine.offline import moves
from bench.engine.worker import Inspection
from bench.rows import Row

import w4gemm
from w4gemm.console.options import positive

EXTENSION = "bench.engine.ranks.RankInspection"
_MOST_ANSWERS = 12
"""Answers until vLLM must have moved experts."""


class RankInspection(Inspection):
    """Methods of a worker, which each rank runs on its own."""

    reload_weights: Callable[..., object]

    def update_rank(self, name: str, config: Row, by_reload: bool, seed: int) -> Row:
        """Take new weights, and return what :func:`inside.update` does, and the addresses of all tensors."""
        model = self.model_runner.get_model()
        llm = SimpleNamespace(collective_rpc=lambda method, kwargs: getattr(self, method)(**kwargs))
        row = inside.update(llm, model, inside.quantized(Model(name, config)), by_reload, seed, 24)
        return row | {"bytes": inside.allocated()}

    def addresses(self) -> list[int]:
        return [p.data_ptr() for p in self.model_runner.get_model().parameters() if p.numel()]

    def reload_rank(self, path: str) -> float:
        """Load a checkpoint anew; return the seconds."""
        begun = time.perf_counter()
        self.reload_weights(weights_path=path)
        return time.perf_counter() - begun


class RanksEngine(pair.Engine):
    """vLLM whose workers are processes of their own."""

    def look(self) -> None:
        ranks = self.llm.collective_rpc("inspect_kernels")
        classes = {cls for rank in ranks for classes in rank.values() for cls in classes}
        self.name = "+".join(sorted({known_as(cls) for cls in classes}))


_own: dict[str, RanksEngine] = {}
"""The one engine of a process that :class:`Apart` started, under "engine"."""


class Apart:
    """An engine in a process of its own, which starts at once."""

    def __init__(self, model: Model, folder: Path, kernels: str, args: argparse.Namespace, moves: bool = False) -> None:
        self.kernels, self.moves, self.mode = kernels, moves, mode_of(args, moves)
        self._pool, self._seconds = ProcessPoolExecutor(1, get_context("spawn")), args.seconds
        feature = plain(args) | (balanced(args) if moves else {})
        self._started = self._pool.submit(_start, model, folder, kernels, args, feature)

    def label(self) -> str:
        """Return the names of its kernels and mode, once it has started; raises what ended its start."""
        return f"{self._started.result(self._seconds)} {self.mode}"

    def answer(self, prompts: list[list[int]]) -> pair.Answers:
        return self._pool.submit(_answer, prompts).result()

    def generate(self, requests: list[Row], params: Any) -> list[Any]:
        """Answer requests; return nothing, which takes no time to send."""
        return self._pool.submit(_generate, requests, params).result()

    def sum_experts(self) -> list[Any]:
        return self._pool.submit(_sum_experts).result()


def _start(model: Model, folder: Path, kernels: str, args: argparse.Namespace, feature: Row) -> str:
    _own["engine"] = RanksEngine(model, folder, kernels, args, feature)
    return _own["engine"].name


def _answer(prompts: list[list[int]]) -> pair.Answers:
    return _own["engine"].answer(prompts)


def _generate(requests: list[Row], params: Any) -> list[Any]:
    _own["engine"].generate(requests, params)
    return []


def _sum_experts() -> list[Any]:
    return _own["engine"].llm.collective_rpc("sum_experts")


def plain(args: argparse.Namespace) -> Row:
    """Return the arguments of ``vllm.LLM`` of every engine."""
    arguments: Row = {"tensor_parallel_size": args.gpus, "worker_extension_cls": EXTENSION}
    return arguments | ({"enable_expert_parallel": True} if args.expert_parallel else {})


def balanced(args: argparse.Namespace) -> Row:
    """Return those of an engine whose experts move."""
    if not args.rebalance:
        return {}
    settings = {"window_size": args.rebalance, "step_interval": args.rebalance}
    settings |= {"num_redundant_experts": args.redundant, "use_async": not args.synchronous}
    return {"enable_eplb": True, "eplb_config": settings}


def mode_of(args: argparse.Namespace, moves: bool) -> str:
    """Return the word of rows for an engine. moves: whether its experts do."""
    return "layer" + "+fp8" * args.fp8 + "+tp" + "+ep" * args.expert_parallel + "+eplb" * moves


def timed(engine: RanksEngine, others: Sequence[Apart], model: Model, args: argparse.Namespace) -> Iterator[Row]:
    """Time engines by turns; generate the rows, and where experts of the others moved to meanwhile, and how far their
    answers then are from those before."""
    asked = pair.prompts_of(model)
    before = {other: (other.sum_experts(), other.answer(asked)) for other in others if other.moves}
    generators: dict[str, turns.Generate] = {f"{engine.name} {mode_of(args, bool(args.rebalance))}": engine.generate}
    generators |= {other.label(): other.generate for other in others}
    how_often = turns.Repeats(args.rounds, args.each)
    for row in turns.timed(generators, model.vocabulary, args.decode, args.prefill, how_often, args.request):
        yield row | _facts(row["impl"])
    for other, (loaded, answers) in before.items():
        row = {"phase": "moves"} | moves(loaded, other.sum_experts()) | pair.compared(other.answer(asked), answers)
        yield row | _facts(other.label())


def _facts(label: str) -> Row:
    name, mode = label.split()
    return {"impl": name, "mode": mode, "chosen": name != OURS}


def moved(engine: RanksEngine, first: pair.Answers, loaded: list[Any], asked: list[list[int]]) -> Row:
    """Answer until experts have moved; return where to, and how far answers are from the first ones."""
    row: Row = {}
    for _ in range(_MOST_ANSWERS):
        engine.answer(asked)
        row = moves(loaded, engine.llm.collective_rpc("sum_experts"))
        if row["moved"]:
            break
    return {"phase": "moves"} | row | pair.compared(engine.answer(asked), first)


def updated(engine: RanksEngine, model: Model, count: int, places: list[Any]) -> Row:
    """Return what ``count`` updates with dense weights took on the slowest rank, by ``load_weights`` and
    ``reload_weights`` by turns."""
    rows = []
    for i in range(count):
        rows.append(engine.llm.collective_rpc("update_rank", args=(model.name, dict(model.config), i % 2 == 1, i)))
        engine.answer(pair.prompts_of(model))
    times = [max(rank["seconds"] for rank in ranks) for ranks in rows]
    row: Row = {"phase": "updates", "updates": count, "tensors": len(inside.quantized(model))}
    row |= {"first_seconds": round(times[0], 4)}
    for name, later in (("seconds", times[2::2]), ("reload_seconds", times[3::2])):
        row |= {name: round(statistics.median(later), 4)} if later else {}
    row |= {"ranks_seconds": [round(rank["seconds"], 4) for rank in rows[2 * ((count - 1) // 2)]]}
    row |= {"bits_equal": all(rank["equal"] for ranks in rows for rank in ranks)}
    row |= {"grown_bytes": max(b["bytes"] - a["bytes"] for ranks in rows for a, b in zip(rows[0], ranks, strict=True))}
    return row | {"same_addresses": engine.llm.collective_rpc("addresses") == places}


def reloaded(engine: RanksEngine, folder: Path, first: pair.Answers, loaded: list[Any], asked: list[list[int]]) -> Row:
    """Load the checkpoint anew; return how far answers are from the first ones, and whether each expert is whole."""
    seconds = max(engine.llm.collective_rpc("reload_rank", args=(str(folder),)))
    row: Row = {"phase": "reload", "seconds": round(seconds, 3)}
    if loaded:
        row |= moves(loaded, engine.llm.collective_rpc("sum_experts"))
    return row | pair.compared(engine.answer(asked), first)


def rows_of(model: Model, folder: Path, args: argparse.Namespace) -> Iterator[Row]:
    """Serve a checkpoint; generate the rows of what was seen.

    Raises:
        ValueError: if w4gemm did not take over the layers.
    """
    import vllm

    beside, times = [Apart(model, folder, DEFAULT, args)] if args.against else [], bool(args.decode or args.prefill)
    if times and args.rebalance:
        beside += [Apart(model, folder, OURS, args)]
        beside += [Apart(model, folder, DEFAULT, args, moves=True)] if args.against else []
    engine = RanksEngine(model, folder, OURS, args, plain(args) | balanced(args))
    own = {"impl": engine.name, "engine_version": vllm.__version__, "impl_version": w4gemm.__version__}
    yield own | {"phase": "start", "seconds": round(engine.seconds, 1)}
    if engine.name != OURS and not args.any:
        raise ValueError(f"asked for {OURS}, but the layers got {engine.name}")
    asked, places = pair.prompts_of(model), engine.llm.collective_rpc("addresses")
    loaded = engine.llm.collective_rpc("sum_experts") if args.rebalance else []
    with turn(args.turn):
        first = engine.answer(asked)
        again = pair.compared(engine.answer(asked), first)
    yield own | {"phase": "answers", "same_tokens_as": engine.name} | again
    running = list[Apart]()
    for other in beside:
        try:
            row = {"phase": "answers", "same_tokens_as": other.label()} | pair.compared(first, other.answer(asked))
            running.append(other)
        except Exception as e:  # whatever vLLM's own kernels lack here
            row = {"phase": "failed", "reason": f"{other.kernels} {other.mode}: {type(e).__name__}: {e}"[:300]}
        yield own | row
    if times:
        with turn(args.turn):
            yield from (own | row for row in timed(engine, running, model, args))
    parts: list[Callable[[], Row]] = []
    if args.rebalance:
        parts.append(lambda: moved(engine, first, loaded, asked))
        parts.append(lambda: reloaded(engine, folder, first, loaded, asked))
    if args.updates:
        parts.append(lambda: updated(engine, model, args.updates, places))
        parts.append(lambda: reloaded(engine, folder, first, loaded, asked))
    for part in parts:
        try:
            with turn(args.turn):
                row = part()
        except Exception as e:
            row = {"phase": "failed", "reason": f"{type(e).__name__}: {e}"[:600]}
        yield own | row | {"same_addresses": engine.llm.collective_rpc("addresses") == places}


def parser() -> argparse.ArgumentParser:
    p = pair.parser()
    p.prog, p.description = "python -m bench.engine.ranks", (__doc__ or "").partition("\n\n")[0]
    p.add_argument("--gpus", type=positive, default=2, metavar="N", help="tensor parallel size (%(default)s)")
    p.add_argument("--expert-parallel", action="store_true", help="each GPU has some experts whole")
    p.add_argument("--rebalance", type=int, default=0, metavar="N", help="steps after which experts move (never)")
    p.add_argument("--redundant", type=int, default=0, metavar="N", help="experts that are there twice (%(default)s)")
    p.add_argument("--synchronous", action="store_true", help="the engine waits while experts move")
    p.add_argument("--any", action="store_true", help="layers may be vLLM's")
    p.add_argument("--seconds", type=float, default=180, metavar="S", help="limit of the other engine (%(default)s)")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    mode = mode_of(args, bool(args.rebalance))
    pair.serve(args, {"gpus": args.gpus, "mode": mode, "chosen": False}, rows_of)


if __name__ == "__main__":
    main()
