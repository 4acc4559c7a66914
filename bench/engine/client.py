"""A client of ``vllm serve`` in a process of its own: ``python -m bench.engine.client``.

It reads its :class:`Part` of a load as a line of JSON, says ``warm`` after the requests that are not counted, waits for
a line, puts the part on the server, and answers with a line of JSON: an :class:`Outcome`. Several clients share a load,
because one Python process reads no more streamed tokens a second than an engine gives.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

HOST = "127.0.0.1"
WARM = "warm"


@dataclass(frozen=True)
class Part:
    """Requests of random prompts to a server of this machine.

    Attributes:
        at_a_time: how many.
        rounds: requests that are counted over those at a time.
        seed: of the prompts, tokens below ``vocabulary``.
    """

    port: int
    at_a_time: int
    rounds: int
    tokens_in: int
    tokens_out: int
    vocabulary: int
    seed: int


@dataclass
class Answer:
    """A streamed answer: the time until its first token, and between chunks of tokens, in seconds."""

    first_token: float = 0.0
    between: list[float] = field(default_factory=list)
    tokens: int = 0


@dataclass
class Outcome:
    """The answers of a part, when it began and ended (``time.monotonic``), or the error that ended it."""

    answers: list[Answer] = field(default_factory=list)
    begun: float = 0.0
    ended: float = 0.0
    error: str = ""

    @classmethod
    def parse(cls, line: str) -> Outcome:
        """Return what a client answered.

        Raises:
            ValueError: if that is no outcome.
        """
        found = json.loads(line)
        return cls(**{**found, "answers": [Answer(**answer) for answer in found["answers"]]})


async def ask(part: Part, gate: asyncio.Semaphore, prompt: list[int]) -> Answer:
    """Return a streamed answer, once the gate lets its request through.

    Raises:
        OSError: if the server refuses or answers with another number of tokens.
    """
    body = {"model": "m", "prompt": prompt, "max_tokens": part.tokens_out, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = Answer()
    async with gate:
        last = start = time.perf_counter()
        async for event in events(part.port, "/v1/completions", body):
            now = time.perf_counter()
            if event.get("error"):
                raise OSError(str(event["error"]))
            if event.get("choices"):
                if answer.first_token:
                    answer.between.append(now - last)
                else:
                    answer.first_token = now - start
                last = now
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
    if answer.tokens != part.tokens_out:
        raise OSError(f"an answer has {answer.tokens} tokens, wanted {part.tokens_out}")
    return answer


async def events(port: int, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Give the events (JSON behind "data: ") that a server of this machine streams as the answer to a POST.

    Raises:
        OSError: if it answers with another status than 200; with what it says.
    """
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        fields = {"Host": HOST, "Content-Type": "application/json", "Content-Length": len(data), "Connection": "close"}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        status = (await reader.readline()).decode().strip()
        while (await reader.readline()).strip():
            pass
        if status.split()[1:2] != ["200"]:
            raise OSError(f"{status or 'no answer'}: {(await reader.read(4096)).decode(errors='replace')}")
        text = b""
        while size := int(await reader.readline(), 16):  # chunks of the answer, which lines may straddle
            text += (await reader.readexactly(size + 2))[:-2]
            *lines, text = text.split(b"\n")
            for line in lines:
                event = line.strip().removeprefix(b"data: ")
                if event not in (b"", b"[DONE]"):
                    yield json.loads(event)
    finally:
        writer.close()


async def put_on(part: Part) -> Outcome:
    """Warm up, wait for a line, and put a part on its server."""
    rng, words = random.Random(part.seed), range(4, part.vocabulary)
    prompts = [rng.choices(words, k=part.tokens_in) for _ in range(part.at_a_time * (part.rounds + 1))]
    gate = asyncio.Semaphore(part.at_a_time)

    async def answers(some: Sequence[list[int]]) -> list[Answer]:
        return await asyncio.gather(*(ask(part, gate, prompt) for prompt in some))

    await answers(prompts[: part.at_a_time])
    print(WARM, flush=True)
    sys.stdin.readline()
    begun = time.monotonic()
    found = await answers(prompts[part.at_a_time :])
    return Outcome(found, begun, time.monotonic())


def main() -> None:
    try:
        outcome = asyncio.run(put_on(Part(**json.loads(sys.stdin.readline()))))
    except Exception as e:  # of the connection, of the server, of what it answers
        outcome = Outcome(error=repr(e))
    print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
