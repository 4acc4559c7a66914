"""``vllm serve`` under load: as many requests at a time as wanted, a new one as soon as one ends.

Answers are streamed, or come whole. Streamed, the one process of the server that writes a chunk for each token of each
answer can be slower than the engine; whole, it is not.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.engine.launch import EngineError, last_error, started, turn
from bench.engine.offline import Result

ROUNDS = 4
"""Requests of a load that are counted over those at a time."""
_HOST = "127.0.0.1"
_FLAGS = {True: "--{}", False: "--no-{}"}


@dataclass
class Answer:
    """Tokens of an answer, and the seconds until it was whole. If it was streamed, also until its first token and
    between chunks of tokens."""

    first_token: float = 0.0
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    whole: float = 0.0


def command(arguments: dict[str, Any], port: int) -> list[str]:
    """Return the command line of a server from the arguments of ``vllm.LLM``."""
    model, *others = arguments.items()
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model[1]), "--served-model-name", "m"]
    words += ["--host", _HOST, "--port", str(port), "--disable-uvicorn-access-log"]
    for name, value in others:
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(_FLAGS[value].format(flag))
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def serve(
    arguments: dict[str, Any],
    variables: dict[str, str],
    log: Path,
    seconds: float,
    loads: Sequence[Load],
    lock: Path | None = None,
) -> Result:
    """Start a server, put every load on it, in :func:`turn` by the file ``lock``, and stop it.

    Returns:
        Facts of the server, and figures by load. If a load fails or is not done within ``seconds``, the figures of
        those before it; ``failure`` says why.

    Raises:
        EngineError: if it does not come up within ``seconds``.
    """
    port, begun = _free_port(), time.monotonic()
    # the development server answers calls of worker.py's methods
    with started(command(arguments, port), {**variables, "VLLM_SERVER_DEV_MODE": "1"}, log) as process:
        seconds_up = _up(process, port, log, seconds)
        base = f"http://{_HOST}:{port}"
        result = Result(_get(base, "/version")["version"], seconds_up)
        result.kernels = _get(base, "/collective_rpc", {"method": "inspect_kernels"})["results"][0]
        try:
            with turn(lock):
                for load in loads:
                    result.served.append(_put_on(load, port, log, begun + seconds - time.monotonic()))
        except EngineError as e:
            result.failure = f"ended after {time.monotonic() - begun:.0f} s: {e}"
    return result


def _up(process: subprocess.Popen[bytes], port: int, log: Path, seconds: float) -> float:
    """Wait until a server is up, and return the seconds that it took.

    Raises:
        EngineError: if it is not up in time.
    """
    start = time.perf_counter()
    while True:
        if process.poll() is not None:
            after = f"after {time.perf_counter() - start:.0f} s"
            raise EngineError(f"the server ended with {process.returncode} {after}: {last_error(log)}")
        if time.perf_counter() - start > seconds:
            raise EngineError(f"the server was not up in {seconds:.0f} s, its limit: {last_error(log)}")
        try:
            urllib.request.urlopen(f"http://{_HOST}:{port}/health", timeout=2).close()
            return time.perf_counter() - start
        except OSError:
            time.sleep(0.2)


def _put_on(load: Load, port: int, log: Path, seconds: float) -> dict[str, Any]:
    """Put a load on a server and return its figures.

    Raises:
        EngineError: if the server does not answer all requests in time.
    """
    what = f"{load.at_a_time} requests at a time, {'streamed' if load.streamed else 'whole'}"
    try:
        return asyncio.run(asyncio.wait_for(load.put_on(port), max(1.0, seconds)))
    except (TimeoutError, asyncio.TimeoutError):
        raise EngineError(f"{what}: not done at the server's limit") from None
    except Exception as e:  # of the connection, of the server, of what it answers
        raise EngineError(f"{what}: {e!r}: {last_error(log)}") from None


@dataclass(frozen=True)
class Load:
    """Requests of random prompts: ``at_a_time`` that are not counted, then ``ROUNDS`` times as many that are.

    Attributes:
        tokens_in, tokens_out: of each request.
        vocabulary: prompts are random tokens below it.
        streamed: True for answers token by token, False for whole ones.
    """

    at_a_time: int
    tokens_in: int
    tokens_out: int
    vocabulary: int
    streamed: bool = True

    async def put_on(self, port: int) -> dict[str, Any]:
        """Return a load's figures, after as many requests at a time that are not counted."""
        rng = random.Random(self.at_a_time)
        prompts = [
            rng.choices(range(4, self.vocabulary), k=self.tokens_in) for _ in range(self.at_a_time * (ROUNDS + 1))
        ]
        gate = asyncio.Semaphore(self.at_a_time)
        await asyncio.gather(*(self._ask(port, gate, prompt) for prompt in prompts[: self.at_a_time]))
        start = time.perf_counter()
        answers = await asyncio.gather(*(self._ask(port, gate, prompt) for prompt in prompts[self.at_a_time :]))
        return figures(answers, time.perf_counter() - start, self.streamed)

    async def _ask(self, port: int, gate: asyncio.Semaphore, prompt: list[int]) -> Answer:
        body = {"model": "m", "prompt": prompt, "max_tokens": self.tokens_out, "temperature": 0, "ignore_eos": True}
        if self.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = Answer()
        async with gate:
            last = start = time.perf_counter()
            async for event in _events(port, "/v1/completions", body):
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
            answer.whole = time.perf_counter() - start
        if answer.tokens != self.tokens_out:
            raise OSError(f"an answer has {answer.tokens} tokens, wanted {self.tokens_out}")
        return answer


async def _events(port: int, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Give what a server of this machine answers to a POST: the events (JSON behind "data: ") that it streams, or the
    JSON of an answer that is whole.

    Raises:
        OSError: if it answers with another status than 200; with what it says.
    """
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(_HOST, port)
    try:
        fields = {"Host": _HOST, "Content-Type": "application/json", "Content-Length": len(data), "Connection": "close"}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        status = (await reader.readline()).decode().strip()
        chunked = False
        while line := (await reader.readline()).strip().lower():
            chunked = chunked or (line.startswith(b"transfer-encoding:") and line.endswith(b"chunked"))
        if status.split()[1:2] != ["200"]:
            raise OSError(f"{status or 'no answer'}: {(await reader.read(4096)).decode(errors='replace')}")
        if not chunked:
            yield json.loads(await reader.read())
            return
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


def figures(answers: Sequence[Answer], seconds: float, streamed: bool) -> dict[str, Any]:
    """Return tokens/s of all answers together, and milliseconds: of streamed ones to and between tokens, of whole ones
    to their end."""
    row: dict[str, Any] = {"requests": len(answers), "streamed": streamed}
    row["tokens_s"] = round(sum(a.tokens for a in answers) / seconds, 1)
    if not streamed:
        return row | _milliseconds("answer", 2, (a.whole for a in answers))
    row |= _milliseconds("first_token", 2, (a.first_token for a in answers))
    return row | _milliseconds("between_tokens", 3, (gap for a in answers for gap in a.between))


def _milliseconds(name: str, digits: int, seconds: Iterable[float]) -> dict[str, float]:
    """Return the median and the 99th percentile of times."""
    ordered = sorted(1e3 * s for s in seconds)
    quantiles = {"p50": statistics.median(ordered), "p99": percentile(ordered, 99)}
    return {f"{name}_ms_{of}": round(ms, digits) for of, ms in quantiles.items()}


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the least number that ``percent`` of all do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind((_HOST, 0))
        return s.getsockname()[1]


def _get(base: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(base + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except (OSError, ValueError) as e:
        raise EngineError(f"{path}: {e}") from None
