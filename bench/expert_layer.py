"""Time layers of experts for few tokens in one launch beside four: ``python -m bench.expert_layer``. On Hopper.

Cold weights: a CUDA graph of 16 calls, each with other tokens and experts. The result of one launch is held against
that of four. One row of JSON a layer and number of tokens: the medians of a call's microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from bench.options import command

from w4gemm import QuantizedWeight, W4Experts, WeightFormat
from w4gemm.api.experts import W4GroupedLinear
from w4gemm.tuning import record
from w4gemm.tuning.timing import time_graphs
from w4gemm.weights.random import random_weight


class Layer(NamedTuple):
    experts: int
    width: int
    features: int
    top_k: int
    format: str
    activation: str = "silu_mul"
    biased: bool = False


LAYERS = {
    "qwen3-30b": Layer(128, 768, 2048, 8, "int4_g128"),
    "e256": Layer(256, 512, 2048, 8, "int4_g128"),
    "gpt-oss-120b": Layer(128, 2880, 2880, 4, "mxfp4", "swiglu_oai", True),
    "kimi-k2": Layer(384, 2048, 7168, 8, "int4_g32"),
}
CALLS, DISTINCT = 16, 4


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.expert_layer", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8], help="of a call (default: 1 2 4 8)")
    args = parser.parse_args(argv)
    facts = record.facts()
    for name, layer in LAYERS.items():
        experts = made(layer)
        for tokens in args.tokens:
            row = {"kind": "expert_layer", "run": record.run_name(facts), "model": name, "tokens": tokens}
            print(json.dumps(row | measured(layer, experts, tokens) | facts), flush=True)


def made(layer: Layer) -> W4Experts:
    """The layer with random weights, of which few experts are distinct."""
    products = []
    for n, k in ((2 * layer.width, layer.features), (layer.features, layer.width)):
        format = WeightFormat.of(layer.format)
        few = QuantizedWeight.stack([random_weight(format, n, k, seed) for seed in range(DISTINCT)], layout="mma16")
        several = torch.arange(layer.experts) % DISTINCT
        w = replace(few, tensors=tuple(t[several].cuda() for t in few.tensors), experts=layer.experts)
        bias = torch.randn(layer.experts, n, device="cuda").bfloat16() if layer.biased else None
        products.append(W4GroupedLinear.from_weight(w, bias, dtype=torch.bfloat16))
    return W4Experts(products[0], products[1], activation=layer.activation)


def measured(layer: Layer, experts: W4Experts, tokens: int) -> dict[str, float]:
    calls = []
    for seed in range(CALLS):
        g = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(tokens, layer.features, device="cuda", generator=g).bfloat16()
        ids = torch.rand(tokens, layer.experts, device="cuda", generator=g).topk(layer.top_k).indices
        calls.append((x, ids, torch.rand(tokens, layer.top_k, device="cuda", generator=g)))

    def run(one_launch: bool, call: tuple[torch.Tensor, ...]) -> torch.Tensor:
        experts.one_launch = one_launch
        out: torch.Tensor = experts(*call)
        return out

    ours, four = (torch.stack([run(way, call) for call in calls]).float() for way in (True, False))
    times = time_graphs([[lambda c=c, way=way: run(way, c) for c in calls] for way in (False, True)], replays=15)
    error = ((ours - four).norm() / four.norm()).item()
    return {"four_us": round(times[0].p50, 2), "one_us": round(times[1].p50, 2), "error": round(error, 4)}


if __name__ == "__main__":
    main()
