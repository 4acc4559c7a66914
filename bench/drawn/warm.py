"""Compiling before points are timed: w4gemm's configs, and the kernels of peers that compile at run time.

Peers keep what they compile on disk, but only calls make them compile. So child processes, ``python -m
bench.drawn.warm``, call them before anything is timed, each for the layers that it reads from standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from bench.drawn.points import Drawn
from bench.peers import Prepared, peers_named
from bench.run import random_weight

from w4gemm import WeightFormat
from w4gemm.jit import Unit
from w4gemm.jit.pool import CompilePool

COMPILING_PEERS = ("humming", "quack")
_CHILD = (sys.executable, "-m", "bench.drawn.warm")


class Warmer:
    """Children that compile for point after point. A context manager, which ends them.

    Args:
        processes: how many.
        format, dtype: of the weights and of x, by name.
    """

    def __init__(self, processes: int, format: str, dtype: str, peers: Iterable[str]) -> None:
        self._children: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        self.ready: set[tuple[int, int, int]] = set()
        """(n, k, m) of the points whose kernels are ready."""
        self._seconds: list[float] = []
        names = ",".join(name for name in peers if name in COMPILING_PEERS)
        command = [*_CHILD, format, dtype, names]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        for _ in range(processes if names else 0):
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._children.append(subprocess.Popen(command, env=environment, **pipes))

    def __enter__(self) -> Warmer:
        return self

    def __exit__(self, *error: object) -> None:
        for child in self._children:
            child.kill()
            child.wait()

    def __str__(self) -> str:
        seconds = sum(self._seconds) / max(1, len(self._seconds))
        return f"peers' kernels of {len(self._seconds)} points, {seconds:.0f} s for one"

    def start(self, layers: list[Drawn]) -> None:
        """Hand the points to the children in turn, so that the first layers are ready first."""
        points = [layer._replace(tokens=(m,)) for layer in layers for m in layer.tokens]
        if not self._children:
            self.ready = {(n, k, m) for n, k, (m,) in points}
        for number, child in enumerate(self._children):
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(json.dumps(points[number :: len(self._children)]))
                child.stdin.close()
            self._threads.append(threading.Thread(target=self._listen, args=(child,), daemon=True))
            self._threads[-1].start()

    def in_order(self, works: list[Any], deadline: float) -> Iterator[tuple[Any, bool]]:
        """Yield each work with a ``layer`` when its points are ready, and True; from the deadline on, or when all
        children have ended, those that are not ready, and False."""
        left = list(works)
        while left:
            ready = [work for work in left if self._is_ready(work.layer)]
            late = time.monotonic() > deadline or not any(child.poll() is None for child in self._children)
            if ready or late:
                work = (ready or left)[0]
                left.remove(work)
                yield work, bool(ready)
            else:
                time.sleep(0.1)

    def _is_ready(self, layer: Drawn) -> bool:
        return all((layer.n, layer.k, m) in self.ready for m in layer.tokens)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the children, which share the GPU, and let them go on behind."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)

    def _listen(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:  # peers print as well
            if line.startswith("warm "):
                n, k, m, ms = map(int, line.split()[1:])
                self.ready.add((n, k, m))
                self._seconds.append(ms / 1e3)


def compile_all(units: list[Unit], workers: int, deadline: float) -> set[Unit]:
    """Compile units in their order until the deadline; return those that are in the cache folder then."""
    done: set[Unit] = set()
    with CompilePool(workers) as pool:
        for unit, future in zip(units, pool.submit(units), strict=True):
            try:
                future.result(timeout=max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                break
            except RuntimeError as e:
                print(f"{unit.name} {unit.key} is left out: {e}", flush=True)
                continue
            done.add(unit)
    return done


def main() -> None:
    format, dtype, names = WeightFormat.parse(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3]
    peers = [peer for peer in peers_named(names) if not peer.available()]
    for n, k, tokens in json.load(sys.stdin):
        started = time.monotonic()
        weight = random_weight(n, k, format, [dtype])
        able = [peer for peer in peers if not peer.supports(n, k, format, dtype)]
        forms: list[Prepared] = []
        for peer in able:
            with _said(f"{peer.name} {n}x{k}"):
                forms.append(peer.prepare(weight, dtype))
        for m in tokens:
            for form in forms:
                with _said(f"{n}x{k}, m {m}"):
                    x = torch.randn(m, k, device="cuda").to(form.activations or dtype)
                    form.run(form.weight_of(form.tensors), x, torch.empty(m, n, device="cuda", dtype=torch.bfloat16))
                    torch.cuda.synchronize()
            print("warm", n, k, m, round(1e3 * (time.monotonic() - started)), flush=True)
            started = time.monotonic()
        del weight, forms
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _said(what: str) -> Iterator[None]:
    """Print an error and go on: it comes again where the point is timed, and is a result there."""
    try:
        yield
    except Exception as e:
        print(f"{what}: {e!r:.200}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
