"""Measure the order of tokens' choices by expert: ``python -m bench.routing --tokens 1,64,8192``.

For every mixture and number of tokens, each timed in a CUDA graph over several draws, all experts equally likely:

- ``w4gemm``: ``route``;
- ``w4gemm_config``: its kernel in one CTA, and in a cluster of CTAs;
- ``torch``: PyTorch's operators.

Rows go to bench/results/routing.jsonl. Needs a GPU that the kernel runs on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench.options import add_out, command, counts, typed
from bench.run import percentiles

from w4gemm import route
from w4gemm.api.routing import in_pytorch, sorted_by
from w4gemm.core.problem import Device
from w4gemm.jit import compiled
from w4gemm.kernels.expert_route.spec import MOST_CHOICES, ExpertRoute
from w4gemm.tuning import record
from w4gemm.tuning.timing import time_graphs

RESULTS = Path(__file__).parent / "results/routing.jsonl"
MIXTURES = ((8, 2), (128, 8), (896, 16))
"""Experts, and those of a token: Mixtral-8x7B, Qwen3-30B-A3B, Kimi-K3."""
_DRAWS = 4
_ROUNDS = 8
"""Calls of each draw in a graph."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.routing", __doc__)
    parser.add_argument(
        "--tokens",
        type=typed(counts),
        default="1,8,64,128,256,512,1024,8192,16384,32768",
        help="of a call (default: %(default)s)",
    )
    add_out(parser, RESULTS)
    args = parser.parse_args(argv)
    facts, device = record.facts(), Device.of("cuda")
    for (experts, top_k), tokens in itertools.product(MIXTURES, args.tokens):
        common = {"kind": "time", "run": record.run_name(facts), "work": "route", "experts": experts, "top_k": top_k}
        rows = measure(device, experts, top_k, tokens)
        record.append(args.out, *(common | {"tokens": tokens} | row | facts for row in rows))
        times = ", ".join(f"{row['impl']} {row['config']}".strip() + f" {row['us_p50']}" for row in rows)
        print(f"{experts} experts, {tokens} x {top_k} choices: {times} us", flush=True)


def measure(device: Device, experts: int, top_k: int, tokens: int) -> list[dict[str, Any]]:
    """Return a row for each implementation."""
    draws = [torch.rand(tokens, experts, device="cuda").topk(top_k).indices.int() for _ in range(_DRAWS)]
    runs: list[tuple[str, str, Callable[[torch.Tensor], object]]] = [("w4gemm", "", lambda ids: route(ids, experts))]
    for choices in (1, MOST_CHOICES):
        form = ExpertRoute.of(device, torch.int32, experts, False, choices)
        assert form is not None, f"the kernel does not run on {device.name}"
        sort = compiled(form.unit())
        runs.append(("w4gemm_config", f"{form.ctas} CTAs", lambda ids, sort=sort: sorted_by(sort, ids, experts, None)))
    runs.append(("torch", "", lambda ids: in_pytorch(ids, experts, None)))
    graphs = [[lambda run=run, ids=ids: run(ids) for ids in draws * _ROUNDS] for *_, run in runs]
    return [
        {"impl": name, "config": config} | percentiles(time)
        for (name, config, _), time in zip(runs, time_graphs(graphs, replays=9), strict=True)
    ]


if __name__ == "__main__":
    main()
