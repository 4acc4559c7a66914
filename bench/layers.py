"""Time whole layers of experts with configs forced: ``python -m bench.layers --model qwen3-30b-a3b --tokens 1,8,64``.

What a product takes alone does not say which config is best in a layer, whose launches start early, each while the one
before still runs, and whose router divides rows unevenly. So the whole layer behind the router is timed: as w4gemm
chooses; with each of the likeliest configs of gate_up, which gathers the rows of x or takes a copy of them; and with
each of the likeliest of down. All experts are equally likely. Several draws of tokens alternate in a CUDA graph, over
two layers of weights, which are larger than L2. Kernels are compiled first, on all cores.

Rows go to bench/results/layers.jsonl: microseconds of the layer as ``chosen``, and by the config of gate_up, which has
``gathered`` or ``copied`` rows, beside the first config of ``down``; and by that of ``down``, beside the first of
``gathered``. Needs a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench.engine.models import Model, model_named
from bench.mixtures.points import best_of
from bench.options import add_out, command, counts, some_of, typed

from w4gemm import QuantizedWeight, WeightFormat, choice, combine, route
from w4gemm.api.product import launch
from w4gemm.choice import plan_rows
from w4gemm.choice.plan import resolve_gather
from w4gemm.console.options import positive
from w4gemm.core.epilogue import PLAIN, Epilogue, EpilogueOperands
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.jit import Unit
from w4gemm.jit.pool import CompilePool
from w4gemm.kernels import Operands, config_named
from w4gemm.kernels.arguments import ExpertRows
from w4gemm.packing.layouts import layout_for
from w4gemm.tuning import record
from w4gemm.tuning.timing import time_graphs

RESULTS = Path(__file__).parent / "results/layers.jsonl"
_LAYERS = 2
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names that models' configs have for the number of experts."""
Call = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer."""

    experts: int
    top_k: int
    hidden: int
    width: int

    @classmethod
    def of(cls, model: Model) -> Sizes:
        """Return those of a model's mixture; KeyError if it has none."""
        c = model.config
        experts = next((name for name in _EXPERTS if name in c), _EXPERTS[0])
        width = c.get("moe_intermediate_size", c["intermediate_size"])
        return cls(c[experts], c["num_experts_per_tok"], c["hidden_size"], width)


class Forced(NamedTuple):
    """Configs of a layer's products, and where the rows of x come from, in place of what is chosen."""

    gate_up: str = ""
    """Config as :func:`w4gemm.linear` takes it, or the empty string for the choice."""
    down: str = ""
    copied: bool = False
    """True to copy the rows of x before gate_up."""


class Draw(NamedTuple):
    """Tokens and what a router chose for them."""

    x: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor


def drawn(sizes: Sizes, tokens: int, seed: int, device: str) -> Draw:
    """Draw tokens whose experts are all equally likely."""
    g = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, sizes.hidden, device=device, generator=g).bfloat16()
    ids = torch.rand(tokens, sizes.experts, device=device, generator=g).topk(sizes.top_k).indices.int()
    return Draw(x, ids, torch.rand(tokens, sizes.top_k, device=device, generator=g))


def draws_of(tokens: int) -> int:
    """Return how many draws alternate; few tokens choose few experts, so that more draws are needed to leave L2."""
    return 24 if tokens <= 4 else 12 if tokens <= 16 else 6


