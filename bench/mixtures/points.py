"""One point of bench.grouped, a number of tokens per expert and their division: every implementation, checked and
timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from bench.mixtures.weights import Contender, Mixture
from bench.peers.base import FP8, token_scales
from bench.peers.experts.rows import ends_of
from bench.run import MAX_ERROR, percentiles
from bench.shapes import divide

import w4gemm
from w4gemm import QuantizedWeight, choice
from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.tuning.timing import time_graphs

MAX_QUANTIZED_ERROR = 5e-2
"""Limit for an implementation that quantizes x itself."""
_FEW_TOKENS = 128
"""Tokens per expert from which on fewer replays are enough."""

Call = Callable[[], torch.Tensor]


class Extra(NamedTuple):
    """Things measured beside the chosen configs, and how often."""

    configs: int = 0
    """Number of best-ranked configs."""
    replays: int = 9
    """Timed replays of each graph; five at most of more than 128 tokens per expert."""


class Candidate(NamedTuple):
    """An implementation at one point."""

    name: str
    version: str
    config: str
    calls: list[Call]
    """One for each copy of the weights, at least two."""
    limit: float
    """Largest relative error that is timed."""


def measure(
    mixtures: Sequence[Mixture], m: int, routing: str, dtype: torch.dtype, extra: Extra = Extra()
) -> list[dict[str, Any]]:
    """Return a row for each implementation and format whose output is right, and for each config asked for."""
    rows: list[dict[str, Any]] = []
    graphs: list[Sequence[Callable[[], object]]] = []
    for mixture in mixtures:
        point = Point(mixture.weight, divide(routing, m, mixture.weight.experts), dtype)
        for candidate in candidates(point, mixture, extra):
            if (row := point.checked(candidate)) is not None:
                rows.append(row)
                graphs.append(candidate.calls)
    replays = extra.replays if m <= _FEW_TOKENS else min(5, extra.replays)
    for row, time in zip(rows, time_graphs(graphs, replays), strict=True):
        row |= percentiles(time)
    return rows


class Point:
    """Activations in order of their experts, and where results go.

    Attributes:
        xs: two (rows, k) in the products' dtype, which calls alternate.
        wide: the same in bf16.
        out: bf16 (rows, n).
    """

    def __init__(self, w: QuantizedWeight, counts: list[int], dtype: torch.dtype) -> None:
        self.w, self.counts, self.dtype, self.total = w, counts, dtype, sum(counts)
        device = w.device
        self.xs = [torch.randn(self.total, w.k, device=device).to(dtype) for _ in range(2)]
        self.wide = [x.bfloat16() for x in self.xs]
        self.scale = token_scales()[: self.total] if dtype == FP8 else None
        self.offsets = ends_of(counts, torch.int32, device)
        self.out = torch.empty(self.total, w.n, device=device, dtype=torch.bfloat16)

    def checked(self, candidate: Candidate) -> dict[str, Any] | None:
        """Return a row without times; None, and print why, if the output is wrong or there is none."""
        name = f"{candidate.name} {self.w.format} {candidate.config}, {self.total} rows"
        try:
            self.out.fill_(torch.nan)
            error = self.error_of(candidate.calls[0]())
        except Exception as e:
            print(f"  {name}: {e!r:.300}", flush=True)
            return None
        if not error < candidate.limit:
            print(f"  {name}: relative error {error:.3g}, not timed", flush=True)
            return None
        row = {"impl": candidate.name, "impl_version": candidate.version, "config": candidate.config}
        return row | {"rel_error": round(error, 6), "format": str(self.w.format)}

    def error_of(self, d: torch.Tensor) -> float:
        """Relative error of d over the first, the last and the most used expert; infinite if d has a NaN."""
        if bool(d.isnan().any()):
            return torch.inf
        ends = list(itertools.accumulate(self.counts, initial=0))
        looked = {0, self.w.experts - 1, max(range(self.w.experts), key=self.counts.__getitem__)}
        worst = 0.0
        for e in looked:
            r = slice(ends[e], ends[e + 1])
            if self.counts[e]:
                exact = self.xs[0][r].float() @ self.w.expert(e).dequantize().T
                worst = max(worst, ((d[r].float() - exact).norm() / exact.norm()).item())
        return worst


def candidates(point: Point, mixture: Mixture, extra: Extra) -> Iterator[Candidate]:
    """Yield each implementation of one format; print why one is left out."""
    yield from of_w4gemm(point, mixture.copies, extra)
    for contender in mixture.contenders:
        try:
            yield of_peer(point, contender)
        except Exception as e:  # a peer's failure is a result, not the end of the run
            print(f"  {contender.peer.name} {point.w.format}, {point.total} rows: {e!r:.300}", flush=True)


def of_peer(point: Point, contender: Contender) -> Candidate:
    prepared, copies = contender.prepared, contender.copies
    run = prepared.routed(point.counts)
    xs = point.wide if prepared.activations == torch.bfloat16 else point.xs

    def call(i: int) -> Call:
        return lambda: run(copies[i % len(copies)], xs[i % 2], point.out)

    limit = MAX_QUANTIZED_ERROR if prepared.activations else MAX_ERROR
    calls = [call(i) for i in range(max(2, len(copies)))]
    return Candidate(contender.peer.name, contender.peer.version(), prepared.note, calls, limit)


def of_w4gemm(point: Point, copies: list[QuantizedWeight], extra: Extra) -> Iterator[Candidate]:
    """Yield the default, and the configs asked for."""
    w, total, dtype, numbers = point.w, point.total, point.dtype, range(max(2, len(copies)))

    def ours(i: int, config: str | None) -> Call:
        return lambda: w4gemm.grouped_linear(
            point.xs[i % 2],
            copies[i % len(copies)],
            point.offsets,
            token_scale=point.scale,
            out=point.out,
            config=config,
        )

    def candidate(name: str, config: str, calls: list[Call]) -> Candidate:
        return Candidate(name, w4gemm.__version__, config, calls, MAX_ERROR)

    epilogue = Epilogue(token_scale=dtype == FP8)
    plan = str(choice.plan_for(choice.PlanKey.of(w.packed, total, dtype, w.device, epilogue)))
    yield candidate("w4gemm", plan, [ours(i, None) for i in numbers])
    shape = (total, w.n, w.k, dtype, w.format, w.layout)
    for config in best_of(GemmProblem(*shape, epilogue, Device.of(w.device), experts=w.experts), extra.configs):
        yield candidate("w4gemm_config", config, [ours(i, config) for i in numbers])


def best_of(problem: GemmProblem, count: int) -> list[str]:
    """Return the ``count`` best-ranked configs, at most three per kernel and tile_m."""
    names: list[str] = []
    seen: dict[tuple[str, int], int] = {}
    for name in choice.configs(problem) if count else ():
        kernel, _, config = name.partition("/")
        key = kernel, GemmConfig.parse(config).tile_m
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= 3 and len(names) < count:
            names.append(name)
    return names
