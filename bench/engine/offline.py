"""One engine in a process of its own: ``python -m bench.engine.offline TASK RESULT``, both files of JSON.

The task says what to start and measure (:class:`Task`); the result holds the times and tokens. It is written anew after
each point, so that a process that is ended early leaves what it had measured. The process imports vLLM or SGLang and
nothing of w4gemm: the plugin, if any, is the engine's to load.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_FIRST_TOKENS, _FIRST_TOKENS_S = 25, 0.5
"""The time to first tokens, of which an engine's own work is a part, is taken up to so often or for so long."""
_WARM_UPS, _SETTLED = 8, 0.05
"""A warm-up ends when the time of a run differs by no more than this part from that of the run before, or after so
many runs. One that takes longer than the one before may have compiled more."""
_LEAST_RUNS, _FAR, MORE_RUNS = 3, 0.25, 6
"""A median is trusted if it is that of at least so many runs, of which at most this part differ from it by more than
_SETTLED. Until it is, a point gets up to so many runs more."""

Run = tuple[float, list[list[int]]]
"""Seconds of a batch of requests, and their answers."""


@dataclass(frozen=True)
class Task:
    """Attributes:
    engine: arguments of ``vllm.LLM`` or ``sglang.Engine``.
    vocabulary: prompts are random tokens below it.
    batches: numbers of requests that decode at once.
    tokens_in, tokens_out: of each of these requests.
    prefill: tokens of the prompt whose prefill is timed alone; 0 for none.
    repeat: how often each time is taken at least, after a warm-up whose last two runs count too; the median counts.
    name: of the engine, "vllm" or "sglang".
    """

    engine: dict[str, Any]
    vocabulary: int
    batches: tuple[int, ...] = (1,)
    tokens_in: int = 128
    tokens_out: int = 128
    prefill: int = 0
    repeat: int = 3
    name: str = "vllm"


@dataclass
class Result:
    """Times in seconds, tokens by request."""

    engine_version: str = ""
    start_s: float = 0.0
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    decode: list[dict[str, Any]] = field(default_factory=list)
    """By batch, with the seconds of all runs: ``first_token_s`` to the first tokens, ``total_s`` to the last."""
    prefill_s: list[float] = field(default_factory=list)
    """Seconds of each run of the long prompt."""
    moves: dict[str, Any] = field(default_factory=dict)
    """Fate of experts that vLLM moves between GPUs: :func:`moves`."""
    served: list[dict[str, Any]] = field(default_factory=list)
    """Figures of the loads on a server, in their order."""
    failure: str = ""
    """Why not all that was wanted is there; empty if it is."""

    def save(self, file: Path) -> None:
        """Write the result in one step, so that a reader never sees a partial file."""
        unfinished = file.with_name(f"{file.name}.unfinished")
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.replace(file)


class Engine:
    """vLLM and the requests that it is timed with."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._random = random.Random(1)
        self.llm: Any
        self.version = self.start()

    def start(self) -> str:
        """Start the engine and return its version."""
        import vllm

        self.llm = vllm.LLM(**self.task.engine)
        return vllm.__version__

    def kernels(self) -> dict[str, dict[str, int]]:
        """Return the number of layers by the class that multiplies, see worker.py."""
        return self.llm.collective_rpc("inspect_kernels")[0]

    def prompts(self, count: int, length: int) -> list[dict[str, list[int]]]:
        """Return random prompts; the first words of the vocabulary are special."""
        words = range(4, self.task.vocabulary)
        return [{"prompt_token_ids": self._random.choices(words, k=length)} for _ in range(count)]

    def generate(self, prompts: Sequence[Any], tokens: int) -> Run:
        """Return the seconds of greedy answers of ``tokens`` tokens each, and the answers."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        answers = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return seconds, [list(answer.outputs[0].token_ids) for answer in answers]

    def warm_up(self, prompts: Sequence[Any], tokens: int) -> list[Run]:
        """Generate until two runs take about as long: some kernels are compiled when they are first called, for every
        new number of tokens of an expert.

        Returns:
            These two runs; none if there were no such runs.
        """
        before: Run = 0.0, []
        for _ in range(_WARM_UPS):
            run = self.generate(prompts, tokens)
            if abs(run[0] - before[0]) <= _SETTLED * before[0]:
                return [before, run]
            before = run
        return []

    def timed(self, prompts: Sequence[Any], tokens: int, most: int = 0, seconds: float = 0.0) -> list[Run]:
        """Generate as often as the task wants, and on until the median time is trusted.

        Args:
            most: runs to take, even if the task wants fewer, as long as these took less than ``seconds`` in all.

        Returns:
            All these runs, and before them the two that ended the warm-up.
        """
        runs = self.warm_up(prompts, tokens)
        count, spent = 0, 0.0
        while count < self.task.repeat or (count < most and spent < seconds):
            runs.append(self.generate(prompts, tokens))
            count, spent = count + 1, spent + runs[-1][0]
        more = 0
        while more < MORE_RUNS and not is_trusted([each for each, _ in runs]):
            runs.append(self.generate(prompts, tokens))
            more += 1
        return runs

    def first_token(self, prompts: Sequence[Any]) -> list[float]:
        """Return the seconds of each run until every request has its first token."""
        return [each for each, _ in self.timed(prompts, 1, _FIRST_TOKENS, _FIRST_TOKENS_S)]

    def decode(self, batch: int) -> dict[str, Any]:
        """Time ``batch`` requests: all tokens, and the first alone."""
        prompts = self.prompts(batch, self.task.tokens_in)
        runs = self.timed(prompts, self.task.tokens_out)
        answers = runs[0][1]
        return {
            "batch": batch,
            "first_token_s": self.first_token(prompts),
            "total_s": [each for each, _ in runs],
            "tokens": answers,
            "repeats_itself": all(tokens == answers for _, tokens in runs),
        }

    def prefill(self) -> list[float]:
        """Return the seconds of each run of one long prompt, to its first token."""
        return self.first_token(self.prompts(1, self.task.prefill))


