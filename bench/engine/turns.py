"""Whole vLLM engines of this process, timed by turns: decode steps and the prefill of long prompts. See pair.py."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench.engine.rows import spread
from bench.rows import Row

Generate = Callable[[list[Row], Any], list[Any]]
"""From requests and vLLM's sampling parameters to outputs."""
_WARM_UPS = 2


class Repeats(NamedTuple):
    """How often an engine is timed at a point.

    Attributes:
        rounds: in turns with the others; the median counts.
        each: times in a row, of which the median is that of the round.
    """

    rounds: int = 4
    each: int = 1


def timed(
    engines: Mapping[str, Generate],
    vocabulary: int,
    batches: Sequence[int],
    prefills: Sequence[int],
    repeats: Repeats,
    tokens: tuple[int, int] = (128, 128),
) -> Iterator[Row]:
    """Time engines by turns, each round in the opposite order of the one before; generate a row for each point and
    engine.

    Args:
        engines: ``generate`` of each engine, by the name of its kernels.
        vocabulary: prompts are random tokens below it.
        batches: numbers of requests that decode at once.
        prefills: tokens of the prompts whose prefill is timed.
        repeats: how often each engine is timed.
        tokens: of the prompt and of the answer of each request that decodes.
    """
    rng, (tokens_in, tokens_out) = random.Random(1), tokens

    def prompts(count: int, length: int) -> list[Row]:
        return [{"prompt_token_ids": rng.choices(range(4, vocabulary), k=length)} for _ in range(count)]

    for batch in batches:
        requests = prompts(batch, tokens_in)
        times = _by_turns(engines, repeats, lambda generate, requests=requests: _step(generate, requests, tokens_out))
        for name, steps in times.items():
            row: Row = {"phase": "decode", "batch": batch, "tokens_in": tokens_in, "tokens_out": tokens_out}
            row |= {
                "impl": name,
                "runs": repeats.rounds * repeats.each,
                "tokens_s": round(batch / statistics.median(steps), 1),
            }
            yield row | spread("ms_step", [1e3 * step for step in steps])
    for prefill in prefills:
        request = prompts(1, prefill)
        times = _by_turns(engines, repeats, lambda generate, request=request: _seconds(generate, request, 1))
        for name, seconds in times.items():
            row = {"phase": "prefill", "batch": 1, "tokens_in": prefill, "tokens_out": 1, "impl": name}
            yield (
                row
                | {"runs": repeats.rounds * repeats.each}
                | {"tokens_s": round(prefill / statistics.median(seconds), 1)}
                | spread("seconds", seconds)
            )


def _by_turns(
    engines: Mapping[str, Generate], repeats: Repeats, measure: Callable[[Generate], float]
) -> dict[str, list[float]]:
    """Return what ``measure`` gives for each engine in each round, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for generate in engines.values():
        for _ in range(_WARM_UPS):
            measure(generate)
    for i in range(repeats.rounds):
        for name in engines if i % 2 == 0 else reversed(engines):
            times[name].append(statistics.median(measure(engines[name]) for _ in range(repeats.each)))
    return times


def _step(generate: Generate, requests: list[Row], tokens: int) -> float:
    """Return the seconds between two tokens of a request: the time to the first tokens is subtracted."""
    return (_seconds(generate, requests, tokens) - _seconds(generate, requests, 1)) / (tokens - 1)


def _seconds(generate: Generate, requests: list[Row], tokens: int) -> float:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    generate(requests, params)
    return time.perf_counter() - start
