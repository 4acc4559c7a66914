"""The load that bench.engine puts on a server, beside a server that streams tokens as vLLM's does."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench.engine import __main__ as program
from bench.engine import serve

SERVER = """
import json, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, TOKENS, REQUESTS = map(int, sys.argv[1:])
here, most, requests, lock = 0, 0, 0, threading.Lock()

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *unused):
        pass

    def answer(self, data, status=200):
        data = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer({"version": "0.26.0"})

    def do_POST(self):
        global here, most, requests
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc":
            assert asked == {"method": "inspect_kernels"}
            return self.answer({"results": [{"linear": {"vllm.machete.MacheteLinearKernel": 8}, "experts": {}}]})
        if len(asked["prompt"]) != 16:
            return self.answer({"error": "too long"}, 400)
        with lock:
            requests += 1
            if requests > REQUESTS:
                time.sleep(600)
            here += 1
            most = max(most, here)
            print(f"at a time: {most}", flush=True)
        if not asked.get("stream"):
            time.sleep(0.005 * TOKENS)
            with lock:
                here -= 1
            self.close_connection = True
            return self.answer({"choices": [{"text": " t" * TOKENS}], "usage": {"completion_tokens": TOKENS}})
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(TOKENS):
            self.say({"choices": [{"text": f" t{i}"}]}, straddle=i == 1)
            time.sleep(0.005)
        self.say({"choices": [], "usage": {"completion_tokens": TOKENS}})
        self.chunk(b"data: [DONE]\\n\\n")
        with lock:
            here -= 1
        self.chunk(b"")
        self.close_connection = True

    def say(self, event, straddle=False):
        text = b"data: " + json.dumps(event).encode() + b"\\n\\n"
        for part in (text[:9], text[9:]) if straddle else (text,):
            self.chunk(part)

    def chunk(self, text):
        self.wfile.write(f"{len(text):x}\\r\\n".encode() + text + b"\\r\\n")
        self.wfile.flush()

ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


@dataclass
class Server:
    """Tokens of a server's answers, 4 of which are asked for; requests that it answers; seconds that it is given."""

    tokens: int = 4
    requests: int = 1000
    seconds: int = 30


def rows(folder: Path, monkeypatch: pytest.MonkeyPatch, tokens_in: int, server: Server) -> list[dict[str, object]]:
    """Rows of a run beside a server."""

    def command(arguments: dict[str, object], port: int) -> list[str]:
        assert Path(str(arguments["model"])).joinpath("config.json").exists()
        return [sys.executable, "-c", SERVER, str(port), str(server.tokens), str(server.requests)]

    monkeypatch.setattr(serve, "command", command)
    options = ["--tiny", "--serve", "--impl", "default", "--batch", "1", "3", "--tokens-in", str(tokens_in)]
    folders = ["--work", str(folder / "work"), "--logs", str(folder / "logs"), "--out", str(folder / "rows.jsonl")]
    program.main([*options, "--tokens-out", "4", "--seconds", str(server.seconds), *folders])
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_a_server_under_load_gives_rows(tmp_path, monkeypatch):
    start, *loads = rows(tmp_path, monkeypatch, 16, Server())
    alone, three = (row for row in loads if row["streamed"])
    whole = [row for row in loads if not row["streamed"]]
    (log,) = (tmp_path / "logs").glob("*.log")
    assert max(log.read_text().splitlines()) == "at a time: 3"
    assert (start["phase"], start["impl"], start["engine_version"]) == ("start", "machete", "0.26.0")
    assert (alone["phase"], alone["batch"], alone["requests"]) == ("serve", 1, 4)
    assert (three["batch"], three["requests"], three["tokens_in"], three["tokens_out"]) == (3, 12, 16, 4)
    for row in (alone, three):  # a busy machine may be late, but never early
        assert 0 < row["tokens_s"] < 1000 * row["batch"] / 5
        assert 0 < row["first_token_ms_p50"] <= row["first_token_ms_p99"]
        assert 0 <= row["between_tokens_ms_p50"] <= row["between_tokens_ms_p99"]
        assert row["between_tokens_ms_p99"] > 4
    for row, streamed in zip(whole, (alone, three), strict=True):
        assert (row["batch"], row["requests"]) == (streamed["batch"], streamed["requests"])
        assert 0 < row["tokens_s"] < 1000 * row["batch"] / 5
        assert 4 * 5 < row["answer_ms_p50"] <= row["answer_ms_p99"]


def test_a_server_that_refuses_or_answers_too_little_fails_with_its_words(tmp_path, monkeypatch):
    start, failed = rows(tmp_path, monkeypatch, 17, Server())
    assert (start["phase"], start["partial"]) == ("start", True)
    assert failed["phase"] == "failed" and "400 Bad Request" in failed["reason"] and "too long" in failed["reason"]
    _, failed = rows(tmp_path / "less", monkeypatch, 16, Server(tokens=3))
    assert "an answer has 3 tokens, wanted 4" in failed["reason"]


def test_a_server_that_is_stopped_by_its_limit_keeps_the_loads_before(tmp_path, monkeypatch):
    """It answers both loads of one request at a time, and hangs in those of three."""
    for seconds in (4, 20, 100):  # a busy machine may not come so far
        actual = rows(tmp_path / str(seconds), monkeypatch, 16, Server(requests=10, seconds=seconds))
        if len(actual) == 4:
            break
    *measured, failed = actual
    assert [(row["phase"], row.get("streamed")) for row in measured] == [
        ("start", None),
        ("serve", True),
        ("serve", False),
    ]
    assert all(row["partial"] and row["impl"] == failed["impl"] == "machete" for row in measured)
    expected = r"ended after \d+ s: 3 requests at a time, streamed: not done at the server's limit"
    assert re.fullmatch(expected, str(failed["reason"]))