class SglangEngine(Engine):
    """SGLang, which does not say what its layers run."""

    def start(self) -> str:
        import sglang

        self.llm = sglang.Engine(**self.task.engine)
        return sglang.__version__

    def kernels(self) -> dict[str, dict[str, int]]:
        return {}

    def generate(self, prompts: Sequence[Any], tokens: int) -> Run:
        params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        start = time.perf_counter()
        answers = self.llm.generate(input_ids=ids, sampling_params=params)
        return time.perf_counter() - start, [each["output_ids"][:tokens] for each in answers]


ENGINES = {"vllm": Engine, "sglang": SglangEngine}


def is_trusted(seconds: Sequence[float]) -> bool:
    """True if there are enough times, and few of them are far from their median."""
    median = statistics.median(seconds)
    far = sum(abs(each - median) > _SETTLED * median for each in seconds)
    return len(seconds) >= _LEAST_RUNS and far <= _FAR * len(seconds)


def moves(before: Sequence[Any], after: Sequence[Any]) -> dict[str, Any]:
    """Return what became of experts that vLLM moves: ``places`` of experts, over all layers and GPUs; in how many of
    them another expert is now (``moved``); and ``intact``, True if each expert's weights are those that were loaded.

    Args:
        before, after: for each GPU, what ``Inspection.sum_experts`` returned.
    """
    places = moved = 0
    intact = True
    for layer in range(len(before[0])):
        loaded = {number: total for gpu in before for number, total in gpu[layer]}
        for old, new in zip(before, after, strict=True):
            for (was, _), (number, total) in zip(old[layer], new[layer], strict=True):
                places += 1
                moved += was != number
                intact &= loaded.get(number) == total
    return {"places": places, "moved": moved, "intact": intact}


def _shown(seconds: Sequence[float]) -> str:
    median, least, most = statistics.median(seconds), min(seconds), max(seconds)
    return f"{median:.3f} s ({least:.3f} to {most:.3f} s in {len(seconds)} runs)"


def measure(task: Task, file: Path) -> None:
    """Start an engine and measure it; the file has its result, which is whole if there is no failure in it."""
    start = time.perf_counter()
    engine = ENGINES[task.name](task)
    result = Result(engine.version, time.perf_counter() - start, failure="not done")
    result.kernels = engine.kernels()
    print("kernels:", json.dumps(result.kernels), flush=True)
    result.save(file)
    for _ in points(engine, result):
        result.save(file)
    result.failure = ""
    result.save(file)


def points(engine: Engine, result: Result) -> Iterator[None]:
    """Measure what a task asks for, and pause after each point."""
    task = engine.task
    loaded = engine.llm.collective_rpc("sum_experts") if task.engine.get("enable_eplb") else []
    for batch in task.batches:
        result.decode.append(engine.decode(batch))
        newest = result.decode[-1]
        print(f"batch {batch}: {_shown(newest['total_s'])}, first tokens {_shown(newest['first_token_s'])}", flush=True)
        yield
    if task.prefill:
        result.prefill_s = engine.prefill()
        yield
    if loaded:
        result.moves = moves(loaded, engine.llm.collective_rpc("sum_experts"))
        yield


def main(argv: Sequence[str] | None = None) -> None:
    task_file, result_file = map(Path, sys.argv[1:] if argv is None else argv)
    measure(Task(**json.loads(task_file.read_text())), result_file)


if __name__ == "__main__":
    main()