class Ours:
    """w4gemm's layers, as the plugin launches them."""

    def __init__(self, sizes: Sizes, device: str, format: str = "int4_g128", activation: str = "silu_mul") -> None:
        self.sizes, self.device, self.gated = sizes, device, Epilogue(activation=activation)
        shapes = (2 * sizes.width, sizes.hidden), (sizes.hidden, sizes.width)
        self.layers = [
            [self._stack(*shape, WeightFormat.parse(format), device) for shape in shapes] for _ in range(_LAYERS)
        ]

    def _stack(self, n: int, k: int, format: WeightFormat, device: str) -> QuantizedWeight:
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
        if format.scale == "e8m0":
            scales = torch.randint(118, 124, (n, k // format.group_size), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        else:
            scales = (torch.rand(n, k // format.group_size) * 0.01 + 0.002).bfloat16()
        one = QuantizedWeight.from_codes(format, codes, scales).to(device).repack()
        each = self.sizes.experts
        tensors = tuple(t.unsqueeze(0).repeat(each, *[1] * t.dim()) for t in one.tensors)
        return replace(one, experts=each, tensors=tensors)

    def call(self, draw: Draw, layer: int, forced: Forced = Forced()) -> Call:
        (gate_up, down), (x, ids, scores) = self.layers[layer], draw
        rows = ids.numel()
        hidden, d = (x.new_empty(rows, columns) for columns in (self.sizes.width, self.sizes.hidden))
        y = torch.empty_like(x)

        def run() -> torch.Tensor:
            routing = route(ids, self.sizes.experts)
            first, end = routing.m_offsets[:-1], routing.m_offsets[1:]
            operands = Operands(x, gate_up.tensors, hidden, rows=ExpertRows(first, end, routing.tokens))
            if forced.copied:
                operands = operands.gathered_first()
            launch(gate_up.packed, operands, self.gated, forced.gate_up)
            settled = ExpertRows(first, end, settled=1)
            operands = Operands(hidden, down.tensors, d, EpilogueOperands(), settled)
            launch(down.packed, operands, PLAIN, forced.down)
            return combine(d, routing.row_of_choice, scores, out=y, settled=True)

        return run


class Layer(NamedTuple):
    """A model's layer of experts, as it is measured."""

    sizes: Sizes
    format: str = "int4_g128"
    activation: str = "silu_mul"


LAYERS = {
    "qwen3-30b-a3b": Layer(Sizes.of(model_named("qwen3-30b-a3b"))),
    "gpt-oss-20b": Layer(Sizes.of(model_named("gpt-oss-20b")), "e2m1_g32_e8m0", "swiglu_oai(alpha=1.702, limit=7)"),
    "mixtral-8x7b": Layer(Sizes.of(model_named("mixtral-8x7b"))),
    "deepseek-v3": Layer(Sizes.of(model_named("deepseek-v3-5-layers"))),
}


class Candidates(NamedTuple):
    """Names of the likeliest configs of a layer's products, the likeliest first."""

    gathered: list[str]
    """Configs of gate_up, if it gathers the rows of x."""
    copied: list[str]
    """Configs of gate_up, if it takes a copy of them."""
    down: list[str]

    def combinations(self) -> dict[str, dict[str, Forced]]:
        """Return what is timed besides the choice, by the field of a row and the config."""
        gate_up, down = self.gathered[0], self.down[0]
        return {
            "gathered": {each: Forced(each, down) for each in self.gathered},
            "copied": {each: Forced(each, down, copied=True) for each in self.copied},
            "down": {each: Forced(gate_up, each) for each in self.down},
        }


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.layers", __doc__)
    parser.add_argument(
        "--model", type=typed(some_of(*LAYERS)), default=",".join(LAYERS), help="some of %(default)s (default: all)"
    )
    parser.add_argument(
        "--tokens", type=typed(counts), default="1,8,32,64,128,256", help="of a call (default: %(default)s)"
    )
    parser.add_argument(
        "--configs", type=positive, default=4, metavar="N", help="of gate_up; half as many of down (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further point after so long")
    add_out(parser, RESULTS)
    args = parser.parse_args(argv)
    started, facts, device = time.monotonic(), record.facts(), Device.of("cuda")
    points = {(name, tokens): problems(LAYERS[name], tokens, device) for name in args.model for tokens in args.tokens}
    configs = {point: candidates(*both, args.configs) for point, both in points.items()}
    units = {unit for point, both in points.items() for unit in units_of(*both, configs[point])}
    with CompilePool() as pool:
        for future in pool.submit(units):
            future.result()
    print(f"{len(units)} kernels: at {time.monotonic() - started:.0f} s", flush=True)
    for name in args.model:
        layer = LAYERS[name]
        ours = Ours(layer.sizes, "cuda", layer.format, layer.activation)
        for tokens in args.tokens:
            if time.monotonic() - started > args.seconds:
                print(f"{args.seconds:.0f} s are over", flush=True)
                return
            us = times(ours, configs[name, tokens], tokens)
            common = {"kind": "layer", "run": record.run_name(facts), "model": name, "format": layer.format}
            record.append(args.out, {**common, "tokens": tokens, **us, **facts})
            print(line(name, tokens, us), flush=True)
        del ours  # before the next layer takes its memory


def problems(layer: Layer, tokens: int, device: Device) -> tuple[GemmProblem, GemmProblem]:
    """Return the products of a layer: gate_up, which gathers, and down."""
    sizes, format = layer.sizes, WeightFormat.parse(layer.format)
    layout = layout_for(device, format, torch.bfloat16)
    rows = plan_rows(tokens * sizes.top_k, sizes.experts)

    def product(n: int, k: int, epilogue: Epilogue, gathered: bool) -> GemmProblem:
        each = (rows, n, k, torch.bfloat16, format, layout, epilogue, device)
        return GemmProblem(*each, experts=sizes.experts, gathered=gathered)

    gated = Epilogue(activation=layer.activation)
    return product(2 * sizes.width, sizes.hidden, gated, True), product(sizes.hidden, sizes.width, PLAIN, False)


def candidates(gate_up: GemmProblem, down: GemmProblem, count: int) -> Candidates:
    """Return ``count`` configs of gate_up, and half as many of its copy and of down."""
    half = max(1, count // 2)
    in_order = replace(gate_up, gathered=False)
    return Candidates(best_of(gate_up, count), best_of(in_order, half), best_of(down, half))


def units_of(gate_up: GemmProblem, down: GemmProblem, configs: Candidates) -> list[Unit]:
    """Return the kernels of the configs, and of the choice."""
    named = [(gate_up, name) for name in configs.gathered]
    named += [(replace(gate_up, gathered=False), name) for name in configs.copied]
    named += [(down, name) for name in configs.down]
    units = [choice.choose(problem).unit for problem in (resolve_gather(gate_up), down)]
    for problem, name in named:
        kernel, config = config_named(name)
        units.append(kernel.unit(problem, config))
    return [unit for unit in units if unit is not None]


def times(ours: Ours, configs: Candidates, tokens: int) -> dict[str, Any]:
    """Return the microseconds of a row."""
    draws = [drawn(ours.sizes, tokens, seed, ours.device) for seed in range(draws_of(tokens))]
    combinations = configs.combinations()
    forced = list(dict.fromkeys([Forced(), *(each for group in combinations.values() for each in group.values())]))
    graphs = [[ours.call(draw, i % len(ours.layers), each) for i, draw in enumerate(draws)] for each in forced]
    timed = time_graphs(graphs, replays=9 if tokens <= 128 else 7)
    us = {each: round(time.p50, 2) for each, time in zip(forced, timed, strict=True)}
    by_config = {field: {name: us[each] for name, each in group.items()} for field, group in combinations.items()}
    return {"chosen": us[Forced()], **by_config}


def line(name: str, tokens: int, us: dict[str, Any]) -> str:
    """Return a line: the choice, and the fastest config of each kind."""
    fastest = {field: min(us[field].items(), key=lambda item: item[1]) for field in ("gathered", "copied", "down")}
    best = "; ".join(f"{field} {time} with {config}" for field, (config, time) in fastest.items())
    return f"{name}, {tokens} tokens: chosen {us['chosen']}; {best}"


if __name__ == "__main__":
    main()
