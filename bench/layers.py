"""Time whole layers of experts with configs forced: ``python -m bench.layers --model qwen3-30b-a3b --tokens 1,8,64``.

What a product takes alone does not say which config is best in a layer, whose launches start early, each while the one
before still runs, and whose router divides rows unevenly. So the whole layer behind the router is timed, with the
launches of bench.engine.layer: as w4gemm chooses; with each of the likeliest configs of gate_up, which gathers the rows
of x or takes a copy of them; and with each of the likeliest of down. All experts are equally likely. Kernels are
compiled first, on all cores.

Rows go to bench/results/layers.jsonl: microseconds of the layer as ``chosen``, and by the config of gate_up, which has
``gathered`` or ``copied`` rows, beside the first config of ``down``; and by that of ``down``, beside the first of
``gathered``. Needs a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench.engine.layer import Forced, Ours, Sizes, drawn, draws_of
from bench.engine.models import model_named
from bench.mixtures.points import best_of
from bench.options import add_out, command, counts, some_of, typed

from w4gemm import WeightFormat, choice
from w4gemm.choice.intervals import plan_rows
from w4gemm.choice.plan import resolve_gather
from w4gemm.console.options import positive
from w4gemm.core.epilogue import PLAIN, Epilogue
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.jit import Unit
from w4gemm.jit.pool import CompilePool
from w4gemm.kernels import config_named
from w4gemm.packing.layouts import layout_for
from w4gemm.tuning import record
from w4gemm.tuning.timing import time_graphs

RESULTS = Path(__file__).parent / "results/layers.jsonl"


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
