"""Time layers of experts for few tokens in one launch beside four: ``python -m bench.expert_layer``. On Hopper.

Cold weights: a CUDA graph of 16 calls, each with other tokens and experts. The result of one launch is held against
that of four. One row of JSON a layer and number of tokens: the medians of a call's microseconds, with the experts given
(``four_us``, ``one_us``) and with the choice by a router's logits, in a launch in front (``choose_four_us``,
``choose_one_us``) or inside (``logits_us``). With ``--invariant`` those of the layer as it runs by itself (``free_us``)
and if it is batch invariant (``invariant_us``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch
from bench.options import command

from w4gemm import QuantizedWeight, Router, W4Experts, WeightFormat, choose_experts
from w4gemm.api.expert_layer import ByIds, ByLogits, Experts, LayerKey
from w4gemm.api.experts import W4GroupedLinear
from w4gemm.choice import prepare
from w4gemm.core.activation import is_gated
from w4gemm.core.problem import Device
from w4gemm.integrations.engines.warmup import ExpertsCall, experts_need
from w4gemm.jit import Unit
from w4gemm.kernels.expert_layer.spec import MOST_TOKENS, ExpertLayer
from w4gemm.tuning import record
from w4gemm.tuning.random_weight import random_weight
from w4gemm.tuning.timing import time_graphs


class Layer(NamedTuple):
    experts: int
    width: int
    features: int
    format: str
    router: Router
    activation: str = "silu_mul"
    biased: bool = False

    def choices(self, x: torch.Tensor, g: torch.Generator) -> tuple[ByLogits, ByIds]:
        """Random logits, and what follows from them."""
        logits = torch.randn(len(x), self.experts, device=x.device, generator=g).to(x.dtype)
        bias = torch.zeros(self.experts, device=x.device) if self.router.scoring == "sigmoid" else None
        return ByLogits(logits, self.router, bias), ByIds(*choose_experts(logits, self.router, bias))


_DEEPSEEK = Router(8, "sigmoid", groups=8, top_groups=4, scale=2.5)
LAYERS = {
    "qwen3-30b": Layer(128, 768, 2048, "int4_g128", Router(8)),
    "gpt-oss-120b": Layer(128, 2880, 2880, "mxfp4", Router(4), "swiglu_oai", True),
    "e256": Layer(256, 512, 2048, "int4_g128", _DEEPSEEK),
    "e256-mxfp4": Layer(256, 512, 2048, "mxfp4", _DEEPSEEK),
    "nemotron-3-nano": Layer(128, 1856, 2688, "int4_g128", Router(6, "sigmoid", scale=2.5), "relu2"),
    "kimi-k2": Layer(384, 2048, 7168, "int4_g32", Router(8, "sigmoid", scale=2.827)),
    "deepseek-v3": Layer(256, 2048, 7168, "int4_g128", _DEEPSEEK),
    "deepseek-v4": Layer(64, 2048, 4096, "mxfp4", Router(6), "silu_mul(limit=10)"),  # of one of four ranks
    "glm-4.5-air": Layer(128, 1408, 4096, "int4_g128", Router(8, "sigmoid")),
    "gpt-oss-20b": Layer(32, 2880, 2880, "mxfp4", Router(4), "swiglu_oai", True),
}
CALLS, DISTINCT = 16, 4


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.expert_layer", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8], help="of a call (default: 1 2 4 8)")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS), help="(default: all)")
    parser.add_argument("--format", help="of the weights, in place of each layer's own")
    parser.add_argument(
        "--invariant", action="store_true", help="time batch-invariant layers, for any number of tokens"
    )
    args = parser.parse_args(argv)
    facts = record.facts()
    formats = {"format": args.format} if args.format else {}
    layers = {name: (layer := LAYERS[name]._replace(**formats), made(layer)) for name in args.layers}
    compile_all(list(layers.values()), args.tokens, args.invariant)
    for name, (layer, experts) in layers.items():
        for tokens in args.tokens:
            kind = "invariant_experts" if args.invariant else "expert_layer"
            row = {"kind": kind, "run": record.run_name(facts), "model": name, "tokens": tokens}
            times = (invariant if args.invariant else measured)(layer, experts, tokens)
            print(json.dumps(row | formats | times | facts), flush=True)


def made(layer: Layer) -> W4Experts:
    """The layer with random weights, of which few experts are distinct."""
    products, rows = [], (1 + is_gated(layer.activation)) * layer.width
    for n, k in ((rows, layer.features), (layer.features, layer.width)):
        format = WeightFormat.of(layer.format)
        few = QuantizedWeight.stack(
            [random_weight(format, n, k, seed, device="cuda") for seed in range(DISTINCT)], layout="mma16"
        )
        several = torch.arange(layer.experts, device="cuda") % DISTINCT
        w = replace(few, tensors=tuple(t[several] for t in few.tensors), experts=layer.experts)
        g = torch.Generator("cuda").manual_seed(n)
        bias = torch.randn(layer.experts, n, device="cuda", generator=g).bfloat16() if layer.biased else None
        products.append(W4GroupedLinear.from_weight(w, bias, dtype=torch.bfloat16))
    return W4Experts(products[0], products[1], activation=layer.activation)


def compile_all(layers: Sequence[tuple[Layer, W4Experts]], counts: list[int], invariant: bool) -> None:
    """Compile what is launched, side by side; invariant: batch-invariant products too."""
    keys, units = [], dict[Unit, None]()
    for layer, experts in layers:
        gate_up, down = (Experts(each.weight, each.bias) for each in (experts.gate_up, experts.down))
        x = torch.zeros(1, layer.features, dtype=torch.bfloat16, device="cuda")
        for choices in layer.choices(x, torch.Generator("cuda")):
            if isinstance(choices, ByLogits):
                units[choices.choice().unit()] = None
            key = LayerKey.of(x, choices, gate_up, down, layer.activation)
            for tokens, in_order in product((m for m in counts if m <= MOST_TOKENS), (False, True)[: 1 + invariant]):
                own = key._replace(tokens=tokens, in_order=in_order)
                units[ExpertLayer.form(Device.of(x.device), *own.parameters()).unit()] = None
        rows = [tokens * layer.router.top_k for tokens in counts]
        for batch_invariant in (False, True)[: 1 + invariant]:
            options = {"bias": layer.biased, "batch_invariant": batch_invariant}
            call = ExpertsCall(x.dtype, [layer.router.top_k], rows, **options)
            need = experts_need(gate_up.weight, down.weight, layer.activation, call, None)
            keys += need.keys
            units |= dict.fromkeys(need.helpers)
    prepare(keys, units)


Call = tuple[torch.Tensor, ByLogits, ByIds]


def calls_of(layer: Layer, tokens: int) -> list[Call]:
    calls = []
    for seed in range(CALLS):
        g = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(tokens, layer.features, device="cuda", generator=g).bfloat16()
        calls.append((x, *layer.choices(x, g)))
    return calls


def invariant(layer: Layer, experts: W4Experts, tokens: int) -> dict[str, float]:
    def run(batch_invariant: bool, call: Call) -> torch.Tensor:
        experts.batch_invariant = batch_invariant
        return experts(call[0], *call[2])

    calls = calls_of(layer, tokens)
    for x, _, (ids, weights) in calls:
        alone = run(True, (x[:1], calls[0][1], ByIds(ids[:1], weights[:1])))
        assert torch.equal(run(True, (x, calls[0][1], ByIds(ids, weights)))[:1], alone)
    free, bound = time_graphs([[lambda c=c, b=b: run(b, c) for c in calls] for b in (False, True)], replays=15)
    return {"free_us": round(free.p50, 2), "invariant_us": round(bound.p50, 2)}


def measured(layer: Layer, experts: W4Experts, tokens: int) -> dict[str, float]:
    calls = calls_of(layer, tokens)

    def run(one_launch: bool, call: Call) -> torch.Tensor:
        experts.one_launch = one_launch
        return experts(call[0], *call[2])

    def chosen_before(one_launch: bool, call: Call) -> torch.Tensor:
        experts.one_launch = one_launch
        x, (logits, router, bias), _ = call
        return experts(x, *choose_experts(logits, router, bias))

    def chosen_inside(one_launch: bool, call: Call) -> torch.Tensor:
        experts.one_launch = one_launch
        return experts.of_logits(call[0], *call[1])

    ours, four, inside = (
        torch.stack([way(one, call) for call in calls]).float()
        for way, one in ((run, True), (run, False), (chosen_inside, True))
    )
    ways = {
        "four_us": (run, False),
        "one_us": (run, True),
        "choose_four_us": (chosen_before, False),
        "choose_one_us": (chosen_before, True),
        "logits_us": (chosen_inside, True),
    }
    times = time_graphs([[lambda c=c, w=w, one=one: w(one, c) for c in calls] for w, one in ways.values()], replays=15)
    row = {name: round(time.p50, 2) for name, time in zip(ways, times, strict=True)}
    errors = {"error": ours, "logits_error": inside}
    return row | {name: round(((y - four).norm() / four.norm()).item(), 4) for name, y in errors.items()}


if __name__ == "__main__":
    main()
