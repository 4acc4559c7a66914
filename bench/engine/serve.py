"""``vllm serve`` under load: as many streamed requests at a time as wanted, a new one as soon as one ends.

With hundreds of requests at a time vLLM's own process that streams answers, one per server, may be the bound.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from asyncio.subprocess import Process
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.engine.client import HOST, WARM, Answer, Outcome, Part
from bench.engine.launch import ROOT, EngineError, last_error, started
from bench.engine.turns import Turns

ROUNDS = 4
"""Requests of a load over those at a time."""
_CLIENTS = 8
_CLIENT = (sys.executable, "-m", "bench.engine.client")
_MOST_CHARACTERS = 2**28
"""Characters of a client's line, which has the times of all its answers."""
_FLAGS = {True: "--{}", False: "--no-{}"}


def command(arguments: dict[str, Any], port: int) -> list[str]:
    """Return the command line of a server from the arguments of ``vllm.LLM``."""
    model, *others = arguments.items()
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model[1]), "--served-model-name", "m"]
    words += ["--host", HOST, "--port", str(port), "--disable-uvicorn-access-log"]
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
    turns: Turns | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Start a server, put every load on it, and stop it.

    Args:
        turns: those of other servers that start at the same time; None if there is none.

    Returns:
        Facts of the server (start_s, engine_version, kernels), and figures by load.

    Raises:
        EngineError: if it does not come up, or does not answer, within ``seconds``.
    """
    port, end = _free_port(), time.monotonic() + seconds
    # the development server answers calls of worker.py's methods
    with started(command(arguments, port), {**variables, "VLLM_SERVER_DEV_MODE": "1"}, log) as process:
        with turns.starting() if turns else nullcontext():
            seconds_up = _up(process, port, log, seconds)
        base = f"http://{HOST}:{port}"
        facts = {"start_s": seconds_up, "engine_version": _get(base, "/version")["version"]}
        facts["kernels"] = _get(base, "/collective_rpc", {"method": "inspect_kernels"})["results"][0]
        with turns.measuring() if turns else nullcontext():
            return facts, [_put_on(load, port, log, end - time.monotonic()) for load in loads]


def _up(process: subprocess.Popen[bytes], port: int, log: Path, seconds: float) -> float:
    """Wait until a server is up, and return the seconds that it took.

    Raises:
        EngineError: if it is not up in time.
    """
    start = time.perf_counter()
    while True:
        if process.poll() is not None:
            raise EngineError(f"the server ended with {process.returncode}: {last_error(log)}")
        if time.perf_counter() - start > seconds:
            raise EngineError(f"the server was not up in {seconds:.0f} s: {last_error(log)}")
        try:
            urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=2).close()
            return time.perf_counter() - start
        except OSError:
            time.sleep(0.2)


def _put_on(load: Load, port: int, log: Path, seconds: float) -> dict[str, Any]:
    """Put a load on a server and return its figures.

    Raises:
        EngineError: if the server does not answer all requests in time.
    """
    what = f"{load.at_a_time} requests at a time"
    try:
        outcomes = asyncio.run(asyncio.wait_for(_outcomes(load.parts(port)), max(1.0, seconds)))
    except (TimeoutError, asyncio.TimeoutError):
        raise EngineError(f"{what}: not done in {seconds:.0f} s") from None
    for error in (outcome.error for outcome in outcomes if outcome.error):
        raise EngineError(f"{what}: {error}: {last_error(log)}")
    answers = [answer for outcome in outcomes for answer in outcome.answers]
    return figures(answers, max(o.ended for o in outcomes) - min(o.begun for o in outcomes))


async def _outcomes(parts: Sequence[Part]) -> list[Outcome]:
    """Run a client for each part, and return what they found. All begin to count when all are warm."""
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "cwd": ROOT,
        "limit": _MOST_CHARACTERS,
    }
    clients = [await asyncio.create_subprocess_exec(*_CLIENT, **pipes) for _ in parts]
    try:
        for client, part in zip(clients, parts, strict=True):
            _tell(client, json.dumps(asdict(part)))
        lines = await asyncio.gather(*(_line(client) for client in clients))
        if all(line == WARM for line in lines):
            for client in clients:
                _tell(client, "")
            lines = await asyncio.gather(*(_line(client) for client in clients))
    finally:
        for client in clients:
            if client.returncode is None:
                client.kill()
            await client.wait()
    return [Outcome() if line == WARM else Outcome.parse(line) for line in lines]


def _tell(client: Process, text: str) -> None:
    assert client.stdin is not None
    client.stdin.write(text.encode() + b"\n")


async def _line(client: Process) -> str:
    assert client.stdout is not None
    line = (await client.stdout.readline()).decode().strip()
    return line or json.dumps(asdict(Outcome(error="a client has ended")))


@dataclass(frozen=True)
class Load:
    """Requests of random prompts: ``at_a_time`` of them, ``ROUNDS`` times as many in all."""

    at_a_time: int
    tokens_in: int
    tokens_out: int
    vocabulary: int

    def parts(self, port: int) -> list[Part]:
        """Return the parts of clients that share the load."""
        clients = min(_CLIENTS, self.at_a_time)
        sizes = [len(range(i, self.at_a_time, clients)) for i in range(clients)]
        sizes_of_requests = (self.tokens_in, self.tokens_out, self.vocabulary)
        return [Part(port, size, ROUNDS, *sizes_of_requests, seed) for seed, size in enumerate(sizes)]


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Return tokens/s of all answers together, and milliseconds to and between tokens."""
    first = sorted(1e3 * a.first_token for a in answers)
    between = sorted(1e3 * gap for a in answers for gap in a.between)
    return {
        "requests": len(answers),
        "tokens_s": round(sum(a.tokens for a in answers) / seconds, 1),
        "first_token_ms_p50": round(statistics.median(first), 2),
        "first_token_ms_p99": round(percentile(first, 99), 2),
        "between_tokens_ms_p50": round(statistics.median(between), 3),
        "between_tokens_ms_p99": round(percentile(between, 99), 3),
    }


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the least number that ``percent`` of all do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind((HOST, 0))
        return s.getsockname()[1]


def _get(base: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(base + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except (OSError, ValueError) as e:
        raise EngineError(f"{path}: {e}") from None
